"""The forward of packed sequences with states of their own, in one kernel: a step is a chunk, whatever sequences it holds.

A chunk inside one sequence takes the step of a fixed length. Where sequences begin or end, decays, pair products and inverse are found
once, sequences told apart by masks, and put down in VMEM. Two sequences, as most such chunks hold, then read and update their states
together; if there are more or fewer, or one has no tokens, each pays the chunk a visit of its own. States stay in HBM. The kernel copies an
initial one while the chunk's products are found, and a final one while the next chunks are at work. Tokens behind the last sequence are as
one more sequence, which has no states and outputs zeros.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdakit.backends.pallas_tpu.fused import (
    Inputs,
    Matrices,
    Outputs,
    Rows,
    activate,
    apply_matrices,
    chunk_step,
    group_matrices,
    state_block,
)
from kdakit.backends.pallas_tpu.gate import Decays, activate_beta
from kdakit.backends.pallas_tpu.heads import groups_of, read_heads, write_heads, write_zeros
from kdakit.backends.pallas_tpu.intra import Factors, make_masks
from kdakit.backends.pallas_tpu.sequences import Chunks
from kdakit.backends.pallas_tpu.state import from_start, next_state, read_state, to_end
from kdakit.backends.pallas_tpu.tile import BLOCK, Tile

LARGE = 2**20  # bytes


class Scratch(NamedTuple):
    state: Any  # [heads, V, K]
    factors: Any  # [4, heads, C, K]: decays to the tokens, q_to, k_to, k_after; from and to the edges of block and sequence
    blocks: Any  # [2, heads, blocks, K]: decay over each block's last sequence in it, and over its first
    matrices: Any  # [2, groups, C, g C]: A_qk, inverse
    arriving: Any  # [2, heads, .., ..]: initial states, in turns; [1, ..] if they are large
    leaving: Any  # [heads, .., ..]: a final state
    arrived: Any  # semaphores
    left: Any
    pending: Any  # [1] in SMEM: 1 while a final state is being copied


def scratch_shapes(tile: Tile) -> Scratch:
    state = (tile.heads, tile.V, tile.K)
    outside = state if tile.state_v_first else (tile.heads, tile.K, tile.V)
    slots = 2 if 4 * tile.heads * tile.V * tile.K <= LARGE else 1
    return Scratch(
        pltpu.VMEM(state, jnp.float32), pltpu.VMEM((4, tile.heads, tile.C, tile.K), jnp.float32),
        pltpu.VMEM((2, tile.heads, tile.blocks, tile.K), jnp.float32),
        pltpu.VMEM((2, tile.heads // tile.group, tile.C, tile.group * tile.C), jnp.dtype(tile.operand)),
        pltpu.VMEM((slots, *outside), jnp.float32), pltpu.VMEM(outside, jnp.float32),
        pltpu.SemaphoreType.DMA((slots,)), pltpu.SemaphoreType.DMA(()), pltpu.SMEM((1,), jnp.int32),
    )  # fmt: skip


class Step(NamedTuple):
    """What a step is about: sequences begin .. end - 1 have tokens in the chunk, or lie in it with none."""

    tile: Tile
    inputs: Inputs
    out: Outputs
    kept: Scratch
    starts: Any  # [N + 2]
    block: Any  # of heads
    token: Any  # the chunk's first
    begin: Any
    end: Any

    def edges(self, sequence):
        """The chunk's tokens low .. high - 1 are the sequence's."""
        low, high = self.starts[sequence] - self.token, self.starts[sequence + 1] - self.token
        return jnp.maximum(low, 0), jnp.minimum(high, self.tile.C)

    def begins(self, sequence):
        return self.starts[sequence] >= self.token

    def ends(self, sequence):
        return self.starts[sequence + 1] <= self.token + self.tile.C

    def real(self, sequence):
        """Whether it is one, and not the tokens that are nobody's."""
        return sequence < self.starts.shape[0] - 2

    def slot(self, sequence):
        """The one that the last sequence but one has left; or the last, if there is but one."""
        return lax.rem(sequence, self.slots)

    @property
    def slots(self) -> int:
        return self.kept.arriving.shape[0]

    def arrival(self, sequence):
        """The copy of a sequence's initial state."""
        slot = self.slot(sequence)
        return pltpu.make_async_copy(self._own(self.inputs.initial, sequence), self.kept.arriving.at[slot], self.kept.arrived.at[slot])

    def departure(self, sequence):
        """The copy of a sequence's final state."""
        return pltpu.make_async_copy(self.kept.leaving, self._own(self.out.final, sequence), self.kept.left)

    def _own(self, states, sequence):
        return states.at[sequence, pl.ds(self.block * self.tile.heads, self.tile.heads)]

    def call(self, sequence, condition) -> None:
        """Begin to copy its initial state."""
        if self.inputs.initial is not None:
            pl.when(condition & self.real(sequence))(lambda: self.arrival(sequence).start())

    @property
    def two(self):
        """Whether two sequences share all of the chunk's tokens: the first ends here, the second begins."""
        cut, end = self.starts[self.begin + 1], self.starts[jnp.minimum(self.begin + 2, self.starts.shape[0] - 1)]
        return (self.end - self.begin == 2) & self.real(self.begin + 1) & (cut > self.token) & (end > cut)

    def leave(self, condition) -> None:
        """Wait for the final state that is being copied, if there is one."""
        pl.when(condition & (self.kept.pending[0] == 1))(lambda: self.departure(0).wait())


def packed_kernel(tile: Tile, T: int, chunks: Chunks, inputs: dict, outputs: dict, scratch):
    """Blocks by name, but states: all of them, in HBM."""
    number, steps = pl.program_id(2), pl.num_programs(2)
    token, begin, after = number * tile.C, chunks.first[number], chunks.first[number + 1]
    most = chunks.starts.shape[0] - 1  # N + 1
    end = after + jnp.where((after < most) & (chunks.starts[jnp.minimum(after, most)] < token + tile.C), 1, 0)  # it has tokens here too
    step = Step(tile, Inputs(**inputs), Outputs(**outputs), Scratch(*scratch), chunks.starts, pl.program_id(1), token, begin, end)
    inside = (end - begin == 1) & jnp.logical_not(step.begins(begin) | step.ends(begin)) & step.real(begin)

    @pl.when(number == 0)
    def _():
        step.kept.pending[0] = 0

    @pl.when(inside)
    def _():
        chunk_step(replace(tile, ragged=False, segments=False), step.inputs, step.out, step.kept.state, Rows())

    @pl.when(jnp.logical_not(inside))
    def _():
        step.call(begin, step.begins(begin))
        step.call(begin + 1, begin + 1 < end if step.slots == 2 else step.two & jnp.logical_not(step.begins(begin)))
        here = lax.broadcasted_iota(jnp.int32, (tile.C, 1), 0)
        pl.when(step.real(begin))(lambda: _put_down(step, here + token < chunks.starts[most - 1]))
        pl.when(step.two)(lambda: _two(step))
        lax.fori_loop(begin, jnp.where(step.two, begin, end), lambda sequence, _: _visit(step, sequence), None)

    if step.out.final is not None:
        step.leave(number == steps - 1)


def _same_sequence(step: Step):
    """[C, C] of 0/1: pairs of tokens of one sequence."""
    C = step.tile.C
    tokens = lax.broadcasted_iota(jnp.int32, (C, 1), 0), lax.broadcasted_iota(jnp.int32, (1, C), 1)

    def count(sequence, found):
        return tuple(x + jnp.where(token >= step.edges(sequence)[0], 1, 0) for x, token in zip(found, tokens, strict=True))

    column, row = lax.fori_loop(step.begin + 1, step.end, count, tuple(jnp.zeros_like(x) for x in tokens))
    return jnp.where(column == row, 1.0, 0.0)


def _put_down(step: Step, valid) -> None:
    """What a chunk's sequences share. Sums of gates stop where a sequence does."""
    tile, inputs, kept, same = step.tile, step.inputs, step.kept, _same_sequence(step)
    members = inputs.members[: 2 * tile.C].astype(jnp.float32)
    near = jnp.concatenate([jnp.concatenate([same] * tile.pieces, axis=1)] * 2, axis=0)
    heads = activate(tile, inputs, Rows(valid), (members * near).astype(jnp.bfloat16))
    matrices = group_matrices(tile, groups_of(tile, heads), make_masks(tile, same), inputs.members[...])
    for h, head in enumerate(heads):
        d, x = head.d, head.x
        for n, found in enumerate((d.to, x.q_to, x.k_to, x.k_after)):
            kept.factors[n, h] = found
        kept.blocks[0, h] = jnp.concatenate(d.block, axis=0)
        kept.blocks[1, h] = jnp.concatenate([d.to[n : n + 1] * d.after[n : n + 1] for n in range(0, tile.C, BLOCK)], axis=0)
    for n, own in enumerate(matrices):
        for m, found in enumerate((own.A_qk, own.inverse)):
            kept.matrices[m, n] = found.astype(kept.matrices.dtype)


def _visit(step: Step, sequence) -> None:
    tile, out = step.tile, step.out
    low, high = step.edges(sequence)
    pl.when(step.begins(sequence) & step.real(sequence))(lambda: _begin(step, sequence))
    step.call(sequence + step.slots, sequence + step.slots < step.end)
    pl.when((low < high) & step.real(sequence))(lambda: _tokens(step, low, high))
    token = lax.broadcasted_iota(jnp.int32, (tile.C, 1), 0)
    pl.when((low < high) & jnp.logical_not(step.real(sequence)))(lambda: write_zeros(tile, out.o, (token >= low) & (token < high)))

    if out.final is not None:
        pl.when(step.ends(sequence) & step.real(sequence))(lambda: _end(step, sequence))


def _begin(step: Step, sequence) -> None:
    if step.inputs.initial is not None:
        step.arrival(sequence).wait()
    for h in range(step.tile.heads):
        step.kept.state[h] = _arrived(step, sequence, h)


def _arrived(step: Step, sequence, h: int):
    """The state [V, K] with which a sequence begins."""
    if step.inputs.initial is None:
        return jnp.zeros((step.tile.V, step.tile.K), jnp.float32)
    return state_block(step.tile, step.kept.arriving[step.slot(sequence), h])


def _end(step: Step, sequence) -> None:
    step.leave(True)
    for h in range(step.tile.heads):
        step.kept.leaving[h] = state_block(step.tile, step.kept.state[h])
    step.departure(sequence).start()
    step.kept.pending[0] = 1


def _two(step: Step) -> None:
    """Both sequences of a chunk: where the first ends and the second begins, states need no turn of their own to come and go."""
    tile, kept, out, state = step.tile, step.kept, step.out, step.kept.state
    first, second = step.begin, step.begin + 1

    @pl.when(step.begins(first))
    def _():
        _begin(step, first)
        if step.slots == 1:
            step.call(second, True)

    if step.inputs.initial is not None:
        step.arrival(second).wait()
    if out.final is not None:
        step.leave(True)
    (_, cut), (_, end) = step.edges(first), step.edges(second)
    token = lax.broadcasted_iota(jnp.int32, (tile.C, 1), 0)
    rows = token < cut, (token >= cut) & (token < end)
    v = read_heads(tile, step.inputs.v, token < end)
    beta = jnp.where(token < end, activate_beta(tile, step.inputs.beta[0, 0].astype(jnp.float32)).T, 0.0)  # [C, heads]
    decays = [[_own_decays(tile, kept, h, *edges) for edges in ((0, cut), (cut, end))] for h in range(tile.heads)]
    arrived = [_arrived(step, second, h) for h in range(tile.heads)]
    r, reads = [], []
    for h, both in enumerate(decays):
        q_to, k_to = kept.factors[1, h], kept.factors[2, h]
        found = []
        for S, own, (before, _, _) in zip((state[h], arrived[h]), rows, both, strict=True):
            found.append(read_state(tile, S, *(from_start(tile, x, before, own) for x in (k_to, q_to))))
        from_k, from_q = (x + y for x, y in zip(*found, strict=True))
        r.append(beta[:, h : h + 1] * (v[h] - from_k))
        reads.append(from_q)
    v_new, within = _through_matrices(tile, kept, r)
    for h, both in enumerate(decays):
        for last, S, own, (_, after, whole) in zip((False, True), (state[h], arrived[h]), rows, both, strict=True):
            if not last and out.final is None:
                continue
            S = next_state(tile, S, whole, to_end(tile, Factors(None, None, kept.factors[3, h], None), after, own), v_new[h])
            if last:
                state[h] = S
            else:
                kept.leaving[h] = state_block(tile, S)
    write_heads(tile, out.o, [x + y for x, y in zip(reads, within, strict=True)])
    if out.final is not None:
        step.departure(first).start()
        kept.pending[0] = 1
        pl.when(step.ends(second))(lambda: _end(step, second))


def _through_matrices(tile: Tile, kept: Scratch, r: list) -> tuple[list, list]:
    """v_new, and what of o comes from inside the chunk."""
    matrices = [Matrices(kept.matrices[0, n], kept.matrices[1, n], None) for n in range(tile.heads // tile.group)]
    v_new = apply_matrices(tile, matrices, "inverse", r)
    return v_new, apply_matrices(tile, matrices, "A_qk", v_new)


def _tokens(step: Step, low, high) -> None:
    """Tokens low .. high - 1 of the chunk, all of one sequence, from the state before them to the one after; as `chunk_step`."""
    tile, kept, state = step.tile, step.kept, step.kept.state
    token = lax.broadcasted_iota(jnp.int32, (tile.C, 1), 0)
    own = (token >= low) & (token < high)
    v = read_heads(tile, step.inputs.v, own)
    beta = jnp.where(own, activate_beta(tile, step.inputs.beta[0, 0].astype(jnp.float32)).T, 0.0)  # [C, heads]
    decays = [_own_decays(tile, kept, h, low, high) for h in range(tile.heads)]
    r, reads = [], []
    for h, (before, _, _) in enumerate(decays):
        _, q_to, k_to, _ = (kept.factors.at[n, h] for n in range(4))
        from_k, from_q = read_state(tile, state[h], *(from_start(tile, x[...], before, own) for x in (k_to, q_to)))
        r.append(beta[:, h : h + 1] * (v[h] - from_k))
        reads.append(from_q)
    v_new, within = _through_matrices(tile, kept, r)
    for h, (_, after, whole) in enumerate(decays):
        k_end = to_end(tile, Factors(None, None, kept.factors[3, h], None), after, own)
        state[h] = next_state(tile, state[h], whole, k_end, v_new[h])
    write_heads(tile, step.out.o, [x + y for x, y in zip(reads, within, strict=True)], own)


def _own_decays(tile: Tile, kept: Scratch, h: int, low, high) -> tuple[Decays, Decays, Any]:
    """Of tokens low .. high - 1: blocks' decays as seen from the first token, and from the last; and over all of them, [1, K]."""
    one, last = jnp.ones((1, tile.K), jnp.float32), high - 1
    before, after, whole = [], [], kept.factors[0, h, pl.ds(last, 1), :]
    for n in range(tile.blocks):
        tail, head = (kept.blocks[m, h, n : n + 1, :] for m in range(2))
        before.append(jnp.where(low < BLOCK * (n + 1), tail, one))
        after.append(jnp.where(high > BLOCK * n, head, one))
        whole = whole * jnp.where((low < BLOCK * (n + 1)) & (last >= BLOCK * (n + 1)), tail, one)
    return Decays(None, None, None, tuple(before)), Decays(None, None, None, tuple(after)), whole
