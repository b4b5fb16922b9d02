"""The token recurrence, for decoding and short sequences: the state is read and written once, in place.

S <- Diag(e^g) S;   S <- S + k (beta (v - k^T S))^T;   o = S^T q            S [K, V], tokens one after the other

grid (B, head blocks, steps of up to 8 tokens), the last axis in order. One token is far too little for the matrix unit: the products are
sums over rows of S, and the time is that of moving S.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental import pallas as pl

from kdakit.backends.pallas_tpu.fused import Inputs, Outputs
from kdakit.backends.pallas_tpu.gate import activate_beta, log_decay, normalise
from kdakit.backends.pallas_tpu.heads import read_heads, write_heads, write_zeros
from kdakit.backends.pallas_tpu.sequences import own_tokens, where_tokens
from kdakit.backends.pallas_tpu.tile import Tile

TOKENS = 8  # per step, at most


def step_kernel(tile: Tile, T: int, table, inputs: dict, outputs: dict, scratch):
    """Blocks by name; scratch: the state [heads, K, V] float32."""
    inputs, out, (state,) = Inputs(**inputs), Outputs(**outputs), scratch
    step, steps = pl.program_id(2), pl.num_programs(2)
    first = step == 0 if table is None else table.first[step] == 1
    last = step == steps - 1 if table is None else table.last[step] == 1

    @pl.when(first)
    def _():
        for h in range(tile.heads):
            given = None if inputs.initial is None else inputs.initial[0, h].astype(jnp.float32)
            state[h] = jnp.zeros((tile.K, tile.V), jnp.float32) if given is None else _k_first(tile, given)

    def work():
        valid = own_tokens(tile, T, table, step)
        q, k, v, g = (read_heads(tile, ref, valid) for ref in (inputs.q, inputs.k, inputs.v, inputs.g))
        beta = activate_beta(tile, inputs.beta[0, 0])  # [heads, C]
        keep, own = _kept(tile, inputs), None if valid is None else jnp.where(valid, 1.0, 0.0)
        outputs = []
        for h in range(tile.heads):
            a, bias = (None, None) if inputs.gate is None else (inputs.gate[h, 0:1, :], inputs.gate[h, 1:2, :])
            gate = log_decay(tile, g[h], a, bias)
            gate = gate if valid is None else jnp.where(valid, gate, 0.0)
            rows = [normalise(tile, q[h])[0] * tile.scale, normalise(tile, k[h])[0], jnp.exp(gate)]
            columns = jnp.concatenate(rows, axis=0).T  # [K, 3 C]
            S, o = state[h], []
            for i in range(tile.C):
                q_i, k_i, decay = (columns[:, n * tile.C + i : n * tile.C + i + 1] for n in range(3))  # [K, 1]
                S = S * decay if keep is None else jnp.where(keep[i] > 0, S * decay, 0.0)  # a new segment forgets NaN too
                error = v[h][i : i + 1] - jnp.sum(k_i * S, axis=0, keepdims=True)  # [1, V]
                write = beta[h : h + 1, i : i + 1] * error
                S = S + k_i * (write if own is None else jnp.where(own[i : i + 1] > 0, write, 0.0))
                o.append(jnp.sum(q_i * S, axis=0, keepdims=True))
            state[h] = S
            outputs.append(jnp.concatenate(o, axis=0))
        write_heads(tile, out.o, outputs, None if table is None else valid)

    where_tokens(table, step, work, lambda: write_zeros(tile, out.o, own_tokens(tile, T, table, step)))

    if out.final is not None:

        @pl.when(last)
        def _():
            for h in range(tile.heads):
                out.final[0, h] = _k_first(tile, state[h]).astype(out.final.dtype)


def _k_first(tile: Tile, state):
    """[V, K] <-> [K, V] if the caller's states are [V, K]."""
    return state.T if tile.state_v_first else state


def _kept(tile: Tile, inputs: Inputs):
    """[1, 1] for each token: 0 where a segment starts, else 1; None without segments."""
    if inputs.segments is None:
        return None
    ids, fresh = inputs.segments[0, 0, 0:1, :], inputs.segments[0, 0, 1:2, 0:1]
    same = [ids[:, i : i + 1] == ids[:, i - 1 : i] for i in range(1, tile.C)]
    return [jnp.where(x, 1.0, 0.0) for x in (fresh == 0, *same)]
