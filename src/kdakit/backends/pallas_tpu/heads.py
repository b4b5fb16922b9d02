"""Blocks [1, C, heads, K] of [B, T, H, K] arrays, read and written head by head with no transposition.

A head's rows lie `heads` rows apart, which a strided load gathers at no cost. Two bfloat16 heads share a 32-bit word: one strided load of
words is two heads, and float32 is a shift away.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

HIGH_HALF = 0xFFFF0000


def read_heads(ref, rows=None) -> list:
    """float32 [C, K] of each head; zero where `rows` [C, 1] is False."""
    _, C, heads, K = ref.shape
    if not _strided(ref):
        found = [ref[0, :, h, :].astype(jnp.float32) for h in range(heads)]
    elif ref.dtype == jnp.float32:
        flat = ref.reshape(1, C * heads, K)
        found = [flat[0, pl.ds(h, C, stride=heads), :] for h in range(heads)]
    else:
        words = ref.bitcast(jnp.uint32).reshape(C * heads // 2, K)
        found = []
        for pair in range(heads // 2):
            x = words[pl.ds(pair, C, stride=heads // 2), :]
            found += [_float(x << 16), _float(x & jnp.uint32(HIGH_HALF))]
    return found if rows is None else [jnp.where(rows, x, 0.0) for x in found]


def write_heads(ref, values: list, rows=None) -> None:
    """`values`: [C, K] of each head; where `rows` [C, 1] is False, what is there stays."""
    _, C, heads, K = ref.shape
    if rows is not None:
        before = read_heads(ref)
        values = [jnp.where(rows, x, y) for x, y in zip(values, before, strict=True)]
    if not _strided(ref):
        for h, x in enumerate(values):
            ref[0, :, h, :] = x.astype(ref.dtype)
    elif ref.dtype == jnp.float32:
        flat = ref.reshape(1, C * heads, K)
        for h, x in enumerate(values):
            flat[0, pl.ds(h, C, stride=heads), :] = x
    else:
        words = ref.bitcast(jnp.uint32).reshape(C * heads // 2, K)
        for pair in range(heads // 2):
            both = [x.astype(jnp.float32) for x in values[2 * pair : 2 * pair + 2]]
            x = pltpu.pack_elementwise(both, packed_dtype=jnp.bfloat16)
            words[pl.ds(pair, C, stride=heads // 2), :] = lax.bitcast_convert_type(x, jnp.uint32)


def _float(words):
    return lax.bitcast_convert_type(words, jnp.float32)


def _strided(ref) -> bool:
    """Strided loads walk whole tiles: 128 lanes, and a multiple of 8 heads."""
    _, _, heads, K = ref.shape
    return K == 128 and heads % 8 == 0 and ref.dtype in (jnp.float32, jnp.bfloat16)


def column(x):
    """[1, C] -> [C, 1]."""
    C = x.shape[-1]
    i, j = (lax.broadcasted_iota(jnp.int32, (C, C), axis) for axis in (0, 1))
    return jnp.sum(jnp.where(i == j, x, 0), axis=1, keepdims=True)


def side_by_side(values: list):
    """Heads beside each other in lanes."""
    return values[0] if len(values) == 1 else jnp.concatenate(values, axis=1)


def block_diagonal(values: list):
    """g x [R, W] -> [g R, g W], zero outside the diagonal."""
    if len(values) == 1:
        return values[0]
    zero = jnp.zeros_like(values[0])
    rows = [side_by_side([x if i == j else zero for j in range(len(values))]) for i, x in enumerate(values)]
    return jnp.concatenate(rows, axis=0)


def lane_slices(x, parts: int) -> list:
    width = x.shape[1] // parts
    return [x[:, i * width : (i + 1) * width] for i in range(parts)]


def row_sums(x):
    """[C, K] -> [C, 1]."""
    return jnp.sum(x, axis=1, keepdims=True)


def dot(tile, left, right, contract=(1, 0)):
    """left . right over the named axes: operands rounded to bfloat16 for bfloat16 inputs, else at full float32 precision."""
    dims = (((contract[0],), (contract[1],)), ((), ()))
    if tile.operand == "bfloat16":
        left, right = left.astype(jnp.bfloat16), right.astype(jnp.bfloat16)
        return lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)
    return lax.dot_general(left, right, dims, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
