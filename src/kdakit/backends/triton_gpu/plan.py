"""A call that comes again: its launches, with other addresses.

Two calls that agree in

    everything but the tensors' values, and of each tensor in shape, strides, dtype, device and address modulo 16

launch the same kernels with the same numbers: these are all that `launch` looks at, and more than Triton specialises on. So the second call
needs its results, one piece of scratch memory, and the launches of the first one, which a `Plan` remembers.
"""

from __future__ import annotations

from typing import Any

import torch

from kdakit.backends.triton_gpu import launch
from kdakit.backends.triton_gpu.config import Config
from kdakit.problem import Arrays, Problem
from kdakit.reference import Result

APART = 256  # bytes: where tensors may begin in the scratch memory


def planned(problem: Problem, arrays: Arrays, config: Config, final_state: torch.Tensor | None = None) -> tuple[Result, Plan | None]:
    """A call that is not differentiated, and how to repeat it; None where it cannot be."""
    with launch.watching() as seen:
        if problem.op == "recurrent":
            result = launch.step(problem, arrays, config, final_state)
        else:
            result = launch.forward(problem, arrays, config)[0]
    given = [x for x in arrays if x is not None]
    used = {id(x) for _, _, tensors, _ in seen for x in tensors}
    # A tensor that no launch got was copied first; of one that was given twice nobody knows which of the two a launch got.
    everything = [*given, *(x for x in result[:2] if x is not None)]
    if result.states is not None or len({id(x) for x in given}) < len(given) or not used.issuperset(map(id, everything)):
        return result, None
    return result, Plan(arrays, result, seen)


class Plan:
    """Launches of one call. A place is an index into (nothing, the call's tensors, o, final state, scratch ..)."""

    def __init__(self, arrays: Arrays, result: Result, seen: list[tuple[Any, int, tuple, tuple]]):
        known = [None, *arrays, *result[:2]]
        places = {id(x): i for i, x in reversed(list(enumerate(known))) if x is not None}  # of a tensor that is in and out, where it is in
        self.offsets: list[int] = []
        self.bytes = 0
        self.launches = []
        for compiled, grid, tensors, rest in seen:
            for x in tensors:
                if x is not None and id(x) not in places:
                    places[id(x)] = len(known) + len(self.offsets)
                    self.offsets.append(self.bytes)
                    self.bytes += -(-x.nbytes // APART) * APART
            self.launches.append((compiled, grid, [0 if x is None else places[id(x)] for x in tensors], rest))
        o, final = result[:2]
        self.o = o.shape, o.dtype
        self.final = None if final is None else (final.shape, final.dtype)
        self.in_place = final is not None and final is arrays.initial_state

    def __call__(self, arrays: Arrays) -> Result:
        with launch.on_device(arrays.q):
            device = arrays.q.device
            o = torch.empty(self.o[0], dtype=self.o[1], device=device)
            final = arrays.initial_state if self.in_place else None
            if final is None and self.final is not None:
                final = torch.empty(self.final[0], dtype=self.final[1], device=device)
            values = [None, *[None if x is None else x.data_ptr() for x in (*arrays, o, final)]]
            if self.bytes:
                space = torch.empty((self.bytes // 4,), dtype=torch.float32, device=device)
                start = space.data_ptr()
                values += [start + offset for offset in self.offsets]
            for compiled, grid, places, rest in self.launches:
                launch.start(compiled, grid, [values[i] for i in places], rest)
        return Result(o, final)
