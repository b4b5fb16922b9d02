"""One token of each sequence as a CUDA graph: the host launches once a step instead of once a kernel."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WARM = 2  # steps before the capture: they compile, plan and allocate what may not happen inside one


class Moved(list):
    """A cache that a captured step holds; as long as anybody has it, the step is his."""


class CapturedStep:
    """model(tokens [B, 1], cache) captured on a cache of its own, which every replay moves in place."""

    def __init__(self, model: Any, cache: list):
        self.weights = [p.data_ptr() for p in model.parameters()]
        self.cache = [type(entry)(*(None if t is None else t.clone() for t in entry)) for entry in cache]
        self.model = weakref.proxy(model)  # which has this step
        self.tensors = flatten(self.cache)
        self.tokens = torch.zeros(self.tensors[0].shape[0], 1, dtype=torch.int64, device=self.tensors[0].device)
        self.latest: Callable[[], Moved | None] = lambda: None
        self._warm_up()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self._step()

    def takes(self, cache: list) -> bool:
        """Whether it goes on with this cache: its own, or one of the same sizes while nobody else's is here."""
        if isinstance(cache, Moved):
            return self.latest() is cache
        form = lambda tensors: [(t.shape, t.dtype, t.device) for t in tensors]
        same = form(flatten(cache)) == form(self.tensors) and self.weights == [p.data_ptr() for p in self.model.parameters()]
        return same and self.latest() is None

    def __call__(self, tokens: Tensor, cache: list) -> tuple[Tensor, Moved]:
        """Logits, which the next call overwrites, and the cache that comes out; the one that went in is used up."""
        if self.latest() is not cache:
            torch._foreach_copy_(self.tensors, flatten(cache))
        self.tokens.copy_(tokens)
        self.graph.replay()
        after = Moved(self.cache)
        self.latest = weakref.ref(after)
        return self.logits, after

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


class CapturedSteps:
    """Those of one model: one for each size and for each sequence that is under way at the same time."""

    def __init__(self) -> None:
        self.steps: list[CapturedStep] = []
        self.lock = threading.Lock()

    def __reduce__(self):
        return CapturedSteps, ()  # a copy of a model captures its own

    def __call__(self, model: Any, tokens: Tensor, cache: list) -> tuple[Tensor, Moved]:
        """A step of the sequence with this cache. Between finding a graph that is free and taking it no other thread may find it."""
        with self.lock:
            return self.find(model, cache)(tokens, cache)

    def find(self, model: Any, cache: list) -> CapturedStep:
        for step in self.steps:
            if step.takes(cache):
                return step
        if isinstance(cache, Moved):
            raise ValueError(
                "cache must be the latest one of its sequence: a captured step moves it in place, inference(graph=False) does not"
            )
        self.steps = [step for step in self.steps if step.latest() is not None]  # the others' memory goes first
        self.steps.append(CapturedStep(model, cache))
        return self.steps[-1]


def flatten(cache: list) -> list[Tensor]:
    """The tensors of a model's cache, a tuple of them a layer."""
    return [t for entry in cache for t in entry if t is not None]
