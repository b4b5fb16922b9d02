"""y [B, T, H, D] = x with its channels side by side, and the launch of that."""

from __future__ import annotations

import math
from functools import lru_cache

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.runtime.launch import Launch

TOKENS, CHANNELS, WARPS = 64, 128, 4  # of a program


@triton.jit(do_not_specialize=["T", "sb", "sh", "sd"])
def turn_kernel(
    p_x, p_y, T, sb, sh, sd, H: tl.constexpr, D: tl.constexpr, UNIT: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """x[b, t, h, d] is at (b sb + h sh + d sd) UNIT + t, T counts UNIT tokens. Grid: (tiles of tokens, H * tiles of channels, B)."""
    tiles = tl.cdiv(D, CHANNELS)
    i_b, i_h, i_d = tl.program_id(2).to(tl.int64), (tl.program_id(1) // tiles).to(tl.int64), tl.program_id(1) % tiles
    o_t, o_d = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), i_d * CHANNELS + tl.arange(0, CHANNELS)
    tokens = tl.cast(T, tl.int64) * UNIT
    m_t, m_d = o_t < tokens, o_d < D
    p_in = p_x + (i_b * sb + i_h * sh + o_d[:, None].to(tl.int64) * sd) * UNIT + o_t[None, :]
    b_x = tl.load(p_in, mask=m_d[:, None] & m_t[None, :], other=0.0)  # [CHANNELS, TOKENS]
    p_out = p_y + ((i_b * tokens + o_t[:, None]) * H + i_h) * D + o_d[None, :]
    tl.store(p_out, tl.trans(b_x), mask=m_t[:, None] & m_d[None, :])


@lru_cache(maxsize=1024)
def launch(shape: tuple[int, ...], strides: tuple[int, ...]) -> Launch:
    (B, T, H, D), (sb, _, sh, sd) = shape, strides
    unit = math.gcd(16, T, sb if B > 1 else 0, sh if H > 1 else 0, sd)
    values = dict(T=T // unit, sb=sb // unit, sh=sh // unit, sd=sd // unit, H=H, D=D, UNIT=unit, TOKENS=TOKENS, CHANNELS=CHANNELS)
    return Launch(turn_kernel, (-(-T // TOKENS), H * -(-D // CHANNELS), B), values, num_warps=WARPS)
