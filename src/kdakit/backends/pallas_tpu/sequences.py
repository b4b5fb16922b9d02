"""Where sequences begin and end, for the kernels; shapes depend on sizes only, never on the values of cu_seqlens.

Two ways, neither of which moves a token, serve all kernels:
- segments: a chunk may hold any number of segments, told apart by masks; one state passes through. For segment_ids, and for packed calls
  whose sequences neither bring nor leave a state.
- tables: a chunk is visited once for each sequence in it, and each visit sees its own tokens only. For packed calls with states in
  training. Where the state before each of a sequence's own chunks is asked for, visits begin there too.
A packed forward with states, where nobody asks for those between, has a way of its own (`packed`), which needs to know a chunk's sequences.

Searches compare all with all: a binary search would be a loop of gathers, dearer on a TPU than some thousand comparisons.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

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


class Chunks(NamedTuple):
    """int32: which sequences a chunk holds. One without tokens lies in the chunk of the token that follows, or in the last."""

    starts: Any  # [N + 1]: cu_seqlens
    first: Any  # [chunks + 1]: a chunk's first sequence; N at last


def visits(T: int, C: int, edges: int) -> int:
    """The most that `edges` places, of which one is the first token, can cut T tokens in blocks of C into."""
    return -(-T // C) + edges - 1


def make_table(cu_seqlens, T: int, C: int, edges=None) -> Table:
    """`edges`: where visits must begin, the sequences' starts among them; those if None. T where there is nothing to begin."""
    cu = cu_seqlens.astype(jnp.int32)
    edges = cu[:-1] if edges is None else edges
    starts = jnp.sort(jnp.concatenate([jnp.arange(-(-T // C), dtype=jnp.int32) * C, edges]))
    again = jnp.concatenate([jnp.zeros(1, bool), starts[1:] == starts[:-1]])
    starts = jnp.sort(jnp.where(again, T, starts))[: visits(T, C, edges.shape[0])]
    ends = jnp.concatenate([starts[1:], jnp.full(1, T, jnp.int32)])
    used = starts < T
    block = jnp.where(used, starts, T - 1) // C
    sequence = jnp.searchsorted(cu[1:], jnp.minimum(starts, T - 1), side="right", method="compare_all").astype(jnp.int32)
    number = lambda x: (used & x).astype(jnp.int32)
    low, high = (jnp.where(used, x - block * C, 0) for x in (starts, ends))
    return Table(block, low, high, sequence, number(starts == cu[sequence]), number(ends == cu[sequence + 1]))


def make_chunks(cu_seqlens, T: int, C: int) -> Chunks:
    cu, chunks = cu_seqlens.astype(jnp.int32), -(-T // C)
    chunk = lax.broadcasted_iota(jnp.int32, (chunks + 1, cu.shape[0] - 1), 0)
    over = (cu[:-1] < chunk * C) & (cu[1:] <= chunk * C) | (chunk == chunks)
    return Chunks(cu, jnp.sum(over, 1, dtype=jnp.int32))


def chunk_starts(problem: Problem, cu_seqlens):
    """[problem.chunks] int32: the first token of each sequence's chunks, one sequence after the other; T where there are no more."""
    cu, size = cu_seqlens.astype(jnp.int32), problem.options.chunk_size
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


def segment_rows(ids, C: int):
    """ids [B, T] -> [B, chunks, 2, C] float32: each token's segment, counted from the chunk's first token's; and 1 if that starts one.

    A row's first token starts none: the initial state enters there.
    """
    B, T = ids.shape
    changes = jnp.pad((ids[:, 1:] != ids[:, :-1]).astype(jnp.int32), ((0, 0), (1, 0)))
    count = jnp.pad(jnp.cumsum(changes, 1), ((0, 0), (0, -T % C)), mode="edge").reshape(B, -1, C)
    fresh = jnp.pad(changes, ((0, 0), (0, -T % C))).reshape(B, -1, C)[:, :, :1]
    return jnp.stack([count - count[:, :, :1], jnp.broadcast_to(fresh, count.shape)], 2).astype(jnp.float32)


def packed_ids(cu_seqlens, T: int):
    """[1, T]: each token's sequence."""
    return jnp.searchsorted(cu_seqlens[1:], jnp.arange(T, dtype=cu_seqlens.dtype), side="right", method="compare_all")[None]


def own_tokens(tile: Tile, T: int, table: Table | None, step):
    """In a kernel, [C, 1]: which tokens of its chunk a step works on; None: all."""
    token = lax.broadcasted_iota(jnp.int32, (tile.C, 1), 0)
    if table is not None:
        return (token >= table.low[step]) & (token < table.high[step])
    return token + step * tile.C < T if tile.ragged else None
