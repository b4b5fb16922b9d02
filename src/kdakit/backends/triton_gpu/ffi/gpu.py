"""The GPU that JAX computes on."""

from __future__ import annotations

from functools import lru_cache

import jax

from kdakit.backends.triton_gpu.config import Chip, chip_for


@lru_cache(maxsize=1)
def capability() -> tuple[int, int]:
    """Of the first device; 9.0 where none can be asked."""
    major, minor = str(getattr(jax.devices()[0], "compute_capability", "9.0")).split(".")
    return int(major), int(minor)


def chip() -> Chip:
    return chip_for(*capability())
