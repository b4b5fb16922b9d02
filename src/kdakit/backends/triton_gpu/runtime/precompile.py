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
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import triton
from triton.runtime import cache

WORKERS = min(16, os.cpu_count() or 1)
# Not where every core has a process already, as in a campaign of random problems: those compile what they launch, and nothing else.
AHEAD = os.environ.get("KDAKIT_COMPILE_AHEAD", "1") != "0"
SLOWEST = "gradient", "prepare"  # kernels whose names begin so, the slowest first
Recorded = tuple[Any, tuple, dict, dict]  # kernel, arguments, constants, options
_ready: set[Any] = set()


def compile_once(key: Any, wanted: Callable[[], list[Recorded]]) -> None:
    """Compiles what `wanted` gives, unless `key` came before. A kernel that cannot be compiled says so when it is launched."""
    if key in _ready or not AHEAD:
        return
    _ready.add(key)
    kernels = wanted()
    hash_triton().join()
    with Compilers(WORKERS) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        compile_each(kernels)


def compile_each(wanted: list[Recorded]) -> None:
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


_hashing = threading.Lock()


def hash_triton() -> threading.Thread:
    """Reads all of Triton, whose hash is part of every key in its cache, while others do something else."""
    with _hashing:  # two threads that read would each restore the other's switch interval
        return _hash_triton()


@lru_cache
def _hash_triton() -> threading.Thread:
    def read() -> None:
        # Triton reads itself in 400 pieces, and after each would wait 5 ms for the interpreter's lock while another thread runs Python.
        usual = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)
        try:
            getattr(cache, "triton_key", lambda: None)()
        finally:
            sys.setswitchinterval(usual)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread
