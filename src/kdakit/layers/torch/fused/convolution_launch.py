"""Host side of the convolution's kernels: grids and numbers, each worked out once."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from kdakit.backends.triton_gpu.runtime.launch import Launch
from kdakit.layers.torch.fused.convolution_kernels import (
    convolution_backward_kernel,
    convolution_kernel,
    last_inputs_kernel,
    places_kernel,
    weight_sums_kernel,
)

BLOCK, WARPS, TOKENS = 256, 2, 16  # channels and tokens of a forward program
BACKWARD_BLOCK, BACKWARD_WARPS, BACKWARD_TOKENS = 512, 4, 4  # of a backward one, which loads so many tokens at a time
Shape = tuple[int, ...]


@lru_cache(maxsize=1024)
def places(T: int, N: int) -> Launch:
    return Launch(places_kernel, -(-T // 256), dict(T=T, N=N, STEPS=N.bit_length(), BLOCK=256), num_warps=4)


@lru_cache(maxsize=1024)
def forward(shape: Shape, stride: Shape, sizes: Shape, W: int, N: int, packed: bool, has_bias: bool, has_window: bool, ptx: bool) -> Launch:
    block, warps = _block(sizes, BLOCK, WARPS)
    values = _values(shape, stride, sizes, W, N, packed)
    values |= dict(BD=block, GROUP=TOKENS, HAS_BIAS=has_bias, HAS_WINDOW=has_window, PTX=ptx)
    grid = sum(-(-size // block) for size in sizes), -(-shape[1] // TOKENS), shape[0]
    return Launch(convolution_kernel, grid, values, num_warps=warps)


@lru_cache(maxsize=1024)
def backward(
    shape: Shape, stride: Shape, sizes: Shape, W: int, N: int, packed: bool, has_bias: bool, has_window: bool, has_d_window: bool,
    strip: int, ptx: bool,
) -> Launch:  # fmt: skip
    block, warps = _block(sizes, BACKWARD_BLOCK, BACKWARD_WARPS)
    values = _values(shape, stride, sizes, W, N, packed)
    values |= dict(BD=block, GROUP=BACKWARD_TOKENS, HAS_BIAS=has_bias, HAS_WINDOW=has_window, HAS_D_WINDOW=has_d_window, PTX=ptx)
    values["STRIP"] = strip
    grid = sum(-(-size // block) for size in sizes), max(1, -(-shape[1] // strip)), shape[0]
    return Launch(convolution_backward_kernel, grid, values, num_warps=warps)


@lru_cache(maxsize=1024)
def sums(strips: int, D: int, W: int, has_bias: bool) -> Launch:
    return Launch(weight_sums_kernel, -(-D // 32), dict(S=strips, D=D, W=W, BD=32, ROWS=16, HAS_BIAS=has_bias), num_warps=4)


@lru_cache(maxsize=1024)
def last(shape: Shape, stride: Shape, W: int, N: int, packed: bool, has_lengths: bool) -> Launch:
    align, (s_b, s_t) = _aligned(shape, stride)
    values = dict(T=shape[1], N=N, D=shape[2], s_xb=s_b, s_xt=s_t)
    values |= dict(W=W, BD=256, ALIGN=align, PACKED=packed, HAS_LENGTHS=has_lengths)
    return Launch(last_inputs_kernel, (-(-shape[2] // 256), N, 1), values, num_warps=2)


def _values(shape: Shape, stride: Shape, sizes: Shape, W: int, N: int, packed: bool) -> dict[str, Any]:
    align, (s_b, s_t) = _aligned(shape, stride)
    unit = math.gcd(16, *sizes)
    D0, D1, D2 = (size // unit for size in (*sizes, 0, 0)[:3])
    return dict(T=shape[1], N=N, D0=D0, D1=D1, D2=D2, s_xb=s_b, s_xt=s_t, W=W, ALIGN=align, UNIT=unit, PACKED=packed)


def _aligned(shape: Shape, stride: Shape) -> tuple[int, tuple[int, int]]:
    """The strides of rows and tokens, as multiples of a power of two that the compiler may rely on."""
    own = [s if n > 1 else 0 for s, n in zip(stride[:2], shape[:2], strict=True)]
    align = math.gcd(16, *own)
    return align, (own[0] // align, own[1] // align)


def _block(sizes: Shape, block: int, warps: int) -> tuple[int, int]:
    """Channels of a program and its warps: less for small layers."""
    small = max(32, 1 << (max(sizes) - 1).bit_length())
    return (block, warps) if small >= block else (small, max(1, warps * small // block))
