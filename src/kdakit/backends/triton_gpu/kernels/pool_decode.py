"""The token recurrence over a pool of states, in place."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.arguments import activations, strides
from kdakit.backends.triton_gpu.config import Cut
from kdakit.backends.triton_gpu.device.delta_rule import delta_rule
from kdakit.backends.triton_gpu.device.gate import log2_decay, write_strength
from kdakit.backends.triton_gpu.device.matrix import narrow
from kdakit.backends.triton_gpu.device.pool_state import load_state, owner_of, slot_of, store_state
from kdakit.backends.triton_gpu.device.program import state_offsets
from kdakit.backends.triton_gpu.runtime.kernel import kernel
from kdakit.backends.triton_gpu.runtime.launch import Launch
from kdakit.backends.triton_gpu.runtime.layout import Layout
from kdakit.problem import Problem


@kernel
def decode_kernel(
    p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_o, p_states, p_scales, p_residual, p_slots, p_generation,
    T, H, HV, CAPACITY, scale, lower_bound,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_gb, s_gt, s_gh, s_bb, s_bt, s_bh,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, ALIGN: tl.constexpr, V_FIRST: tl.constexpr,
    GATE: tl.constexpr, BETA: tl.constexpr, L2NORM: tl.constexpr, HAS_A_LOG: tl.constexpr, HAS_DT_BIAS: tl.constexpr,
    FEEDBACK: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """`delta_rule` token by token on the state of slot slots[n], S^T [BV, KP] in float32 registers.

    Grid: (N * HV * cdiv(V, BV),), blocks of V fastest, then heads. SINGLE: T = 1.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_p = tl.program_id(0)
    i_v, i_nh = i_p % NV, i_p // NV
    i_n, i_h = (i_nh // HV).to(tl.int64), (i_nh % HV).to(tl.int64)
    i_hk = (i_nh % HV // (HV // H)).to(tl.int64)
    slot, inside = slot_of(p_slots, i_n, CAPACITY)
    o_k = tl.arange(0, KP)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_state = m_v[:, None] & m_k[None, :]
    o_state = state_offsets(slot * HV + i_h, o_v, o_k, K, V, V_FIRST)
    o_scale = ((slot * HV + i_h) * K + o_k) * NV + i_v
    b_S, b_scale = load_state(p_states, p_scales, p_residual, o_state, o_scale, m_state & inside, m_k & inside, FEEDBACK)
    p_q += (i_n * s_qb + i_hk * s_qh) * ALIGN + o_k
    p_k += (i_n * s_kb + i_hk * s_kh) * ALIGN + o_k
    p_g += (i_n * s_gb + i_h * s_gh) * ALIGN + o_k
    p_v += (i_n * s_vb + i_h * s_vh) * ALIGN + o_v
    p_beta += i_n * s_bb + i_h * s_bh
    b_q = tl.load(p_q, mask=m_k, other=0.0)  # [KP]
    b_k = tl.load(p_k, mask=m_k, other=0.0)  # [KP]
    b_g = tl.load(p_g, mask=m_k, other=0.0)  # [KP]
    b_v = tl.load(p_v, mask=m_v, other=0.0)  # [BV]
    b_beta = tl.load(p_beta)
    p_o += (i_n * T * HV + i_h) * V + o_v
    a = tl.exp(tl.load(p_A_log + i_h).to(tl.float32)) if HAS_A_LOG else 1.0
    b_bias = tl.zeros([KP], tl.float32)
    if HAS_DT_BIAS:
        b_bias = tl.load(p_dt_bias + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    taken = owner_of(p_slots, p_generation, i_n, slot, inside) >= 0
    for t in range(1 if SINGLE else T):
        b_q_now, b_k_now, b_g_now, b_v_now = b_q.to(tl.float32), b_k.to(tl.float32), b_g.to(tl.float32), b_v.to(tl.float32)
        b_beta_now = write_strength(b_beta.to(tl.float32), BETA)
        if not SINGLE:  # the next token arrives while this one runs
            p_q += tl.cast(s_qt, tl.int64) * ALIGN
            p_k += tl.cast(s_kt, tl.int64) * ALIGN
            p_g += tl.cast(s_gt, tl.int64) * ALIGN
            p_v += tl.cast(s_vt, tl.int64) * ALIGN
            p_beta += s_bt
            more = t + 1 < T
            b_q = tl.load(p_q, mask=m_k & more, other=0.0)
            b_k = tl.load(p_k, mask=m_k & more, other=0.0)
            b_g = tl.load(p_g, mask=m_k & more, other=0.0)
            b_v = tl.load(p_v, mask=m_v & more, other=0.0)
            b_beta = tl.load(p_beta, mask=more, other=0.0)
        b_decay = tl.exp2(log2_decay(b_g_now, b_bias, a, lower_bound, GATE, True, False))
        b_o, b_S = delta_rule(b_S, b_q_now, b_k_now, b_v_now, b_beta_now, b_decay, scale, L2NORM)
        b_scale = b_scale * b_decay
        b_o = tl.where(taken, b_o, 0.0)
        tl.store(p_o, narrow(b_o, p_o.dtype.element_ty), mask=m_v)
        p_o += HV * V
    store_state(p_states, p_scales, p_residual, o_state, o_scale, m_state & taken, m_k & taken, b_S, b_scale, FEEDBACK)


@lru_cache(maxsize=1024)
def launch(problem: Problem, layout: Layout, pool: Any, capacity: int, cut: Cut) -> Launch:
    """pool: the sizes of its states."""
    grid = problem.N * problem.HV * -(-problem.V // cut.block_v)
    sizes = dict(T=problem.T, H=problem.H, HV=problem.HV, CAPACITY=capacity, ALIGN=layout.align, SINGLE=problem.T == 1)
    state = dict(K=problem.K, V=problem.V, KP=triton.next_power_of_2(problem.K), BV=cut.block_v)
    state |= dict(V_FIRST=pool.state_v_first, FEEDBACK=pool.feedback)
    return Launch(decode_kernel, grid, sizes | state | strides(layout) | activations(problem), num_warps=cut.warps)
