"""Heads that run as wider ones, or in float32: JAX's arrays are padded and cast around the call, which XLA does."""

from __future__ import annotations

import jax.numpy as jnp

from kdakit.backends.triton_gpu.widened import Widened


class InJax(Widened):
    def pad(self, x, columns, rows=0):
        return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, rows), (0, columns)]) if columns or rows else x

    def cut(self, x, columns, rows=None):
        return x[..., :columns] if rows is None else x[..., :rows, :columns]

    def cast(self, x, dtype):
        return x.astype(dtype)
