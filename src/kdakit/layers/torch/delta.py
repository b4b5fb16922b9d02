"""Kimi Delta Attention as a layer: projections, short convolutions, gates, the operator, a gated norm, a projection back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kdakit.layers.sizes import MODES, LayerSizes, check_cache, check_context, check_rows
from kdakit.layers.torch.convolution import ShortConvolution
from kdakit.layers.torch.fused.layer import Inputs, fused_dtype, fused_inputs, fused_output
from kdakit.layers.torch.fused.step import Carried, layer_step, takes_step
from kdakit.layers.torch.fused.whole import whole_layer
from kdakit.layers.torch.gated_linear import gated_linear_attention
from kdakit.layers.torch.norm import RMSNorm
from kdakit.layers.torch.rows import Rows
from kdakit.layers.torch.shards import own
from kdakit.torch import chunk_kda, fused_recurrent_kda, kda_gate


class DeltaCache(NamedTuple):
    """What N sequences carry from one call to the next. Its size does not depend on how much they have seen."""

    q_window: Tensor | None  # [N, conv_size - 1, key_dim]: the convolutions' last inputs; None without convolutions
    k_window: Tensor | None
    v_window: Tensor | None
    state: Tensor  # [N, HV, K, V] float32


class KimiDeltaAttention(nn.Module):
    """KDA around its operator; parameters are named and shaped as in flash-linear-attention's layer of this name.

        q, k, v = silu(conv(x W_q)), silu(conv(x W_k)), silu(conv(x W_v))        beta = sigmoid(x W_b)
        log-decay = -exp(A_log) softplus(x W_f + dt_bias), or the bounded gate   o = W_o(rmsnorm(kda(q, k, v, ..)) sigmoid(x W_g))

    Args:
        hidden_size, num_heads, head_dim: sizes of the input, of q and k. num_v_heads: a multiple of num_heads (grouped value heads);
            expand_v: the width of a value head is expand_v * head_dim.
        mode: 'chunk' (chunk_kda), 'recurrent' (fused_recurrent_kda), or 'auto': recurrent for single tokens, else chunk.
        use_short_conv, conv_size, conv_bias: the convolutions of q, k and v; without them SiLU alone.
        allow_neg_eigval: beta up to 2. lower_bound: the bounded gate instead of softplus; safe_gate: tell the kernels that it is bounded.
        delta_rule: False turns the layer into plain gated linear attention on the same parameters, to compare with.
        backend: 'auto' or a name that `kdakit doctor` lists.
    """

    def __init__(
        self, hidden_size: int = 2048, expand_v: float = 1.0, head_dim: int = 128, num_heads: int = 16, num_v_heads: int | None = None,
        mode: str = "auto", use_short_conv: bool = True, allow_neg_eigval: bool = False, safe_gate: bool = False,
        lower_bound: float | None = None, conv_size: int = 4, conv_bias: bool = False, norm_eps: float = 1e-5, delta_rule: bool = True,
        backend: str = "auto",
    ):  # fmt: skip
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        self.sizes = sizes = LayerSizes(
            hidden_size, expand_v, head_dim, num_heads, num_v_heads, use_short_conv, allow_neg_eigval, safe_gate, lower_bound, conv_size,
            conv_bias, norm_eps, delta_rule,
        )  # fmt: skip
        self.mode, self.backend = mode, backend
        self.q_proj = nn.Linear(hidden_size, sizes.key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, sizes.key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, sizes.value_dim, bias=False)
        if use_short_conv:
            self.q_conv1d = ShortConvolution(sizes.key_dim, conv_size, conv_bias)
            self.k_conv1d = ShortConvolution(sizes.key_dim, conv_size, conv_bias)
            self.v_conv1d = ShortConvolution(sizes.value_dim, conv_size, conv_bias)
        rank = sizes.head_v_dim
        self.f_proj = nn.Sequential(nn.Linear(hidden_size, rank, bias=False), nn.Linear(rank, sizes.gate_dim, bias=False))
        self.b_proj = nn.Linear(hidden_size, sizes.value_heads, bias=False)
        decay = torch.ones(sizes.value_heads) if safe_gate else torch.empty(sizes.value_heads).uniform_(1, 16)
        self.A_log = nn.Parameter(decay.log())
        dt = torch.empty(sizes.gate_dim).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus(dt_bias) = dt
        self.g_proj = nn.Sequential(nn.Linear(hidden_size, rank, bias=False), nn.Linear(rank, sizes.value_dim, bias=True))
        self.o_norm = RMSNorm(rank, norm_eps)
        self.o_proj = nn.Linear(sizes.value_dim, hidden_size, bias=False)

    def new_cache(self, batch_size: int, max_length: int | None = None) -> DeltaCache:
        """The cache of `batch_size` sequences that have seen nothing; max_length is for other kinds of layer."""
        s, weight = self.sizes, self.q_proj.weight
        widths = (s.key_dim, s.key_dim, s.value_dim)
        windows = [weight.new_zeros(batch_size, s.conv_size - 1, width) if s.use_short_conv else None for width in widths]
        dtype = torch.promote_types(weight.dtype, torch.float32)
        state = weight.new_zeros(batch_size, s.value_heads, s.head_dim, s.head_v_dim, dtype=dtype)
        return DeltaCache(windows[0], windows[1], windows[2], state)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, cache: DeltaCache | None = None,
        cu_seqlens: Tensor | None = None, context: Any = None, in_place: bool = False,
    ) -> tuple[Tensor, DeltaCache | None]:  # fmt: skip
        """hidden_states [B, T, hidden_size]; attention_mask [B, T], 0 at padding, wherever it is; or B = 1 with cu_seqlens [N + 1].

        context: a kdakit.parallel.torch.Context, where hidden_states is one rank's slice of the tokens that cu_seqlens counts.
        in_place: the given cache may be overwritten by the next one, as a decode step of few tokens on a GPU does.
        Returns o, zero at padding, and the next cache where one was given.
        """
        check_context(context, attention_mask, cache)
        mask_shape = None if attention_mask is None else attention_mask.shape
        check_rows(hidden_states.shape, self.sizes.hidden_size, mask_shape, cu_seqlens is not None)
        rows = Rows(cu_seqlens=cu_seqlens, context=context) if attention_mask is None else Rows.from_mask(attention_mask)
        rows = rows._replace(in_place=in_place)
        o, cache = self.mix(rows.arrange(hidden_states), rows, cache)
        return rows.restore(o), cache

    def mix(self, x: Tensor, rows: Rows, cache: DeltaCache | None = None) -> tuple[Tensor, DeltaCache | None]:
        """The layer on rows as the model arranges them: padding, if any, behind the tokens."""
        s = self.sizes
        if cache is not None:
            check_cache(cache.state.shape[0], rows.sequences(x))
        if cache is not None and self._takes_step(x, rows, cache):
            before = Carried._make(cache)
            after = before if rows.in_place else Carried._make(map(torch.empty_like, before))
            return layer_step(self, x, before, after)[0], cache if rows.in_place else DeltaCache._make(after)
        if cache is None and rows.lengths is None and rows.context is None:
            out = whole_layer(self, x, rows.cu_seqlens)
            if out is not None:
                return out, None
        dtype = fused_dtype(self, x)
        made = self._inputs(x, rows, cache) if dtype is None else fused_inputs(self, x.to(dtype), rows, cache)
        q, k, v = (y.unflatten(-1, (-1, d)) for y, d in zip(made[:3], (s.head_dim, s.head_dim, s.head_v_dim), strict=True))
        g, beta, gate, windows = made.g.unflatten(-1, (-1, s.head_dim)), made.beta, made.gate, made.windows
        del made  # what only the operator needs lives no longer than it
        o, state = self._attend(q, k, v, g, beta, rows, None if cache is None else cache.state)
        o = self.o_norm(o, self.g_proj(x).unflatten(-1, (-1, s.head_v_dim))) if gate is None else fused_output(self, o, gate)
        return self.o_proj(o.flatten(-2)), None if cache is None else DeltaCache._make((*windows, state))

    def _takes_step(self, x: Tensor, rows: Rows, cache: DeltaCache) -> bool:
        """A few tokens of every sequence, on a GPU, without gradients: one kernel between the projections."""
        plain = rows.lengths is None and rows.cu_seqlens is None and rows.context is None
        return plain and self.mode != "chunk" and self.backend in ("auto", "triton_gpu") and takes_step(self, x, *cache)

    def _inputs(self, x: Tensor, rows: Rows, cache: DeltaCache | None) -> Inputs:
        """In plain PyTorch."""
        made: tuple[Tensor, ...] = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        windows: Sequence[Tensor | None] = (None, None, None)
        g, beta = self.f_proj(x), self.b_proj(x)
        if not self.sizes.use_short_conv:
            return Inputs._make((*map(F.silu, made), g, beta, None, windows))
        if cache is not None:
            windows = cache[:3]
        if rows.context is not None:
            cu_seqlens, windows = rows.context.windows(made, self.sizes.conv_size - 1, rows.cu_seqlens)
            rows = Rows(cu_seqlens=cu_seqlens)
        filters = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        out = [convolve(y, rows, window) for convolve, y, window in zip(filters, made, windows, strict=True)]
        return Inputs._make((*(y for y, _ in out), g, beta, None, tuple(window for _, window in out)))

    def _attend(self, q, k, v, g, beta, rows, state):
        """Padding neither decays nor writes: its log-decay and its beta are zero."""
        s, A_log, dt_bias = self.sizes, own(self.A_log), own(self.dt_bias)
        gate: dict[str, Any] = dict(
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=s.allow_neg_eigval, safe_gate=s.safe_gate,
            lower_bound=s.lower_bound, A_log=A_log, dt_bias=dt_bias,
        )  # fmt: skip
        if rows.lengths is not None or not s.delta_rule:
            g = kda_gate(g, A_log, dt_bias, s.lower_bound, torch.promote_types(g.dtype, torch.float32))
            beta = (2 if s.allow_neg_eigval else 1) * torch.sigmoid(beta.to(g.dtype))
            gate = {}
        if rows.lengths is not None:
            real = rows.real(g.shape[1])[..., None]
            g, beta = torch.where(real[..., None], g, 0), torch.where(real, beta, 0)
        if not s.delta_rule:
            if rows.cu_seqlens is not None or rows.context is not None:
                name = "context" if rows.cu_seqlens is None else "cu_seqlens"
                raise ValueError(f"{name} must be None with delta_rule=False, which is there to compare with; use attention_mask")
            return gated_linear_attention(q, k, v, g, beta, state)
        recurrent = self.mode == "recurrent" or (self.mode == "auto" and q.shape[1] == 1)
        call = fused_recurrent_kda if recurrent else chunk_kda
        if rows.context is not None:
            call = rows.context.chunk_kda
        return call(
            q, k, v, g, beta, initial_state=state, output_final_state=state is not None, use_qk_l2norm_in_kernel=True,
            cu_seqlens=rows.cu_seqlens, backend=self.backend, **gate,
        )  # fmt: skip
