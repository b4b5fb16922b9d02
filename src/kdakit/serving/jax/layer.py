"""A KimiDeltaAttention over a pool: its next tokens between the projections in one kernel on a TPU, else in the layer's own words.

pool = layer_pool(layer, slots=64)                       # states, and the windows of the layer's convolutions
o, pool = decode_layer(layer, pool, slots, x)            # x [N, T, hidden_size], row n for slots[n]
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from kdakit.layers.jax import DeltaCache, KimiDeltaAttention, Rows, fused_step
from kdakit.serving.jax import storage as storages
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
    given = pool.device_slots(slots)
    if x.ndim != 3 or x.shape[0] != given.shape[0] or x.shape[2] != layer.sizes.hidden_size:
        raise ValueError(f"x must be [N, T, hidden_size] = ({given.shape[0]}, T, {layer.sizes.hidden_size}), got {x.shape}")
    if layer.sizes.use_short_conv != bool(pool.contents.windows):
        raise ValueError("pool must have the windows of the layer's convolutions: make it with layer_pool(layer, slots)")
    rows, kept = pool.rows(given), pool.contents
    module, v_first = fused_step.kernel(layer, x), pool.sizes.state_v_first
    if module is not None and fused_step.takes(module, layer, x, kept.storage.states):
        pages = jnp.where(rows.valid, rows.place, -1)
        o, windows, states = fused_step.layer_step(module, layer, x, kept.windows, kept.storage.states, pages, v_first)
        return o, pool.replace(storage=storages.Storage(states), windows=windows)
    return _plain(layer, pool, rows, x)


def _plain(layer: KimiDeltaAttention, pool: StatePool, rows: Any, x) -> tuple[Any, StatePool]:
    """The layer over a cache of the rows' own: states and windows out of the pool and back."""
    kept, place = pool.contents, rows.place
    flat = {n: w[place].reshape(place.shape[0], w.shape[1], -1) for n, w in kept.windows.items()}
    windows = [flat.get(n) for n in WINDOWS]
    cache = DeltaCache(windows[0], windows[1], windows[2], storages.read(pool.sizes, kept.storage, place))
    o, cache = layer.mix(x, Rows(), cache)
    put = lambda w, new: w.at[place].set(new.reshape(place.shape[0], *w.shape[1:]).astype(w.dtype))
    moved = {n: put(kept.windows[n], new) for n, new in zip(WINDOWS, cache[:3], strict=True) if n in kept.windows}
    storage = storages.write(pool.sizes, kept.storage, place, cache.state)
    return jnp.where(rows.valid[:, None, None], o, 0), pool.replace(storage=storage, windows=moved)
