"""Triton kernels for NVIDIA and AMD GPUs.

Two launches forward: `intra.prepare_kernel` over chunks, `state.scan_kernel` over sequences. Five backward: `replay.rebuild_kernel` over
chunks, `replay.replay_kernel` over segments, `reverse.reverse_kernel` over sequences, `products.products_kernel` and
`gradient.gradient_kernel` over chunks; and two short ones, `sums.sums_kernel` and `reverse.restore_kernel`. Those over chunks have a twin
for bfloat16 and normalised keys: `normed`, `rebuild`, `normed_gradient`. On a machine without a GPU they run in Triton's interpreter when
TRITON_INTERPRET=1 is set.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import threading
from functools import lru_cache
from types import ModuleType
from typing import Any

from kdakit.backends.triton_gpu.config import Config, chip_of, choose, chosen, untested
from kdakit.problem import Arrays, Problem
from kdakit.reference import Result


def supports(problem: Problem, device: Any) -> str | None:
    """Why this backend cannot run `problem` on `device`; None: it can."""
    if _kind(device) != "cuda" and interpreted(device) is None:
        return f"needs a GPU, or TRITON_INTERPRET=1 for Triton's interpreter; the tensors are on {_kind(device)}"
    reason = _unusable()
    if reason is not None:
        return reason
    if problem.dtype == "float64" or "float64" in (problem.gate_dtype, problem.beta_dtype, problem.state_dtype):
        return "computes in float32; use backend='torch_native' for float64"
    if problem.varlen == "segment_ids":
        return "takes cu_seqlens, not segment_ids"
    return untested(problem, chip_of(device))


def interpreted(device: Any) -> str | None:
    """Why it would run in Triton's interpreter; None: it would not."""
    on = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
    return "TRITON_INTERPRET=1 is set: Triton's interpreter, not the GPU" if on else None


def operand_dtype(problem: Problem) -> str:
    """Half-precision inputs go to the matrix units as they are; the token recurrence has no matrix products."""
    return problem.dtype if problem.op == "chunk" else "float32"


def default_config(problem: Problem, device: Any) -> Config:
    return chosen(problem, chip_of(device))


def saved_specs(problem: Problem, device: Any) -> list[tuple[tuple[int, ...], str]]:
    """What `forward` keeps for `backward` beside the inputs."""
    from kdakit.backends.triton_gpu import training

    return training.saved_specs(problem, choose(problem.replace(N=1), chip_of(device)))


def forward(problem: Problem, arrays: Arrays, config: Config) -> tuple[Result, list]:
    return _launch().forward(problem, arrays, config)


def backward(problem: Problem, arrays: Arrays, saved, d_o, d_final_state, config: Config) -> Arrays:
    from kdakit.backends.triton_gpu import training

    return training.backward(problem, arrays, saved, d_o, d_final_state, config)


def step(problem: Problem, arrays: Arrays, config: Config, final_state: Any = None) -> Result:
    return _launch().step(problem, arrays, config, final_state)


def planned(problem: Problem, arrays: Arrays, config: Config, final_state: Any = None) -> tuple[Any, Any]:
    """`forward` or `step`, and a function of the tensors that repeats it, if it can be."""
    _launch()
    from kdakit.backends.triton_gpu import plan

    return plan.planned(problem, arrays, config, final_state)


def planned_backward(problem: Problem, arrays: Arrays, saved, d_o, d_final_state, config: Config) -> tuple[Arrays, Any]:
    """`backward`, and a function of (*arrays, *saved, d_o, d_final_state) that repeats it, if it can be."""
    _launch()
    from kdakit.backends.triton_gpu import plan

    return plan.planned_backward(problem, arrays, saved, d_o, d_final_state, config)


@lru_cache
def _launch() -> ModuleType:
    if interpreted(None) is None:
        hash_triton()
    from kdakit.backends.triton_gpu import launch

    return launch


_hashing = threading.Lock()


def hash_triton() -> threading.Thread:
    """Reads all of Triton, whose hash is part of every key in its cache, while others do something else: see `ahead`."""
    with _hashing:  # two threads that read would each restore the other's switch interval
        return _hash_triton()


@lru_cache
def _hash_triton() -> threading.Thread:
    from triton.runtime import cache

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


OLDEST = (3, 6)  # before it, what `launch` and `ahead` ask of Triton has other names or is not there


@lru_cache
def _unusable() -> str | None:
    """Why the Triton that is installed cannot be used; its version is looked up, not imported."""
    if importlib.util.find_spec("triton") is None:
        return "needs triton (pip install kdakit[gpu])"
    found = _triton_version()
    numbers = tuple(int(x) for x in re.findall(r"\d+", found)[:2])
    if numbers < OLDEST:
        return f"needs triton {'.'.join(map(str, OLDEST))} or newer, found {found} (pip install -U 'kdakit[gpu]')"
    return None


def _triton_version() -> str:
    for name in ("triton", "pytorch-triton-rocm", "pytorch-triton", "pytorch-triton-xpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return str(importlib.import_module("triton").__version__)


def _kind(device: Any) -> str:
    return getattr(device, "type", str(device)).partition(":")[0]


def pooled() -> Any:
    """The kernels over a pool of states, for kdakit.serving: decode, verify, commit."""
    from kdakit.backends.triton_gpu import pool_launch

    return pool_launch
