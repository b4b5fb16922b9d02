"""Stage state: the scan over chunks, and its backward.

v_new = u - w S                 S' = Diag(decay) S + k_decayed^T v_new

Given the inverse of I + A_kk, w and u are the right-hand sides beta k exp(g_cum) and beta v, and v_new = (I + A_kk)^-1 (u - w S).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from kdakit.backends.xla.products import product, row_dots


def state_forward(w, u, k_decayed, decay, state, entry=None, inverse=None):
    """States before each chunk [NT, B, HV, K, V], v_new [NT, B, HV, C, V], the states after each chunk (with `entry`) and the last one.

    w, k_decayed [NT, B, HV, C, K], u [NT, B, HV, C, V], decay [NT, B, HV, K], state [B, HV, K, V].
    entry = (first [NT], states [NT, B, HV, K, V]): chunks that start from a state of their own, where first, instead of the one before.
    """

    def chunk(state, x):
        w, u, k_decayed, decay, entry, inverse = x
        state = state if entry is None else jnp.where(entry[0], entry[1], state)
        v_new = u - product("...ik,...kv->...iv", w, state)
        v_new = v_new if inverse is None else product("...ij,...jv->...iv", inverse, v_new)
        after = decay[..., None] * state + product("...ik,...iv->...kv", k_decayed, v_new)
        return after, (state, v_new, None if entry is None else after)

    last, (states, v_new, after) = lax.scan(chunk, state, (w, u, k_decayed, decay, entry, inverse))
    return states, v_new, after, last


def state_backward(w, k_decayed, decay, states, v_new, d_states, d_v_new, d_state, entry=None, inverse=None):
    """d_w, d_u, d_k_decayed, d_decay, the gradients of the states before each chunk (with `entry`) and of the first state.

    d_states and d_v_new are what the output stage gave, d_state belongs to the last state; dS' is the gradient of the state after a chunk:
    d_v_new <- d_v_new + k_decayed dS'       dS = Diag(decay) dS' + d_states - w^T d_v_new
    d_u = d_v_new    d_w = -d_v_new S^T      d_k_decayed = v_new dS'^T    d_decay = sum_v S dS'
    With the inverse, (I + A_kk)^-T d_v_new takes the place of d_v_new in dS, d_u and d_w.
    entry = (last [NT], gradients [NT, B, HV, K, V]): chunks whose dS' is given, where last, instead of coming from the next chunk.
    """

    def chunk(d_after, x):
        w, k_decayed, decay, d_state, d_v_new, entry, inverse = x
        d_after = d_after if entry is None else jnp.where(entry[0], entry[1], d_after)
        d_u = d_v_new + product("...ik,...kv->...iv", k_decayed, d_after)
        d_u = d_u if inverse is None else product("...ji,...jv->...iv", inverse, d_u)
        before = decay[..., None] * d_after + d_state - product("...ik,...iv->...kv", w, d_u)
        return before, (d_after, d_u, None if entry is None else before)

    d_first, (d_after, d_u, d_before) = lax.scan(chunk, d_state, (w, k_decayed, decay, d_states, d_v_new, entry, inverse), reverse=True)
    d_w = -product("...iv,...kv->...ik", d_u, states)
    d_k_decayed = product("...iv,...kv->...ik", v_new, d_after)
    return d_w, d_u, d_k_decayed, row_dots(states, d_after)[..., 0], d_before, d_first
