"""Stage gate: the activations of the inputs, and the decays between tokens.

The decay between two tokens is the product of the decays of the tokens between them, with the rounding errors of the recurrence itself.
Never the exponential of a difference of two cumulative sums, which loses its digits after one large gate. One exponential per token and
channel; a log-decay of -inf (a reset) is a factor of zero.
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
    bounded gate, s = sigmoid(a x):              d_x = a lower_bound s (1 - s) d_g, d_A_log = sum x d_x, d_dt_bias = sum d_x
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
            d_g = _times_sigmoid_slope(a * x, o.lower_bound * a * d_g)
            d_A_log = (x * d_g).sum((0, 1, 3))
        d_dt_bias = d_g.sum((0, 1))
    if o.beta != "given":
        d_beta = _times_sigmoid_slope(beta, (2 if o.beta == "double_sigmoid" else 1) * d_beta)
    gradients = (d.astype(x.dtype) for x, d in zip(arrays[:5], (d_q, d_k, d_v, d_g, d_beta), strict=True))
    return Arrays(*gradients, None if arrays.A_log is None else d_A_log, None if arrays.dt_bias is None else d_dt_bias)


def _times_sigmoid_slope(x, d):
    """d times s (1 - s), s = sigmoid(x), which is h^2 with h = e / (1 + e^2), e = exp(-|x| / 2). XLA takes what is below 1e-38 for 0, so
    d comes between the two h: what is left of a saturated gate may be as small."""
    e = jnp.exp(-0.5 * jnp.abs(x))
    h = e / (1 + e * e)
    return h * d * h


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


class BlockDecays(NamedTuple):
    """Decays inside a chunk of n blocks of 16 tokens; also the shape of the gradients of their logarithms."""

    g: Any  # [.., C, K]  the log-decays themselves
    prefix: Any  # [.., n, 16, K]  start of the block to token i, inclusive
    suffix: Any  # [.., n, 16, K]  after token j to the end of the block
    between: Any  # [.., n-1, n-1, K]  at [I-1, J]: the blocks after J and before I
    from_start: Any  # [.., C, K]  start of the chunk to token i, inclusive
    to_end: Any  # [.., C, K]  after token j to the end of the chunk


def block_decays(g) -> BlockDecays:
    """g [.., C, K] -> all decays that the chunk needs."""
    C = g.shape[-2]
    prefix, suffix, _, _ = _runs(g)
    total = prefix[..., -1, :]  # [.., n, K]
    axis = total.ndim - 2
    one = jnp.ones_like(total[..., :1, :])
    before = lax.cumprod(jnp.concatenate([one, total[..., :-1, :]], -2), axis)
    behind = lax.cumprod(jnp.concatenate([total[..., 1:, :], one], -2), axis, reverse=True)
    # between[I, J] = between[I-1, J] total[I-1], from one at I = J + 1.
    between = jnp.where(_later(C // BLOCK), total[..., :-1, None, :], 1)
    between = lax.cumprod(between, between.ndim - 3)
    from_start = (prefix * before[..., None, :]).reshape(g.shape)
    to_end = (suffix * behind[..., None, :]).reshape(g.shape)
    return BlockDecays(g, prefix, suffix, between, from_start, to_end)


def block_decays_backward(d: BlockDecays):
    """d_g [.., C, K] from the gradients of the logarithms of all decays: each gate collects from every decay that it is part of."""
    *lead, C, K = d.g.shape
    n = C // BLOCK
    d_from_start, d_to_end = (x.reshape(*lead, n, BLOCK, K) for x in (d.from_start, d.to_end))
    d_total = jnp.where(_later(n), lax.cumsum(d.between, d.between.ndim - 3, reverse=True), 0).sum(-2)  # [.., n-1, K]
    d_total = jnp.pad(d_total, [(0, 0)] * len(lead) + [(0, 1), (0, 0)])
    d_total = d_total + _sums_after(d_from_start.sum(-2)) + _sums_before(d_to_end.sum(-2))
    inside = sum_members(TO, d.prefix + d_from_start) + sum_members(AFTER, d.suffix + d_to_end)
    return d.g + (inside + d_total[..., None, :]).reshape(d.g.shape)


class LevelDecays(NamedTuple):
    """Decays inside blocks of 16 tokens, at the levels s = 1, 2, 4, 8; also the shape of the gradients of their logarithms.

    Level s pairs each second run of s tokens with the first run before it: `rows` belong to the second, `columns` to the first, and both
    count from the boundary between the two. P is the number of pairs, C / 2s.
    """

    rows: tuple  # 4 x [.., P, s, K]  boundary to token i, inclusive
    columns: tuple  # 4 x [.., P, s, K]  after token j to the boundary


def level_decays(g) -> LevelDecays:
    """g [.., C, K] -> the decays of all levels."""
    _, _, rows, columns = _runs(g)
    return LevelDecays(rows, columns)


def level_decays_backward(d: LevelDecays):
    """d_g [.., n, 16, K] from the gradients of the logarithms of the decays of all levels."""
    *lead, P, _, K = d.rows[0].shape
    blocks = lambda x: x.reshape(*lead, 2 * P // BLOCK, BLOCK, K)
    # Runs of one token: a row's decay is its own gate's, a column's is one.
    d_g = blocks(jnp.pad(d.rows[0], [(0, 0)] * (len(lead) + 1) + [(1, 0), (0, 0)]))
    for members, rows, columns in zip(_LEVEL_MEMBERS, d.rows[1:], d.columns[1:], strict=True):
        d_g = d_g + sum_members(members, blocks(jnp.concatenate([columns, rows], -2)))
    return d_g


def _runs(g):
    """The decays inside blocks, [.., n, 16, K] from their starts and to their ends, and those of the levels on the way there.

    Those of a run come from those of its halves and the halves' totals.
    """
    *lead, C, K = g.shape
    rows, columns = [], []
    to, after = jnp.exp(g), jnp.ones_like(g)
    for s in LEVELS:
        shape = (*lead, C // (2 * s), 2, s, K)
        to, after = to.reshape(shape), after.reshape(shape)
        to_1, to_2, after_1, after_2 = to[..., 0, :, :], to[..., 1, :, :], after[..., 0, :, :], after[..., 1, :, :]
        rows.append(to_2)
        columns.append(after_1)
        to = jnp.concatenate([to_1, to_1[..., -1:, :] * to_2], -2)
        after = jnp.concatenate([after_1 * to_2[..., -1:, :], after_2], -2)
    return to, after, tuple(rows), tuple(columns)


def sum_members(members, x):
    """[16, r] of zeros and ones, x [.., r, K] -> [.., 16, K]: a sum, for x is a gradient and finite."""
    members = jnp.broadcast_to(jnp.asarray(members, x.dtype), (*x.shape[:-2], *members.shape))
    return product("...mi,...ik->...mk", members, x)


def _members():
    """5 x [16, 16], constant: whether the gate of token m is part of decay i, for the prefix, the suffix and the levels from 2 on."""
    m, i = np.indices((BLOCK, BLOCK))
    to, after = m <= i, m > i
    levels = [(m // s == i // s) & np.where((i // s) % 2 == 1, to, after) for s in LEVELS[1:]]
    return to, after, levels


TO, AFTER, _LEVEL_MEMBERS = _members()


def _sums_before(x):
    """y[i] = x[0] + .. + x[i-1] along the last axis but one."""
    return lax.cumsum(jnp.concatenate([jnp.zeros_like(x[..., :1, :]), x[..., :-1, :]], -2), x.ndim - 2)


def _sums_after(x):
    """y[j] = x[j+1] + .. + x[last] along the last axis but one."""
    return lax.cumsum(jnp.concatenate([x[..., 1:, :], jnp.zeros_like(x[..., :1, :])], -2), x.ndim - 2, reverse=True)


def _later(n: int):
    """[n-1, n-1, 1]: at [I-1, J] whether J < I - 1, so that block I - 1 lies between J and I."""
    return jnp.tri(n - 1, k=-1, dtype=bool)[..., None]
