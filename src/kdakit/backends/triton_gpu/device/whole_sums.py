"""Sums and products of float32 numbers with what rounding takes from them: x + lost, where lost is far smaller."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_product(b_sum, b_lost, b_x, b_y):
    """sum + lost + x y. Multiplied and added in one instruction each time: a compiler that did so by itself would count a part twice."""
    b_next = tl.fma(b_x, b_y, b_sum)
    b_part = b_next - b_sum
    return b_next, b_lost + ((b_sum - (b_next - b_part)) + tl.fma(b_x, b_y, -b_part))


@triton.jit
def add_whole(b_x, b_x_lost, b_y, b_y_lost):
    """(x + lost) + (y + lost)."""
    b_sum = b_x + b_y
    b_part = b_sum - b_x
    return b_sum, ((b_x - (b_sum - b_part)) + (b_y - b_part)) + (b_x_lost + b_y_lost)


@triton.jit
def sum_whole(b_x, b_lost, AXIS: tl.constexpr = 0):
    """The sum of x + lost over an axis, rounded once."""
    b_sum, b_rest = tl.reduce((b_x, b_lost), AXIS, add_whole)
    return b_sum + b_rest


@triton.jit
def product_whole(b_x, b_x_lost, b_y, b_y_lost):
    """(x + lost) (y + lost), rounded, and what that took."""
    b_z = b_x * b_y
    return b_z, tl.fma(b_x, b_y, -b_z) + (b_x * b_y_lost + b_x_lost * b_y)
