"""Root-mean-square normalisation, plain and gated, in float32 at least."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class RMSNorm(nnx.Module):
    """y = weight * x / sqrt(mean(x^2) + eps), times sigmoid(gate) where a gate is given"""

    def __init__(self, size: int, eps: float = 1e-5):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones(size))

    def __call__(self, x, gate=None):
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        y = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.eps) * self.weight[...].astype(wide.dtype)
        return (y if gate is None else y * jax.nn.sigmoid(gate.astype(wide.dtype))).astype(x.dtype)
