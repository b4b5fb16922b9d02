"""Operands and products of the matrix units: rounding, products with float32 sums, and the order of rows on their way to memory."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """float32 x rounded to nearest even in DTYPE. The interpreter truncates to bfloat16, so there the rounding is spelled out."""
    if INTERPRETED and DTYPE.is_bf16():
        bits = x.to(tl.uint32, bitcast=True)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        x = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def rounded_off(x, DTYPE: tl.constexpr):
    """What rounding to DTYPE takes from x, rounded itself."""
    return round_to(x - round_to(x, DTYPE).to(tl.float32), DTYPE)


@triton.jit
def stored_operand(x, DTYPE: tl.constexpr):
    """A stored tile as an operand of DTYPE."""
    return x.to(tl.float32).to(DTYPE)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a @ b with float32 sums. The interpreter stores bfloat16 as integers, so there the factors are widened first, and knows no bf16x6."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def product_add(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def trade_rows(b_x):
    """[C, X] -> the same rows, row c at (c // 2 % 4) C / 4 + c // 8 * 2 + c % 2. Names registers, moves nothing.

    Between rows of memory and the matrix units' order a tile goes through shared memory in rounds, each with two barriers, one for every
    value of the indices that a thread keeps on both sides. The units have rows c and c + 8 in a thread, loads and stores rows r and
    r + C / 4: traded, these have nothing in common, and one round is enough.
    """
    C: tl.constexpr = b_x.shape[0]
    X: tl.constexpr = b_x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(b_x, [C // 8, 4, 2, X]), (1, 0, 2, 3)), [C, X])


@triton.jit
def trade_rows_back(b_x):
    """The inverse of `trade_rows`."""
    C: tl.constexpr = b_x.shape[0]
    X: tl.constexpr = b_x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(b_x, [4, C // 8, 2, X]), (1, 0, 2, 3)), [C, X])
