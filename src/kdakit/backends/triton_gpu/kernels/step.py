"""The token recurrence: decoding and short sequences, one launch."""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.arguments import arguments
from kdakit.backends.triton_gpu.config import Config
from kdakit.backends.triton_gpu.device.delta_rule import delta_rule
from kdakit.backends.triton_gpu.device.gate import gate_decay, gate_slope, log2_decay, write_strength
from kdakit.backends.triton_gpu.device.matrix import round_to
from kdakit.backends.triton_gpu.device.program import state_offsets
from kdakit.backends.triton_gpu.runtime.kernel import kernel
from kdakit.backends.triton_gpu.runtime.launch import Launch
from kdakit.backends.triton_gpu.runtime.layout import Layout
from kdakit.problem import Problem


@kernel
def step_kernel(
    p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_cu_seqlens, p_o, p_initial, p_final,
    T, H, HV, scale, lower_bound,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_gb, s_gt, s_gh, s_bb, s_bt, s_bh,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, ALIGN: tl.constexpr, VARLEN: tl.constexpr, V_FIRST: tl.constexpr,
    GATE: tl.constexpr, BETA: tl.constexpr, L2NORM: tl.constexpr, HAS_A_LOG: tl.constexpr, HAS_DT_BIAS: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, EXACT_DECAY: tl.constexpr,
):  # fmt: skip
    """`delta_rule` token by token, with S^T [BV, KP] in float32 registers.

    EXACT_DECAY: to a rounding. The hardware's 2^x is off to one side, and where every gate is slow, a state keeps that of all its tokens.
    Grid: (N * HV * cdiv(V, BV),), blocks of V fastest, then heads.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_p = tl.program_id(0).to(tl.int64)
    i_v, i_nh = i_p % NV, i_p // NV
    i_n, i_h = i_nh // HV, i_nh % HV
    if VARLEN:
        bos = tl.load(p_cu_seqlens + i_n).to(tl.int64)
        length = (tl.load(p_cu_seqlens + i_n + 1).to(tl.int64) - bos).to(tl.int32)
        i_b = i_n * 0
    else:
        bos = i_n * 0
        length = T
        i_b = i_n
    i_hk = i_h // (HV // H)
    o_k = tl.arange(0, KP)
    o_v = i_v.to(tl.int32) * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_state = m_v[:, None] & m_k[None, :]
    o_state = state_offsets(i_nh, o_v, o_k, K, V, V_FIRST)
    p_q += (i_b * s_qb + bos * s_qt + i_hk * s_qh) * ALIGN + o_k
    p_k += (i_b * s_kb + bos * s_kt + i_hk * s_kh) * ALIGN + o_k
    p_g += (i_b * s_gb + bos * s_gt + i_h * s_gh) * ALIGN + o_k
    p_v += (i_b * s_vb + bos * s_vt + i_h * s_vh) * ALIGN + o_v
    p_beta += i_b * s_bb + bos * s_bt + i_h * s_bh
    p_o += ((i_b * T + bos) * HV + i_h) * V + o_v
    b_S = tl.zeros([BV, KP], tl.float32)
    if HAS_INITIAL:
        b_S = tl.load(p_initial + o_state, mask=m_state, other=0.0).to(tl.float32)
    a = gate_slope(p_A_log, i_h, True, HAS_A_LOG) if EXACT_DECAY else tl.exp(tl.load(p_A_log + i_h).to(tl.float32)) if HAS_A_LOG else 1.0
    b_bias = tl.zeros([KP], tl.float32)
    if HAS_DT_BIAS:
        b_bias = tl.load(p_dt_bias + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    for _ in range(length):
        b_q = tl.load(p_q, mask=m_k, other=0.0).to(tl.float32)  # [KP]
        b_k = tl.load(p_k, mask=m_k, other=0.0).to(tl.float32)  # [KP]
        b_g = tl.load(p_g, mask=m_k, other=0.0).to(tl.float32)  # [KP]
        b_v = tl.load(p_v, mask=m_v, other=0.0).to(tl.float32)  # [BV]
        b_beta = write_strength(tl.load(p_beta).to(tl.float32), BETA, EXACT_DECAY)
        if EXACT_DECAY:
            b_decay = gate_decay(b_g + b_bias, a, lower_bound, GATE, True, False)
        else:
            b_decay = tl.exp2(log2_decay(b_g, b_bias, a, lower_bound, GATE, True, False))
        b_o, b_S = delta_rule(b_S, b_q, b_k, b_v, b_beta, b_decay, scale, L2NORM)
        tl.store(p_o, round_to(b_o, p_o.dtype.element_ty), mask=m_v)
        p_q += tl.cast(s_qt, tl.int64) * ALIGN
        p_k += tl.cast(s_kt, tl.int64) * ALIGN
        p_g += tl.cast(s_gt, tl.int64) * ALIGN
        p_v += tl.cast(s_vt, tl.int64) * ALIGN
        p_beta += s_bt
        p_o += HV * V
    if HAS_FINAL:
        tl.store(p_final + o_state, round_to(b_S, p_final.dtype.element_ty), mask=m_state)


@lru_cache(maxsize=1024)
def launch(problem: Problem, config: Config, layout: Layout, has_final: bool) -> Launch:
    grid = problem.N * problem.HV * -(-problem.V // config.step_block_v)
    values = dict(KP=triton.next_power_of_2(problem.K), BV=config.step_block_v, HAS_FINAL=has_final)
    return Launch(step_kernel, grid, arguments(problem, config, layout) | values, num_warps=config.step_warps)
