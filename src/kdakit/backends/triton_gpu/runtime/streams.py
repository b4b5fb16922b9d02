"""Launches beside each other: a second stream, and marks where it begins and ends for whoever is `launch.watching`."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar

import torch

FORK, JOIN = "fork", "join"
seen_here: ContextVar[list | None] = ContextVar("seen", default=None)
aside_here: ContextVar[bool] = ContextVar("aside", default=False)


class Fork:
    """A stream beside another one. Its two events are recorded again and again: whoever waits for a later record waits long enough."""

    def __init__(self, main: torch.cuda.Stream):
        self.main, self.second, self.forked, self.joined = main, torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()

    def fork(self) -> None:
        self.forked.record(self.main)
        self.second.wait_event(self.forked)

    def join(self) -> None:
        self.joined.record(self.second)
        self.main.wait_event(self.joined)


_forks: dict[tuple[int, int], Fork] = {}  # by device and stream: one that is being captured has its own


def fork_here() -> Fork:
    main = torch.cuda.current_stream()
    key = main.device_index, main.cuda_stream
    if key not in _forks:
        _forks[key] = Fork(main)
    return _forks[key]


@contextlib.contextmanager
def beside(x: torch.Tensor):
    """Yields a context whose launches run beside the others of this one: they see what came before it, and what follows sees them."""
    if not x.is_cuda:
        yield contextlib.nullcontext
        return
    streams, seen = fork_here(), seen_here.get()

    @contextlib.contextmanager
    def aside():
        token = aside_here.set(True)
        try:
            with torch.cuda.stream(streams.second):
                yield
        finally:
            aside_here.reset(token)

    if seen is not None:
        seen.append(FORK)
    streams.fork()
    try:
        yield aside
    finally:  # a stream that is not joined cannot be captured, and would read memory that others have by then
        streams.join()
        if seen is not None:
            seen.append(JOIN)
