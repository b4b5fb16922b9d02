"""Blocks of [B, T, H, K] arrays, read and written head by head with no transposition in HBM.

A block follows the layout in which XLA keeps such an array on a TPU, so that no copy is made before a kernel (`Tile.layout`):

tokens   [1, C, heads, K]           a multiple of 8 heads. A head's rows lie `heads` rows apart, which a strided load gathers
merged   [1, C heads / 8, 8, K]     2 or 4 heads in all, several tokens in each 8 rows: the same rows in memory, the same strided loads
heads    [1, heads, C, K]           other numbers, which XLA keeps head by head

Two bfloat16 heads share a 32-bit word: one strided load of words is two heads, and float32 is a shift away.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

HIGH_HALF = 0xFFFF0000


def read_heads(tile, ref, rows=None) -> list:
    """float32 [C, K] of each head; zero where `rows` [C, 1] is False. `ref`: a block, or blocks of as many heads each."""
    if isinstance(ref, tuple):
        part = replace(tile, heads=tile.heads // len(ref))
        return [x for own in ref for x in read_heads(part, own, rows)]
    if tile.layout == "heads":
        found = [ref[0, h].astype(jnp.float32) for h in range(tile.heads)]
    elif not _strided(tile, ref):
        found = [_plain(tile, ref)[:, h, :].astype(jnp.float32) for h in range(tile.heads)]
    elif ref.dtype == jnp.float32:
        view = _view(ref)
        found = [view[_rows_of(tile, ref, h)] for h in range(tile.heads)]
    else:
        view = _view(ref)
        found = [x for pair in range(tile.heads // 2) for x in unpack(view[_rows_of(tile, ref, pair)])]
    return found if rows is None else [jnp.where(rows, x, 0.0) for x in found]


def write_heads(tile, ref, values: list, rows=None) -> None:
    """`values`: [C, K] of each head; where `rows` [C, 1] is False, what is there stays."""
    if rows is not None:
        before = read_heads(tile, ref)
        values = [jnp.where(rows, x, y) for x, y in zip(values, before, strict=True)]
    if tile.layout == "heads":
        for h, x in enumerate(values):
            ref[0, h] = x.astype(ref.dtype)
        return
    if not _strided(tile, ref):
        if tile.layout == "merged":
            ref[0] = jnp.stack([x.astype(ref.dtype) for x in values], axis=1).reshape(ref.shape[1:])
            return
        for h, x in enumerate(values):
            ref[0, :, h, :] = x.astype(ref.dtype)
        return
    view = _view(ref)
    if ref.dtype == jnp.bfloat16:
        values = [pack(*values[n : n + 2]) for n in range(0, len(values), 2)]
    for n, x in enumerate(values):
        view[_rows_of(tile, ref, n)] = x


def _plain(tile, ref):
    """[C, heads, K]."""
    return ref[0].reshape(-1, tile.heads, ref.shape[3]) if tile.layout == "merged" else ref.at[0]


def write_zeros(tile, ref, rows) -> None:
    """Where `rows` [C, 1] is True, of every head."""
    write_heads(tile, ref, [jnp.zeros((rows.shape[0], ref.shape[3]), jnp.float32)] * tile.heads, rows)


def unpack(words) -> tuple:
    """The two float32 heads of [C, K] words: the even one in the low half."""
    return _float(words << 16), _float(words & jnp.uint32(HIGH_HALF))


def pack(even, odd):
    """Two float32 heads [C, K], rounded to bfloat16, as words: the even one in the low half. One operation for both."""
    return pltpu.pack_elementwise([even, odd], packed_dtype=jnp.bfloat16)


def _view(ref):
    """[C * heads, K], or with bfloat16 [C * heads / 2, K] words."""
    _, C, heads, K = ref.shape
    flat = ref.reshape(C * heads, K)
    return flat if ref.dtype == jnp.float32 else flat.bitcast(jnp.uint32)


def _rows_of(tile, ref, n: int):
    """In the view: head n, or with bfloat16 pair n of heads."""
    stride = tile.heads if ref.dtype == jnp.float32 else tile.heads // 2
    return pl.ds(n, ref.shape[1] * ref.shape[2] // tile.heads, stride=stride), slice(None)


def _float(words):
    return lax.bitcast_convert_type(words, jnp.float32)


def _strided(tile, ref) -> bool:
    """Strided loads walk whole tiles: 128 lanes, and a multiple of 8 rows."""
    _, _, rows, K = ref.shape
    return tile.strided and K == 128 and rows % 8 == 0 and ref.dtype in (jnp.float32, jnp.bfloat16)


def column(x):
    """[1, C] -> [C, 1]."""
    C = x.shape[-1]
    i, j = (lax.broadcasted_iota(jnp.int32, (C, C), axis) for axis in (0, 1))
    return jnp.sum(jnp.where(i == j, x, 0), axis=1, keepdims=True)


def groups_of(tile, values: list) -> list[list]:
    """Values of heads, those of a group together."""
    return [values[n : n + tile.group] for n in range(0, len(values), tile.group)]


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


def row_slices(x, parts: int) -> list:
    height = x.shape[0] // parts
    return [x[i * height : (i + 1) * height] for i in range(parts)]


def eight_rows(x):
    """[R, K] -> [8, K] of the same sum over rows: whole registers are added, and none is turned until all of them are."""
    return jnp.sum(x.reshape(-1, 8, x.shape[1]), axis=0)


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
