"""The replay of `replay` for more than 128 key channels: the state in two halves of channels, as in `scan_wide`."""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.arguments import arguments
from kdakit.backends.triton_gpu.config import Config, chunk_slots
from kdakit.backends.triton_gpu.device.halves import keep_part, load_part, store_part
from kdakit.backends.triton_gpu.device.matrix import product, product_add, round_to, rounded_off
from kdakit.backends.triton_gpu.device.program import first_slot, locate_chunk, row_tokens, zero_here
from kdakit.backends.triton_gpu.runtime.kernel import kernel
from kdakit.backends.triton_gpu.runtime.launch import Launch
from kdakit.backends.triton_gpu.runtime.layout import Layout
from kdakit.problem import Problem


@triton.jit
def first_state(p_checkpoint, p_initial, i_nh, i_c, o_v, o_k, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
                V_FIRST: tl.constexpr, HAS_INITIAL: tl.constexpr):  # fmt: skip
    """S^T [BV, len(o_k)] that a segment starts from: the checkpoint, or where the sequence begins the caller's, or 0."""
    m_S = ((o_v < V) & (i_c > 0))[:, None]
    b_S = tl.load(p_checkpoint + o_v[:, None] * KP + o_k[None, :], mask=m_S, other=0.0).to(tl.float32)
    if HAS_INITIAL:
        b_S += load_part(p_initial, i_nh, o_v, o_k, (o_v < V) & (i_c == 0), K, V, V_FIRST)
    return b_S


@triton.jit
def next_state(p_solved, p_decay, b_r, b_S, o_c, o_k, KP: tl.constexpr, PRECISION: tl.constexpr):
    """Diag(decay) S + k_solved^T r, with r [BV, C] an operand."""
    b_solved = tl.load(p_solved + o_c[:, None] * KP + o_k[None, :])  # [C, len(o_k)]
    if b_solved.dtype != b_r.dtype:
        b_solved = round_to(b_solved.to(tl.float32), b_r.dtype)
    return product_add(b_r, b_solved, b_S * tl.load(p_decay + o_k)[None, :], PRECISION)


@kernel
def wide_replay_kernel(
    p_v, p_cu_seqlens, p_checkpoints, p_initial, p_tiles, p_k_solved, p_decay, p_factors, p_states, p_states_lost,
    p_before_last, p_r, p_r_lost, T, N, NT, HV, CHECKPOINT, POINTS, s_vb, s_vt, s_vh,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, KR: tl.constexpr, VP: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr,
    GROUP: tl.constexpr, BV: tl.constexpr, ALIGN: tl.constexpr, VARLEN: tl.constexpr, V_FIRST: tl.constexpr, HAS_INITIAL: tl.constexpr,
    HAS_LOST: tl.constexpr, ENDS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """As `replay_kernel`, of which this has the grid. Per chunk, with S0 and S1 the halves of S^T before it:

    stores S0, S1        stores r = v - k_in0 S0 - k_in1 S1        S0 <- Diag(decay0) S0 + k_solved0^T beta r, and so S1
    """
    DTYPE: tl.constexpr = p_tiles.dtype.element_ty
    NV: tl.constexpr = (V + BV - 1) // BV
    KH: tl.constexpr = KP // 2
    i_p = tl.program_id(0).to(tl.int64)
    i_v, i_p = i_p % NV, i_p // NV
    i_place, i_h = i_p // HV, i_p % HV
    i_s = i_place * CHECKPOINT
    if i_place >= POINTS:
        i_s = first_slot(p_cu_seqlens, i_place - POINTS, C) if VARLEN else (i_place - POINTS) * NT
        if i_s % CHECKPOINT == 0:
            return
    i_p = i_s * HV + i_h
    i_b, i_n, i_c, bos, eos = locate_chunk(p_cu_seqlens, i_s, T, N, NT, C, VARLEN)
    start = bos + i_c * C
    if start >= eos:
        return
    length = (eos - start).to(tl.int32)
    chunks = tl.minimum(CHECKPOINT - i_s % CHECKPOINT, tl.cdiv(length, C)).to(tl.int32)
    o_c, o_k0, o_k1 = tl.arange(0, C), tl.arange(0, KH), KH + tl.arange(0, KR - KH)
    o_v, o_t = i_v.to(tl.int32) * BV + tl.arange(0, BV), row_tokens(C, HALF, GROUP)
    m_v = (o_v < V)[None, :]
    i_nh = i_n * HV + i_h
    p_point = p_checkpoints + (i_s // CHECKPOINT * HV + i_h) * VP * KP
    b_S0 = first_state(p_point, p_initial, i_nh, i_c, o_v, o_k0, K, V, KP, V_FIRST, HAS_INITIAL)
    b_S1 = first_state(p_point, p_initial, i_nh, i_c, o_v, o_k1, K, V, KP, V_FIRST, HAS_INITIAL)
    p_v += (i_b * s_vb + start * s_vt + i_h * s_vh) * ALIGN
    p_v += (o_t.to(tl.int64) * s_vt)[:, None] * ALIGN  # [C, 1]: pointers to all numbers would take registers that there are not
    p_r += ((i_b * T + start + o_t) * HV + i_h)[:, None] * V  # [C, 1]
    if HAS_LOST:
        p_r_lost += i_nh * C * VP
    i_last = -1
    if p_before_last is not None:
        i_last = tl.cdiv(length, C) - 1
    for i in tl.range(0, chunks, num_stages=STAGES):
        i_at = i_p + tl.cast(i, tl.int64) * HV
        m_cv = (o_t < length - i * C)[:, None] & m_v
        p_tile, p_solved = p_tiles + i_at * 3 * C * KP, p_k_solved + (i_at * 3 + 2) * C * KP
        b_v = tl.load(p_v + o_v[None, :], mask=m_cv, other=0.0)  # [C, BV]
        b_k0 = tl.load(p_tile + o_c[:, None] * KP + o_k0[None, :])  # [C, KH]: k_in
        b_k1 = tl.load(p_tile + o_c[:, None] * KP + o_k1[None, :])
        b_beta = tl.load(p_factors + i_at * 3 * C + o_c)
        b_r = tl.trans(b_v).to(tl.float32)  # [BV, C]
        b_r -= product(keep_part(p_states, p_states_lost, i_at * VP * KP, b_S0, o_v, o_k0, V, KP), tl.trans(b_k0), PRECISION)
        b_r -= product(keep_part(p_states, p_states_lost, i_at * VP * KP, b_S1, o_v, o_k1, V, KP), tl.trans(b_k1), PRECISION)
        tl.store(p_r + o_v[None, :], round_to(tl.trans(b_r), DTYPE), mask=m_cv)
        if HAS_LOST:  # noqa: SIM102 - the one is known when this is compiled
            if length - i * C <= C:
                o_here = (o_t + zero_here(i, PTX))[:, None] * VP + o_v[None, :]
                tl.store(p_r_lost + o_here, rounded_off(tl.trans(b_r), DTYPE), mask=m_cv)
        b_r = round_to(b_r * b_beta[None, :], DTYPE)
        b_S0 = next_state(p_solved, p_decay + i_at * KP, b_r, b_S0, o_c, o_k0, KP, PRECISION)
        b_S1 = next_state(p_solved, p_decay + i_at * KP, b_r, b_S1, o_c, o_k1, KP, PRECISION)
        if p_before_last is not None:  # noqa: SIM102 - the one is known when this is compiled
            if (i + 1 <= i_last) & (i + 1 + ENDS > i_last):
                i_end, o_here = i_nh * ENDS + i_last - i - 1, o_v + zero_here(i, PTX)
                store_part(p_before_last, i_end, b_S0, o_here, o_k0, K, V, V_FIRST)
                store_part(p_before_last, i_end, b_S1, o_here, o_k1, K, V, V_FIRST)
        p_v += tl.cast(C, tl.int64) * s_vt * ALIGN
        p_r += tl.cast(C, tl.int64) * HV * V


@lru_cache(maxsize=1024)
def launch(problem: Problem, config: Config, layout: Layout) -> Launch:
    points = -(-chunk_slots(problem, config.chunk) // config.checkpoint)
    grid = (points + problem.N) * problem.HV * -(-problem.V // config.replay_block_v)
    values = arguments(problem, config, layout) | dict(POINTS=points, BV=config.replay_block_v, STAGES=config.replay_stages)
    return Launch(wide_replay_kernel, grid, values, num_warps=config.replay_warps, registers=config.registers)
