"""Multi-query associative recall with rewriting: the smallest task that asks a memory to correct itself.

    k7 v3  k2 v9  k7 v1  k5 v4  k2 v2  ..    k2 ?  k5 ?  k7 ?        ->  v2  v4  v1

A sequence writes `pairs` keys `writes` times each, in random order, every time with a random value; then it asks for each key once, in
random order. The answer is the value written last. `targets` is -1 where nothing is asked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Recall:
    keys: int = 64  # tokens 0 .. keys - 1 are keys
    values: int = 32  # the tokens after them are values
    pairs: int = 8
    writes: int = 4

    def __post_init__(self):
        if not 1 <= self.pairs <= self.keys:
            raise ValueError(f"pairs must lie in 1 .. keys = {self.keys}, got {self.pairs}")
        if self.values < 1 or self.writes < 1:
            raise ValueError(f"values and writes must be positive, got {self.values} and {self.writes}")

    @property
    def vocab_size(self) -> int:
        return self.keys + self.values

    @property
    def length(self) -> int:
        return self.pairs * (2 * self.writes + 1)

    def with_pairs(self, pairs: int) -> Recall:
        return replace(self, pairs=pairs)

    def batch(self, rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
        """tokens and targets, int64 [size, length] each."""
        keys = rng.permuted(np.tile(np.arange(self.keys), (size, 1)), axis=1)[:, : self.pairs]
        slots = rng.permuted(np.tile(np.arange(self.pairs), (size, self.writes)), axis=1)  # which key each write is for
        written = self.keys + rng.integers(0, self.values, slots.shape)
        last = np.empty((size, self.pairs), np.int64)
        for i in range(slots.shape[1]):
            last[np.arange(size), slots[:, i]] = written[:, i]
        order = rng.permuted(np.tile(np.arange(self.pairs), (size, 1)), axis=1)
        head = np.stack([np.take_along_axis(keys, slots, 1), written], -1).reshape(size, -1)
        tokens = np.concatenate([head, np.take_along_axis(keys, order, 1)], 1)
        targets = np.concatenate([np.full_like(head, -1), np.take_along_axis(last, order, 1)], 1)
        return tokens, targets


def accuracy(logits: np.ndarray, targets: np.ndarray) -> float:
    """The share of questions whose answer has the largest logit."""
    asked = targets >= 0
    return float((logits.argmax(-1) == targets)[asked].mean())
