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
from kdakit.backends.xla.products import product


class Intra(NamedTuple):
    g_cum: Any  # [.., C, K]  log-decay from the chunk's start
    A_qk: Any  # [.., C, C]  lower triangle with diagonal
    A_kk: Any  # [.., C, C]  strictly lower triangle
    w: Any  # [.., C, K]
    u: Any  # [.., C, V]
    q_decayed: Any  # [.., C, K]
    k_decayed: Any  # [.., C, K]
    decay: Any  # [.., K]


def intra_forward(q, k, v, g, beta) -> Intra:
    """q (scaled), k, g [.., C, K], v [.., C, V], beta [.., C] -> Intra."""
    sums = block_sums(g)
    k_beta = beta[..., None] * k
    A_qk, A_kk = pair_products(q, k_beta, k, sums)
    from_start = jnp.exp(sums.g_cum)
    w, u = wy(A_kk, k_beta * from_start, beta[..., None] * v)
    return Intra(sums.g_cum, A_qk, A_kk, w, u, q * from_start, k * jnp.exp(sums.to_end), from_start[..., -1, :])


def intra_backward(q, k, v, g, beta, x: Intra, d: Intra):
    """d_q, d_k, d_v, d_g, d_beta from the gradients of A_qk, w, u, q_decayed, k_decayed and decay (d's other fields are not read).

    With (y_w, y_u) = (I + A_kk)^-T (d_w, d_u), the gradients of k_beta exp(g_cum) and beta v:
    d_A_kk = -strict_tril(y_w w^T + y_u u^T). Every exponent E of a factor F = exp(E) gets d_E = F d_F.
    """
    sums = block_sums(g)
    k_beta = beta[..., None] * k
    d_A_kk, y_w, y_u = wy_backward(x.A_kk, x.w, x.u, d.w, d.u)
    d_q, d_k_beta, d_k, d_sums = pair_products_backward(q, k_beta, k, sums, d.A_qk, d_A_kk)
    from_start, to_end = jnp.exp(sums.g_cum), jnp.exp(sums.to_end)
    d_g_cum = from_start * (q * d.q_decayed + k_beta * y_w)
    d_g_cum = d_g_cum.at[..., -1, :].add(d.decay * x.decay)
    d_g = block_sums_backward(d_sums._replace(g_cum=d_g_cum, to_end=d.k_decayed * x.k_decayed))
    d_k_beta = d_k_beta + y_w * from_start
    d_q = d_q + d.q_decayed * from_start
    d_k = d_k + d.k_decayed * to_end + beta[..., None] * d_k_beta
    d_beta = (k * d_k_beta).sum(-1) + (v * y_u).sum(-1)
    return d_q, d_k, beta[..., None] * y_u, d_g, d_beta


def pair_products(q, k_beta, k, sums: BlockSums):
    """A_qk with its diagonal and A_kk [.., C, C], for any log-decays <= 0.

    Each pair of tokens is referred to a point between them, so that both of its factors are exponentials of sums <= 0. Tokens of different
    blocks of 16: the start of the later one's block. Tokens of one block: at the level b at which they part, the boundary between the two
    halves of b tokens. The diagonal needs no exponential.
    """
    *lead, C, K = k.shape
    n = C // BLOCK
    factors = _level_factors(q, k_beta, k, sums)
    diagonal = 0  # [.., n, 2, 16, 16]: q and k_beta rows inside each block
    for b, (rows, columns) in zip(LEVELS, factors, strict=True):
        pairs = product("...ik,...jk->...ij", rows, columns)  # [.., n, 2 * 8, 8]
        diagonal = diagonal + _spread(pairs, b)
    rows, columns = _across_factors(q, k_beta, k, sums)
    pairs = product("...ik,...jk->...ij", rows, columns)  # [.., n-1, 2 * 16, C - 16]
    pairs = jnp.moveaxis(pairs.reshape(*lead, n - 1, 2, BLOCK, C - BLOCK), -3, -4)
    free = [(0, 0)] * len(lead)
    A = jnp.pad(pairs, [*free, (0, 0), (1, 0), (0, 0), (0, BLOCK)])  # [.., 2, n, 16, C]
    own = jnp.eye(n, dtype=bool)[:, None, :, None]
    A = A.reshape(*lead, 2, n, BLOCK, n, BLOCK) + jnp.where(own, jnp.moveaxis(diagonal, -3, -4)[..., None, :], 0)
    A = A.reshape(*lead, 2, C, C)
    A_qk = jnp.where(jnp.eye(C, dtype=bool), (q * k).sum(-1, keepdims=True), A[..., 0, :, :])
    return A_qk, A[..., 1, :, :]


def pair_products_backward(q, k_beta, k, sums: BlockSums, d_A_qk, d_A_kk):
    """d_q, d_k_beta, d_k and the gradients of the sums (g_cum and to_end: None), from those of A_qk and A_kk [.., C, C].

    For A = R C^T, R = r exp(E_r), C = c exp(E_c): d_R = d_A C, d_C = d_A^T R, d_r = exp(E_r) d_R, d_E_r = R d_R, and so for columns.
    Only the lower triangles (A_kk: strictly lower) are read.
    """
    *lead, C, K = k.shape
    n = C // BLOCK
    d_diagonal = jnp.einsum("...ii->...i", d_A_qk)[..., None]
    d_q, d_k_beta, d_k = d_diagonal * k, 0, d_diagonal * q
    d_A = jnp.stack([d_A_qk, d_A_kk], -3).reshape(*lead, 2, n, BLOCK, n, BLOCK)
    own = jnp.eye(n, dtype=bool)[:, None, :, None]
    inside = jnp.moveaxis(jnp.where(own, d_A, 0).sum(-2), -4, -3)  # [.., n, 2, 16, 16]
    d_rows_sums, d_columns_sums = [], []
    for b, (rows, columns), e_rows, e_columns in zip(LEVELS, _level_factors(q, k_beta, k, sums), sums.rows, sums.columns, strict=True):
        d_pairs = _gather(inside, b)  # [.., n, 2 * 8, 8]
        d_rows = product("...ij,...jk->...ik", d_pairs, columns)
        d_columns = product("...ij,...ik->...jk", d_pairs, rows).reshape(e_columns.shape)
        shape = (*lead, n, 2, BLOCK // (2 * b), b, K)
        rows, d_rows = rows.reshape(shape), d_rows.reshape(shape)
        d_rows_sums.append((rows * d_rows).sum(-4))
        d_columns_sums.append(columns.reshape(e_columns.shape) * d_columns)
        d_rows = d_rows * jnp.exp(e_rows)[..., None, :, :, :]
        d_columns = d_columns * jnp.exp(e_columns)
        second = lambda x: jnp.stack([jnp.zeros_like(x), x], -3).reshape(k.shape)
        d_q, d_k_beta = d_q + second(d_rows[..., 0, :, :, :]), d_k_beta + second(d_rows[..., 1, :, :, :])
        d_k = d_k + jnp.stack([d_columns, jnp.zeros_like(d_columns)], -3).reshape(k.shape)
    rows, columns = _across_factors(q, k_beta, k, sums)
    d_pairs = jnp.moveaxis(d_A[..., 1:, :, :-1, :], -5, -4).reshape(*lead, n - 1, 2 * BLOCK, C - BLOCK)
    # Where J >= I the column factor is zero, and with it all that the unmasked d_pairs would give.
    d_rows = product("...ij,...jk->...ik", d_pairs, columns).reshape(*lead, n - 1, 2, BLOCK, K)
    d_columns = product("...ij,...ik->...jk", d_pairs, rows).reshape(sums.across.shape)
    d_prefix = (rows.reshape(d_rows.shape) * d_rows).sum(-3)
    d_across = columns.reshape(d_columns.shape) * d_columns
    d_rows = d_rows * jnp.exp(sums.prefix[..., 1:, :, :])[..., None, :, :]
    free = [(0, 0)] * len(lead)
    later = lambda x: jnp.pad(x, [*free, (1, 0), (0, 0), (0, 0)])
    d_q, d_k_beta = d_q + later(d_rows[..., 0, :, :]).reshape(k.shape), d_k_beta + later(d_rows[..., 1, :, :]).reshape(k.shape)
    d_columns = (d_columns * jnp.exp(sums.across)).sum(-4)  # [.., n-1, 16, K]
    d_k = d_k + jnp.pad(d_columns, [*free, (0, 1), (0, 0), (0, 0)]).reshape(k.shape)
    return d_q, d_k_beta, d_k, BlockSums(tuple(d_rows_sums), tuple(d_columns_sums), later(d_prefix), d_across, None, None)


def _level_factors(q, k_beta, k, sums: BlockSums):
    """For each level: rows [.., n, 2 * 8, K], the q and then the k_beta of the second halves, and columns [.., n, 8, K], the k of the first."""
    *lead, C, K = k.shape
    n = C // BLOCK
    for b, e_rows, e_columns in zip(LEVELS, sums.rows, sums.columns, strict=True):
        q_half, beta_half, k_half = (
            x.reshape(*lead, n, BLOCK // (2 * b), 2, b, K)[..., half, :, :] for x, half in ((q, 1), (k_beta, 1), (k, 0))
        )
        f = jnp.exp(e_rows)
        rows = jnp.stack([q_half * f, beta_half * f], -4)  # [.., n, 2, m, b, K]
        yield rows.reshape(*lead, n, BLOCK, K), (k_half * jnp.exp(e_columns)).reshape(*lead, n, BLOCK // 2, K)


def _across_factors(q, k_beta, k, sums: BlockSums):
    """rows [.., n-1, 2 * 16, K] of the later blocks and columns [.., n-1, C - 16, K], all earlier tokens as each later block sees them."""
    *lead, C, K = k.shape
    n = C // BLOCK
    q, k_beta, k = (x.reshape(*lead, n, BLOCK, K) for x in (q, k_beta, k))
    f = jnp.exp(sums.prefix[..., 1:, :, :])
    rows = jnp.stack([q[..., 1:, :, :] * f, k_beta[..., 1:, :, :] * f], -3)
    columns = k[..., None, :-1, :, :] * jnp.exp(sums.across)
    return rows.reshape(*lead, n - 1, 2 * BLOCK, K), columns.reshape(*lead, n - 1, C - BLOCK, K)


def _spread(pairs, b: int):
    """pairs [.., 2 * 8, 8] of level b -> [.., 2, 16, 16]: rows to the second, columns to the first halves, zero elsewhere."""
    *lead, _, _ = pairs.shape
    m = BLOCK // (2 * b)
    pairs = pairs.reshape(*lead, 2, m, 1, b, m, 1, b)
    place = jnp.eye(m, dtype=bool)[:, None, None, :, None, None] & jnp.array([0, 1], bool)[:, None, None, None, None] \
        & jnp.array([1, 0], bool)[:, None]
    return jnp.where(place, pairs, 0).reshape(*lead, 2, BLOCK, BLOCK)


def _gather(A, b: int):
    """The transpose of `_spread`: A [.., 2, 16, 16] -> [.., 2 * 8, 8]."""
    *lead, _, _, _ = A.shape
    m = BLOCK // (2 * b)
    pairs = A.reshape(*lead, 2, m, 2, b, m, 2, b)[..., :, 1, :, :, 0, :]
    return jnp.where(jnp.eye(m, dtype=bool)[:, None, :, None], pairs, 0).reshape(*lead, BLOCK, BLOCK // 2)


def wy(A_kk, k_beta_decayed, v_beta):
    """w, u with (I + A_kk) w = beta k exp(g_cum) and (I + A_kk) u = beta v."""
    K = k_beta_decayed.shape[-1]
    both = solve(A_kk, jnp.concatenate([k_beta_decayed, v_beta], -1))
    return both[..., :K], both[..., K:]


def wy_backward(A_kk, w, u, d_w, d_u):
    """d_A_kk and the gradients y_w, y_u of the two right-hand sides: (I + A_kk)^T y = d,  d_A_kk = -strict_tril(y_w w^T + y_u u^T)."""
    C, K = w.shape[-2:]
    both = solve(A_kk, jnp.concatenate([d_w, d_u], -1), transpose=True)
    d_A_kk = product("...ik,...jk->...ij", both, jnp.concatenate([w, u], -1))
    strictly_lower = jnp.tri(C, k=-1, dtype=bool)
    return jnp.where(strictly_lower, -d_A_kk, 0), both[..., :K], both[..., K:]


def solve(A, rhs, transpose: bool = False):
    """x with (I + A) x = rhs, or (I + A)^T x = rhs, for strictly lower A [.., C, C]; rhs [.., C, R].

    Substitution by blocks of 16 tokens: x_I = D_I (rhs_I - sum over solved J of A_IJ x_J), D_I the inverse of the diagonal block.
    """
    *lead, C, _ = A.shape
    n = C // BLOCK
    inverses = diagonal_inverses(A)  # [.., n, 16, 16]
    blocks = A.reshape(*lead, n, BLOCK, C) if not transpose else A.reshape(*lead, C, n, BLOCK)
    row, column = ("...ij,...jr->...ir", inverses.ndim - 3) if not transpose else ("...ji,...jr->...ir", inverses.ndim - 2)

    def substitute(x, block):
        inverse = lax.dynamic_index_in_dim(inverses, block, inverses.ndim - 3, keepdims=False)
        A_block = lax.dynamic_index_in_dim(blocks, block, column, keepdims=False)
        known = lax.dynamic_slice_in_dim(rhs, block * BLOCK, BLOCK, rhs.ndim - 2) - product(row, A_block, x)
        return lax.dynamic_update_slice_in_dim(x, product(row, inverse, known), block * BLOCK, rhs.ndim - 2), None

    return lax.scan(substitute, jnp.zeros_like(rhs), jnp.arange(n), reverse=transpose)[0]


def diagonal_inverses(A):
    """(I + L)^-1 [.., n, 16, 16] of the n diagonal blocks L of strictly lower A [.., C, C].

    X <- X - X (L o M_b) X for b = 1, 2, 4, 8, where M_b selects the off-diagonal block of each pair of b rows: exact algebra, no series.
    """
    *lead, C, _ = A.shape
    n = C // BLOCK
    own = jnp.eye(n, dtype=bool)[:, None, :, None]
    L = jnp.where(own, A.reshape(*lead, n, BLOCK, n, BLOCK), 0).sum(-2)
    i, j = jnp.arange(BLOCK)[:, None], jnp.arange(BLOCK)
    X = jnp.eye(BLOCK, dtype=A.dtype) - jnp.where(i // 2 == j // 2, L, 0)
    for b in LEVELS[1:]:
        pair = jnp.where((i // b == j // b + 1) & (i // (2 * b) == j // (2 * b)), L, 0)
        X = X - product("...ij,...jk,...kl->...il", X, pair, X)
    return X
