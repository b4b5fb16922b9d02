"""Choosing the next token, with NumPy: the same seed chooses alike in both frameworks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def greedy(logits: np.ndarray) -> np.ndarray:
    return logits.argmax(-1)


def sampler(temperature: float, top_k: int = 0, seed: int = 0) -> Callable[[np.ndarray], np.ndarray]:
    """logits [B, vocabulary] -> tokens [B]. Temperature 0 takes the largest; top_k > 0 draws among the k largest only."""
    if not temperature >= 0:
        raise ValueError(f"temperature must not be negative, got {temperature}")
    if temperature == 0:
        return greedy
    rng = np.random.default_rng(seed)

    def sample(logits: np.ndarray) -> np.ndarray:
        scaled = logits.astype(np.float64) / temperature
        if 0 < top_k < scaled.shape[-1]:
            scaled = np.where(scaled >= np.partition(scaled, -top_k)[..., -top_k, None], scaled, -np.inf)
        return (scaled + rng.gumbel(size=scaled.shape)).argmax(-1)

    return sample
