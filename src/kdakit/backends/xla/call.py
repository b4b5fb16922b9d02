"""The stages in order: a whole call, its backward, and the token recurrence."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from kdakit.backends.xla.gate import Activated, activate, activate_backward, segment_starts
from kdakit.backends.xla.intra import Intra, intra_backward, intra_forward, solution_backward
from kdakit.backends.xla.output import output_backward, output_forward
from kdakit.backends.xla.plan import (
    Config,
    Plan,
    default_config,
    edges_passed,
    from_chunks,
    join_windows,
    make_plan,
    pad_tokens,
    to_chunks,
    window_arrays,
    window_slots,
    window_tokens,
    window_valid,
)
from kdakit.backends.xla.state import state_backward, state_forward
from kdakit.backends.xla.step import recurrence, recurrence_backward
from kdakit.chunked import as_chunked
from kdakit.problem import Arrays, Problem
from kdakit.reference import Result


class Kept(NamedTuple):
    """What a window computes; leading axes [G, B, HV]."""

    intra: Intra
    states: Any  # [.., K, V]
    v_new: Any  # [.., C, V]


class Saved(NamedTuple):
    """What the backward gets, per window. It computes again what is None in `kept`: most of it, unless disable_recompute."""

    entering: Any  # [windows, B, HV, K, V]  the state at the window's start; None where the states before all chunks are kept
    kept: Kept


def forward(problem: Problem, arrays: Arrays, config: Config | None = None) -> tuple[Result, Saved | None]:
    """The call's results and, if its gradient is needed, what its backward uses."""
    o, problem = problem.options, as_chunked(problem)
    plan = make_plan(problem, config or default_config(problem, "cpu"), arrays.cu_seqlens)
    initial = _initial_states(problem, arrays)
    tokens, resets = _padded(problem, plan, arrays)

    def window(carry, index):
        entering, finals = carry
        x = _window_inputs(problem, plan, tokens, resets, index)
        kept, after, last = _window_states(plan, x, entering, initial, index)
        out = output_forward(kept.intra.q_decayed, kept.intra.A_qk, kept.states, kept.v_new)
        states = layout(problem, kept.states).astype(problem.dtype) if o.return_intermediate_states else None
        saved = _keep(plan, entering, kept, o.disable_recompute) if problem.needs_grad else None
        return (last, _collect(plan, finals, after, index, "last")), (from_chunks(plan, out).astype(problem.dtype), states, saved)

    packed = plan.slots is not None
    carry = (jnp.zeros_like(initial[:1]), initial) if packed else (initial, None)
    (last, finals), (out, states, saved) = lax.scan(window, carry, jnp.arange(plan.windows))
    final = layout(problem, finals if packed else last).astype(problem.state_dtype) if o.output_final_state else None
    if states is not None:  # [windows, G, B, ..] -> [B, NT, ..]
        states = jnp.moveaxis(states.reshape(plan.windows * plan.G, *states.shape[2:]), 0, 1)[:, : problem.chunks]
        if packed:
            used = plan.slots.sequence.reshape(-1)[: problem.chunks] < problem.N
            states = jnp.where(used[:, None, None, None], states, 0)
    return Result(join_windows(plan, out), final, states), saved


def backward(problem: Problem, arrays: Arrays, saved: Saved | None, d_o, d_final_state, config: Config | None = None) -> Arrays:
    """Gradients of sum(o * d_o) + sum(final_state * d_final_state), each in its input's dtype; None where there is no input."""
    if problem.K == 1:
        return _backward_by_token(problem, arrays, d_o, d_final_state)
    problem = as_chunked(problem)
    config = config or default_config(problem, "cpu")
    if saved is None:
        saved = forward(problem.replace(needs_grad=True, disable_recompute=False), arrays, config)[1]
    dtype = problem.compute_dtype
    plan = make_plan(problem, config, arrays.cu_seqlens)
    initial = _initial_states(problem, arrays)
    d_final = _final_gradients(problem, d_final_state, initial)
    tokens, resets = _padded(problem, plan, arrays)
    d_out = pad_tokens(plan, d_o)

    def window(carry, xs):
        index, (entering, kept) = xs
        d_last, d_initials = carry
        x = _window_inputs(problem, plan, tokens, resets, index)
        if kept.states is None:
            kept, _, _ = _window_states(plan, x, entering, initial, index, kept.intra)
        elif kept.intra.w is None:
            kept = kept._replace(intra=_window_intra(x, kept.intra))
        intra, states, v_new = kept
        d_window = to_chunks(plan, window_tokens(plan, d_out, index).astype(dtype))
        d_q_decayed, d_A_qk, d_states, d_v_new = output_backward(intra.q_decayed, intra.A_qk, states, v_new, d_window)
        d_w, d_u, d_k_decayed, d_decay, d_before, d_entering = state_backward(
            intra.w, intra.k_decayed, intra.decay, states, v_new, d_states, d_v_new, d_last, _entry(plan, d_final, index, "last"),
            intra.inverse,
        )  # fmt: skip
        d_A_kk = solution_backward(v_new, d_u)
        d_x = intra_backward(*x, intra, Intra(None, d_A_qk, d_A_kk, None, d_w, d_u, d_q_decayed, d_k_decayed, d_decay), solve=False)
        d_x = Activated(*(from_chunks(plan, d) for d in d_x))
        gradients = activate_backward(problem, window_arrays(plan, tokens, index), d_x, window_valid(plan, index))
        return (d_entering, _collect(plan, d_initials, d_before, index, "first")), gradients

    packed = plan.slots is not None
    # Sequences without tokens hand d_final on to their initial state.
    carry = (jnp.zeros_like(d_final[:1]), d_final) if packed else (d_final, None)
    (d_first, d_initials), gradients = lax.scan(window, carry, (jnp.arange(plan.windows), saved), reverse=True)
    d_initial = layout(problem, d_initials if packed else d_first)
    whole = [join_windows(plan, d) for d in gradients[:5]]
    parameters = [d if d is None else d.sum(0) for d in gradients[5:7]]
    return Arrays(*whole, *_like_inputs(arrays, (*parameters, d_initial)))


def _backward_by_token(problem: Problem, arrays: Arrays, d_o, d_final_state) -> Arrays:
    """What lies past the last packed sequence may be anything."""
    sequence, resets = _sequences(problem, arrays)
    real = True if sequence is None else sequence < problem.N
    *tokens, d_o = (jnp.where(jnp.reshape(real, (1, -1, *(1,) * (x.ndim - 2))), x, 0) for x in (*arrays[:5], d_o))
    arrays, initial = Arrays(*tokens, *arrays[5:]), _initial_states(problem, arrays)
    d_final, d_o = _final_gradients(problem, d_final_state, initial), d_o.astype(problem.compute_dtype)
    d_x, d_initial = recurrence_backward(activate(problem, arrays, resets), initial, d_o, d_final, sequence)
    d = activate_backward(problem, arrays, d_x)
    return Arrays(*d[:5], *_like_inputs(arrays, (*d[5:7], layout(problem, d_initial))))


def _final_gradients(problem: Problem, d_final_state, states):
    """[N, HV, K, V] in the compute dtype, zeros like `states` where none are given."""
    return jnp.zeros_like(states) if d_final_state is None else layout(problem, d_final_state.astype(problem.compute_dtype))


def _like_inputs(arrays: Arrays, gradients):
    """Those of A_log, dt_bias and initial_state in the shapes and dtypes of what they belong to; None where there is none."""
    return (None if x is None else d.reshape(x.shape).astype(x.dtype) for x, d in zip(arrays[5:8], gradients, strict=True))


def step(problem: Problem, arrays: Arrays, config: Config | None = None) -> Result:
    """The same results token by token."""
    sequence, resets = _sequences(problem, arrays)
    o, final = recurrence(activate(problem, arrays, resets), _initial_states(problem, arrays), sequence)
    if sequence is not None:
        o = jnp.where((sequence < problem.N)[:, None, None], o, 0)
    final = layout(problem, final).astype(problem.state_dtype) if problem.options.output_final_state else None
    return Result(o.astype(problem.dtype), final)


def _sequences(problem: Problem, arrays: Arrays):
    """[T], the sequence of each token of a packed call, and [B, T], whether a segment starts; None where there are none."""
    packed, segmented = problem.varlen == "cu_seqlens", problem.varlen == "segment_ids"
    return edges_passed(arrays.cu_seqlens[1:], problem.T) if packed else None, segment_starts(arrays.segment_ids) if segmented else None


def layout(problem: Problem, state):
    """[.., K, V] <-> the caller's layout."""
    return state.swapaxes(-1, -2) if problem.options.state_v_first else state


def _padded(problem: Problem, plan: Plan, arrays: Arrays):
    """The arrays with whole windows of tokens, and where segments start."""
    tokens = Arrays(*(pad_tokens(plan, x) for x in arrays[:5]), arrays.A_log, arrays.dt_bias)
    resets = pad_tokens(plan, segment_starts(arrays.segment_ids)) if problem.varlen == "segment_ids" else None
    return tokens, resets


def _window_inputs(problem: Problem, plan: Plan, tokens: Arrays, resets, index) -> Activated:
    """q, k, v, g, beta as [G, B, HV, C, ..]."""
    x = activate(problem, window_arrays(plan, tokens, index), window_tokens(plan, resets, index), window_valid(plan, index))
    return Activated(*(to_chunks(plan, a) for a in x))


def _window_states(plan: Plan, x: Activated, entering, initial, index, known: Intra | None = None):
    """Kept, the states after each chunk (packed calls) and the last one."""
    intra = _window_intra(x, known)
    entry = _entry(plan, initial, index, "first")
    states, v_new, after, last = state_forward(intra.w, intra.u, intra.k_decayed, intra.decay, entering, entry, intra.inverse)
    return Kept(intra, states, v_new), after, last


def _window_intra(x: Activated, known: Intra | None = None) -> Intra:
    return intra_forward(*x, *(() if known is None else (known.A_qk, known.inverse)), solve=False)


def _entry(plan: Plan, states, index, where: str):
    """Where sequences of a packed call begin (or end) in a window, and their states [G, 1, HV, K, V] there."""
    slots = window_slots(plan, index)
    return None if slots is None else (getattr(slots, where), states.take(slots.sequence, axis=0, mode="clip")[:, None])


def _collect(plan: Plan, states, found, index, where: str):
    """`states` [N, HV, K, V] with those replaced whose sequence ends (or begins) in this window."""
    slots = window_slots(plan, index)
    if slots is None:
        return None
    rows = jnp.where(getattr(slots, where), slots.sequence, states.shape[0])  # out of range: dropped
    return states.at[rows].set(found[:, 0], mode="drop")


def _initial_states(problem: Problem, arrays: Arrays):
    """[N, HV, K, V] in the compute dtype."""
    if arrays.initial_state is not None:
        return layout(problem, arrays.initial_state.astype(problem.compute_dtype))
    shape = (problem.N, problem.HV, problem.K, problem.V)
    # Like v, so that inside shard_map the zeros vary over the same mesh axes as the states that follow them.
    return jnp.zeros_like(arrays.v, problem.compute_dtype, shape=shape)


def _keep(plan: Plan, entering, kept: Kept, everything: bool) -> Saved:
    """What is saved for the backward, named for jax.checkpoint policies: kda_A_qk, kda_inverse; kda_w, .., kda_states, kda_v_new.

    A window of one chunk saves its state in any case, and with v_new beside it has no product to repeat: it never saves more.
    """
    fields = kept.intra._asdict() | {"states": kept.states, "v_new": kept.v_new}
    wanted = fields.keys() - {"g_cum", "A_kk"} if everything else {"A_qk", "inverse"}
    if plan.G == 1:
        wanted = {"A_qk", "inverse", "states", "v_new"}
    named = {name: checkpoint_name(x, f"kda_{name}") if name in wanted else None for name, x in fields.items()}
    kept = Kept(Intra(*(named[name] for name in Intra._fields)), named["states"], named["v_new"])
    return Saved(entering if kept.states is None else None, kept)
