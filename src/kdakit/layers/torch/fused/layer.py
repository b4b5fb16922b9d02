"""The parts of a KimiDeltaAttention around its operator, in few kernels: what `KimiDeltaAttention._inputs` does in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kdakit.layers.torch.fused import fits
from kdakit.layers.torch.fused.gated_norm import gated_norm
from kdakit.layers.torch.fused.projection import project
from kdakit.layers.torch.fused.short_convolution import short_convolution


class Inputs(NamedTuple):
    """Of the operator, heads not yet apart."""

    q: Tensor  # [B, T, key_dim]
    k: Tensor
    v: Tensor  # [B, T, value_dim]
    g: Tensor  # [B, T, gate_dim], raw
    beta: Tensor  # [B, T, HV], logits
    gate: Tensor | None  # [B, T, rank]: what the output gate's second matrix gets, or None where nobody has made it
    windows: Sequence[Tensor | None]  # of q, k and v after these tokens


def fused_dtype(layer: Any, x: Tensor) -> torch.dtype | None:
    """The dtype in which the kernels compute with x, or None: they do not take this layer as it is."""
    if not x.is_cuda or not layer.sizes.use_short_conv:
        return None
    matrices = (layer.q_proj, layer.k_proj, layer.v_proj, layer.f_proj[0], layer.g_proj[0], layer.g_proj[1], layer.b_proj)
    if (
        any(map(hooked, (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d, layer.o_norm)))
        or not all(map(is_plain, matrices))
        or not fits(x, layer.q_conv1d.weight, layer.o_norm.weight, *(m.weight for m in matrices))
    ):
        return None
    if torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda")
    return x.dtype if all(m.weight.dtype == x.dtype for m in matrices) else None


def is_plain(module: nn.Module) -> bool:
    """A Linear that nobody has wrapped, replaced or hooked: its product may be taken together with others."""
    return type(module) is nn.Linear and not hooked(module)


def hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def projected(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The row of q, k and v [B, T, 2 key_dim + value_dim], what the second matrices of f and g get [B, T, rank], and beta [B, T, HV]."""
    s = layer.sizes
    low = torch.cat([layer.f_proj[0].weight, layer.g_proj[0].weight, layer.b_proj.weight]).to(x.dtype)
    q, k, v = (m.weight.to(x.dtype) for m in (layer.q_proj, layer.k_proj, layer.v_proj))
    row, rest = project(x, q, k, v, low)
    low_f, low_g, beta = rest.split([s.head_v_dim, s.head_v_dim, s.value_heads], -1)
    return row, low_f, low_g, beta


def fused_inputs(layer: Any, x: Tensor, rows: Any, cache: Any) -> Inputs:
    s = layer.sizes
    row, low_f, gate, beta = projected(layer, x)
    filters = (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)
    weight = torch.cat([c.weight.flatten(1) for c in filters])
    bias = torch.cat([c.bias for c in filters]) if s.conv_bias else None
    window, cu_seqlens, sizes = None, rows.cu_seqlens, (s.key_dim, s.key_dim, s.value_dim)
    if rows.context is not None:
        cu_seqlens, (window,) = rows.context.windows((row,), s.conv_size - 1, cu_seqlens)
    elif cache is not None:
        window = torch.cat(cache[:3], -1)
    (q, k, v), after = short_convolution(row, weight, sizes, bias, window, cu_seqlens, rows.lengths)
    windows = (None, None, None) if cache is None or after is None else tuple(w.contiguous() for w in after.split(sizes, -1))
    return Inputs(q, k, v, layer.f_proj[1](low_f), beta, gate, windows)


def fused_output(layer: Any, o: Tensor, gate: Tensor) -> Tensor:
    """The gated norm of o [B, T, HV, V]."""
    matrix = layer.g_proj[1]
    return gated_norm(o, layer.o_norm.weight, layer.o_norm.eps, F.linear(gate, matrix.weight).view_as(o), matrix.bias)
