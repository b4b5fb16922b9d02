"""Matrix products in the full precision of their operands on every XLA device."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

# Accelerators multiply float32 in bfloat16 or tf32 unless told otherwise.
product = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def row_dots(x, y):
    """sum_d x[.., d] y[.., d], the axis kept."""
    # Not (x * y).sum(-1): jaxlib 0.10 hands that pattern to a CPU kernel that is 50 times as slow and, at some shapes, crashes. And not
    # einsum of x and y, which is the same pattern again, 3 times as slow as a matrix times a vector.
    return product("...d,d->...", x * y, jnp.ones_like(x, shape=x.shape[-1:]))[..., None]
