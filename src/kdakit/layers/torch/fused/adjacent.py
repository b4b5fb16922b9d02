"""[B, T, H, D] tensors whose tokens lie side by side in memory, turned so that channels do, which is how the operator reads them.

A convolution over [B, D, T] leaves them so. PyTorch copies such a tensor element by element; here tiles of it are turned.
"""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kdakit.layers.torch.fused import fits
from kdakit.torch_operators import unwatched


def adjacent(x: Tensor) -> Tensor:
    """x, or a copy whose channels are adjacent."""
    if x.stride(-1) == 1 or x.shape[-1] == 1:
        return x
    if not (x.is_cuda and x.dim() == 4 and x.stride(1) == 1 and unwatched((x,)) and fits(x)):
        return x.contiguous()
    return _Turned.apply(x) if torch.is_grad_enabled() and x.requires_grad else turned(x)


def turned(x: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        kernel, on_device = _kernel()
        with on_device(x):
            kernel.launch(tuple(x.shape), x.stride())(x=x, y=y)
    return y


class _Turned(torch.autograd.Function):
    """Where the numbers lie has no derivative, and nothing of x is kept."""

    @staticmethod
    def forward(ctx, x):
        return turned(x)

    @staticmethod
    def backward(ctx, d_y):
        return d_y


@lru_cache
def _kernel() -> tuple[ModuleType, Any]:
    from kdakit.backends.triton_gpu.runtime.launch import on_device
    from kdakit.layers.torch.fused import adjacent_kernel

    return adjacent_kernel, on_device
