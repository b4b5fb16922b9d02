"""What a scan leaves of every chunk where a backward makes no states again: the state before it, and what the ends of a sequence want."""

from __future__ import annotations

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.device.matrix import round_to, rounded_off, trade_rows
from kdakit.backends.triton_gpu.device.pages import store_as_held
from kdakit.backends.triton_gpu.device.program import state_offsets


@triton.jit
def store_rows(p_S, b_S, i_row, BV: tl.constexpr, KP: tl.constexpr, BY_WARPS: tl.constexpr):
    """b_S [BV, KP] to rows from i_row on of p_S [VP, KP]. BY_WARPS, as in `store_mark`: a warp has 16 adjacent rows in the matrix units'
    order; named so that each stores its own, they stay within it."""
    o_r, o_k = tl.arange(0, BV), tl.arange(0, KP)
    if BY_WARPS:
        W: tl.constexpr = BV // 16
        R: tl.constexpr = min(16, max(1, 256 // KP))  # rows that a warp stores at once, 512 bytes
        b_S = tl.reshape(tl.permute(tl.reshape(b_S, [W, 16 // R, R, KP]), (1, 0, 2, 3)), [BV, KP])
        o_r = o_r // R % W * 16 + o_r // (R * W) * R + o_r % R
    tl.store(p_S + (i_row + o_r)[:, None] * KP + o_k[None, :], b_S)


@triton.jit
def keep_state(p_states, p_states_lost, b_S, i_v, BV: tl.constexpr, KP: tl.constexpr, BY_WARPS: tl.constexpr):
    """The i_v-th block S^T [BV, KP] of the state before a chunk, whose [VP, KP] begin at p_states; p_states_lost, if there: what rounding
    takes from it."""
    DTYPE: tl.constexpr = p_states.dtype.element_ty
    store_rows(p_states, round_to(b_S, DTYPE), i_v * BV, BV, KP, BY_WARPS)
    if p_states_lost is not None:
        store_rows(p_states_lost, rounded_off(b_S, DTYPE), i_v * BV, BV, KP, BY_WARPS)


@triton.jit
def keep_before_last(p_before_last, b_S, o_v, o_k, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, KP: tl.constexpr,
                     V_FIRST: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """S^T [BV, KP] before a sequence's last chunk, in float32 as final states lie."""
    store_as_held(p_before_last + state_offsets(0, o_v, o_k, K, V, V_FIRST), b_S, o_v, o_k, K, V, BV, KP, PTX)


@triton.jit
def keep_lost_rows(p_r_lost, b_r, o_t, o_v, tokens, V: tl.constexpr, VP: tl.constexpr, TRADED: tl.constexpr):
    """What rounding takes from r^T [BV, C] of a sequence's last chunk, to [C, VP] by token o_t [C, 1], in traded order if TRADED."""
    b_lost = tl.trans(rounded_off(b_r, p_r_lost.dtype.element_ty))
    if TRADED:
        b_lost = trade_rows(b_lost)
    tl.store(p_r_lost + o_t * VP + o_v[None, :], b_lost, mask=(o_t < tokens) & (o_v < V)[None, :])
