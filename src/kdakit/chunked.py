"""The chunk form of KDA in NumPy, one sequence at a time, with every intermediate named as the kernels name it.

Within a chunk of C tokens, with G_i the sum of the log-decays up to and including token i:

    A_qk[i,j] = scale * sum_d q[i,d] k[j,d] exp(G_i - G_j)      j <= i
    A_kk[i,j] = beta_i * sum_d k[i,d] k[j,d] exp(G_i - G_j)     j <  i
    (I + A_kk) u = beta v            (I + A_kk) w = beta k exp(G)
    v_new = u - w S                  o = (scale q exp(G)) S + A_qk v_new
    S <- Diag(exp(G_C)) S + (k exp(G_C - G))^T v_new

The decay between two tokens is formed as the sum of the gates between them. The difference of two cumulative sums would be the same
number on paper, and lose it to cancellation after one large gate.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kdakit.problem import Arrays, Problem
from kdakit.reference import Result, _layout, activate, initial_states, sequences


class Intra(NamedTuple):
    """What one chunk needs no state for; leading axes are free, C is the chunk's length."""

    g_cum: Any  # [.., C, K]  log-decay from the chunk's start
    A_qk: Any  # [.., C, C]  lower triangle with diagonal
    A_kk: Any  # [.., C, C]  strictly lower triangle
    inverse: Any  # [.., C, C]  (I + A_kk)^-1
    w: Any  # [.., C, K]
    u: Any  # [.., C, V]
    q_decayed: Any  # [.., C, K]  scale q exp(G)
    k_decayed: Any  # [.., C, K]  k exp(G_C - G)
    decay: Any  # [.., K]     exp(G_C)


def as_chunked(problem: Problem) -> Problem:
    """The problem in chunks of no more tokens than there are key channels, but for states that the caller wants of longer ones. As many
    tokens may overwrite all that was before them; in a longer chunk what is left of it is a difference of what was written."""
    o = problem.options
    return problem if o.return_intermediate_states else problem.replace(chunk_size=min(o.chunk_size, 1 << (problem.K.bit_length() - 1)))


def pairwise_log_decay(g):
    """g [.., C, K] -> [.., C, C, K]: at (i, j) the sum of g over j < m <= i; -inf above the diagonal."""
    C = g.shape[-2]
    i, j = np.indices((C, C))
    later = np.where((i > j)[..., None], g[..., :, None, :], 0)  # [.., m, j, K]: gates after j
    return np.where((i >= j)[..., None], np.cumsum(later, axis=-3), -np.inf)


def intra(q, k, v, g, beta) -> Intra:
    """q (scaled), k, g [.., C, K], v [.., C, V], beta [.., C] -> everything of a chunk that does not depend on the state."""
    decays = np.exp(pairwise_log_decay(g))  # [.., i, j, K]
    A_qk = np.einsum("...ik,...jk,...ijk->...ij", q, k, decays)
    A_kk = np.tril(beta[..., None] * np.einsum("...ik,...jk,...ijk->...ij", k, k, decays), -1)
    inverse = unit_lower_inverse(A_kk)
    g_cum = np.cumsum(g, axis=-2)
    k_to_end = k * decays[..., -1, :, :]
    w = inverse @ (beta[..., None] * k * np.exp(g_cum))
    u = inverse @ (beta[..., None] * v)
    return Intra(g_cum, A_qk, A_kk, inverse, w, u, q * np.exp(g_cum), k_to_end, np.exp(g_cum[..., -1, :]))


def unit_lower_inverse(A):
    """(I + A)^-1 for strictly lower A [.., C, C] by forward substitution, one row at a time."""
    inverse = np.zeros_like(A) + np.eye(A.shape[-1], dtype=A.dtype)
    for i in range(1, A.shape[-1]):
        inverse[..., i, :i] = -np.einsum("...j,...jc->...c", A[..., i, :i], inverse[..., :i, :i])
    return inverse


def chunk_step(state, x: Intra):
    """One chunk of the recurrence: state [.., K, V] -> next state, v_new [.., C, V], o [.., C, V]."""
    v_new = x.u - x.w @ state
    o = x.q_decayed @ state + x.A_qk @ v_new
    state = x.decay[..., None] * state + np.swapaxes(x.k_decayed, -1, -2) @ v_new
    return state, v_new, o


def forward(problem: Problem, arrays: Arrays, chunk_size: int | None = None, dtype=np.float64) -> Result:
    """Same numbers as `reference.forward`, chunk by chunk; `chunk_size` may be any positive integer."""
    C = chunk_size or problem.options.chunk_size
    x = activate(problem, arrays, dtype)
    o = np.zeros((problem.B, problem.T, problem.HV, problem.V), dtype)
    initial = initial_states(problem, arrays, dtype)
    final = initial.copy()
    states = []
    for rows, tokens, index in sequences(problem, arrays):
        state = initial[index]
        for start in range(tokens.start, tokens.stop, C):
            chunk = slice(start, min(start + C, tokens.stop))
            q, k, v, g, beta = (np.moveaxis(a[rows, chunk], 2, 1) for a in x)  # [B, HV, C, ..]
            states.append(state)
            state, _, out = chunk_step(state, intra(q, k, v, g, beta))
            o[rows, chunk] = np.moveaxis(out, 1, 2)
        final[index] = state
    before = None
    if problem.options.return_intermediate_states:
        empty = np.zeros((problem.B, 0, problem.HV, problem.K, problem.V), dtype)
        before = _layout(problem, np.stack(states, 1) if states else empty)
    return Result(o, _layout(problem, final) if problem.options.output_final_state else None, before)
