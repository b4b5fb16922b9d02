"""How states are kept: in a float dtype, or in 8 bits with scales. The formulas are those of kdakit.serving.torch.storage."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kdakit.serving.arguments import SCALE_GROUP, PoolSizes

LARGEST, SMALLEST, RESIDUAL = 127, 32, 254


class Storage(NamedTuple):
    """Rows of states; [rows, HV, K, V] to the outside, in the compute dtype."""

    states: Any  # [rows, HV, K, V] or [rows, HV, V, K]
    scales: Any = None  # [rows, HV, K, groups], in 8-bit storage
    residual: Any = None  # like states, with feedback


def empty(rows: int, sizes: PoolSizes) -> Storage:
    states = jnp.zeros((rows, *sizes.state_shape), sizes.dtype)
    if sizes.dtype != "int8":
        return Storage(states)
    scales = jnp.zeros((rows, sizes.HV, sizes.K, sizes.groups), jnp.float32)
    return Storage(states, scales, jnp.zeros_like(states) if sizes.feedback else None)


def read(sizes: PoolSizes, storage: Storage, index):
    states = _layout(sizes, storage.states[index]).astype(sizes.compute_dtype)
    if storage.scales is None:
        return states
    if storage.residual is not None:
        states = states + _layout(sizes, storage.residual[index]).astype(jnp.float32) / RESIDUAL
    return states * jnp.repeat(storage.scales[index], SCALE_GROUP, -1)[..., : sizes.V]


def write(sizes: PoolSizes, storage: Storage, index, states, decay=None) -> Storage:
    """decay [N, HV, K]: what the rows have been multiplied by since they were read, if their scales are to follow it."""
    put = lambda old, new: old.at[index].set(new.astype(old.dtype))
    if storage.scales is None:
        return Storage(put(storage.states, _layout(sizes, states)))
    before = None if decay is None else storage.scales[index] * decay[..., None]
    codes, residual, scales = quantise(states, before, sizes.feedback)
    kept = None if residual is None else put(storage.residual, _layout(sizes, residual))
    return Storage(put(storage.states, _layout(sizes, codes)), put(storage.scales, scales), kept)


def quantise(states, before, feedback: bool):
    """Codes [.., K, V], residual or None, scales [.., K, groups]. `before`: scales to keep where they still fit."""
    *lead, V = states.shape
    groups = -(-V // SCALE_GROUP)
    padded = jnp.pad(states, [(0, 0)] * len(lead) + [(0, -V % SCALE_GROUP)]).reshape(*lead, groups, SCALE_GROUP)
    largest = jnp.abs(padded).max(-1)
    scales = largest / LARGEST
    if before is not None:
        scales = jnp.where((largest <= LARGEST * before) & (largest >= SMALLEST * before), before, scales)
    steps = padded / jnp.where(scales > 0, scales, 1)[..., None]
    rounded = jnp.round(steps) if feedback else jnp.floor(steps + dither(padded))
    codes = jnp.clip(rounded, -LARGEST, LARGEST)
    residual = jnp.clip(jnp.round((steps - codes) * RESIDUAL), -LARGEST, LARGEST)
    codes, residual = (x.astype(jnp.int8).reshape(*lead, groups * SCALE_GROUP)[..., :V] for x in (codes, residual))
    return codes, residual if feedback else None, scales


def dither(x):
    """[0, 1) from the bits of float32 x: a multiplicative hash."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x2C1B3C6D)
    bits = (bits ^ (bits >> 12)) * jnp.uint32(0x297A2D39)
    return (bits >> 8).astype(jnp.float32) / (1 << 24)


def _layout(sizes: PoolSizes, x):
    return x.swapaxes(-1, -2) if sizes.state_v_first else x
