"""How the tokens of several sequences lie in an array [B, T, ..].

plain      every row is full
padded     row b holds `lengths[b]` tokens, first; the rest is padding. A mask with padding anywhere is brought into this form, and back.
packed     B = 1, and sequence n is tokens cu_seqlens[n] .. cu_seqlens[n + 1]

With a `context` the array is one slice of all tokens, and cu_seqlens counts all of them: see kdakit.parallel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Rows(NamedTuple):
    lengths: Any = None  # [B]
    cu_seqlens: Any = None  # [N + 1]
    order: Any = None  # [B, T]: where the tokens of each row came from
    context: Any = None  # kdakit.parallel's Context: who has the other tokens

    @staticmethod
    def from_mask(mask: jax.Array) -> Rows:
        """Tokens (mask 1) to the front of each row in their order, padding (0) behind them. Shapes do not depend on the mask."""
        mask = jnp.asarray(mask).astype(bool)
        return Rows(lengths=mask.sum(1), order=jnp.argsort(~mask, axis=1, stable=True))

    def arrange(self, x):
        """[B, T, ..] as the caller has it -> as the layers want it; padding becomes zero."""
        return x if self.order is None else self._tokens_only(x[jnp.arange(x.shape[0])[:, None], self.order])

    def restore(self, x):
        """The way back; padding becomes zero."""
        if self.order is None:
            return x
        return self._tokens_only(x)[jnp.arange(x.shape[0])[:, None], jnp.argsort(self.order, 1)]

    def _tokens_only(self, x):
        """By selection, so that not even a NaN in the padding gets any further."""
        return jnp.where(self.real(x.shape[1]).reshape(*x.shape[:2], *[1] * (x.ndim - 2)), x, 0)

    def real(self, T: int):
        """[B, T]: which places of padded rows hold tokens."""
        return jnp.arange(T) < self.lengths[:, None]

    def sequences(self, x) -> int:
        """How many there are in x [B, T, ..]."""
        return x.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def places(self, T: int):
        """For packed rows, [T] each: the token's sequence and its place in it."""
        tokens, edges = jnp.arange(T), jnp.asarray(self.cu_seqlens)
        owner = (tokens[:, None] >= edges[1:]).sum(-1)  # not searchsorted, which jax 0.10 cannot do inside shard_map
        return owner, tokens - edges[owner]

    def counts(self, B: int, T: int):
        """How many tokens each sequence has here: [N]."""
        if self.cu_seqlens is not None:
            return jnp.diff(self.cu_seqlens)
        return jnp.full((B,), T) if self.lengths is None else self.lengths
