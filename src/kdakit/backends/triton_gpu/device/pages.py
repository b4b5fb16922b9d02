"""A state's place in memory: in a tensor of states, or in a page that a slot names."""

from __future__ import annotations

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.device.matrix import round_to
from kdakit.backends.triton_gpu.device.program import state_offsets


@triton.jit
def slot_at(p_slot, FIRST, CAPACITY):
    """The slot that stands there, and whether it is one of FIRST .. CAPACITY."""
    slot = tl.load(p_slot).to(tl.int64)
    return slot, (slot >= FIRST) & (slot < CAPACITY)


@triton.jit
def page_offsets(slot, s_page, i_h, o_v, o_k, PAGE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """[BV, KP] offsets of S^T of head h in page `slot`; pages are s_page * PAGE elements apart."""
    return slot * s_page * PAGE + state_offsets(i_h, o_v, o_k, K, V, V_FIRST)


@triton.jit
def load_page(p_states, p_slots, p_known, i_n, s_page, FIRST, CAPACITY, i_h, o_v, o_k, m_state, PAGE: tl.constexpr, K: tl.constexpr,
              V: tl.constexpr, V_FIRST: tl.constexpr):  # fmt: skip
    """S^T [BV, KP] of sequence n in float32: zeros where its slot is nobody's, or where `known` says that it begins."""
    slot, real = slot_at(p_slots + i_n, FIRST, CAPACITY)
    if p_known is not None:
        real = real & (tl.load(p_known + i_n) != 0)
    o_state = page_offsets(slot, s_page, i_h, o_v, o_k, PAGE, K, V, V_FIRST)
    return tl.load(p_states + o_state, mask=m_state & real, other=0.0).to(tl.float32)


@triton.jit
def store_page(p_states, p_slot, s_page, FIRST, CAPACITY, i_h, o_v, o_k, b_S, m_state, PAGE: tl.constexpr, K: tl.constexpr,
               V: tl.constexpr, V_FIRST: tl.constexpr):  # fmt: skip
    """S^T to the page that stands at p_slot, if it is somebody's."""
    slot, real = slot_at(p_slot, FIRST, CAPACITY)
    if real:
        o_state = page_offsets(slot, s_page, i_h, o_v, o_k, PAGE, K, V, V_FIRST)
        tl.store(p_states + o_state, round_to(b_S, p_states.dtype.element_ty), mask=m_state)


# Two numbers by one store where they lie side by side: $2, $3 where to, $4, $5 what, $6, $7 whether.
STORE_PAIR = tl.constexpr("""{
.reg .pred first, second, pair; .reg .b64 next, odd;
setp.ne.b32 first, $6, 0; setp.ne.b32 second, $7, 0;
add.u64 next, $2, 4; and.b64 odd, $2, 7;
setp.eq.u64 pair, next, $3; setp.eq.and.u64 pair, odd, 0, pair;
and.pred pair, pair, first; and.pred pair, pair, second;
@pair st.global.v2.f32 [$2], {$4, $5};
not.pred pair, pair; and.pred first, first, pair; and.pred second, second, pair;
@first st.global.f32 [$2], $4;
@second st.global.f32 [$3], $5;
mov.b32 $0, 0; mov.b32 $1, 0; }""")


@triton.jit
def mark_at(p_slot, given, FIRST, CAPACITY):
    """The slot that stands there, -1 where none is given or it is nobody's: one number is kept during a chunk, and no predicate."""
    slot = tl.load(p_slot, mask=given, other=-1).to(tl.int64)
    return tl.where((slot >= FIRST) & (slot < CAPACITY), slot, -1).to(tl.int32)


@triton.jit
def store_mark(p_states, mark, s_page, i_h, i_v, o_k, b_S, PAGE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr,
               BV: tl.constexpr, KP: tl.constexpr, PTX: tl.constexpr, BY_ROWS: tl.constexpr):  # fmt: skip
    """S^T [BV, KP], the i_v-th block of value channels, to page `mark` amid a scan, whose shared memory is full of tiles to come.

    BY_ROWS: in the matrix units' order a warp has 16 adjacent rows, and a store deals rows out to warps in turn. They are named so that
    each warp gets its own: what turns them into whole rows then stays within a warp. Half of them at a time, with half of the memory.
    Otherwise in float32 every thread stores what it holds, two numbers at a time.
    """
    slot, i_row = mark.to(tl.int64), i_v.to(tl.int32) * BV
    W: tl.constexpr = BV // 16
    whole: tl.constexpr = KP == K and V % BV == 0
    if BY_ROWS:
        R: tl.constexpr = min(8, max(1, 4096 // (KP * p_states.dtype.element_ty.primitive_bitwidth)))  # rows that a warp stores at once
        halves = tl.split(tl.permute(tl.reshape(b_S, [W, 2, 8 // R, R, KP]), (2, 0, 3, 4, 1)))  # [8 / R, W, R, KP]
        o_r = tl.arange(0, BV // 2)
        for i in tl.static_range(2):
            o_v = i_row + o_r // R % W * 16 + i * 8 + o_r // (R * W) * R + o_r % R
            p_state = p_states + page_offsets(slot, s_page, i_h, o_v, o_k, PAGE, K, V, V_FIRST)
            b_rows = round_to(tl.reshape(halves[i], [BV // 2, KP]), p_states.dtype.element_ty)
            if whole:
                tl.store(p_state, b_rows)
            else:
                tl.store(p_state, b_rows, mask=(o_v < V)[:, None] & (o_k < K)[None, :])
    else:
        o_v = i_row + tl.arange(0, BV)
        p_state = p_states + page_offsets(slot, s_page, i_h, o_v, o_k, PAGE, K, V, V_FIRST)
        store_as_held(p_state, b_S, o_v, o_k, K, V, BV, KP, PTX)


@triton.jit
def store_as_held(p_state, b_S, o_v, o_k, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, KP: tl.constexpr, PTX: tl.constexpr):
    """S^T [BV, KP] to the pointers p_state; in float32 every thread stores what it holds, two numbers at a time."""
    whole: tl.constexpr = KP == K and V % BV == 0
    if PTX and p_state.dtype.element_ty == tl.float32:
        inside = tl.full([BV, KP], 1, tl.int32) if whole else ((o_v < V)[:, None] & (o_k < K)[None, :]).to(tl.int32)
        values = [p_state.to(tl.uint64), b_S, inside]
        tl.inline_asm_elementwise(STORE_PAIR, "=r,=r,l,l,f,f,r,r", values, dtype=tl.int32, is_pure=False, pack=2)
    elif whole:
        tl.store(p_state, round_to(b_S, p_state.dtype.element_ty))
    else:
        tl.store(p_state, round_to(b_S, p_state.dtype.element_ty), mask=(o_v < V)[:, None] & (o_k < K)[None, :])
