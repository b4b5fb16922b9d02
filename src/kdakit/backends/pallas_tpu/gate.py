"""Stage gate: activations of the inputs, and the decays between tokens of a chunk.

A decay is the exponential of a sum of gates, built by adding only, so every exponent is <= 0 and none has lost its digits to a difference
of cumulative sums. Inside blocks of 16 tokens the sums are products of a 0/1 matrix with the gates, split into bfloat16 pieces that hold
all their bits; across blocks decays are multiplied. Where the gate is bounded and operands are bfloat16, exp(-sum) over a block fits too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kdakit.backends.pallas_tpu.heads import HIGH_HALF, lane_slices, row_slices, row_sums, side_by_side
from kdakit.backends.pallas_tpu.tile import BLOCK, Tile
from kdakit.gates import L2_EPSILON

LOG2_E = 1.4426950408889634
LOWEST = -1e4  # exp of it is 0 in float32, and sums of many stay finite
STRONGEST = -26.0, -0.125  # of a gate in base 2, its first piece and the rest: 2^-26 is below a float32's last digit, 2^(4 * 26) is finite


class Decays(NamedTuple):
    """Of one head; rows are tokens."""

    to: Any  # [C, K]  exp: start of the token's block to it, inclusive
    after: Any  # [C, K]  exp: after the token to the end of its block
    back: Any  # [C, K]  1 / to, if the gate is bounded
    block: tuple  # blocks x [1, K]: exp of the block's sum

    def between(self, first: int, last: int):
        """[1, K]: exp of the sum over blocks first .. last - 1; None if there is none."""
        out = None
        for x in self.block[first:last]:
            out = x if out is None else out * x
        return out


def member_matrix(tile: Tile) -> np.ndarray:
    """[sums, pieces * C] of 0/1: whether a token's gate is part of a sum; sums are `to`, `after` and the levels, C rows each.

    Where pairs are `Tile.centred`, C rows of 0, 1 and -1 more: from the middle of a run of 8 to the token, and less than 0 what lies
    between a token and the middle behind it.
    """
    found = _members(tile).astype(np.float32)
    if tile.centred:
        i, m = np.indices((tile.C, tile.C))
        near, late = i // 8 == m // 8, i % 8 >= 4
        centred = near & late & (m % 8 >= 4) & (m <= i), near & ~late & (m % 8 < 4) & (m > i)
        found = np.concatenate([found, centred[0] * 1.0 - centred[1] * 1.0])
    return np.tile(found, (1, tile.pieces)).astype(np.float32)


def collecting_matrix(tile: Tile) -> np.ndarray:
    """[C, pieces * sums]: what a gate collects from the gradients of the sums that it is part of."""
    return np.tile(_members(tile).T, (1, tile.pieces)).astype(np.float32)


def _members(tile: Tile) -> np.ndarray:
    i, m = np.indices((tile.C, tile.C))
    here = i // BLOCK == m // BLOCK
    sums = [here & (m <= i), here & (m > i)]
    for s in tile.summed_levels:
        sums.append((i // s == m // s) & np.where((i // s) % 2 == 1, m <= i, m > i))
    return np.concatenate(sums)


def pieces_of(x, count: int):
    """x [R, W] float32 as `count` arrays whose bits fit bfloat16, one above the other: [count * R, W] bfloat16."""
    found = []
    for _ in range(count - 1):
        top = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(HIGH_HALF), jnp.float32)
        found.append(top.astype(jnp.bfloat16))
        x = x - top
    return jnp.concatenate([*found, x.astype(jnp.bfloat16)], axis=0)


def member_sums(members, pieces):
    """Sums of rows of x [R, W], given as `pieces_of` it, as `members` [S, count * R] names them."""
    return lax.dot_general(members, pieces, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def gate_pieces(tile: Tile, gates: list):
    """A group's gates [C, K], as `chunk_gate` has them, as terms of sums, [pieces * C, g K]."""
    if tile.operand == "bfloat16" and not tile.base_2:
        gates = [g * LOG2_E for g in gates]
    return pieces_of(side_by_side(gates), tile.pieces)


def chunk_gate(tile: Tile, g, a, bias):
    """`log_decay`; where `Tile.base_2` says so, in base 2: as the machine's exponential and logarithm have it. With x = g + bias

    bounded:    lower_bound log2(e) sigmoid(a x) = c tanh(a x / 2) + c,  c = lower_bound log2(e) / 2: two products instead of five
    softplus:   -a log2(e) softplus(x) = -a log2(1 + 2^y),  y = log2(e) x; where 2^y would not fit it is -a y
    """
    if not tile.base_2:
        return log_decay(tile, g, a, bias)
    if tile.gate == "softplus":
        y = LOG2_E * g + LOG2_E * bias
        return jnp.maximum(-a * jnp.maximum(y, jnp.log2(1.0 + jnp.exp2(jnp.minimum(y, 126.0)))), LOWEST)
    half, c = 0.5 * a, 0.5 * LOG2_E * tile.lower_bound
    return c * jnp.tanh(half * (g + bias)) + c


def decays(tile: Tile, members, pieces) -> list[Decays]:
    """Decays of each head of a group."""
    C, exp = tile.C, _exp(tile)
    found = []
    for sums in lane_slices(member_sums(members[: 2 * C], pieces), tile.group):
        to = exp(sums[:C])
        block = tuple(to[n * BLOCK + BLOCK - 1 : (n + 1) * BLOCK] for n in range(tile.blocks))
        found.append(Decays(to, exp(sums[C:]), exp(-sums[:C]) if tile.bounded else None, block))
    return found


def level_decays(tile: Tile, members, group: list) -> list[list]:
    """[head][level] [C, K]: boundary to the token if its run is odd, after the token to the boundary if it is even."""
    exp, count = _exp(tile), len(tile.summed_levels)
    C = tile.C
    sums = lane_slices(member_sums(members[2 * C : (2 + count) * C], group[0].pieces), tile.group)
    found = [[exp(x) for x in row_slices(own, count)] for own in sums]
    if 1 not in tile.levels:
        return found
    odd = lax.broadcasted_iota(jnp.int32, (C, tile.K), 0) & 1 == 1
    last = jnp.exp2 if tile.base_2 else jnp.exp
    return [[*own, jnp.where(odd, last(h.g), 1.0)] for own, h in zip(found, group, strict=True)]


def centred_decays(tile: Tile, members, group: list) -> list[tuple]:
    """Of each head 2^e and 2^-e [C, K]: e is the sum of gates from the middle of the token's run of 8 to it, or less than 0 the one from it
    to there.

    A product of one token's first and an earlier one's second is the decay between them. A gate below STRONGEST counts as that: what a
    token then keeps of those before it is less than float32 has digits for. So four of them fit an exponent. (A stronger one would not
    fit, and the tokens behind it would lose each other.) Both pieces are cut: what the first leaves over has its sign.
    """
    pieces = group[0].pieces
    row = lax.broadcasted_iota(jnp.int32, (pieces.shape[0], 1), 0)
    strongest = jnp.where(row < tile.C, *STRONGEST).astype(jnp.bfloat16)
    sums = lane_slices(member_sums(members[-tile.C :], jnp.maximum(pieces, strongest)), tile.group)
    return [(jnp.exp2(x), jnp.exp2(-x)) for x in sums]


def _exp(tile: Tile):
    return jnp.exp2 if tile.operand == "bfloat16" else jnp.exp


def log_decay(tile: Tile, g, a, bias):
    """g [C, K] raw -> log-decay; a = exp(A_log) and bias [1, K].

    softplus: -a softplus(g + bias)        bounded: lower_bound sigmoid(a (g + bias))
    """
    if tile.gate == "bounded":
        return tile.lower_bound * sigmoid(tile, a * (g + bias))
    if tile.gate == "softplus":
        g = -a * softplus(tile, g + bias)
    return jnp.maximum(g, LOWEST)


def log_decay_backward(tile: Tile, g, a, bias, gate, d_g):
    """d_raw [C, K], and what a token and channel adds to d_A_log; `gate` as `chunk_gate` had it.

    softplus, x = g + bias:      d_x = -a sigmoid(x) d_g, d_A_log = log_decay d_g
    bounded, s = sigmoid(a x):   d_x = a z, d_A_log = a x z, z = lower_bound s (1 - s) d_g

    Both by e^-|x|, of which s and 1 - s keep all digits: where every gate is open, or at its bound, they are all that is left of d_x.
    """
    if tile.gate == "log_decay":
        return d_g, None
    x = g + bias
    size = jnp.abs(x if tile.gate == "softplus" else a * x)
    e = jnp.exp2(-LOG2_E * size) if tile.operand == "bfloat16" else jnp.exp(-size)
    r = 1.0 / (1.0 + e)
    if tile.gate == "softplus":
        return -a * (jnp.where(x >= 0, 1.0, e) * r) * d_g, (gate * (1.0 / LOG2_E) if tile.base_2 else gate) * d_g
    d_x = (tile.lower_bound * a) * ((e * r) * (r * d_g))
    return d_x, x * d_x


def softplus(tile: Tile, x):
    """Where bfloat16 operands follow, the digits that log1p saves would be lost anyway."""
    e = jnp.exp(-jnp.abs(x))
    return jnp.maximum(x, 0.0) + (jnp.log(1.0 + e) if tile.operand == "bfloat16" else jnp.log1p(e))


def sigmoid(tile: Tile, x):
    """One transcendental instead of two where bfloat16 operands follow."""
    return 0.5 * jnp.tanh(0.5 * x) + 0.5 if tile.operand == "bfloat16" else jax.nn.sigmoid(x)


def activate_beta(tile: Tile, beta):
    if tile.beta == "given":
        return beta
    return (2.0 if tile.beta == "double_sigmoid" else 1.0) * jax.nn.sigmoid(beta)


def activate_beta_backward(tile: Tile, beta, d_beta):
    if tile.beta == "given":
        return d_beta
    return (2.0 if tile.beta == "double_sigmoid" else 1.0) * jax.nn.sigmoid(beta) * jax.nn.sigmoid(-beta) * d_beta


def normalise(tile: Tile, x):
    """x / sqrt(x . x + eps) per row if the call asks for it, and the factor (None if not)."""
    if not tile.l2norm:
        return x, None
    r = lax.rsqrt(row_sums(x * x) + L2_EPSILON)
    return x * r, r


def normalise_backward(y, r, d_y):
    """With y = r x:  d_x = r (d_y - y (y . d_y))."""
    return d_y if r is None else r * (d_y - y * row_sums(y * d_y))
