"""The stages in order: a whole call, its backward, and the token recurrence."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from kdakit.backends.xla.gate import Activated, activate, activate_backward
from kdakit.backends.xla.intra import Intra, intra_backward, intra_forward
from kdakit.backends.xla.output import output_backward, output_forward
from kdakit.backends.xla.plan import Plan, from_chunks, make_plan, to_chunks
from kdakit.backends.xla.state import state_backward, state_forward
from kdakit.backends.xla.step import recurrence
from kdakit.problem import Arrays, Problem
from kdakit.reference import Result


class Saved(NamedTuple):
    """What the backward would otherwise compute again; chunked, leading axes [NT, B, HV]."""

    intra: Intra
    states: Any  # [.., K, V]
    v_new: Any  # [.., C, V]


def forward(problem: Problem, arrays: Arrays, config=None) -> tuple[Result, Saved | None]:
    """The call's results and, with disable_recompute, what its backward can use."""
    plan = make_plan(problem, arrays.cu_seqlens)
    x = _chunks(plan, activate(problem, arrays))
    saved, final = _through_state(problem, arrays, plan, x)
    o = output_forward(saved.intra.q_decayed, saved.intra.A_qk, saved.states, saved.v_new)
    o = from_chunks(plan, o).astype(problem.dtype)
    states = None
    if problem.options.return_intermediate_states:
        states = saved.states if plan.sequence is None else _used(problem, plan, saved.states)
        states = layout(problem, jnp.moveaxis(states, 0, 1)).astype(problem.dtype)  # [B, NT, HV, K, V]
    result = Result(o, layout(problem, final).astype(problem.state_dtype) if problem.options.output_final_state else None, states)
    return result, _tagged(saved) if problem.needs_grad and problem.options.disable_recompute else None


def backward(problem: Problem, arrays: Arrays, saved: Saved | None, d_o, d_final_state, config=None) -> Arrays:
    """Gradients of sum(o * d_o) + sum(final_state * d_final_state), each in its input's dtype; None where there is no input."""
    if saved is None:
        # Without the barrier the compiler finds the forward's intermediates again, keeps them, and saves no memory.
        arrays, d_o, d_final_state = lax.optimization_barrier((arrays, d_o, d_final_state))
    dtype = problem.compute_dtype
    plan = make_plan(problem, arrays.cu_seqlens)
    x = _chunks(plan, activate(problem, arrays))
    if saved is None:
        saved, _ = _through_state(problem, arrays, plan, x)
    intra, states, v_new = saved
    d_final = jnp.zeros_like(_initial_states(problem, arrays)) if d_final_state is None else layout(problem, d_final_state.astype(dtype))
    d_q_decayed, d_A_qk, d_states, d_v_new = output_backward(
        intra.q_decayed, intra.A_qk, states, v_new, to_chunks(plan, d_o.astype(dtype))
    )
    d_w, d_u, d_k_decayed, d_decay, d_initial = state_backward(
        intra.w, intra.k_decayed, intra.decay, states, v_new, d_states, d_v_new, d_final, plan.sequence
    )
    d_x = intra_backward(*x, intra, Intra(None, d_A_qk, None, d_w, d_u, d_q_decayed, d_k_decayed, d_decay))
    gradients = activate_backward(problem, arrays, Activated(*(from_chunks(plan, d) for d in d_x)))
    if arrays.initial_state is not None:
        gradients = gradients._replace(initial_state=layout(problem, d_initial).astype(arrays.initial_state.dtype))
    return gradients


def step(problem: Problem, arrays: Arrays, config=None) -> Result:
    """The same results token by token."""
    sequence = None
    if arrays.cu_seqlens is not None:
        tokens = jnp.arange(problem.T, dtype=arrays.cu_seqlens.dtype)
        sequence = jnp.searchsorted(arrays.cu_seqlens[1:], tokens, side="right")
    o, final = recurrence(activate(problem, arrays), _initial_states(problem, arrays), sequence)
    final = layout(problem, final).astype(problem.state_dtype) if problem.options.output_final_state else None
    return Result(o.astype(problem.dtype), final)


def layout(problem: Problem, state):
    """[.., K, V] <-> the caller's layout."""
    return state.swapaxes(-1, -2) if problem.options.state_v_first else state


def _chunks(plan: Plan, x: Activated) -> Activated:
    return Activated(*(to_chunks(plan, a) for a in x))


def _through_state(problem: Problem, arrays: Arrays, plan: Plan, x: Activated):
    intra = intra_forward(*x)
    initial = _initial_states(problem, arrays)
    states, v_new, final = state_forward(intra.w, intra.u, intra.k_decayed, intra.decay, initial, plan.sequence)
    return Saved(intra, states, v_new), final


def _initial_states(problem: Problem, arrays: Arrays):
    """[N, HV, K, V] in the compute dtype."""
    if arrays.initial_state is not None:
        return layout(problem, arrays.initial_state.astype(problem.compute_dtype))
    shape = (problem.N, problem.HV, problem.K, problem.V)
    # Like v, so that inside shard_map the zeros vary over the same mesh axes as the states that follow them.
    return jnp.zeros_like(arrays.v, problem.compute_dtype, shape=shape)


def _used(problem: Problem, plan: Plan, states):
    """Zeros in the slots that no sequence needed."""
    return jnp.where((plan.sequence < problem.N)[:, None, None, None, None], states, 0)


def _tagged(saved: Saved) -> Saved:
    """Named, so that a jax.checkpoint policy can ask for them: kda_g_cum, kda_A_qk, .., kda_states, kda_v_new."""
    name = lambda fields, values: (None if a is None else checkpoint_name(a, f"kda_{n}") for n, a in zip(fields, values, strict=True))
    intra = Intra(*name(Intra._fields, saved.intra))
    return Saved(intra, *name(("states", "v_new"), saved[1:]))
