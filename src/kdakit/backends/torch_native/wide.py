"""float64 on a CPU, where an error would be the same for many results, or is of what cancels in one. Other devices may not have it."""

from __future__ import annotations

from typing import Any

import torch

from kdakit.problem import Problem

NARROW = 32  # key channels


def as_computed(problem: Problem, device: Any) -> Problem:
    """Chunks of a narrow head in float64 from end to end: few tokens overwrite its state, and of the few numbers that its parameters'
    gradients are sums of most cancel. Not where a sequence has the same bits in pieces: what goes from one to the next is float32."""
    narrow = problem.K <= NARROW and not problem.options.deterministic
    return problem.replace(dtype="float64") if narrow and torch.device(device).type == "cpu" else problem


def widened(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.device.type == "cpu" else x


def paired(left, right):
    """left right^T, [M, m, K] and [M, n, K], on a CPU summed in float64. Identical keys have the same products with the same error, which
    a sequence multiplies by its length where nothing is forgotten; gradients of pairs, rows and columns cancel in those of gates."""
    if left.dtype != torch.float32 or left.device.type != "cpu":
        return torch.bmm(left, right.mT)
    return torch.bmm(left.double(), right.mT.double()).float()


def summed(x):
    """The sum over the last dimension [.., 1], on a CPU in float64: all gates of a chunk get the same one, with the same error."""
    return x.sum(-1, keepdim=True, dtype=torch.float64 if x.device.type == "cpu" else None).to(x.dtype)
