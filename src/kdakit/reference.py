"""The definition of KDA: the token recurrence in NumPy, forward and backward, in float64 unless told otherwise.

    S_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T        o_t = scale * S_t^T q_t

Every other implementation in this library is tested against this file. It is written to be read, not to be fast.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from kdakit import gates
from kdakit.problem import Arrays, Problem, check_cu_seqlens, make_options, make_problem

BLOCK = 64  # the backward keeps one state per BLOCK tokens and replays the rest


class Result(NamedTuple):
    o: Any  # [B, T, HV, V]
    final_state: Any  # [N, HV, K, V] or None
    states: Any = None  # [B, chunks, HV, K, V], the state before each chunk, or None


def kda(q, k, v, g, beta, *, A_log=None, dt_bias=None, initial_state=None, cu_seqlens=None, segment_ids=None, **options) -> Result:
    """The public call in float64 NumPy; `options` are those of `kdakit.torch.chunk_kda`."""
    arrays = Arrays(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, None, segment_ids)
    problem = make_problem("recurrent", arrays, make_options(arrays, **options))
    return forward(problem, arrays)


def step(state, q, k, v, log_decay, beta, einsum=np.einsum):
    """Decay, correct, read:  S <- Diag(e^g) S;  S <- S + beta k (v - k^T S)^T;  o = S^T q."""
    state = np.exp(log_decay)[..., None] * state  # [B, H, K, V]
    error = v - einsum("bhk,bhkv->bhv", k, state)  # [B, H, V]
    state = state + einsum("bhk,bhv->bhkv", beta[..., None] * k, error)  # [B, H, K, V]
    return state, einsum("bhk,bhkv->bhv", q, state)  # o [B, H, V]


def step_backward(previous, q, k, v, log_decay, beta, d_state, d_o, einsum=np.einsum):
    """Gradients of `step` from d_state (of the new state) and d_o; `previous` is the state before the step."""
    decay = np.exp(log_decay)[..., None]
    decayed = decay * previous  # [B, H, K, V]
    error = v - einsum("bhk,bhkv->bhv", k, decayed)
    state = decayed + einsum("bhk,bhv->bhkv", beta[..., None] * k, error)
    d_q = einsum("bhkv,bhv->bhk", state, d_o)
    d_state = d_state + einsum("bhk,bhv->bhkv", q, d_o)
    write = einsum("bhkv,bhk->bhv", d_state, k)  # d_state^T k
    read = einsum("bhkv,bhv->bhk", d_state, error)  # d_state error
    d_v = beta[..., None] * write  # = d_error
    d_beta = (k * read).sum(-1)
    d_k = beta[..., None] * read - einsum("bhkv,bhv->bhk", decayed, d_v)
    d_decayed = d_state - einsum("bhk,bhv->bhkv", k, d_v)
    return decay * d_decayed, d_q, d_k, d_v, (d_decayed * decayed).sum(-1), d_beta


def forward(problem: Problem, arrays: Arrays, dtype=np.float64, einsum=np.einsum, disturb=None) -> Result:
    """o, the final states and, if asked for, the state before every chunk.

    For accuracy.py: `einsum` does the products, `disturb` is applied to the activated inputs.
    """
    arrays = without_padding(problem, arrays)
    x = activate(problem, arrays, dtype) if disturb is None else disturb(activate(problem, arrays, dtype))
    o = np.zeros((problem.B, problem.T, problem.HV, problem.V), dtype)
    initial = initial_states(problem, arrays, dtype)
    final = initial.copy()
    states = []
    for rows, tokens, index in sequences(problem, arrays):
        state = initial[index]
        before = []
        for t in range(tokens.start, tokens.stop):
            if (t - tokens.start) % problem.options.chunk_size == 0:
                before.append(state)
            state, o[rows, t] = step(state, *(a[rows, t] for a in x), einsum)
        final[index] = state
        states += [np.stack(before, 1)] if before else []
    out = None
    if problem.options.return_intermediate_states:
        empty = np.zeros((problem.B, 0, problem.HV, problem.K, problem.V), dtype)
        out = _layout(problem, np.concatenate(states, 1) if states else empty)
    return Result(o, _layout(problem, final) if problem.options.output_final_state else None, out)


def backward(problem: Problem, arrays: Arrays, d_o, d_final_state=None, dtype=np.float64, einsum=np.einsum, disturb=None) -> Arrays:
    """Gradients of sum(o * d_o) + sum(final_state * d_final_state), derived by hand from the recurrence."""
    arrays = without_padding(problem, arrays)
    x = activate(problem, arrays, dtype) if disturb is None else disturb(activate(problem, arrays, dtype))
    d_x = [np.zeros_like(a) for a in x]
    d_o = np.asarray(d_o, dtype)
    start = initial_states(problem, arrays, dtype)
    d_start = np.zeros_like(start)
    if d_final_state is not None:
        d_start += _layout(problem, np.asarray(d_final_state, dtype))
    for rows, tokens, index in sequences(problem, arrays):
        blocks = range(tokens.start, tokens.stop, BLOCK)
        state, checkpoints = start[index], []
        for t in range(tokens.start, tokens.stop):
            if (t - tokens.start) % BLOCK == 0:
                checkpoints.append(state)
            state, _ = step(state, *(a[rows, t] for a in x), einsum)
        d_state = d_start[index]
        for first, state in reversed(list(zip(blocks, checkpoints, strict=True))):
            previous = []
            for t in range(first, min(first + BLOCK, tokens.stop)):
                previous.append(state)
                state, _ = step(state, *(a[rows, t] for a in x), einsum)
            for t in reversed(range(first, first + len(previous))):
                d_state, *grads = step_backward(previous[t - first], *(a[rows, t] for a in x), d_state, d_o[rows, t], einsum)
                for d_a, grad in zip(d_x, grads, strict=True):
                    d_a[rows, t] = grad
        d_start[index] = d_state
    return deactivate(problem, arrays, d_x, d_start, dtype)


def without_padding(problem: Problem, arrays: Arrays) -> Arrays:
    """Zeros in place of the tokens past cu_seqlens[-1], whatever stands there: they take part in nothing."""
    if problem.varlen != "cu_seqlens" or np.asarray(arrays.cu_seqlens)[-1] == problem.T:
        return arrays
    real = np.arange(problem.T) < np.asarray(arrays.cu_seqlens)[-1]
    masked = [np.where(real.reshape(1, -1, *[1] * (np.ndim(x) - 2)), x, np.zeros((), np.asarray(x).dtype)) for x in arrays[:5]]
    return Arrays(*masked, *arrays[5:])


def sequences(problem: Problem, arrays: Arrays):
    """(rows, tokens, states) of everything that runs through the recurrence together."""
    if problem.varlen == "cu_seqlens":
        cu = np.asarray(arrays.cu_seqlens)
        check_cu_seqlens(cu, problem.T)
        return [(slice(0, 1), slice(int(a), int(b)), slice(n, n + 1)) for n, (a, b) in enumerate(pairwise(cu))]
    return [(slice(None), slice(0, problem.T), slice(None))]


def activate(problem: Problem, arrays: Arrays, dtype):
    """Inputs as the recurrence wants them: q (scaled), k [B,T,HV,K], v, log_decay [B,T,HV,K], beta [B,T,HV]."""
    o = problem.options
    q, k, v, g, beta = (np.asarray(a).astype(dtype) for a in arrays[:5])
    if o.l2norm:
        q, k = gates.l2norm(q), gates.l2norm(k)
    q, k = (np.repeat(a, problem.group, axis=2) for a in (q * dtype(o.scale), k))
    return q, k, v, log_decay(problem, arrays, g, dtype), gates.beta_activation(beta, o.beta)


def log_decay(problem: Problem, arrays: Arrays, g, dtype):
    """The gate of the problem's kind; the first token of every later segment forgets everything."""
    A_log, dt_bias = _parameters(arrays, dtype)
    if problem.options.gate == "softplus":
        g = gates.softplus_gate(g, A_log, dt_bias)
    elif problem.options.gate == "bounded":
        g = gates.bounded_gate(g, A_log, dt_bias, dtype(problem.options.lower_bound))
    if problem.varlen == "segment_ids":
        g = np.where(segment_starts(arrays.segment_ids)[..., None, None], -np.inf, g)
    return g


def segment_starts(segment_ids):
    """True at each token [B, T] whose id differs from the one before it."""
    ids = np.asarray(segment_ids)
    return np.concatenate([np.zeros_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], axis=1)


def deactivate(problem: Problem, arrays: Arrays, d_x, d_initial_state, dtype) -> Arrays:
    """From gradients of `activate`'s outputs to gradients of the call's inputs."""
    o = problem.options
    q, k, _, g, beta = (np.asarray(a).astype(dtype) for a in arrays[:5])
    d_q, d_k, d_v, d_g, d_beta = d_x
    d_q, d_k = (a.reshape(*q.shape[:3], problem.group, problem.K).sum(3) for a in (d_q * dtype(o.scale), d_k))
    if o.l2norm:
        d_q, d_k = gates.l2norm_backward(q, d_q), gates.l2norm_backward(k, d_k)
    A_log, dt_bias = _parameters(arrays, dtype)
    d_A_log = d_dt_bias = None
    if o.gate == "softplus":
        d_g, d_A_log, d_dt_bias = gates.softplus_gate_backward(g, A_log, dt_bias, d_g)
    elif o.gate == "bounded":
        d_g, d_A_log, d_dt_bias = gates.bounded_gate_backward(g, A_log, dt_bias, dtype(o.lower_bound), d_g)
    return Arrays(
        d_q, d_k, d_v, d_g, gates.beta_activation_backward(beta, o.beta, d_beta),
        None if A_log is None else d_A_log.reshape(np.shape(arrays.A_log)),
        None if dt_bias is None else d_dt_bias.reshape(np.shape(arrays.dt_bias)),
        None if arrays.initial_state is None else _layout(problem, d_initial_state),
    )  # fmt: skip


def initial_states(problem: Problem, arrays: Arrays, dtype):
    """[N, HV, K, V], zeros where none were given."""
    if arrays.initial_state is None:
        return np.zeros((problem.N, problem.HV, problem.K, problem.V), dtype)
    return _layout(problem, np.asarray(arrays.initial_state).astype(dtype))


def _parameters(arrays, dtype):
    return (None if a is None else np.asarray(a).astype(dtype) for a in (arrays.A_log, arrays.dt_bias))


def _layout(problem: Problem, state):
    """[.., K, V] <-> the caller's layout."""
    return state.swapaxes(-1, -2) if problem.options.state_v_first else state
