"""Gradients through the decayed products of the tokens of one span: A[i,j] = sum_d x_id k_jd D_ij,d with x = q or k, j < i.

By levels, as in the forward: at level b each odd block of b tokens meets the even block before it, rows decayed from the boundary between
them and columns to it. The gradient of a gate is a sum over the pairs that it lies between: a row's share goes to the gates from the
boundary to it, a column's to those after it up to the boundary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.device.channel_tiles import (
    earlier_get,
    join_octets,
    later_get,
    octet_sums,
    per_octet,
    pick_octet,
    side_by_side,
    span_tokens,
    split_octets,
    split_sides,
    spread_octets,
)
from kdakit.backends.triton_gpu.device.gate import reciprocal
from kdakit.backends.triton_gpu.device.matrix import product, product_add, round_to, rounded_off


@triton.jit
def with_pairs(b_x, b_M, PRECISION: tl.constexpr):
    """b_x b_M for pairs b_M of b_x's dtype, or in float32: then in two parts, of which nothing is lost."""
    DTYPE: tl.constexpr = b_x.dtype
    if b_M.dtype == DTYPE:
        return product(b_x, b_M, PRECISION)
    return product_add(b_x, rounded_off(b_M, DTYPE), product(b_x, round_to(b_M, DTYPE), PRECISION), PRECISION)


@triton.jit
def whole_with_pairs(b_x, b_lost, b_M, PRECISION: tl.constexpr):
    """`with_pairs`; b_lost, if it is there: what rounding took from b_x."""
    b_y = with_pairs(b_x, b_M, PRECISION)
    if b_lost is not None:
        b_y = product_add(b_lost, round_to(b_M.to(tl.float32), b_x.dtype), b_y, PRECISION)
    return b_y


@triton.jit
def level_pairs(b_dA, b: tl.constexpr):
    """b_dA [64, 32], the span's rows twice (q, k) and its columns -> the pairs of level b; level 0: all inside blocks of 16, and
    the diagonal of q."""
    o_p = tl.arange(0, 64)[:, None]
    o_i, o_j = (span_tokens(64) % 32)[:, None], span_tokens(32)[None, :]
    if b == 0:
        m_pairs = (o_i // 16 == o_j // 16) & ((o_i > o_j) | ((o_i == o_j) & (o_p < 32)))
    else:
        m_pairs = (o_i // b % 2 == 1) & (o_i // b == o_j // b + 1)
    return round_to(tl.where(m_pairs, b_dA.to(tl.float32), 0.0), b_dA.dtype)


@triton.jit
def diagonal_of(b_dA):
    """b_dA [64, 32] -> the diagonal of its first 32 rows, [32]."""
    o_i, o_j = tl.arange(0, 64)[:, None], tl.arange(0, 32)[None, :]
    return tl.sum(tl.where(o_i == o_j, b_dA.to(tl.float32), 0.0), 0)


@triton.jit
def level_gradient(b_q, b_k, b_f, b_M, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """One level: q and k times b_f, which decays tokens of odd blocks from the boundary and tokens of even blocks to it; b_M [64, 32].

    Returns the gradients of q and k [BK, 32], and what each token, a row or a column, has to do with the gates.
    """
    b_z = b_k * b_f
    b_dk = with_pairs(round_to(side_by_side(b_q * b_f, b_z), DTYPE), b_M, PRECISION)
    b_dq, b_dk1 = split_sides(with_pairs(round_to(b_z, DTYPE), tl.trans(b_M), PRECISION))
    b_dq, b_dk = b_dq * b_f, (b_dk + b_dk1) * b_f
    return b_dq, b_dk, b_q * b_dq + b_k * b_dk


@triton.jit
def block_gradient(b_q, b_k, b_row, b_col, b_M, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """All pairs inside blocks of 16 tokens, rows times b_row and columns times b_col = 1 / b_row, referred to the block's middle: 2^58 at
    most when log-decays are at least -5.

    A gate counts the pairs of all later rows, less those that lie behind it: what is returned last is a difference. It takes the factors
    as they were rounded, so that a pair which must vanish does so but for float32 sums, and what is left is no smaller than e^-5 of what
    vanished.
    """
    b_left = round_to(side_by_side(b_q * b_row, b_k * b_row), DTYPE)
    b_right = round_to(b_k * b_col, DTYPE)
    b_dk = with_pairs(b_left, b_M, PRECISION)
    b_u = -b_right.to(tl.float32) * b_dk
    b_dk = b_dk * b_col
    b_dq, b_dk1 = split_sides(with_pairs(b_right, tl.trans(b_M), PRECISION))
    b_lq, b_lk = split_sides(b_left)
    b_u += b_lq.to(tl.float32) * b_dq + b_lk.to(tl.float32) * b_dk1
    return b_dq * b_row, b_dk + b_dk1 * b_row, b_u


@triton.jit
def gate_sums(b_rows, b_cols, b_carry):
    """Shares of the gates [BK, 32] from those of rows, which go to the gates of their octet up to their own, those of columns, which go to
    the gates of their octet after them, and b_carry [BK, 4], which goes to all gates of an octet."""
    r, s = split_octets(b_rows), split_octets(b_cols)
    b_run = b_carry
    y = (b_run,)
    for i in tl.static_range(7):
        b_run = b_run + s[i]
        y = y + (b_run,)  # noqa: RUF005
    b_run = r[7]
    x = (y[7] + b_run,)
    for i in tl.static_range(7):
        b_run = b_run + r[6 - i]
        x = (y[6 - i] + b_run,) + x  # noqa: RUF005
    return join_octets(x)


@triton.jit
def span_sums(b_rows, b_cols):
    """`gate_sums` where rows go to all earlier gates of the span and columns to all later ones."""
    return gate_sums(b_rows, b_cols, earlier_get(octet_sums(b_rows)) + later_get(octet_sums(b_cols)))


@triton.jit
def block_sums(b_rows, b_cols):
    """`gate_sums` where rows go to all earlier gates of their block of 16 and columns to all later ones."""
    b_r, b_c = octet_sums(b_rows), octet_sums(b_cols)
    return gate_sums(b_rows, b_cols, per_octet(pick_octet(b_r, 1), pick_octet(b_c, 0), pick_octet(b_r, 3), pick_octet(b_c, 2)))


@triton.jit
def bounded_pairs(b_q, b_k, b_prefix, c, b_dA, DTYPE: tl.constexpr, PTX: tl.constexpr, PRECISION: tl.constexpr):
    """Gradients of q, k and the gates from all pairs of a span when log-decays are at least -5: b_prefix is large enough to divide by."""
    o_t = span_tokens(32)[None, :]
    b_one = tl.full(c[0].shape, 1.0, tl.float32)
    b_total = per_octet(c[0], c[1], c[2], c[3])
    b_row = b_prefix * spread_octets(per_octet(reciprocal(c[0], PTX), b_one, reciprocal(c[2], PTX), b_one))
    b_dq, b_dk, b_w = block_gradient(b_q, b_k, b_row, reciprocal(b_row, PTX), level_pairs(b_dA, 0), DTYPE, PRECISION)
    b_f = tl.where(o_t >= 16, b_prefix, reciprocal(b_prefix, PTX) * spread_octets(b_total)) * spread_octets(
        per_octet(c[1], b_one, b_one, c[2])
    )
    b_dq1, b_dk1, b_u = level_gradient(b_q, b_k, b_f, level_pairs(b_dA, 16), DTYPE, PRECISION)
    return b_dq + b_dq1, b_dk + b_dk1, block_sums(b_w + tl.where(o_t >= 16, b_u, 0.0), tl.where(o_t >= 16, 0.0, b_u))


@triton.jit
def unbounded_pairs(b_q, b_k, b_e, b_prefix, b_suffix, c, b_dA, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Gradients of q, k and the gates from all pairs of a span, any gate: levels 16 to 1. No share of a gate is a difference."""
    o_t = span_tokens(32)[None, :]
    b_one = tl.full(c[0].shape, 1.0, tl.float32)
    b_f = tl.where(o_t >= 16, b_prefix, b_suffix) * spread_octets(per_octet(c[1], b_one, b_one, c[2]))
    b_dq, b_dk, b_u = level_gradient(b_q, b_k, b_f, level_pairs(b_dA, 16), DTYPE, PRECISION)
    b_d_g = block_sums(tl.where(o_t >= 16, b_u, 0.0), tl.where(o_t >= 16, 0.0, b_u))
    m_odd = o_t // 8 % 2 == 1
    b_dq1, b_dk1, b_u = level_gradient(b_q, b_k, tl.where(m_odd, b_prefix, b_suffix), level_pairs(b_dA, 8), DTYPE, PRECISION)
    b_dq, b_dk = b_dq + b_dq1, b_dk + b_dk1
    b_d_g += gate_sums(tl.where(m_odd, b_u, 0.0), tl.where(m_odd, 0.0, b_u), tl.zeros([b_k.shape[0], 4], tl.float32))

    e = split_octets(b_e)
    b_1 = tl.full(e[0].shape, 1.0, tl.float32)
    b_0 = tl.zeros_like(b_1)
    b_45, b_23 = e[4] * e[5], e[2] * e[3]
    b_456 = b_45 * e[6]
    b_f = join_octets((e[1] * b_23, b_23, e[3], b_1, e[4], b_45, b_456, b_456 * e[7]))
    b_dq1, b_dk1, b_u = level_gradient(b_q, b_k, b_f, level_pairs(b_dA, 4), DTYPE, PRECISION)
    b_dq, b_dk, u = b_dq + b_dq1, b_dk + b_dk1, split_octets(b_u)
    b_67, b_01 = u[6] + u[7], u[0] + u[1]
    b_567 = u[5] + b_67
    b_d_g += join_octets((b_0, u[0], b_01, b_01 + u[2], u[4] + b_567, b_567, b_67, u[7]))

    b_f = join_octets((e[1], b_1, e[2], b_23, e[5], b_1, e[6], e[6] * e[7]))
    b_dq1, b_dk1, b_u = level_gradient(b_q, b_k, b_f, level_pairs(b_dA, 2), DTYPE, PRECISION)
    b_dq, b_dk, u = b_dq + b_dq1, b_dk + b_dk1, split_octets(b_u)
    b_d_g += join_octets((b_0, u[0], u[2] + u[3], u[3], b_0, u[4], u[6] + u[7], u[7]))

    b_f = join_octets((b_1, e[1], b_1, e[3], b_1, e[5], b_1, e[7]))
    b_dq1, b_dk1, b_u = level_gradient(b_q, b_k, b_f, level_pairs(b_dA, 1), DTYPE, PRECISION)
    b_diagonal, u = diagonal_of(b_dA)[None, :], split_octets(b_u)
    b_dq, b_dk = b_dq + b_dq1 + b_diagonal * b_k, b_dk + b_dk1 + b_diagonal * b_q
    return b_dq, b_dk, b_d_g + join_octets((b_0, u[1], b_0, u[3], b_0, u[5], b_0, u[7]))


@triton.jit
def load_pairs(p_pairs, ROWS: tl.constexpr, COLUMNS: tl.constexpr, R: tl.constexpr, TURNED: tl.constexpr):
    """Gradients of A_qk above those of A_kk / beta, rows and columns of the spans that begin there -> [64, 32]. TURNED: they lie column by
    column, and so does the tile, see `config.turned`."""
    if TURNED:
        o_i, o_j = tl.arange(0, 64)[None, :], tl.arange(0, 32)[:, None]
        return tl.trans(tl.load(p_pairs + o_i // 32 * R * R + (COLUMNS + o_j) * R + ROWS + o_i % 32))
    o_i, o_j = tl.arange(0, 64)[:, None], tl.arange(0, 32)[None, :]
    return tl.load(p_pairs + o_i // 32 * R * R + (ROWS + o_i % 32) * R + COLUMNS + o_j)
