"""Products of keys that are nearly the same, for float32.

The product of two equal keys is the same number for every pair of a chunk, and so is the error of its sum over channels. Where nothing is
forgotten and write strengths are near 2, a sequence multiplies that error by its length, while the token recurrence, which has no such
product, makes another one at every token. So, with r the chunk's first key, and every k that is near it taken as r and the rest of it,

    k_i . k_j = |r|^2 + (r . (k_i - r) + r . (k_j - r) + (k_i - r) . (k_j - r))

of which |r|^2 is known to more digits than float32 has, and what is added to it is small. A key that is not near r has no share of it: with
two of these this is their product itself. Which it is depends on a key and the first one alone, so later tokens change no bit of earlier
ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.device.matrix import product

NEAR = tl.constexpr(0.0625)  # |k - r|^2 is less than this of |r|^2


@triton.jit
def first_key(b_k):
    """b_k [R, KP] -> its first row [KP]."""
    return tl.sum(tl.where((tl.arange(0, b_k.shape[0]) == 0)[:, None], b_k, 0.0), 0)


@triton.jit
def shares(b_x, b_r):
    """b_x [R, KP], decayed keys -> 1 where b_r [KP] is near, else 0 [R]; what is left of them without it; the product of that with b_r."""
    b_off = b_x - b_r[None, :]
    m_near = tl.sum(b_off * b_off, 1) < NEAR * tl.sum(b_r * b_r, 0)
    b_off = tl.where(m_near[:, None], b_off, b_x)
    return tl.where(m_near, 1.0, 0.0), b_off, tl.sum(b_off * b_r[None, :], 1)


@triton.jit
def products_near(b_rows, b_cols, b_r, PRECISION: tl.constexpr):
    """b_rows [2 R, KP], q above k, and b_cols [R, KP] -> b_rows b_cols^T [2 R, R] by way of b_r [KP]."""
    b_of_row, b_rows, b_row_r = shares(b_rows, b_r)
    b_of_col, b_cols, b_col_r = shares(b_cols, b_r)
    b_wide = b_r.to(tl.float64)
    square = tl.sum(b_wide * b_wide, 0)
    high = square.to(tl.float32)
    low = (square - high.to(tl.float64)).to(tl.float32)
    b_both = b_of_row[:, None] * b_of_col[None, :]  # [2 R, R]
    b_A = product(b_rows, tl.trans(b_cols), PRECISION)
    b_A += (b_row_r[:, None] * b_of_col[None, :] + b_of_row[:, None] * b_col_r[None, :]) + b_both * low
    return b_A + b_both * high


@triton.jit
def pair_products(b_rows, b_cols, b_r, PRECISION: tl.constexpr):
    """Rows [2 R, KP], q above k, with columns [R, KP] -> [2 R, R]; in float32 by way of b_r [KP]."""
    if b_rows.dtype.is_fp32():
        return products_near(b_rows, b_cols, b_r, PRECISION)
    return product(b_rows, tl.trans(b_cols), PRECISION)
