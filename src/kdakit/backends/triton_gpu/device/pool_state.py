"""A pool of states, as every kernel over it sees it: whose row it is, a state in and out."""

from __future__ import annotations

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.device.matrix import round_to

LARGEST = tl.constexpr(127.0)
SMALLEST = tl.constexpr(32.0)
RESIDUAL = tl.constexpr(254.0)
LISTED = tl.constexpr(128)  # slots compared at a time


@triton.jit
def slot_of(p_slots, i_n, CAPACITY):
    """The slot of row n, and whether there is one. Its state may be read at once: who owns it takes longer to find out."""
    slot = tl.load(p_slots + i_n).to(tl.int64)
    return slot, (slot >= 0) & (slot < CAPACITY)


@triton.jit
def owner_of(p_slots, p_generation, i_n, slot, inside):
    """The generation of row n's slot; -1 for a row to skip: no slot, a free one, or one that an earlier row has named."""
    generation = tl.load(p_generation + slot, mask=inside, other=0)
    earlier = 0
    for start in range(0, i_n, LISTED):
        o_n = start + tl.arange(0, LISTED)
        other = tl.load(p_slots + o_n, mask=o_n < i_n, other=-1).to(tl.int64)
        earlier += tl.sum((other == slot).to(tl.int32), 0)
    return tl.where(inside & (generation % 2 == 1) & (earlier == 0), generation, -1)


@triton.jit
def load_state(p_states, p_scales, p_residual, o_state, o_scale, m_state, m_k, FEEDBACK: tl.constexpr):
    """S^T [BV, KP] in float32, and its scales [KP] where it is stored in 8 bits."""
    b_S = tl.load(p_states + o_state, mask=m_state, other=0.0).to(tl.float32)
    b_scale = tl.full([m_k.shape[0]], 1.0, tl.float32)
    if p_states.dtype.element_ty == tl.int8:
        b_scale = tl.load(p_scales + o_scale, mask=m_k, other=0.0)
        if FEEDBACK:
            b_S += tl.load(p_residual + o_state, mask=m_state, other=0.0).to(tl.float32) / RESIDUAL
        b_S *= b_scale[None, :]
    return b_S, b_scale


@triton.jit
def dither_of_bits(b_x):
    """[0, 1) from the bits of x."""
    b = b_x.to(tl.uint32, bitcast=True)
    b = (b ^ (b >> 15)) * 0x2C1B3C6D
    b = (b ^ (b >> 12)) * 0x297A2D39
    return (b >> 8).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def store_state(p_states, p_scales, p_residual, o_state, o_scale, m_state, m_k, b_S, b_scale, FEEDBACK: tl.constexpr):
    """The way back; returns S^T and the scales as a later load would find them.

    b_scale [KP]: the scales that were read, times the decays since; kept while they fit.
    """
    if p_states.dtype.element_ty == tl.int8:
        b_largest = tl.max(tl.abs(b_S), 0)  # [KP]
        keep = (b_largest <= LARGEST * b_scale) & (b_largest >= SMALLEST * b_scale)
        b_scale = tl.where(keep, b_scale, b_largest / LARGEST)
        b_steps = b_S * (1.0 / tl.where(b_scale > 0, b_scale, 1.0))[None, :]
        b_codes = tl.floor(b_steps + 0.5) if FEEDBACK else tl.floor(b_steps + dither_of_bits(b_S))
        b_codes = tl.minimum(tl.maximum(b_codes, -LARGEST), LARGEST)
        tl.store(p_states + o_state, b_codes.to(tl.int8), mask=m_state)
        tl.store(p_scales + o_scale, b_scale, mask=m_k)
        if FEEDBACK:
            b_left = tl.floor((b_steps - b_codes) * RESIDUAL + 0.5)
            b_left = tl.minimum(tl.maximum(b_left, -LARGEST), LARGEST)
            tl.store(p_residual + o_state, b_left.to(tl.int8), mask=m_state)
            b_codes += b_left / RESIDUAL
        b_S = b_codes * b_scale[None, :]
    else:
        b_stored = round_to(b_S, p_states.dtype.element_ty)
        tl.store(p_states + o_state, b_stored, mask=m_state)
        b_S = b_stored.to(tl.float32)
    return b_S, b_scale
