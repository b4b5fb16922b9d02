"""AdamW with warm-up and a cosine: its settings, the learning rate of every step, and its state as plain arrays.

    m <- b1 m + (1 - b1) d      v <- b2 v + (1 - b2) d^2      w <- w - lr (m' / (sqrt(v') + eps) + decay w)      ' : divided by 1 - b^step

d is the gradient, scaled down where its norm over all parameters exceeds `clip`. Only matrices decay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class AdamW:
    learning_rate: float = 3e-3
    steps: int = 1000
    warmup: int = 30
    floor: float = 0.02  # the share of the learning rate that is left at the end
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    decay: float = 0.0
    clip: float = 1.0

    def __post_init__(self):
        for name in ("learning_rate", "steps", "clip", "eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    def rate(self, step: int) -> float:
        """The learning rate of step 0, 1, ..: linear up, then half a cosine down to floor * learning_rate."""
        fraction = min(step / self.steps, 1.0)
        cosine = self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * fraction))
        return self.learning_rate * cosine * min(1.0, (step + 1) / max(self.warmup, 1))


def decays(name: str, ndim: int) -> bool:
    """Whether weight decay applies: to matrices, but not to embeddings."""
    return ndim == 2 and "embeddings" not in name


@dataclass
class TrainingState:
    """Everything a run needs to go on: the same names in all three."""

    weights: dict[str, np.ndarray]
    first: dict[str, np.ndarray] = field(default_factory=dict)  # m
    second: dict[str, np.ndarray] = field(default_factory=dict)  # v
    step: int = 0
