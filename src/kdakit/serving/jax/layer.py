"""A KimiDeltaAttention over a pool: its next tokens between the projections in one kernel on a TPU, else in the layer's own words.

pool = layer_pool(layer, slots=64)                       # states, and the windows of the layer's convolutions
o, pool = decode_layer(layer, pool, slots, x)            # x [N, T, hidden_size], row n for slots[n]
o, draft = verify_layer(layer, pool, slots, x)           # of up to 8 drafted tokens: nothing moves before commit(pool, draft, accepted)
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from kdakit.layers.jax import DeltaCache, KimiDeltaAttention, Rows, fused_step
from kdakit.serving.arguments import check_drafts
from kdakit.serving.jax import storage as storages
from kdakit.serving.jax.calls import Draft, verify
from kdakit.serving.jax.pool import StatePool

WINDOWS = fused_step.NAMES


def layer_pool(layer: KimiDeltaAttention, slots: int, dtype: Any = "float32", state_v_first: bool = False) -> StatePool:
    """A pool for the layer's sequences; its windows are [rows, conv_size - 1, heads, K], as the kernel reads them."""
    s = layer.sizes
    windows = {n: (s.conv_size - 1, *size) for n, size in fused_step.head_sizes(layer).items()} if s.use_short_conv else None
    return StatePool.create(slots, s.value_heads, s.head_dim, s.head_v_dim, dtype, state_v_first, windows)


def decode_layer(layer: KimiDeltaAttention, pool: StatePool, slots: Any, x) -> tuple[Any, StatePool]:
    """o [N, T, hidden_size] of the next tokens x of each row, zero where a row is skipped, and the pool moved on.

    Skipped is who is skipped in `decode`. Jit it with the pool donated: then states and windows move on in place.
    """
    given = _checked(layer, pool, slots, x)
    rows, kept = pool.rows(given), pool.contents
    module, v_first = fused_step.kernel(layer, x), pool.sizes.state_v_first
    if module is not None and fused_step.takes(module, layer, x, kept.storage.states):
        o, windows, states = fused_step.layer_step(module, layer, x, kept.windows, kept.storage.states, _pages(rows), v_first)
        return o, pool.replace(storage=storages.Storage(states), windows=windows)
    return _plain(layer, pool, rows, x)


def verify_layer(layer: KimiDeltaAttention, pool: StatePool, slots: Any, x) -> tuple[Any, Draft]:
    """o [N, T, hidden_size] of T <= 8 draft tokens x of each row, zero where a row is skipped, and a Draft for `commit`, which moves states
    and windows; the pool stays as it is."""
    given = _checked(layer, pool, slots, x)
    check_drafts(x.shape[1])
    kept, module = pool.contents, fused_step.kernel(layer, x[:, :1])  # whatever the layer does with as many tokens elsewhere
    if module is None or not fused_step.takes(module, layer, x, kept.storage.states):
        return _plain_draft(layer, pool, given, x)
    rows, drafting = pool.rows(given), _Drafting(module)
    pages, v_first = _pages(rows), pool.sizes.state_v_first
    o, inputs, log = fused_step.layer_step(drafting, layer, x, kept.windows, kept.storage.states, pages, v_first)
    return o, Draft(rows, log, inputs, drafting.problem, layer.backend, fused_step.device_of(x))


class _Drafting:
    """The module of a layer's step, but that nothing moves: in the place of windows come their inputs, in that of states the log."""

    def __init__(self, module: Any):
        self.Inputs, self.Parameters, self.Carried, self._draft = module.Inputs, module.Parameters, module.Carried, module.draft
        self.problem: Any = None

    def step(self, x, *given):
        y, log, self.problem = self._draft(x, *given)
        return y, self.Carried({n: getattr(x, n) for n in WINDOWS}, log)


def _pages(rows: Any):
    return jnp.where(rows.valid, rows.place, -1)


def _checked(layer: KimiDeltaAttention, pool: StatePool, slots: Any, x):
    given = pool.device_slots(slots)
    if x.ndim != 3 or x.shape[0] != given.shape[0] or x.shape[2] != layer.sizes.hidden_size:
        raise ValueError(f"x must be [N, T, hidden_size] = ({given.shape[0]}, T, {layer.sizes.hidden_size}), got {x.shape}")
    if layer.sizes.use_short_conv != bool(pool.contents.windows):
        raise ValueError("pool must have the windows of the layer's convolutions: make it with layer_pool(layer, slots)")
    return given


def _cache(pool: StatePool, place) -> DeltaCache:
    """A cache of the rows' own."""
    kept = pool.contents
    flat = {n: w[place].reshape(place.shape[0], w.shape[1], -1) for n, w in kept.windows.items()}
    windows = [flat.get(n) for n in WINDOWS]
    return DeltaCache(windows[0], windows[1], windows[2], storages.read(pool.sizes, kept.storage, place))


def _plain_draft(layer: KimiDeltaAttention, pool: StatePool, given, x) -> tuple[Any, Draft]:
    """The layer's own convolutions and norm around the pool's `verify`."""
    s, rows, sizes = layer.sizes, pool.rows(given), fused_step.head_sizes(layer)
    cut = lambda y, size: y.reshape(*y.shape[:2], *size)
    q, k, v, _ = layer._convolved(x, Rows(), _cache(pool, rows.place))
    q, k, v = (cut(y, sizes[n]) for n, y in zip(WINDOWS, (q, k, v), strict=True))
    inputs = {n: cut(getattr(layer, f"{n}_proj")(x), sizes[n]) for n in pool.contents.windows}
    g = cut(layer.f_proj[1](layer.f_proj[0](x)), (s.value_heads, s.head_dim))
    o, draft = verify(
        pool, given, q, k, v, g, layer.b_proj(x), layer.A_log[...], layer.dt_bias[...], window_inputs=inputs or None, backend=layer.backend,
        use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=s.allow_neg_eigval,
        safe_gate=s.safe_gate, lower_bound=s.lower_bound,
    )  # fmt: skip
    o = layer.o_norm(o, cut(layer.g_proj[1](layer.g_proj[0](x)), sizes["v"]))
    return jnp.where(draft.rows.valid[:, None, None], layer.o_proj(o.reshape(*x.shape[:2], -1)), 0), draft


def _plain(layer: KimiDeltaAttention, pool: StatePool, rows: Any, x) -> tuple[Any, StatePool]:
    """The layer over a cache of the rows' own: states and windows out of the pool and back."""
    kept, place = pool.contents, rows.place
    o, cache = layer.mix(x, Rows(), _cache(pool, place))
    put = lambda w, new: w.at[place].set(new.reshape(place.shape[0], *w.shape[1:]).astype(w.dtype))
    moved = {n: put(kept.windows[n], new) for n, new in zip(WINDOWS, cache[:3], strict=True) if n in kept.windows}
    storage = storages.write(pool.sizes, kept.storage, place, cache.state)
    return jnp.where(rows.valid[:, None, None], o, 0), pool.replace(storage=storage, windows=moved)
