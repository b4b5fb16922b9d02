"""Backward, second launch: the states that the forward did not keep, from checkpoint to checkpoint."""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.arguments import arguments
from kdakit.backends.triton_gpu.config import Config, chunk_slots
from kdakit.backends.triton_gpu.device.matrix import product, product_add, round_to, rounded_off
from kdakit.backends.triton_gpu.device.program import first_slot, locate_chunk, row_tokens, state_offsets
from kdakit.backends.triton_gpu.runtime.kernel import kernel
from kdakit.backends.triton_gpu.runtime.launch import Launch
from kdakit.backends.triton_gpu.runtime.layout import Layout
from kdakit.problem import Problem


@triton.jit
def store_before_last(p_before_last, b_S, o_v, m_v, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, V_FIRST: tl.constexpr):
    """b_S [BV, KP] as final states lie."""
    o_k = tl.arange(0, KP)
    tl.store(p_before_last + state_offsets(0, o_v, o_k, K, V, V_FIRST), b_S, mask=m_v[:, None] & (o_k < K)[None, :])


@triton.jit
def replay_states(
    p_v, p_tiles, p_k_solved, p_decay, p_factors, p_states, p_states_lost, p_before_last, p_r, p_r_lost, b_S, i_last, length, HV,
    s_vt, o_v, m_v, chunks,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
    ALIGN: tl.constexpr, V_FIRST: tl.constexpr, HAS_LOST: tl.constexpr, ENDS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Per chunk, with S^T [BV, KP] the state before it:  stores S;  stores r = v - k_in S;  S <- Diag(decay) S + k_solved^T beta r.
    HAS_LOST: of a sequence's last chunk also what rounding takes from r, by token. p_states_lost: what it takes from S.
    p_before_last: gets S before the ENDS chunks up to i_last, the sequence's last, which may be another segment's; from the last on."""
    DTYPE: tl.constexpr = p_tiles.dtype.element_ty
    o_c, o_k = tl.arange(0, C), tl.arange(0, KP)
    o_t = row_tokens(C, HALF, GROUP)
    p_v += (o_t.to(tl.int64) * s_vt)[:, None] * ALIGN + o_v[None, :]
    p_r += (o_t.to(tl.int64) * HV)[:, None] * V + o_v[None, :]
    p_tile = p_tiles + o_c[:, None] * KP + o_k[None, :]
    p_solved = p_k_solved + (2 * C + o_c[:, None]) * KP + o_k[None, :]
    p_state = p_states + o_v[:, None] * KP + o_k[None, :]
    for i_c in tl.range(0, chunks, num_stages=STAGES):
        m_cv = (o_t < length - i_c * C)[:, None] & m_v[None, :]
        b_v = tl.load(p_v, mask=m_cv, other=0.0)
        b_k_in = tl.load(p_tile)  # [C, KP]
        b_solved = tl.load(p_solved)
        if b_solved.dtype != DTYPE:
            b_solved = round_to(b_solved.to(tl.float32), DTYPE)
        b_decay = tl.load(p_decay + o_k)
        b_beta = tl.load(p_factors + o_c)
        b_Sn = round_to(b_S, DTYPE)
        tl.store(p_state, b_Sn, mask=m_v[:, None])
        if p_states_lost is not None:
            p_lost = p_states_lost + i_c * (tl.cast(VP * KP, tl.int64) * HV) + o_v[:, None] * KP + o_k[None, :]
            tl.store(p_lost, rounded_off(b_S, DTYPE), mask=m_v[:, None])
        b_r = tl.trans(b_v).to(tl.float32) - product(b_Sn, tl.trans(b_k_in), PRECISION)  # [BV, C]
        tl.store(p_r, round_to(tl.trans(b_r), DTYPE), mask=m_cv)
        if HAS_LOST:
            m_last = m_cv & (length - i_c * C <= C)
            tl.store(p_r_lost + o_t[:, None] * VP + o_v[None, :], rounded_off(tl.trans(b_r), DTYPE), mask=m_last)
        b_S = product_add(round_to(b_r * b_beta[None, :], DTYPE), b_solved, b_S * b_decay[None, :], PRECISION)
        if p_before_last is not None:
            if ENDS == 1:
                if i_c + 1 == i_last:
                    store_before_last(p_before_last, b_S, o_v, m_v, K, V, KP, V_FIRST)
            elif (i_c + 1 <= i_last) & (i_c + 1 + ENDS > i_last):
                p_S = p_before_last + tl.cast(i_last - i_c - 1, tl.int64) * (K * V)
                store_before_last(p_S, b_S, o_v, m_v, K, V, KP, V_FIRST)
        p_v += tl.cast(C, tl.int64) * s_vt * ALIGN
        p_r += tl.cast(C, tl.int64) * HV * V
        p_tile += tl.cast(3 * C * KP, tl.int64) * HV
        p_solved += tl.cast(3 * C * KP, tl.int64) * HV
        p_state += tl.cast(VP * KP, tl.int64) * HV
        p_decay += tl.cast(KP, tl.int64) * HV
        p_factors += tl.cast(3 * C, tl.int64) * HV


@kernel
def replay_kernel(
    p_v, p_cu_seqlens, p_checkpoints, p_initial, p_tiles, p_k_solved, p_decay, p_factors, p_states, p_states_lost,
    p_before_last, p_r, p_r_lost, T, N, NT, HV, CHECKPOINT, POINTS, s_vb, s_vt, s_vh,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
    BV: tl.constexpr, ALIGN: tl.constexpr, VARLEN: tl.constexpr, V_FIRST: tl.constexpr, HAS_INITIAL: tl.constexpr,
    HAS_LOST: tl.constexpr, ENDS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One segment of one head: the chunks from a checkpoint, or from the sequence's start, to the next checkpoint or the end. The states
    before every chunk and r = v - k_in S, serial only within the segment.

    Grid: ((POINTS + N) * HV * cdiv(V, BV),), blocks of V fastest, then heads, then places where a segment may begin: the POINTS slots that
    CHECKPOINT divides, then the first slot of every sequence, which begins none of its own where it is one of those.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
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
    chunks = tl.minimum(CHECKPOINT - i_s % CHECKPOINT, tl.cdiv(eos - start, C)).to(tl.int32)
    o_k = tl.arange(0, KP)
    o_v = i_v.to(tl.int32) * BV + tl.arange(0, BV)
    m_v = o_v < V
    p_point = p_checkpoints + ((i_s // CHECKPOINT * HV + i_h) * VP + o_v[:, None]) * KP + o_k[None, :]
    b_S = tl.load(p_point, mask=m_v[:, None] & (i_c > 0), other=0.0).to(tl.float32)
    if HAS_INITIAL:
        m_first = m_v[:, None] & (o_k < K)[None, :] & (i_c == 0)
        b_S += tl.load(p_initial + state_offsets(i_n * HV + i_h, o_v, o_k, K, V, V_FIRST), mask=m_first, other=0.0).to(tl.float32)
    if HAS_LOST:
        p_r_lost += (i_n * HV + i_h) * C * VP
    if p_states_lost is not None:
        p_states_lost += i_p * VP * KP
    i_last = -1
    if p_before_last is not None:
        p_before_last += (i_n * HV + i_h) * (ENDS * K * V)
        i_last = tl.cdiv(eos - start, C).to(tl.int32) - 1
    replay_states(
        p_v + (i_b * s_vb + start * s_vt + i_h * s_vh) * ALIGN, p_tiles + i_p * 3 * C * KP, p_k_solved + i_p * 3 * C * KP,
        p_decay + i_p * KP, p_factors + i_p * 3 * C, p_states + i_p * VP * KP, p_states_lost,
        p_before_last, p_r + ((i_b * T + start) * HV + i_h) * V, p_r_lost, b_S, i_last, eos - start, HV,
        s_vt, o_v, m_v, chunks,
        K, V, KP, VP, C, HALF, GROUP, ALIGN, V_FIRST, HAS_LOST, ENDS, PRECISION, STAGES,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def launch(problem: Problem, config: Config, layout: Layout) -> Launch:
    points = -(-chunk_slots(problem, config.chunk) // config.checkpoint)
    grid = (points + problem.N) * problem.HV * -(-problem.V // config.replay_block_v)
    values = arguments(problem, config, layout) | dict(POINTS=points, BV=config.replay_block_v, STAGES=config.replay_stages)
    return Launch(replay_kernel, grid, values, num_warps=config.replay_warps, registers=config.registers)
