"""Stages state and output in one kernel: the serial pass over a sequence's chunks, with the state in registers."""

from __future__ import annotations

from functools import lru_cache

import triton.language as tl

from kdakit.backends.triton_gpu.arguments import arguments, pages
from kdakit.backends.triton_gpu.config import Config
from kdakit.backends.triton_gpu.device.kept_states import keep_before_last, keep_lost_rows, keep_state
from kdakit.backends.triton_gpu.device.matrix import product, product_add, round_to, trade_rows, trade_rows_back
from kdakit.backends.triton_gpu.device.pages import load_page, mark_at, slot_at, store_mark, store_page
from kdakit.backends.triton_gpu.device.program import row_tokens, sequence_of, state_offsets
from kdakit.backends.triton_gpu.runtime.kernel import kernel
from kdakit.backends.triton_gpu.runtime.launch import Launch
from kdakit.backends.triton_gpu.runtime.layout import Layout
from kdakit.problem import Problem


@kernel
def scan_kernel(
    p_v, p_tiles, p_k_solved, p_squares, p_decay, p_cu_seqlens, p_o, p_initial, p_final, p_states, p_chunk_offsets, p_checkpoints, p_slots,
    p_known, p_marks, p_r, p_r_lost, p_states_lost, p_before_last,
    T, N, NT, HV, s_vb, s_vt, s_vh, EVERY, CHECKPOINT, FIRST, CAPACITY, s_page,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, BV: tl.constexpr,
    ALIGN: tl.constexpr, VARLEN: tl.constexpr, V_FIRST: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr,
    HAS_STATES: tl.constexpr, HAS_CHECKPOINTS: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, VP: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr, BY_ROWS: tl.constexpr,
):  # fmt: skip
    """Per chunk, with S the state before it:

        r = v - k_in S        o = q_decayed S + A_solved r        S <- Diag(decay) S + k_solved^T r

    k_solved is the third of the tiles, or p_k_solved [slot, HV, C, KP] where a backward finds its own there.
    This is v_new = inverse beta r carried to both places where it is used, so that the chain from state to state is two products.
    Grid: (N * HV * cdiv(V, BV),), blocks of V fastest, then heads.
    S^T [BV, KP] stays in float32 registers; every product takes S^T or a value derived from it as its left factor, which needs no trip
    through shared memory. For a backward, S goes to checkpoints [.., VP, KP] before every chunk whose slot is a multiple of CHECKPOINT.

    p_r, for a backward that makes no states again: S goes to checkpoints [slot, HV, VP, KP] before every chunk, r to [B, T, HV, V], and
    what the ends of sequences want to where `replay` would leave it.

    PAGED: states come from and go to the pages that p_slots names, and S goes to page p_marks[slot] before the chunk of that slot. That is
    where the turn of the chunk before ends: the loop's pipeline puts a branch there wherever it is written, and the old state, if it is the
    one to be left, into registers beside the new one until then.
    """
    DTYPE: tl.constexpr = p_tiles.dtype.element_ty
    NV: tl.constexpr = (V + BV - 1) // BV
    WIDE: tl.constexpr = BV == 128 and DTYPE.is_bf16()  # the order of instructions that an H200 likes best for these
    i_p = tl.program_id(0).to(tl.int64)
    i_v, i_nh = i_p % NV, i_p // NV
    i_n, i_h = i_nh // HV, i_nh % HV
    i_b, bos, length, i_slot = sequence_of(p_cu_seqlens, i_n, T, NT, C, VARLEN)
    o_c = tl.arange(0, C)
    o_t = row_tokens(C, HALF, GROUP)[:, None]  # [C, 1]
    if WIDE:
        o_t = trade_rows(o_t)
    o_k = tl.arange(0, KP)
    o_v = i_v.to(tl.int32) * BV + tl.arange(0, BV)
    m_v = o_v < V
    m_state = m_v[:, None] & (o_k < K)[None, :]
    b_S = tl.zeros([BV, KP], tl.float32)
    if p_marks is not None:  # here, so that it is there when the state is
        mark = mark_at(p_marks + i_slot, length > 0, FIRST, CAPACITY)
    if PAGED:
        b_S = load_page(p_initial, p_slots, p_known, i_n, s_page, FIRST, CAPACITY, i_h, o_v, o_k, m_state, PAGE, K, V, V_FIRST)
        _i_page, real = slot_at(p_slots + i_n, FIRST, CAPACITY)
    elif HAS_INITIAL:
        b_S = tl.load(p_initial + state_offsets(i_nh, o_v, o_k, K, V, V_FIRST), mask=m_state, other=0.0).to(tl.float32)
    p_v += ((i_b * s_vb + bos * s_vt + i_h * s_vh) + o_t.to(tl.int64) * s_vt) * ALIGN + o_v[None, :]  # [C, BV]
    p_o += ((i_b * T + bos + o_t) * HV + i_h) * V + o_v[None, :]  # [C, BV]
    i_chunks, i_slot = i_slot, i_slot * HV + i_h
    if p_r is not None:  # p_before_last and p_r_lost come along, so that no addresses wait for the last chunk in registers
        p_r += ((i_b * T + bos) * HV + i_h) * V
        o_r = o_t * (HV * V) + o_v[None, :]  # [C, BV]
        p_checkpoints += i_slot * (VP * KP)
        if p_states_lost is not None:
            p_states_lost += i_slot * (VP * KP)
        if p_before_last is not None:
            p_before_last += (i_nh - (tl.cdiv(length, C) - 2)) * (K * V)
        if p_r_lost is not None:
            p_r_lost += (i_nh - (tl.cdiv(length, C) - 1)) * (C * VP)
    p_tile = p_tiles + i_slot * 3 * C * KP + o_c[:, None] * KP + o_k[None, :]  # [C, KP]
    if p_k_solved is not None:
        p_k_solved += i_slot * C * KP + o_c[:, None] * KP + o_k[None, :]  # [C, KP]
    p_square = p_squares + i_slot * C * C + o_c[:, None] * C + o_c[None, :]  # [C, C]
    p_decay += i_slot * KP + o_k
    if WIDE:  # there are twice as many threads as channels, and of fewer numbers than threads each would load all it needs
        p_decay = p_decay[None, :] + tl.zeros([2, 1], tl.int32)
    if HAS_STATES:
        i_state = tl.load(p_chunk_offsets + i_n) if VARLEN else i_n * tl.cdiv(NT, EVERY)
    b_v = tl.load(p_v, mask=(o_t < length) & m_v[None, :], other=0.0)  # [C, BV]
    chunks = tl.cdiv(length, C).to(tl.int32)
    if PAGED:
        if not real:  # zeros, here rather than by a choice in every chunk
            for i_c in range(0, chunks):
                m_cv = (o_t + i_c * C < length) & m_v[None, :]
                tl.store(p_o + tl.cast(i_c, tl.int64) * C * HV * V, tl.zeros([C, BV], p_o.dtype.element_ty), mask=m_cv)
        chunks = tl.where(real, chunks, 0)
    if HAS_CHECKPOINTS and p_r is None:  # counted along, since a division of 64-bit numbers takes longer than what waits for it
        i_point, beyond = i_chunks // CHECKPOINT, (i_chunks % CHECKPOINT).to(tl.int32)
    if p_marks is not None:  # noqa: SIM102 - the compiler decides the one, the device the other
        if (mark >= 0) & real:
            store_mark(p_final, mark, s_page, i_h, i_v, o_k, b_S, PAGE, K, V, V_FIRST, BV, KP, PTX, False)
    for i_c in tl.range(0, chunks, num_stages=STAGES):
        p_v += tl.cast(C, tl.int64) * s_vt * ALIGN
        b_v_next = tl.load(p_v, mask=(o_t + (i_c + 1) * C < length) & m_v[None, :], other=0.0)  # [C, BV]: a chunk ahead
        m_cv = (o_t + i_c * C < length) & m_v[None, :]
        if HAS_STATES:
            o_state = state_offsets((i_state + i_c // EVERY) * HV + i_h, o_v, o_k, K, V, V_FIRST)
            tl.store(p_states + o_state, round_to(b_S, p_states.dtype.element_ty), mask=m_state & (i_c % EVERY == 0))
        if p_marks is not None:
            mark = mark_at(p_marks + i_chunks + i_c + 1, i_c + 1 < chunks, FIRST, CAPACITY)
        if p_r is not None:
            last = length - i_c * C <= C
            keep_state(p_checkpoints, p_states_lost, b_S, i_v.to(tl.int32), BV, KP, PTX and WIDE)
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
        b_k_in = tl.load(p_tile)  # [C, KP]
        b_k_solved = tl.load(p_tile + 2 * C * KP if p_k_solved is None else p_k_solved)  # [C, KP]
        b_q_decayed = tl.load(p_tile + C * KP)  # [C, KP]
        b_A_solved = tl.load(p_square)  # [C, C]
        b_decay = tl.load(p_decay)
        if WIDE:
            b_decay, _ = tl.split(tl.trans(b_decay))
        b_Sn = round_to(b_S, DTYPE)
        if WIDE:
            b_S *= b_decay[None, :]
        if WIDE:
            b_v = trade_rows_back(b_v)
        b_r = tl.trans(b_v).to(tl.float32) - product(b_Sn, tl.trans(b_k_in), PRECISION)  # [BV, C]
        b_o = product(b_Sn, tl.trans(b_q_decayed), PRECISION)  # [BV, C]
        if p_r_lost is not None:
            if last:
                keep_lost_rows(p_r_lost, b_r, o_t, o_v, length - i_c * C, V, VP, WIDE)
            p_r_lost += C * VP
        b_r = round_to(b_r, DTYPE)
        if not WIDE:
            b_S *= b_decay[None, :]
        b_S = product_add(b_r, b_k_solved, b_S, PRECISION)  # [BV, KP]
        b_o = product_add(b_r, tl.trans(b_A_solved), b_o, PRECISION)
        b_o = tl.trans(b_o)
        if WIDE:
            b_o = trade_rows(b_o)
        tl.store(p_o, round_to(b_o, p_o.dtype.element_ty), mask=m_cv)
        if p_r is not None:
            b_rows = tl.trans(b_r)
            if WIDE:
                b_rows = trade_rows(b_rows)
            tl.store(p_r + o_r, b_rows, mask=m_cv)
            p_r += tl.cast(C, tl.int64) * HV * V
            if p_before_last is not None:
                if i_c + 2 == chunks:
                    keep_before_last(p_before_last, b_S, o_v, o_k, K, V, BV, KP, V_FIRST, PTX)
                p_before_last += K * V
        b_v = b_v_next
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
        store_page(p_final, p_slots + i_n, s_page, FIRST, CAPACITY, i_h, o_v, o_k, b_S, m_state, PAGE, K, V, V_FIRST)
    elif HAS_FINAL:
        o_state = state_offsets(i_nh, o_v, o_k, K, V, V_FIRST)
        tl.store(p_final + o_state, b_S, mask=m_state)


@lru_cache(maxsize=1024)
def launch(problem: Problem, config: Config, layout: Layout, of_pages: tuple[int, int, int, int] | None = None) -> Launch:
    """of_pages: see `arguments.pages`."""
    grid = problem.N * problem.HV * -(-problem.V // config.block_v)
    values = arguments(problem, config, layout) | pages(problem, config, of_pages) | dict(BV=config.block_v, STAGES=config.scan_stages)
    return Launch(scan_kernel, grid, values, num_warps=config.scan_warps, registers=config.registers)
