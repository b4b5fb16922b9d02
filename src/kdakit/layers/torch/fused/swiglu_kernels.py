"""silu(a) b of two tensors of one shape, forward and backward, and their host side.

s = sigmoid(a)        y = a s b        da = dy b s (1 + a (1 - s))        db = dy a s
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.device.matrix import round_to
from kdakit.backends.triton_gpu.runtime.launch import Launch
from kdakit.layers.torch.fused.rows import sigmoid

BLOCK, WARPS = 2048, 8  # numbers of a program


@triton.jit(do_not_specialize=["N"])
def swiglu_kernel(p_a, p_b, p_y, N, BLOCK: tl.constexpr):
    """Grid: (cdiv(N, BLOCK),)."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < N
    b_a = tl.load(p_a + o, mask=m, other=0.0).to(tl.float32)  # [BLOCK]
    b_b = tl.load(p_b + o, mask=m, other=0.0).to(tl.float32)
    tl.store(p_y + o, round_to(b_a * sigmoid(b_a) * b_b, p_y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["N"])
def swiglu_backward_kernel(p_a, p_b, p_dy, p_da, p_db, N, BLOCK: tl.constexpr):
    """Grid: (cdiv(N, BLOCK),)."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < N
    b_a = tl.load(p_a + o, mask=m, other=0.0).to(tl.float32)  # [BLOCK]
    b_b = tl.load(p_b + o, mask=m, other=0.0).to(tl.float32)
    b_dy = tl.load(p_dy + o, mask=m, other=0.0).to(tl.float32)
    b_s = sigmoid(b_a)
    tl.store(p_da + o, round_to(b_dy * b_b * b_s * (1.0 + b_a * (1.0 - b_s)), p_da.dtype.element_ty), mask=m)
    tl.store(p_db + o, round_to(b_dy * b_a * b_s, p_db.dtype.element_ty), mask=m)


@lru_cache(maxsize=1024)
def forward(count: int) -> Launch:
    return Launch(swiglu_kernel, -(-count // BLOCK), dict(N=count, BLOCK=BLOCK), num_warps=WARPS)


@lru_cache(maxsize=1024)
def backward(count: int) -> Launch:
    return Launch(swiglu_backward_kernel, -(-count // BLOCK), dict(N=count, BLOCK=BLOCK), num_warps=WARPS)
