"""Stage gate: the activations of the inputs, and the sums of log-decays that every later exponential takes.

A decay between two tokens is the sum of the gates between them. Here that sum is only ever built by adding: never as the difference of two
cumulative sums, which loses its digits after one large gate, and never by multiplying with a 0/1 matrix, which turns a log-decay of
-inf (a reset) into NaN. All log-decays are <= 0, so every exponent is too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kdakit.backends.xla.plan import BLOCK
from kdakit.gates import L2_EPSILON
from kdakit.problem import Arrays, Problem

LEVELS = (1, 2, 4, 8)  # half-block sizes inside a block


class Activated(NamedTuple):
    """The inputs as the recurrence wants them, in the compute dtype."""

    q: Any  # [B, T, HV, K]  scaled
    k: Any  # [B, T, HV, K]
    v: Any  # [B, T, HV, V]
    g: Any  # [B, T, HV, K]  log-decay
    beta: Any  # [B, T, HV]


def activate(problem: Problem, arrays: Arrays) -> Activated:
    """l2norm of q and k, scale, repeat over the group; gate; beta.

    softplus: g = -exp(A_log) softplus(g + dt_bias)        bounded: g = lower_bound sigmoid(exp(A_log) (g + dt_bias))
    A token that starts a new segment has g = -inf.
    """
    o = problem.options
    q, k, v, g, beta = (x.astype(problem.compute_dtype) for x in arrays[:5])
    if o.l2norm:
        q, k = l2norm(q), l2norm(k)
    q, k = (jnp.repeat(x, problem.group, axis=2) for x in (q * o.scale, k))
    if o.gate != "log_decay":
        a, x = _gate_argument(problem, arrays, g)
        g = -a * jax.nn.softplus(x) if o.gate == "softplus" else o.lower_bound * jax.nn.sigmoid(a * x)
    if problem.varlen == "segment_ids":
        g = jnp.where(segment_starts(arrays.segment_ids)[..., None, None], -jnp.inf, g)
    if o.beta != "given":
        beta = (2 if o.beta == "double_sigmoid" else 1) * jax.nn.sigmoid(beta)
    return Activated(q, k, v, g, beta)


def activate_backward(problem: Problem, arrays: Arrays, d_x: Activated) -> Arrays:
    """From gradients of `activate`'s results to those of the call's inputs (initial_state excepted), each in its input's dtype.

    l2norm, r = 1/sqrt(x.x + eps), y = r x:      d_x = r (d_y - y (y . d_y))
    softplus gate, x = g + dt_bias, a = e^A_log: d_x = -a sigmoid(x) d_g, d_A_log = sum -a softplus(x) d_g, d_dt_bias = sum d_x
    bounded gate, s = sigmoid(a x):              d_x = a z, z = lower_bound s (1 - s) d_g, d_A_log = sum a x z, d_dt_bias = sum d_x
    """
    o = problem.options
    q, k, _, g, beta = (x.astype(problem.compute_dtype) for x in arrays[:5])
    d_q, d_k, d_v, d_g, d_beta = d_x
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
    gradients = (d_q, d_k, d_v, d_g, d_beta, d_A_log, d_dt_bias)
    return Arrays(*(None if x is None else d.reshape(x.shape).astype(x.dtype) for x, d in zip(arrays[:7], gradients, strict=True)))


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
    return x / jnp.sqrt((x * x).sum(-1, keepdims=True) + L2_EPSILON)


def l2norm_backward(x, d_out):
    """With r = 1/sqrt(x . x + eps) and y = r x:  d_x = r (d_y - y (y . d_y))."""
    r = 1 / jnp.sqrt((x * x).sum(-1, keepdims=True) + L2_EPSILON)
    y = r * x
    return r * (d_out - y * (y * d_out).sum(-1, keepdims=True))


class BlockSums(NamedTuple):
    """Sums of log-decays inside a chunk of n blocks of 16 tokens; also the shape of their gradients.

    Level b splits a block into m = 8/b pairs of b tokens: `rows` belong to the second b, `columns` to the first, and both are counted from
    the boundary between them.
    """

    rows: tuple  # 4 x [.., n, m, b, K]  boundary to token i, inclusive
    columns: tuple  # 4 x [.., n, m, b, K]  after token j to the boundary
    prefix: Any  # [.., n, 16, K]  start of the block to token i, inclusive
    across: Any  # [.., n-1, n-1, 16, K]  at [I-1, J]: after a token of block J up to the start of block I; -inf unless J < I
    g_cum: Any  # [.., C, K]  start of the chunk to token i, inclusive
    to_end: Any  # [.., C, K]  after token j to the end of the chunk


def block_sums(g) -> BlockSums:
    """g [.., C, K] -> all sums that the chunk needs."""
    *lead, C, K = g.shape
    n = C // BLOCK
    rows, columns = [], []
    to, after = g, jnp.zeros_like(g)  # inside blocks of b tokens: up to a token, after a token
    for b in LEVELS:
        to, after = (x.reshape(*lead, n, BLOCK // (2 * b), 2, b, K) for x in (to, after))
        to_1, to_2, after_1, after_2 = to[..., 0, :, :], to[..., 1, :, :], after[..., 0, :, :], after[..., 1, :, :]
        rows.append(to_2)
        columns.append(after_1)
        to = jnp.concatenate([to_1, to_1[..., -1:, :] + to_2], -2)
        after = jnp.concatenate([after_1 + to_2[..., -1:, :], after_2], -2)
    prefix, suffix = to.reshape(*lead, n, BLOCK, K), after.reshape(*lead, n, BLOCK, K)
    total = prefix[..., -1, :]  # [.., n, K]
    between = jnp.where(_strictly_between(n)[..., None], total[..., None, None, :, :], 0).sum(-2)  # [.., n-1, n-1, K]
    earlier = jnp.tri(n - 1, dtype=bool)[:, :, None, None]  # J < I
    across = jnp.where(earlier, suffix[..., None, :-1, :, :] + between[..., None, :], -jnp.inf)
    g_cum = (prefix + sums_to(total, exclusive=True)[..., None, :]).reshape(g.shape)
    to_end = (suffix + sums_after(total)[..., None, :]).reshape(g.shape)
    return BlockSums(tuple(rows), tuple(columns), prefix, across, g_cum, to_end)


def block_sums_backward(d: BlockSums):
    """d_g [.., C, K] from the gradients of all sums: the adjoint, which again only adds.

    The shorter way, a reverse cumulative sum of q d_q - k d_k, is a difference of large numbers where the gates are strong.
    """
    *lead, C, K = d.g_cum.shape
    n = C // BLOCK
    d_g_cum, d_to_end = d.g_cum.reshape(*lead, n, BLOCK, K), d.to_end.reshape(*lead, n, BLOCK, K)
    d_between = d.across.sum(-2)  # [.., n-1, n-1, K]
    d_total = jnp.where(_strictly_between(n)[..., None], d_between[..., None, :], 0).sum((-4, -3))  # [.., n, K]
    d_total = d_total + sums_to(d_to_end.sum(-2), exclusive=True) + sums_after(d_g_cum.sum(-2))
    d_suffix = d_to_end + jnp.pad(d.across.sum(-4), [(0, 0)] * len(lead) + [(0, 1), (0, 0), (0, 0)])
    d_prefix = d.prefix + d_g_cum
    # The total is the prefix at the last token, and so a sum over the whole block.
    d_g = lax.cumsum(d_prefix, d_prefix.ndim - 2, reverse=True) + sums_to(d_suffix, exclusive=True) + d_total[..., None, :]
    d_g = d_g.reshape(*lead, C, K)
    for b, d_rows, d_columns in zip(LEVELS, d.rows, d.columns, strict=True):
        halves = [sums_to(d_columns, exclusive=True), lax.cumsum(d_rows, d_rows.ndim - 2, reverse=True)]
        d_g = d_g + jnp.stack(halves, -3).reshape(*lead, C, K)
    return d_g


def sums_to(x, exclusive: bool = False):
    """y[i] = x[0] + .. + x[i] along the last axis but one; without x[i] if exclusive."""
    axis = x.ndim - 2
    if exclusive:
        x = jnp.concatenate([jnp.zeros_like(x[..., :1, :]), x[..., :-1, :]], axis)
    return lax.cumsum(x, axis)


def sums_after(x):
    """y[j] = x[j+1] + .. + x[last] along the last axis but one."""
    axis = x.ndim - 2
    return lax.cumsum(jnp.concatenate([x[..., 1:, :], jnp.zeros_like(x[..., :1, :])], axis), axis, reverse=True)


def _strictly_between(n: int):
    """[n-1, n-1, n]: at [I-1, J, M] whether J < M < I."""
    i, j, m = jnp.arange(1, n)[:, None, None], jnp.arange(n - 1)[:, None], jnp.arange(n)
    return (j < m) & (m < i)
