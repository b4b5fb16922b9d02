"""Stages state and output: the delta rule between chunks, for one head. The state is held as its transpose, S [V, K].

v_new = inverse (beta (v - k_to S^T))        o = q_to S^T + A_qk v_new        S' = S Diag(decay) + v_new^T k_end
"""

from __future__ import annotations

import jax.numpy as jnp

from kdakit.backends.pallas_tpu.gate import Decays
from kdakit.backends.pallas_tpu.heads import block_diagonal, dot, lane_slices
from kdakit.backends.pallas_tpu.intra import Factors, block, operand
from kdakit.backends.pallas_tpu.tile import Tile


def from_start(tile: Tile, x, d: Decays, rows=None):
    """x [C, K], decayed from its blocks' starts, as seen from the chunk's start; zero where `rows` [C, 1] is False."""
    found = [block(x, 0)] + [block(x, n) * d.between(0, n) for n in range(1, tile.blocks)]
    out = jnp.concatenate(found, axis=0)
    return out if rows is None else jnp.where(rows, out, 0.0)


def to_end(tile: Tile, x: Factors, d: Decays, rows=None):
    """k [C, K] decayed to the chunk's end; zero where `rows` [C, 1] is False."""
    n = tile.blocks
    found = [block(x.k_after, m) * d.between(m + 1, n) for m in range(n - 1)] + [block(x.k_after, n - 1)]
    out = jnp.concatenate(found, axis=0)
    return out if rows is None else jnp.where(rows, out, 0.0)


def read_state(tile: Tile, S, *rows):
    """Each of `rows` [C, K] times S^T: [C, V] each."""
    both = dot(tile, jnp.concatenate([operand(tile, x) for x in rows], axis=0), S, (1, 1))
    return [both[i * tile.C : (i + 1) * tile.C] for i in range(len(rows))]


def apply_group(tile: Tile, matrix, values: list) -> list:
    """A group's [C, g C] matrix times each head's [C, V]."""
    return lane_slices(dot(tile, matrix, block_diagonal([operand(tile, x) for x in values])), len(values))


def next_state(tile: Tile, S, decay, k_end, v_new):
    """S Diag(decay) + v_new^T k_end;  decay [1, K]."""
    return S * decay + dot(tile, v_new, k_end, (0, 0))
