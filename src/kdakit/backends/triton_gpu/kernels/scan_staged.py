"""The scan of `scan` for blocks of 64 channels: fewer heads than would fill the chip, so that a chunk's time is what waits in its chain.

v comes through shared memory with the other tiles, asked for two chunks ahead, and out of it by a product with minus the identity, which is
exact and needs neither a thread's registers nor a barrier. Sequences may be scanned in parts, see `scan_parts`.
"""

from __future__ import annotations

from functools import lru_cache

import triton.language as tl

from kdakit.backends.triton_gpu.arguments import arguments, pages
from kdakit.backends.triton_gpu.config import Config
from kdakit.backends.triton_gpu.device.kept_states import keep_before_last, keep_lost_rows, keep_state
from kdakit.backends.triton_gpu.device.matrix import INTERPRETED, product, product_add, round_to, trade_rows
from kdakit.backends.triton_gpu.device.pages import load_page, mark_at, slot_at, store_mark, store_page
from kdakit.backends.triton_gpu.device.program import let_next_begin, part_of, row_tokens, sequence_of, state_offsets, wait_for_last
from kdakit.backends.triton_gpu.runtime.kernel import kernel
from kdakit.backends.triton_gpu.runtime.launch import Launch
from kdakit.backends.triton_gpu.runtime.layout import Layout
from kdakit.problem import Problem


@kernel
def staged_scan_kernel(
    p_v, p_tiles, p_k_solved, p_squares, p_decay, p_cu_seqlens, p_o, p_initial, p_final, p_states, p_chunk_offsets, p_checkpoints, p_slots,
    p_known, p_marks, p_maps, p_r, p_r_lost, p_states_lost, p_before_last,
    T, N, NT, HV, s_vb, s_vt, s_vh, EVERY, CHECKPOINT, FIRST, CAPACITY, s_page, PARTS,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, BV: tl.constexpr,
    ALIGN: tl.constexpr, VARLEN: tl.constexpr, V_FIRST: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr,
    HAS_STATES: tl.constexpr, HAS_CHECKPOINTS: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, VP: tl.constexpr,
    PART: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr, BY_ROWS: tl.constexpr,
):  # fmt: skip
    """As `scan_kernel`. Grid: (N * HV * n * cdiv(V, BV),), blocks of V fastest, then n parts of a sequence, then heads.

    PART: "whole", n = 1; "first", beside `parts_kernel`; "later", all others, or the only one of PARTS = 1. The first
    leaves its last state in slot 0 of parts [N * HV, PARTS - 1, VP + KP, KP], part i begins with what is in slot i - 1.

    p_r, for a backward that makes no states again: S goes to checkpoints [slot, HV, VP, KP] before every chunk, r to [B, T, HV, V], and
    what the ends of sequences want to where `replay` would leave it.
    """
    DTYPE: tl.constexpr = p_tiles.dtype.element_ty
    NV: tl.constexpr = (V + BV - 1) // BV
    wait_for_last(PART != "whole" and not INTERPRETED)
    let_next_begin(PART != "whole" and not INTERPRETED)
    i_p = tl.program_id(0).to(tl.int64)
    i_v, i_nh = (i_p % NV).to(tl.int32), i_p // NV
    i_part = 0
    if PART == "later":
        others = tl.maximum(PARTS - 1, 1)
        i_part, i_nh = (i_nh % others).to(tl.int32) + PARTS - others, i_nh // others
    i_n, i_h = i_nh // HV, i_nh % HV
    i_b, bos, length, i_slot = sequence_of(p_cu_seqlens, i_n, T, NT, C, VARLEN)
    first, end, last = part_of(length, i_part, PARTS, C)
    if PART == "later":  # noqa: SIM102 - the compiler decides the one, the device the other
        if (first >= end) & (i_part > 0):
            return
    o_c, o_k, o_v = tl.arange(0, C), tl.arange(0, KP), i_v * BV + tl.arange(0, BV)
    o_t = row_tokens(C, HALF, GROUP)
    o_out = trade_rows(o_t[:, None])  # [C, 1]
    m_v = o_v < V
    m_state = m_v[:, None] & (o_k < K)[None, :]
    b_S = tl.zeros([BV, KP], tl.float32)
    if p_marks is not None:  # here, so that it is there when the state is
        mark = mark_at(p_marks + i_slot + first, first < end, FIRST, CAPACITY)
    if PAGED:
        b_S = load_page(p_initial, p_slots, p_known, i_n, s_page, FIRST, CAPACITY, i_h, o_v, o_k, m_state, PAGE, K, V, V_FIRST)
        _i_page, real = slot_at(p_slots + i_n, FIRST, CAPACITY)
    elif HAS_INITIAL:
        b_S = tl.load(p_initial + state_offsets(i_nh, o_v, o_k, K, V, V_FIRST), mask=m_state, other=0.0).to(tl.float32)
    if PART == "later":  # noqa: SIM102
        if i_part > 0:
            b_S = tl.load(p_maps + ((i_nh * (PARTS - 1) + i_part - 1) * (VP + KP) + o_v[:, None]) * KP + o_k[None, :])
    p_v += (i_b * s_vb + (bos + first.to(tl.int64) * C) * s_vt + i_h * s_vh) * ALIGN
    p_v += (o_t.to(tl.int64) * s_vt)[:, None] * ALIGN + o_v[None, :]  # [C, BV]
    p_o += ((i_b * T + bos + first.to(tl.int64) * C + o_out) * HV + i_h) * V + o_v[None, :]  # [C, BV]
    if p_r is not None:
        chunks = tl.cdiv(length, C).to(tl.int32)
        # p_before_last and p_r_lost come along, so that no addresses wait for the last chunk in registers
        p_r += ((i_b * T + bos + first.to(tl.int64) * C) * HV + i_h) * V
        o_r = o_out * (HV * V) + o_v[None, :]  # [C, BV]
        p_checkpoints += ((i_slot + first) * HV + i_h) * (VP * KP)
        if p_states_lost is not None:
            p_states_lost += ((i_slot + first) * HV + i_h) * (VP * KP)
        if p_before_last is not None:
            p_before_last += (i_nh - (chunks - 2 - first)) * (K * V)
        if p_r_lost is not None:
            p_r_lost += (i_nh - (chunks - 1 - first)) * (C * VP)
    i_chunks, i_slot = i_slot, (i_slot + first) * HV + i_h
    p_tile = p_tiles + i_slot * 3 * C * KP + o_c[:, None] * KP + o_k[None, :]  # [C, KP]
    if p_k_solved is not None:
        p_k_solved += i_slot * C * KP + o_c[:, None] * KP + o_k[None, :]  # [C, KP]
    p_square = p_squares + i_slot * C * C + o_c[:, None] * C + o_c[None, :]  # [C, C]
    p_decay += i_slot * KP + o_k
    b_minus = tl.where(o_c[:, None] == o_c[None, :], -1.0, 0.0).to(DTYPE)
    if HAS_STATES:
        i_state = tl.load(p_chunk_offsets + i_n) if VARLEN else i_n * tl.cdiv(NT, EVERY)
    if PAGED:
        if not real:  # zeros, here rather than by a choice in every chunk
            for i_c in range(first, end):
                m_o = (o_out < length - i_c * C) & m_v[None, :]
                tl.store(p_o + tl.cast(i_c - first, tl.int64) * C * HV * V, tl.zeros([C, BV], p_o.dtype.element_ty), mask=m_o)
        end = tl.where(real, end, first)
    if HAS_CHECKPOINTS and p_r is None:  # counted along, since a division of 64-bit numbers takes longer than what waits for it
        i_point, beyond = (i_chunks + first) // CHECKPOINT, ((i_chunks + first) % CHECKPOINT).to(tl.int32)
    if p_marks is not None:  # noqa: SIM102 - the compiler decides the one, the device the other
        if (mark >= 0) & real:
            store_mark(p_final, mark, s_page, i_h, i_v, o_k, b_S, PAGE, K, V, V_FIRST, BV, KP, PTX, False)
    if PART == "later" and p_before_last is not None:  # noqa: SIM102
        if (first + 1 == chunks) & (first > 0):
            keep_before_last(p_before_last - K * V, b_S, o_v, o_k, K, V, BV, KP, V_FIRST, PTX)
    for i_c in tl.range(first, end, num_stages=STAGES):
        if HAS_STATES:
            o_state = state_offsets((i_state + i_c // EVERY) * HV + i_h, o_v, o_k, K, V, V_FIRST)
            tl.store(p_states + o_state, round_to(b_S, p_states.dtype.element_ty), mask=m_state & (i_c % EVERY == 0))
        if p_marks is not None:
            mark = mark_at(p_marks + i_chunks + i_c + 1, i_c + 1 < end, FIRST, CAPACITY)
        if p_r is not None:
            last = length - i_c * C <= C
            keep_state(p_checkpoints, p_states_lost, b_S, i_v, BV, KP, PTX and BV == 64)
            p_checkpoints += tl.cast(VP * KP, tl.int64) * HV
            if p_states_lost is not None:
                p_states_lost += tl.cast(VP * KP, tl.int64) * HV
        elif HAS_CHECKPOINTS:
            if (beyond == 0) & (i_c > 0):
                p_point = p_checkpoints + ((i_point * HV + i_h) * VP + o_v[:, None]) * KP + o_k[None, :]
                tl.store(p_point, round_to(b_S, p_checkpoints.dtype.element_ty), mask=m_v[:, None])
            beyond += 1
            i_point += (beyond == CHECKPOINT).to(tl.int64)
            beyond = tl.where(beyond == CHECKPOINT, 0, beyond)
        b_v = tl.load(p_v, mask=(o_t < length - i_c * C)[:, None] & m_v[None, :], other=0.0)  # [C, BV]
        b_k_in = tl.load(p_tile)  # [C, KP]
        b_k_solved = tl.load(p_tile + 2 * C * KP if p_k_solved is None else p_k_solved)  # [C, KP]
        b_q_decayed = tl.load(p_tile + C * KP)  # [C, KP]
        b_A_solved = tl.load(p_square)  # [C, C]
        b_decay = tl.load(p_decay)  # [KP]
        b_Sn = round_to(b_S, DTYPE)
        b_S *= b_decay[None, :]
        b_r = product(tl.trans(b_v), b_minus, PRECISION)  # [BV, C]
        b_r = product_add(b_Sn, tl.trans(b_k_in), b_r, PRECISION)  # [BV, C]: -r
        b_o = product(b_Sn, tl.trans(b_q_decayed), PRECISION)  # [BV, C]
        if p_r_lost is not None:
            if last:
                keep_lost_rows(p_r_lost, -b_r, o_out, o_v, length - i_c * C, V, VP, True)
            p_r_lost += C * VP
        b_r = round_to(-b_r, DTYPE)
        b_S = product_add(b_r, b_k_solved, b_S, PRECISION)  # [BV, KP]
        b_o = product_add(b_r, tl.trans(b_A_solved), b_o, PRECISION)
        m_o = (o_out < length - i_c * C) & m_v[None, :]
        tl.store(p_o, round_to(trade_rows(tl.trans(b_o)), p_o.dtype.element_ty), mask=m_o)
        if p_r is not None:
            tl.store(p_r + o_r, trade_rows(tl.trans(b_r)), mask=m_o)
            p_r += tl.cast(C, tl.int64) * HV * V
            if p_before_last is not None:
                if (i_c + 2 == chunks) & (chunks == end):  # of the last chunk's own part
                    keep_before_last(p_before_last, b_S, o_v, o_k, K, V, BV, KP, V_FIRST, PTX)
                p_before_last += K * V
        p_v += tl.cast(C, tl.int64) * s_vt * ALIGN
        p_o += tl.cast(C, tl.int64) * HV * V
        p_tile += tl.cast(3 * C * KP, tl.int64) * HV
        if p_k_solved is not None:
            p_k_solved += tl.cast(C * KP, tl.int64) * HV
        p_square += tl.cast(C * C, tl.int64) * HV
        p_decay += tl.cast(KP, tl.int64) * HV
        if p_marks is not None:  # noqa: SIM102
            if mark >= 0:
                store_mark(p_final, mark, s_page, i_h, i_v, o_k, b_S, PAGE, K, V, V_FIRST, BV, KP, PTX, BY_ROWS)
    if PAGED:
        store_page(p_final, p_slots + i_n, s_page, FIRST, CAPACITY, i_h, o_v, o_k, b_S, m_state & last, PAGE, K, V, V_FIRST)
    elif HAS_FINAL:
        o_state = state_offsets(i_nh, o_v, o_k, K, V, V_FIRST)
        tl.store(p_final + o_state, b_S, mask=m_state & last)
    if PART == "first":
        tl.store(p_maps + (i_nh * (PARTS - 1) * (VP + KP) + o_v[:, None]) * KP + o_k[None, :], b_S)


@lru_cache(maxsize=1024)
def launch(problem: Problem, config: Config, layout: Layout, parts: int, part: str, of_pages: tuple | None = None) -> Launch:
    """of_pages: see `arguments.pages`. Of a sequence in `parts` parts: the whole, the first, or all later ones."""
    grid = problem.N * problem.HV * -(-problem.V // config.block_v) * (max(parts - 1, 1) if part == "later" else 1)
    values = arguments(problem, config, layout) | pages(problem, config, of_pages)
    values |= dict(BV=config.block_v, STAGES=config.scan_stages, PARTS=parts, PART=part)
    chained = {"launch_pdl": True} if config.split and config.ptx else {}
    return Launch(staged_scan_kernel, grid, values, num_warps=config.scan_warps, registers=config.registers, **chained)
