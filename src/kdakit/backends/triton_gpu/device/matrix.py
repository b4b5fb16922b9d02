"""Operands and products of the matrix units: rounding, products with float32 sums, and the order of rows on their way to memory."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """float32 x rounded to nearest even in DTYPE. The interpreter truncates to bfloat16, so there the rounding is spelled out."""
    if INTERPRETED and DTYPE.is_bf16():
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
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
    """a @ b with float32 sums. PRECISION, of float32 factors: one of Triton's, where "bf16x6" is `rounded_product` and "bf16x6 cut" is
    Triton's own. The interpreter stores bfloat16 as integers, so there the factors are widened first."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    if PRECISION == "bf16x6" and a.dtype.is_fp32():
        return rounded_product(a, b)
    return tl.dot(a, b, input_precision="bf16x6" if PRECISION == "bf16x6 cut" else PRECISION)


@triton.jit
def product_add(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    if PRECISION == "bf16x6" and a.dtype.is_fp32():
        return acc + rounded_product(a, b)
    return tl.dot(a, b, acc, input_precision="bf16x6" if PRECISION == "bf16x6 cut" else PRECISION)


@triton.jit
def exponents(b_max):
    """[R] maxima -> as bits the powers of 2 that rows are divided by to fill float16's range."""
    bits = b_max.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.minimum(tl.maximum(bits, 0x00800000), 0x7E800000)


@triton.jit
def scaled_by(a, bits):
    """Rows of a in float32, divided by the powers of 2 of `exponents`, in float16."""
    return (a * (0x7F000000 - bits).to(tl.float32, bitcast=True)[:, None]).to(tl.float16)


@triton.jit
def in_parts(b_x):
    """float32 -> three bfloat16 parts that sum to it."""
    b_hi = round_to(b_x, tl.bfloat16)
    b_rest = b_x - b_hi.to(tl.float32)
    b_mid = round_to(b_rest, tl.bfloat16)
    return b_hi, b_mid, round_to(b_rest - b_mid.to(tl.float32), tl.bfloat16)


@triton.jit
def rounded_product(a, b):
    """a @ b [.., M, N] of float32 factors [.., M, R], [.., R, N], by six products of their bfloat16 parts.

    A matrix unit adds 16 products to a sum and cuts off what does not fit, always towards zero: every sum is a little too small, and what
    is made of many such sums shows it. So the largest parts are summed 16 at a time, or a quarter of R, each sum begun at zero, and these
    are added by additions that round. Zeros stand for the others meanwhile: nothing is cut off where they are added.
    """
    R: tl.constexpr = a.shape[-1]
    AT_A_TIME: tl.constexpr = 16 if R <= 64 else R // 4
    x, y = in_parts(a), in_parts(b)
    b_sum = tl.dot(x[1], y[1])
    b_sum = tl.dot(x[2], y[0], b_sum)
    b_sum = tl.dot(x[0], y[2], b_sum)
    b_sum = tl.dot(x[1], y[0], b_sum)
    b_sum = tl.dot(x[0], y[1], b_sum)
    o_r, b_minus = tl.arange(0, R) // AT_A_TIME, round_to(-a, tl.bfloat16)
    for i in tl.static_range(R // AT_A_TIME):
        b_sum -= tl.dot(tl.where(o_r == i, b_minus, 0.0), y[0])  # of + and a product the compiler makes one sum, which is cut off again
    return b_sum


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
