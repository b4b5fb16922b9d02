"""A matrix as PyTorch keeps it, [out, in], under the name `weight`: one weights file serves both frameworks without conversion."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx


class Linear(nnx.Module):
    """y = x weight^T + bias; drawn uniformly from +-1/sqrt(in)."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False, *, rngs: nnx.Rngs):
        self.weight = nnx.Param(uniform(rngs, (outputs, inputs), 1 / math.sqrt(inputs)))
        self.bias = nnx.Param(uniform(rngs, (outputs,), 1 / math.sqrt(inputs))) if bias else None

    def __call__(self, x):
        y = x @ self.weight[...].astype(x.dtype).T
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


def uniform(rngs: nnx.Rngs, shape: tuple[int, ...], bound: float):
    return jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound)
