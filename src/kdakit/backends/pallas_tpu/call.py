"""A whole call, its backward, and the token recurrence: arrays in, kernels, arrays out."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas import tpu as pltpu

from kdakit.backends.pallas_tpu.fused import forward_kernel
from kdakit.backends.pallas_tpu.launch import (
    Launch,
    Operand,
    input_operands,
    make_launch,
    run,
    shape_of,
    state_operand,
    step_operand,
    token_operand,
)
from kdakit.backends.pallas_tpu.tile import Config
from kdakit.problem import Arrays, Problem
from kdakit.reference import Result


class Saved(NamedTuple):
    """What the backward gets from the forward."""

    states: Any  # [B, steps, HV, V, K]  before each step, in the operands' dtype
    matrices: Any  # [B, steps, groups, 3, C, g C]  A_qk, P, inverse; None: computed again


def forward(problem: Problem, arrays: Arrays, config: Config) -> tuple[Result, Saved | None]:
    """The call's results and, if its gradient is needed, what its backward uses."""
    o = problem.options
    if problem.T == 0 or problem.B == 0:
        return _nothing(problem, arrays), None
    launch = make_launch(problem, arrays, config)
    t, (B, blocks, steps) = launch.tile, launch.grid
    keep = problem.needs_grad
    outputs = {"o": token_operand(launch, shape_of((B, problem.T, problem.HV, t.V), t.dtype))}
    if o.output_final_state:
        outputs["final"] = _final_operand(launch)
    if keep or o.return_intermediate_states:
        outputs["states"] = step_operand(launch, shape_of((B, steps, problem.HV, t.V, t.K), t.operand), t.heads)
    if keep and o.disable_recompute:
        shape = (B, steps, blocks * (t.heads // t.group), 3, t.C, t.group * t.C)
        outputs["matrices"] = step_operand(launch, shape_of(shape, t.operand), t.heads // t.group)
    scratch = [pltpu.VMEM((t.heads, t.V, t.K), jnp.float32)]
    out = run(launch, partial(forward_kernel, t, problem.T), "kda_forward", input_operands(launch, arrays), outputs, scratch)
    final = _final_states(problem, arrays, out["final"]) if o.output_final_state else None
    states = None
    if o.return_intermediate_states:
        states = out["states"][..., : problem.V, : problem.K].astype(problem.dtype)
        states = states if o.state_v_first else states.swapaxes(-1, -2)
    saved = Saved(*(checkpoint_name(out[n], f"kda_{n}") if n in out else None for n in Saved._fields)) if keep else None
    return Result(out["o"][..., : problem.V].astype(problem.dtype), final, states), saved


def _nothing(problem: Problem, arrays: Arrays) -> Result:
    """No tokens: states pass through."""
    o = jnp.zeros_like(arrays.v, problem.dtype)
    final = states = None
    if problem.options.output_final_state:
        final = arrays.initial_state
        final = jnp.zeros_like(arrays.v, problem.state_dtype, shape=problem.state_shape) if final is None else final
    if problem.options.return_intermediate_states:
        states = jnp.zeros_like(arrays.v, problem.dtype, shape=(problem.B, problem.chunks, *problem.state_shape[1:]))
    return Result(o, final, states)


def _final_operand(launch: Launch) -> Operand:
    p, t = launch.problem, launch.tile
    layout = (t.V, t.K) if t.state_v_first else (t.K, t.V)
    return state_operand(launch, shape_of((p.N, p.HV, *layout), jnp.float32))


def _final_states(problem: Problem, arrays: Arrays, final):
    """Without the padding; sequences without tokens keep what they had."""
    rows, columns = problem.state_shape[2:]
    final = final[..., :rows, :columns].astype(problem.state_dtype)
    if problem.varlen != "cu_seqlens":
        return final
    before = jnp.zeros((), final.dtype) if arrays.initial_state is None else arrays.initial_state
    return jnp.where((jnp.diff(arrays.cu_seqlens) > 0)[:, None, None, None], final, before)
