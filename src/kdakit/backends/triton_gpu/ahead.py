"""First calls: the kernels of a call, and of the backward that follows it, are compiled at the same time.

Triton compiles a kernel when it is first launched, so a first training step would wait for a dozen compilations in turn, the slowest of
which takes a third of the time, and for as many runs of a C compiler, which makes the launcher of each. Most of Triton's compiler leaves
the interpreter's lock alone, so threads are enough; its first stage is Python, and the slowest kernels go through that first.

With everything in Triton's cache a first call imports the kernels, hashes their sources to look them up, and hashes Triton itself, 400 MB,
which `hash_triton` does beside the rest.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import torch
import triton

from kdakit.backends.triton_gpu import hash_triton, launch, training
from kdakit.backends.triton_gpu.config import Config
from kdakit.problem import Arrays, Problem

WORKERS = min(16, os.cpu_count() or 1)
SLOWEST = "gradient", "prepare"  # kernels whose names begin so, the slowest first
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
    wanted = launches(problem, arrays, config)
    hash_triton().join()
    with Compilers(WORKERS) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        compile_each(wanted)


def compile_each(wanted: list[tuple[Any, tuple, dict, dict]]) -> None:
    for kernel, args, constants, options in sorted(wanted, key=lambda x: [not x[0].__name__.startswith(name) for name in SLOWEST]):
        kernel.warmup(*args, grid=(1,), **constants, **options)


class Compilers(ThreadPoolExecutor):
    """Threads that compile kernels and, beside each, its launcher, which depends on its parameters alone and stays in Triton's cache."""

    def __init__(self, workers: int):
        super().__init__(workers)
        self.python = threading.Lock()

    def submit(self, compile_kernel: Callable[[], Any]) -> Future:  # type: ignore[override]
        src = source(compile_kernel)
        if src is not None:
            src.make_ir = partial(in_turn, self.python, src.make_ir)
        future = super().submit(compile_kernel)
        if src is not None:
            driver = triton.runtime.driver.active
            super().submit(driver.launcher_cls, src, Unknown(driver.get_current_target().warp_size))
        return future


def in_turn(lock: threading.Lock, function: Callable, *args: Any, **named: Any) -> Any:
    """Threads that run Python at the same time hold each other up."""
    with lock:
        return function(*args, **named)


def source(compile_kernel: Callable[[], Any]) -> Any:
    """What Triton is about to compile, which it hands over within a function."""
    return inspect.getclosurevars(compile_kernel).nonlocals.get("src")


class Unknown:
    """In place of a compiled kernel's metadata, of which a launcher's source has the size of a warp, on AMD's chips, and nothing else."""

    def __init__(self, warp_size: int):
        self.warp_size = warp_size

    def __getattr__(self, name: str) -> int:
        return 0


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
            # Not torch.empty_like, which for tensors without memory imports sympy: seconds.
            d_o = torch.empty(arrays.v.shape, dtype=arrays.v.dtype, device="meta")
            training.backward(problem, arrays, kept, d_o, None, config)
            if problem.options.output_final_state:  # a loss may be made of the final state, or not: some kernels have a form for each
                known = [(kernel, constants) for kernel, _, constants, _ in recorded]
                first = len(recorded)
                training.backward(problem, arrays, kept, d_o, torch.empty(problem.state_shape, device="meta"), config)
                recorded[first:] = [x for x in recorded[first:] if (x[0], x[2]) not in known]
    return recorded
