"""From tokens to chunks and back, with shapes that depend on sizes only, never on the values of cu_seqlens.

Chunked arrays are [NT, B, HV, C, ..]: the scan over the state walks the first axis, everything else is a batch. Batch and heads stay axes of
their own, so that sharding either of them survives. Tokens that fill up a chunk are zero in q, k, v, beta and the log-decay: they write
nothing, forget nothing, and nobody reads what they output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from kdakit.problem import Problem

BLOCK = 16  # tokens per block inside a chunk; every chunk size is a multiple


@dataclass(frozen=True)
class Plan:
    """Which token sits where. The index arrays exist with cu_seqlens only."""

    C: int  # tokens per chunk
    NT: int  # chunk slots per row; with cu_seqlens an upper bound
    T: int
    source: Any = None  # [NT, C]  token of each place in a chunk
    valid: Any = None  # [NT, C]  False where the place is filled up with zeros
    place: Any = None  # [T]      slot * C + position of each token
    sequence: Any = None  # [NT]     sequence of each slot, N for unused slots


def make_plan(problem: Problem, cu_seqlens=None) -> Plan:
    """A chunk no larger than T needs, but for the block size; slots as `Problem.chunks` counts them."""
    T = problem.T
    C = min(problem.options.chunk_size, max(BLOCK, 1 << max(T - 1, 0).bit_length()))
    if cu_seqlens is None:
        return Plan(C, problem.chunks, T)
    NT = problem.chunks
    counts = -(-jnp.diff(cu_seqlens) // C)  # [N]  chunks of each sequence
    ends = jnp.cumsum(counts)
    slots = jnp.arange(NT, dtype=cu_seqlens.dtype)
    sequence = jnp.searchsorted(ends, slots, side="right")  # [NT]
    real = jnp.minimum(sequence, problem.N - 1)  # unused slots look at the last sequence, and find no token there
    start = cu_seqlens[real] + C * (slots - (ends - counts)[real])
    source = start[:, None] + jnp.arange(C, dtype=start.dtype)
    tokens = jnp.arange(T, dtype=cu_seqlens.dtype)
    owner = jnp.searchsorted(cu_seqlens[1:], tokens, side="right")  # [T]
    within = tokens - cu_seqlens[owner]
    place = ((ends - counts)[owner] + within // C) * C + within % C
    return Plan(C, NT, T, source, (source < cu_seqlens[real + 1][:, None]) & (sequence < problem.N)[:, None], place, sequence)


def to_chunks(plan: Plan, x):
    """[B, T, HV, ..] -> [NT, B, HV, C, ..]."""
    B, T, HV, *rest = x.shape
    C, NT = plan.C, plan.NT
    if plan.source is None:
        x = jnp.pad(x, [(0, 0), (0, NT * C - T)] + [(0, 0)] * (1 + len(rest)))
        x = x.reshape(B, NT, C, HV, *rest)
        return jnp.moveaxis(x, (1, 3), (0, 2))
    if T == 0:
        return jnp.zeros((NT, B, HV, C, *rest), x.dtype)
    x = x.take(plan.source, axis=1, mode="clip")  # [B, NT, C, HV, ..]
    x = jnp.where(plan.valid.reshape(1, NT, C, *(1,) * (1 + len(rest))), x, 0)
    return jnp.moveaxis(x, (1, 3), (0, 2))


def from_chunks(plan: Plan, x):
    """[NT, B, HV, C, ..] -> [B, T, HV, ..]."""
    NT, B, HV, C, *rest = x.shape
    x = jnp.moveaxis(x, (0, 2), (1, 3)).reshape(B, NT * C, HV, *rest)
    if plan.place is None or plan.T == 0:
        return x[:, : plan.T]
    return x.take(plan.place, axis=1, mode="clip")
