"""Short causal convolution, one filter a channel, that never looks across the beginning of a sequence.

y_t = silu(sum_j weight[:, j] * x[t - (W - 1) + j] + bias)      weight [D, 1, W]; before a sequence's first token x is its window, or 0
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from kdakit.layers.jax.linear import uniform
from kdakit.layers.jax.rows import Rows


class ShortConvolution(nnx.Module):
    def __init__(self, channels: int, width: int, bias: bool = False, *, rngs: nnx.Rngs):
        self.weight = nnx.Param(uniform(rngs, (channels, 1, width), 1 / math.sqrt(width)))
        self.bias = nnx.Param(uniform(rngs, (channels,), 1 / math.sqrt(width))) if bias else None

    def __call__(self, x, rows: Rows, window=None):
        """x [B, T, D]; window [N, W - 1, D], the inputs before it. Returns y and, where a window was given, the next one."""
        taps = self.weight[...][:, 0].astype(x.dtype)  # [D, W]
        W = taps.shape[1]
        if rows.cu_seqlens is None:
            before = jnp.zeros((x.shape[0], W - 1, x.shape[2]), x.dtype) if window is None else window.astype(x.dtype)
            line = jnp.concatenate([before, x], 1)  # [B, W - 1 + T, D]
            y = sum(line[:, j : j + x.shape[1]] * taps[:, j] for j in range(W))
            after = None if window is None else _last(line, rows.lengths, W - 1).astype(window.dtype)
        else:
            y, after = _packed(x, rows, window, taps)
        return jax.nn.silu(y if self.bias is None else y + self.bias[...].astype(x.dtype)), after


def _packed(x, rows, window, taps):
    T, W = x.shape[1], taps.shape[1]
    owner, place = rows.places(T)
    y = x * taps[:, -1]
    for back in range(1, W):
        earlier = jnp.pad(x, ((0, 0), (back, 0), (0, 0)))[:, :T]
        outside = 0 if window is None else window[owner, jnp.minimum(W - 1 - back + place, W - 2)].astype(x.dtype)  # [T, D]
        y = y + jnp.where((place >= back)[:, None], earlier, outside) * taps[:, -1 - back]
    return y, None if window is None else _last_packed(x, rows.cu_seqlens, window)


def _last(line, lengths, keep: int):
    """The last `keep` inputs of every row of [B, keep + T, D], of which `keep + lengths` count."""
    if lengths is None:
        return line[:, line.shape[1] - keep :]
    return line[jnp.arange(line.shape[0])[:, None], lengths[:, None] + jnp.arange(keep)]


def _last_packed(x, cu_seqlens, window):
    """The last inputs of every packed sequence; a short one keeps part of its old window."""
    keep = window.shape[1]
    place = jnp.diff(cu_seqlens)[:, None] - keep + jnp.arange(keep)  # [N, keep], within the sequence
    old = jnp.take_along_axis(window, jnp.clip(place + keep, 0, max(keep - 1, 0))[..., None], 1)
    if x.shape[1] == 0:
        return old
    new = x[0, jnp.clip(cu_seqlens[:-1, None] + place, 0, x.shape[1] - 1)]
    return jnp.where((place >= 0)[..., None], new.astype(window.dtype), old)
