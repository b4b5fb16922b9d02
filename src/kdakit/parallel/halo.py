"""Tokens of other ranks: the few before a slice, which a causal convolution wants, and all of them, which full attention wants."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kdakit.parallel.exchange import agree, collective_device, fingerprint


def token_counts(x: Tensor, group: Any) -> list[int]:
    """How many tokens [B, T, ..] each rank has; the same error everywhere if they disagree on anything else."""
    facts = {"B": x.shape[0], "channels": x.shape[2:].numel(), "dtype": fingerprint(x.dtype)}
    return agree(group, collective_device(group, x.device), x.shape[1], facts, None)


def previous_tokens(x: Tensor, count: int, group: Any = None, tokens: list[int] | None = None) -> Tensor:
    """x [B, T, ..], this rank's tokens -> the `count` tokens before them, [B, count, ..], zeros before the first. Differentiable.

    Slices may be shorter than `count`, even empty: every rank shows all others its last tokens. Every rank of the group must make the call.
    `tokens`: every rank's count, where it is known already.
    """
    group = dist.group.WORLD if group is None else group
    tokens = token_counts(x, group) if tokens is None else tokens
    tail = x[:, max(x.shape[1] - count, 0) :]
    missing = x.new_zeros(x.shape[0], count, *x.shape[2:])
    tail = torch.cat([missing, tail], 1)[:, tail.shape[1] :]  # [B, count, ..], its tokens at the end
    tails = _Gather.apply(tail, group)
    kept = [min(count, n) if rank < dist.get_rank(group) else 0 for rank, n in enumerate(tokens)]  # 0: in the graph, so that every rank
    before = torch.cat([missing, *(tail[:, count - n :] for tail, n in zip(tails, kept, strict=True))], 1)  # takes part in the backward
    return before[:, before.shape[1] - count :].clone()  # no view: whoever asked may change or detach it


def all_tokens(x: Tensor, group: Any = None) -> Tensor:
    """x [B, T, ..], this rank's tokens -> those of all ranks in their order. Differentiable."""
    group = dist.group.WORLD if group is None else group
    tokens = token_counts(x, group)
    filled = torch.cat([x, x.new_zeros(x.shape[0], max(tokens) - x.shape[1], *x.shape[2:])], 1)
    return torch.cat([part[:, :n] for part, n in zip(_Gather.apply(filled, group), tokens, strict=True)], 1)


class _Gather(torch.autograd.Function):
    """x of every rank, [ranks, ..]. The gradient of a rank's x is the sum of what all ranks make of it."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        everyone = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, x.contiguous(), group=group)
        return torch.stack(everyone)

    @staticmethod
    def backward(ctx, d_everyone):
        d_everyone = d_everyone.contiguous()
        dist.all_reduce(d_everyone, group=ctx.group)
        return d_everyone[dist.get_rank(ctx.group)], None
