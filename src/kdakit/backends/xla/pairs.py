"""Products of decayed pairs of tokens, and their backward:  A[i,j] = sum_d x[i,d] k[j,d] exp(g[j+1,d] + .. + g[i,d]),  x = q or k_beta.

Tokens of different blocks of 16 are referred to the start of the later one's block, between the two: both factors are at most 1.

Tokens of one block are referred to the boundary at which they part, at the levels s = 1, 2, 4, 8. In the forward few need that: where the
running product P from the block's start is at least 2^-92, the row's factor is P_i and the column's 1 / P_j. A quotient of running products
is as exact as a product, for nothing cancels. Each row and channel is decided by itself, and so by no later token; the levels, if a window
needs them, add what is left. Factors are 2^46 P_i and 2^-46 / P_j, between 2^-46 and 2^46.

The backward takes the levels for all: with quotients d_g would be a difference of sums over rows and over columns, whose rounding errors
d_A_log multiplies with the gates.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from kdakit.backends.xla.gate import LEVELS, BlockDecays, LevelDecays, level_decays, level_decays_backward
from kdakit.backends.xla.plan import BLOCK
from kdakit.backends.xla.products import product, row_dots

SMALLEST = 2.0**-92  # of a running product whose reciprocal is taken
SHIFT = 2.0**46


def pair_products(q, k_beta, k, decays: BlockDecays):
    """A_qk with its diagonal and A_kk [.., C, C], for any log-decays <= 0."""
    *lead, C, _ = k.shape
    n = C // BLOCK
    free = [(0, 0)] * len(lead)
    factors = (q, k_beta, k, decays.g, decays.prefix)
    all_near = (decays.prefix[..., -1, :] >= SMALLEST).all()
    inside = lax.cond(all_near, lambda near, *_: near, lambda _, *x: _inside_any(*x), _inside(*factors), *factors)
    rows, columns, _, _ = _across_factors(q, k_beta, k, decays)
    pairs = product("...ik,...jk->...ij", rows, columns)  # [.., n-1, 2 * 16, C - 16]
    pairs = jnp.moveaxis(pairs.reshape(*lead, n - 1, 2, BLOCK, C - BLOCK), -3, -4)
    pairs = jnp.pad(pairs, [*free, (0, 0), (1, 0), (0, 0), (0, BLOCK)]).reshape(*lead, 2, n, BLOCK, n, BLOCK)
    A = jnp.where(_own_block(n), jnp.moveaxis(inside, -3, -4)[..., None, :], pairs).reshape(*lead, 2, C, C)
    return A[..., 0, :, :], A[..., 1, :, :]


def pair_products_backward(q, k_beta, k, decays: BlockDecays, d_A_qk, d_A_kk):
    """d_q, d_k_beta, d_k and the gradients of the decays' logarithms (from_start, to_end: None), from those of A_qk and A_kk [.., C, C].

    For A = R C^T, R = r F_r, C = c F_c:  d_r = F_r (d_A C),  d_c = F_c (d_A^T R),  d_log F_r = r d_r,  d_log F_c = c d_c.
    d_A is transposed instead of contracted along its rows: small products of the other kind take a CPU three times as long.
    Only the lower triangles (A_kk: strictly lower) are read.
    """
    *lead, C, K = k.shape
    n = C // BLOCK
    free = [(0, 0)] * len(lead)
    d_A = jnp.stack([d_A_qk, d_A_kk], -3).reshape(*lead, 2, n, BLOCK, n, BLOCK)
    rows, columns, f_rows, f_columns = _across_factors(q, k_beta, k, decays)
    d_pairs = jnp.moveaxis(d_A[..., 1:, :, :-1, :], -5, -4).reshape(*lead, n - 1, 2 * BLOCK, C - BLOCK)
    d_rows = product("...ij,...jk->...ik", d_pairs, columns).reshape(*lead, n - 1, 2, BLOCK, K) * f_rows[..., None, :, :]
    d_rows = jnp.pad(d_rows, [*free, (1, 0), (0, 0), (0, 0), (0, 0)])  # [.., n, 2, 16, K]
    d_columns = product("...ji,...ik->...jk", d_pairs.swapaxes(-1, -2), rows).reshape(f_columns.shape)  # [.., n-1, n-1, 16, K]
    d_columns = jnp.where(_earlier(n), d_columns * f_columns, 0)
    d_k = jnp.pad(d_columns.sum(-4), [*free, (0, 1), (0, 0), (0, 0)])  # [.., n, 16, K]
    d_q, d_k_beta = d_rows[..., 0, :, :], d_rows[..., 1, :, :]
    blocks = lambda x: x.reshape(*lead, n, BLOCK, K)
    d_prefix, d_suffix = blocks(q) * d_q + blocks(k_beta) * d_k_beta, blocks(k) * d_k
    d_between = jnp.where(_earlier(n), blocks(k)[..., None, :-1, :, :] * d_columns, 0).sum(-2)
    inside = jnp.moveaxis(jnp.where(_own_block(n), d_A, 0).sum(-2), -4, -3)  # [.., n, 2, 16, 16]
    d_diagonal = row_dots(inside[..., 0, :, :], jnp.eye(BLOCK, dtype=k.dtype))
    d_inside = level_products_backward(q, k_beta, k, decays.g, inside)
    d_q, d_k_beta, d_k = (a + b for a, b in zip((d_q, d_k_beta, d_k), d_inside[:3], strict=True))
    d_q, d_k = d_q + d_diagonal * blocks(k), d_k + d_diagonal * blocks(q)
    d_q, d_k_beta, d_k, d_g = (x.reshape(k.shape) for x in (d_q, d_k_beta, d_k, d_inside[3]))
    return d_q, d_k_beta, d_k, BlockDecays(d_g, d_prefix, d_suffix, d_between, None, None)


def _inside(q, k_beta, k, g, prefix, near=None):
    """[.., n, 2, 16, 16]: the lower triangles of the blocks of A_qk (with its diagonal) and A_kk, of all rows and channels or of `near`."""
    q, k_beta, k = (x.reshape(prefix.shape) for x in (q, k_beta, k))
    f_rows = SHIFT * jnp.where(prefix >= SMALLEST, prefix, SMALLEST)  # what is far is not taken, but derivatives see it
    f_columns = 1 / f_rows
    if near is not None:
        f_rows, f_columns = jnp.where(near, f_rows, 0), jnp.where(near, f_columns, 0)
    rows = jnp.concatenate([q * f_rows, k_beta * f_rows], -2)
    pairs = product("...ik,...jk->...ij", rows, k * f_columns).reshape(*prefix.shape[:-2], 2, BLOCK, BLOCK)
    lower = jnp.stack([jnp.tri(BLOCK, dtype=bool), jnp.tri(BLOCK, k=-1, dtype=bool)])
    return jnp.where(lower, pairs, 0)


def _inside_any(q, k_beta, k, g, prefix):
    """The same for any gates."""
    near = prefix >= SMALLEST
    far = lambda x: jnp.where(near.reshape(x.shape), 0, x)
    return _inside(q, k_beta, k, g, prefix, near) + level_products(far(q), far(k_beta), k, g)


def level_products(q, k_beta, k, g):
    """[.., n, 2, 16, 16]: the lower triangles of the blocks of A_qk (with its diagonal) and A_kk."""
    *lead, C, _ = k.shape
    free = [(0, 0)] * len(lead)
    diagonal = row_dots(q, k)
    A = jnp.stack([diagonal, jnp.zeros_like(diagonal)], -2)[..., None]  # [.., C, 2, 1, 1]: q and k_beta rows of runs of 1 token
    for s, f_rows, f_columns in zip(LEVELS, *level_decays(g), strict=True):
        rows, columns = _level_factors(q, k_beta, k, f_rows, f_columns)
        pairs = product("...ik,...jk->...ij", rows, columns).reshape(*lead, C // (2 * s), 2, s, s)
        A = A.reshape(*lead, C // (2 * s), 2, 2, s, s)
        first = jnp.pad(A[..., 0, :, :, :], [*free, (0, 0), (0, 0), (0, 0), (0, s)])
        A = jnp.concatenate([first, jnp.concatenate([pairs, A[..., 1, :, :, :]], -1)], -2)  # [.., P, 2, 2s, 2s]
    return A


def level_products_backward(q, k_beta, k, g, d_inside):
    """d_q, d_k_beta, d_k, d_g [.., n, 16, K] of what lies below the diagonal.

    At every level the second runs of a block, and the first ones, are 8 tokens: its pairs are one [8, 8], zero between runs that are not
    neighbours. With a product for each pair of runs those of one token are no product to XLA, which then multiplies them again, slowly, in
    every loop that uses them.
    """
    *lead, C, K = k.shape
    n = C // BLOCK
    blocks = lambda x: x.reshape(*lead, n, BLOCK, K)
    halves = lambda x: x.reshape(*lead, n, BLOCK // 2, K)
    d_q = d_k_beta = d_k = 0
    all_rows, all_columns = [], []
    for s, f_rows, f_columns in zip(LEVELS, *level_decays(g), strict=True):
        runs = lambda x, s=s: x.reshape(*lead, C // (2 * s), s, K)
        rows = jnp.concatenate([halves(_run(q, s, 1) * f_rows), halves(_run(k_beta, s, 1) * f_rows)], -2)  # [.., n, 2 * 8, K]
        d_pairs = _pairs_of_level(d_inside, s)  # [.., n, 2 * 8, 8]
        d_rows = product("...ij,...jk->...ik", d_pairs, halves(_run(k, s, 0) * f_columns)).reshape(*lead, n, 2, BLOCK // 2, K)
        d_columns = runs(product("...ji,...ik->...jk", d_pairs.swapaxes(-1, -2), rows)) * f_columns
        d_q_run, d_beta_run = (runs(d_rows[..., i, :, :]) * f_rows for i in (0, 1))
        all_rows.append(_run(q, s, 1) * d_q_run + _run(k_beta, s, 1) * d_beta_run)
        all_columns.append(_run(k, s, 0) * d_columns)
        d_q, d_k_beta = d_q + blocks(_in_half(d_q_run, 1)), d_k_beta + blocks(_in_half(d_beta_run, 1))
        d_k = d_k + blocks(_in_half(d_columns, 0))
    return d_q, d_k_beta, d_k, level_decays_backward(LevelDecays(tuple(all_rows), tuple(all_columns)))


def _run(x, s: int, half: int):
    """[.., C, K] -> [.., P, s, K]: the first (0) or second (1) run of each pair of runs of s tokens."""
    *lead, C, K = x.shape
    return x.reshape(*lead, C // (2 * s), 2, s, K)[..., half, :, :]


def _in_half(x, half: int):
    """[.., P, s, K] -> [.., P, 2, s, K], zero in the other run."""
    # Not jnp.pad: a loop over two padded arrays is several times as slow on a CPU.
    return jnp.where((jnp.arange(2) == half)[:, None, None], x[..., None, :, :], 0)


def _pairs_of_level(inside, s: int):
    """[.., n, 2, 16, 16] -> [.., n, 2 * 8, 8]: of each block the q and then the k_beta rows of second runs; columns are first runs."""
    *lead, n, _, _, _ = inside.shape
    m = BLOCK // (2 * s)
    pairs = inside.reshape(*lead, n, 2, m, 2, s, m, 2, s)[..., :, 1, :, :, 0, :]  # [.., n, 2, m, s, m, s]
    return jnp.where(_own_block(m), pairs, 0).reshape(*lead, n, BLOCK, BLOCK // 2)


def _level_factors(q, k_beta, k, f_rows, f_columns):
    """rows [.., P, 2s, K], the decayed q and then the k_beta of the second runs; columns [.., P, s, K], the decayed k of the first."""
    s = f_rows.shape[-2]
    rows = jnp.concatenate([_run(q, s, 1) * f_rows, _run(k_beta, s, 1) * f_rows], -2)
    return rows, _run(k, s, 0) * f_columns


def _across_factors(q, k_beta, k, decays: BlockDecays):
    """Rows, columns and the decays in them, f_rows [.., n-1, 16, K] and f_columns [.., n-1, n-1, 16, K].

    rows [.., n-1, 2 * 16, K]: the q and then the k_beta of each later block. columns [.., n-1, C - 16, K]: the k of all earlier blocks as
    that block sees them.
    """
    *lead, n, _, K = decays.prefix.shape
    q, k_beta, k = (x.reshape(decays.prefix.shape) for x in (q, k_beta, k))
    f_rows = decays.prefix[..., 1:, :, :]
    f_columns = jnp.where(_earlier(n), decays.suffix[..., None, :-1, :, :] * decays.between[..., None, :], 0)
    rows = jnp.concatenate([q[..., 1:, :, :] * f_rows, k_beta[..., 1:, :, :] * f_rows], -2)
    columns = k[..., None, :-1, :, :] * f_columns
    return rows, columns.reshape(*lead, n - 1, (n - 1) * BLOCK, K), f_rows, f_columns


def _earlier(n: int):
    """[n-1, n-1, 1, 1]: at [I-1, J] whether J < I."""
    return jnp.tri(n - 1, dtype=bool)[:, :, None, None]


def _own_block(n: int):
    """[n, 1, n, 1]: the diagonal blocks."""
    return jnp.eye(n, dtype=bool)[:, None, :, None]
