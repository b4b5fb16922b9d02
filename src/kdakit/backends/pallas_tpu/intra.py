"""Stage intra: what of a chunk needs no state. Heads of a group (see `Tile.group`) share [C, g C] matrices, side by side.

A_qk[i,j] = sum_d q[i,d] k[j,d] exp(g[j+1,d] + .. + g[i,d])           j <= i   (q is scaled)
P[i,j]    = sum_d k[i,d] k[j,d] exp(g[j+1,d] + .. + g[i,d])           j <  i
inverse   = (I + A_kk)^-1,   A_kk[i,j] = beta_i P[i,j]

Each pair of tokens is referred to a point between them: tokens of different blocks of 16 to the start of the later one's, tokens of one
block to the boundary at which they part. With a bounded gate and bfloat16 operands the start of the block serves for those too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from kdakit.backends.pallas_tpu.gate import Decays
from kdakit.backends.pallas_tpu.heads import block_diagonal, dot, row_slices, side_by_side
from kdakit.backends.pallas_tpu.tile import BLOCK, Tile


class Masks(NamedTuple):
    """Of [C, g C]: which pairs of tokens (i, j) take part."""

    lower: Any  # j <= i
    strict: Any  # j < i
    diagonal: Any
    levels: tuple  # i and j part at this run length of `tile.levels`
    inverse: tuple  # the same for runs of 1, 2, .. C / 2 tokens
    group: tuple  # column belongs to head 0, 1, .. of the group


def make_masks(tile: Tile, same_segment=None) -> Masks:
    """`same_segment` [C, C]: pairs of one segment; None: all of them."""
    C, g = tile.C, tile.group
    i, lane = (lax.broadcasted_iota(jnp.int32, (C, g * C), axis) for axis in (0, 1))
    j = lane & (C - 1)

    def parts(s):
        """i lies in the second, j in the first of two runs of s, a power of two like C."""
        return ((i ^ j) & -s == s) & (i & s != 0)

    lower, strict = i >= j, i > j
    levels = [parts(s) for s in tile.levels]
    if same_segment is not None:
        same = side_by_side([same_segment] * g) > 0
        lower, strict, levels = lower & same, strict & same, [x & same for x in levels]
    runs = [1 << n for n in range(C.bit_length() - 1)]
    heads = tuple((lane >= h * C) & (lane < (h + 1) * C) for h in range(g))
    return Masks(lower, strict, i == j, tuple(levels), tuple(parts(s) for s in runs), heads)


class Factors(NamedTuple):
    """Of one head, [C, K]: rows and columns of products, times their decays."""

    q_to: Any
    k_to: Any
    k_after: Any
    k_back: Any  # if the gate is bounded
    levels: tuple  # (q, k) each


def factors(q, k, d: Decays) -> Factors:
    back = None if d.back is None else k * d.back
    return Factors(q * d.to, k * d.to, k * d.after, back, tuple((q * f, k * f) for f in d.levels))


def block(x, n: int):
    return x[n * BLOCK : (n + 1) * BLOCK]


def rows_of(tile: Tile, x: Factors, n: int):
    """[2 * 16, K]: the q and then the k of block n."""
    return operand(tile, jnp.concatenate([block(x.q_to, n), block(x.k_to, n)], axis=0))


def column_blocks(tile: Tile, x: Factors, d: Decays, n: int) -> list:
    """[16, K] each: the k of blocks 0, 1, .. as block n sees them; only earlier ones, and its own if the gate is bounded."""
    found = []
    for m in range(n):
        between = d.between(m + 1, n)
        found.append(block(x.k_after, m) if between is None else block(x.k_after, m) * between)
    return [*found, block(x.k_back, n)] if tile.bounded else found


def columns_of(tile: Tile, blocks: list):
    """[C, K]: `column_blocks`, zero from there on."""
    found = [operand(tile, x) for x in blocks]
    zero = jnp.zeros_like(found[0])
    return jnp.concatenate([*found, *[zero] * (tile.blocks - len(found))], axis=0)


def operand(tile: Tile, x):
    return x.astype(jnp.bfloat16) if tile.operand == "bfloat16" else x


def pair_products(tile: Tile, groups: list[list], masks: Masks) -> list:
    """(A_qk, P) [C, g C] of each group of heads, each head given as (q, k, Factors, Decays)."""
    zero = jnp.zeros((BLOCK, tile.group * tile.C), jnp.float32)
    found = [([], []) for _ in groups]  # blocks of rows of A_qk and P
    for n in range(tile.blocks):
        for group, (A_qk, P) in zip(groups, found, strict=True):
            both = _across(tile, group, n) if n or tile.bounded else jnp.concatenate([zero, zero], axis=0)
            A_qk.append(both[:BLOCK])
            P.append(both[BLOCK:])
    found = [(jnp.concatenate(A_qk, axis=0), jnp.concatenate(P, axis=0)) for A_qk, P in found]
    for n, parts in enumerate(masks.levels):
        level = [_level(tile, group, n) for group in groups]
        found = [[jnp.where(parts, new, x) for x, new in zip(old, both, strict=False)] for old, both in zip(found, level, strict=True)]
    if tile.bounded or tile.segments:  # else everything else is zero already
        found = [(jnp.where(masks.lower, A_qk, 0.0), jnp.where(masks.strict, P, 0.0)) for A_qk, P in found]
    if tile.bounded:
        return found
    return [(jnp.where(masks.diagonal, x[2], A_qk), P) for x, (A_qk, P) in zip(level, found, strict=True)]


def _across(tile: Tile, group: list, n: int):
    """[2 * 16, g C]: the q and then the k rows of block n against all columns that it sees."""
    rows = side_by_side([rows_of(tile, x, n) for _, _, x, _ in group])
    columns = block_diagonal([columns_of(tile, column_blocks(tile, x, d, n)) for _, _, x, d in group])
    return dot(tile, rows, columns, (1, 1))


def _level(tile: Tile, group: list, n: int) -> list:
    """q and k rows against k columns [C, g C] at level n, where only pairs that part there are right; at level 1 also q against k."""
    run = tile.levels[n]
    # Rows come in tiles of 8: at that level leave out the even runs. At level 1 an even run is one token, with no decay.
    rows = [[odd_runs(x) if run == 8 else x for x in f.levels[n]] + ([q] if run == 1 else []) for q, _, f, _ in group]
    columns = block_diagonal([operand(tile, k if run == 1 else f.levels[n][1]) for _, k, f, _ in group])
    together = side_by_side([operand(tile, jnp.concatenate(x, axis=0)) for x in rows])
    found = row_slices(dot(tile, together, columns, (1, 1)), len(rows[0]))
    return [between_even_runs(x) for x in found] if run == 8 else found


def odd_runs(x):
    """[C, ..] -> [C / 2, ..]: every second 8 rows."""
    return jnp.concatenate([x[n : n + 8] for n in range(8, x.shape[0], 16)], axis=0)


def between_even_runs(x):
    """[C / 2, ..] -> [C, ..]: back to where they were, zeros between."""
    zero = jnp.zeros_like(x[:8])
    return jnp.concatenate([y for n in range(0, x.shape[0], 8) for y in (zero, x[n : n + 8])], axis=0)


def over_lanes(masks: Masks, columns: list):
    """g x [C, 1] -> [C, g C] or something that broadcasts to it: each head's column in its lanes."""
    out = columns[0]
    for here, x in zip(masks.group[1:], columns[1:], strict=True):
        out = jnp.where(here, x, out)
    return out


def unit_lower_inverses(tile: Tile, matrices: list, masks: Masks) -> list:
    """(I + A)^-1 of strictly lower A [C, g C] by masked doubling: X <- X - X (A where runs of s part) X,  s = 1, 2, 4, ..

    X is the exact inverse of the diagonal blocks of 2 s, so nothing ever grows beyond the inverse itself. All matrices take each step
    together: alone, one would wait for the matrix unit most of the time.
    """
    found = [jnp.where(masks.diagonal, 1.0, 0.0) - jnp.where(masks.inverse[0], A, 0.0) for A in matrices]
    for parts in masks.inverse[1:]:
        left = [dot(tile, X, spread(tile, jnp.where(parts, A, 0.0), masks)) for X, A in zip(found, matrices, strict=True)]
        found = [X - dot(tile, x, spread(tile, X, masks)) for X, x in zip(found, left, strict=True)]
    return found


def spread(tile: Tile, x, masks: Masks):
    """[C, g C] side by side -> [g C, g C] block diagonal."""
    if tile.group == 1:
        return operand(tile, x)
    return jnp.concatenate([operand(tile, jnp.where(here, x, 0.0)) for here in masks.group], axis=0)
