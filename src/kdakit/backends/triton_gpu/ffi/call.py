"""Forward, backward and step: each one XLA custom call, whose launches are planned once a shape. Needs PyTorch and Triton."""

from __future__ import annotations

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from kdakit.backends.triton_gpu import borrowed, call
from kdakit.backends.triton_gpu.config import Config
from kdakit.backends.triton_gpu.ffi import handler, program
from kdakit.backends.triton_gpu.ffi.gpu import capability
from kdakit.problem import Arrays, Problem
from kdakit.reference import Result


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
    written = _backward_program(problem, config, _specs([*given, *more]), present, len(saved), final is not None)
    made = iter(_call(written, [*given, *more]))
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


def _call(written, given) -> tuple:
    handler.register()
    results = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in written.results]
    custom = jax.ffi.ffi_call(handler.TARGET, results, vmap_method="sequential")
    return tuple(custom(*given, table=written.table, scratch=np.int64(written.scratch)))


def _lends(arrays: Arrays) -> bool:
    """Whether the GPU has kernels that another backend lends, which take parameters in float32 alone."""
    return capability() == (9, 0) and all(x is None or str(x.dtype) == "torch.float32" for x in (arrays.A_log, arrays.dt_bias))


def _meta(specs, present) -> tuple[list, Arrays]:
    """Tensors without memory for the operands, and the Arrays among them."""
    program.use_driver(capability())
    made = [program.empty(*spec) for spec in specs]
    rest = iter(made)
    return made, Arrays(*(next(rest) if there else None for there in present))


@lru_cache(maxsize=256)
def _forward_program(problem: Problem, config: Config, specs, present):
    operands, arrays = _meta(specs, present)

    def run():
        result, saved = call.forward(problem, arrays, config)
        return [result.o, result.final_state, *saved]

    with borrowed.writing(_lends(arrays)):
        return program.write(operands, run, program.load)


@lru_cache(maxsize=256)
def _backward_program(problem: Problem, config: Config, specs, present, kept: int, has_final: bool):
    operands, arrays = _meta(specs, present)
    more = operands[sum(present) :]
    saved, d_o, d_final = more[:kept], more[kept], more[kept + 1] if has_final else None
    with borrowed.writing(_lends(arrays)):
        return program.write(operands, lambda: call.of_value_heads(problem, arrays, saved, d_o, d_final, config), program.load)


@lru_cache(maxsize=256)
def _step_program(problem: Problem, config: Config, specs, present):
    operands, arrays = _meta(specs, present)
    return program.write(operands, lambda: call.step(problem, arrays, config)[:2], program.load)
