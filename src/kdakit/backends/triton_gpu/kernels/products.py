"""Backward, fourth launch: every product over V. What outputs and states say about a chunk's pairs, rows, columns and write strengths."""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.arguments import arguments
from kdakit.backends.triton_gpu.config import Config, chunk_slots
from kdakit.backends.triton_gpu.device.channel_tiles import channel_rows, in_order, span_tokens, split_sides
from kdakit.backends.triton_gpu.device.gate import tiny_strength, write_strength_backward
from kdakit.backends.triton_gpu.device.inverse import load_inverse
from kdakit.backends.triton_gpu.device.matrix import product, product_add, round_to, rounded_off
from kdakit.backends.triton_gpu.device.program import locate_chunk, row_of_token, row_tokens, state_offsets
from kdakit.backends.triton_gpu.device.whole_sums import add_product, sum_whole
from kdakit.backends.triton_gpu.runtime.kernel import kernel
from kdakit.backends.triton_gpu.runtime.launch import Launch
from kdakit.backends.triton_gpu.runtime.layout import Layout
from kdakit.problem import Problem


@triton.jit
def load_rows(p_x, o_row, m_row, o_v, V: tl.constexpr, BV: tl.constexpr):
    """Rows at offsets o_row [R] of a [.., V] tensor -> [R, BV]."""
    m_x = m_row[:, None]
    if V % BV:
        m_x = m_x & (o_v < V)[None, :]
    return tl.load(p_x + o_row[:, None] + o_v[None, :], mask=m_x, other=0.0)


@triton.jit
def load_state(p_S, o_v, o_k, V: tl.constexpr, BV: tl.constexpr, KP: tl.constexpr):
    """Rows o_v, channels o_k of a state [VP, KP]."""
    m_S = (o_k < KP)[None, :]
    if V % BV:
        m_S = m_S & (o_v < V)[:, None]
    return tl.load(p_S + o_v[:, None] * KP + o_k[None, :], mask=m_S, other=0.0)


@triton.jit
def solved_rows(
    p_lower, b_beta, b_norm, o_i, o_p, b_beta_c, C: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, GRADIENT_DTYPE: tl.constexpr
):
    """Rows o_i [R] of X / |k|, X = inverse Diag(beta), columns in the order of `row_tokens`, rounded; and what rounding took."""
    b_X = load_inverse(p_lower, b_beta, o_i, o_p, C, HALF, GROUP) * b_beta_c[None, :] * b_norm[:, None]
    b_Xn = round_to(b_X, GRADIENT_DTYPE)
    return b_Xn, round_to(b_X - b_Xn.to(tl.float32), GRADIENT_DTYPE)


@triton.jit
def times_solved(b_x, X, GRADIENT_DTYPE: tl.constexpr, PRECISION: tl.constexpr, WHOLE: tl.constexpr = True):
    """b_x [M, R] -> b_x X^T [M, R]: what rounding takes from X is made good, and, if WHOLE, what it takes from b_x."""
    b_xn = round_to(b_x, GRADIENT_DTYPE)
    b_y = product(b_xn, tl.trans(X[0]), PRECISION)
    if not GRADIENT_DTYPE.is_fp32():
        b_y = product_add(b_xn, tl.trans(X[1]), b_y, PRECISION)
        if WHOLE:
            b_y = product_add(round_to(b_x - b_xn.to(tl.float32), GRADIENT_DTYPE), tl.trans(X[0]), b_y, PRECISION)
    return b_y


@triton.jit
def exact_d_decay(
    p_states, p_states_lost, p_d_states, p_d_states_lost, p_initial, p_d_final, p_before_last, p_after_first, i_nh, o_k, first, last,
    begins, ends,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, V_FIRST: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr,
):  # fmt: skip
    """sum_v S dS' [BK], with S and dS' as the caller gave them where they are the caller's own: at the sequence's start and end. With what
    rounding took from the others, if p_states_lost and p_d_states_lost have it. p_before_last, p_after_first: S and dS' of this
    chunk, if it `ends` or `begins` a sequence of several."""
    b_sum = tl.zeros(o_k.shape, tl.float32)
    for i_v in range(0, V, 16):
        o_v = i_v + tl.arange(0, 16)
        o_S, m_S = o_v[:, None] * KP + o_k[None, :], (o_v < V)[:, None] & (o_k < K)[None, :]
        o_state = state_offsets(i_nh, o_v, o_k, K, V, V_FIRST)
        b_S, b_dS = (
            tl.load(p_states + o_S, mask=m_S, other=0.0).to(tl.float32),
            tl.load(p_d_states + o_S, mask=m_S, other=0.0).to(tl.float32),
        )
        if p_states_lost is not None:
            b_S += tl.load(p_states_lost + o_S, mask=m_S, other=0.0).to(tl.float32)
            b_dS += tl.load(p_d_states_lost + o_S, mask=m_S, other=0.0).to(tl.float32)
        if HAS_INITIAL:
            b_S = tl.where(first, tl.load(p_initial + o_state, mask=m_S & first, other=0.0).to(tl.float32), b_S)
        if HAS_FINAL:
            b_dS = tl.where(last, tl.load(p_d_final + o_state, mask=m_S & last, other=0.0).to(tl.float32), b_dS)
        if p_before_last is not None:
            m_last = ends & (first == 0)
            b_S = tl.where(m_last, tl.load(p_before_last + o_state, mask=m_S & m_last, other=0.0), b_S)
        if p_after_first is not None:
            m_first = begins & (last == 0)
            b_dS = tl.where(m_first, tl.load(p_after_first + o_state, mask=m_S & m_first, other=0.0), b_dS)
        b_sum += tl.sum(b_S * b_dS, 0)
    return b_sum


@triton.jit
def load_beta_y(p_d_v, p_alone, o_row, o_i, m_i, m_alone, o_v, V: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, GIVEN: tl.constexpr):
    """beta y, or y for rows m_alone, [R, BV]."""
    b_beta_y = load_rows(p_d_v, o_row, m_i, o_v, V, BV)
    if GIVEN:
        b_beta_y = tl.where(m_alone[:, None], load_rows(p_alone, o_i * VP, m_alone, o_v, V, BV), b_beta_y)
    return b_beta_y


@triton.jit
def pair_products(p_d_o, p_d_v, p_alone, p_r, o_row, o_i, m_i, m_alone, o_rc, m_c, V: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr,
                  R: tl.constexpr, GIVEN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """d_o r^T and beta y r^T, or y r^T for rows m_alone, [R, R]: rows in the order of `span_tokens`, columns in that of `row_tokens`."""
    b_Pq, b_Pk = tl.zeros([R, R], tl.float32), tl.zeros([R, R], tl.float32)
    for i_v in tl.range(0, V, BV, num_stages=STAGES):
        o_v = i_v + tl.arange(0, BV)
        b_r = tl.trans(load_rows(p_r, o_rc, m_c, o_v, V, BV))
        b_Pq = product_add(load_rows(p_d_o, o_row, m_i, o_v, V, BV), b_r, b_Pq, PRECISION)
        b_beta_y = load_beta_y(p_d_v, p_alone, o_row, o_i, m_i, m_alone, o_v, V, VP, BV, GIVEN)
        b_Pk = product_add(b_beta_y, b_r, b_Pk, PRECISION)
    return b_Pq, b_Pk


@triton.jit
def add_lost_pairs(b_Pk, p_d_v, p_alone, p_y_lost, p_r, p_r_lost, o_row, o_i, m_i, m_alone, o_rc, o_c, m_c, V: tl.constexpr,
                   VP: tl.constexpr, BV: tl.constexpr, GIVEN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """b_Pk [R, R] + what rounding took from it: y_lost r^T + beta y r_lost^T. The last token's d_beta is a sum over V in which terms
    cancel, and where gates forget all else, it is all there is."""
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        b_r = tl.trans(load_rows(p_r, o_rc, m_c, o_v, V, BV))
        b_Pk = product_add(load_rows(p_y_lost, o_i * VP, m_i, o_v, V, BV), b_r, b_Pk, PRECISION)
        b_r = tl.trans(load_rows(p_r_lost, o_c * VP, m_c, o_v, V, BV))
        b_beta_y = load_beta_y(p_d_v, p_alone, o_row, o_i, m_i, m_alone, o_v, V, VP, BV, GIVEN)
        b_Pk = product_add(b_beta_y, b_r, b_Pk, PRECISION)
    return b_Pk


@triton.jit
def state_products(
    p_states, p_d_states, p_d_o, p_d_v, p_r, o_row, m_i, o_rc, m_c, o_k,
    V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, EXACT_SHARE: tl.constexpr,
):  # fmt: skip
    """S d_o^T, S (beta y)^T, dS' r^T [BK, R] and sum_v S dS' [BK]. EXACT_SHARE: the last as if it were rounded but once."""
    b_dq, b_dk, b_dkh = tl.zeros([BK, R], tl.float32), tl.zeros([BK, R], tl.float32), tl.zeros([BK, R], tl.float32)
    b_SdS, b_lost = tl.zeros([BV, BK], tl.float32), tl.zeros([BV, BK], tl.float32)
    for i_v in tl.range(0, V, BV, num_stages=STAGES):
        o_v = i_v + tl.arange(0, BV)
        b_S, b_dS = load_state(p_states, o_v, o_k, V, BV, KP), load_state(p_d_states, o_v, o_k, V, BV, KP)  # [BV, BK]
        b_dq = product_add(tl.trans(b_S), tl.trans(load_rows(p_d_o, o_row, m_i, o_v, V, BV)), b_dq, PRECISION)
        b_dk = product_add(tl.trans(b_S), tl.trans(load_rows(p_d_v, o_row, m_i, o_v, V, BV)), b_dk, PRECISION)
        b_dkh = product_add(tl.trans(b_dS), tl.trans(load_rows(p_r, o_rc, m_c, o_v, V, BV)), b_dkh, PRECISION)
        if EXACT_SHARE:
            b_SdS, b_lost = add_product(b_SdS, b_lost, b_S, b_dS)
        else:
            b_SdS += b_S.to(tl.float32) * b_dS.to(tl.float32)
    return b_dq, b_dk, b_dkh, sum_whole(b_SdS, b_lost) if EXACT_SHARE else tl.sum(b_SdS, 0)


@triton.jit
def lost_of_state(p_state, i_nh, o_v, o_k, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr, DTYPE: tl.constexpr):
    """What rounding to DTYPE takes from a caller's state, [BK, BV]."""
    m_S = (o_v < V)[:, None] & (o_k < K)[None, :]
    b_S = tl.load(p_state + state_offsets(i_nh, o_v, o_k, K, V, V_FIRST), mask=m_S, other=0.0).to(tl.float32)
    return tl.trans(rounded_off(b_S, DTYPE))


@triton.jit
def add_lost_state(
    b_dq, b_dk, p_initial, p_d_o, p_d_v, i_nh, o_row, m_i, o_k,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """b_dq, b_dk [BK, R] of a sequence's first chunk + what rounding took from the caller's state: S_lost d_o^T, S_lost (beta y)^T. Where
    few tokens follow, gates have no other gradient."""
    DTYPE: tl.constexpr = p_d_v.dtype.element_ty
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        b_S = lost_of_state(p_initial, i_nh, o_v, o_k, K, V, V_FIRST, DTYPE)
        b_dq = product_add(b_S, tl.trans(load_rows(p_d_o, o_row, m_i, o_v, V, BV)), b_dq, PRECISION)
        b_dk = product_add(b_S, tl.trans(load_rows(p_d_v, o_row, m_i, o_v, V, BV)), b_dk, PRECISION)
    return b_dq, b_dk


@triton.jit
def add_lost_gradient(
    b_dkh, p_d_final, p_r, i_nh, o_rc, m_c, o_k,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """b_dkh [BK, R] of a sequence's last chunk + what rounding took from the gradient of the caller's final state: dS'_lost r^T. Where
    gates forget all that was before, the last one has no other gradient."""
    DTYPE: tl.constexpr = p_r.dtype.element_ty
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        b_dS = lost_of_state(p_d_final, i_nh, o_v, o_k, K, V, V_FIRST, DTYPE)
        b_dkh = product_add(b_dS, tl.trans(load_rows(p_r, o_rc, m_c, o_v, V, BV)), b_dkh, PRECISION)
    return b_dkh


@triton.jit
def store_d_tile(p_d_tiles, p_scales, p_lost, first, i: tl.constexpr, i_k, b_x, KP: tl.constexpr, BY_TOKEN: tl.constexpr):
    """Part i: channels from i_k on of b_x [BK, R], tokens in the order of `span_tokens`; BY_TOKEN: to the order of tokens, which only names
    registers, see `channel_tiles.in_order`. p_scales: for float16, the power of 2 that each channel is divided by to fill its range.
    p_lost: what rounding then takes, if `first`."""
    BK: tl.constexpr = b_x.shape[0]
    R: tl.constexpr = b_x.shape[1]
    p_part = p_d_tiles + i * KP * R
    if p_scales is not None:
        o_s = i_k + tl.arange(0, BK)
        bits = tl.max(tl.abs(b_x), 1).to(tl.int32, bitcast=True) & 0x7F800000
        bits = tl.minimum(tl.maximum(bits, 0x07800000), 0x7F000000) - 0x07000000  # the largest becomes 2^14 to 2^15
        tl.store(p_scales + i * KP + o_s, bits.to(tl.float32, bitcast=True), mask=o_s < KP)
        b_x = b_x * (0x7F000000 - bits).to(tl.float32, bitcast=True)[:, None]
    if p_lost is not None:
        o_k = i_k + tl.arange(0, BK)
        p_lost += o_k[:, None] * R + tl.arange(0, R)[None, :]
        tl.store(p_lost, rounded_off(b_x, p_part.dtype.element_ty), mask=(o_k < KP)[:, None] & first)
    b_x = round_to(b_x, p_part.dtype.element_ty)
    if BY_TOKEN:
        o_k = i_k + channel_rows(BK)
        p_part += o_k[:, None] * R + tl.arange(0, 32)[None, :]
        b_x0, b_x1 = split_sides(b_x)
        tl.store(p_part, in_order(b_x0), mask=(o_k < KP)[:, None])
        tl.store(p_part + 32, in_order(b_x1), mask=(o_k < KP)[:, None])
    else:
        o_k = i_k + tl.arange(0, BK)
        tl.store(p_part + o_k[:, None] * R + tl.arange(0, R)[None, :], b_x, mask=(o_k < KP)[:, None])


@kernel
def products_kernel(
    p_beta, p_cu_seqlens, p_lower, p_factors, p_states, p_states_lost, p_d_states, p_d_states_lost, p_r, p_d_o, p_initial,
    p_d_final, p_before_last, p_after_first,
    p_d_v, p_d_beta, p_pairs, p_d_tiles, p_scales, p_d_q_lost, p_alone, p_y_lost, p_r_lost, p_d_decay,
    T, N, NT, HV, scale, s_bb, s_bt, s_bh,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, KR: tl.constexpr, VP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, VARLEN: tl.constexpr, V_FIRST: tl.constexpr, BETA: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, HAS_LOST: tl.constexpr, PRECISION: tl.constexpr, GRADIENT_DTYPE: tl.constexpr,
    STAGES: tl.constexpr, BY_TOKEN: tl.constexpr, TURNED: tl.constexpr, EXACT_SHARE: tl.constexpr, EXACT_FINAL: tl.constexpr,
    ENDS: tl.constexpr,
):  # fmt: skip
    """With X = inverse Diag(beta), v_new = X r, y the gradient of beta r, of which d_v holds beta y, and where a given beta is tiny p_alone
    y (see `reverse`), S before and dS' after the chunk:

        d_A_qk = d_o v_new^T = (d_o r^T) X^T        d_A_kk / beta = -beta y v_new^T        d_beta = y . v_new / beta
        d_q_decayed = d_o S^T        d_k_in = -beta y S^T        d_k_decayed = v_new dS'^T = X (r dS'^T)        d_decay = sum_v S dS'

    Rows of q are taken times scale / |q|, those of k and columns times 1 / |k|: from here on q and k are as the caller gave them.
    Writes pairs [slot, HV, 2, R, R] (A_qk, A_kk / beta: all of it, what is above the diagonal means nothing) and d_tiles
    [slot, HV, 3, KP, R] (q_decayed, k_in, k_decayed), tokens in the order of `span_tokens`; d_decay [slot, HV, KP]. Unless
    GRADIENT_DTYPE is float32, d_tiles are float16 and each channel of each is taken times its power of 2 in scales [slot, HV, 3, KP];
    d_q_lost [N, HV, KP, R], if it is asked for, gets what that takes from q_decayed's in a sequence's first chunk.
    BY_TOKEN, for `gradient_normed`: pairs are 0 where they mean nothing, and d_tiles lie in the order of tokens. TURNED: pairs
    lie column by column, see `config.turned`.
    GRADIENT_DTYPE is the dtype of what is neither input nor state. Grid: (slots * HV,), heads fastest.
    """
    R: tl.constexpr = C if C > 32 else 32
    i_p = tl.program_id(0).to(tl.int64)
    if KP > 128 and (HAS_INITIAL or HAS_FINAL) and p_d_o.dtype.element_ty.is_bf16():
        i_p = (i_p + NT // 2 * HV) % tl.num_programs(0)  # where a sequence ends programs are long: not the last to begin
    i_s, i_h = i_p // HV, i_p % HV
    i_b, i_n, i_c, bos, eos = locate_chunk(p_cu_seqlens, i_s, T, N, NT, C, VARLEN)
    start = bos + i_c * C
    if start >= eos:
        return
    length = tl.minimum(eos - start, C).to(tl.int32)
    i_row = (i_b * T + start) * HV + i_h
    p_beta += i_b * s_bb + start * s_bt + i_h * s_bh
    p_d_o += i_row * V
    p_d_v += i_row * V
    p_r += i_row * V
    p_factors += i_p * 3 * C
    p_states += i_p * VP * KP
    p_d_states += i_p * VP * KP
    if p_states_lost is not None:
        p_states_lost += i_p * VP * KP
        p_d_states_lost += i_p * VP * KP
    p_d_tiles += i_p * 3 * KP * R
    if p_scales is not None:
        p_scales += i_p * 3 * KP
    if p_d_q_lost is not None:
        p_d_q_lost += (i_n * HV + i_h) * KP * R
    if BETA == "given":
        p_alone += i_p * C * VP
    if ENDS > 1 and p_before_last is not None:
        p_before_last += ((i_n * HV + i_h) * (ENDS - 1) + (eos - start - 1) // C) * (K * V)
    if ENDS > 1 and p_after_first is not None:
        p_after_first += ((i_n * HV + i_h) * (ENDS - 1) + i_c) * (K * V)

    o_i, o_c, o_p = span_tokens(R), row_tokens(R, HALF, GROUP), tl.arange(0, R)
    m_i, m_c = o_i < length, o_c < length
    o_row, o_rc = o_i * HV * V, o_c * HV * V
    p_row = p_factors + row_of_token(o_i, HALF, GROUP)
    b_beta = tl.load(p_row, mask=m_i, other=0.0)
    m_alone = m_i & tiny_strength(b_beta, p_d_v.dtype.element_ty) if BETA == "given" else o_i < 0
    b_lacks = tl.where(m_alone, b_beta, 1.0)  # what rows of pairs are still to be taken times
    b_norm_q, b_norm_k = tl.load(p_row + C, mask=m_i, other=0.0) * scale, tl.load(p_row + 2 * C, mask=m_i, other=0.0)
    b_beta_c = tl.load(p_factors + o_p, mask=o_p < C, other=0.0)  # [R], in the order of `row_tokens`
    X = solved_rows(p_lower + i_p * C * C, b_beta, b_norm_k, o_i, o_p, b_beta_c, C, HALF, GROUP, GRADIENT_DTYPE)
    b_Pq, b_Pk = pair_products(
        p_d_o, p_d_v, p_alone, p_r, o_row, o_i, m_i, m_alone, o_rc, m_c, V, VP, BV, R, BETA == "given", PRECISION, STAGES
    )
    if HAS_LOST:  # noqa: SIM102 - the one is known when this is compiled
        if start + C >= eos:
            i_last = (i_n * HV + i_h) * C * VP
            b_Pk = add_lost_pairs(
                b_Pk, p_d_v, p_alone, p_y_lost + i_last, p_r, p_r_lost + i_last, o_row, o_i, m_i, m_alone, o_rc, o_c, m_c, V, VP, BV,
                BETA == "given", PRECISION,
            )  # fmt: skip
    p_pair = p_pairs + i_p * 2 * R * R + (o_p[:, None] + o_p[None, :] * R if TURNED else o_p[:, None] * R + o_p[None, :])
    b_Aq = times_solved(b_Pq, X, GRADIENT_DTYPE, PRECISION) * b_norm_q[:, None]
    if BY_TOKEN:
        b_Aq = tl.where(o_i[:, None] >= o_i[None, :], b_Aq, 0.0)
    tl.store(p_pair, round_to(b_Aq, p_pairs.dtype.element_ty))
    b_Ak = times_solved(b_Pk, X, GRADIENT_DTYPE, PRECISION, False) * (-b_lacks * b_norm_k)[:, None]
    if BY_TOKEN:
        b_Ak = tl.where(o_i[:, None] > o_i[None, :], b_Ak, 0.0)
    tl.store(p_pair + R * R, round_to(b_Ak, p_pairs.dtype.element_ty))
    m_N = (o_i < C)[:, None] & (o_p < C)[None, :]
    p_N = p_lower + i_p * C * C + row_of_token(o_i, HALF, GROUP)[:, None] * C + o_p[None, :]
    b_T = tl.where(o_i[:, None] == o_c[None, :], 1.0, 0.0) - tl.load(p_N, mask=m_N, other=0.0).to(tl.float32) * b_beta_c[None, :]
    b_given = tl.load(p_beta + o_i * s_bt, mask=m_i, other=0.0).to(tl.float32)
    b_d_beta = write_strength_backward(b_given, tl.sum(b_Pk * b_T, 1), BETA, p_d_v.dtype.element_ty)
    tl.store(p_d_beta + i_row + o_i * HV, round_to(b_d_beta, p_d_beta.dtype.element_ty), mask=m_i)

    for i_k in range(0, KR, BK):
        o_k = i_k + tl.arange(0, BK)
        b_dq, b_dk, b_dkh, b_d_decay = state_products(
            p_states, p_d_states, p_d_o, p_d_v, p_r, o_row, m_i, o_rc, m_c, o_k, V, KP, BV, BK, R, PRECISION, STAGES, EXACT_SHARE
        )
        if (HAS_INITIAL or HAS_FINAL) and not p_d_o.dtype.element_ty.is_fp32():
            first, last = i_c == 0, start + C >= eos
            begins, ends = first, last
            if ENDS > 1:
                begins, ends = i_c < ENDS, start + ENDS * C >= eos
            if p_states_lost is None:  # noqa: SIM102
                if begins | ends:  # short sequences have no rounding that this could hide behind
                    b_d_decay = exact_d_decay(
                        p_states, None, p_d_states, None, p_initial, p_d_final, p_before_last, p_after_first, i_n * HV + i_h, o_k,
                        first, last, begins, ends, K, V, KP, V_FIRST, HAS_INITIAL, HAS_FINAL,
                    )  # fmt: skip
            if HAS_INITIAL:  # noqa: SIM102
                if first:
                    b_dq, b_dk = add_lost_state(
                        b_dq, b_dk, p_initial, p_d_o, p_d_v, i_n * HV + i_h, o_row, m_i, o_k, K, V, BV, V_FIRST, PRECISION
                    )
        if p_states_lost is not None:
            b_d_decay = exact_d_decay(
                p_states, p_states_lost, p_d_states, p_d_states_lost, p_initial, p_d_final, None, None, i_n * HV + i_h, o_k, i_c == 0,
                start + C >= eos, False, False, K, V, KP, V_FIRST, HAS_INITIAL, HAS_FINAL,
            )  # fmt: skip
        store_d_tile(p_d_tiles, p_scales, p_d_q_lost, i_c == 0, 0, i_k, b_dq * b_norm_q[None, :], KP, BY_TOKEN)
        store_d_tile(p_d_tiles, p_scales, None, False, 1, i_k, b_dk * -b_norm_k[None, :], KP, BY_TOKEN)
        if HAS_FINAL and EXACT_FINAL:  # noqa: SIM102 - when the others are out of the registers
            if start + C >= eos:
                b_dkh = add_lost_gradient(b_dkh, p_d_final, p_r, i_n * HV + i_h, o_rc, m_c, o_k, K, V, BV, V_FIRST, PRECISION)
        store_d_tile(p_d_tiles, p_scales, None, False, 2, i_k, times_solved(b_dkh, X, GRADIENT_DTYPE, PRECISION), KP, BY_TOKEN)
        tl.store(p_d_decay + i_p * KP + o_k, b_d_decay, mask=o_k < KP)


@lru_cache(maxsize=1024)
def launch(problem: Problem, config: Config, layout: Layout, has_final: bool) -> Launch:
    """has_final: the final state has a gradient."""
    grid = chunk_slots(problem, config.chunk) * problem.HV
    values = dict(BK=config.product_slice_k, BV=config.slice_v, STAGES=config.product_stages, HAS_FINAL=has_final)
    options = dict(num_warps=config.product_warps, num_stages=1, registers=config.registers)
    return Launch(products_kernel, grid, arguments(problem, config, layout) | values, **options)
