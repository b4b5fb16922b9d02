"""Greedy choice on the device."""

from __future__ import annotations

import torch
from torch import Tensor


def likeliest(logits: Tensor) -> Tensor:
    """The likeliest token [..] of logits [.., vocabulary]; -1 where one of them is not a finite number. A CUDA graph can hold it."""
    largest, token = logits.max(-1)  # NaN and infinity are the largest where there are any
    sane = (largest < torch.inf) & (logits.amin(-1) > -torch.inf)
    return token.masked_fill(~sane, -1)
