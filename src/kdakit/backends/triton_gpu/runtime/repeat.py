"""A call that comes again: its launches, with other addresses.

Two calls that agree in

    everything but the tensors' values, and of each tensor in shape, strides, dtype, device and address modulo 16

launch the same kernels with the same numbers: these are all that `launch` looks at, and more than Triton specialises on. So the second call
needs its results, one piece of scratch memory, and the launches of the first one, which a `Plan` remembers. Large tensors have memory of
their own, which others can use before and after as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kdakit.backends.triton_gpu.runtime import launch, streams

APART = 256  # bytes: where tensors may begin in the scratch memory
LARGE = 2**26  # bytes: these are not part of it
Tensors = Sequence[Any]  # or None


def plan_of(given: Tensors, made: Tensors, seen: list, shaped: Callable[[list], Any]) -> Plan | None:
    """How to repeat the launches that were seen; None where it cannot be: a tensor that no launch got was copied first, or made of
    something else; of one that was given twice nobody knows which of the two a launch got."""
    addresses = [x.data_ptr() for x in given if x is not None]
    used = {x.data_ptr() for step in seen if isinstance(step, launch.Seen) for x in step.tensors if x is not None}
    everything = {*addresses, *(x.data_ptr() for x in made if x is not None)}
    return Plan(given, made, seen, shaped) if len(set(addresses)) == len(addresses) and used.issuperset(everything) else None


class Plan:
    """Launches of one call. A place is an index into (nothing, the tensors given, those made, scratch ..)."""

    def __init__(self, given: Tensors, made: Tensors, seen: list, shaped: Callable[[list], Any]):
        known = [None, *given, *made]
        # Of one that is in and out, where it is in.
        places = {x.data_ptr(): i for i, x in reversed(list(enumerate(known))) if x is not None}
        sizes: dict[int, int] = {}  # at an address there may be several views of one tensor
        for x in (x for step in seen if isinstance(step, launch.Seen) for x in step.tensors if x is not None):
            sizes[x.data_ptr()] = max(x.nbytes, sizes.get(x.data_ptr(), 0))
        self.steps: list[Any] = []
        self.offsets: list[tuple[int, int]] = []  # (piece, bytes from its beginning)
        self.pieces = [0]  # bytes
        for step in seen:
            if not isinstance(step, launch.Seen):
                self.steps.append(step)
                continue
            for x in step.tensors:
                if x is not None and x.data_ptr() not in places:
                    places[x.data_ptr()] = len(known) + len(self.offsets)
                    self.offsets.append(self._place(-(-sizes[x.data_ptr()] // APART) * APART))
            self.steps.append(step._replace(tensors=[0 if x is None else places[x.data_ptr()] for x in step.tensors]))
        self.shaped = shaped
        inside = {id(x): i for i, x in enumerate(given)}
        self.made = [None if x is None else inside.get(id(x), (x.shape, x.dtype)) for x in made]

    def _place(self, size: int) -> tuple[int, int]:
        if size < LARGE:
            self.pieces[0] += size
            return 0, self.pieces[0] - size
        self.pieces.append(size)
        return len(self.pieces) - 1, 0

    def __call__(self, given: Tensors) -> Any:
        first = given[0]  # q
        with launch.on_device(first):
            made = [self._make(how, given, first.device) for how in self.made]
            values = [None, *[None if x is None else x.data_ptr() for x in (*given, *made)]]
            if self.offsets:
                space = [torch.empty((size // 4,), dtype=torch.float32, device=first.device) for size in self.pieces]
                starts = [x.data_ptr() for x in space]
                values += [starts[i] + offset for i, offset in self.offsets]
            self._start(values)
        return self.shaped(made)

    def _start(self, values: list) -> None:
        fork = None
        try:
            for step in self.steps:
                if step is streams.FORK:
                    fork = streams.fork_here()
                    fork.fork()
                    second = fork.second.cuda_stream
                elif step is streams.JOIN:
                    fork.join()
                    fork = None
                else:
                    stream = (second,) if step.aside else ()
                    launch.start(step.compiled, step.grid, [values[i] for i in step.tensors], step.rest, *stream)
        finally:
            if fork is not None:  # as in `beside`
                fork.join()

    def _make(self, how: Any, given: Tensors, device: torch.device) -> torch.Tensor | None:
        if how is None or isinstance(how, int):
            return None if how is None else given[how]
        return torch.empty(how[0], dtype=how[1], device=device)
