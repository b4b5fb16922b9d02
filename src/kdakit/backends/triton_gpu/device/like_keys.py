"""Products of keys that are all nearly the same, for float32.

The product of two equal keys is the same number for every pair of a chunk, and so is the error of its sum over channels. Where nothing is
forgotten and write strengths are near 2, a sequence multiplies that error by its length, while the token recurrence, which has no such
product, makes another one at every token. So, with r a key that all others of the chunk are near,

    k_i . k_j = |r|^2 + (r . (k_i - r) + r . (k_j - r) + (k_i - r) . (k_j - r))

of which |r|^2 is known to more digits than float32 has, and the rest is small. r = 0 where they are not near: the product itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.device.matrix import product

NEAR = tl.constexpr(0.0625)  # of |r|^2, at most, is |k - r|^2; and a chunk forgets at most this of every channel


@triton.jit
def first_key(b_k):
    """b_k [R, KP] -> its first row [KP]."""
    return tl.sum(tl.where((tl.arange(0, b_k.shape[0]) == 0)[:, None], b_k, 0.0), 0)


@triton.jit
def if_near(b_r, b_k, b_e, m_t):
    """b_r [KP] if it is near to all keys b_k [R, KP] of tokens m_t [R], and these forget little, with decays b_e [R, KP]; else 0."""
    b_off = b_k - b_r[None, :]
    off = tl.max(tl.where(m_t, tl.sum(b_off * b_off, 1), 0.0), 0)
    forgotten = tl.max(tl.sum(tl.where(m_t[:, None], 1.0 - b_e, 0.0), 0), 0)
    return tl.where((off < NEAR * tl.sum(b_r * b_r, 0)) & (forgotten < NEAR), b_r, 0.0)


@triton.jit
def products_near(b_rows, b_cols, b_r, PRECISION: tl.constexpr):
    """b_rows [2 R, KP], q above k, and b_cols [R, KP] -> b_rows b_cols^T [2 R, R] by way of b_r [KP]."""
    R: tl.constexpr = b_cols.shape[0]
    m_k = (tl.arange(0, 2 * R) >= R)[:, None]
    b_rows = tl.where(m_k, b_rows - b_r[None, :], b_rows)
    b_cols = b_cols - b_r[None, :]
    b_wide = b_r.to(tl.float64)
    square = tl.sum(b_wide * b_wide, 0)
    high = square.to(tl.float32)
    b_rest = tl.sum(b_cols * b_r[None, :], 1) + (square - high.to(tl.float64)).to(tl.float32)  # [R]
    b_A = product(b_rows, tl.trans(b_cols), PRECISION)
    b_A += tl.sum(b_rows * b_r[None, :], 1)[:, None] + tl.where(m_k, b_rest[None, :], 0.0)
    return tl.where(m_k, high + b_A, b_A)
