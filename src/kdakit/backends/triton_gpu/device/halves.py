"""Parts of a state of more than 128 key channels: S^T [BV, len(o_k)] of channels o_k, as the caller and as the workspace have it."""

from __future__ import annotations

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.device.matrix import round_to, rounded_off
from kdakit.backends.triton_gpu.device.program import state_offsets


@triton.jit
def load_part(p_S, i_nh, o_v, o_k, m_v, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """Of the caller's i_nh-th state the value channels m_v, in float32; 0 elsewhere."""
    m_S = m_v[:, None] & (o_k < K)[None, :]
    return tl.load(p_S + state_offsets(i_nh, o_v, o_k, K, V, V_FIRST), mask=m_S, other=0.0).to(tl.float32)


@triton.jit
def store_part(p_S, i_nh, b_S, o_v, o_k, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """To the caller's i_nh-th state."""
    m_S = (o_v < V)[:, None] & (o_k < K)[None, :]
    tl.store(p_S + state_offsets(i_nh, o_v, o_k, K, V, V_FIRST), round_to(b_S, p_S.dtype.element_ty), mask=m_S)


@triton.jit
def keep_part(p_states, p_lost, i_at, b_S, o_v, o_k, V: tl.constexpr, KP: tl.constexpr):
    """Stores a part of the workspace's state that begins at i_at, and what rounding takes from it if that is asked for; returns it as an
    operand."""
    DTYPE: tl.constexpr = p_states.dtype.element_ty
    b_Sn = round_to(b_S, DTYPE)
    o_S, m_v = o_v[:, None] * KP + o_k[None, :], (o_v < V)[:, None]
    tl.store(p_states + i_at + o_S, b_Sn, mask=m_v)
    if p_lost is not None:
        tl.store(p_lost + i_at + o_S, rounded_off(b_S, DTYPE), mask=m_v)
    return b_Sn
