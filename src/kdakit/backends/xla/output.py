"""Stage output, and its backward:   o = q_decayed S + A_qk v_new."""

from __future__ import annotations

import jax.numpy as jnp

from kdakit.backends.xla.products import product


def output_forward(q_decayed, A_qk, states, v_new):
    """q_decayed [.., C, K], A_qk [.., C, C], states [.., K, V], v_new [.., C, V] -> o [.., C, V]."""
    return product("...ik,...kv->...iv", q_decayed, states) + product("...ij,...jv->...iv", A_qk, v_new)


def output_backward(q_decayed, A_qk, states, v_new, d_o):
    """d_q_decayed = d_o S^T,  d_A_qk = tril(d_o v_new^T),  d_states = q_decayed^T d_o,  d_v_new = A_qk^T d_o."""
    d_q_decayed = product("...iv,...kv->...ik", d_o, states)
    d_A_qk = jnp.where(jnp.tri(A_qk.shape[-1], dtype=bool), product("...iv,...jv->...ij", d_o, v_new), 0)
    d_states = product("...ik,...iv->...kv", q_decayed, d_o)
    d_v_new = product("...ij,...iv->...jv", A_qk, d_o)
    return d_q_decayed, d_A_qk, d_states, d_v_new
