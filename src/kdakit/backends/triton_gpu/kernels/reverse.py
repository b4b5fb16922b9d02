"""Backward, third launch: the serial pass over a sequence's chunks from its end, with the gradient of the state in registers."""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.arguments import arguments
from kdakit.backends.triton_gpu.config import Config, exact_q, padded
from kdakit.backends.triton_gpu.device.gate import tiny_strength
from kdakit.backends.triton_gpu.device.matrix import exponents, product, product_add, round_to, rounded_off, scaled_by, stored_operand
from kdakit.backends.triton_gpu.device.program import first_slot, row_tokens, state_offsets
from kdakit.backends.triton_gpu.runtime.kernel import kernel
from kdakit.backends.triton_gpu.runtime.launch import Launch
from kdakit.backends.triton_gpu.runtime.layout import Layout
from kdakit.problem import Problem


@triton.jit
def scaled_product(a, b, PRECISION: tl.constexpr):
    """a @ b for a in float32 and b in float16: rows of a are brought to float16's range by powers of 2."""
    bits = exponents(tl.max(tl.abs(a), 1))
    return product(scaled_by(a, bits), b, PRECISION) * bits.to(tl.float32, bitcast=True)[:, None]


@kernel
def reverse_kernel(
    p_d_o, p_tiles, p_k_solved, p_solved, p_q_lost, p_decay, p_factors, p_cu_seqlens, p_d_final, p_d_states, p_d_states_lost, p_d_v,
    p_after_first, p_y_lost, p_alone, p_d_initial, T, NT, HV,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
    BV: tl.constexpr, VARLEN: tl.constexpr, V_FIRST: tl.constexpr, HAS_FINAL: tl.constexpr, HAS_INITIAL: tl.constexpr,
    HAS_LOST: tl.constexpr, ENDS: tl.constexpr, BETA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Per chunk, from the last to the first, with dS' the gradient of the state after it:

        y = (A_qk inverse)^T d_o + inverse^T k_decayed dS'        dS = Diag(decay) dS' + q_decayed^T d_o - k_in^T beta y

    y is the gradient of beta (v - k_in S), so that beta y is that of v. Writes d_v = beta y, dS' for every chunk and dS for the initial
    state. Where beta is the caller's own it may be 0, and its gradient needs y: alone [slot, HV, C, VP] gets that of such tokens.
    HAS_LOST: y_lost [N, HV, C, VP] gets what rounding takes from either in a sequence's last chunk. q_lost: what it took from q_decayed.
    d_states_lost: gets what it takes from dS'. after_first: gets dS' of the first ENDS chunks but the last.
    Grid: (N * HV * cdiv(V, BV),), blocks of V fastest, then heads. dS^T [BV, KP] stays in float32 registers.
    """
    DTYPE: tl.constexpr = p_tiles.dtype.element_ty
    NV: tl.constexpr = (V + BV - 1) // BV
    i_p = tl.program_id(0).to(tl.int64)
    i_v, i_nh = i_p % NV, i_p // NV
    i_n, i_h = i_nh // HV, i_nh % HV
    if VARLEN:
        bos = tl.load(p_cu_seqlens + i_n).to(tl.int64)
        length = tl.load(p_cu_seqlens + i_n + 1).to(tl.int64) - bos
        i_slot = first_slot(p_cu_seqlens, i_n, C)
        i_b = i_n * 0
    else:
        bos = i_n * 0
        length = bos + T
        i_slot = i_n * NT
        i_b = i_n
    o_c, o_k = tl.arange(0, C), tl.arange(0, KP)
    o_t = row_tokens(C, HALF, GROUP)
    o_v = i_v.to(tl.int32) * BV + tl.arange(0, BV)
    m_v = o_v < V
    m_state = m_v[:, None] & (o_k < K)[None, :]
    o_state = state_offsets(i_nh, o_v, o_k, K, V, V_FIRST)
    b_dS = tl.zeros([BV, KP], tl.float32)
    if HAS_FINAL:
        b_dS = tl.load(p_d_final + o_state, mask=m_state, other=0.0).to(tl.float32)
    chunks = tl.cdiv(length, C).to(tl.int32)
    o_row = ((i_b * T + bos + o_t) * HV + i_h)[:, None] * V + o_v[None, :]  # [C, BV]
    i_slot = i_slot * HV + i_h
    for i in tl.range(0, chunks, num_stages=STAGES):
        i_c = chunks - 1 - i
        m_cv = (o_t < length - i_c * C)[:, None] & m_v[None, :]
        o_cv = o_row + tl.cast(C * i_c, tl.int64) * HV * V
        i_at = i_slot + tl.cast(i_c, tl.int64) * HV
        p_tile = p_tiles + i_at * 3 * C * KP + o_c[:, None] * KP + o_k[None, :]
        b_d_o = tl.load(p_d_o + o_cv, mask=m_cv, other=0.0)  # [C, BV]
        b_k_solved = tl.load(p_k_solved + (i_at * 3 + 2) * C * KP + o_c[:, None] * KP + o_k[None, :])  # [C, KP]
        b_k_in = tl.load(p_tile)  # [C, KP]
        b_q_decayed = tl.load(p_tile + C * KP)  # [C, KP]
        b_A_solved = tl.load(p_solved + i_at * C * C + o_c[:, None] * C + o_c[None, :])  # [C, C]
        b_decay = tl.load(p_decay + i_at * KP + o_k)
        b_beta = tl.load(p_factors + i_at * 3 * C + o_c)
        b_dSn = round_to(b_dS, DTYPE)
        tl.store(p_d_states + (i_at * VP + o_v[:, None]) * KP + o_k[None, :], b_dSn, mask=m_v[:, None])
        if p_d_states_lost is not None:
            p_lost = p_d_states_lost + (i_at * VP + o_v[:, None]) * KP + o_k[None, :]
            tl.store(p_lost, rounded_off(b_dS, DTYPE), mask=m_v[:, None])
        # The next state begins before this one is used up: in any other order the compiler runs out of registers.
        b_next = product_add(tl.trans(b_d_o), b_q_decayed, b_dS * b_decay[None, :], PRECISION)  # [BV, KP]
        if p_q_lost is not None:
            p_lost = p_q_lost + i_at * C * KP + o_c[:, None] * KP + o_k[None, :]
            # The first chunk's is left to `restore_kernel` in float16, in which strong decays leave nothing of it.
            b_q_lost = tl.load(p_lost, mask=i_c > 0, other=0.0) if DTYPE.is_fp16() else tl.load(p_lost)
            b_next = product_add(tl.trans(b_d_o), b_q_lost, b_next, PRECISION)
        b_y = product(tl.trans(b_d_o), b_A_solved, PRECISION)  # [BV, C]
        if b_k_solved.dtype == DTYPE:
            b_y = product_add(b_dSn, tl.trans(b_k_solved), b_y, PRECISION)
        else:
            b_y += scaled_product(b_dS, tl.trans(b_k_solved), PRECISION)
        tl.store(p_d_v + o_cv, round_to(tl.trans(b_y * b_beta[None, :]), DTYPE), mask=m_cv)
        if BETA == "given":
            m_alone = m_cv & tiny_strength(b_beta, DTYPE)[:, None]
            tl.store(p_alone + i_at * C * VP + o_t[:, None] * VP + o_v[None, :], round_to(tl.trans(b_y), DTYPE), mask=m_alone)
        if HAS_LOST:
            b_taken = b_beta
            if BETA == "given":
                b_taken = tl.where(tiny_strength(b_beta, DTYPE), 1.0, b_beta)
            b_lost = rounded_off(tl.trans(b_y * b_taken[None, :]), DTYPE)
            tl.store(p_y_lost + i_nh * C * VP + o_t[:, None] * VP + o_v[None, :], b_lost, mask=m_cv & (i == 0))
        b_dS = product_add(round_to(b_y * -b_beta[None, :], DTYPE), b_k_in, b_next, PRECISION)
        if p_after_first is not None:
            if ENDS == 1:
                if i_c == 1:
                    tl.store(p_after_first + o_state, b_dS, mask=m_state)
            elif (i_c >= 1) & (i_c <= ENDS):
                tl.store(p_after_first + (i_nh * (ENDS - 1) + i_c - 1) * (K * V) + o_state, b_dS, mask=m_state)
    if HAS_INITIAL:
        tl.store(p_d_initial + o_state, round_to(b_dS, p_d_initial.dtype.element_ty), mask=m_state)


@kernel
def restore_kernel(
    p_d_o, p_d_v, p_first, p_cu_seqlens, p_d_initial, T, HV,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, BV: tl.constexpr,
    VARLEN: tl.constexpr, V_FIRST: tl.constexpr, HAD_Q_LOST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_initial += q_lost^T d_o - k_lost^T d_v  over the first chunk: what rounding took from q_decayed and k_in there, which nothing
    averages out of this one gradient - in float16 it can be all there is. HAD_Q_LOST: `reverse_kernel` had that of q, and nothing else is
    known of it. Grid: (N * HV * cdiv(V, BV),), blocks of V fastest, then heads.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_p = tl.program_id(0).to(tl.int64)
    i_v, i_nh = i_p % NV, i_p // NV
    i_n, i_h = i_nh // HV, i_nh % HV
    if VARLEN:
        bos = tl.load(p_cu_seqlens + i_n).to(tl.int64)
        length = tl.load(p_cu_seqlens + i_n + 1).to(tl.int64) - bos
        i_b = i_n * 0
    else:
        bos = i_n * 0
        length = bos + T
        i_b = i_n
    if length == 0:
        return
    o_c, o_k = tl.arange(0, C), tl.arange(0, KP)
    o_t = row_tokens(C, HALF, GROUP)
    o_v = i_v.to(tl.int32) * BV + tl.arange(0, BV)
    m_cv = (o_t < length)[:, None] & (o_v < V)[None, :]
    o_row = ((i_b * T + bos + o_t) * HV + i_h)[:, None] * V + o_v[None, :]  # [C, BV]
    p_lost = p_first + i_nh * 2 * C * KP + o_c[:, None] * KP + o_k[None, :]  # [C, KP]
    p_state = p_d_initial + state_offsets(i_nh, o_v, o_k, K, V, V_FIRST)
    m_state = (o_v < V)[:, None] & (o_k < K)[None, :]
    b_d_v = stored_operand(tl.load(p_d_v + o_row, mask=m_cv, other=0.0), p_first.dtype.element_ty)
    b_dS = -product(tl.trans(b_d_v), tl.load(p_lost), PRECISION)  # [BV, KP]
    if not HAD_Q_LOST:
        b_d_o = stored_operand(tl.load(p_d_o + o_row, mask=m_cv, other=0.0), p_first.dtype.element_ty)
        b_dS += product(tl.trans(b_d_o), tl.load(p_lost + C * KP), PRECISION)
    b_dS += tl.load(p_state, mask=m_state, other=0.0).to(tl.float32)
    tl.store(p_state, round_to(b_dS, p_d_initial.dtype.element_ty), mask=m_state)


@lru_cache(maxsize=1024)
def launch_reverse(problem: Problem, config: Config, layout: Layout, has_final: bool) -> Launch:
    """has_final: the final state has a gradient."""
    grid = problem.N * problem.HV * -(-problem.V // config.reverse_block_v)
    # A tile more a stage, for which there is no shared memory.
    wide = exact_q(problem) and problem.dtype == "bfloat16" and padded(problem.K) == 128
    values = dict(BV=config.reverse_block_v, STAGES=max(1, config.reverse_stages - wide), HAS_FINAL=has_final)
    options = dict(num_warps=config.reverse_warps, registers=config.registers)
    return Launch(reverse_kernel, grid, arguments(problem, config, layout) | values, **options)


@lru_cache(maxsize=1024)
def launch_restore(problem: Problem, config: Config, layout: Layout, had_q_lost: bool) -> Launch:
    grid = problem.N * problem.HV * -(-problem.V // config.restore_block_v)
    values = arguments(problem, config, layout) | dict(BV=config.restore_block_v, HAD_Q_LOST=had_q_lost)
    return Launch(restore_kernel, grid, values, num_warps=config.restore_warps)
