"""KDA's gates for PyTorch, by themselves: from a raw gate input g [.., HV, K] to log-decays, under the names of fla.ops.kda.gate.

softplus gate: -exp(A_log) * softplus(g + dt_bias)          bounded gate: lower_bound * sigmoid(exp(A_log) * (g + dt_bias))
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def kda_gate(
    g: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """The log-decay of a raw gate input g [.., HV, K]: the softplus gate, or with lower_bound < 0 the bounded one.

    A_log has HV elements and may be None with lower_bound (exp(A_log) = 1); dt_bias has HV * K. Computed in float32 at least.
    """
    if lower_bound is None and A_log is None:
        raise ValueError("A_log is required unless lower_bound selects the bounded gate, got None")
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"lower_bound must be negative, got {lower_bound}")
    heads, channels = g.shape[-2:]
    x = g.to(torch.promote_types(g.dtype, torch.float32))
    for name, parameter, size in (("A_log", A_log, heads), ("dt_bias", dt_bias, heads * channels)):
        if parameter is not None and parameter.numel() != size:
            raise ValueError(f"{name} must hold {size} elements for g {tuple(g.shape)}, got {tuple(parameter.shape)}")
    if dt_bias is not None:
        x = x + dt_bias.to(x.dtype).reshape(heads, channels)
    a = 1.0 if A_log is None else A_log.to(x.dtype).reshape(heads, 1).exp()
    out = -a * F.softplus(x, threshold=40.0) if lower_bound is None else lower_bound * torch.sigmoid(a * x)
    return out.to(output_dtype)


fused_kda_gate = kda_gate


def naive_kda_gate(g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, output_dtype: torch.dtype = torch.float32) -> Tensor:
    """The softplus gate."""
    return kda_gate(g, A_log, dt_bias, None, output_dtype)


def naive_kda_lowerbound_gate(
    g: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, lower_bound: float = -5.0,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """The bounded gate."""
    return kda_gate(g, A_log, dt_bias, lower_bound, output_dtype)


def kda_gate_chunk_cumsum(
    g: Tensor, A_log: Tensor | None, chunk_size: int, scale: float | None = None, dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None, output_dtype: torch.dtype | None = torch.float32, chunk_indices: Tensor | None = None,
    lower_bound: float | None = None, use_graph: bool = False,
) -> Tensor:  # fmt: skip
    """The gate of g [B, T, HV, K], summed up from the start of each chunk of each sequence; times scale.

    chunk_indices and use_graph, of fla.ops.kda.gate, are not needed: nothing on the device is looked at. Tokens past cu_seqlens[-1] get
    sums of no meaning.
    """
    if g.ndim != 4:
        raise ValueError(f"g must be [B, T, HV, K], got {tuple(g.shape)}")
    if chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size must be a power of two, got {chunk_size}")
    if cu_seqlens is not None and g.shape[0] != 1:
        raise ValueError(f"g must have B = 1 with cu_seqlens (pack the sequences along T), got B = {g.shape[0]}")
    x = kda_gate(g, A_log, dt_bias, lower_bound, torch.promote_types(g.dtype, torch.float32))
    T = g.shape[1]
    t = torch.arange(T, device=g.device)
    if cu_seqlens is not None:
        owner = torch.searchsorted(cu_seqlens[1:].contiguous(), t, right=True).clamp(max=len(cu_seqlens) - 2)
        t = t - cu_seqlens[owner]
    place = (t % chunk_size)[:, None, None]
    step = 1
    while step < min(chunk_size, T):  # x_t <- x_t + x_{t - step}, within the chunk
        x = x + torch.where(place >= step, F.pad(x[:, :-step], (0, 0, 0, 0, step, 0)), 0)
        step *= 2
    x = x if scale is None else x * scale
    return x.to(g.dtype if output_dtype is None else output_dtype)
