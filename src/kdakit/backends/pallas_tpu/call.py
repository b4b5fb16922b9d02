"""A whole call, its backward, and the token recurrence: arrays in, kernels, arrays out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas import tpu as pltpu

from kdakit.backends.pallas_tpu import pool
from kdakit.backends.pallas_tpu.backward import backward_kernel
from kdakit.backends.pallas_tpu.fused import forward_kernel
from kdakit.backends.pallas_tpu.gate import collecting_matrix
from kdakit.backends.pallas_tpu.launch import (
    Launch,
    Operand,
    constant,
    from_token_rows,
    input_operand,
    input_operands,
    lanes,
    make_launch,
    pad_state,
    row_operand,
    run,
    shape_of,
    state_operand,
    step_operand,
    token_operand,
    whole_operand,
)
from kdakit.backends.pallas_tpu.packed import packed_kernel, scratch_shapes
from kdakit.backends.pallas_tpu.sequences import offsets, states_of_chunks
from kdakit.backends.pallas_tpu.step import TOKENS, step_kernel
from kdakit.backends.pallas_tpu.tile import Config, steps_hold_sequences
from kdakit.problem import Arrays, Problem
from kdakit.reference import Result


class Saved(NamedTuple):
    """What the backward gets from the forward, in the operands' dtype; named kda_states, .. for jax.checkpoint policies."""

    states: Any  # [B, steps, HV, V, K]  before each step
    matrices: Any  # [B, steps, groups, 3, C, g C]  A_qk, inverse, P
    values: Any = None  # [B, steps, HV, 2, C, V]  with disable_recompute: r = v - k_in S^T, v_new


def forward(problem: Problem, arrays: Arrays, config: Config) -> tuple[Result, Saved | None]:
    """The call's results and, if its gradient is needed, what its backward uses."""
    o = problem.options
    if problem.T == 0 or problem.B == 0:
        return _nothing(problem, arrays), None
    launch = make_launch(problem, arrays, config)
    if steps_hold_sequences(problem):
        return _packed(launch, arrays), None
    t, (B, blocks, steps) = launch.tile, launch.grid
    keep = problem.needs_grad
    outputs = {"o": token_operand(launch, shape_of((B, problem.T, problem.HV, t.V), t.dtype))}
    if o.output_final_state:
        outputs["final"] = _final_operand(launch)
    if keep or o.return_intermediate_states:
        outputs["states"] = step_operand(launch, shape_of((B, steps, problem.HV, t.V, t.K), t.operand), t.heads)
    if keep:
        shape = (B, steps, blocks * (t.heads // t.group), 3, t.C, t.group * t.C)
        outputs["matrices"] = step_operand(launch, shape_of(shape, t.operand), t.heads // t.group)
    if keep and o.disable_recompute:
        outputs["values"] = step_operand(launch, shape_of((B, steps, problem.HV, 2, t.C, t.V), t.operand), t.heads)
    scratch = [pltpu.VMEM((t.heads, t.V, t.K), jnp.float32)]
    out = run(launch, partial(forward_kernel, t, problem.T), "kda_forward", input_operands(launch, arrays), outputs, scratch)
    final = _final_states(problem, arrays, out["final"]) if o.output_final_state else None
    states = None
    if o.return_intermediate_states:
        states = out["states"][..., : problem.V, : problem.K].astype(problem.dtype)
        states = (
            states if launch.table is None else states_of_chunks(problem, launch.table, offsets(arrays.cu_seqlens, problem.T), t.C, states)
        )
        states = states if o.state_v_first else states.swapaxes(-1, -2)
    saved = Saved(**{n: checkpoint_name(out[n], f"kda_{n}") for n in Saved._fields if n in out}) if keep else None
    return Result(out["o"][..., : problem.V].astype(problem.dtype), final, states), saved


def _packed(launch: Launch, arrays: Arrays) -> Result:
    """Packed sequences with states, where no gradient is needed."""
    problem, t = launch.problem, launch.tile
    inputs = input_operands(launch, arrays)
    outputs = {"o": token_operand(launch, shape_of((problem.B, problem.T, problem.HV, t.V), t.dtype))}
    if arrays.initial_state is not None:
        inputs["initial"] = whole_operand(launch, inputs["initial"].value)
    if problem.options.output_final_state:
        outputs["final"] = whole_operand(launch, _final_operand(launch).value)
    out = run(launch, partial(packed_kernel, t, problem.T), "kda_forward", inputs, outputs, list(scratch_shapes(t)))
    final = _unpadded(problem, out["final"][:, : problem.HV]) if problem.options.output_final_state else None
    return Result(out["o"][..., : problem.V].astype(problem.dtype), final)


def backward(problem: Problem, arrays: Arrays, saved: Saved | None, d_o, d_final_state, config: Config, parts: int | None = None) -> Arrays:
    """Gradients of sum(o * d_o) + sum(final_state * d_final_state), each in its input's dtype; None where there is no input.

    `parts`: those of A_log and dt_bias come apart, [parts, ..], for as many equal parts of the batch.
    """
    if problem.T == 0 or problem.B == 0:
        return _no_gradients(problem, arrays, d_final_state, parts)
    if saved is None:  # after a token recurrence
        saved = forward(problem.replace(needs_grad=True), arrays, config)[1]
    launch = make_launch(problem, arrays, config.of_backward)
    launch = launch._replace(tile=replace(launch.tile, centred=False))  # its levels are of the forward's rounding or better
    t, (B, _, _) = launch.tile, launch.grid
    inputs = input_operands(launch, arrays)
    inputs["collect"] = constant(jnp.asarray(collecting_matrix(t), jnp.bfloat16))
    inputs["d_o"] = input_operand(launch, lanes(d_o.astype(t.dtype)))
    inputs["states"] = step_operand(launch, saved.states, t.heads)
    inputs["matrices"] = step_operand(launch, saved.matrices, t.heads // t.group)
    if saved.values is not None:
        inputs["values"] = step_operand(launch, saved.values, t.heads)
    if d_final_state is not None:
        inputs["d_final"] = state_operand(launch, pad_state(t, d_final_state.astype(jnp.float32)))
    tokens = {"d_q": t.K, "d_k": t.K, "d_v": t.V, "d_g": t.K}
    whole = jnp.float32 if problem.group > 1 else t.dtype  # of d_q and d_k, which a group's heads add up
    dtypes = {"d_q": whole, "d_k": whole, "d_v": t.dtype, "d_g": inputs["g"].value.dtype}
    outputs = {n: token_operand(launch, shape_of((B, problem.T, problem.HV, width), dtypes[n])) for n, width in tokens.items()}
    outputs["d_beta"] = row_operand(launch, shape_of(inputs["beta"].value.shape, jnp.float32))
    if arrays.initial_state is not None:
        outputs["d_initial"] = _final_operand(launch)
    if t.gate != "log_decay":
        shape = shape_of((B, problem.HV, 2, 8, t.K), jnp.float32)
        outputs["d_gate"] = Operand(shape, (1, t.heads, 2, 8, t.K), lambda b, h, s, chunk, sequence: (b, h, 0, 0, 0))
    scratch = [pltpu.VMEM((t.heads, t.V, t.K), jnp.float32)]
    if arrays.initial_state is not None and t.operand == "bfloat16":
        scratch.append(pltpu.VMEM((t.heads, 8, t.K), jnp.float32))
    out = run(launch, partial(backward_kernel, t, problem.T), "kda_backward", inputs, outputs, scratch, reverse=True)
    return _gradients(problem, arrays, out, d_final_state, parts)


def step(problem: Problem, arrays: Arrays, config: Config) -> Result:
    """The same results token by token. The final states take the initial ones' place, where the caller gives that memory away."""
    if problem.T == 0 or problem.B == 0:
        return _nothing(problem, arrays)
    if problem.options.output_final_state and arrays.initial_state is not None and pool.takes(problem, arrays.initial_state):
        row = jnp.arange(problem.B)
        return Result(*pool.decode(problem, arrays, arrays.initial_state, pool.Rows(row, row), config))
    launch = make_launch(problem, arrays, config, min(problem.T, TOKENS))
    t = launch.tile
    inputs = {n: x for n, x in input_operands(launch, arrays).items() if n != "members"}
    outputs = {"o": token_operand(launch, shape_of((problem.B, problem.T, problem.HV, t.V), t.dtype))}
    in_place = problem.options.output_final_state and arrays.initial_state is not None
    if problem.options.output_final_state:
        outputs["final"] = _final_operand(launch, inputs["initial"].value.dtype if in_place else jnp.float32)
    scratch = [pltpu.VMEM((t.heads, t.K, t.V), jnp.float32)]
    aliases = {"initial": "final"} if in_place else None
    out = run(launch, partial(step_kernel, t, problem.T), "kda_step", inputs, outputs, scratch, aliases=aliases)
    final = None
    if in_place:  # sequences without tokens were left as they were
        final = _unpadded(problem, out["final"])
    elif problem.options.output_final_state:
        final = _final_states(problem, arrays, out["final"])
    return Result(out["o"][..., : problem.V].astype(problem.dtype), final)


def _gradients(problem: Problem, arrays: Arrays, out: dict, d_final_state, parts: int | None) -> Arrays:
    """The kernel's outputs without padding, groups and batches added up, in the dtypes of the inputs."""
    d_q, d_k = (out[n][..., : problem.K] for n in ("d_q", "d_k"))
    if problem.group > 1:
        d_q, d_k = (x.reshape(*x.shape[:2], problem.H, problem.group, problem.K).sum(3) for x in (d_q, d_k))
    d_A_log = d_dt_bias = d_initial = None
    if "d_gate" in out:
        d_gate = out["d_gate"][..., : problem.K].sum(3)  # [B, HV, 2, K]
        d_gate = d_gate.sum(0) if parts is None else d_gate.reshape(parts, -1, *d_gate.shape[1:]).sum(1)
        d_A_log, d_dt_bias = d_gate[..., 0, :].sum(-1), d_gate[..., 1, :]
    if arrays.initial_state is not None:
        d_initial = _unpadded(problem, out["d_initial"])
        if problem.varlen == "cu_seqlens":
            passed = jnp.zeros((), d_initial.dtype) if d_final_state is None else d_final_state.astype(d_initial.dtype)
            d_initial = jnp.where(_with_tokens(problem, arrays), d_initial, passed)
    d_beta = from_token_rows(out["d_beta"], problem.T)
    found = (d_q, d_k, out["d_v"][..., : problem.V], out["d_g"][..., : problem.K], d_beta, d_A_log, d_dt_bias, d_initial)
    shapes = [() if x is None else (*_parts(n, parts), *x.shape) for n, x in enumerate(arrays[:8])]
    return Arrays(*(None if x is None else d.reshape(s).astype(x.dtype) for x, d, s in zip(arrays[:8], found, shapes, strict=True)))


def _parts(field: int, parts: int | None) -> tuple[int, ...]:
    """The leading axis of a gradient: that of a gate parameter may come in parts."""
    return () if parts is None or Arrays._fields[field] not in ("A_log", "dt_bias") else (parts,)


def _no_gradients(problem: Problem, arrays: Arrays, d_final_state, parts: int | None) -> Arrays:
    zeros = [None if x is None else jnp.zeros_like(x, shape=(*_parts(n, parts), *x.shape)) for n, x in enumerate(arrays[:8])]
    if zeros[7] is not None and d_final_state is not None:
        zeros[7] = d_final_state.astype(zeros[7].dtype)
    return Arrays(*zeros)


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


def _final_operand(launch: Launch, dtype=jnp.float32) -> Operand:
    p, t = launch.problem, launch.tile
    layout = (t.V, t.K) if t.state_v_first else (t.K, t.V)
    return state_operand(launch, shape_of((p.N, p.HV, *layout), dtype))


def _unpadded(problem: Problem, state):
    rows, columns = problem.state_shape[2:]
    return state[..., :rows, :columns].astype(problem.state_dtype)


def _final_states(problem: Problem, arrays: Arrays, final):
    """Without the padding; sequences without tokens keep what they had."""
    final = _unpadded(problem, final)
    if problem.varlen != "cu_seqlens":
        return final
    before = jnp.zeros((), final.dtype) if arrays.initial_state is None else arrays.initial_state
    return jnp.where(_with_tokens(problem, arrays), final, before)


def _with_tokens(problem: Problem, arrays: Arrays):
    """[N, 1, 1, 1]: which sequences of a packed call have any."""
    return (jnp.diff(offsets(arrays.cu_seqlens, problem.T)) > 0)[:, None, None, None]
