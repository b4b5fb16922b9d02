"""Tokens that wait: what `decode` has seen since a state was written, for pools that write states seldom (`pending`).

Only kernels that know of it let tokens wait. Every other call wants states as they are, and has them written first: `StatePool.settle`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kdakit.serving.arguments import MAX_DRAFTS, PoolSizes


class WaitingLog(NamedTuple):
    """As `commit` takes it."""

    k: Tensor  # [N, tokens, HV, K]
    decay: Tensor  # [N, tokens, HV, K]
    u: Tensor  # [N, tokens, HV, V]


class Pending:
    """A log for each row of a pool, in float32."""

    def __init__(self, tokens: int, rows: int, sizes: PoolSizes, device: Any):
        """tokens: with that many a state is written; so one less wait."""
        if isinstance(tokens, bool) or not isinstance(tokens, int) or not 2 <= tokens <= MAX_DRAFTS:
            raise ValueError(f"pending must be 0 (none) or 2 .. {MAX_DRAFTS} tokens, got {tokens!r}")
        if sizes.dtype == "float64":
            raise TypeError("pending tokens are kept in float32, got a pool of float64")
        self.tokens = tokens
        wide = lambda size: torch.zeros(rows, sizes.HV, tokens - 1, size, dtype=torch.float32, device=device)
        self.k, self.decay, self.u = wide(sizes.K), wide(sizes.K), wide(sizes.V)
        self.count = torch.zeros(rows, sizes.HV, dtype=torch.int32, device=device)  # how many wait, as each head counts
        # Whether any can wait. Once a graph holds a call it is too late to ask whether any does.
        self.possible: bool = self.count.is_cuda and find_spec("triton") is not None

    def tensors(self) -> list[Tensor]:
        return [self.k, self.decay, self.u, self.count]

    def forget(self, index: Tensor) -> None:
        """Rows whose states are others now. A CUDA graph can hold it."""
        self.count.index_fill_(0, index, 0)

    def waiting(self, place: Tensor) -> tuple[Tensor, WaitingLog]:
        """How many tokens [N] of each row, and which."""
        log = (x[place].transpose(1, 2).contiguous() for x in (self.k, self.decay, self.u))
        return self.count[place, 0], WaitingLog(*log)
