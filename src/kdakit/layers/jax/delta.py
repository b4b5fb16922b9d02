"""Kimi Delta Attention as a layer: projections, short convolutions, gates, the operator, a gated norm, a projection back."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from kdakit.jax import chunk_kda, fused_recurrent_kda, kda_gate
from kdakit.layers.jax import fused_step
from kdakit.layers.jax.convolution import ShortConvolution
from kdakit.layers.jax.gated_linear import gated_linear_attention
from kdakit.layers.jax.linear import Linear
from kdakit.layers.jax.norm import RMSNorm
from kdakit.layers.jax.rows import Rows
from kdakit.layers.sizes import MODES, LayerSizes, check_cache, check_context, check_rows


class DeltaCache(NamedTuple):
    """What N sequences carry from one call to the next. Its size does not depend on how much they have seen."""

    q_window: Any  # [N, conv_size - 1, key_dim]: the convolutions' last inputs; None without convolutions
    k_window: Any
    v_window: Any
    state: Any  # [N, HV, K, V] float32


class KimiDeltaAttention(nnx.Module):
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
        backend: str = "auto", *, rngs: nnx.Rngs,
    ):  # fmt: skip
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        self.sizes = sizes = LayerSizes(
            hidden_size, expand_v, head_dim, num_heads, num_v_heads, use_short_conv, allow_neg_eigval, safe_gate, lower_bound, conv_size,
            conv_bias, norm_eps, delta_rule,
        )  # fmt: skip
        self.mode, self.backend = mode, backend
        self.q_proj = Linear(hidden_size, sizes.key_dim, rngs=rngs)
        self.k_proj = Linear(hidden_size, sizes.key_dim, rngs=rngs)
        self.v_proj = Linear(hidden_size, sizes.value_dim, rngs=rngs)
        if use_short_conv:
            self.q_conv1d = ShortConvolution(sizes.key_dim, conv_size, conv_bias, rngs=rngs)
            self.k_conv1d = ShortConvolution(sizes.key_dim, conv_size, conv_bias, rngs=rngs)
            self.v_conv1d = ShortConvolution(sizes.value_dim, conv_size, conv_bias, rngs=rngs)
        rank = sizes.head_v_dim
        self.f_proj = nnx.List([Linear(hidden_size, rank, rngs=rngs), Linear(rank, sizes.gate_dim, rngs=rngs)])
        self.b_proj = Linear(hidden_size, sizes.value_heads, rngs=rngs)
        decay = 1.0 if safe_gate else jax.random.uniform(rngs.params(), (sizes.value_heads,), minval=1.0, maxval=16.0)
        self.A_log = nnx.Param(jnp.log(jnp.broadcast_to(decay, (sizes.value_heads,)).astype(jnp.float32)))
        dt = jnp.exp(jax.random.uniform(rngs.params(), (sizes.gate_dim,), minval=math.log(1e-3), maxval=math.log(1e-1)))
        self.dt_bias = nnx.Param(dt + jnp.log(-jnp.expm1(-dt)))  # softplus(dt_bias) = dt
        self.g_proj = nnx.List([Linear(hidden_size, rank, rngs=rngs), Linear(rank, sizes.value_dim, bias=True, rngs=rngs)])
        self.o_norm = RMSNorm(rank, norm_eps)
        self.o_proj = Linear(sizes.value_dim, hidden_size, rngs=rngs)

    def new_cache(self, batch_size: int, max_length: int | None = None, dtype: Any = None) -> DeltaCache:
        """The cache of `batch_size` sequences that have seen nothing; max_length is for other kinds of layer.

        dtype: of the activations, the parameters' own if None.
        """
        s, dtype = self.sizes, self.q_proj.weight[...].dtype if dtype is None else dtype
        widths = (s.key_dim, s.key_dim, s.value_dim)
        windows = [jnp.zeros((batch_size, s.conv_size - 1, width), dtype) if s.use_short_conv else None for width in widths]
        shape = (batch_size, s.value_heads, s.head_dim, s.head_v_dim)
        return DeltaCache(windows[0], windows[1], windows[2], jnp.zeros(shape, jnp.promote_types(dtype, jnp.float32)))

    def __call__(self, hidden_states, attention_mask=None, cache: DeltaCache | None = None, cu_seqlens=None, context=None):
        """hidden_states [B, T, hidden_size]; attention_mask [B, T], 0 at padding, wherever it is; or B = 1 with cu_seqlens [N + 1].

        context: a kdakit.parallel.jax.Context, where hidden_states is one device's slice of the tokens that cu_seqlens counts.
        Returns o, zero at padding, and the next cache where one was given.
        """
        check_context(context, attention_mask, cache)
        mask_shape = None if attention_mask is None else attention_mask.shape
        check_rows(hidden_states.shape, self.sizes.hidden_size, mask_shape, cu_seqlens is not None)
        rows = Rows(cu_seqlens=cu_seqlens, context=context) if attention_mask is None else Rows.from_mask(attention_mask)
        o, cache = self.mix(rows.arrange(hidden_states), rows, cache)
        return rows.restore(o), cache

    def mix(self, x, rows: Rows, cache: DeltaCache | None = None):
        """The layer on rows as the model arranges them: padding, if any, behind the tokens."""
        if cache is not None:
            check_cache(cache.state.shape[0], rows.sequences(x))
        if cache is not None and all(a is None for a in rows) and (found := fused_step.step_with_cache(self, x, cache)) is not None:
            return found
        return self._mix(x, rows, cache)

    def mix_plainly(self, x, cache: DeltaCache):
        """`mix` in its own words, whatever kernel there is for it."""
        return self._mix(x, Rows(), cache)

    def _mix(self, x, rows: Rows, cache: DeltaCache | None):
        s = self.sizes
        q, k, v, windows = self._convolved(x, rows, cache)
        q, k, v = _heads(q, s.head_dim), _heads(k, s.head_dim), _heads(v, s.head_v_dim)
        g, beta = _heads(self.f_proj[1](self.f_proj[0](x)), s.head_dim), self.b_proj(x)
        o, state = self._attend(q, k, v, g, beta, rows, None if cache is None else cache.state)
        o = self.o_norm(o, _heads(self.g_proj[1](self.g_proj[0](x)), s.head_v_dim))
        return self.o_proj(o.reshape(*o.shape[:-2], -1)), None if cache is None else DeltaCache(windows[0], windows[1], windows[2], state)

    def _convolved(self, x, rows, cache):
        made = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        if not self.sizes.use_short_conv:
            return *map(jax.nn.silu, made), (None, None, None)
        filters = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        windows = (None, None, None) if cache is None else cache[:3]
        if rows.context is not None:
            cu_seqlens, windows = rows.context.windows(made, self.sizes.conv_size - 1, rows.cu_seqlens)
            rows = Rows(cu_seqlens=cu_seqlens)
        out = [convolve(y, rows, window) for convolve, y, window in zip(filters, made, windows, strict=True)]
        return *(y for y, _ in out), tuple(window for _, window in out)

    def _attend(self, q, k, v, g, beta, rows, state):
        """Padding neither decays nor writes: its log-decay and its beta are zero."""
        s, A_log, dt_bias = self.sizes, self.A_log[...], self.dt_bias[...]
        gate: dict[str, Any] = dict(
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=s.allow_neg_eigval, safe_gate=s.safe_gate,
            lower_bound=s.lower_bound, A_log=A_log, dt_bias=dt_bias,
        )  # fmt: skip
        if rows.lengths is not None or not s.delta_rule:
            g = kda_gate(g, A_log, dt_bias, s.lower_bound, jnp.promote_types(g.dtype, jnp.float32))
            beta = (2 if s.allow_neg_eigval else 1) * jax.nn.sigmoid(beta.astype(g.dtype))
            gate = {}
        if rows.lengths is not None:
            real = rows.real(g.shape[1])[..., None]
            g, beta = jnp.where(real[..., None], g, 0), jnp.where(real, beta, 0)
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


def _heads(x, size: int):
    """[.., H * size] -> [.., H, size]."""
    return x.reshape(*x.shape[:-1], -1, size)
