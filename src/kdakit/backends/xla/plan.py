"""From tokens to chunks and back, with shapes that depend on sizes only, never on the values of cu_seqlens.

A call walks over windows of G chunks, so that what a window computes stays in cache and no array but inputs and results is as long as T.
Chunked arrays of a window are [G, B, HV, C, ..]: the scan over the state walks the first axis, everything else is a batch. Batch and heads
stay axes of their own, so that sharding either of them survives. Tokens that fill up a chunk are zero in all inputs, in beta and in the
log-decay: they write nothing, forget nothing, and nobody reads what they output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from kdakit.chunked import as_chunked
from kdakit.problem import Arrays, Problem

BLOCK = 16  # places per block inside a chunk; every chunk has a multiple


@dataclass(frozen=True)
class Config:
    window: int  # chunks per window, at most


@dataclass(frozen=True)
class Plan:
    """Which token sits where. The arrays exist with cu_seqlens and for chunks of less than a block; slots with cu_seqlens only."""

    T: int
    C: int  # places per chunk
    G: int  # chunks per window
    windows: int
    source: Any = None  # [windows, G * C]  token of each place
    valid: Any = None  # [windows, G * C]  False where the place is filled up
    place: Any = None  # [T]  place of each token, counted over all windows
    real: Any = None  # [T]  False for tokens past the last sequence
    slots: Any = None  # Slots of [windows, G]


@dataclass(frozen=True)
class Slots:
    """The chunk slots of a packed call."""

    sequence: Any  # the slot's sequence; N in unused slots
    first: Any  # whether it is its sequence's first slot (true in unused slots)
    last: Any


def default_config(problem: Problem, device: Any) -> Config:
    """Windows whose arrays are about an eighth of a megabyte on a CPU, where what a window computes should stay in a core's second-level
    cache: often a single chunk. Wide ones on accelerators."""
    elements = problem.B * problem.HV * max(BLOCK, as_chunked(problem).options.chunk_size) * max(problem.K, problem.V, 1)
    budget, least = (1 << 15, 1) if "cpu" in str(device).lower() else (1 << 24, 4)
    return Config(window=max(least, budget // max(elements, 1)))


def make_plan(problem: Problem, config: Config, cu_seqlens=None) -> Plan:
    """A chunk no larger than T needs; of less than a block's tokens it has a block's places, of which the others stay empty. Slots as
    `Problem.chunks` counts them, made up to whole windows."""
    T, N = problem.T, problem.N
    size = min(problem.options.chunk_size, max(BLOCK, 1 << max(T - 1, 0).bit_length()))  # tokens of a chunk
    C = max(size, BLOCK)
    windows = max(1, -(-problem.chunks // config.window))
    G = max(1, -(-problem.chunks // windows))
    rows = lambda x: x.reshape(windows, -1)
    if cu_seqlens is None:
        if size == C:
            return Plan(T, C, G, windows)
        slot, tokens = jnp.arange(windows * G), jnp.arange(T)
        source, valid = _places(size * slot, jnp.minimum(size * (slot + 1), T), C)
        return Plan(T, C, G, windows, rows(source), rows(valid), tokens // size * C + tokens % size, tokens < T)
    counts = -(-jnp.diff(cu_seqlens) // size)  # [N]  chunks of each sequence
    ends = jnp.cumsum(counts)
    slot = jnp.arange(windows * G, dtype=cu_seqlens.dtype)
    sequence = edges_passed(ends, windows * G)
    real, used = jnp.minimum(sequence, N - 1), sequence < N
    within = slot - (ends - counts)[real]  # the slot's number in its sequence
    first = cu_seqlens[real] + size * within
    source, valid = _places(first, jnp.where(used, jnp.minimum(first + size, cu_seqlens[real + 1]), 0), C)
    tokens = jnp.arange(T, dtype=cu_seqlens.dtype)
    owner = edges_passed(cu_seqlens[1:], T)
    position = tokens - cu_seqlens[owner]
    place = ((ends - counts)[owner] + position // size) * C + position % size
    slots = Slots(rows(sequence), rows(~used | (within == 0)), rows(~used | (within == counts[real] - 1)))
    return Plan(T, C, G, windows, rows(source), rows(valid), place, tokens < cu_seqlens[-1], slots)


def _places(first, end, C: int):
    """Chunks of the tokens from `first` to `end`: the token of each of C places, and whether there is one."""
    source = first[:, None] + jnp.arange(C, dtype=first.dtype)
    return source, source < end[:, None]


def edges_passed(edges, size: int):
    """[size]: how many of the ascending `edges` are <= 0, 1, .. size - 1, so in which sequence each place lies."""
    # Not searchsorted, which jax 0.10 cannot trace where some mesh axes are manual and others are not.
    marks = jnp.zeros_like(edges, shape=size + 1).at[jnp.minimum(edges, size)].add(1)
    return jnp.cumsum(marks)[:size]


def pad_tokens(plan: Plan, x):
    """[B, T, ..] -> [B, windows * G * C, ..]. A packed call gathers, and needs only that there be a token to look at."""
    missing = plan.windows * plan.G * plan.C - plan.T if plan.source is None else int(plan.T == 0)
    return x if x is None or missing == 0 else jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))


def window_tokens(plan: Plan, x, index):
    """The tokens [B, G * C, ..] of window `index`, zeros where a chunk is filled up; x comes from `pad_tokens`."""
    if x is None:
        return None
    if plan.source is None:
        return lax.dynamic_slice_in_dim(x, index * plan.G * plan.C, plan.G * plan.C, axis=1)
    tokens = x.take(plan.source[index], axis=1, mode="clip")
    return jnp.where(plan.valid[index].reshape(1, -1, *(1,) * (x.ndim - 2)), tokens, jnp.zeros((), x.dtype))


def window_valid(plan: Plan, index):
    """[G * C]: False where a chunk is filled up; None if none is."""
    if plan.source is not None:
        return plan.valid[index]
    size = plan.G * plan.C
    return None if plan.windows * size == plan.T else index * size + jnp.arange(size) < plan.T


def window_slots(plan: Plan, index) -> Slots | None:
    """The [G] slots of a window of a packed call."""
    s = plan.slots
    return None if s is None else Slots(s.sequence[index], s.first[index], s.last[index])


def join_windows(plan: Plan, x):
    """[windows, B, G * C, ..] -> [B, T, ..]."""
    if x is None:
        return None
    x = jnp.moveaxis(x, 0, 1)
    x = x.reshape(x.shape[0], plan.windows * plan.G * plan.C, *x.shape[3:])
    if plan.place is None:
        return x[:, : plan.T]
    return jnp.where(plan.real.reshape(1, -1, *(1,) * (x.ndim - 2)), x.take(plan.place, axis=1, mode="clip"), 0)


def to_chunks(plan: Plan, x):
    """[B, G * C, HV, ..] -> [G, B, HV, C, ..]."""
    x = x.reshape(x.shape[0], plan.G, plan.C, *x.shape[2:])
    return jnp.moveaxis(x, (1, 3), (0, 2))


def from_chunks(plan: Plan, x):
    """[G, B, HV, C, ..] -> [B, G * C, HV, ..]."""
    x = jnp.moveaxis(x, (0, 2), (1, 3))
    return x.reshape(x.shape[0], plan.G * plan.C, *x.shape[3:])


TOKEN_ARRAYS = ("q", "k", "v", "g", "beta")


def window_arrays(plan: Plan, arrays: Arrays, index) -> Arrays:
    """The call's arrays with those of tokens cut down to one window."""
    return arrays._replace(**{name: window_tokens(plan, getattr(arrays, name), index) for name in TOKEN_ARRAYS})
