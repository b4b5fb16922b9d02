"""Gradients of a chunk's pair matrices, from products over V: what A_qk, A_kk and beta did to the outputs and to the state."""

from __future__ import annotations

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.replay import load_inverse
from kdakit.backends.triton_gpu.span import span_tokens
from kdakit.backends.triton_gpu.tile import narrow, product, product_add, row_of_token


@triton.jit
def load_rows(p_x, o_row, m_row, o_v, V: tl.constexpr, BV: tl.constexpr):
    """Rows at offsets o_row [R] of a [.., V] tensor -> [R, BV]."""
    m_x = m_row[:, None]
    if V % BV:
        m_x = m_x & (o_v < V)[None, :]
    return tl.load(p_x + o_row[:, None] + o_v[None, :], mask=m_x, other=0.0)


@triton.jit
def load_both(p_d_o, p_y, o_row, m_row, o_v, V: tl.constexpr, BV: tl.constexpr, HIP: tl.constexpr):
    """d_o above y of 32 tokens -> [64, BV]; o_row, m_row [64] count every token twice."""
    m_first = tl.arange(0, 64) < 32
    if HIP:  # AMD's compiler cannot choose between two pointers
        return load_rows(p_d_o, o_row, m_row & m_first, o_v, V, BV) + load_rows(p_y, o_row, m_row & ~m_first, o_v, V, BV)
    m_x = m_row[:, None]
    if V % BV:
        m_x = m_x & (o_v < V)[None, :]
    return tl.load(tl.where(m_first[:, None], p_d_o, p_y) + o_row[:, None] + o_v[None, :], mask=m_x, other=0.0)


@triton.jit
def second_half(b_x):
    """[64] -> its last 32."""
    _, b_y = tl.split(tl.permute(tl.reshape(b_x, [2, 32]), (1, 0)))
    return b_y


@triton.jit
def own_column(b_dA):
    """b_dA [64, 32] -> the diagonal of its first 32 rows, [32]."""
    o_i, o_j = span_tokens(64) % 32, span_tokens(32)
    b_own = tl.sum(tl.where(o_i[:, None] == o_j[None, :], b_dA, 0.0), 1)
    b_y, _ = tl.split(tl.permute(tl.reshape(b_own, [2, 32]), (1, 0)))
    return b_y


@triton.jit
def row_scale(p_factors, o_i, scale, length, C: tl.constexpr, S: tl.constexpr, GROUP: tl.constexpr):
    """[64]: scale / |q| of tokens o_i, above their 1 / |k|. Gradients are taken right away to q and k as they were given."""
    m_k = tl.arange(0, 64) >= 32
    b_norm = tl.load(p_factors + tl.where(m_k, 2 * C, C) + row_of_token(o_i, S, GROUP), mask=o_i < length, other=0.0)
    return tl.where(m_k, b_norm, b_norm * scale)


@triton.jit
def span_products(
    p_d_o, p_d_v, p_r, p_lower, p_factors, scale, length, FIRST: tl.constexpr, o_c, m_c, b_beta_c, HV,
    V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, S: tl.constexpr, GROUP: tl.constexpr, SMALL: tl.constexpr,
    PRECISION: tl.constexpr, HIP: tl.constexpr,
):  # fmt: skip
    """Of the span that begins at token FIRST, its tokens twice: d_o r^T above y r^T [64, R]; d_o above beta y, times `row_scale` (of the
    last block of V) [64, BV]; 1 above -beta, times `row_scale` [64]; and, to go with y r^T, the matrix that makes r the error e that beta
    multiplies, [64, R]. Stores d_v = beta y.
    """
    o_i = span_tokens(64) % 32 + FIRST
    m_y = tl.arange(0, 64) >= 32
    m_i = o_i < length
    o_r = row_of_token(o_i, S, GROUP)
    b_beta = tl.load(p_factors + o_r, mask=m_i & m_y, other=1.0)
    b_norm = row_scale(p_factors, o_i, scale, length, C, S, GROUP)
    b_P = tl.zeros([64, o_c.shape[0]], tl.float32)
    for i_v in tl.static_range((V + BV - 1) // BV):
        o_v = i_v * BV + tl.arange(0, BV)
        o_row = o_i * HV * V
        b_Z = load_both(p_d_o, p_d_v, o_row, m_i, o_v, V, BV, HIP)
        b_r = load_rows(p_r, o_c * HV * V, m_c, o_v, V, BV)
        b_P = product_add(b_Z, tl.trans(b_r), b_P, PRECISION)
        b_Z = b_Z.to(tl.float32) * b_beta[:, None]
        tl.store(p_d_v + o_row[:, None] + o_v[None, :], narrow(b_Z, p_d_v.dtype.element_ty), mask=(m_i & m_y)[:, None] & (o_v < V)[None, :])
    o_p = tl.arange(0, o_c.shape[0])
    m_N = (o_i < C)[:, None] & (o_p < C)[None, :]
    b_N = tl.load(p_lower + o_r[:, None] * C + o_p[None, :], mask=m_N, other=0.0).to(tl.float32)
    b_T = tl.where(o_i[:, None] == o_c[None, :], 1.0, 0.0) - b_N * b_beta_c[None, :]
    return b_P, narrow(b_Z * b_norm[:, None], SMALL), tl.where(m_y, -b_beta, 1.0) * b_norm, b_T


@triton.jit
def solved_rows(p_lower, p_factors, o_i, o_p, b_beta_c, C: tl.constexpr, S: tl.constexpr, GROUP: tl.constexpr, SMALL: tl.constexpr):
    """Rows o_i [32] of X / |k|, X = inverse Diag(beta), columns in the order of `row_tokens`, rounded; and what rounding took."""
    o_r = row_of_token(o_i, S, GROUP)
    b_beta, b_norm = tl.load(p_factors + o_r, mask=o_i < C, other=0.0), tl.load(p_factors + 2 * C + o_r, mask=o_i < C, other=0.0)
    b_X = load_inverse(p_lower, b_beta, o_i, o_p, C, S, GROUP) * b_beta_c[None, :] * b_norm[:, None]
    b_Xn = narrow(b_X, SMALL)
    return b_Xn, narrow(b_X - b_Xn.to(tl.float32), SMALL)


@triton.jit
def times_solved(b_x, X, PRECISION: tl.constexpr):
    """b_x [M, R], rounded -> b_x X^T [M, 32]."""
    b_y = product(b_x, tl.trans(X[0]), PRECISION)
    if not b_x.dtype.is_fp32():
        b_y = product_add(b_x, tl.trans(X[1]), b_y, PRECISION)
    return b_y


@triton.jit
def pair_gradients(b_P, X, b_sign, SMALL: tl.constexpr, PRECISION: tl.constexpr):
    """From `span_products`: gradients of A_qk above those of A_kk / beta, for the columns of a span, [64, 32].

    d_A_qk = d_o v_new^T = (d_o r^T) X^T        d_A_kk / beta = -beta y v_new^T
    """
    return times_solved(narrow(b_P, SMALL), X, PRECISION) * b_sign[:, None]
