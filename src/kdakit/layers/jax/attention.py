"""Causal softmax attention without position encoding, as between the KDA layers of Kimi Linear, with a cache of fixed capacity."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from kdakit.layers.jax.apart import attend_apart
from kdakit.layers.jax.linear import Linear
from kdakit.layers.jax.rows import Rows
from kdakit.layers.sizes import check_cache


class KeyValueCache(NamedTuple):
    """The keys and values of everything that N sequences have seen: `lengths` of them, in M places."""

    keys: Any  # [N, M, H, D]
    values: Any  # [N, M, H, D]
    lengths: Any  # [N] int32


class FullAttention(nnx.Module):
    """o = W_o softmax(q k^T / sqrt(D)) v over the tokens up to each one. num_kv_heads divides num_heads (grouped queries)."""

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, num_kv_heads: int | None = None, *, rngs: nnx.Rngs):
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads = {kv_heads}, got {num_heads}")
        self.head_dim = head_dim
        self.q_proj = Linear(hidden_size, num_heads * head_dim, rngs=rngs)
        self.k_proj = Linear(hidden_size, kv_heads * head_dim, rngs=rngs)
        self.v_proj = Linear(hidden_size, kv_heads * head_dim, rngs=rngs)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, rngs=rngs)

    def new_cache(self, batch_size: int, max_length: int, dtype: Any = None) -> KeyValueCache:
        """dtype: of the activations, the parameters' own if None."""
        weight = self.k_proj.weight[...]
        dtype = weight.dtype if dtype is None else dtype
        shape = (batch_size, max_length, weight.shape[0] // self.head_dim, self.head_dim)
        return KeyValueCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(batch_size, jnp.int32))

    def mix(self, x, rows: Rows, cache: KeyValueCache | None = None):
        """x [B, T, hidden_size] as `rows` says. Beyond the cache's capacity the outputs are NaN: too late to raise inside a graph."""
        q, k, v = (_heads(project(x), self.head_dim) for project in (self.q_proj, self.k_proj, self.v_proj))
        if rows.context is not None:
            mask = rows.context.visible(x, rows.cu_seqlens)
            o = attend_apart(_attend, q, rows.context.all_tokens(k), rows.context.all_tokens(v), mask)
        elif cache is None and rows.cu_seqlens is None:
            o = _attend(q, k, v, None)
        elif cache is None:
            o = attend_apart(_attend, q, k, v, _within(rows, x.shape[1]))
        else:
            check_cache(cache.lengths.shape[0], rows.sequences(x))
            cache, mask, fits = _extend(cache, k, v, rows)
            k, v = (a.astype(q.dtype) for a in (cache.keys, cache.values))
            if rows.cu_seqlens is None:
                o = _attend(q, k, v, mask)
            else:
                k, v = (a.reshape(1, -1, *a.shape[2:]) for a in (k, v))
                o = attend_apart(_attend, q, k, v, mask)
            o = jnp.where(fits[..., None, None], o, jnp.nan)
        return self.o_proj(o.reshape(*o.shape[:-2], -1)), cache


def _heads(x, size: int):
    return x.reshape(*x.shape[:-1], -1, size)


def _attend(q, k, v, mask):
    """q [B, T, H, D], k and v [B, M, HKV, D], mask [B, T, M] or None: causal."""
    dtype = q.dtype
    if dtype == jnp.float16:  # whose products JAX asks for in a precision that CPUs and TPUs do not have
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, mask=None if mask is None else mask[:, None], is_causal=mask is None).astype(dtype)


def _within(rows: Rows, T: int):
    """[1, T, T]: a token sees its own sequence up to itself."""
    owner, place = rows.places(T)
    return ((owner[:, None] == owner) & (place[:, None] >= place))[None]


def _extend(cache: KeyValueCache, k, v, rows: Rows):
    """The cache with the new tokens, which of its places each token sees [B, T, M] (packed: [1, T, N * M]), and who still fits [B, T]."""
    B, T = k.shape[:2]
    N, M = cache.keys.shape[:2]
    slots = jnp.arange(M)
    if rows.cu_seqlens is None:
        owner = jnp.broadcast_to(jnp.arange(B)[:, None], (B, T))
        place = cache.lengths[:, None] + jnp.arange(T)  # [B, T]
        fits = write = place < M
        if rows.lengths is not None:  # padding takes no place, and what it gets must stay a number
            fits, write = fits | ~rows.real(T), write & rows.real(T)
        mask = slots <= place[..., None]
    else:
        owner, place = rows.places(T)
        place, owner = (cache.lengths[owner] + place)[None], owner[None]
        fits = write = place < M
        mask = ((owner[..., None, None] == jnp.arange(N)[:, None]) & (slots <= place[..., None, None])).reshape(1, T, N * M)
    spot = jnp.where(write, place, M)  # M is outside, and dropped
    keys, values = (old.at[owner, spot].set(new.astype(old.dtype), mode="drop") for old, new in ((cache.keys, k), (cache.values, v)))
    return KeyValueCache(keys, values, cache.lengths + rows.counts(B, T).astype(cache.lengths.dtype)), mask, fits
