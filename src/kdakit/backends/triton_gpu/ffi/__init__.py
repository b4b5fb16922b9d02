"""The Triton kernels behind JAX on NVIDIA GPUs: all launches of a forward or a backward as one XLA custom call. On Hopper those of the CUDA
library are among them, where PyTorch has them too (`borrowed`).

The host side of the PyTorch backend decides what is launched; it runs once a shape, on PyTorch tensors without memory, while JAX traces.
So it needs PyTorch, of any build, and Triton beside JAX.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdakit.backends import triton_gpu
from kdakit.backends.triton_gpu.config import Chip, Config, chip_for, chosen
from kdakit.backends.triton_gpu.ffi import handler
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
    return triton_gpu.unsupported(problem, _chip()) or handler.unbuildable()


def unshown(problem: Problem, device: Any) -> str | None:
    """Why 'auto' leaves the problem to others: as the PyTorch backend, which also runs some head sizes as wider ones."""
    from kdakit.backends.triton_gpu import widened

    if widened.run_as(problem, _chip()) != (problem.K, problem.V, problem.dtype):
        return "such heads have been shown to be right as wider ones only, or in float32, which is for PyTorch; use backend='xla'"
    return triton_gpu.waiting(problem, _chip())


@lru_cache(maxsize=1)
def _capability() -> tuple[int, int]:
    """Of the first device."""
    major, minor = str(getattr(jax.devices()[0], "compute_capability", "9.0")).split(".")
    return int(major), int(minor)


def _chip() -> Chip:
    return chip_for(*_capability())


def default_config(problem: Problem, device: Any) -> Config:
    return triton_gpu.keeping_if_shown(chosen(problem, _chip()), problem, _chip())


def expected_us(problem: Problem, device: Any) -> float | None:
    """Microseconds of a forward call, where they are known."""
    from kdakit.backends.triton_gpu import times

    return None if problem.needs_grad else times.expected_us(problem, _chip().name, default_config(problem, device))


def forward(problem: Problem, arrays: Arrays, config: Config) -> tuple[Result, list]:
    given, present = _given(arrays)
    made = _call(_forward_program(problem, config, _specs(given), present), given)
    o, rest = made[0], made[1:]
    if problem.options.output_final_state:
        return Result(o, rest[0]), list(rest[1:])
    return Result(o, None), list(rest)


def backward(problem: Problem, arrays: Arrays, saved, d_o, d_final_state, config: Config) -> Arrays:
    if not saved:  # the forward was the token recurrence
        again = problem.replace(op="chunk", needs_grad=True, output_final_state=False)
        saved = forward(again, arrays, config)[1]
    given, present = _given(arrays)
    final = None if d_final_state is None or not problem.options.output_final_state else d_final_state
    more = [*saved, d_o, *([] if final is None else [final])]
    program = _backward_program(problem, config, _specs([*given, *more]), present, len(saved), final is not None)
    made = iter(_call(program, [*given, *more]))
    wanted = [name for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state") if getattr(arrays, name) is not None]
    gradients = dict(zip(wanted, made, strict=True))
    if problem.group > 1:
        shape = (problem.B, problem.T, problem.H, problem.group, problem.K)
        gradients |= {n: gradients[n].reshape(shape).sum(3).astype(getattr(arrays, n).dtype) for n in ("q", "k")}
    return Arrays(**{name: gradients.get(name) for name in Arrays._fields})


def step(problem: Problem, arrays: Arrays, config: Config) -> Result:
    given, present = _given(arrays)
    made = _call(_step_program(problem, config, _specs(given), present), given)
    return Result(made[0], made[1] if problem.options.output_final_state else None)


def _given(arrays: Arrays) -> tuple[list, tuple[bool, ...]]:
    """The arrays that are there, and which of the fields they are."""
    fields = arrays._replace(cu_seqlens_cpu=None)
    return [x for x in fields if x is not None], tuple(x is not None for x in fields)


def _specs(given) -> tuple[tuple[tuple[int, ...], str], ...]:
    return tuple((tuple(x.shape), str(x.dtype)) for x in given)


def _call(program, given) -> tuple:
    handler.register()
    results = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in program.results]
    call = jax.ffi.ffi_call(handler.TARGET, results, vmap_method="sequential")
    return tuple(call(*given, table=program.table, scratch=np.int64(program.scratch)))


def _lends(arrays: Arrays) -> bool:
    """Whether the GPU has kernels that another backend lends, which take parameters in float32 alone."""
    return _capability() == (9, 0) and all(x is None or str(x.dtype) == "torch.float32" for x in (arrays.A_log, arrays.dt_bias))


def _meta(specs, present) -> tuple[list, Arrays]:
    """Tensors without memory for the operands, and the Arrays among them."""
    from kdakit.backends.triton_gpu.ffi import program

    program.use_driver(_capability())
    made = [program.empty(*spec) for spec in specs]
    rest = iter(made)
    return made, Arrays(*(next(rest) if there else None for there in present))


@lru_cache(maxsize=256)
def _forward_program(problem: Problem, config: Config, specs, present):
    from kdakit.backends.triton_gpu import borrowed, call
    from kdakit.backends.triton_gpu.ffi import program

    operands, arrays = _meta(specs, present)

    def run():
        result, saved = call.forward(problem, arrays, config)
        return [result.o, result.final_state, *saved]

    with borrowed.writing(_lends(arrays)):
        return program.write(operands, run, program.load)


@lru_cache(maxsize=256)
def _backward_program(problem: Problem, config: Config, specs, present, kept: int, has_final: bool):
    from kdakit.backends.triton_gpu import borrowed, call
    from kdakit.backends.triton_gpu.ffi import program

    operands, arrays = _meta(specs, present)
    more = operands[sum(present) :]
    saved, d_o, d_final = more[:kept], more[kept], more[kept + 1] if has_final else None
    with borrowed.writing(_lends(arrays)):
        return program.write(operands, lambda: call.of_value_heads(problem, arrays, saved, d_o, d_final, config), program.load)


@lru_cache(maxsize=256)
def _step_program(problem: Problem, config: Config, specs, present):
    from kdakit.backends.triton_gpu import call
    from kdakit.backends.triton_gpu.ffi import program

    operands, arrays = _meta(specs, present)
    return program.write(operands, lambda: call.step(problem, arrays, config)[:2], program.load)
