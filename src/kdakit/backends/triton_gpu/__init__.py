"""Triton kernels for NVIDIA and AMD GPUs.

Two launches forward: `intra.prepare_kernel` over chunks, `state.scan_kernel` over sequences. Five backward: `replay.rebuild_kernel` over
chunks, `replay.replay_kernel` over segments, `reverse.reverse_kernel` over sequences, `products.products_kernel` and
`gradient.gradient_kernel` over chunks; and two short ones, `sums.sums_kernel` and `reverse.restore_kernel`. Those over chunks have a twin
for bfloat16 and normalised keys: `normed`, `rebuild`, `normed_gradient`. On a machine without a GPU they run in Triton's interpreter when
TRITON_INTERPRET=1 is set.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from functools import lru_cache
from types import ModuleType
from typing import Any

from kdakit.backends.triton_gpu.config import Config, chip_of, choose
from kdakit.problem import Arrays, Problem
from kdakit.reference import Result


def supports(problem: Problem, device: Any) -> str | None:
    """Why this backend cannot run `problem` on `device`; None: it can."""
    if _kind(device) != "cuda" and interpreted(device) is None:
        return f"needs a GPU, or TRITON_INTERPRET=1 for Triton's interpreter; the tensors are on {_kind(device)}"
    if not _installed():
        return "needs triton (pip install kdakit[gpu])"
    if problem.dtype == "float64" or "float64" in (problem.gate_dtype, problem.beta_dtype, problem.state_dtype):
        return "computes in float32; use backend='torch_native' for float64"
    if problem.varlen == "segment_ids":
        return "takes cu_seqlens, not segment_ids"
    return unshown(problem, device) if problem.needs_grad else None


def unshown(problem: Problem, device: Any) -> str | None:
    """Why 'auto' leaves the problem to others: no GPU of this kind has shown that it is right. Gradients are refused for that reason even
    where the backend is named."""
    from kdakit.backends.triton_gpu import shown

    return shown.waits(problem, chip_of(device))


def interpreted(device: Any) -> str | None:
    """Why it would run in Triton's interpreter; None: it would not."""
    on = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
    return "TRITON_INTERPRET=1 is set: Triton's interpreter, not the GPU" if on else None


def operand_dtype(problem: Problem) -> str:
    """Half-precision inputs go to the matrix units as they are; the token recurrence has no matrix products, but its gradients are those
    of chunks."""
    return problem.dtype if problem.op == "chunk" or problem.needs_grad else "float32"


def default_config(problem: Problem, device: Any) -> Config:
    from kdakit.backends.triton_gpu import widened

    return widened.config_for(problem, chip_of(device))


def forms(problem: Problem, device: Any) -> tuple[str, ...]:
    """What a problem launches there, as the table of what a chip has shown names it."""
    from kdakit.backends.triton_gpu import shown

    config = default_config(problem, device)
    return shown.forms(problem.replace(K=config.wide_K or problem.K, V=config.wide_V or problem.V), config)


def saved_specs(problem: Problem, device: Any) -> list[tuple[tuple[int, ...], str]]:
    """What `forward` keeps for `backward` beside the inputs."""
    from kdakit.backends.triton_gpu import training, widened

    K, V = widened.wide_sizes(problem, chip_of(device))
    if K:
        problem = problem.replace(K=K, V=V)
    return training.saved_specs(problem, choose(problem.replace(N=1), chip_of(device)))


def forward(problem: Problem, arrays: Arrays, config: Config) -> tuple[Result, list]:
    if config.wide_K:
        return _widened().forward(problem, arrays, config)
    return _launch().forward(problem, arrays, config)


def backward(problem: Problem, arrays: Arrays, saved, d_o, d_final_state, config: Config) -> Arrays:
    from kdakit.backends.triton_gpu import training

    if config.wide_K:
        return _widened().backward(problem, arrays, saved, d_o, d_final_state, config)
    return training.backward(problem, arrays, saved, d_o, d_final_state, config)


def step(problem: Problem, arrays: Arrays, config: Config, final_state: Any = None) -> Result:
    if config.wide_K:
        return _widened().step(problem, arrays, config, final_state)
    return _launch().step(problem, arrays, config, final_state)


def planned(problem: Problem, arrays: Arrays, config: Config, final_state: Any = None) -> tuple[Any, Any]:
    """`forward` or `step`, and a function of the tensors that repeats it, if it can be."""
    _launch()
    from kdakit.backends.triton_gpu import plan

    if config.wide_K:  # every call pads its tensors anew
        if problem.op == "recurrent":
            return step(problem, arrays, config, final_state), None
        result, saved = forward(problem, arrays, config)
        return (result, saved) if problem.needs_grad else result, None
    return plan.planned(problem, arrays, config, final_state)


def planned_backward(problem: Problem, arrays: Arrays, saved, d_o, d_final_state, config: Config) -> tuple[Arrays, Any]:
    """`backward`, and a function of (*arrays, *saved, d_o, d_final_state) that repeats it, if it can be."""
    _launch()
    from kdakit.backends.triton_gpu import plan

    if config.wide_K:
        return backward(problem, arrays, saved, d_o, d_final_state, config), None
    return plan.planned_backward(problem, arrays, saved, d_o, d_final_state, config)


def _widened() -> ModuleType:
    _launch()
    from kdakit.backends.triton_gpu import widened

    return widened


@lru_cache
def _launch() -> ModuleType:
    if interpreted(None) is None:
        hash_triton()
    from kdakit.backends.triton_gpu import launch

    return launch


@lru_cache
def hash_triton() -> threading.Thread:
    """Reads all of Triton, whose hash is part of every key in its cache, while others do something else: see `ahead`."""
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


@lru_cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _kind(device: Any) -> str:
    return getattr(device, "type", str(device)).partition(":")[0]


def pooled() -> Any:
    """The kernels over a pool of states, for kdakit.serving: decode, verify, commit."""
    from kdakit.backends.triton_gpu import pool_launch

    return pool_launch
