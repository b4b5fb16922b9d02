"""First calls: the kernels of a call, and of the backward that follows it, are compiled at the same time.

Triton compiles a kernel when it is first launched, so a first training step would wait for nine compilations in turn, the slowest of which
takes a third of the time. Its compiler leaves the interpreter's lock alone, so threads are enough.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch
import triton

from kdakit.backends.triton_gpu import launch, training
from kdakit.backends.triton_gpu.config import Config
from kdakit.problem import Arrays, Problem

WORKERS = min(8, os.cpu_count() or 1)
_ready: set[Any] = set()


@lru_cache(maxsize=1024)
def kind(problem: Problem, config: Config, device: int) -> Any:
    """What calls that launch the same kernels have in common."""
    return problem.replace(B=1, T=1, N=1), config, device


def compile_all(problem: Problem, arrays: Arrays, config: Config) -> None:
    """Compiles what a call will launch, unless a call like it came before. A kernel that cannot be compiled says so when it is launched."""
    key = kind(problem, config, arrays.q.get_device())
    if key in _ready:
        return
    _ready.add(key)
    with ThreadPoolExecutor(WORKERS) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for kernel, args, constants, options in reversed(launches(problem, arrays, config)):  # the slowest is the last
            kernel.warmup(*args, grid=(1,), **constants, **options)


def launches(problem: Problem, arrays: Arrays, config: Config) -> list[tuple[Any, tuple, dict, dict]]:
    """(kernel, arguments, constants, options) of a call's launches, in order, on tensors without memory. Nothing runs."""
    problem = problem.replace(return_intermediate_states=False)  # their number would have to be looked up on the device
    arrays = Arrays(*(None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in arrays))
    with launch.recording() as recorded:
        if problem.op == "recurrent":
            launch.step(problem, arrays, config)
            return recorded
        kept = launch.forward(problem, arrays, config)[1]
        if problem.needs_grad:
            d_final = None
            if problem.options.output_final_state:
                d_final = torch.empty(problem.state_shape, device="meta")
            training.backward(problem, arrays, kept, torch.empty_like(arrays.v), d_final, config)
    return recorded
