"""Choosing the next token, with NumPy: the same seed chooses alike in both frameworks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def greedy(logits: np.ndarray) -> np.ndarray:
    return logits.argmax(-1)


def sampler(temperature: float, top_k: int = 0, seed: int = 0) -> Callable[[np.ndarray], np.ndarray]:
    """logits [B, vocabulary] -> tokens [B]. Temperature 0 takes the largest; top_k > 0 draws among the k largest only."""
    if not temperature >= 0:
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    if temperature == 0:
        return greedy
    rng = np.random.default_rng(seed)

    def sample(logits: np.ndarray) -> np.ndarray:
        wide = logits.astype(np.float64)
        with np.errstate(over="ignore"):  # of a very small temperature: everything but the largest gets -inf
            scaled = (wide - wide.max(-1, keepdims=True)) / temperature
        if 0 < top_k < scaled.shape[-1]:
            scaled = np.where(_largest(wide, top_k), scaled, -np.inf)
        return (scaled + rng.gumbel(size=scaled.shape)).argmax(-1)

    return sample


def _largest(x: np.ndarray, k: int) -> np.ndarray:
    """Which are the k largest of each row; of those that are equal the first, as `greedy` has it."""
    last = np.partition(x, -k)[..., -k, None]
    above, level = x > last, x == last
    return above | (level & (level.cumsum(-1) <= k - above.sum(-1, keepdims=True)))
