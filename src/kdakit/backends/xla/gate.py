"""Stage gate: the activations of the inputs, and the sums of log-decays that every later exponential takes.

A decay between two tokens is the sum of the gates between them. Here that sum is only ever built by adding: never as the difference of two
cumulative sums, which loses its digits after one large gate, and never by multiplying with a 0/1 matrix, which turns a log-decay of
-inf (a reset) into NaN. All log-decays are <= 0, so every exponent is too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kdakit.backends.xla.plan import BLOCK
from kdakit.backends.xla.products import product, row_dots
from kdakit.gates import L2_EPSILON
from kdakit.problem import Arrays, Problem

LEVELS = (1, 2, 4, 8)  # run lengths inside a block of 16


class Activated(NamedTuple):
    """The inputs as the recurrence wants them, in the compute dtype."""

    q: Any  # [B, T, HV, K]  scaled
    k: Any  # [B, T, HV, K]
    v: Any  # [B, T, HV, V]
    g: Any  # [B, T, HV, K]  log-decay
    beta: Any  # [B, T, HV]


def activate(problem: Problem, arrays: Arrays, resets=None, valid=None) -> Activated:
    """l2norm of q and k, scale, repeat over the group; gate; beta. Takes all tokens or a window of them.

    softplus: g = -exp(A_log) softplus(g + dt_bias)        bounded: g = lower_bound sigmoid(exp(A_log) (g + dt_bias))
    Tokens with `resets` [B, T], those that start a new segment, have g = -inf. Where not `valid` [T], beta = g = 0.
    """
    o = problem.options
    q, k, v, g, beta = (x.astype(problem.compute_dtype) for x in arrays[:5])
    if o.l2norm:
        q, k = l2norm(q), l2norm(k)
    q, k = (jnp.repeat(x, problem.group, axis=2) for x in (q * o.scale, k))
    if o.gate != "log_decay":
        a, x = _gate_argument(problem, arrays, g)
        g = -a * jax.nn.softplus(x) if o.gate == "softplus" else o.lower_bound * jax.nn.sigmoid(a * x)
    if o.beta != "given":
        beta = (2 if o.beta == "double_sigmoid" else 1) * jax.nn.sigmoid(beta)
    if resets is not None:
        g = jnp.where(resets[..., None, None], -jnp.inf, g)
    if valid is not None:
        g, beta = jnp.where(valid[:, None, None], g, 0), jnp.where(valid[:, None], beta, 0)
    return Activated(q, k, v, g, beta)


def activate_backward(problem: Problem, arrays: Arrays, d_x: Activated, valid=None) -> Arrays:
    """From gradients of `activate`'s results to those of its inputs: q, k, v, g, beta in their dtypes, A_log [HV] and dt_bias [HV, K].

    l2norm, r = 1/sqrt(x.x + eps), y = r x:      d_x = r (d_y - y (y . d_y))
    softplus gate, x = g + dt_bias, a = e^A_log: d_x = -a sigmoid(x) d_g, d_A_log = sum -a softplus(x) d_g, d_dt_bias = sum d_x
    bounded gate, s = sigmoid(a x):              d_x = a z, z = lower_bound s (1 - s) d_g, d_A_log = sum a x z, d_dt_bias = sum d_x
    """
    o = problem.options
    q, k, _, g, beta = (x.astype(problem.compute_dtype) for x in arrays[:5])
    d_q, d_k, d_v, d_g, d_beta = d_x
    if valid is not None:
        d_g = jnp.where(valid[:, None, None], d_g, 0)
    d_q, d_k = (x.reshape(*q.shape[:3], problem.group, problem.K).sum(3) for x in (d_q * o.scale, d_k))
    if o.l2norm:
        d_q, d_k = l2norm_backward(q, d_q), l2norm_backward(k, d_k)
    d_A_log = d_dt_bias = None
    if o.gate != "log_decay":
        a, x = _gate_argument(problem, arrays, g)
        if o.gate == "softplus":
            d_A_log = (-a * jax.nn.softplus(x) * d_g).sum((0, 1, 3))
            d_g = -a * jax.nn.sigmoid(x) * d_g
        else:
            s = jax.nn.sigmoid(a * x)
            z = o.lower_bound * s * (1 - s) * d_g
            d_A_log, d_g = (a * x * z).sum((0, 1, 3)), a * z
        d_dt_bias = d_g.sum((0, 1))
    if o.beta != "given":
        s = jax.nn.sigmoid(beta)
        d_beta = (2 if o.beta == "double_sigmoid" else 1) * s * (1 - s) * d_beta
    gradients = (d.astype(x.dtype) for x, d in zip(arrays[:5], (d_q, d_k, d_v, d_g, d_beta), strict=True))
    return Arrays(*gradients, None if arrays.A_log is None else d_A_log, None if arrays.dt_bias is None else d_dt_bias)


def _gate_argument(problem: Problem, arrays: Arrays, g):
    """exp(A_log) [HV, 1], or 1 without A_log, and g + dt_bias [B, T, HV, K]."""
    dtype = problem.compute_dtype
    a = 1 if arrays.A_log is None else jnp.exp(arrays.A_log.astype(dtype)).reshape(problem.HV, 1)
    return a, g if arrays.dt_bias is None else g + arrays.dt_bias.astype(dtype).reshape(problem.HV, problem.K)


def segment_starts(segment_ids):
    """True at each token [B, T] whose id differs from the one before it."""
    return jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))[:, : segment_ids.shape[1]]


def l2norm(x):
    """x / sqrt(x . x + eps) over the last axis."""
    return x / jnp.sqrt(row_dots(x, x) + L2_EPSILON)


def l2norm_backward(x, d_out):
    """With r = 1/sqrt(x . x + eps) and y = r x:  d_x = r (d_y - y (y . d_y))."""
    r = 1 / jnp.sqrt(row_dots(x, x) + L2_EPSILON)
    y = r * x
    return r * (d_out - y * row_dots(y, d_out))


class BlockSums(NamedTuple):
    """Sums of log-decays inside a chunk of n blocks of 16 tokens; also the shape of their gradients.

    Inside the blocks, level s = 1, 2, 4, 8 pairs each second run of s tokens with the first run before it: `rows` belong to the second,
    `columns` to the first, and both count from the boundary between the two. P is the number of pairs, C / 2s.
    """

    rows: tuple  # 4 x [.., P, s, K]  boundary to token i, inclusive
    columns: tuple  # 4 x [.., P, s, K]  after token j to the boundary
    prefix: Any  # [.., n, 16, K]  start of the block to token i, inclusive
    suffix: Any  # [.., n, 16, K]  after token j to the end of the block
    between: Any  # [.., n-1, n-1, K]  at [I-1, J]: the blocks after J and before I
    g_cum: Any  # [.., C, K]  start of the chunk to token i, inclusive
    to_end: Any  # [.., C, K]  after token j to the end of the chunk


def block_sums(g) -> BlockSums:
    """g [.., C, K] -> all sums that the chunk needs; those of a run come from those of its halves and the halves' totals."""
    *lead, C, K = g.shape
    rows, columns = [], []
    to, after = g, jnp.zeros_like(g)
    for s in LEVELS:
        shape = (*lead, C // (2 * s), 2, s, K)
        to, after = to.reshape(shape), after.reshape(shape)
        to_1, to_2, after_1, after_2 = to[..., 0, :, :], to[..., 1, :, :], after[..., 0, :, :], after[..., 1, :, :]
        rows.append(to_2)
        columns.append(after_1)
        to = jnp.concatenate([to_1, to_1[..., -1:, :] + to_2], -2)
        after = jnp.concatenate([after_1 + to_2[..., -1:, :], after_2], -2)
    total = to[..., -1, :]  # [.., n, K]
    # between[I, J] = between[I-1, J] + total[I-1], from nothing at I = J + 1.
    between = jnp.where(_later(C // BLOCK), total[..., :-1, None, :], 0)
    between = lax.cumsum(between, between.ndim - 3)
    g_cum = (to + _sums_before(total)[..., None, :]).reshape(g.shape)
    to_end = (after + _sums_after(total)[..., None, :]).reshape(g.shape)
    return BlockSums(tuple(rows), tuple(columns), to, after, between, g_cum, to_end)


def block_sums_backward(d: BlockSums):
    """d_g [.., C, K] from the gradients of all sums: each gate collects from every sum that it is part of.

    The shorter way, a reverse cumulative sum of q d_q - k d_k, is a difference of large numbers where the gates are strong.
    """
    *lead, C, K = d.g_cum.shape
    blocks = lambda x: x.reshape(*lead, C // BLOCK, BLOCK, K)
    d_g_cum, d_to_end = blocks(d.g_cum), blocks(d.to_end)
    # Runs of one token: a row's sum is its own gate, a column's is empty.
    d_g = blocks(jnp.pad(d.rows[0], [(0, 0)] * (len(lead) + 1) + [(1, 0), (0, 0)]))
    levels = [blocks(jnp.concatenate([columns, rows], -2)) for rows, columns in zip(d.rows[1:], d.columns[1:], strict=True)]
    for members, d_sums in zip(_MEMBERS, (*levels, d.prefix + d_g_cum, d.suffix + d_to_end), strict=True):
        # Gradients are finite, so here, unlike for the gates themselves, a product with zeros and ones is a sum.
        part = jnp.broadcast_to(jnp.asarray(members, d_sums.dtype), (*d_sums.shape[:-1], BLOCK))
        d_g = d_g + product("...mi,...ik->...mk", part, d_sums)
    d_total = jnp.where(_later(C // BLOCK), lax.cumsum(d.between, d.between.ndim - 3, reverse=True), 0).sum(-2)  # [.., n-1, K]
    d_total = jnp.pad(d_total, [(0, 0)] * len(lead) + [(0, 1), (0, 0)])
    d_total = d_total + _sums_after(d_g_cum.sum(-2)) + _sums_before(d_to_end.sum(-2))
    return (d_g + d_total[..., None, :]).reshape(d.g_cum.shape)


def _members():
    """5 x [16, 16], constant: whether the gate of token m is part of sum i, for the levels from 2 on, the prefix and the suffix."""
    m, i = np.indices((BLOCK, BLOCK))
    to, after = m <= i, m > i
    levels = [(m // s == i // s) & np.where((i // s) % 2 == 1, to, after) for s in LEVELS[1:]]
    return *levels, to, after


_MEMBERS = _members()


def _sums_before(x):
    """y[i] = x[0] + .. + x[i-1] along the last axis but one."""
    return lax.cumsum(jnp.concatenate([jnp.zeros_like(x[..., :1, :]), x[..., :-1, :]], -2), x.ndim - 2)


def _sums_after(x):
    """y[j] = x[j+1] + .. + x[last] along the last axis but one."""
    return lax.cumsum(jnp.concatenate([x[..., 1:, :], jnp.zeros_like(x[..., :1, :])], -2), x.ndim - 2, reverse=True)


def _later(n: int):
    """[n-1, n-1, 1]: at [I-1, J] whether J < I - 1, so that block I - 1 lies between J and I."""
    return jnp.tri(n - 1, k=-1, dtype=bool)[..., None]
