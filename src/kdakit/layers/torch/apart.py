"""Attention over sequences that share a tensor: what is not finite in one of them reaches no other, neither forward nor backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def attend_apart(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """attend(q, k, v, mask) of q [B, T, H, D], k and v [B, M, HKV, D], mask [B, T, M].

    0 * NaN, a weight that is masked times a value, would be a NaN for everybody: so zeros take the place of what is not finite, and NaN
    comes out for those who see it. The gradient likewise: one of o that is not finite reaches what its token sees.
    """
    good = [a.isfinite().flatten(2).all(-1) for a in (q, k, v)]  # [B, T], [B, M] twice
    q, k, v = (torch.where(own[..., None, None], a, 0) for own, a in zip(good, (q, k, v), strict=True))
    q, k, v, mark = _Enter.apply(q, k, v, mask)
    spoiled = (mask & ~(good[1] & good[2])[:, None]).any(-1) | ~good[0]
    return _Leave.apply(attend(q, k, v, mask), mark, spoiled)


class _Enter(torch.autograd.Function):
    """q, k and v as they are, and a mark [B, T] whose gradient says which tokens' gradients were not finite."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, mask):
        return q.view_as(q), k.view_as(k), v.view_as(v), q.new_zeros(q.shape[:2])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[3])

    @staticmethod
    def backward(ctx, d_q, d_k, d_v, d_mark):
        (mask,) = ctx.saved_tensors
        bad = d_mark != 0
        seen = (mask & bad[..., None]).any(-2)  # [B, M]
        spoil = lambda which, d: torch.where(which[..., None, None], torch.nan, d)
        return spoil(bad, d_q), spoil(seen, d_k), spoil(seen, d_v), None


class _Leave(torch.autograd.Function):
    """o, NaN where `spoiled` [B, T]; of its gradient what is finite elsewhere, the rest goes to the mark."""

    generate_vmap_rule = True

    @staticmethod
    def forward(o, mark, spoiled):
        return torch.where(spoiled[..., None, None], torch.nan, o)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx, d_o):
        (spoiled,) = ctx.saved_tensors
        good = d_o.isfinite().flatten(2).all(-1) & ~spoiled
        return torch.where(good[..., None, None], d_o, 0), (~good).to(d_o.dtype), None
