"""kdakit::swiglu: silu(a) b in one pass, see `swiglu_kernels`."""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kdakit.layers.torch.fused import fast, fits
from kdakit.layers.torch.fused.operator import Operator


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) b, for a and b of one shape; in plain PyTorch where the kernel does not run."""
    return OPERATOR(a, b)[0] if a.is_cuda and a.dtype == b.dtype and fits(a, b) else F.silu(a) * b


def forward(a, b):
    a, b = a.contiguous(), b.contiguous()
    y = torch.empty_like(a)
    if a.numel():
        kernels, on_device = _kernels()
        with on_device(a):
            kernels.forward(a.numel(), fast(a))(a=a, b=b, y=y)
    return [y]


def backward(grads, needed, a, b):
    a, b, d_y = a.contiguous(), b.contiguous(), grads[0].to(a.dtype).contiguous()
    d_a, d_b = torch.empty_like(a), torch.empty_like(b)
    if a.numel():
        kernels, on_device = _kernels()
        with on_device(a):
            kernels.backward(a.numel(), fast(a))(a=a, b=b, dy=d_y, da=d_a, db=d_b)
    return [d_a, d_b]


def _shapes(a, b):
    return [torch.empty_like(a, memory_format=torch.contiguous_format)]


OPERATOR = Operator("swiglu", "Tensor a, Tensor b", tensors=2, differentiable=2, forward=forward, backward=backward, shapes=_shapes)


@lru_cache
def _kernels() -> tuple[ModuleType, Any]:
    from kdakit.backends.triton_gpu.runtime.launch import on_device
    from kdakit.layers.torch.fused import swiglu_kernels

    return swiglu_kernels, on_device
