"""The call of tokamax, `kimi_delta_attention`, on kdakit's JAX backends: also as `kdakit.jax.tokamax`.

    from kdakit.jax.tokamax import kimi_delta_attention        is        from kdakit.jax import tokamax

q, k, g [B, T, H, K], v [B, T, H, V], beta [B, T, H], states [B, H, K, V]; g is the log-decay. heads_first: [H, B, T, ..] instead, states as
before.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from kdakit import dispatch
from kdakit import jax as ours


def kimi_delta_attention(
    q, k, v, g, beta, *, scale: float | None = None, initial_state=None, output_final_state: bool = False,
    implementation: Any = None, heads_first: bool = False,
):  # fmt: skip
    """(o, final_state). implementation: a backend of kdakit or several, of which the first is taken; None, and tokamax's own names, let
    kdakit choose."""
    named = implementation[0] if isinstance(implementation, (list, tuple)) and implementation else implementation
    backend = named if named in dispatch.names("jax") else "auto"
    if heads_first:
        q, k, v, g, beta = (jnp.moveaxis(x, 0, 2) for x in (q, k, v, g, beta))
    o, final = ours.chunk_kda(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state, backend=backend
    )
    return (jnp.moveaxis(o, 2, 0) if heads_first else o), final
