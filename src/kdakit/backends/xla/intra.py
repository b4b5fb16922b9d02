"""Stage intra: everything of a chunk that needs no state, and its backward. Leading axes are free, C is the chunk's length.

A_qk[i,j] = sum_d q[i,d] k[j,d] exp(g[j+1,d] + .. + g[i,d])           j <= i   (q is scaled)
A_kk[i,j] = beta_i sum_d k[i,d] k[j,d] exp(g[j+1,d] + .. + g[i,d])    j <  i
(I + A_kk) u = beta v                  (I + A_kk) w = beta k exp(g_cum)
q_decayed = q exp(g_cum)               k_decayed = k exp(to_end)               decay = exp(g_cum at the chunk's end)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from kdakit.backends.xla.gate import LEVELS, BlockSums, block_sums, block_sums_backward
from kdakit.backends.xla.plan import BLOCK
from kdakit.backends.xla.products import product, row_dots


class Intra(NamedTuple):
    g_cum: Any  # [.., C, K]  log-decay from the chunk's start
    A_qk: Any  # [.., C, C]  lower triangle with diagonal
    A_kk: Any  # [.., C, C]  strictly lower triangle
    inverse: Any  # [.., C, C]  (I + A_kk)^-1
    w: Any  # [.., C, K]
    u: Any  # [.., C, V]
    q_decayed: Any  # [.., C, K]
    k_decayed: Any  # [.., C, K]
    decay: Any  # [.., K]


def intra_forward(q, k, v, g, beta, A_qk=None, inverse=None) -> Intra:
    """q (scaled), k, g [.., C, K], v [.., C, V], beta [.., C] -> Intra; without A_kk where A_qk and the inverse are given."""
    sums = block_sums(g)
    k_beta = beta[..., None] * k
    A_kk = None
    if inverse is None:
        A_qk, A_kk = pair_products(q, k_beta, k, sums)
        inverse = unit_lower_inverse(A_kk)
    from_start = jnp.exp(sums.g_cum)
    w, u = wy(inverse, k_beta * from_start, beta[..., None] * v)
    return Intra(sums.g_cum, A_qk, A_kk, inverse, w, u, q * from_start, k * jnp.exp(sums.to_end), from_start[..., -1, :])


def intra_backward(q, k, v, g, beta, x: Intra, d: Intra):
    """d_q, d_k, d_v, d_g, d_beta from the gradients of A_qk, w, u, q_decayed, k_decayed and decay (d's other fields are not read).

    With (y_w, y_u) = (I + A_kk)^-T (d_w, d_u), the gradients of k_beta exp(g_cum) and beta v:
    d_A_kk = -strict_tril(y_w w^T + y_u u^T). Every exponent E of a factor F = exp(E) gets d_E = F d_F.
    """
    sums = block_sums(g)
    k_beta = beta[..., None] * k
    d_A_kk, y_w, y_u = wy_backward(x.inverse, x.w, x.u, d.w, d.u)
    d_q, d_k_beta, d_k, d_sums = pair_products_backward(q, k_beta, k, sums, d.A_qk, d_A_kk)
    from_start, to_end = jnp.exp(sums.g_cum), jnp.exp(sums.to_end)
    d_g_cum = from_start * (q * d.q_decayed + k_beta * y_w)
    d_g_cum = d_g_cum.at[..., -1, :].add(d.decay * x.decay)
    d_g = block_sums_backward(d_sums._replace(g_cum=d_g_cum, to_end=d.k_decayed * x.k_decayed))
    d_k_beta = d_k_beta + y_w * from_start
    d_q = d_q + d.q_decayed * from_start
    d_k = d_k + d.k_decayed * to_end + beta[..., None] * d_k_beta
    d_beta = (row_dots(k, d_k_beta) + row_dots(v, y_u))[..., 0]
    return d_q, d_k, beta[..., None] * y_u, d_g, d_beta


def pair_products(q, k_beta, k, sums: BlockSums):
    """A_qk with its diagonal and A_kk [.., C, C], for any log-decays <= 0.

    Each pair of tokens is referred to a point between them, so that both of its factors are exponentials of sums <= 0. Tokens of one block
    of 16: the boundary at which they part. Tokens of different blocks: the start of the later one's. The diagonal needs no exponential.
    """
    *lead, C, _ = k.shape
    n = C // BLOCK
    free = [(0, 0)] * len(lead)
    diagonal = row_dots(q, k)
    A = jnp.stack([diagonal, jnp.zeros_like(diagonal)], -2)[..., None]  # [.., C, 2, 1, 1]: q and k_beta rows of runs of 1 token
    for s, e_rows, e_columns in zip(LEVELS, sums.rows, sums.columns, strict=True):
        rows, columns, _, _ = _level_factors(q, k_beta, k, e_rows, e_columns)
        pairs = product("...ik,...jk->...ij", rows, columns).reshape(*lead, C // (2 * s), 2, s, s)
        A = A.reshape(*lead, C // (2 * s), 2, 2, s, s)
        first = jnp.pad(A[..., 0, :, :, :], [*free, (0, 0), (0, 0), (0, 0), (0, s)])
        A = jnp.concatenate([first, jnp.concatenate([pairs, A[..., 1, :, :, :]], -1)], -2)  # [.., P, 2, 2s, 2s]
    rows, columns, _, _ = _across_factors(q, k_beta, k, sums)
    pairs = product("...ik,...jk->...ij", rows, columns)  # [.., n-1, 2 * 16, C - 16]
    pairs = jnp.moveaxis(pairs.reshape(*lead, n - 1, 2, BLOCK, C - BLOCK), -3, -4)
    pairs = jnp.pad(pairs, [*free, (0, 0), (1, 0), (0, 0), (0, BLOCK)]).reshape(*lead, 2, n, BLOCK, n, BLOCK)
    A = jnp.where(_own_block(n), jnp.moveaxis(A, -3, -4)[..., None, :], pairs).reshape(*lead, 2, C, C)
    return A[..., 0, :, :], A[..., 1, :, :]


def pair_products_backward(q, k_beta, k, sums: BlockSums, d_A_qk, d_A_kk):
    """d_q, d_k_beta, d_k and the gradients of the sums (g_cum and to_end: None), from those of A_qk and A_kk [.., C, C].

    For A = R C^T, R = r exp(E_r), C = c exp(E_c):  d_r = exp(E_r) (d_A C),  d_c = exp(E_c) (d_A^T R),  d_E_r = r d_r,  d_E_c = c d_c.
    Only the lower triangles (A_kk: strictly lower) are read.
    """
    *lead, C, K = k.shape
    n = C // BLOCK
    free = [(0, 0)] * len(lead)
    d_A = jnp.stack([d_A_qk, d_A_kk], -3).reshape(*lead, 2, n, BLOCK, n, BLOCK)
    rows, columns, f_rows, f_columns = _across_factors(q, k_beta, k, sums)
    d_pairs = jnp.moveaxis(d_A[..., 1:, :, :-1, :], -5, -4).reshape(*lead, n - 1, 2 * BLOCK, C - BLOCK)
    d_rows = product("...ij,...jk->...ik", d_pairs, columns).reshape(*lead, n - 1, 2, BLOCK, K) * f_rows[..., None, :, :]
    d_rows = jnp.pad(d_rows, [*free, (1, 0), (0, 0), (0, 0), (0, 0)])  # [.., n, 2, 16, K]
    d_columns = product("...ij,...ik->...jk", d_pairs, rows).reshape(f_columns.shape)  # [.., n-1, n-1, 16, K]
    d_columns = jnp.where(_earlier(n), d_columns * f_columns, 0)
    d_k = jnp.pad(d_columns.sum(-4), [*free, (0, 1), (0, 0), (0, 0)])  # [.., n, 16, K]
    d_q, d_k_beta = d_rows[..., 0, :, :], d_rows[..., 1, :, :]
    blocks = lambda x: x.reshape(*lead, n, BLOCK, K)
    d_prefix, d_suffix = blocks(q) * d_q + blocks(k_beta) * d_k_beta, blocks(k) * d_k
    d_between = jnp.where(_earlier(n), blocks(k)[..., None, :-1, :, :] * d_columns, 0).sum(-2)
    inside = jnp.moveaxis(jnp.where(_own_block(n), d_A, 0).sum(-2), -4, -3)  # [.., n, 2, 16, 16]
    d_diagonal = jnp.einsum("...ii->...i", inside[..., 0, :, :])[..., None]
    d_q, d_k = d_q + d_diagonal * blocks(k), d_k + d_diagonal * blocks(q)
    all_rows, all_columns = [], []
    for s, e_rows, e_columns in zip(LEVELS, sums.rows, sums.columns, strict=True):
        rows, columns, f_rows, f_columns = _level_factors(q, k_beta, k, e_rows, e_columns)
        d_pairs = _pairs_of_level(inside, s)  # [.., P, 2s, s]
        d_rows = product("...ij,...jk->...ik", d_pairs, columns).reshape(*lead, C // (2 * s), 2, s, K) * f_rows[..., None, :, :]
        d_columns = product("...ij,...ik->...jk", d_pairs, rows) * f_columns
        d_q_run, d_beta_run = d_rows[..., 0, :, :], d_rows[..., 1, :, :]
        all_rows.append(_run(q, s, 1) * d_q_run + _run(k_beta, s, 1) * d_beta_run)
        all_columns.append(_run(k, s, 0) * d_columns)
        second = lambda x, s=s: blocks(jnp.pad(x, [*free, (0, 0), (s, 0), (0, 0)]))
        d_q, d_k_beta = d_q + second(d_q_run), d_k_beta + second(d_beta_run)
        d_k = d_k + blocks(jnp.pad(d_columns, [*free, (0, 0), (0, s), (0, 0)]))
    d_sums = BlockSums(tuple(all_rows), tuple(all_columns), d_prefix, d_suffix, d_between, None, None)
    return d_q.reshape(q.shape), d_k_beta.reshape(q.shape), d_k.reshape(q.shape), d_sums


def _run(x, s: int, half: int):
    """[.., C, K] -> [.., P, s, K]: the first (0) or second (1) run of each pair of runs of s tokens."""
    *lead, C, K = x.shape
    return x.reshape(*lead, C // (2 * s), 2, s, K)[..., half, :, :]


def _pairs_of_level(inside, s: int):
    """[.., n, 2, 16, 16] -> [.., P, 2s, s]: for each pair of runs, its q and then its k_beta rows, from the second run to the first."""
    *lead, n, _, _, _ = inside.shape
    m = BLOCK // (2 * s)
    pairs = inside.reshape(*lead, n, 2, m, 2, s, m, 2, s)[..., :, 1, :, :, 0, :]  # [.., n, 2, m, s, m, s]
    pairs = jnp.where(_own_block(m), pairs, 0).sum(-2)  # [.., n, 2, m, s, s]
    return jnp.moveaxis(pairs, -3, -4).reshape(*lead, n * m, 2 * s, s)


def _level_factors(q, k_beta, k, e_rows, e_columns):
    """rows [.., P, 2s, K], the q and then the k_beta of the second runs; columns [.., P, s, K], the k of the first; their exponentials."""
    s = e_rows.shape[-2]
    f_rows, f_columns = jnp.exp(e_rows), jnp.exp(e_columns)
    rows = jnp.concatenate([_run(q, s, 1) * f_rows, _run(k_beta, s, 1) * f_rows], -2)
    return rows, _run(k, s, 0) * f_columns, f_rows, f_columns


def _across_factors(q, k_beta, k, sums: BlockSums):
    """Rows, columns and the exponentials in them, f_rows [.., n-1, 16, K] and f_columns [.., n-1, n-1, 16, K].

    rows [.., n-1, 2 * 16, K]: the q and then the k_beta of each later block. columns [.., n-1, C - 16, K]: the k of all earlier blocks as
    that block sees them.
    """
    *lead, n, _, K = sums.prefix.shape
    q, k_beta, k = (x.reshape(sums.prefix.shape) for x in (q, k_beta, k))
    f_rows = jnp.exp(sums.prefix[..., 1:, :, :])
    e_columns = sums.suffix[..., None, :-1, :, :] + sums.between[..., None, :]
    f_columns = jnp.exp(jnp.where(_earlier(n), e_columns, -jnp.inf))
    rows = jnp.concatenate([q[..., 1:, :, :] * f_rows, k_beta[..., 1:, :, :] * f_rows], -2)
    columns = k[..., None, :-1, :, :] * f_columns
    return rows, columns.reshape(*lead, n - 1, (n - 1) * BLOCK, K), f_rows, f_columns


def _earlier(n: int):
    """[n-1, n-1, 1, 1]: at [I-1, J] whether J < I."""
    return jnp.tri(n - 1, dtype=bool)[:, :, None, None]


def _own_block(n: int):
    """[n, 1, n, 1]: the diagonal blocks."""
    return jnp.eye(n, dtype=bool)[:, None, :, None]


def wy(inverse, k_beta_decayed, v_beta):
    """w = (I + A_kk)^-1 (beta k exp(g_cum)),  u = (I + A_kk)^-1 (beta v)."""
    K = k_beta_decayed.shape[-1]
    both = product("...ij,...jr->...ir", inverse, jnp.concatenate([k_beta_decayed, v_beta], -1))
    return both[..., :K], both[..., K:]


def wy_backward(inverse, w, u, d_w, d_u):
    """d_A_kk and the gradients y_w, y_u of the two right-hand sides: y = (I + A_kk)^-T d,  d_A_kk = -strict_tril(y_w w^T + y_u u^T)."""
    C, K = w.shape[-2:]
    both = product("...ji,...jr->...ir", inverse, jnp.concatenate([d_w, d_u], -1))
    d_A_kk = product("...ir,...jr->...ij", both, jnp.concatenate([w, u], -1))
    return jnp.where(jnp.tri(C, k=-1, dtype=bool), -d_A_kk, 0), both[..., :K], both[..., K:]


def unit_lower_inverse(A):
    """(I + A)^-1 for strictly lower A [.., C, C] by forward substitution, row by row:  X_i = e_i - sum_{j<i} A_ij X_j."""
    axis = A.ndim - 2

    def row(i, X):
        known = product("...j,...jc->...c", lax.dynamic_index_in_dim(A, i, axis, keepdims=False), X)
        return lax.dynamic_update_index_in_dim(X, lax.dynamic_index_in_dim(X, i, axis, keepdims=False) - known, i, axis)

    return lax.fori_loop(1, A.shape[-1], row, jnp.zeros_like(A) + jnp.eye(A.shape[-1], dtype=A.dtype))
