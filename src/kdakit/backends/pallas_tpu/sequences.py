"""Where sequences begin and end, for the kernels; shapes depend on sizes only, never on the values of cu_seqlens.

Two ways, neither of which moves a token, serve all kernels:
- segments: a chunk may hold any number of segments, told apart by masks; one state passes through. For segment_ids, and for packed calls
  whose sequences neither bring nor leave a state.
- tables: a chunk is visited once for each sequence in it, and each visit sees its own tokens only. For packed calls with states in
  training. Where the state before each of a sequence's own chunks is asked for, visits begin there too.
A packed forward with states, where nobody asks for those between, has a way of its own (`packed`), which needs to know a chunk's sequences.

Tokens past the last sequence are nobody's: what they give is zero, and where a step has no others it does nothing else. Every way takes
its table from `offsets`, so that no table, whatever it holds, makes a kernel look outside its arrays.

Searches compare all with all: a binary search would be a loop of gathers, dearer on a TPU than some thousand comparisons.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kdakit.backends.pallas_tpu.tile import Tile
from kdakit.problem import Problem


class Table(NamedTuple):
    """[steps] int32 each: the visits in order, of whole chunks or parts of them; steps that are left over see no token."""

    block: Any  # the chunk
    low: Any  # its tokens low .. high - 1
    high: Any
    sequence: Any
    first: Any  # 1 if the sequence begins here
    last: Any
    real: Any  # 0 where the tokens are nobody's, or there are none; the sequence is then one before, whose states stay where they are


class Chunks(NamedTuple):
    """int32: which sequences a chunk holds. One without tokens lies in the chunk of the token that follows, or in the last."""

    starts: Any  # [N + 2]: cu_seqlens and T, as if the tokens that are nobody's were one more sequence
    first: Any  # [chunks + 1]: a chunk's first sequence; N + 1 at last


def offsets(cu_seqlens, T: int):
    """cu_seqlens [N + 1] as int32 that begins with 0, never falls and ends at most at T; as it is, where it keeps that rule."""
    return lax.cummax(jnp.clip(cu_seqlens, 0, T).astype(jnp.int32).at[0].set(0))


def visits(T: int, C: int, edges: int) -> int:
    """The most that `edges` places, of which one is the first token, can cut T tokens in blocks of C into."""
    return -(-T // C) + edges - 1


def make_table(cu_seqlens, T: int, C: int, edges=None) -> Table:
    """`cu_seqlens` from `offsets`. `edges`: where visits must begin, the sequences' starts among them; those if None. T where there is
    nothing to begin."""
    cu, N = cu_seqlens, cu_seqlens.shape[0] - 1
    edges = jnp.concatenate([cu[:-1] if edges is None else edges, cu[-1:]])
    starts = jnp.sort(jnp.concatenate([jnp.arange(-(-T // C), dtype=jnp.int32) * C, edges]))
    again = jnp.concatenate([jnp.zeros(1, bool), starts[1:] == starts[:-1]])
    starts = jnp.sort(jnp.where(again, T, starts))[: visits(T, C, edges.shape[0])]
    ends = jnp.concatenate([starts[1:], jnp.full(1, T, jnp.int32)])
    used = starts < T
    block = jnp.where(used, starts, T - 1) // C
    token = jnp.maximum(jnp.minimum(starts, cu[-1] - 1), 0)  # one that a sequence has, if any has one
    sequence = jnp.minimum(jnp.searchsorted(cu[1:], token, side="right", method="compare_all"), N - 1).astype(jnp.int32)
    real, empty = starts < cu[-1], (cu[-1] == 0) & (starts == 0)  # without any token the last sequence passes through the first visit
    number = lambda x: (used & (real & x | empty)).astype(jnp.int32)
    low, high = (jnp.where(used, x - block * C, 0) for x in (starts, ends))
    first, last = number(starts == cu[sequence]), number(ends == cu[sequence + 1])
    return Table(block, low, high, sequence, first, last, (used & real).astype(jnp.int32))


def make_chunks(cu_seqlens, T: int, C: int) -> Chunks:
    cu, chunks = jnp.concatenate([cu_seqlens, jnp.full(1, T, jnp.int32)]), -(-T // C)
    chunk = lax.broadcasted_iota(jnp.int32, (chunks + 1, cu.shape[0] - 1), 0)
    over = (cu[:-1] < chunk * C) & (cu[1:] <= chunk * C) | (chunk == chunks)
    return Chunks(cu, jnp.sum(over, 1, dtype=jnp.int32))


def chunk_starts(problem: Problem, cu_seqlens):
    """[problem.chunks] int32: the first token of each sequence's chunks, one sequence after the other; T where there are no more."""
    cu, size = cu_seqlens, problem.options.chunk_size
    counts = -(-jnp.diff(cu) // size)
    ends = jnp.cumsum(counts)
    slot = jnp.arange(problem.chunks, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(ends, slot, side="right", method="compare_all"), problem.N - 1)
    return jnp.where(slot < ends[-1], cu[sequence] + size * (slot - (ends - counts)[sequence]), problem.T)


def states_of_chunks(problem: Problem, table: Table, cu_seqlens, C: int, states):
    """[1, visits, ..] states before each visit -> [1, problem.chunks, ..] before each sequence's chunks; 0 where there are no more."""
    starts = chunk_starts(problem, cu_seqlens)
    began = jnp.where(table.high > table.low, table.block * C + table.low, problem.T)
    found = states[:, jnp.searchsorted(began, starts, method="compare_all")]
    return jnp.where((starts < problem.T).reshape(-1, *[1] * (states.ndim - 2)), found, 0)


def segment_rows(ids, C: int, end=None):
    """ids [B, T] -> [B, chunks, 2, C] float32: each token's segment, counted from the chunk's first token's; and 1 if that starts one.

    A row's first token starts none: the initial state enters there. Tokens from `end` on are nobody's: -1.
    """
    B, T = ids.shape
    changes = jnp.pad((ids[:, 1:] != ids[:, :-1]).astype(jnp.int32), ((0, 0), (1, 0)))
    count = jnp.pad(jnp.cumsum(changes, 1), ((0, 0), (0, -T % C)), mode="edge").reshape(B, -1, C)
    fresh = jnp.pad(changes, ((0, 0), (0, -T % C))).reshape(B, -1, C)[:, :, :1]
    number = count - count[:, :, :1]
    if end is not None:
        token = lax.broadcasted_iota(jnp.int32, number.shape, 1) * C + lax.broadcasted_iota(jnp.int32, number.shape, 2)
        number = jnp.where(token < end, number, -1)
    return jnp.stack([number, jnp.broadcast_to(fresh, number.shape)], 2).astype(jnp.float32)


def packed_ids(cu_seqlens, T: int):
    """[1, T]: each token's sequence."""
    return jnp.searchsorted(cu_seqlens[1:], jnp.arange(T, dtype=cu_seqlens.dtype), side="right", method="compare_all")[None]


def own_tokens(tile: Tile, T: int, table: Table | None, step):
    """In a kernel, [C, 1]: which tokens of its chunk a step works on; None: all."""
    token = lax.broadcasted_iota(jnp.int32, (tile.C, 1), 0)
    if table is not None:
        return (token >= table.low[step]) & (token < table.high[step])
    return token + step * tile.C < T if tile.ragged else None


def where_tokens(table: Table | None, step, work, otherwise) -> None:
    """In a kernel: `work` if the step has tokens of a sequence, else `otherwise`."""
    if table is None:
        work()
        return
    pl.when(table.real[step] == 1)(work)
    pl.when(table.real[step] == 0)(otherwise)
