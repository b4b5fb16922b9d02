"""The token recurrence, for decoding and short sequences, and its derivative.

S <- Diag(e^g) S;   S <- S + beta k (v - k^T S)^T;   o = S^T q
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kdakit.backends.xla.gate import Activated
from kdakit.backends.xla.products import product


def recurrence(x: Activated, initial_state, sequence=None):
    """o [B, T, HV, V] and the final states. initial_state [B, HV, K, V]; with `sequence` [T], the sequence of each token, [N, HV, K, V];
    a token of sequence N belongs to none and changes no state."""

    def token(carry, x):
        q, k, v, g, beta, row = x  # [B, HV, K] x 2, [B, HV, V], [B, HV, K], [B, HV], []
        before = carry if row is None else lax.dynamic_index_in_dim(carry, row)
        # By select: a new segment forgets what is not finite too.
        state = jnp.where(jnp.isneginf(g)[..., None], 0, jnp.exp(g)[..., None] * before)
        error = v - product("...k,...kv->...v", k, state)
        state = state + (beta[..., None] * k)[..., None] * error[..., None, :]
        if row is None:
            return state, product("...k,...kv->...v", q, state)
        kept = jnp.where(row < carry.shape[0], state, before)  # a token past the last sequence changes nobody's state
        carry = lax.dynamic_update_index_in_dim(carry, kept, row, 0)
        return carry, product("...k,...kv->...v", q, state)

    tokens = tuple(jnp.moveaxis(a, 1, 0) for a in x)
    final, o = lax.scan(token, initial_state, (*tokens, sequence))
    return jnp.moveaxis(o, 0, 1), final


def recurrence_backward(x: Activated, initial_state, d_o, d_final, sequence=None):
    """Activated and d_initial_state from the gradients of `recurrence`'s results. It keeps a state for every token: for heads of one key
    channel, in which a key of exactly 1 with a strength of 1 leaves a gradient of exactly 0 before it. Chunks would leave a roundoff."""
    _, transposed = jax.vjp(lambda *given: recurrence(*given, sequence), x, initial_state)
    return transposed((d_o, d_final))
