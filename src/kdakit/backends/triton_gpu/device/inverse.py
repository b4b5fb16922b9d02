"""The inverse of a chunk's unit lower triangular matrix, for chunks of 64 tokens, the second half of rows and columns first."""

from __future__ import annotations

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.device.matrix import product, product_add, round_to
from kdakit.backends.triton_gpu.device.program import row_of_token

DIVISIBLE = tl.constexpr(0.015625)  # a smaller write strength leaves too few digits of what it multiplied


@triton.jit
def join_columns(b_x, b_y):
    """[M, N], [M, N] -> [M, 2 N]"""
    return tl.reshape(tl.permute(tl.join(b_x, b_y), (0, 2, 1)), [b_x.shape[0], 2 * b_x.shape[1]])


@triton.jit
def column_halves(b_x):
    """[M, 2 N] -> [M, N], [M, N]"""
    return tl.split(tl.permute(tl.reshape(b_x, [b_x.shape[0], 2, b_x.shape[1] // 2]), (0, 2, 1)))


@triton.jit
def before_row(o_i, n: tl.constexpr):
    """o_i < n, for n a multiple of 16. What is plainly the same for a whole warp, the compiler computes once and copies for every use."""
    return o_i * 32 + o_i % 8 * 3 < n * 32 - 4


@triton.jit
def inverse_of_blocks(b_N, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """(I - N)^-1 for the strictly lower part N of b_N [4, 16, 16] by masked doubling, see `prepare.unit_lower_inverse`. Every value is kept
    beside its transpose, so that both factors of every product lie in registers as the matrix unit wants them."""
    o_i = tl.arange(0, 16)
    o_x = (o_i[:, None] ^ o_i[None, :])[None]
    b_N = tl.where((o_i[:, None] > o_i[None, :])[None], b_N, 0.0)
    b_X = tl.where(o_x == 0, 1.0, tl.where(o_x == 1, b_N, 0.0))
    b_Xt = tl.permute(b_X, (0, 2, 1))
    for i in tl.static_range(1, 4):
        b_M = round_to(tl.where((o_x >= (1 << i)) & (o_x < (2 << i)), b_N, 0.0), DTYPE)
        b_Xn, b_Xtn = round_to(b_X, DTYPE), round_to(b_Xt, DTYPE)
        b_Yt = round_to(product(b_Xtn, tl.permute(b_M, (0, 2, 1)), PRECISION), DTYPE)
        b_X = product_add(b_Xn, tl.permute(b_Yt, (0, 2, 1)), b_X, PRECISION)
        b_Xt = product_add(b_Yt, tl.permute(b_Xn, (0, 2, 1)), b_Xt, PRECISION)
    return b_X


@triton.jit
def unit_lower_inverse(b_near, b_far, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """(I - N)^-1 for the strictly lower part N of a [64, 64] matrix: b_near [64, 32] holds the squares on its diagonal, b_far, in its first
    32 rows, the one beside them. With D the inverse of the blocks of 16 and P = D times what lies off these blocks, of which the fourth
    power is 0, it is (I + P) (I + P^2) D."""
    o_i = tl.arange(0, 64)[:, None]
    m_0, m_odd = before_row(o_i, 32), ~before_row(o_i % 32, 16)
    b_left, b_right = column_halves(b_near)
    b_D = inverse_of_blocks(tl.reshape(tl.where(m_odd, b_right, b_left), [4, 16, 16]), DTYPE, PRECISION)
    b_D = tl.reshape(b_D, [64, 16])
    b_left = tl.where(m_odd, b_left, 0.0)
    b_2, b_3 = column_halves(b_far)
    b_N = join_columns(tl.where(m_0, b_left, 0.0), tl.zeros([64, 16], tl.float32))
    b_N = join_columns(b_N, join_columns(tl.where(m_0, b_2, b_left), tl.where(m_0, b_3, 0.0)))
    b_0, b_1 = tl.where(before_row(o_i, 16), b_D, 0.0), tl.where(m_0 & m_odd, b_D, 0.0)
    b_2, b_3 = tl.where(before_row(o_i, 48) & ~m_0, b_D, 0.0), tl.where(before_row(o_i, 48), 0.0, b_D)
    b_D = join_columns(join_columns(b_0, b_1), join_columns(b_2, b_3))
    b_Dn = round_to(b_D, DTYPE)
    b_P = round_to(product(b_Dn, round_to(b_N, DTYPE), PRECISION), DTYPE)
    b_X = product_add(round_to(product(b_P, b_P, PRECISION), DTYPE), b_Dn, b_D, PRECISION)
    return product_add(b_P, round_to(b_X, DTYPE), b_X, PRECISION)


@triton.jit
def load_inverse(p_lower, b_beta, o_i, o_c, C: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr):
    """(I + A_kk)^-1 = I - Diag(beta) lower for the tokens o_i [R], whose beta is given; columns o_c [R] in the order of `row_tokens`, as
    `lower` lies. Rows and columns from C on are 0."""
    o_r = row_of_token(o_i, HALF, GROUP)
    m_x = (o_i < C)[:, None] & (o_c < C)[None, :]
    b_N = tl.load(p_lower + o_r[:, None] * C + o_c[None, :], mask=m_x, other=0.0).to(tl.float32)
    return tl.where(m_x & (o_r[:, None] == o_c[None, :]), 1.0, 0.0) - b_beta[:, None] * b_N
