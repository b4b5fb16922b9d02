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

from kdakit.backends.xla.gate import block_decays, block_decays_backward
from kdakit.backends.xla.pairs import pair_products, pair_products_backward
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


def intra_forward(q, k, v, g, beta, A_qk=None, inverse=None, solve=True) -> Intra:
    """q (scaled), k, g [.., C, K], v [.., C, V], beta [.., C] -> Intra; without A_kk where A_qk and the inverse are given.

    Unless `solve`, w and u are the right-hand sides beta k exp(g_cum) and beta v of their systems: v_new is then one solve, not two.
    """
    decays = block_decays(g)
    k_beta = beta[..., None] * k
    A_kk = None
    if inverse is None:
        A_qk, A_kk = pair_products(q, k_beta, k, decays)
        inverse = unit_lower_inverse(A_kk)
    from_start = decays.from_start
    w, u = k_beta * from_start, beta[..., None] * v
    if solve:
        w, u = wy(inverse, w, u)
    g_cum = lax.cumsum(g, g.ndim - 2)
    return Intra(g_cum, A_qk, A_kk, inverse, w, u, q * from_start, k * decays.to_end, from_start[..., -1, :])


def intra_backward(q, k, v, g, beta, x: Intra, d: Intra, solve=True):
    """d_q, d_k, d_v, d_g, d_beta from the gradients of A_qk, w, u, q_decayed, k_decayed and decay; unless `solve`, also of A_kk.

    With (y_w, y_u) = (I + A_kk)^-T (d_w, d_u), the gradients of k_beta exp(g_cum) and beta v:
    d_A_kk = -strict_tril(y_w w^T + y_u u^T). The logarithm E of every decay F gets d_E = F d_F.
    """
    decays = block_decays(g)
    k_beta = beta[..., None] * k
    d_A_kk, y_w, y_u = wy_backward(x.inverse, x.w, x.u, d.w, d.u) if solve else (d.A_kk, d.w, d.u)
    d_q, d_k_beta, d_k, d_logs = pair_products_backward(q, k_beta, k, decays, d.A_qk, d_A_kk)
    from_start, to_end = decays.from_start, decays.to_end
    d_from_start = from_start * (q * d.q_decayed + k_beta * y_w)
    d_g = block_decays_backward(d_logs._replace(from_start=d_from_start, to_end=d.k_decayed * x.k_decayed))
    d_g = d_g + (d.decay * x.decay)[..., None, :]  # every gate is part of the chunk's decay
    d_k_beta = d_k_beta + y_w * from_start
    d_q = d_q + d.q_decayed * from_start
    d_k = d_k + d.k_decayed * to_end + beta[..., None] * d_k_beta
    d_beta = (row_dots(k, d_k_beta) + row_dots(v, y_u))[..., 0]
    return d_q, d_k, beta[..., None] * y_u, d_g, d_beta


def wy(inverse, k_beta_decayed, v_beta):
    """w = (I + A_kk)^-1 (beta k exp(g_cum)),  u = (I + A_kk)^-1 (beta v)."""
    K = k_beta_decayed.shape[-1]
    both = product("...ij,...jr->...ir", inverse, jnp.concatenate([k_beta_decayed, v_beta], -1))
    return both[..., :K], both[..., K:]


def wy_backward(inverse, w, u, d_w, d_u):
    """d_A_kk and the gradients y_w, y_u of the two right-hand sides: y = (I + A_kk)^-T d,  d_A_kk = -strict_tril(y_w w^T + y_u u^T)."""
    K = w.shape[-1]
    both = product("...ji,...jr->...ir", inverse, jnp.concatenate([d_w, d_u], -1))
    return solution_backward(jnp.concatenate([w, u], -1), both), both[..., :K], both[..., K:]


def solution_backward(x, y):
    """d_A_kk = -strict_tril(y x^T), from a solution x of (I + A_kk) x = b and the gradient y of b."""
    return jnp.where(jnp.tri(x.shape[-2], k=-1, dtype=bool), -product("...ir,...jr->...ij", y, x), 0)


def unit_lower_inverse(A):
    """(I + A)^-1 for strictly lower A [.., C, C] by forward substitution: row by row in blocks of 16, then block by block.

    X_i = e_i - sum_{j<i} A_ij X_j,  for the diagonal blocks' own inverses X_I and then  Y_I = X_I - sum_{J<I} (X_I A_IJ) Y_J.
    """
    *lead, C, _ = A.shape
    n = C // BLOCK
    own = jnp.eye(n, dtype=bool)[:, None, :, None]
    A = A.reshape(*lead, n, BLOCK, n, BLOCK)
    inside = _substitute(jnp.where(own, A, 0).sum(-2), 1)
    if n == 1:
        return inside.reshape(*lead, C, C)
    across = product("...ij,...jc->...ic", inside, jnp.where(own, 0, A).reshape(*lead, n, BLOCK, C))
    X = jnp.where(own, inside[..., None, :], 0).reshape(*lead, C, C)
    return _substitute(across.reshape(*lead, C, C), BLOCK, X)


def _substitute(A, size: int, X=None):
    """X_i - sum_{j<i} A_ij X_j, `size` rows at a time; X is the identity, or what the diagonal blocks of A leave of it."""
    axis = A.ndim - 2
    X = jnp.zeros_like(A) + jnp.eye(A.shape[-1], dtype=A.dtype) if X is None else X

    def rows(i, X):
        take = lambda x: lax.dynamic_slice_in_dim(x, i * size, size, axis)
        return lax.dynamic_update_slice_in_dim(X, take(X) - product("...ij,...jc->...ic", take(A), X), i * size, axis)

    return lax.fori_loop(1, A.shape[-1] // size, rows, X)
