"""Launches beside each other: a second stream, and marks where it begins and ends for whoever is `launch.watching`."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar

import torch

FORK, FORK_FIRST, MEET, JOIN = "fork", "fork first", "meet", "join"
seen_here: ContextVar[list | None] = ContextVar("seen", default=None)
aside_here: ContextVar[bool] = ContextVar("aside", default=False)


class Fork:
    """A stream beside another one; first: whose programs go before the other's. Its two events are recorded again and again: whoever waits
    for a later record waits long enough."""

    def __init__(self, main: torch.cuda.Stream, first: bool = False):
        second = torch.cuda.Stream(priority=-1) if first else torch.cuda.Stream()
        self.main, self.second, self.forked, self.joined = main, second, torch.cuda.Event(), torch.cuda.Event()

    def fork(self) -> None:
        self.forked.record(self.main)
        self.second.wait_event(self.forked)

    def join(self) -> None:
        self.joined.record(self.second)
        self.main.wait_event(self.joined)


_forks: dict[tuple[int, int, bool], Fork] = {}  # by device and stream: one that is being captured has its own


def fork_here(first: bool = False) -> Fork:
    main = torch.cuda.current_stream()
    key = main.device_index, main.cuda_stream, first
    if key not in _forks:
        _forks[key] = Fork(main, first)
    return _forks[key]


@contextlib.contextmanager
def beside(x: torch.Tensor, first: bool = False):
    """Yields a context whose launches run beside the others of this one: they see what came before it, and what follows sees them. first:
    their programs go before those of the others. Memory of theirs that others use must be asked for outside of it."""
    if not x.is_cuda:
        yield contextlib.nullcontext
        return
    streams, seen = fork_here(first), seen_here.get()

    @contextlib.contextmanager
    def aside():
        token = aside_here.set(True)
        try:
            with torch.cuda.stream(streams.second):
                yield
        finally:
            aside_here.reset(token)

    if seen is not None:
        seen.append(FORK_FIRST if first else FORK)
    streams.fork()
    try:
        yield aside
    finally:  # a stream that is not joined cannot be captured, and would read memory that others have by then
        streams.join()
        if seen is not None:
            seen.append(JOIN)


def meet(x: torch.Tensor, first: bool) -> None:
    """Within `beside`: what follows sees what was launched aside so far; more may be launched there."""
    if x.is_cuda:
        fork_here(first).join()
        if (seen := seen_here.get()) is not None:
            seen.append(MEET)
