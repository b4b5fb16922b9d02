"""The scan of `scan` for more than 128 key channels: the state in two halves of channels, so that only one of them is in registers in 16
bits too, and a chunk's factors of decay only for one."""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.arguments import arguments, pages
from kdakit.backends.triton_gpu.config import Config
from kdakit.backends.triton_gpu.device.halves import load_part, store_part
from kdakit.backends.triton_gpu.device.matrix import product, product_add, round_to, trade_rows
from kdakit.backends.triton_gpu.device.pages import load_page, mark_at, slot_at, store_mark, store_page
from kdakit.backends.triton_gpu.device.program import row_tokens, sequence_of, state_offsets, zero_here
from kdakit.backends.triton_gpu.runtime.kernel import kernel
from kdakit.backends.triton_gpu.runtime.launch import Launch
from kdakit.backends.triton_gpu.runtime.layout import Layout
from kdakit.problem import Problem


@triton.jit
def load_half(
    p_initial, p_slots, p_known, i_n, i_h, HV, FIRST, CAPACITY, s_page, o_v, o_k,
    K: tl.constexpr, V: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, V_FIRST: tl.constexpr, HAS_INITIAL: tl.constexpr,
):  # fmt: skip
    """S^T [BV, KP / 2] of the channels o_k."""
    m_state = (o_v < V)[:, None] & (o_k < K)[None, :]
    b_S = tl.zeros(m_state.shape, tl.float32)
    if PAGED:
        b_S = load_page(p_initial, p_slots, p_known, i_n, s_page, FIRST, CAPACITY, i_h, o_v, o_k, m_state, PAGE, K, V, V_FIRST)
    elif HAS_INITIAL:
        b_S = load_part(p_initial, i_n * HV + i_h, o_v, o_k, o_v < V, K, V, V_FIRST)
    return b_S


@triton.jit
def store_half(
    p_final, p_slots, i_n, i_h, HV, FIRST, CAPACITY, s_page, o_v, o_k, b_S,
    K: tl.constexpr, V: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, V_FIRST: tl.constexpr, HAS_FINAL: tl.constexpr,
):  # fmt: skip
    if PAGED:
        m_state = (o_v < V)[:, None] & (o_k < K)[None, :]
        store_page(p_final, p_slots + i_n, s_page, FIRST, CAPACITY, i_h, o_v, o_k, b_S, m_state, PAGE, K, V, V_FIRST)
    elif HAS_FINAL:
        store_part(p_final, i_n * HV + i_h, b_S, o_v, o_k, K, V, V_FIRST)


@kernel
def wide_scan_kernel(
    p_v, p_tiles, p_squares, p_decay, p_cu_seqlens, p_o, p_initial, p_final, p_states, p_chunk_offsets, p_checkpoints, p_slots,
    p_known, p_marks, T, N, NT, HV, s_vb, s_vt, s_vh, EVERY, CHECKPOINT, FIRST, CAPACITY, s_page,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, KR: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
    BV: tl.constexpr, ALIGN: tl.constexpr, VARLEN: tl.constexpr, V_FIRST: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr,
    HAS_STATES: tl.constexpr, HAS_CHECKPOINTS: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, VP: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """As `scan_kernel`, and v as in `staged_scan_kernel`. Grid: (N * HV * cdiv(V, BV),), blocks of V fastest, then heads.

    S^T is S0 [BV, KP / 2] and S1 [BV, KR - KP / 2]; r = v - k_in0 S0 - k_in1 S1, and so on.
    """
    DTYPE: tl.constexpr = p_tiles.dtype.element_ty
    NV: tl.constexpr = (V + BV - 1) // BV
    KH: tl.constexpr = KP // 2
    i_p = tl.program_id(0).to(tl.int64)
    i_v, i_nh = (i_p % NV).to(tl.int32), i_p // NV
    i_n, i_h = i_nh // HV, i_nh % HV
    i_b, bos, length, i_slot = sequence_of(p_cu_seqlens, i_n, T, NT, C, VARLEN)
    o_c, o_k0, o_k1, o_v = tl.arange(0, C), tl.arange(0, KH), KH + tl.arange(0, KR - KH), i_v * BV + tl.arange(0, BV)
    o_t = row_tokens(C, HALF, GROUP)
    o_out = trade_rows(o_t[:, None])  # [C, 1]
    m_v = o_v < V
    m_S0, m_S1 = m_v[:, None] & (o_k0 < K)[None, :], m_v[:, None] & (o_k1 < K)[None, :]
    of_page = FIRST, CAPACITY, s_page
    b_S0 = load_half(p_initial, p_slots, p_known, i_n, i_h, HV, *of_page, o_v, o_k0, K, V, PAGED, PAGE, V_FIRST, HAS_INITIAL)
    b_S1 = load_half(p_initial, p_slots, p_known, i_n, i_h, HV, *of_page, o_v, o_k1, K, V, PAGED, PAGE, V_FIRST, HAS_INITIAL)
    p_v += (i_b * s_vb + bos * s_vt + i_h * s_vh) * ALIGN
    p_v += (o_t.to(tl.int64) * s_vt)[:, None] * ALIGN  # [C, 1]: pointers to all numbers would take registers that there are not
    p_o += ((i_b * T + bos + o_out) * HV + i_h) * V  # [C, 1]
    i_chunks, i_slot = i_slot, i_slot * HV + i_h
    p_tile = p_tiles + i_slot * 3 * C * KP + o_c[:, None] * KP + o_k0[None, :]  # [C, KH]
    p_square = p_squares + i_slot * C * C + o_c[:, None] * C + o_c[None, :]  # [C, C]
    if KR < KP:
        p_half = p_tiles + i_slot * 3 * C * KP + o_c[:, None] * KP + o_k1[None, :]  # [C, KR - KH]
        p_half_decay = p_decay + i_slot * KP + o_k1
    p_decay += i_slot * KP + o_k0
    b_minus = tl.where(o_c[:, None] == o_c[None, :], -1.0, 0.0).to(DTYPE)
    if HAS_STATES:
        i_state = tl.load(p_chunk_offsets + i_n) if VARLEN else i_n * tl.cdiv(NT, EVERY)
    chunks = tl.cdiv(length, C).to(tl.int32)
    if PAGED:
        _i_page, real = slot_at(p_slots + i_n, FIRST, CAPACITY)
        if not real:  # zeros, here rather than by a choice in every chunk
            for i_c in range(0, chunks):
                m_o = (o_out < length - i_c * C) & m_v[None, :]
                tl.store(p_o + tl.cast(i_c, tl.int64) * C * HV * V + o_v[None, :], tl.zeros([C, BV], p_o.dtype.element_ty), mask=m_o)
        chunks = tl.where(real, chunks, 0)
    if HAS_CHECKPOINTS:
        i_point, beyond = i_chunks // CHECKPOINT, (i_chunks % CHECKPOINT).to(tl.int32)
    for i_c in tl.range(0, chunks, num_stages=STAGES):
        if HAS_STATES:
            i_at, wanted = (i_state + i_c // EVERY) * HV + i_h, i_c % EVERY == 0
            b_Sn = round_to(b_S0, p_states.dtype.element_ty)
            tl.store(p_states + state_offsets(i_at, o_v, o_k0, K, V, V_FIRST), b_Sn, mask=m_S0 & wanted)
            b_Sn = round_to(b_S1, p_states.dtype.element_ty)
            tl.store(p_states + state_offsets(i_at, o_v, o_k1, K, V, V_FIRST), b_Sn, mask=m_S1 & wanted)
        if p_marks is not None:
            mark = mark_at(p_marks + i_chunks + i_c, True, FIRST, CAPACITY)
            if mark >= 0:
                store_mark(p_final, mark, s_page, i_h, i_v, o_k0, b_S0, PAGE, K, V, V_FIRST, BV, KH, PTX, False)
                store_mark(p_final, mark, s_page, i_h, i_v, o_k1, b_S1, PAGE, K, V, V_FIRST, BV, KR - KH, PTX, False)
        if HAS_CHECKPOINTS:
            if (beyond == 0) & (i_c > 0):
                p_row = p_checkpoints + ((i_point * HV + i_h) * VP + o_v[:, None]) * KP
                p_point = p_row + o_k0[None, :]
                tl.store(p_point, round_to(b_S0, p_checkpoints.dtype.element_ty), mask=m_v[:, None])
                p_point = p_row + o_k1[None, :] if KR < KP else p_point + KH
                tl.store(p_point, round_to(b_S1, p_checkpoints.dtype.element_ty), mask=m_v[:, None])
            beyond += 1
            i_point += (beyond == CHECKPOINT).to(tl.int64)
            beyond = tl.where(beyond == CHECKPOINT, 0, beyond)
        b_v = tl.load(p_v + o_v[None, :], mask=(o_t < length - i_c * C)[:, None] & m_v[None, :], other=0.0)  # [C, BV]
        p_tile1, p_decay1 = (p_half, p_half_decay) if KR < KP else (p_tile + KH, p_decay + KH)
        b_k0, b_k1 = tl.load(p_tile), tl.load(p_tile1)  # k_in
        b_q0, b_q1 = tl.load(p_tile + C * KP), tl.load(p_tile1 + C * KP)  # q_decayed
        b_s0, b_s1 = tl.load(p_tile + 2 * C * KP), tl.load(p_tile1 + 2 * C * KP)  # k_solved
        b_A_solved = tl.load(p_square)  # [C, C]
        b_d0, b_d1 = tl.load(p_decay), tl.load(p_decay1)
        b_r = product(tl.trans(b_v), b_minus, PRECISION)  # [BV, C]
        b_Sn = round_to(b_S0, DTYPE)
        b_r = product_add(b_Sn, tl.trans(b_k0), b_r, PRECISION)
        b_o = product(b_Sn, tl.trans(b_q0), PRECISION)
        b_Sn = round_to(b_S1, DTYPE)
        b_r = product_add(b_Sn, tl.trans(b_k1), b_r, PRECISION)  # [BV, C]: -r
        b_o = product_add(b_Sn, tl.trans(b_q1), b_o, PRECISION)
        b_r = round_to(-b_r, DTYPE)
        b_S0 = product_add(b_r, b_s0, b_S0 * b_d0[None, :], PRECISION)
        b_S1 = product_add(b_r, b_s1, b_S1 * b_d1[None, :], PRECISION)
        b_o = product_add(b_r, tl.trans(b_A_solved), b_o, PRECISION)
        m_o = (o_out < length - i_c * C) & m_v[None, :]
        tl.store(p_o + o_v[None, :], round_to(trade_rows(tl.trans(b_o)), p_o.dtype.element_ty), mask=m_o)
        p_v += tl.cast(C, tl.int64) * s_vt * ALIGN
        p_o += tl.cast(C, tl.int64) * HV * V
        p_tile += tl.cast(3 * C * KP, tl.int64) * HV
        p_square += tl.cast(C * C, tl.int64) * HV
        p_decay += tl.cast(KP, tl.int64) * HV
        if KR < KP:
            p_half += tl.cast(3 * C * KP, tl.int64) * HV
            p_half_decay += tl.cast(KP, tl.int64) * HV
    if HAS_FINAL:
        o_v += zero_here(chunks, PTX)
    store_half(p_final, p_slots, i_n, i_h, HV, *of_page, o_v, o_k0, b_S0, K, V, PAGED, PAGE, V_FIRST, HAS_FINAL)
    store_half(p_final, p_slots, i_n, i_h, HV, *of_page, o_v, o_k1, b_S1, K, V, PAGED, PAGE, V_FIRST, HAS_FINAL)


@lru_cache(maxsize=1024)
def launch(problem: Problem, config: Config, layout: Layout, of_pages: tuple[int, int, int, int] | None = None) -> Launch:
    """of_pages: see `arguments.pages`."""
    grid = problem.N * problem.HV * -(-problem.V // config.block_v)
    values = arguments(problem, config, layout) | pages(problem, config, of_pages) | dict(BV=config.block_v, STAGES=config.scan_stages)
    return Launch(wide_scan_kernel, grid, values, num_warps=config.scan_warps, registers=config.registers)
