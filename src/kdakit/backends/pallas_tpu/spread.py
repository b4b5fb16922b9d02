"""Columns of a token on all lanes, by the matrix unit: what a state S [K, V] is multiplied with row by row, with no shuffle of lanes.

A state's rows want decay, k and q as columns, each element on all 128 lanes. Shuffling does one [8, 128] in two cycles, 48 of them a head:
more than the memory needs to move the state. A product with zeros and ones does the same: the rows of 8 heads, cut into pieces that
bfloat16 holds exactly, are transposed once, X [K, R], and X E_h is head h's [K, decay | k | q], the pieces added up in float32: exact.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from kdakit.backends.pallas_tpu.gate import pieces_of
from kdakit.backends.pallas_tpu.tile import LANES

TOGETHER = 8  # heads in one transposition
DECAY_PIECES = 3  # hold all 24 bits


def piece_counts(exact: bool) -> tuple[int, int, int]:
    """Of decay, k and q; `exact`: k and q are bfloat16 already."""
    return (DECAY_PIECES, 1, 1) if exact else (DECAY_PIECES,) * 3


def selections(exact: bool) -> np.ndarray:
    """E [8, R, 3 * 128] of 0/1: piece p of head h is row 8 p + h."""
    counts = piece_counts(exact)
    rows = -(-TOGETHER * sum(counts) // 16) * 16
    found = np.zeros((TOGETHER, rows, 3 * LANES), np.float32)
    quantities = [quantity for quantity, count in enumerate(counts) for _ in range(count)]
    for h in range(TOGETHER):
        for p, quantity in enumerate(quantities):
            found[h, TOGETHER * p + h, quantity * LANES : (quantity + 1) * LANES] = 1
    return found


def transposed(decay, k, q, exact: bool, rows: int):
    """[heads <= 8, K] float32 each -> X [K, rows] bfloat16."""
    parts = [piece for x, count in zip((decay, k, q), piece_counts(exact), strict=True) for piece in _pieces(_eight(x), count)]
    if missing := rows - TOGETHER * len(parts):
        parts.append(jnp.zeros((missing, decay.shape[1]), jnp.float32))
    return jnp.concatenate(parts, axis=0).T.astype(jnp.bfloat16)


def columns(X, E, K: int, V: int):
    """decay, k, q of one head, [K, V] each, every column the same."""
    both = lax.dot_general(X, E, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)[:K]
    return [_wide(both[:, n * LANES : (n + 1) * LANES], V) for n in range(3)]


def _wide(x, V: int):
    """[K, 128] -> [K, V]."""
    return x[:, :V] if V <= LANES else jnp.concatenate([x] * -(-V // LANES), axis=1)[:, :V]


def _pieces(x, count: int) -> list:
    """x as `count` float32 arrays whose bits fit bfloat16."""
    both = pieces_of(x, count).astype(jnp.float32)
    return [both[n * TOGETHER : (n + 1) * TOGETHER] for n in range(count)]


def _eight(x):
    missing = TOGETHER - x.shape[0]
    return x if missing == 0 else jnp.concatenate([x, jnp.zeros((missing, x.shape[1]), x.dtype)], axis=0)
