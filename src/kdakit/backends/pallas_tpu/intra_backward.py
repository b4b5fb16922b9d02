"""Backward of the pair products and of all decays of a chunk.

For A = R C^T with R = r exp(E_r), C = c exp(E_c):  d_r = exp(E_r) (d_A C),  d_c = exp(E_c) (d_A^T R),  d_E_r = R d_R,  d_E_c = C d_C.
Every exponent is a sum of gates, and each gate collects from the sums that it is part of. The shorter way, a reverse cumulative sum of
q d_q - k d_k, is a difference of large numbers where gates are strong.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from kdakit.backends.pallas_tpu.gate import level_decays, member_sums, pieces_of
from kdakit.backends.pallas_tpu.heads import block_diagonal, dot, eight_rows, groups_of, lane_slices, row_slices, side_by_side
from kdakit.backends.pallas_tpu.intra import (
    Masks,
    block,
    column_blocks,
    columns_of,
    even_runs,
    in_turns,
    level_factors,
    odd_runs,
    operand,
    rows_of,
)
from kdakit.backends.pallas_tpu.tile import BLOCK, Tile


class Collected(NamedTuple):
    """Of one head, [C, K]."""

    d_q: Any
    d_k: Any
    d_g: Any


class _Blocks:
    """One head's gradients by block: of q_to, k_to, k_after, k_back [16, K], and of the blocks' sums, as 8 rows to be added up."""

    def __init__(self, tile: Tile):
        self.q_to, self.k_to, self.k_after, self.k_back, self.sums = ([None] * tile.blocks for _ in range(5))

    def add(self, name: str, n: int, x) -> None:
        found = getattr(self, name)
        found[n] = x if found[n] is None else found[n] + x

    def add_sums(self, first: int, last: int, x) -> None:
        """d of the exponent of a decay over blocks first .. last - 1; x: one row for each factor that it is in."""
        if first < last:
            rows = eight_rows(x)
            for n in range(first, last):
                self.add("sums", n, rows)

    def whole(self, name: str):
        found = getattr(self, name)
        like = next(x for x in found if x is not None)
        return jnp.concatenate([jnp.zeros_like(like) if x is None else x for x in found], axis=0)


def pair_products_backward(tile: Tile, heads: list, flows: list, masks: Masks, rows, members, collect) -> list[Collected]:
    """d_q, d_k (without the diagonal of A_qk, if the gate is not bounded) and d_g of each head, from their `Flow`s.

    The diagonal is a pair like others to a bounded gate: what its two exponents collect is one number less itself.

    Levels hold much at a time: with them, 8 heads after the other 8 take 0.98 times the cycles of 16 together.
    """
    some = 8 if tile.levels else len(heads)
    parts = [slice(n, n + some) for n in range(0, len(heads), some)]
    return [x for own in parts for x in _together(tile, heads[own], flows[own], masks, rows, members, collect)]


def _together(tile: Tile, heads: list, flows: list, masks: Masks, rows, members, collect) -> list[Collected]:
    groups, found = groups_of(tile, heads), [_Blocks(tile) for _ in heads]
    d_A = []  # [group] (d_qk, d_kk) [C, g C]
    for own in groups_of(tile, flows):
        both = dot(tile, side_by_side([f.rows for f in own]), block_diagonal([operand(tile, f.v_new) for f in own]), (1, 1))
        seen = masks.lower if tile.bounded else masks.strict, masks.strict
        d_A.append([jnp.where(mask, x, 0.0) for mask, x in zip(seen, row_slices(both, 2), strict=True)])
    for n in range(0 if tile.bounded else 1, tile.blocks):
        for group, own, d in zip(groups, groups_of(tile, found), d_A, strict=True):
            _across(tile, group, own, n, *d)
    for head, flow, d in zip(heads, flows, found, strict=True):
        _to_state(tile, head, flow, d, rows)
    levels = _levels(tile, groups, masks, members, d_A)
    return [_collect(tile, head, d, own, collect) for head, d, own in zip(heads, found, levels, strict=True)]


def _across(tile: Tile, group: list, found: list, n: int, d_qk, d_kk) -> None:
    """Rows of block n against columns of earlier blocks, and of its own if the gate is bounded."""
    d_n = operand(tile, jnp.concatenate([block(d_qk, n), block(d_kk, n)], axis=0))  # [2 * 16, g C]
    columns = [column_blocks(tile, h.x, h.d, n) for h in group]
    d_rows = lane_slices(dot(tile, d_n, block_diagonal([columns_of(tile, x) for x in columns])), tile.group)
    turned = d_n.T  # [g C, 2 * 16]
    for i, (head, d) in enumerate(zip(group, found, strict=True)):
        d.add("q_to", n, d_rows[i][:BLOCK])
        d.add("k_to", n, d_rows[i][BLOCK:])
        start = i * tile.C
        d_columns = dot(tile, turned[start : start + BLOCK * len(columns[i])], rows_of(tile, head.x, n))
        for m, column in enumerate(columns[i]):
            d_column = block(d_columns, m)
            if m == n:
                d.add("k_back", n, d_column)
                continue
            between = head.d.between(m + 1, n)
            d.add("k_after", m, d_column if between is None else d_column * between)
            d.add_sums(m + 1, n, column * d_column)


def _to_state(tile: Tile, head, flow, d: _Blocks, rows) -> None:
    """From the gradients of q_in, k_in, k_end and of the chunk's decay."""
    enter = flow.q_in * flow.d_q_in + flow.k_in * flow.d_k_in
    leave = flow.k_end * flow.d_k_end
    d_q_in, d_k_in = (x if rows.enter is None else jnp.where(rows.enter, x, 0.0) for x in (flow.d_q_in, flow.d_k_in))
    d_k_end = flow.d_k_end if rows.leave is None else jnp.where(rows.leave, flow.d_k_end, 0.0)
    for n in range(tile.blocks):
        before, after = head.d.between(0, n), head.d.between(n + 1, tile.blocks)
        for name, x in (("q_to", d_q_in), ("k_to", d_k_in)):
            d.add(name, n, block(x, n) if before is None else block(x, n) * before)
        d.add("k_after", n, block(d_k_end, n) if after is None else block(d_k_end, n) * after)
        d.add_sums(0, n, block(enter, n))
        d.add_sums(n + 1, tile.blocks, block(leave, n))
    d.add_sums(0, tile.blocks, flow.d_decay)


def _levels(tile: Tile, groups: list[list], masks: Masks, members, d_A: list) -> list[list]:
    """[head][level] (decay, d_q, d_k): what `_level` finds, with its decays [C, K]."""
    found = [[] for group in groups for _ in group]
    if not tile.levels:
        return found
    decays = [level_decays(tile, members, group) for group in groups]
    for n, parts in enumerate(masks.levels):
        for group, own, f, d in zip(groups, groups_of(tile, found), decays, d_A, strict=True):
            here = [x[n] for x in f]
            for level, decay, x in zip(own, here, _level(tile, group, here, n, parts, *d), strict=True):
                level.append((decay, *x))
    return found


def _level(tile: Tile, group: list, decays: list, n: int, parts, d_qk, d_kk) -> list:
    """d of each head's q [R, K] and k [C, K] times their decays at level n; R as in `Level`."""
    half = tile.levels[n] == 8
    taken = [jnp.where(parts, x, 0.0) for x in (d_qk, d_kk)]
    d_A = operand(tile, jnp.concatenate([odd_runs(x) for x in taken] if half else taken, axis=0))  # [2 R, g C]
    factors = [level_factors(tile, h, f, tile.levels[n]) for h, f in zip(group, decays, strict=True)]
    d_rows = lane_slices(dot(tile, d_A, block_diagonal([x.columns for x in factors])), tile.group)
    found = []
    for x, d_row, turned in zip(factors, d_rows, row_slices(d_A.T, tile.group), strict=True):
        (d_q, d_k), d_columns = row_slices(d_row, 2), dot(tile, turned, x.rows)
        found.append((d_q, in_turns(even_runs(d_columns), d_k) if half else d_k + d_columns))
    return found


def _to_and_back(tile: Tile, head, d: _Blocks):
    """d of the sums from the block's start, where a pair's two exponents are one less the other: R d_R - C d_C.

    Gates before both tokens must collect nothing of the pair. So R and C are as rounded for the products: then both terms are sums of
    the same numbers.
    """
    q_to, k_to, k_back = (operand(tile, x).astype(jnp.float32) for x in (head.x.q_to, head.x.k_to, head.x.k_back))
    return q_to * d.whole("q_to") + k_to * d.whole("k_to") - k_back * d.whole("k_back")


def _collect(tile: Tile, head, d: _Blocks, levels: list, collect) -> Collected:
    decay, q, k = head.d, head.q, head.k
    d_q, d_k, after = d.whole("q_to") * decay.to, d.whole("k_to") * decay.to, d.whole("k_after") * decay.after
    d_to, d_after = q * d_q + k * d_k, k * after
    d_k = d_k + after
    if tile.bounded:
        d_to, d_k = _to_and_back(tile, head, d), d_k + d.whole("k_back") * decay.back
    exponents = []
    for run, (factor, d_q_level, d_k_level) in zip(tile.levels, levels, strict=True):
        d_k_level = d_k_level * factor
        d_k, exponent = d_k + d_k_level, k * d_k_level
        if run == 8:
            d_q_level = d_q_level * odd_runs(factor)
            d_q, exponent = (in_turns(even_runs(x), odd_runs(x) + y) for x, y in ((d_q, d_q_level), (exponent, odd_runs(q) * d_q_level)))
        else:
            d_q_level = d_q_level * factor
            d_q, exponent = d_q + d_q_level, exponent + q * d_q_level
        exponents.append(exponent)
    summed = exponents[: len(tile.summed_levels)]
    d_g = member_sums(collect, pieces_of(jnp.concatenate([d_to, d_after, *summed], axis=0), tile.pieces))
    sums = [jnp.sum(x, axis=0, keepdims=True) for x in d.sums]
    d_g = d_g + jnp.concatenate([jnp.broadcast_to(row, (BLOCK, row.shape[1])) for row in sums], axis=0)
    if tile.levels:
        odd = lax.broadcasted_iota(jnp.int32, d_g.shape, 0) & 1 == 1
        d_g = d_g + jnp.where(odd, exponents[-1], 0.0)
    return Collected(d_q, d_k, d_g)
