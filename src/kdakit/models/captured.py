"""One token of each sequence as a CUDA graph: the host launches once a step instead of once a kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

WARM = 2  # steps before the capture: they compile, plan and allocate what may not happen inside one


class CapturedStep:
    """model(tokens [B, 1], cache) captured on the tensors of one cache, which every replay moves in place."""

    def __init__(self, model: Any, cache: list):
        self.model, self.cache = model, cache
        self.tensors = flatten(cache)
        self.tokens = torch.zeros(self.tensors[0].shape[0], 1, dtype=torch.int64, device=self.tensors[0].device)
        self._warm_up()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self._step()

    def fits(self, cache: list) -> bool:
        """Whether another cache has the same sizes."""
        form = lambda tensors: [(t.shape, t.dtype, t.device) for t in tensors]
        return form(flatten(cache)) == form(self.tensors)

    def __call__(self, tokens: Tensor, cache: list) -> tuple[Tensor, list]:
        """Logits, which the next call overwrites, and the cache that comes out: always the captured one."""
        if cache is not self.cache:
            torch._foreach_copy_(self.tensors, flatten(cache))
        self.tokens.copy_(tokens)
        self.graph.replay()
        return self.logits, self.cache

    def _warm_up(self) -> None:
        """Steps on a stream of their own, undone afterwards."""
        kept = [t.clone() for t in self.tensors]
        aside, now = torch.cuda.Stream(), torch.cuda.current_stream()
        aside.wait_stream(now)
        with torch.cuda.stream(aside):
            for _ in range(WARM):
                self._step()
        now.wait_stream(aside)
        torch._foreach_copy_(self.tensors, kept)

    def _step(self) -> Tensor:
        logits, after = self.model(self.tokens, cache=self.cache, in_place=True)
        for old, new in zip(self.tensors, flatten(after), strict=True):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)
        return logits


def flatten(cache: list) -> list[Tensor]:
    """The tensors of a model's cache, a tuple of them a layer."""
    return [t for entry in cache for t in entry if t is not None]
