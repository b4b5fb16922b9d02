"""What is not finite stays in its own sequence and head, also where a backend lets several of them meet in one product of matrices.

There NaN times zero would be NaN for all. So such a backend gets zeros in place of tokens that hold anything not finite, and the results
that depend on them become NaN afterwards: outputs of a head from such a token to the end of its sequence, its final state, and in the
backward the gradients of the whole sequence. All other results are the bits that they would be without. A log-decay of -inf forgets, as it
does elsewhere. For JAX.

That reads and writes all inputs once more. Where they are to be moved once, a backend runs on what it gets, and again, in this way, if its
results tell that something was not finite: whatever is not shows in them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from kdakit.problem import Arrays, Problem
from kdakit.reference import Result

FORGET = -1e30  # a log-decay whose sums over any chunk are finite, and whose exponential is 0; float16 has none so low


class Quarantine(NamedTuple):
    arrays: Arrays  # everything finite
    bad: Any  # [B, T, HV]  tokens that hold something not finite
    starts: Any  # [B, T]  tokens that begin a sequence
    states: Any  # [N, HV]  initial states that do


def any_lost(x):
    """Whether anything is not finite."""
    return ~jnp.isfinite(x).all()


def again_if(lost, found, again):
    """`found`, or again() if `lost`: a loop that runs once or not at all, since it, unlike a condition, passes arrays on without a copy."""
    return lax.while_loop(lambda carry: carry[0], lambda carry: (carry[0] & False, again()), (lost, found))[1]


def isolate(problem: Problem, arrays: Arrays) -> Quarantine:
    g = arrays.g
    if problem.options.gate == "log_decay":
        g = jnp.where(g == -jnp.inf, jnp.asarray(max(FORGET, float(jnp.finfo(g.dtype).min)), g.dtype), g)
        arrays = arrays._replace(g=g)
    keys = _spoiled(arrays.q) | _spoiled(arrays.k)  # [B, T, H]
    bad = jnp.repeat(keys, problem.group, axis=2) | _spoiled(arrays.v) | _spoiled(g) | ~jnp.isfinite(arrays.beta)
    starts = _starts(problem, arrays)
    states = jnp.zeros_like(bad, shape=(problem.N, problem.HV))
    if arrays.initial_state is not None:
        states = _spoiled(arrays.initial_state.reshape(problem.N, problem.HV, -1))
        bad = bad | _at_edge(problem, arrays, states, 0)
    clean = {"q": _zeros(arrays.q, keys), "k": _zeros(arrays.k, keys), "v": _zeros(arrays.v, bad), "g": _zeros(g, bad)}
    clean["beta"] = jnp.where(bad, 0, arrays.beta)
    for name in ("A_log", "dt_bias"):
        parameter = getattr(arrays, name)
        if parameter is not None:
            head = ~jnp.isfinite(parameter.reshape(problem.HV, -1)).all(-1)
            bad = bad | head
            clean[name] = jnp.where(jnp.isfinite(parameter), parameter, 0)
    if problem.varlen == "cu_seqlens":
        bad = bad & (jnp.arange(problem.T) < arrays.cu_seqlens[-1])[:, None]  # tokens behind the last sequence are nobody's
    if arrays.initial_state is not None:
        clean["initial_state"] = jnp.where(jnp.isfinite(arrays.initial_state), arrays.initial_state, 0)
    return Quarantine(arrays._replace(**clean), bad, starts, states)


def spoil_results(problem: Problem, result: Result, found: Quarantine) -> Result:
    """`result` of the clean arrays with NaN where it depends on what was taken out."""
    from_here = _since_start(found.bad, found.starts)  # [B, T, HV]
    o = jnp.where(from_here[..., None], jnp.nan, result.o)
    final = result.final_state
    if final is not None:
        final = jnp.where(_at_ends(problem, found, from_here, found.states)[..., None, None], jnp.nan, final)
    states = result.states
    if states is not None:
        states = jnp.where(_before_chunks(problem, found, from_here)[..., None, None], jnp.nan, states)
    return Result(o, final, states)


def isolate_backward(problem: Problem, found: Quarantine, d_o, d_final_state):
    """What is not finite in the cotangents taken out of them, and noted: (found, d_o, d_final_state)."""
    lost = _spoiled(d_o)
    bad, d_o = found.bad | lost, _zeros(d_o, lost)
    states = found.states
    if d_final_state is not None:
        lost = _spoiled(d_final_state.reshape(problem.N, problem.HV, -1))
        d_final_state, states = _zeros(d_final_state, lost), states | lost
        bad = bad | _at_edge(problem, found.arrays, lost, -1)
    return found._replace(bad=bad, states=states), d_o, d_final_state


def spoil_gradients(problem: Problem, gradients: Arrays, found: Quarantine) -> Arrays:
    whole = _since_start(found.bad, found.starts) | _until_end(found.bad, found.starts)  # [B, T, HV]
    keys = whole.reshape(*whole.shape[:2], problem.H, problem.group).any(3)
    head = whole.any((0, 1))
    q, k, v, g, beta, A_log, dt_bias, state = gradients[:8]
    nan = lambda here, x: None if x is None else jnp.where(here, jnp.nan, x).astype(x.dtype)
    by_head = lambda x: None if x is None else nan(head[:, None], x.reshape(problem.HV, -1)).reshape(x.shape)
    if state is not None:
        state = nan(_at_starts(problem, found, whole, found.states)[..., None, None], state)
    tokens = nan(keys[..., None], q), nan(keys[..., None], k), nan(whole[..., None], v), nan(whole[..., None], g), nan(whole, beta)
    return Arrays(*tokens, by_head(A_log), by_head(dt_bias), state, *gradients[8:])


def _spoiled(x):
    """[.., D] -> [..]: whether anything is not finite."""
    return ~jnp.isfinite(x).all(-1)


def _zeros(x, where):
    return jnp.where(where.reshape(*where.shape, *[1] * (x.ndim - where.ndim)), jnp.zeros((), x.dtype), x)


def _starts(problem: Problem, arrays: Arrays):
    """[B, T]."""
    first = jnp.arange(problem.T) == 0
    if problem.varlen == "segment_ids":
        changes = jnp.pad(arrays.segment_ids[:, 1:] != arrays.segment_ids[:, :-1], ((0, 0), (1, 0)))
        return changes | first
    if problem.varlen == "cu_seqlens":
        cu = arrays.cu_seqlens
        return (jnp.zeros_like(cu, shape=problem.T + 1).at[jnp.minimum(cu, problem.T)].set(1)[: problem.T] == 1)[None] | first
    return jnp.broadcast_to(first, (problem.B, problem.T))


def _ends(starts):
    """[B, T]: tokens that end a sequence."""
    return jnp.concatenate([starts[:, 1:], jnp.ones_like(starts[:, :1])], 1)


def _at_edge(problem: Problem, arrays: Arrays, states, edge: int):
    """[B, T, HV]: states [N, HV] at the token that each enters (edge 0) or leaves (edge -1)."""
    t = jnp.arange(problem.T)
    if problem.varlen != "cu_seqlens":  # a row's first and last token, whatever its segments
        return (t == edge % problem.T)[:, None] & states[:, None]
    cu = arrays.cu_seqlens
    owner = jnp.minimum(jnp.cumsum(jnp.zeros_like(cu, shape=problem.T + 1).at[jnp.minimum(cu[1:], problem.T)].add(1))[:-1], problem.N - 1)
    here = t == (cu[owner] if edge == 0 else cu[owner + 1] - 1)
    return (here[:, None] & states[owner])[None]


def _before_chunks(problem: Problem, found: Quarantine, from_here):
    """[B, chunks, HV]: whether the state before each chunk is bad: the initial one, or the one after the token before."""
    size = problem.options.chunk_size
    if problem.varlen != "cu_seqlens":
        return jnp.concatenate([found.states[:, None], from_here[:, size - 1 :: size]], 1)[:, : problem.chunks]
    cu = found.arrays.cu_seqlens
    counts = -(-jnp.diff(cu) // size)
    ends = jnp.cumsum(counts)
    slot = jnp.arange(problem.chunks)
    sequence = jnp.minimum((ends <= slot[:, None]).sum(1), problem.N - 1)
    number = slot - (ends - counts)[sequence]
    before = from_here[0].take(cu[sequence] + size * number - 1, axis=0, mode="clip")
    return (jnp.where((number == 0)[:, None], found.states[sequence], before) & (slot < ends[-1])[:, None])[None]


def _since_start(bad, starts):
    """[B, T, HV]: whether a token of the sequence up to this one is bad."""
    t = jnp.arange(bad.shape[1])[:, None]
    return lax.cummax(jnp.where(bad, t, -1), 1) >= lax.cummax(jnp.where(starts[..., None], t, 0), 1)


def _until_end(bad, starts):
    """[B, T, HV]: whether a token of the sequence from this one on is bad."""
    backwards = lambda x: x[:, ::-1]
    return backwards(_since_start(backwards(bad), backwards(_ends(starts))))


def _at_ends(problem: Problem, found: Quarantine, tokens, empty):
    """[N, HV]: tokens [B, T, HV] at each sequence's last token; `empty` [N, HV] where it has none."""
    if problem.varlen != "cu_seqlens":
        return tokens[:, -1]
    cu = found.arrays.cu_seqlens
    return jnp.where((jnp.diff(cu) > 0)[:, None], tokens[0].take(cu[1:] - 1, axis=0, mode="clip"), empty)


def _at_starts(problem: Problem, found: Quarantine, tokens, empty):
    """The same at its first token."""
    if problem.varlen != "cu_seqlens":
        return tokens[:, 0]
    cu = found.arrays.cu_seqlens
    return jnp.where((jnp.diff(cu) > 0)[:, None], tokens[0].take(cu[:-1], axis=0, mode="clip"), empty)
