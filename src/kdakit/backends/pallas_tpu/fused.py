"""The whole forward in one kernel: nothing between inputs and outputs touches HBM, the state stays in VMEM.

grid (B, head blocks, steps), the last axis in order; a step is one chunk of `heads` heads, or of a packed call one sequence's part of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kdakit.backends.pallas_tpu.gate import Decays, activate_beta, chunk_gate, decays, gate_pieces, normalise
from kdakit.backends.pallas_tpu.heads import column, groups_of, read_heads, write_heads, write_zeros
from kdakit.backends.pallas_tpu.intra import Factors, Masks, factors, make_masks, over_lanes, pair_products, unit_lower_inverses
from kdakit.backends.pallas_tpu.sequences import own_tokens, where_tokens
from kdakit.backends.pallas_tpu.state import apply_group, from_start, next_state, read_state, to_end
from kdakit.backends.pallas_tpu.tile import Tile


class Rows(NamedTuple):
    """Which tokens [C, 1] of a step are its own, see the entering state, and reach the state it leaves; None: all."""

    valid: Any = None
    enter: Any = None
    leave: Any = None
    keep: Any = None  # [1, 1]: whether the entering state reaches the leaving one
    same: Any = None  # [C, C]: pairs of one segment


class Head(NamedTuple):
    """One head's activated inputs."""

    q: Any  # [C, K]  scaled
    k: Any  # [C, K]
    v: Any  # [C, V]
    g: Any  # [C, K]  log-decay, in base 2 where `Tile.base_2` says so
    beta: Any  # [C, 1]
    d: Decays
    x: Factors
    unit: Any  # [C, K]  q before the scale
    norms: tuple  # l2norm factors [C, 1] of q and k
    pieces: Any  # [pieces * C, g K]: the group's gates as terms of sums


class Matrices(NamedTuple):
    """Of one group of heads, [C, g C]."""

    A_qk: Any
    inverse: Any
    P: Any


class Inputs(NamedTuple):
    """Blocks of the inputs; None: absent."""

    q: Any  # [1, C, heads, K]
    k: Any
    v: Any
    g: Any
    beta: Any  # [1, 1, heads, C]
    members: Any = None  # [sums, pieces * C]; the token recurrence needs none
    gate: Any = None  # [heads, 2, K]: exp(A_log), dt_bias
    segments: Any = None  # [1, 1, 2, C]: each token's segment, counted from the first token's, or -1; whether that starts one
    initial: Any = None  # [1, heads, K, V] or [1, heads, V, K]; in `packed` all states, in HBM


class Outputs(NamedTuple):
    """Blocks of the outputs; None: not asked for."""

    o: Any  # [1, C, heads, V]
    final: Any = None  # as initial
    states: Any = None  # [1, 1, heads, V, K]: before the step
    matrices: Any = None  # [1, 1, groups, 3, C, g C]: A_qk, inverse, P
    values: Any = None  # [1, 1, heads, 2, C, V]: r = v - k_in S^T, v_new


def step_rows(tile: Tile, T: int, inputs: Inputs, table, step) -> Rows:
    valid = own_tokens(tile, T, table, step)
    if not tile.segments:
        return Rows(valid)
    row = inputs.segments[0, 0, 0:1, :]  # [1, C] float32
    ids = column(row)  # [C, 1]
    fresh = inputs.segments[0, 0, 1:2, :1]  # [1, 1]: 1 if the first token starts a segment
    valid = ids >= 0 if tile.packed else valid
    last = row[:, tile.C - 1 :]
    enter = (ids == 0) & (fresh == 0)
    keep = jnp.where((last == 0) & (fresh == 0), 1.0, 0.0)
    return Rows(valid, enter, ids == last, keep, jnp.where(ids == row, 1.0, 0.0))


def activate(tile: Tile, inputs: Inputs, rows: Rows, members=None) -> list[Head]:
    """Every head's inputs as the recurrence wants them; tokens that are not the step's write nothing and forget nothing.

    `members`: which gates the decays sum up, if not as `member_matrix` has it.
    """
    q, k, v, g = (read_heads(tile, ref, rows.valid) for ref in (inputs.q, inputs.k, inputs.v, inputs.g))
    beta = activate_beta(tile, inputs.beta[0, 0].astype(jnp.float32)).T  # [C, heads]
    if rows.valid is not None:
        beta = jnp.where(rows.valid, beta, 0.0)
    gates = []
    for h in range(tile.heads):
        a, bias = (None, None) if inputs.gate is None else (inputs.gate[h, 0:1, :], inputs.gate[h, 1:2, :])
        gate = chunk_gate(tile, g[h], a, bias)
        gates.append(gate if rows.valid is None else jnp.where(rows.valid, gate, 0.0))
    heads = []
    members = inputs.members[...] if members is None else members
    for first in range(0, tile.heads, tile.group):
        group = slice(first, first + tile.group)
        pieces = gate_pieces(tile, gates[group])
        for h, d in zip(range(tile.heads)[group], decays(tile, members, pieces), strict=True):
            (unit, q_norm), (k_h, k_norm) = normalise(tile, q[h]), normalise(tile, k[h])
            q_h = unit * tile.scale
            heads.append(Head(q_h, k_h, v[h], gates[h], beta[:, h : h + 1], d, factors(q_h, k_h, d), unit, (q_norm, k_norm), pieces))
    return heads


def group_matrices(tile: Tile, groups: list[list[Head]], masks: Masks, members) -> list[Matrices]:
    products = pair_products(tile, groups, masks, members)
    A_kk = [over_lanes(masks, [h.beta for h in group]) * P for group, (_, P) in zip(groups, products, strict=True)]
    return [Matrices(A_qk, X, P) for (A_qk, P), X in zip(products, unit_lower_inverses(tile, A_kk, masks), strict=True)]


def apply_matrices(tile: Tile, matrices: list[Matrices], name: str, values: list) -> list:
    """The named matrix of each group times its heads' [C, V]."""
    return [x for own, group in zip(matrices, groups_of(tile, values), strict=True) for x in apply_group(tile, getattr(own, name), group)]


def chunk_decay(tile: Tile, head: Head, rows: Rows):
    decay = head.d.between(0, tile.blocks)  # [1, K]
    return decay if rows.keep is None else decay * rows.keep


def state_block(tile: Tile, state):
    """[K, V] <-> [V, K] between the caller's layout and the kernel's."""
    return state if tile.state_v_first else state.T


def clear_heads(tile: Tile, ref) -> None:
    """[heads, V, K] of zeros; a loop, since a step that does not begin a sequence has to hold its code too."""
    lax.fori_loop(0, tile.heads, lambda h, _: ref.__setitem__(h, jnp.zeros((tile.V, tile.K), ref.dtype)), None)


def _save(out: Outputs, matrices: list[Matrices], r: list, v_new: list) -> None:
    """What the backward asked for."""
    if out.matrices is not None:
        for n, group in enumerate(matrices):
            for m, x in enumerate(group):
                out.matrices[0, 0, n, m] = x.astype(out.matrices.dtype)
    if out.values is not None:
        for h, both in enumerate(zip(r, v_new, strict=True)):
            for n, x in enumerate(both):
                out.values[0, 0, h, n] = x.astype(out.values.dtype)


def forward_kernel(tile: Tile, T: int, table, inputs: dict, outputs: dict, scratch):
    """Blocks by name; scratch: the state [heads, V, K] float32."""
    inputs, out, (state,) = Inputs(**inputs), Outputs(**outputs), scratch
    step, steps = pl.program_id(2), pl.num_programs(2)
    first = step == 0 if table is None else table.first[step] == 1
    last = step == steps - 1 if table is None else table.last[step] == 1

    @pl.when(first)
    def _():
        if inputs.initial is None:
            clear_heads(tile, state)
            return
        for h in range(tile.heads):
            state[h] = state_block(tile, inputs.initial[0, h])

    def work():
        rows = step_rows(tile, T, inputs, table, step)
        chunk_step(tile, inputs, out, state, rows, None if table is None else rows.valid)

    where_tokens(table, step, work, lambda: write_zeros(tile, out.o, own_tokens(tile, T, table, step)))

    if out.final is not None:

        @pl.when(last)
        def _():
            for h in range(tile.heads):
                out.final[0, h] = state_block(tile, state[h])


def chunk_step(tile: Tile, inputs: Inputs, out: Outputs, state, rows: Rows, only=None) -> None:
    """One chunk, from the state before it to the one after; o is written where `only` [C, 1] is True, everywhere if None."""
    masks = make_masks(tile, rows.same)
    heads = activate(tile, inputs, rows)
    groups = groups_of(tile, heads)
    matrices = group_matrices(tile, groups, masks, inputs.members[...])
    r, reads = [], []
    for h, head in enumerate(heads):
        S = state[h]
        if out.states is not None:
            out.states[0, 0, h] = S.astype(out.states.dtype)
        from_k, from_q = read_state(tile, S, *(from_start(tile, x, head.d, rows.enter) for x in (head.x.k_to, head.x.q_to)))
        r.append(head.v - from_k)
        reads.append(from_q)
    v_new = apply_matrices(tile, matrices, "inverse", [head.beta * x for head, x in zip(heads, r, strict=True)])
    inside = apply_matrices(tile, matrices, "A_qk", v_new)
    _save(out, matrices, r, v_new)
    for h, (head, u) in enumerate(zip(heads, v_new, strict=True)):
        state[h] = next_state(tile, state[h], chunk_decay(tile, head, rows), to_end(tile, head.x, head.d, rows.leave), u)
    outputs = [x + y for x, y in zip(reads, inside, strict=True)]
    write_heads(tile, out.o, outputs, only)
