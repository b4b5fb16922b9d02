"""kdakit::gated_norm: weight * x / sqrt(mean(x^2) + eps) * sigmoid(gate + bias), see `gated_norm_kernels`."""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kdakit.layers.torch.fused import fast
from kdakit.layers.torch.fused.operator import Operator

PROGRAMS = 2048  # about so many of the backward, over heads and strips of tokens; each has a share of the weights' gradients


def gated_norm(x: Tensor, weight: Tensor, eps: float, gate: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """x [.., V] or, with a gate, [.., HV, V]; gate alike; weight [V]; bias [HV * V], added to the gate."""
    return OPERATOR(x, weight, gate, bias, eps)[0]


def forward(x, weight, gate, bias, eps, residual=None):
    """y, and the sum of x and a residual where one is given, of which y is the norm."""
    x, heads = x.contiguous(), _heads(x, gate)
    y = torch.empty_like(x)
    total = None if residual is None else torch.empty_like(x)
    if x.numel():
        kernels, on_device = _kernels()
        tokens, near = x.numel() // x.shape[-1] // heads, None if residual is None else residual.contiguous()
        run = kernels.norm(x.shape[-1], tokens, heads, eps, gate is not None, bias is not None, near is not None, fast(x))
        given = dict(gate=None if gate is None else gate.contiguous(), weight=weight.contiguous(), bias=bias)
        with on_device(x):
            run(x=x, residual=near, **given, sum=total, y=y)
    return [y] if total is None else [y, total]


def backward(grads, needed, x, weight, gate, bias, eps, d_sum=None):
    """Gradients of x, weight, gate and bias; d_sum: another one of x, which is added."""
    x, heads, V = x.contiguous(), _heads(x, gate), x.shape[-1]
    d_y = grads[0].to(x.dtype).contiguous()
    tokens = x.numel() // V // heads
    strip = max(16, min(1024, 1 << (max(1, tokens * heads // PROGRAMS) - 1).bit_length()))
    strips = -(-tokens // strip)
    d_x, d_gate = torch.empty_like(x), None if gate is None else torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    shares = torch.empty((2, strips, heads, V), dtype=torch.float32, device=x.device)
    make = torch.empty if x.numel() else torch.zeros
    d_weight = make(weight.shape, dtype=weight.dtype, device=x.device)
    d_bias = None if bias is None else make(bias.shape, dtype=d_weight.dtype, device=x.device)
    kernels, on_device = _kernels()
    with on_device(x):
        if x.numel():
            run = kernels.norm_backward(V, tokens, heads, eps, gate is not None, bias is not None, d_sum is not None, strip, fast(x))
            given = dict(x=x, gate=None if gate is None else gate.contiguous(), weight=weight.contiguous(), bias=bias)
            run(**given, dy=d_y, dsum=None if d_sum is None else d_sum.to(x.dtype).contiguous(), dx=d_x, dgate=d_gate, shares=shares)
            kernels.sums(strips, heads, V, bias is not None)(shares=shares, d_weight=d_weight, d_bias=d_bias)
    return [d_x, d_weight, d_gate, None if bias is None or d_bias is None else d_bias.to(bias.dtype)]


def _heads(x: Tensor, gate: Tensor | None) -> int:
    return 1 if gate is None else x.shape[-2]


def _shapes(x, weight, gate, bias, eps):
    return [torch.empty_like(x, memory_format=torch.contiguous_format)]


OPERATOR = Operator(
    "gated_norm", "Tensor x, Tensor weight, Tensor? gate, Tensor? bias, float eps",
    tensors=4, differentiable=4, forward=forward, backward=backward, shapes=_shapes,
)  # fmt: skip


@lru_cache
def _kernels() -> tuple[ModuleType, Any]:
    from kdakit.backends.triton_gpu.runtime.launch import on_device
    from kdakit.layers.torch.fused import gated_norm_launch

    return gated_norm_launch, on_device
