"""Causal softmax attention without position encoding, as between the KDA layers of Kimi Linear, with a cache of fixed capacity."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kdakit.layers.sizes import check_cache
from kdakit.layers.torch.apart import attend_apart
from kdakit.layers.torch.rows import Rows


class KeyValueCache(NamedTuple):
    """The keys and values of everything that N sequences have seen: `lengths` of them, in M places and one for what is thrown away."""

    keys: Tensor  # [N, M + 1, H, D]
    values: Tensor  # [N, M + 1, H, D]
    lengths: Tensor  # [N] int64


class FullAttention(nn.Module):
    """o = W_o softmax(q k^T / sqrt(D)) v over the tokens up to each one. num_kv_heads divides num_heads (grouped queries)."""

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, num_kv_heads: int | None = None):
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads = {kv_heads}, got {num_heads}")
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def new_cache(self, batch_size: int, max_length: int) -> KeyValueCache:
        weight = self.k_proj.weight
        shape = (batch_size, max_length + 1, weight.shape[0] // self.head_dim, self.head_dim)
        lengths = torch.zeros(batch_size, dtype=torch.int64, device=weight.device)
        return KeyValueCache(weight.new_zeros(shape), weight.new_zeros(shape), lengths)

    def mix(self, x: Tensor, rows: Rows, cache: KeyValueCache | None = None) -> tuple[Tensor, KeyValueCache | None]:
        """x [B, T, hidden_size] as `rows` says. Beyond the cache's capacity the outputs are NaN: too late to raise inside a graph."""
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj))
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
            if rows.cu_seqlens is None:
                o = _attend(q, cache.keys, cache.values, mask)
            else:
                o = attend_apart(_attend, q, cache.keys.flatten(0, 1)[None], cache.values.flatten(0, 1)[None], mask)
            o = torch.where(fits[..., None, None], o, torch.nan)
        return self.o_proj(o.flatten(-2)), cache


def _attend(q, k, v, mask):
    """q [B, T, H, D], k and v [B, M, HKV, D], mask [B, T, M] or None: causal."""
    q, k, v = (a.transpose(1, 2) for a in (q, k, v))
    mask = None if mask is None else mask[:, None]
    grouped = not q.shape[1] == k.shape[1]  # noqa: SIM201  a comparison of torch.compile's sizes is no bool yet, its negation is one
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped).transpose(1, 2)


def _within(rows: Rows, T: int) -> Tensor:
    """[1, T, T]: a token sees its own sequence up to itself."""
    owner, place = rows.places(T)
    return ((owner[:, None] == owner) & (place[:, None] >= place))[None]


def _extend(cache: KeyValueCache, k: Tensor, v: Tensor, rows: Rows):
    """The cache with the new tokens, which places each token sees [B, T, M + 1] (packed: [1, T, N * (M + 1)]), and who fits [B, T]."""
    B, T = k.shape[:2]
    N, M = cache.keys.shape[0], cache.keys.shape[1] - 1
    slots = torch.arange(M + 1, device=k.device)
    if rows.cu_seqlens is None:
        owner = torch.arange(B, device=k.device)[:, None].expand(B, T)
        place = cache.lengths[:, None] + torch.arange(T, device=k.device)  # [B, T]
        fits = write = place < M
        if rows.lengths is not None:  # padding takes no place, and what it gets must stay a number
            fits, write = fits | ~rows.real(T), write & rows.real(T)
        mask = slots <= place[..., None]
    else:
        owner, place = rows.places(T)
        write = (owner < N)[None]  # tokens behind the last sequence are nobody's
        owner = owner.clamp(max=N - 1)
        place, owner = (cache.lengths[owner] + place)[None], owner[None]
        fits = place < M
        write = write & fits
        mask = ((owner[..., None, None] == torch.arange(N, device=k.device)[:, None]) & (slots <= place[..., None, None])).flatten(2)
    spot = (owner, torch.where(write, place, M))
    put = torch.Tensor.index_put_ if rows.in_place and not torch.is_grad_enabled() else torch.Tensor.index_put
    # What is thrown away may be NaN, which no mask would keep out of the sums.
    kept = ((old, torch.where(write[..., None, None], new, 0)) for old, new in ((cache.keys, k), (cache.values, v)))
    keys, values = (put(old, spot, new.to(old.dtype)) for old, new in kept)
    return KeyValueCache(keys, values, cache.lengths + rows.counts(B, T, k.device)), mask, fits
