"""Tiles of 32 tokens [8 J, R, c]: 8 j + p on the first axis is the c channels from j c on and token 4 p + r.

4 tokens lie in a thread, all 32 of them in a warp, and every warp has its own channels, so that sums over tokens stay within it, and a warp
reads and writes whole sectors of memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.device.matrix import round_to

# 2^(s + SHIFT) and its inverse fit for the log2-decays s of 32 tokens at least -7.22 each, and of 8 tokens at least FLOOR each.
SHIFT = tl.constexpr(118.0)
UNSHIFT = tl.constexpr(2.0**-118)


@triton.jit
def pick_row(b_x, i: tl.constexpr):
    """b_x [8 J, R, c] -> b_x[:, i]. A sum of integers, so that the compiler drops the zeros and only a register is named."""
    o_i = tl.arange(0, b_x.shape[1])[None, :, None]
    return tl.sum(tl.where(o_i == i, b_x.to(tl.int32, bitcast=True), 0), 1).to(tl.float32, bitcast=True)


@triton.jit
def value_across(b_x, s: tl.constexpr):
    """b_x [8 J, c] -> at each p the value of p ^ s. A sum of two integers less the one is exactly the other."""
    c: tl.constexpr = b_x.shape[1]
    M: tl.constexpr = b_x.shape[0]
    b_i = tl.reshape(b_x.to(tl.int32, bitcast=True), [M // (2 * s), 2, s, c])
    return tl.reshape(tl.sum(b_i, 1, keep_dims=True) - b_i, [M, c]).to(tl.float32, bitcast=True)


@triton.jit
def running_sums(b_g):
    """b_g [8 J, 4, c] -> sums over the token and those before it in its thread, and over all of them [8 J, c]."""
    o_i = tl.arange(0, 4)[None, :, None]
    b_s, b_total = b_g, pick_row(b_g, 0)
    for j in tl.static_range(1, 4):
        b_total = b_total + pick_row(b_g, j)
        b_s = tl.where(o_i == j, b_total[:, None, :], b_s)
    return b_s, b_total


@triton.jit
def half_sums(b_total):
    """b_total [8 J, c], sums over 4 tokens -> over all tokens of the half before them, and over all of it."""
    o_p = (tl.arange(0, b_total.shape[0]) % 8)[:, None]
    b_in = tl.zeros(b_total.shape, tl.float32)
    for i in tl.static_range(3):
        b_other = value_across(b_total, 1 << i)
        b_in = tl.where(((o_p >> i) & 1) == 1, b_in + b_other, b_in)
        b_total = b_total + b_other
    return b_in, b_total


@triton.jit
def _or(x, y):
    return x | y


@triton.jit
def four_rows(b_x, i: tl.constexpr):
    """b_x [8 J, 8, c] -> its rows from 4 i on, [8 J, 4, c]. By a bitwise or with zeros, which the compiler drops, see `pick_row`."""
    b_i = tl.reshape(b_x.to(tl.int32 if b_x.dtype.is_fp32() else tl.int16, bitcast=True), [b_x.shape[0], 2, 4, b_x.shape[2]])
    return tl.reduce(tl.where(tl.arange(0, 2)[None, :, None, None] == i, b_i, 0), 1, _or).to(b_x.dtype, bitcast=True)


@triton.jit
def stack_rows(b_x, b_y):
    """Two [8 J, 4, c] -> [8 J, 8, c]."""
    b_xy = tl.where(tl.arange(0, 2)[None, :, None, None] == 0, b_x[:, None, :, :], b_y[:, None, :, :])
    return tl.reshape(b_xy, [b_x.shape[0], 8, b_x.shape[2]])


@triton.jit
def by_token(b_x):
    """b_x [8 J, n 4, c] -> [n 32, J c], rows by token."""
    n: tl.constexpr = b_x.shape[1] // 4
    J: tl.constexpr = b_x.shape[0] // 8
    c: tl.constexpr = b_x.shape[2]
    return tl.reshape(tl.permute(tl.reshape(b_x, [J, 8, n, 4, c]), (2, 1, 3, 0, 4)), [n * 32, J * c])


@triton.jit
def to_float32(b_x, PTX: tl.constexpr):
    """bfloat16 -> float32. The compiler keeps whatever it has widened once; widened here, it can wait in half the registers."""
    if PTX:
        asm: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        return tl.inline_asm_elementwise(asm, "=f,=f,r", [b_x], dtype=tl.float32, is_pure=True, pack=2)
    return b_x.to(tl.float32)


@triton.jit
def channel_index(J: tl.constexpr, c: tl.constexpr):
    """[8 J, 1, c]"""
    return tl.arange(0, 8 * J)[:, None, None] // 8 * c + tl.max_contiguous(tl.arange(0, c), 8 if c >= 32 else 4)[None, None, :]


@triton.jit
def token_index(J: tl.constexpr, R: tl.constexpr):
    """[8 J, R, 1]"""
    return tl.arange(0, 8 * J)[:, None, None] % 8 * 4 + tl.arange(0, R)[None, :, None] % 4


@triton.jit
def scaled_bf16(b_x, b_y, PTX: tl.constexpr):
    """bfloat16 b_x times float32 b_y, of which each is rounded. PTX: two at a time, without unpacking them."""
    b_y = round_to(b_y, tl.bfloat16)
    if PTX:
        asm: tl.constexpr = "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }"  # plus -0: sm_80 has no product alone
        return tl.inline_asm_elementwise(asm, "=r,r,r", [b_x, b_y], dtype=tl.bfloat16, is_pure=True, pack=2)
    return round_to(b_x.to(tl.float32) * b_y.to(tl.float32), tl.bfloat16)


@triton.jit
def times_unshift(b_x, PTX: tl.constexpr):
    """bfloat16 b_x times UNSHIFT: exact, two at a time."""
    if PTX:
        asm: tl.constexpr = "{ .reg .b32 y, z; mov.b32 y, 0x04800480; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, y, z; }"
        return tl.inline_asm_elementwise(asm, "=r,r", [b_x], dtype=tl.bfloat16, is_pure=True, pack=2)
    return round_to(b_x.to(tl.float32) * UNSHIFT, tl.bfloat16)


@triton.jit
def squares_of(b_x, PTX: tl.constexpr):
    """bfloat16 -> their squares in float32. Not by way of `to_float32`, which would then be kept for its next use."""
    if PTX:
        asm: tl.constexpr = "{ .reg .b32 x, y; shl.b32 x, $2, 16; and.b32 y, $2, 0xffff0000; mul.f32 $0, x, x; mul.f32 $1, y, y; }"
        return tl.inline_asm_elementwise(asm, "=f,=f,r", [b_x], dtype=tl.float32, is_pure=True, pack=2)
    return b_x.to(tl.float32) * b_x.to(tl.float32)
