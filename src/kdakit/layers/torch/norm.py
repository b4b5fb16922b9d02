"""Root-mean-square normalisation, plain and gated, in float32 at least."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kdakit.layers.torch.fused import fits
from kdakit.layers.torch.fused.gated_norm import gated_norm
from kdakit.layers.torch.fused.layer import hooked
from kdakit.layers.torch.fused.residual import carried
from kdakit.layers.torch.shards import shared

WIDEST = 8192  # channels that a program of the kernel holds


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps), times sigmoid(gate) where a gate is given"""

    def __init__(self, size: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        if x.is_cuda and x.shape[-1] <= WIDEST and fits(x, self.weight, gate):
            return gated_norm(x, self.weight, self.eps, gate)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        y = F.rms_norm(wide, (x.shape[-1],), shared(self.weight).to(wide.dtype), self.eps)
        return (y if gate is None else y * torch.sigmoid(gate.to(wide.dtype))).to(x.dtype)

    def carried(self, x: Tensor, mixed: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(the norm of s, s), s = x + mixed, or x: where a residual stream meets what was made of it."""
        found = None
        if x.is_cuda and x.shape[-1] <= WIDEST and not hooked(self):
            found = carried(x, mixed, self.weight, self.eps)
        if found is not None:
            return found
        total = x if mixed is None else x + mixed
        return self(total), total
