"""The Triton kernels behind JAX on NVIDIA GPUs: all launches of a forward or a backward as one XLA custom call. On Hopper those of the CUDA
library are among them, where PyTorch has them too (`borrowed`).

The host side of the PyTorch backend decides what is launched; it runs once a shape, on PyTorch tensors without memory, while JAX traces.
So it needs PyTorch, of any build, and Triton beside JAX.

    call      forward, backward and step
    wide      the same with wider heads, or in float32
    gpu       which one JAX has
    program   the launches of a call as numbers
    handler   launches.cpp, which carries them out, as a target of XLA's
"""

from __future__ import annotations

import importlib.util
from typing import Any

from kdakit.backends import triton_gpu
from kdakit.backends.triton_gpu.config import Config, chosen
from kdakit.backends.triton_gpu.ffi import handler
from kdakit.backends.triton_gpu.ffi.gpu import chip
from kdakit.problem import Arrays, Problem
from kdakit.reference import Result

__all__ = ["backward", "borrow", "default_config", "expected_us", "forward", "operand_dtype", "step", "supports", "unshown"]

operand_dtype = triton_gpu.operand_dtype
borrow = triton_gpu.borrow


def supports(problem: Problem, device: Any) -> str | None:
    """Why this backend cannot run `problem` on `device`; None: it can."""
    if str(device) not in ("gpu", "cuda"):
        return f"needs an NVIDIA GPU; the arrays are on {device}"
    if importlib.util.find_spec("torch") is None:
        return "needs torch, of any build, to plan its launches (pip install 'kdakit[gpu]')"
    if problem.options.return_intermediate_states:
        return "gives out no states between chunks; use backend='xla'"
    if problem.varlen == "segment_ids":
        return "takes cu_seqlens, not segment_ids"
    return triton_gpu.unsupported(problem, chip()) or handler.unbuildable()


def unshown(problem: Problem, device: Any) -> str | None:
    """Why 'auto' leaves the problem to others: as the PyTorch backend."""
    return triton_gpu.waiting(problem, chip())


def default_config(problem: Problem, device: Any) -> Config:
    from kdakit.backends.triton_gpu import widened

    return widened.config_for(problem, chip())


def expected_us(problem: Problem, device: Any) -> float | None:
    """Microseconds of a forward call, where they are known."""
    from kdakit.backends.triton_gpu import times

    return None if problem.needs_grad else times.expected_us(problem, chip().name, chosen(problem, chip()))


def forward(problem: Problem, arrays: Arrays, config: Config) -> tuple[Result, list]:
    return _calls(config).forward(problem, arrays, config)


def backward(problem: Problem, arrays: Arrays, saved, d_o, d_final_state, config: Config) -> Arrays:
    return _calls(config).backward(problem, arrays, saved, d_o, d_final_state, config)


def step(problem: Problem, arrays: Arrays, config: Config) -> Result:
    return _calls(config).step(problem, arrays, config)


def _calls(config: Config) -> Any:
    """What makes such calls: `call`, or `wide` around it."""
    from kdakit.backends.triton_gpu.ffi import call, wide

    return wide.InJax(call) if config.wide_K else call
