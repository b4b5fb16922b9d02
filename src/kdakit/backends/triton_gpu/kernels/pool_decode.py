"""The token recurrence over a pool of states, in place.

A pool is pages of one state [HV, K, V] or [HV, V, K] each, at any distance: ours, where an owner's generation says who may use one, or
somebody else's, where every slot from FIRST on is somebody's. Strides of pages come in units of PAGE, which are 16 where they can be.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.arguments import activations, strides
from kdakit.backends.triton_gpu.config import Cut
from kdakit.backends.triton_gpu.device.delta_rule import delta_rule
from kdakit.backends.triton_gpu.device.gate import log2_decay, write_strength
from kdakit.backends.triton_gpu.device.matrix import round_to
from kdakit.backends.triton_gpu.device.pages import page_offsets, slot_at
from kdakit.backends.triton_gpu.device.pool_state import load_state, owner_of, store_state
from kdakit.backends.triton_gpu.runtime.kernel import kernel
from kdakit.backends.triton_gpu.runtime.launch import Launch
from kdakit.backends.triton_gpu.runtime.layout import Layout
from kdakit.problem import Problem


@kernel
def decode_kernel(
    p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_o, p_states, p_scales, p_residual, p_slots, p_generation, p_accepted, p_cu_seqlens,
    T, H, HV, FIRST, CAPACITY, s_page, s_slot, s_span, scale, lower_bound,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_gb, s_gt, s_gh, s_bb, s_bt, s_bh, s_ob, s_ot, s_oh,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, ALIGN: tl.constexpr, PAGE: tl.constexpr, V_FIRST: tl.constexpr,
    GATE: tl.constexpr, BETA: tl.constexpr, L2NORM: tl.constexpr, HAS_A_LOG: tl.constexpr, HAS_DT_BIAS: tl.constexpr,
    FEEDBACK: tl.constexpr, SINGLE: tl.constexpr, OWNED: tl.constexpr, DRAFTED: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """`delta_rule` token by token on the state of slot slots[n], S^T [BV, KP] in float32 registers.

    Grid: (N * HV * cdiv(V, BV),), blocks of V fastest, then heads. SINGLE: T = 1. OWNED: the pool is ours and has generations. DRAFTED: the
    state comes from slots[n, accepted[n] - 1] (slots[n, 0] without accepted) and after token t goes to slots[n, t]. VARLEN: the tokens of
    row n are cu_seqlens[n * s_span] .. cu_seqlens[n * s_span + 1] of one row.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_p = tl.program_id(0)
    i_v, i_nh = i_p % NV, i_p // NV
    i_n, i_h = (i_nh // HV).to(tl.int64), (i_nh % HV).to(tl.int64)
    i_hk = (i_nh % HV // (HV // H)).to(tl.int64)
    p_slots += i_n * s_slot
    p_read = p_slots
    if p_accepted is not None:
        p_read += tl.maximum(tl.load(p_accepted + i_n).to(tl.int64), 1) - 1
    slot, inside = slot_at(p_read, FIRST, CAPACITY)
    i_b, bos, length = i_n, i_n * 0, T
    if VARLEN:
        i_b, bos = i_n * 0, tl.load(p_cu_seqlens + i_n * s_span).to(tl.int64)
        length = (tl.load(p_cu_seqlens + i_n * s_span + 1).to(tl.int64) - bos).to(tl.int32)
    o_k = tl.arange(0, KP)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_state = m_v[:, None] & m_k[None, :]
    o_state = page_offsets(slot, s_page, i_h, o_v, o_k, PAGE, K, V, V_FIRST)
    o_scale = ((slot * HV + i_h) * K + o_k) * NV + i_v
    b_S, b_scale = load_state(p_states, p_scales, p_residual, o_state, o_scale, m_state & inside, m_k & inside, FEEDBACK)
    p_q += (i_b * s_qb + bos * s_qt + i_hk * s_qh) * ALIGN + o_k
    p_k += (i_b * s_kb + bos * s_kt + i_hk * s_kh) * ALIGN + o_k
    p_g += (i_b * s_gb + bos * s_gt + i_h * s_gh) * ALIGN + o_k
    p_v += (i_b * s_vb + bos * s_vt + i_h * s_vh) * ALIGN + o_v
    p_beta += i_b * s_bb + bos * s_bt + i_h * s_bh
    m_k1, m_v1 = m_k, m_v
    if VARLEN:  # a row may have no token
        m_k1, m_v1 = m_k & (length > 0), m_v & (length > 0)
    b_q = tl.load(p_q, mask=m_k1, other=0.0)  # [KP]
    b_k = tl.load(p_k, mask=m_k1, other=0.0)  # [KP]
    b_g = tl.load(p_g, mask=m_k1, other=0.0)  # [KP]
    b_v = tl.load(p_v, mask=m_v1, other=0.0)  # [BV]
    b_beta = tl.load(p_beta, mask=length > 0, other=0.0) if VARLEN else tl.load(p_beta)
    if p_o is not None:
        p_o += i_b * s_ob + bos * s_ot + i_h * s_oh + o_v
    a = tl.exp(tl.load(p_A_log + i_h).to(tl.float32)) if HAS_A_LOG else 1.0
    b_bias = tl.zeros([KP], tl.float32)
    if HAS_DT_BIAS:
        b_bias = tl.load(p_dt_bias + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    taken = inside
    if OWNED:
        taken = owner_of(p_slots - i_n * s_slot, p_generation, i_n, slot, inside) >= 0
    for t in range(1 if SINGLE else length):
        b_q_now, b_k_now, b_g_now, b_v_now = b_q.to(tl.float32), b_k.to(tl.float32), b_g.to(tl.float32), b_v.to(tl.float32)
        b_beta_now = write_strength(b_beta.to(tl.float32), BETA, False)
        if not SINGLE:  # the next token arrives while this one runs
            p_q += tl.cast(s_qt, tl.int64) * ALIGN
            p_k += tl.cast(s_kt, tl.int64) * ALIGN
            p_g += tl.cast(s_gt, tl.int64) * ALIGN
            p_v += tl.cast(s_vt, tl.int64) * ALIGN
            p_beta += s_bt
            more = t + 1 < length
            b_q = tl.load(p_q, mask=m_k & more, other=0.0)
            b_k = tl.load(p_k, mask=m_k & more, other=0.0)
            b_g = tl.load(p_g, mask=m_k & more, other=0.0)
            b_v = tl.load(p_v, mask=m_v & more, other=0.0)
            b_beta = tl.load(p_beta, mask=more, other=0.0)
        b_decay = tl.exp2(log2_decay(b_g_now, b_bias, a, lower_bound, GATE, True, False))
        b_o, b_S = delta_rule(b_S, b_q_now, b_k_now, b_v_now, b_beta_now, b_decay, scale, L2NORM)
        b_scale = b_scale * b_decay
        if p_o is not None:
            tl.store(p_o, round_to(tl.where(taken, b_o, 0.0), p_o.dtype.element_ty), mask=m_v)
            p_o += s_ot
        if DRAFTED:
            to, real = slot_at(p_slots + t, FIRST, CAPACITY)
            o_to = page_offsets(to, s_page, i_h, o_v, o_k, PAGE, K, V, V_FIRST)
            tl.store(p_states + o_to, round_to(b_S, p_states.dtype.element_ty), mask=m_state & taken & real)
    if not DRAFTED:
        store_state(p_states, p_scales, p_residual, o_state, o_scale, m_state & taken, m_k & taken, b_S, b_scale, FEEDBACK)


class Held(NamedTuple):
    """Where a decode finds states and leaves outputs."""

    first: int  # slots below are nobody's
    capacity: int  # and from this on
    page: int  # elements from one state to the next
    slot: int  # elements from one row's slots to the next row's
    out: tuple[int, ...]  # strides of o: row, token, head
    owned: bool = True
    drafted: bool = False
    span: int = 1  # entries of cu_seqlens from one row's first token to the next row's

    def values(self) -> dict[str, Any]:
        unit = math.gcd(16, self.page)
        pages = dict(FIRST=self.first, CAPACITY=self.capacity, s_page=self.page // unit, PAGE=unit, s_slot=self.slot, s_span=self.span)
        return pages | dict(zip(("s_ob", "s_ot", "s_oh"), self.out, strict=True)) | dict(OWNED=self.owned, DRAFTED=self.drafted)


@lru_cache(maxsize=1024)
def launch(problem: Problem, layout: Layout, pool: Any, held: Held, cut: Cut) -> Launch:
    """pool: the sizes of its states."""
    grid, varlen = problem.N * problem.HV * -(-problem.V // cut.block_v), bool(problem.varlen)
    sizes = dict(T=problem.T, H=problem.H, HV=problem.HV, ALIGN=layout.align, VARLEN=varlen, SINGLE=problem.T == 1 and not varlen)
    state = dict(K=problem.K, V=problem.V, KP=triton.next_power_of_2(problem.K), BV=cut.block_v)
    state |= dict(V_FIRST=pool.state_v_first, FEEDBACK=pool.feedback)
    return Launch(decode_kernel, grid, sizes | state | held.values() | strides(layout) | activations(problem), num_warps=cut.warps)
