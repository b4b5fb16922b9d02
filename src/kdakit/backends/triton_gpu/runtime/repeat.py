"""A call that comes again: its launches, with other addresses.

Two calls that agree in

    everything but the tensors' values, and of each tensor in shape, strides, dtype, device and address modulo 16

launch the same kernels with the same numbers: these are all that `launch` looks at, and more than Triton specialises on. So the second call
needs its results, one piece of scratch memory, and the launches of the first one, which a `Plan` remembers. Large tensors have memory of
their own, for as long as launches want it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from kdakit import torch_memory
from kdakit.backends.triton_gpu.runtime import launch, streams

APART = 256  # bytes: where tensors may begin in the scratch memory
LARGE = 2**22  # bytes: these are not part of it; with as many a GPU is busy for longer than the host is with them
Tensors = Sequence[Any]  # or None


def plan_of(given: Tensors, made: Tensors, seen: list, shaped: Callable[[list], Any], unread: Tensors = ()) -> Plan | None:
    """How to repeat the launches that were seen; None where it cannot be: a tensor that no launch got was copied first, or made of
    something else, unless it is one of `unread`; of one that was given twice nobody knows which of the two a launch got; a launch that was
    seen as None says so."""
    if None in seen:
        return None
    addresses = [x.data_ptr() for x in given if x is not None]
    used = {x.data_ptr() for step in seen if isinstance(step, launch.RAN) for x in step.tensors if x is not None}
    everything = {*addresses, *(x.data_ptr() for x in made if x is not None)} - {x.data_ptr() for x in unread}
    return Plan(given, made, seen, shaped) if len(set(addresses)) == len(addresses) and used.issuperset(everything) else None


class Plan:
    """Launches of one call. A place is an index into (nothing, the tensors given, those made, scratch ..).

    Large tensors, made or scratch, have memory of their own from their first launch on; scratch until its last one. What runs beside the
    others counts from where the two part until where they meet: before and after, memory may be somebody else's.
    """

    def __init__(self, given: Tensors, made: Tensors, seen: list, shaped: Callable[[list], Any]):
        known = [None, *given, *made]
        # Of one that is in and out, where it is in.
        places = {x.data_ptr(): i for i, x in reversed(list(enumerate(known))) if x is not None}
        sizes: dict[int, int] = {}  # at an address there may be several views of one tensor
        for x in (x for step in seen if isinstance(step, launch.RAN) for x in step.tensors if x is not None):
            sizes[x.data_ptr()] = max(x.nbytes, sizes.get(x.data_ptr(), 0))
        self.steps: list[Any] = []
        self.offsets: list[int | None] = []  # of scratch, in bytes from the beginning of what is shared; None: has its own
        self.shared = 0  # bytes
        large: dict[int, int] = {}  # place: bytes
        for step in seen:
            if not isinstance(step, launch.RAN):
                self.steps.append(step)
                continue
            for x in step.tensors:
                if x is not None and x.data_ptr() not in places:
                    place = places[x.data_ptr()] = len(known) + len(self.offsets)
                    size = -(-sizes[x.data_ptr()] // APART) * APART
                    if size >= LARGE:
                        large[place] = size
                    self.offsets.append(None if size >= LARGE else self.shared)
                    self.shared += size if size < LARGE else 0
            self.steps.append(step._replace(tensors=[0 if x is None else places[x.data_ptr()] for x in step.tensors]))
        self.picks = [_picker(step.tensors) if isinstance(step, launch.RAN) else None for step in self.steps]
        self.shaped, self.first_made = shaped, 1 + len(given)
        self.makers = [_maker(x, given) for x in made]
        own = {self.first_made + i: 0 for i, x in enumerate(made) if x is not None and x.nbytes >= LARGE}
        launched = {place for step in self.steps if isinstance(step, launch.RAN) for place in step.tensors}
        own = {place: size for place, size in own.items() if places[known[place].data_ptr()] == place and place in launched}
        self.late = {place - self.first_made for place in own}  # of those made
        self.begins, self.ends = self._spans(large, own)

    def _spans(self, large: dict[int, int], own: dict[int, int]) -> tuple[dict[int, list[tuple[int, int]]], dict[int, list[int]]]:
        """{step: [(place, bytes)]} where large tensors begin, 0 bytes for one that is made, and {step: [place]} where scratch ends."""
        starts, stops, fork = list(range(len(self.steps))), list(range(len(self.steps))), 0
        for i, step in enumerate(self.steps):
            if step is streams.FORK:
                fork = i
            elif step is streams.JOIN:
                starts[fork:i], stops[fork:i] = [fork] * (i - fork), [i] * (i - fork)
        begins: dict[int, list[tuple[int, int]]] = {}
        ends: dict[int, list[int]] = {}
        for place, size in (large | own).items():
            uses = [i for i, step in enumerate(self.steps) if isinstance(step, launch.RAN) and place in step.tensors]
            begins.setdefault(starts[uses[0]], []).append((place, size))
            if place in large:
                ends.setdefault(stops[uses[-1]], []).append(place)
        return begins, ends

    def __call__(self, given: Tensors) -> Any:
        with launch.on_device(given[0]):  # q
            stream = launch.current_stream(given[0])
            made = [None if i in self.late else make(given) for i, make in enumerate(self.makers)]
            values = [None, *[None if x is None else x.data_ptr() for x in (*given, *made)]]
            if not self.shared:
                self._start([*values, *self.offsets], made, given, stream)
                return self.shaped(made)
            space = torch_memory.take(self.shared, stream)
            try:
                self._start([*values, *[None if offset is None else space + offset for offset in self.offsets]], made, given, stream)
            finally:
                torch_memory.give_back(space)
        return self.shaped(made)

    def _start(self, values: list, made: list, given: Tensors, stream: int) -> None:
        """The launches, each with the memory that begins with it."""
        large: dict[int, torch.Tensor] = {}
        fork = None
        try:
            for i, (step, pick) in enumerate(zip(self.steps, self.picks, strict=True)):
                for place, size in self.begins.get(i, ()):
                    if size:
                        x = large[place] = torch.empty((size // 4,), dtype=torch.float32, device=given[0].device)
                    else:
                        x = made[place - self.first_made] = self.makers[place - self.first_made](given)
                    values[place] = x.data_ptr()
                if step is streams.FORK:
                    fork = streams.fork_here()
                    fork.fork()
                    second = fork.second.cuda_stream
                elif step is streams.JOIN:
                    fork.join()
                    fork = None
                elif isinstance(step, launch.Lent):
                    wide = {i: given[step.tensors[i] - 1].float().contiguous() for i in step.widened}
                    addresses = pick(values)
                    step.again([wide[i].data_ptr() if i in wide else x for i, x in enumerate(addresses)] if wide else addresses)
                else:
                    launch.start(step.compiled, step.grid, pick(values), step.rest, second if step.aside else stream)
                for place in self.ends.get(i, ()):
                    large.pop(place)
        finally:
            if fork is not None:  # as in `beside`
                fork.join()


def _picker(places: Sequence[int]) -> Callable[[list], tuple]:
    """What stands at these places of a list."""
    return itemgetter(*places) if len(places) > 1 else lambda values: tuple(values[i] for i in places)


def _maker(x: torch.Tensor | None, given: Tensors) -> Callable[[Tensors], torch.Tensor | None]:
    """How a later call has a tensor such as x: it was given, or is made like one that was, in half the time that a new one takes."""
    if x is None:
        return lambda given: None
    for i, y in enumerate(given):
        if y is x:
            return itemgetter(i)
    shape, strides, dtype = x.shape, x.stride(), x.dtype
    for i, y in enumerate(given):
        if y is not None and x.is_contiguous() and (y.shape, y.stride(), y.dtype, y.device) == (shape, strides, dtype, x.device):
            return lambda given: torch.empty_like(given[i])
    return lambda given: torch.empty(shape, dtype=dtype, device=given[0].device)
