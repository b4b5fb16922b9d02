"""A layer's tokens between its projections, for sequences that carry a state and the convolutions' windows: one launch.

    q, k, v = silu(conv(.))        beta = sigmoid(.)        S <- Diag(e^g) S        u = beta (v - S^T k)        S <- S + k u^T
    o = scale S^T q        y = o / sqrt(mean(o^2) + eps) weight sigmoid(gate + bias)

with q and k normalised. Rounded where the separate kernels round: q, k, v and o to the dtype of the row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.device.gate import inverse_norm, log2_decay, write_strength
from kdakit.backends.triton_gpu.device.matrix import round_to
from kdakit.backends.triton_gpu.device.pool_state import owner_of, slot_of
from kdakit.backends.triton_gpu.device.program import state_offsets
from kdakit.layers.torch.fused.rows import sigmoid


@triton.jit
def convolved(
    p_x, p_weight, p_bias, p_window, o_t, s_t, o_c, m, D, W: tl.constexpr, HAS_BIAS: tl.constexpr, SINGLE: tl.constexpr, PTX: tl.constexpr
):
    """silu(conv) [TP, C] of channels o_c at tokens o_t, rounded; the window [W - 1, D] is what came before token 0."""
    b_z = tl.zeros(m.shape, tl.float32)
    if HAS_BIAS:
        b_z += tl.load(p_bias + o_c[None, :], mask=m, other=0.0).to(tl.float32)
    for i in tl.static_range(W):
        b_x = tl.zeros(m.shape, tl.float32)
        if i == 0 or not SINGLE:
            b_x = tl.load(p_x + (o_t - i)[:, None] * s_t + o_c[None, :], mask=m & (o_t >= i)[:, None], other=0.0).to(tl.float32)
        if i > 0:
            p_row = p_window + (W - 1 - i + o_t)[:, None] * D + o_c[None, :]
            b_x = tl.where((o_t >= i)[:, None], b_x, tl.load(p_row, mask=m & (o_t < i)[:, None], other=0.0).to(tl.float32))
        b_z += tl.load(p_weight + o_c[None, :] * W + (W - 1 - i), mask=m, other=0.0).to(tl.float32) * b_x
    return round_to(b_z * sigmoid(b_z, PTX), p_x.dtype.element_ty)


@triton.jit
def move_window(p_x, p_window, p_after, T, s_t, o_c, m, D, taken, W: tl.constexpr):
    """The last W - 1 inputs of (window, T tokens) go to `after`, perhaps the window itself."""
    rows = ()
    for r in tl.static_range(W - 1):
        old = r + T < W - 1
        b_w = tl.load(p_window + (r + T) * D + o_c, mask=m & old, other=0.0).to(tl.float32)
        b_x = tl.load(p_x + (r + T - (W - 1)) * s_t + o_c, mask=m & (r + T >= W - 1), other=0.0).to(tl.float32)
        rows += (tl.where(old, b_w, b_x),)
    tl.debug_barrier()  # all have read before the first writes
    for r in tl.static_range(W - 1):
        tl.store(p_after + r * D + o_c, round_to(rows[r], p_after.dtype.element_ty), mask=m & taken)


@triton.jit(do_not_specialize=["T", "H", "HV", "CAPACITY", "scale", "lower_bound", "eps", "s_n", "s_t", "s_bn", "s_bt"])
def layer_step_kernel(
    p_q, p_k, p_v, p_g, p_beta, p_gate, p_q_weight, p_k_weight, p_v_weight, p_q_bias, p_k_bias, p_v_bias,
    p_A_log, p_dt_bias, p_norm, p_gate_bias, p_q_window, p_k_window, p_v_window, p_state,
    p_q_after, p_k_after, p_v_after, p_state_after, p_slots, p_generation, p_scratch,
    p_y, p_log_k, p_log_decay, p_log_u, p_log_slots, p_log_generation,
    T, H, HV, CAPACITY, scale, lower_bound, eps, s_n, s_t, s_bn, s_bt,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, TP: tl.constexpr, W: tl.constexpr,
    ALIGN: tl.constexpr, V_FIRST: tl.constexpr, GATE: tl.constexpr, BETA: tl.constexpr, HAS_CONV_BIAS: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr, HAS_SLOTS: tl.constexpr, DRAFT: tl.constexpr, SINGLE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """T <= TP tokens of the HV / H value heads that share a key head. S^T [BV, KP] of one block of V after the other, in registers.

    What the tokens bring goes through scratch [N * H, TP, 3 KP + VP + 16]: q, k, e^g, v and four numbers, made once and read by every
    block in its own order. DRAFT: states and windows stay as they are; k, e^g and u are logged for a later commit.
    Grid: (N * H,), heads fastest.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    SIZE: tl.constexpr = 3 * KP + VP + 16
    i_p = tl.program_id(0)
    i_n, i_hk = (i_p // H).to(tl.int64), i_p % H
    slot, taken = i_n, i_n >= 0
    inside = taken
    if HAS_SLOTS:
        slot, inside = slot_of(p_slots, i_n, CAPACITY)
        slot = tl.where(inside, slot, 0)
    o_k, o_w, o_t = tl.arange(0, KP), tl.arange(0, VP), tl.arange(0, TP)
    m_k, m_w = o_k < K, o_w < V
    m_tk, m_tv = (o_t < T)[:, None] & m_k[None, :], (o_t < T)[:, None] & m_w[None, :]
    s_t = s_t * ALIGN
    group, DK, DV = HV // H, H * K, HV * V
    o_ck = i_hk * K + o_k
    p_q += i_n * s_n * ALIGN
    p_k += i_n * s_n * ALIGN
    p_v += i_n * s_n * ALIGN
    p_beta += i_n * s_bn
    p_scratch += i_p.to(tl.int64) * TP * SIZE
    w_row = slot * (W - 1)
    for j in range(group):
        i_h = i_hk * group + j
        o_v = tl.arange(0, BV)
        o_state = state_offsets(slot * HV + i_h, o_v, o_k, K, V, V_FIRST)
        b_next = tl.load(p_state + o_state, mask=(o_v < V)[:, None] & m_k[None, :] & inside, other=0.0)  # on its way meanwhile
        o_cv = i_h * V + o_w
        b_q = convolved(p_q, p_q_weight, p_q_bias, p_q_window + w_row * DK, o_t, s_t, o_ck, m_tk, DK, W, HAS_CONV_BIAS, SINGLE, PTX)
        b_k = convolved(p_k, p_k_weight, p_k_bias, p_k_window + w_row * DK, o_t, s_t, o_ck, m_tk, DK, W, HAS_CONV_BIAS, SINGLE, PTX)
        b_v = convolved(p_v, p_v_weight, p_v_bias, p_v_window + w_row * DV, o_t, s_t, o_cv, m_tv, DV, W, HAS_CONV_BIAS, SINGLE, PTX)
        i_t = (i_n * T + o_t) * HV + i_h  # [TP]
        b_g = tl.load(p_g + i_t[:, None] * K + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32)
        b_bias = tl.load(p_dt_bias + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)[None, :]
        a = tl.exp(tl.load(p_A_log + i_h).to(tl.float32))
        b_decay = tl.exp2(log2_decay(b_g, b_bias, a, lower_bound, GATE, True, False))  # [TP, KP]
        if DRAFT:
            tl.store(p_log_k + i_t[:, None] * K + o_k[None, :], b_k, mask=m_tk)
            tl.store(p_log_decay + i_t[:, None] * K + o_k[None, :], b_decay, mask=m_tk)
        b_q, b_k, b_v = b_q.to(tl.float32), b_k.to(tl.float32), b_v.to(tl.float32)
        b_beta = write_strength(tl.load(p_beta + o_t * s_bt + i_h, mask=o_t < T, other=0.0).to(tl.float32), BETA)
        norm_k = inverse_norm(tl.sum(b_k * b_k, 1))
        p_rows = p_scratch + o_t[:, None] * SIZE
        tl.store(p_rows + o_k[None, :], b_q)
        tl.store(p_rows + KP + o_k[None, :], b_k)
        tl.store(p_rows + 2 * KP + o_k[None, :], b_decay)
        tl.store(p_rows + 3 * KP + o_w[None, :], b_v)
        p_numbers = p_scratch + o_t * SIZE + 3 * KP + VP
        tl.store(p_numbers, scale * inverse_norm(tl.sum(b_q * b_q, 1)))
        tl.store(p_numbers + 1, norm_k)
        tl.store(p_numbers + 2, b_beta * norm_k)
        tl.store(p_numbers + 3, tl.sum(b_q * b_k, 1))
        if HAS_SLOTS:
            generation = owner_of(p_slots, p_generation, i_n, slot, inside)
            taken = generation >= 0
            if DRAFT:  # noqa: SIM102 - the compiler decides the one, the device the other
                if i_h == 0:
                    tl.store(p_log_generation + i_n, generation)
                    tl.store(p_log_slots + i_n, tl.where(taken, slot, -1).to(p_log_slots.dtype.element_ty))
        tl.debug_barrier()
        for i_v in tl.static_range(NV):
            o_v = i_v * BV + tl.arange(0, BV)
            m_v = o_v < V
            o_state = state_offsets(slot * HV + i_h, o_v, o_k, K, V, V_FIRST)
            b_S = b_next.to(tl.float32)
            if i_v + 1 < NV:  # the next block arrives while this one moves
                o_next = (i_v + 1) * BV + tl.arange(0, BV)
                o_after = state_offsets(slot * HV + i_h, o_next, o_k, K, V, V_FIRST)
                b_next = tl.load(p_state + o_after, mask=(o_next < V)[:, None] & m_k[None, :] & inside, other=0.0)
            for t in range(1 if SINGLE else T):
                p_token = p_scratch + t * SIZE
                b_qt = tl.load(p_token + o_k)
                b_kt = tl.load(p_token + KP + o_k)
                b_vt = tl.load(p_token + 3 * KP + o_v)
                p_number = p_token + 3 * KP + VP
                b_S = b_S * tl.load(p_token + 2 * KP + o_k)[None, :]
                b_u = tl.load(p_number + 2) * (b_vt - tl.sum(b_S * b_kt[None, :], 1) * tl.load(p_number + 1))  # [BV]
                b_o = (tl.sum(b_S * b_qt[None, :], 1) + b_u * tl.load(p_number + 3)) * tl.load(p_number)  # [BV]
                b_S = tl.fma(b_u[:, None], b_kt[None, :], b_S)
                o_t_out = ((i_n * T + t) * HV + i_h) * V + o_v
                tl.store(p_y + o_t_out, round_to(tl.where(taken, b_o, 0.0), p_y.dtype.element_ty), mask=m_v)
                if DRAFT:
                    tl.store(p_log_u + o_t_out, b_u, mask=m_v)
            if not DRAFT:
                m_state = m_v[:, None] & m_k[None, :] & taken
                tl.store(p_state_after + o_state, round_to(b_S, p_state_after.dtype.element_ty), mask=m_state)
        tl.debug_barrier()  # o comes back, whoever wrote it
        o_y = i_t[:, None] * V + o_w[None, :]  # [TP, VP]
        b_gate = tl.load(p_gate + o_y, mask=m_tv, other=0.0).to(tl.float32)
        if HAS_GATE_BIAS:
            b_gate += tl.load(p_gate_bias + o_cv, mask=m_w, other=0.0).to(tl.float32)[None, :]
        b_y = tl.load(p_y + o_y, mask=m_tv, other=0.0).to(tl.float32)
        b_y *= tl.rsqrt(tl.sum(b_y * b_y, 1) / V + eps)[:, None] * tl.load(p_norm + o_w, mask=m_w, other=0.0).to(tl.float32)[None, :]
        tl.debug_barrier()
        tl.store(p_y + o_y, round_to(b_y * sigmoid(b_gate, PTX), p_y.dtype.element_ty), mask=m_tv)
        if not DRAFT:
            move_window(p_v, p_v_window + w_row * DV, p_v_after + w_row * DV, T, s_t, o_cv, m_w, DV, taken, W)
    if not DRAFT:
        move_window(p_q, p_q_window + w_row * DK, p_q_after + w_row * DK, T, s_t, o_ck, m_k, DK, taken, W)
        move_window(p_k, p_k_window + w_row * DK, p_k_after + w_row * DK, T, s_t, o_ck, m_k, DK, taken, W)


@triton.jit(do_not_specialize=["T", "D", "CAPACITY", "s_n", "s_t"])
def commit_window_kernel(
    p_x, p_window, p_slots, p_generation, p_log_generation, p_accepted, T, D, CAPACITY, s_n, s_t, W: tl.constexpr, BD: tl.constexpr
):
    """Windows of slots move on by the first accepted[n] inputs x [N, T, D] of each row. Grid: (cdiv(D, BD), N)."""
    i_n = tl.program_id(1).to(tl.int64)
    o_c = tl.program_id(0) * BD + tl.arange(0, BD)
    slot, inside = slot_of(p_slots, i_n, CAPACITY)
    generation = tl.load(p_log_generation + i_n)
    same = inside & (generation >= 0) & (tl.load(p_generation + slot, mask=inside, other=0) == generation)
    accepted = tl.minimum(tl.load(p_accepted + i_n).to(tl.int32), T)
    p_window += tl.where(inside, slot, 0) * (W - 1) * D
    move_window(p_x + i_n * s_n, p_window, p_window, tl.maximum(accepted, 0), s_t, o_c, o_c < D, D, same, W)
