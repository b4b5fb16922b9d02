"""Backward, third launch: the gradients of a chunk's inputs, one program per chunk and value head. Derivation: docs/math.md."""

from __future__ import annotations

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.gate import gate_backward, gate_slope, write_strength_backward
from kdakit.backends.triton_gpu.pairs import bounded_pairs, level_matrices, span_sums, unbounded_pairs
from kdakit.backends.triton_gpu.solved import (
    load_both,
    load_rows,
    own_column,
    pair_gradients,
    row_scale,
    second_half,
    solved_rows,
    span_products,
    times_solved,
)  # fmt: skip
from kdakit.backends.triton_gpu.span import (
    decays,
    from_start,
    identity,
    load_decay,
    load_gate_input,
    load_span,
    side_by_side,
    sides,
    span_tokens,
    to_end,
)  # fmt: skip
from kdakit.backends.triton_gpu.tile import locate, narrow, product, product_add, row_of_token, row_tokens, state_offsets


@triton.jit
def store_strength_gradient(p_beta, p_d_beta, o_t, s_t, HV, length, b_d, BETA: tl.constexpr):
    b_beta = tl.load(p_beta + o_t * s_t, mask=o_t < length, other=0.0).to(tl.float32)
    b_d = write_strength_backward(b_beta, b_d, BETA)
    tl.store(p_d_beta + o_t * HV, narrow(b_d, p_d_beta.dtype.element_ty), mask=o_t < length)


@triton.jit
def load_norms(p_norms, o_i, C: tl.constexpr, S: tl.constexpr, GROUP: tl.constexpr):
    """1 / |q| and 1 / |k| of tokens o_i."""
    o_r = row_of_token(o_i, S, GROUP)
    return tl.load(p_norms + o_r, mask=o_i < C, other=0.0), tl.load(p_norms + C + o_r, mask=o_i < C, other=0.0)


@triton.jit
def span_gradient(
    b_q, b_k, b_e, d, b_rows_in, b_dkd, b_L, b_Rk, b_other, b_diagonal, M, i_k,
    PLACE: tl.constexpr, BOUNDED: tl.constexpr, PTX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One span, the 'first' or 'second' of a chunk or its 'only' one. d: its `decays`. b_rows_in [BK, 64]: `state_rows`. b_dkd: the
    gradient of k_decayed. With the other span's decay b_other [BK, 1] and the gradients from pairs with it: of the second's rows
    b_L [BK, 64], of the first's columns b_Rk.

    Returns d_q, d_k, d_g [BK, 32], d_g without what the other span and the state give to all its gates; and what the second gives to all
    gates of the first, [BK, 1].
    """
    b_prefix, b_suffix, c, b_decay = d
    b_from = from_start(b_prefix, c)
    b_dqd, b_dyd = sides(b_rows_in)
    b_ahead = b_decay
    if PLACE == "second":
        b_dq, b_dk = b_other * b_from * b_dqd, -b_other * b_from * b_dyd
        b_ahead = tl.sum(b_q.to(tl.float32) * b_dq + b_k.to(tl.float32) * b_dk, 1, keep_dims=True)
        b_Lq, b_Lk = sides(b_L)
        b_dq, b_dk = b_dq + b_from * b_Lq, b_dk + b_from * b_Lk
    else:
        b_dq, b_dk = b_from * b_dqd, -b_from * b_dyd
    b_rows = b_q.to(tl.float32) * b_dq + b_k.to(tl.float32) * b_dk
    b_dkd = b_dkd.to(tl.float32)
    b_col = to_end(b_suffix, c) * (b_other * b_dkd + b_Rk.to(tl.float32) if PLACE == "first" else b_dkd)
    b_d_g = span_sums(b_rows, b_k.to(tl.float32) * b_col)
    b_dk += b_col
    if BOUNDED:
        b_dq, b_dk, b_d_g = bounded_pairs(b_q, b_k, b_prefix, c, M, i_k, b_dq, b_dk, b_d_g, PTX, PRECISION)
    else:
        b_dq, b_dk, b_d_g = unbounded_pairs(b_q, b_k, b_e, b_prefix, b_suffix, c, M, i_k, b_dq, b_dk, b_d_g, PRECISION)
        b_dq, b_dk = b_dq + b_diagonal * b_k.to(tl.float32), b_dk + b_diagonal * b_q.to(tl.float32)
    return b_dq, b_dk, b_d_g, b_ahead


@triton.jit
def store_gradient(p_d, o_t, HV, o_k, length, b_d, K: tl.constexpr, KP: tl.constexpr):
    """b_d [BK, 32] -> rows o_t, channels o_k."""
    p_d += (o_t * HV)[:, None] * K + o_k[None, :]
    m_d = (o_t < length)[:, None]
    if K < KP:
        m_d = m_d & (o_k < K)[None, :]
    tl.store(p_d, narrow(tl.trans(b_d), p_d.dtype.element_ty), mask=m_d)


@triton.jit
def store_gate_gradient(
    p_d, p_g, p_dt_bias, o_t, HV, s_gt, o_k, length, D, b_d_g, a, lower_bound,
    K: tl.constexpr, KP: tl.constexpr, ALIGN: tl.constexpr, GATE: tl.constexpr, HAS_DT_BIAS: tl.constexpr, EXACT: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Stores the gradient of the gate's input; returns its sum over tokens and that of the terms of d_A_log, both [BK]."""
    b_d_g = tl.where((o_t < length)[None, :], b_d_g, 0.0)
    if GATE == "log_decay":
        b_d_x, b_d_A = b_d_g, b_d_g
    else:
        b_x = load_gate_input(p_g, p_dt_bias, o_t, s_gt, o_k, length, D, K, KP, ALIGN, HAS_DT_BIAS)
        b_d_x, b_d_A = gate_backward(b_x, b_d_g, a, lower_bound, GATE, EXACT, PTX)
    store_gradient(p_d, o_t, HV, o_k, length, b_d_x, K, KP)
    return tl.sum(b_d_x, 1), tl.sum(b_d_A, 1)


@triton.jit
def finish_l2norm(p_d, p_x, b_r, o_t, HV, s_t, length, K: tl.constexpr, KP: tl.constexpr, ALIGN: tl.constexpr):
    """d <- d - r^2 (x . d) x for rows o_t, in place: normalising takes from a gradient what lies along x."""
    o_k = tl.arange(0, KP)
    m_x = (o_t < length)[:, None]
    if K < KP:
        m_x = m_x & (o_k < K)[None, :]
    b_x = tl.load(p_x + (o_t * s_t)[:, None] * ALIGN + o_k[None, :], mask=m_x, other=0.0).to(tl.float32)
    p_d += (o_t * HV)[:, None] * K + o_k[None, :]
    b_d = tl.load(p_d, mask=m_x, other=0.0).to(tl.float32)
    b_d = b_d - (b_r * b_r * tl.sum(b_x * b_d, 1))[:, None] * b_x
    tl.store(p_d, narrow(b_d, p_d.dtype.element_ty), mask=m_x)


@triton.jit
def exact_d_decay(
    p_states, p_d_states, p_initial, p_d_final, i_nh, o_k, first, last,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, V_FIRST: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr,
):  # fmt: skip
    """sum_v S dS' [BK], with S and dS' as the caller gave them where they are the caller's own: at the sequence's start and end."""
    b_sum = tl.zeros(o_k.shape, tl.float32)
    for i_v in range(0, V, 16):
        o_v = i_v + tl.arange(0, 16)
        o_S, m_S = o_v[:, None] * KP + o_k[None, :], (o_v < V)[:, None] & (o_k < K)[None, :]
        o_state = state_offsets(i_nh, o_v, o_k, K, V, V_FIRST)
        b_S, b_dS = (
            tl.load(p_states + o_S, mask=m_S, other=0.0).to(tl.float32),
            tl.load(p_d_states + o_S, mask=m_S, other=0.0).to(tl.float32),
        )
        if HAS_INITIAL:
            b_S = tl.where(first, tl.load(p_initial + o_state, mask=m_S & first, other=0.0).to(tl.float32), b_S)
        if HAS_FINAL:
            b_dS = tl.where(last, tl.load(p_d_final + o_state, mask=m_S & last, other=0.0).to(tl.float32), b_dS)
        b_sum += tl.sum(b_S * b_dS, 0)
    return b_sum


@triton.jit
def state_rows(
    b_S, b_Z, p_states, p_d_o, p_d_v, p_factors, scale, length, FIRST: tl.constexpr, o_k, HV, V: tl.constexpr, KP: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, S: tl.constexpr, GROUP: tl.constexpr, SMALL: tl.constexpr, PRECISION: tl.constexpr,
    HIP: tl.constexpr,
):  # fmt: skip
    """Gradients of a span's q, and of its k with a minus, through the state: S d_o^T scale / |q| beside S (beta y)^T / |k|, [BK, 64].

    b_S [BV, BK] and b_Z [64, BV] are the state and the scaled rows if one block holds all of V.
    """
    if V <= BV:
        b_rows = product(tl.trans(b_S.to(SMALL)), tl.trans(b_Z), PRECISION)
    else:
        o_i = span_tokens(64) % 32 + FIRST
        b_norm = row_scale(p_factors, o_i, scale, length, C, S, GROUP)
        b_rows = tl.zeros([o_k.shape[0], 64], tl.float32)
        for i_v in tl.static_range((V + BV - 1) // BV):
            o_v = i_v * BV + tl.arange(0, BV)
            b_S = tl.load(p_states + o_v[:, None] * KP + o_k[None, :], mask=(o_v < V)[:, None] & (o_k < KP)[None, :], other=0.0)
            b_Z = load_both(p_d_o, p_d_v, o_i * HV * V, o_i < length, o_v, V, BV, HIP).to(tl.float32) * b_norm[:, None]
            b_rows = product_add(tl.trans(b_S.to(SMALL)), tl.trans(narrow(b_Z, SMALL)), b_rows, PRECISION)
    return b_rows


@triton.jit(do_not_specialize=["T", "N", "NT", "H", "HV", "scale", "lower_bound", "s_qb", "s_qt", "s_qh", "s_kb", "s_kt", "s_kh",
                               "s_gb", "s_gt", "s_gh", "s_bb", "s_bt", "s_bh"])  # fmt: skip
def gradient_kernel(
    p_q, p_k, p_g, p_beta, p_A_log, p_dt_bias, p_cu_seqlens, p_lower, p_factors, p_states, p_d_states, p_r, p_d_o, p_initial, p_d_final,
    p_d_q, p_d_k, p_d_v, p_d_g, p_d_beta, p_d_A_log, p_d_dt_bias,
    T, N, NT, H, HV, scale, lower_bound,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_gb, s_gt, s_gh, s_bb, s_bt, s_bh,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    S: tl.constexpr, GROUP: tl.constexpr, ALIGN: tl.constexpr, VARLEN: tl.constexpr, V_FIRST: tl.constexpr, GATE: tl.constexpr,
    BETA: tl.constexpr, BOUNDED: tl.constexpr, L2NORM: tl.constexpr, HAS_A_LOG: tl.constexpr, HAS_DT_BIAS: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, PRECISION: tl.constexpr, SMALL: tl.constexpr, PTX: tl.constexpr, HIP: tl.constexpr,
):  # fmt: skip
    """With X = inverse Diag(beta), v_new = X r, y the gradient of beta r (in d_v when this begins), S before and dS' after the chunk:

        d_q_decayed = d_o S^T    d_k_in = -beta y S^T    d_k_decayed = v_new dS'^T = X (r dS'^T)    d_decay = sum_v S dS'    d_v = beta y
        d_A_qk = lower(d_o v_new^T)    d_A_kk / beta = -strictly_lower(beta y v_new^T)    d_beta = y . v_new / beta

    then through the decayed products, the gates and the activations. Tiles are [channels, tokens]: channels in slices of BK, tokens in
    spans of 32. SMALL is the operand dtype of what is neither input nor state. Grid: (slots * HV,), heads fastest.
    d_A_log, d_dt_bias [slot, HV, KP] are the chunk's share. What l2norm takes along q and k needs all channels: a last step.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    R: tl.constexpr = C if C > 32 else 32
    EXACT: tl.constexpr = p_q.dtype.element_ty.is_fp32()
    i_p = tl.program_id(0).to(tl.int64)
    i_s, i_h = i_p // HV, i_p % HV
    i_b, i_n, i_c, bos, eos = locate(p_cu_seqlens, i_s, T, N, NT, C, VARLEN)
    start = bos + i_c * C
    if start >= eos:
        o_k = tl.arange(0, KP)
        if HAS_A_LOG:
            tl.store(p_d_A_log + i_p * KP + o_k, tl.zeros([KP], tl.float32))
        if HAS_DT_BIAS:
            tl.store(p_d_dt_bias + i_p * KP + o_k, tl.zeros([KP], tl.float32))
        return
    first, last = i_c == 0, start + C >= eos
    length = tl.minimum(eos - start, C).to(tl.int32)
    i_hk = i_h // (HV // H)
    i_row = (i_b * T + start) * HV + i_h
    p_q += (i_b * s_qb + start * s_qt + i_hk * s_qh) * ALIGN
    p_k += (i_b * s_kb + start * s_kt + i_hk * s_kh) * ALIGN
    p_g += (i_b * s_gb + start * s_gt + i_h * s_gh) * ALIGN
    p_beta += i_b * s_bb + start * s_bt + i_h * s_bh
    p_d_q += i_row * K
    p_d_k += i_row * K
    p_d_g += i_row * K
    p_d_beta += i_row
    p_d_o += i_row * V
    p_d_v += i_row * V
    p_r += i_row * V
    p_lower += i_p * C * C
    p_factors += i_p * 3 * C
    p_states += i_p * VP * KP
    p_d_states += i_p * VP * KP
    a = gate_slope(p_A_log, i_h, EXACT, HAS_A_LOG)
    if HAS_DT_BIAS:
        p_dt_bias += i_h * K

    o_0, o_c, o_p = span_tokens(32), row_tokens(R, S, GROUP), tl.arange(0, R)
    o_1, m_c = o_0 + 32, o_c < length
    b_beta_c = tl.load(p_factors + o_p, mask=o_p < C, other=0.0)  # [R], in the order of `row_tokens`
    X0 = solved_rows(p_lower, p_factors, o_0, o_p, b_beta_c, C, S, GROUP, SMALL)  # [32, R], what rounding took from it
    if C > 32:
        X1 = solved_rows(p_lower, p_factors, o_0 + 32, o_p, b_beta_c, C, S, GROUP, SMALL)
        b_P, b_Z1, b_sign, b_T = span_products(
            p_d_o, p_d_v, p_r, p_lower, p_factors, scale, length, 32, o_c, m_c, b_beta_c, HV, V, BV, C, S, GROUP, SMALL, PRECISION, HIP
        )
        b_top = narrow(pair_gradients(b_P, X0, b_sign, SMALL, PRECISION), SMALL)
        b_dA = pair_gradients(b_P, X1, b_sign, SMALL, PRECISION)
        b_diagonal1 = own_column(b_dA)
        M1 = level_matrices(b_dA, BOUNDED, SMALL)
        store_strength_gradient(p_beta, p_d_beta, o_1, s_bt, HV, length, second_half(tl.sum(b_P * b_T, 1)), BETA)
    b_P, b_Z0, b_sign, b_T = span_products(
        p_d_o, p_d_v, p_r, p_lower, p_factors, scale, length, 0, o_c, m_c, b_beta_c, HV, V, BV, C, S, GROUP, SMALL, PRECISION, HIP
    )
    b_dA = pair_gradients(b_P, X0, b_sign, SMALL, PRECISION)
    b_diagonal0 = own_column(b_dA)
    M0 = level_matrices(b_dA, BOUNDED, SMALL)
    store_strength_gradient(p_beta, p_d_beta, o_0, s_bt, HV, length, second_half(tl.sum(b_P * b_T, 1)), BETA)
    tl.debug_barrier()  # beta y is read back
    D = identity()
    for i_k in tl.range(0, KP, BK, num_stages=1):
        o_k = i_k + tl.arange(0, BK)
        b_dkh = tl.zeros([BK, R], tl.float32)
        b_d_decay = tl.zeros([BK], tl.float32)
        for i_v in tl.static_range(NV):
            o_v = i_v * BV + tl.arange(0, BV)
            b_r = load_rows(p_r, o_c * HV * V, m_c, o_v, V, BV)
            o_S, m_S = o_v[:, None] * KP + o_k[None, :], (o_v < V)[:, None] & (o_k < KP)[None, :]
            b_dS = tl.load(p_d_states + o_S, mask=m_S, other=0.0)  # [BV, BK]
            b_dkh = product_add(tl.trans(b_dS), tl.trans(b_r), b_dkh, PRECISION)
            b_S = tl.load(p_states + o_S, mask=m_S, other=0.0)  # [BV, BK]
            b_d_decay += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), 0)
        if (HAS_INITIAL or HAS_FINAL) and not EXACT:  # noqa: SIM102 - the compiler decides the one, the device the other
            if first | last:  # short sequences have no rounding that this could hide behind
                b_d_decay = exact_d_decay(
                    p_states, p_d_states, p_initial, p_d_final, i_n * HV + i_h, o_k, first, last, K, V, KP, V_FIRST, HAS_INITIAL, HAS_FINAL
                )
        b_dkh = narrow(b_dkh, SMALL)  # [BK, R]: dS' r^T
        if C > 32:
            b_e = load_decay(p_g, p_dt_bias, a, lower_bound, o_0, s_gt, o_k, length, D, K, KP, ALIGN, GATE, HAS_DT_BIAS, EXACT, PTX)
            d = decays(b_e)
            b_right = load_span(p_k, o_0, s_kt, o_k, length, D, K, KP, ALIGN, True) * to_end(d[1], d[2])
            b_dkd0 = times_solved(b_dkh, X0, PRECISION)
            b_behind = tl.sum(b_right * b_dkd0, 1, keep_dims=True)  # what columns of the first span give to every gate of the second
            b_before, b_dkd0 = d[3], narrow(b_dkd0, SMALL)
            b_q = narrow(load_span(p_q, o_1, s_qt, o_k, length, D, K, KP, ALIGN, True), SMALL)
            b_k = narrow(load_span(p_k, o_1, s_kt, o_k, length, D, K, KP, ALIGN, True), SMALL)
            b_e = load_decay(p_g, p_dt_bias, a, lower_bound, o_1, s_gt, o_k, length, D, K, KP, ALIGN, GATE, HAS_DT_BIAS, EXACT, PTX)
            d = decays(b_e)
            b_from = from_start(d[0], d[2])
            b_left = narrow(side_by_side(b_q.to(tl.float32) * b_from, b_k.to(tl.float32) * b_from), SMALL)
            b_Rk = narrow(product(b_left, b_top, PRECISION), SMALL)
            b_rows_in = state_rows(
                b_S, b_Z1, p_states, p_d_o, p_d_v, p_factors, scale, length, 32, o_k, HV, V, KP, BV, C, S, GROUP, SMALL, PRECISION, HIP
            )
            b_dkd = times_solved(b_dkh, X1, PRECISION)
            b_L = product(narrow(b_right, SMALL), tl.trans(b_top), PRECISION)
            b_dq, b_dk, b_d_g, b_ahead = span_gradient(
                b_q, b_k, b_e, d, b_rows_in, b_dkd, b_L, 0.0, b_before, b_diagonal1[None, :], M1, i_k, "second", BOUNDED, PTX, PRECISION
            )
            store_gradient(p_d_q, o_1, HV, o_k, length, b_dq, K, KP)
            store_gradient(p_d_k, o_1, HV, o_k, length, b_dk, K, KP)
            b_d_g += d[3] * (b_behind + b_before * b_d_decay[:, None])
            b_d_bias, b_d_A = store_gate_gradient(
                p_d_g, p_g, p_dt_bias, o_1, HV, s_gt, o_k, length, D, b_d_g, a, lower_bound, K, KP, ALIGN, GATE, HAS_DT_BIAS, EXACT, PTX
            )
            b_after = d[3]
        b_e = load_decay(p_g, p_dt_bias, a, lower_bound, o_0, s_gt, o_k, length, D, K, KP, ALIGN, GATE, HAS_DT_BIAS, EXACT, PTX)
        d = decays(b_e)
        b_q = narrow(load_span(p_q, o_0, s_qt, o_k, length, D, K, KP, ALIGN, True), SMALL)
        b_k = narrow(load_span(p_k, o_0, s_kt, o_k, length, D, K, KP, ALIGN, True), SMALL)
        b_rows_in = state_rows(
            b_S, b_Z0, p_states, p_d_o, p_d_v, p_factors, scale, length, 0, o_k, HV, V, KP, BV, C, S, GROUP, SMALL, PRECISION, HIP
        )
        b_dkd = b_dkd0 if C > 32 else times_solved(b_dkh, X0, PRECISION)
        if C > 32:
            b_dq, b_dk, b_d_g, _rest = span_gradient(
                b_q,
                b_k,
                b_e,
                d,
                b_rows_in,
                b_dkd,
                b_rows_in,
                b_Rk,
                b_after,
                b_diagonal0[None, :],
                M0,
                i_k,
                "first",
                BOUNDED,
                PTX,
                PRECISION,
            )
            b_d_g += b_ahead + b_after * d[3] * b_d_decay[:, None]
        else:
            b_dq, b_dk, b_d_g, _rest = span_gradient(
                b_q, b_k, b_e, d, b_rows_in, b_dkd, b_rows_in, 0.0, 1.0, b_diagonal0[None, :], M0, i_k, "only", BOUNDED, PTX, PRECISION
            )
            b_d_g += d[3] * b_d_decay[:, None]
        store_gradient(p_d_q, o_0, HV, o_k, length, b_dq, K, KP)
        store_gradient(p_d_k, o_0, HV, o_k, length, b_dk, K, KP)
        b_d_bias0, b_d_A0 = store_gate_gradient(
            p_d_g, p_g, p_dt_bias, o_0, HV, s_gt, o_k, length, D, b_d_g, a, lower_bound, K, KP, ALIGN, GATE, HAS_DT_BIAS, EXACT, PTX
        )
        if C > 32:
            b_d_bias0, b_d_A0 = b_d_bias0 + b_d_bias, b_d_A0 + b_d_A
        if HAS_DT_BIAS:
            tl.store(p_d_dt_bias + i_p * KP + o_k, b_d_bias0, mask=o_k < KP)
        if HAS_A_LOG:
            tl.store(p_d_A_log + i_p * KP + o_k, b_d_A0, mask=o_k < KP)

    if L2NORM:
        tl.debug_barrier()  # d_q and d_k are read back
        b_norm_q, b_norm_k = load_norms(p_factors + C, o_0, C, S, GROUP)
        finish_l2norm(p_d_q, p_q, b_norm_q, o_0, HV, s_qt, length, K, KP, ALIGN)
        finish_l2norm(p_d_k, p_k, b_norm_k, o_0, HV, s_kt, length, K, KP, ALIGN)
        if C > 32:
            b_norm_q, b_norm_k = load_norms(p_factors + C, o_1, C, S, GROUP)
            finish_l2norm(p_d_q, p_q, b_norm_q, o_1, HV, s_qt, length, K, KP, ALIGN)
            finish_l2norm(p_d_k, p_k, b_norm_k, o_1, HV, s_kt, length, K, KP, ALIGN)
