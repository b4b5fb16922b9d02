"""Short causal convolution, one filter a channel, that never looks across the beginning of a sequence.

y_t = silu(sum_j weight[:, j] * x[t - (W - 1) + j] + bias)      weight [D, 1, W]; before a sequence's first token x is its window, or 0
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kdakit.layers.torch.fused import fits
from kdakit.layers.torch.fused.short_convolution import short_convolution
from kdakit.layers.torch.rows import Rows
from kdakit.layers.torch.shards import own


class ShortConvolution(nn.Module):
    def __init__(self, channels: int, width: int, bias: bool = False):
        super().__init__()
        bound = 1 / math.sqrt(width)
        self.weight = nn.Parameter(torch.empty(channels, 1, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound)) if bias else None

    @property
    def width(self) -> int:
        return self.weight.shape[-1]

    def forward(self, x: Tensor, rows: Rows, window: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """x [B, T, D]; window [N, W - 1, D], the inputs before it. Returns y and, where a window was given, the next one."""
        if x.is_cuda and fits(x, self.weight, self.bias, window):
            (y,), after = short_convolution(x, self.weight.flatten(1), x.shape[2:], self.bias, window, rows.cu_seqlens, rows.lengths)
            return y, after
        taps = own(self.weight)[:, 0]  # [D, W]
        if rows.cu_seqlens is None:
            before = x.new_zeros(x.shape[0], self.width - 1, x.shape[2]) if window is None else window.to(x.dtype)
            line = torch.cat([before, x], 1)  # [B, W - 1 + T, D]
            y = line[:, : x.shape[1]] * taps[:, 0]
            for j in range(1, self.width):
                y = y + line[:, j : j + x.shape[1]] * taps[:, j]
            after = None if window is None else _last(line, rows.lengths, self.width - 1)
        else:
            y, after = self._packed(x, rows, window, taps)
        return F.silu(y if self.bias is None else y + own(self.bias)), after

    def _packed(self, x, rows, window, taps):
        T, W = x.shape[1], self.width
        owner, place = rows.places(T)
        if window is not None:
            owner = owner.clamp(max=window.shape[0] - 1)  # tokens behind the last sequence are nobody's
        y = x * taps[:, -1]
        for back in range(1, W):
            earlier = F.pad(x, (0, 0, back, 0))[:, :T]
            outside = 0 if window is None else window[owner, (W - 1 - back + place).clamp(max=W - 2)].to(x.dtype)  # [T, D]
            y = y + torch.where((place >= back)[:, None], earlier, outside) * taps[:, -1 - back]
        return y, None if window is None else _last_packed(x, rows.cu_seqlens, window)


def _last(line: Tensor, lengths: Tensor | None, keep: int) -> Tensor:
    """The last `keep` inputs of every row of [B, keep + T, D], of which `keep + lengths` count."""
    if lengths is None:
        return line[:, line.shape[1] - keep :].clone()  # a view would keep the whole line in memory
    index = lengths[:, None] + torch.arange(keep, device=line.device)
    return line[torch.arange(line.shape[0], device=line.device)[:, None], index]


def _last_packed(x: Tensor, cu_seqlens: Tensor, window: Tensor) -> Tensor:
    """The last inputs of every packed sequence; a short one keeps part of its old window."""
    keep = window.shape[1]
    place = cu_seqlens.diff()[:, None] - keep + torch.arange(keep, device=x.device)  # [N, keep], within the sequence
    old = window.gather(1, (place + keep).clamp(0, max(keep - 1, 0))[..., None].expand_as(window))
    if x.shape[1] == 0:
        return old
    new = x[0, (cu_seqlens[:-1, None] + place).clamp(0, x.shape[1] - 1)]
    return torch.where((place >= 0)[..., None], new.to(window.dtype), old)
