"""Stage state: the scan over chunks, and its backward.

    v_new = u - w S                 S' = Diag(decay) S + k_decayed^T v_new
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from kdakit.backends.xla.products import product


def state_forward(w, u, k_decayed, decay, initial_state, sequence=None):
    """States before each chunk [NT, B, HV, K, V], v_new [NT, B, HV, C, V] and the final states.

    w, k_decayed [NT, B, HV, C, K], u [NT, B, HV, C, V], decay [NT, B, HV, K]. Without `sequence`, initial_state is [B, HV, K, V]. With it
    (cu_seqlens, B = 1), initial_state is [N, HV, K, V] and slot n works on the state of sequence[n]; slots with sequence[n] = N on nobody's.
    """

    def chunk(carry, x):
        w, u, k_decayed, decay, row = x
        state = _read(carry, row)
        v_new = u - product("...ik,...kv->...iv", w, state)
        new = decay[..., None] * state + product("...ik,...iv->...kv", k_decayed, v_new)
        return _write(carry, row, new), (state, v_new)

    final, (states, v_new) = lax.scan(chunk, _carry(initial_state, sequence), (w, u, k_decayed, decay, sequence))
    return states, v_new, final if sequence is None else final[:-1]


def state_backward(w, k_decayed, decay, states, v_new, d_states, d_v_new, d_final_state, sequence=None):
    """d_w, d_u, d_k_decayed, d_decay and d_initial_state.

    d_states and d_v_new are what the output stage gave; dS' is the gradient of the state after the chunk:
    d_v_new <- d_v_new + k_decayed dS'       dS = Diag(decay) dS' + d_states - w^T d_v_new
    d_u = d_v_new    d_w = -d_v_new S^T      d_k_decayed = v_new dS'^T    d_decay = sum_v S dS'
    """

    def chunk(carry, x):
        w, k_decayed, decay, d_state, d_v_new, row = x
        d_next = _read(carry, row)
        d_v_new = d_v_new + product("...ik,...kv->...iv", k_decayed, d_next)
        new = decay[..., None] * d_next + d_state - product("...ik,...iv->...kv", w, d_v_new)
        return _write(carry, row, new), (d_next, d_v_new)

    xs = (w, k_decayed, decay, d_states, d_v_new, sequence)
    d_initial, (d_next, d_v_new) = lax.scan(chunk, _carry(d_final_state, sequence), xs, reverse=True)
    d_w = -product("...iv,...kv->...ik", d_v_new, states)
    d_k_decayed = product("...iv,...kv->...ik", v_new, d_next)
    d_decay = (states * d_next).sum(-1)
    return d_w, d_v_new, d_k_decayed, d_decay, d_initial if sequence is None else d_initial[:-1]


def _carry(state, sequence):
    """With sequences: all of their states and one that the unused slots may touch."""
    return state if sequence is None else jnp.concatenate([state, jnp.zeros_like(state[:1])])


def _read(carry, row):
    """[B, HV, K, V]; the state of one sequence is B = 1."""
    return carry if row is None else lax.dynamic_index_in_dim(carry, row)


def _write(carry, row, state):
    return state if row is None else lax.dynamic_update_index_in_dim(carry, state, row, 0)
