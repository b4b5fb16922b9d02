"""silu(a) b of two tensors of one shape, forward and backward, and their host side.

s = sigmoid(a)        y = a s b        da = dy b s (1 + a (1 - s))        db = dy a s
"""

from __future__ import annotations

import math
from functools import lru_cache

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.device.matrix import round_to
from kdakit.backends.triton_gpu.runtime.launch import Launch
from kdakit.layers.torch.fused.rows import sigmoid

BLOCK, WARPS = 2048, 8  # numbers of a program


@triton.jit(do_not_specialize=["N"])
def swiglu_kernel(p_a, p_b, p_y, N, UNIT: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr):
    """N * UNIT numbers: of so many at a time the compiler knows that all are there or none. Grid: (cdiv(N * UNIT, BLOCK),)."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < tl.cast(N, tl.int64) * UNIT
    b_a = tl.load(p_a + o, mask=m, other=0.0).to(tl.float32)  # [BLOCK]
    b_b = tl.load(p_b + o, mask=m, other=0.0).to(tl.float32)
    tl.store(p_y + o, round_to(b_a * sigmoid(b_a, PTX) * b_b, p_y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["N"])
def swiglu_backward_kernel(p_a, p_b, p_dy, p_da, p_db, N, UNIT: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr):
    """N * UNIT numbers: of so many at a time the compiler knows that all are there or none. Grid: (cdiv(N * UNIT, BLOCK),)."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < tl.cast(N, tl.int64) * UNIT
    b_a = tl.load(p_a + o, mask=m, other=0.0).to(tl.float32)  # [BLOCK]
    b_b = tl.load(p_b + o, mask=m, other=0.0).to(tl.float32)
    b_dy = tl.load(p_dy + o, mask=m, other=0.0).to(tl.float32)
    b_s = sigmoid(b_a, PTX)
    tl.store(p_da + o, round_to(b_dy * b_b * b_s * (1.0 + b_a * (1.0 - b_s)), p_da.dtype.element_ty), mask=m)
    tl.store(p_db + o, round_to(b_dy * b_a * b_s, p_db.dtype.element_ty), mask=m)


@lru_cache(maxsize=1024)
def forward(count: int, ptx: bool) -> Launch:
    return Launch(swiglu_kernel, -(-count // BLOCK), _values(count, ptx), num_warps=WARPS)


@lru_cache(maxsize=1024)
def backward(count: int, ptx: bool) -> Launch:
    return Launch(swiglu_backward_kernel, -(-count // BLOCK), _values(count, ptx), num_warps=WARPS)


def _values(count: int, ptx: bool) -> dict[str, int | bool]:
    unit = math.gcd(16, count)
    return dict(N=count // unit, UNIT=unit, BLOCK=BLOCK, PTX=ptx)
