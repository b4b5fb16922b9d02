"""Stage intra: what of a chunk needs no state. Heads of a group (see `Tile.group`) share [C, g C] matrices, side by side.

A_qk[i,j] = sum_d q[i,d] k[j,d] exp(g[j+1,d] + .. + g[i,d])           j <= i   (q is scaled)
P[i,j]    = sum_d k[i,d] k[j,d] exp(g[j+1,d] + .. + g[i,d])           j <  i
inverse   = (I + A_kk)^-1,   A_kk[i,j] = beta_i P[i,j]

Each pair of tokens is referred to a point between them: tokens of different blocks of 16 to the start of the later one's, tokens of one
block to the boundary at which they part. With a bounded gate and bfloat16 operands the start of the block serves for those too; with
other gates and such operands, in runs of 8, their middle (`centred_decays`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from kdakit.backends.pallas_tpu.gate import Decays, centred_decays, level_decays
from kdakit.backends.pallas_tpu.heads import dot, row_slices, row_sums, side_by_side
from kdakit.backends.pallas_tpu.tile import BLOCK, Tile


class Masks(NamedTuple):
    """Of [C, g C]: which pairs of tokens (i, j) take part."""

    lower: Any  # j <= i
    strict: Any  # j < i
    diagonal: Any
    levels: tuple  # i and j part at this run length of `tile.levels`
    run: Any  # both in one run of 8
    inverse: tuple  # they part, at runs of 1, 2, .. C / 2 tokens
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
    return Masks(lower, strict, i == j, tuple(levels), (i ^ j) & -8 == 0, tuple(parts(s) for s in runs), heads)


class Factors(NamedTuple):
    """Of one head, [C, K]: rows and columns of products, times their decays."""

    q_to: Any
    k_to: Any
    k_after: Any
    k_back: Any  # if the gate is bounded


class Level(NamedTuple):
    """Of one head, at a run length: [2 R, K] the q and then the k of rows, [C, K] the k of columns, in the operands' dtype."""

    rows: Any
    columns: Any


def factors(q, k, d: Decays) -> Factors:
    back = None if d.back is None else k * d.back
    return Factors(q * d.to, k * d.to, k * d.after, back)


def level_factors(tile: Tile, head, decay, run: int) -> Level:
    """Rows come in tiles of 8: at that level even runs, in which no pair has its row, are left out, and R = C / 2; else R = C."""
    q, k = head.q * decay, head.k * decay
    rows = [odd_runs(x) if run == 8 else x for x in (q, k)]
    return Level(operand(tile, jnp.concatenate(rows, axis=0)), operand(tile, k))


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


def pair_products(tile: Tile, groups: list[list], masks: Masks, members) -> list:
    """(A_qk, P) [C, g C] of each group of heads."""
    zero = jnp.zeros((BLOCK, tile.group * tile.C), jnp.float32)
    found = [([], []) for _ in groups]  # blocks of rows of A_qk and P
    for n in range(tile.blocks):
        for group, (A_qk, P) in zip(groups, found, strict=True):
            both = _across(tile, group, masks, n) if n or tile.bounded else jnp.concatenate([zero, zero], axis=0)
            A_qk.append(both[:BLOCK])
            P.append(both[BLOCK:])
    found = [(jnp.concatenate(A_qk, axis=0), jnp.concatenate(P, axis=0)) for A_qk, P in found]
    if tile.levels:
        found = _add_levels(tile, groups, masks, members, found)
    if tile.bounded or tile.segments:  # else everything else is zero already
        found = [(jnp.where(masks.lower, A_qk, 0.0), jnp.where(masks.strict, P, 0.0)) for A_qk, P in found]
    return found


def _add_levels(tile: Tile, groups: list[list], masks: Masks, members, found: list) -> list:
    """Pairs of one block, level by level, and the diagonal of A_qk; or those inside runs of 8 at once, the diagonal too."""
    decays = [level_decays(tile, members, group) for group in groups]
    for n, parts in enumerate(masks.levels):
        for m, (group, d) in enumerate(zip(groups, decays, strict=True)):
            here = [x[n] for x in d]
            level = _neighbours(masks, group, here) if tile.levels[n] == 1 else _level(tile, group, masks, here, n)
            found[m] = [jnp.where(parts, new, x) for new, x in zip(level, found[m], strict=True)]
    if tile.centred:
        own = masks.run & masks.lower, masks.run & masks.strict
        around = [centred_decays(tile, members, group) for group in groups]
        inside = [_inside_runs(tile, group, masks, d) for group, d in zip(groups, around, strict=True)]
        return [tuple(jnp.where(m, new, x) for m, new, x in zip(own, a, b, strict=True)) for a, b in zip(inside, found, strict=True)]
    diagonals = [over_lanes(masks, [row_sums(h.q * h.k) for h in group]) for group in groups]
    return [(jnp.where(masks.diagonal, x, A_qk), P) for x, (A_qk, P) in zip(diagonals, found, strict=True)]


def _across(tile: Tile, group: list, masks: Masks, n: int):
    """[2 * 16, g C]: the q and then the k rows of block n against all columns that it sees.

    Columns of all heads of the group are one operand [g C, K], and so are rows: what a head's rows find in another's columns is left out
    of the result. Zeros beside them, as `block_diagonal` has them, would have to be loaded into the matrix unit, which takes it longer.
    """
    rows = jnp.concatenate([rows_of(tile, h.x, n) for h in group], axis=0)
    columns = jnp.concatenate([columns_of(tile, column_blocks(tile, h.x, h.d, n)) for h in group], axis=0)
    found = row_slices(dot(tile, rows, columns, (1, 1)), len(group))
    return over_lanes(masks, found)


def _level(tile: Tile, group: list, masks: Masks, decays: list, n: int) -> list:
    """q and k rows against k columns [C, g C] at level n, where only pairs that part there are right; heads as in `_across`."""
    levels = [level_factors(tile, h, d, tile.levels[n]) for h, d in zip(group, decays, strict=True)]
    rows, columns = (jnp.concatenate(x, axis=0) for x in zip(*levels, strict=True))
    found = [row_slices(x, 2) for x in row_slices(dot(tile, rows, columns, (1, 1)), len(group))]
    both = [over_lanes(masks, list(x)) for x in zip(*found, strict=True)]
    return [in_turns(jnp.zeros_like(x), x) if tile.levels[n] == 8 else x for x in both]


def _inside_runs(tile: Tile, group: list, masks: Masks, decays: list) -> list:
    """q and k rows against k columns [C, g C], where only pairs inside runs of 8, the row not before the column, are right."""
    rows, columns = [], []
    for h, (to, back) in zip(group, decays, strict=True):
        rows += [operand(tile, h.q * to), operand(tile, h.k * to)]
        columns.append(operand(tile, h.k * back))
    found = [row_slices(x, 2) for x in row_slices(dot(tile, jnp.concatenate(rows), jnp.concatenate(columns), (1, 1)), len(group))]
    return [over_lanes(masks, list(x)) for x in zip(*found, strict=True)]


def _neighbours(masks: Masks, group: list, decays: list) -> list:
    """The same at level 1, where a row has one pair: a sum of products is less work than a product of matrices."""
    found = []
    for h, d in zip(group, decays, strict=True):
        before = d * previous(h.k)
        found.append((row_sums(h.q * before), row_sums(h.k * before)))
    return [over_lanes(masks, list(x)) for x in zip(*found, strict=True)]


def previous(x):
    """[C, K]: in odd rows the row before."""
    C, K = x.shape
    return pltpu.roll(x.reshape(C // 8, 8, K), 1, axis=1).reshape(C, K)


def odd_runs(x):
    """[C, ..] -> [C / 2, ..]: of 16 rows the second 8."""
    return jnp.concatenate([x[n : n + 8] for n in range(8, x.shape[0], 16)], axis=0)


def even_runs(x):
    """[C, ..] -> [C / 2, ..]: of 16 rows the first 8."""
    return jnp.concatenate([x[n : n + 8] for n in range(0, x.shape[0], 16)], axis=0)


def in_turns(even, odd):
    """Two [C / 2, ..] -> [C, ..], 8 rows of one and 8 of the other."""
    return jnp.concatenate([y for n in range(0, even.shape[0], 8) for y in (even[n : n + 8], odd[n : n + 8])], axis=0)


def over_lanes(masks: Masks, columns: list):
    """g x [R, 1] or [R, g C] -> [R, g C], or something that broadcasts to it: of each head what is in its lanes."""
    out = columns[0]
    for here, x in zip(masks.group[1:], columns[1:], strict=True):
        out = jnp.where(here[: x.shape[0]], x, out)
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
