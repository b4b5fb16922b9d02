"""The whole backward in one kernel: steps from last to first, the gradient of the state [heads, V, K] stays in VMEM.

Given d_o and dS', the gradient of the state after the chunk (states as [V, K], names as in `state` and `intra`):

    d_v_new = A_qk^T d_o + k_end dS'^T         e = inverse^T d_v_new               d_v = d_r = beta e
    d_q_in = d_o S     d_k_in = -d_r S         d_k_end = v_new dS'                 d_decay = sum_v S dS'
    d_A_qk = tril(d_o v_new^T)                 d_P = -strict_tril(d_r v_new^T)     d_beta = e . (r - P v_new),   r = v - k_in S^T
    dS = dS' Diag(decay) + d_o^T q_in - d_r^T k_in

With bfloat16 operands a sequence's first chunk gets back what rounding takes from two float32 gradients, which in a short sequence nothing
averages out: d_decay what its saved state misses of the initial one, d_initial_state what the factors q_in and k_in have lost.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kdakit.backends.pallas_tpu.fused import (
    Head,
    Inputs,
    Matrices,
    Rows,
    activate,
    apply_matrices,
    chunk_decay,
    clear_heads,
    state_block,
    step_rows,
)
from kdakit.backends.pallas_tpu.gate import activate_beta_backward, log_decay_backward, normalise_backward
from kdakit.backends.pallas_tpu.heads import dot, eight_rows, read_heads, row_slices, row_sums, write_heads, write_zeros
from kdakit.backends.pallas_tpu.intra import make_masks, operand
from kdakit.backends.pallas_tpu.intra_backward import pair_products_backward
from kdakit.backends.pallas_tpu.sequences import own_tokens, where_tokens
from kdakit.backends.pallas_tpu.state import from_start, read_state, to_end
from kdakit.backends.pallas_tpu.tile import Tile


class Given(NamedTuple):
    """Blocks beside the forward's inputs."""

    collect: Any  # [C, pieces * sums]
    d_o: Any  # [1, C, heads, V]
    states: Any  # [1, 1, heads, V, K]
    matrices: Any  # [1, 1, groups, 3, C, g C]
    values: Any = None  # [1, 1, heads, 2, C, V]
    d_final: Any = None


class Gradients(NamedTuple):
    """Blocks of the outputs."""

    d_q: Any
    d_k: Any
    d_v: Any
    d_g: Any
    d_beta: Any  # [1, 1, heads, C]
    d_initial: Any = None
    d_gate: Any = None  # [1, heads, 2, 8, K]: d_A_log by channel, d_dt_bias, each the sum of 8 rows


class Flow(NamedTuple):
    """One head's gradients of what lies between chunk and state."""

    d_v: Any  # [C, V]
    d_beta: Any  # [C, 1]
    d_state: Any  # [V, K]
    v_new: Any  # [C, V]
    rows: Any  # [2 C, V]: d_o and -d_r, in the operands' dtype
    q_in: Any  # [C, K]  each, with its gradient
    d_q_in: Any
    k_in: Any
    d_k_in: Any
    k_end: Any
    d_k_end: Any
    d_decay: Any  # [8, K]  of the exponent, the sum of its rows


def values_again(tile: Tile, heads: list[Head], matrices: list[Matrices], S: list, k_in: list) -> tuple[list, list]:
    """r and v_new [C, V] of each head, as the forward had them."""
    r = [h.v - read_state(tile, s, x)[0] for h, s, x in zip(heads, S, k_in, strict=True)]
    return r, apply_matrices(tile, matrices, "inverse", [h.beta * x for h, x in zip(heads, r, strict=True)])


def state_flow(tile: Tile, heads: list[Head], matrices: list[Matrices], rows: Rows, S, d_S, d_o, values=None, missed=None) -> list[Flow]:
    """Through output, state and the triangular system; S, d_S, d_o and, if there, the `values` r and v_new and `missed` are lists by head.

    Stage by stage for all heads: alone, one would wait for the matrix unit.
    """
    each = range(len(heads))

    def turned(name: str) -> list:
        """The transposed matrix [C, C] of each head."""
        return [x for group in matrices for x in row_slices(getattr(group, name).T, tile.group)]

    q_in = [from_start(tile, h.x.q_to, h.d, rows.enter) for h in heads]
    k_in = [from_start(tile, h.x.k_to, h.d, rows.enter) for h in heads]
    k_end = [to_end(tile, h.x, h.d, rows.leave) for h in heads]
    r, v_new = values_again(tile, heads, matrices, S, k_in) if values is None else values
    d_v_new = [dot(tile, A, d) for A, d in zip(turned("A_qk"), d_o, strict=True)]
    d_v_new = [x + dot(tile, k, d, (1, 1)) for x, k, d in zip(d_v_new, k_end, d_S, strict=True)]
    e = [dot(tile, X, x) for X, x in zip(turned("inverse"), d_v_new, strict=True)]
    errors = [x - y for x, y in zip(r, apply_matrices(tile, matrices, "P", v_new), strict=True)]
    d_r = [h.beta * x for h, x in zip(heads, e, strict=True)]
    both = [operand(tile, jnp.concatenate([d_o[n], -d_r[n]], axis=0)) for n in each]  # [2 C, V]
    d_in = [dot(tile, both[n], S[n]) for n in each]  # [2 C, K]
    d_k_end = [dot(tile, v_new[n], d_S[n]) for n in each]
    decay = [chunk_decay(tile, h, rows) for h in heads]
    kept = [eight_rows(S[n].astype(jnp.float32) * d_S[n]) for n in each]
    d_decay = [decay[n] * (kept[n] if missed is None else kept[n] + missed[n]) for n in each]
    inner = [operand(tile, jnp.concatenate([q_in[n], k_in[n]], axis=0)) for n in each]
    d_state = [d_S[n] * decay[n] + dot(tile, both[n], inner[n], (0, 0)) for n in each]
    return [
        Flow(
            d_r[n], row_sums(e[n] * errors[n]), d_state[n], v_new[n], both[n], q_in[n], d_in[n][: tile.C], k_in[n], d_in[n][tile.C :],
            k_end[n], d_k_end[n], d_decay[n],
        )
        for n in each
    ]  # fmt: skip


def backward_kernel(tile: Tile, T: int, table, inputs: dict, outputs: dict, scratch):
    """Blocks by name; scratch: the gradient of the state and, where first chunks get back what rounding took, `missed` [heads, 8, K]."""
    given = Given(**{n: inputs.pop(n) for n in Given._fields if n in inputs})
    inputs, out, (d_state, *missed) = Inputs(**inputs), Gradients(**outputs), scratch
    done, steps = pl.program_id(2), pl.num_programs(2)
    step = steps - 1 - done
    first = step == 0 if table is None else table.first[step] == 1
    last = done == 0 if table is None else table.last[step] == 1

    @pl.when(last)
    def _():
        if given.d_final is None:
            clear_heads(tile, d_state)
        else:
            for h in range(tile.heads):
                d_state[h] = state_block(tile, given.d_final[0, h])
        for ref in missed:
            ref[...] = jnp.zeros_like(ref)

    for ref in missed:

        @pl.when(first)
        def _(ref=ref):
            for h in range(tile.heads):
                lost = state_block(tile, inputs.initial[0, h]).astype(jnp.float32) - given.states[0, 0, h].astype(jnp.float32)
                ref[h] = eight_rows(lost * d_state[h])

    if out.d_gate is not None:

        @pl.when(done == 0)
        def _():
            out.d_gate[...] = jnp.zeros_like(out.d_gate)

    def work():
        rows = step_rows(tile, T, inputs, table, step)
        masks = make_masks(tile, rows.same)
        heads = activate(tile, inputs, rows)
        d_o = read_heads(tile, given.d_o, rows.valid)
        matrices = [Matrices(*(given.matrices[0, 0, n, m] for m in range(3))) for n in range(tile.heads // tile.group)]
        values = None
        if given.values is not None:
            values = [[given.values[0, 0, h, n].astype(jnp.float32) for h in range(tile.heads)] for n in range(2)]
        S, d_S = ([ref[h] for h in range(tile.heads)] for ref in (given.states.at[0, 0], d_state))
        found = [missed[0][h] for h in range(tile.heads)] if missed else None
        flows = state_flow(tile, heads, matrices, rows, S, d_S, d_o, values, found)
        for h, flow in enumerate(flows):
            d_state[h] = flow.d_state
        d_q, d_k, d_g = [], [], []
        collected = pair_products_backward(tile, heads, flows, masks, rows, inputs.members[...], given.collect[...])
        for head, flow, d, x in zip(heads, flows, d_o, collected, strict=True):
            d_q_h, d_k_h = x.d_q, x.d_k
            if not tile.bounded:
                own = row_sums(d * flow.v_new)  # the diagonal of A_qk, which no gate touches
                d_q_h, d_k_h = d_q_h + own * head.k, d_k_h + own * head.q
            d_q.append(normalise_backward(head.unit, head.norms[0], tile.scale * d_q_h))
            d_k.append(normalise_backward(head.k, head.norms[1], d_k_h))
            d_g.append(x.d_g)
        _write(tile, inputs, out, rows, table, step, heads, (d_q, d_k, [f.d_v for f in flows], d_g, [f.d_beta for f in flows]))

        if out.d_initial is not None:

            @pl.when(first)
            def _():
                for h, flow in enumerate(flows):
                    whole = d_state[h] + _lost(tile, flow) if missed else d_state[h]
                    out.d_initial[0, h] = state_block(tile, whole)

    where_tokens(table, step, work, lambda: _write_zeros(tile, T, out, table, step))


def _lost(tile: Tile, flow: Flow):
    """[V, K]: what rounding q_in and k_in took from a gradient of the state."""
    inner = jnp.concatenate([flow.q_in, flow.k_in], axis=0)
    rows = flow.rows.astype(jnp.float32).T  # [V, 2 C]; left to the product, libtpu fails on v5e and v5p: an internal check
    return dot(tile, rows, inner - operand(tile, inner).astype(jnp.float32))


def _write(tile: Tile, inputs: Inputs, out: Gradients, rows: Rows, table, step, heads: list[Head], gradients) -> None:
    """Through the activations of gate and beta, and out; a packed call's step writes its own tokens only."""
    d_q, d_k, d_v, d_g, d_beta = gradients
    only = None if table is None else rows.valid
    if inputs.gate is not None:
        raw = read_heads(tile, inputs.g, rows.valid)
        for h in range(tile.heads):
            d_x = d_g[h] if rows.valid is None else jnp.where(rows.valid, d_g[h], 0.0)
            d_g[h], d_A_log = log_decay_backward(tile, raw[h], inputs.gate[h, 0:1, :], inputs.gate[h, 1:2, :], heads[h].g, d_x)
            for n, x in enumerate((d_A_log, d_g[h])):
                out.d_gate[0, h, n] = out.d_gate[0, h, n] + eight_rows(x)
    for ref, values in zip(out[:4], (d_q, d_k, d_v, d_g), strict=True):
        write_heads(tile, ref, values, only)
    columns = jnp.concatenate(d_beta, axis=1).T  # [heads, C]
    d_rows = activate_beta_backward(tile, inputs.beta[0, 0], columns)
    if table is not None:
        d_rows = jnp.where(_own_columns(table, step, d_rows.shape), d_rows, out.d_beta[0, 0])
    out.d_beta[0, 0] = d_rows


def _write_zeros(tile: Tile, T: int, out: Gradients, table, step) -> None:
    """For tokens that are nobody's."""
    for ref in out[:4]:
        write_zeros(tile, ref, own_tokens(tile, T, table, step))
    d_rows = out.d_beta[0, 0]
    out.d_beta[0, 0] = jnp.where(_own_columns(table, step, d_rows.shape), 0.0, d_rows)


def _own_columns(table, step, shape):
    """[heads, C]: the step's tokens."""
    token = lax.broadcasted_iota(jnp.int32, shape, 1)
    return (token >= table.low[step]) & (token < table.high[step])
