"""How the tokens of several sequences lie in a tensor [B, T, ..].

plain      every row is full
padded     row b holds `lengths[b]` tokens, first; the rest is padding. A mask with padding anywhere is brought into this form, and back.
packed     B = 1, and sequence n is tokens cu_seqlens[n] .. cu_seqlens[n + 1]

With a `context` the tensor is one slice of all tokens, and cu_seqlens counts all of them: see kdakit.parallel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    lengths: Tensor | None = None  # [B]
    cu_seqlens: Tensor | None = None  # [N + 1]
    order: Tensor | None = None  # [B, T]: where the tokens of each row came from
    context: Any = None  # kdakit.parallel's Context: who has the other tokens
    in_place: bool = False  # a cache may be moved where it lies: nobody looks at the old one again

    @staticmethod
    def from_mask(mask: Tensor) -> Rows:
        """Tokens (mask 1) to the front of each row in their order, padding (0) behind them. Shapes do not depend on the mask."""
        mask = mask.bool()
        return Rows(lengths=mask.sum(1), order=(~mask).to(torch.uint8).argsort(dim=1, stable=True))

    def arrange(self, x: Tensor) -> Tensor:
        """[B, T, ..] as the caller has it -> as the layers want it; padding becomes zero."""
        return x if self.order is None else self._tokens_only(x[torch.arange(x.shape[0], device=x.device)[:, None], self.order])

    def restore(self, x: Tensor) -> Tensor:
        """The way back; padding becomes zero."""
        if self.order is None:
            return x
        return self._tokens_only(x)[torch.arange(x.shape[0], device=x.device)[:, None], self.order.argsort(1)]

    def _tokens_only(self, x: Tensor) -> Tensor:
        """By selection, so that not even a NaN in the padding gets any further."""
        return torch.where(self.real(x.shape[1]).view(*x.shape[:2], *[1] * (x.ndim - 2)), x, 0)

    def real(self, T: int) -> Tensor:
        """[B, T]: which places of padded rows hold tokens."""
        lengths = _given("lengths", self.lengths)
        return torch.arange(T, device=lengths.device) < lengths[:, None]

    def sequences(self, x: Tensor) -> int:
        """How many there are in x [B, T, ..]."""
        return x.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def places(self, T: int) -> tuple[Tensor, Tensor]:
        """For packed rows, [T] each: the token's sequence and its place in it."""
        cu_seqlens = _given("cu_seqlens", self.cu_seqlens)
        tokens = torch.arange(T, device=cu_seqlens.device)
        owner = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
        return owner, tokens - cu_seqlens[owner]

    def counts(self, B: int, T: int, device) -> Tensor:
        """How many tokens each sequence has here: [N]."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens.diff()
        return torch.full((B,), T, device=device) if self.lengths is None else self.lengths


def _given(name: str, value: Tensor | None) -> Tensor:
    if value is None:
        raise ValueError(f"{name} must be given for rows of this kind, got None")
    return value
