"""How states are kept: in a float dtype, or in 8 bits with scales.

8 bits: S[k, v] = scale[k, v // 32] * code[k, v]. A scale belongs to one key channel, and a decay multiplies a key channel: it goes into
the scale and rounds nothing. What is rounded are the writes, with a dither that depends on the number alone: on average nothing is lost, so
that updates below half a step are not forgotten, and the same call gives the same bits. With feedback a second byte keeps what rounding
left.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kdakit.serving.arguments import SCALE_GROUP, PoolSizes

LARGEST = 127
SMALLEST = 32  # a scale is renewed when no code of its group reaches this
RESIDUAL = 254  # steps of the second byte in one of the first


class Storage:
    """Rows of states, [rows, HV, K, V] to the outside, in the compute dtype."""

    def __init__(self, rows: int, sizes: PoolSizes, device):
        self.sizes = sizes
        self.states = torch.zeros(rows, *sizes.state_shape, dtype=getattr(torch, sizes.dtype), device=device)
        self.scales = self.residual = None
        if sizes.dtype == "int8":
            self.scales = torch.zeros(rows, sizes.HV, sizes.K, sizes.groups, dtype=torch.float32, device=device)
            self.residual = torch.zeros_like(self.states) if sizes.feedback else None

    def tensors(self) -> list[Tensor]:
        return [x for x in (self.states, self.scales, self.residual) if x is not None]

    def read(self, index: Tensor) -> Tensor:
        """Contiguous: products of matrices that lie otherwise in memory round otherwise."""
        states = self._layout(self.states[index]).to(getattr(torch, self.sizes.compute_dtype)).contiguous()
        if self.scales is None:
            return states
        if self.residual is not None:
            states = states + self._layout(self.residual[index]).float() / RESIDUAL
        return states * self._wide(self.scales[index])

    def write(self, index: Tensor, states: Tensor, decay: Tensor | None = None) -> None:
        """decay [N, HV, K]: what the rows have been multiplied by since they were read, if their scales are to follow it."""
        if self.scales is None:
            self.states[index] = self._layout(states).to(self.states.dtype)
            return
        before = None if decay is None else self.scales[index] * decay[..., None]
        codes, residual, scales = quantise(states, before, self.sizes.feedback)
        self.scales[index] = scales
        self.states[index] = self._layout(codes)
        if self.residual is not None and residual is not None:
            self.residual[index] = self._layout(residual)

    def _layout(self, x: Tensor) -> Tensor:
        return x.mT if self.sizes.state_v_first else x

    def _wide(self, scales: Tensor) -> Tensor:
        return scales.repeat_interleave(SCALE_GROUP, -1)[..., : self.sizes.V]


def quantise(states: Tensor, before: Tensor | None, feedback: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Codes [.., K, V] int8, residual or None, scales [.., K, groups]. `before`: scales to keep where they still fit."""
    V = states.shape[-1]
    padded = F.pad(states, (0, -V % SCALE_GROUP)).unflatten(-1, (-1, SCALE_GROUP))
    largest = padded.abs().amax(-1)
    scales = largest / LARGEST
    if before is not None:
        scales = torch.where((largest <= LARGEST * before) & (largest >= SMALLEST * before), before, scales)
    steps = padded / torch.where(scales > 0, scales, 1)[..., None]
    rounded = steps.round() if feedback else torch.floor(steps + dither(padded))
    codes = rounded.clamp(-LARGEST, LARGEST)
    residual = ((steps - codes) * RESIDUAL).round().clamp(-LARGEST, LARGEST)
    codes, residual = (x.to(torch.int8).flatten(-2)[..., :V] for x in (codes, residual))
    return codes, residual if feedback else None, scales


def dither(x: Tensor) -> Tensor:
    """[0, 1) from the bits of float32 x: a multiplicative hash."""
    bits = x.contiguous().view(torch.int32).to(torch.int64)
    mixed = (bits ^ (bits >> 15)) * 0x2C1B3C6D & 0xFFFFFFFF
    mixed = (mixed ^ (mixed >> 12)) * 0x297A2D39 & 0xFFFFFFFF
    return (mixed >> 8).to(torch.float32) / (1 << 24)
