"""One token of each row over a pool that writes its states seldom: the tokens since a state was written wait in a log beside it.

With S the state as it is stored, k_j, d_j and u_j of the waiting tokens, c the product of their decays and of the new token's, and x_j =
k_j times the decays after j, the new token's among them, what `pool_draft` says of a draft holds of the new token (k, d, v):

    u = beta (v - S^T c k - sum_j u_j x_j^T k)        o = scale (S^T c q + sum_j u_j x_j^T q + u k^T q)

and once the log is full S <- Diag(c) S + sum_j x_j u_j^T + k u^T. A token reads a state, and one in so many writes it.

`arrive_kernel` knows no state: it makes what meets S and the u_j, and puts k and d of the token into the log. `pending_kernel` reads S.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.arguments import activations, pool_states, strides
from kdakit.backends.triton_gpu.config import Cut, padded
from kdakit.backends.triton_gpu.device.gate import inverse_norm, log2_decay, write_strength
from kdakit.backends.triton_gpu.device.matrix import round_to
from kdakit.backends.triton_gpu.device.pool_state import load_state, owner_of, slot_of, store_state
from kdakit.backends.triton_gpu.device.program import let_next_begin, state_offsets, wait_for_last
from kdakit.backends.triton_gpu.runtime.kernel import kernel
from kdakit.backends.triton_gpu.runtime.launch import Launch
from kdakit.backends.triton_gpu.runtime.layout import Layout
from kdakit.problem import Problem

ARRIVING_WARPS = 1  # with one a thread holds a key channel of all waiting tokens


@triton.jit
def multiplied(a, b):
    return a * b


@kernel
def arrive_kernel(
    p_q, p_k, p_g, p_beta, p_A_log, p_dt_bias, p_slots, p_generation, p_count, p_log_k, p_log_decay,
    p_waiting, p_vectors, p_coefficients, p_writes,
    H, HV, CAPACITY, scale, lower_bound, s_qb, s_qh, s_kb, s_kh, s_gb, s_gh, s_bb, s_bh,
    K: tl.constexpr, KP: tl.constexpr, TP: tl.constexpr, PENDING: tl.constexpr, ALIGN: tl.constexpr,
    GATE: tl.constexpr, BETA: tl.constexpr, L2NORM: tl.constexpr, HAS_A_LOG: tl.constexpr, HAS_DT_BIAS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """For `pending_kernel`, of each row and head: waiting, how many tokens wait, -1 for a row to skip; vectors [2, KP], -beta c k and scale
    c q; coefficients [2, TP], -beta x_j^T k and scale x_j^T q of the tokens that wait, 0 of others, and in the last place, which no token
    has, beta and scale k^T q. Where the log is full writes [TP + 1, KP]: x_j, in the last place of them k, and c.

    count [rows, HV]; log_k and log_decay [rows, HV, PENDING - 1, K]. TP: PENDING as a tile has it. Grid: (N * HV,).
    """
    wait_for_last(CHAINED)  # for all that ever wrote a state
    let_next_begin(CHAINED)
    i_nh = tl.program_id(0)
    i_n, i_h = (i_nh // HV).to(tl.int64), i_nh % HV
    i_hk = (i_h // (HV // H)).to(tl.int64)
    slot, inside = slot_of(p_slots, i_n, CAPACITY)
    i_s = tl.where(inside, slot, 0) * HV + i_h
    count = tl.load(p_count + i_s)
    o_k, o_t = tl.arange(0, KP), tl.arange(0, TP)
    m_k = o_k < K
    o_log = i_s * (PENDING - 1)
    o_row = (o_log + o_t)[:, None] * K + o_k[None, :]  # [TP, KP]
    b_first = tl.load(p_log_decay + o_log * K + o_k, mask=m_k & (count > 0), other=1.0)  # [KP]
    b_after = tl.load(p_log_decay + o_row + K, mask=(o_t + 1 < count)[:, None] & m_k[None, :], other=1.0)
    b_x = tl.load(p_log_k + o_row, mask=(o_t < count)[:, None] & m_k[None, :], other=0.0)
    b_q = tl.load(p_q + (i_n * s_qb + i_hk * s_qh) * ALIGN + o_k, mask=m_k, other=0.0).to(tl.float32)  # [KP]
    b_k = tl.load(p_k + (i_n * s_kb + i_hk * s_kh) * ALIGN + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_g = tl.load(p_g + (i_n * s_gb + i_h.to(tl.int64) * s_gh) * ALIGN + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_beta = tl.load(p_beta + i_n * s_bb + i_h.to(tl.int64) * s_bh).to(tl.float32)
    a = tl.exp(tl.load(p_A_log + i_h).to(tl.float32)) if HAS_A_LOG else 1.0
    b_bias = tl.zeros([KP], tl.float32)
    if HAS_DT_BIAS:
        b_bias = tl.load(p_dt_bias + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_d = tl.exp2(log2_decay(b_g, b_bias, a, lower_bound, GATE, True, False))  # [KP]
    scale_q, norm_k = scale, 1.0
    if L2NORM:
        scale_q = scale * inverse_norm(tl.sum(b_q * b_q, 0))
        norm_k = inverse_norm(tl.sum(b_k * b_k, 0))
    strength = write_strength(b_beta, BETA, False) * norm_k
    minus = -strength * norm_k
    b_after = tl.associative_scan(b_after, 0, multiplied, reverse=True) * b_d[None, :]
    b_c = tl.sum(tl.where((o_t == 0)[:, None], b_after, 0.0), 0) * b_first
    b_x *= b_after
    m_new = o_t == TP - 1
    b_of_k = tl.where(m_new, strength, tl.sum(b_x * b_k[None, :], 1) * minus)  # [TP]
    b_of_q = tl.where(m_new, tl.sum(b_k * b_q, 0) * scale_q, tl.sum(b_x * b_q[None, :], 1) * scale_q)
    o_vector, o_number = i_nh.to(tl.int64) * (2 * KP) + o_k, i_nh.to(tl.int64) * (2 * TP) + o_t
    tl.store(p_vectors + o_vector, b_c * b_k * minus)
    tl.store(p_vectors + o_vector + KP, b_c * b_q * scale_q)
    tl.store(p_coefficients + o_number, b_of_k)
    tl.store(p_coefficients + o_number + TP, b_of_q)
    taken = owner_of(p_slots, p_generation, i_n, slot, inside) >= 0
    tl.store(p_waiting + i_nh, tl.where(taken, count, -1))
    if taken:
        if count == PENDING - 1:
            o_write = i_nh.to(tl.int64) * ((TP + 1) * KP) + o_k
            tl.store(p_writes + o_write[None, :] + o_t[:, None] * KP, tl.where(m_new[:, None], b_k[None, :], b_x))
            tl.store(p_writes + o_write + TP * KP, b_c)
            tl.store(p_count + i_s, 0)
        else:
            tl.store(p_log_k + (o_log + count) * K + o_k, b_k, mask=m_k)
            tl.store(p_log_decay + (o_log + count) * K + o_k, b_d, mask=m_k)
            tl.store(p_count + i_s, count + 1)


@kernel
def pending_kernel(
    p_v, p_o, p_states, p_scales, p_residual, p_slots, p_waiting, p_vectors, p_coefficients, p_writes, p_log_u,
    HV, CAPACITY, s_vb, s_vh,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, TP: tl.constexpr, PENDING: tl.constexpr, ALIGN: tl.constexpr,
    V_FIRST: tl.constexpr, FEEDBACK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """o, and u into log_u [rows, HV, PENDING - 1, V]; where the log is full S^T [BV, KP] is written instead.

    Grid: (N * HV * cdiv(V, BV),), blocks of V fastest, then heads.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_p = tl.program_id(0)
    i_v, i_nh = i_p % NV, i_p // NV
    i_n, i_h = (i_nh // HV).to(tl.int64), i_nh % HV
    slot, inside = slot_of(p_slots, i_n, CAPACITY)
    i_s = tl.where(inside, slot, 0) * HV + i_h
    o_k, o_v, o_t = tl.arange(0, KP), i_v * BV + tl.arange(0, BV), tl.arange(0, TP)
    m_k, m_v = o_k < K, o_v < V
    m_state = m_v[:, None] & m_k[None, :]
    o_state = state_offsets(i_s, o_v, o_k, K, V, V_FIRST)
    o_scale = (i_s * K + o_k) * NV + i_v
    b_S, b_scale = load_state(p_states, p_scales, p_residual, o_state, o_scale, m_state & inside, m_k & inside, FEEDBACK)
    b_v = tl.load(p_v + (i_n * s_vb + i_h.to(tl.int64) * s_vh) * ALIGN + o_v, mask=m_v, other=0.0).to(tl.float32)  # [BV]
    wait_for_last(CHAINED)  # for `arrive_kernel`
    count = tl.load(p_waiting + i_nh)
    o_vector, o_number = i_nh.to(tl.int64) * (2 * KP) + o_k, i_nh.to(tl.int64) * (2 * TP) + o_t
    b_with_k, b_with_q = tl.load(p_vectors + o_vector), tl.load(p_vectors + o_vector + KP)  # [KP]
    b_of_k, b_of_q = tl.load(p_coefficients + o_number), tl.load(p_coefficients + o_number + TP)  # [TP]
    o_u = i_s * ((PENDING - 1) * V) + o_v
    m_new, m_past = (o_t == TP - 1)[:, None], (o_t < count)[:, None] & m_v[None, :]
    b_past = tl.load(p_log_u + o_u[None, :] + o_t[:, None] * V, mask=m_past, other=0.0)  # [TP, BV]
    b_u = tl.sum(tl.where(m_new, b_v[None, :], b_past) * b_of_k[:, None], 0) + tl.sum(b_S * b_with_k[None, :], 1)  # [BV]
    b_o = tl.sum(tl.where(m_new, b_u[None, :], b_past) * b_of_q[:, None], 0) + tl.sum(b_S * b_with_q[None, :], 1)
    tl.store(p_o + i_nh.to(tl.int64) * V + o_v, round_to(tl.where(count >= 0, b_o, 0.0), p_o.dtype.element_ty), mask=m_v)
    tl.store(p_log_u + o_u + count * V, b_u, mask=m_v & (count >= 0) & (count < PENDING - 1))
    if count == PENDING - 1:
        o_write = i_nh.to(tl.int64) * ((TP + 1) * KP) + o_k
        b_c, b_new = tl.load(p_writes + o_write + TP * KP), tl.load(p_writes + o_write + (TP - 1) * KP)
        keys, values = (), ()
        for j in tl.static_range(PENDING - 1):
            keys += (tl.load(p_writes + o_write + j * KP),)
            values += (tl.load(p_log_u + o_u + j * V, mask=m_v, other=0.0),)
        b_S = tl.fma(b_u[:, None], b_new[None, :], b_S * b_c[None, :])
        for j in tl.static_range(PENDING - 1):
            b_S = tl.fma(values[j][:, None], keys[j][None, :], b_S)
        store_state(p_states, p_scales, p_residual, o_state, o_scale, m_state, m_k, b_S, b_scale * b_c, FEEDBACK)


@lru_cache(maxsize=1024)
def launch_arrive(problem: Problem, layout: Layout, capacity: int, pending: int, chained: bool) -> Launch:
    sizes = dict(
        H=problem.H, HV=problem.HV, CAPACITY=capacity, K=problem.K, KP=padded(problem.K), PENDING=pending, TP=padded_tokens(pending)
    )
    values = sizes | strides(layout) | activations(problem) | dict(ALIGN=layout.align, CHAINED=chained)
    return Launch(arrive_kernel, problem.N * problem.HV, values, **Cut(0, ARRIVING_WARPS, chained=chained).options)


@lru_cache(maxsize=1024)
def launch(problem: Problem, layout: Layout, pool: Any, capacity: int, pending: int, cut: Cut) -> Launch:
    """pool: the sizes of its states."""
    grid = problem.N * problem.HV * -(-problem.V // cut.block_v)
    sizes = dict(HV=problem.HV, CAPACITY=capacity, PENDING=pending, TP=padded_tokens(pending), ALIGN=layout.align, CHAINED=cut.chained)
    return Launch(pending_kernel, grid, sizes | pool_states(pool, cut) | strides(layout), **cut.options)


def padded_tokens(pending: int) -> int:
    """A place for each token that waits, and the last one for the token that comes."""
    return triton.next_power_of_2(pending)
