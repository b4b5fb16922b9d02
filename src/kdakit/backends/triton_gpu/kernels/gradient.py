"""Backward, fifth launch: the gradients of a chunk's inputs, one program per chunk and value head. Derivation: docs/math.md."""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.arguments import arguments
from kdakit.backends.triton_gpu.config import Config, chunk_slots
from kdakit.backends.triton_gpu.device.channel_tiles import (
    from_start,
    identity_matrix,
    load_gate_input,
    load_span,
    octet_decays,
    placed_by_product,
    side_by_side,
    span_tokens,
    split_sides,
    to_end,
    without_first,
)
from kdakit.backends.triton_gpu.device.gate import (
    decay_over,
    exact_gate_slope,
    exact_log_decay,
    gate_backward,
    gate_decay,
    gate_slope,
)
from kdakit.backends.triton_gpu.device.matrix import product, round_to, rounded_off
from kdakit.backends.triton_gpu.device.pair_gradients import bounded_pairs, load_pairs, span_sums, unbounded_pairs, whole_with_pairs
from kdakit.backends.triton_gpu.device.program import locate_chunk, row_of_token
from kdakit.backends.triton_gpu.device.versions import either
from kdakit.backends.triton_gpu.device.whole_sums import sum_whole
from kdakit.backends.triton_gpu.runtime.kernel import kernel
from kdakit.backends.triton_gpu.runtime.launch import Launch
from kdakit.backends.triton_gpu.runtime.layout import Layout
from kdakit.problem import Problem


@triton.jit
def load_both(p_q, p_k, FIRST: tl.constexpr, s_qt, s_kt, o_k, length, b_I, K: tl.constexpr, KP: tl.constexpr, ALIGN: tl.constexpr,
              HIP: tl.constexpr):  # fmt: skip
    """q and k of the span that begins at token FIRST, [BK, 32] float32 each."""
    if HIP:  # AMD's compiler cannot choose between two pointers
        b_I1, o_t = identity_matrix(32), span_tokens(32) + FIRST
        b_q = load_span(p_q, o_t, s_qt, o_k, length, b_I1, K, KP, ALIGN)
        b_k = load_span(p_k, o_t, s_kt, o_k, length, b_I1, K, KP, ALIGN)
    else:
        o_t, m_q = span_tokens(64) % 32 + FIRST, tl.arange(0, 64) < 32
        p_x = either(m_q, p_q + (o_t * s_qt) * ALIGN, p_k + (o_t * s_kt) * ALIGN, ALIGN)[:, None] + o_k[None, :]
        m_x = (o_t < length)[:, None]
        if K < KP:
            m_x = m_x & (o_k < K)[None, :]
        b_q, b_k = split_sides(placed_by_product(tl.trans(tl.load(p_x, mask=m_x, other=0.0)), b_I))
    return b_q, b_k


@triton.jit
def decay_of(b_x, a, lower_bound, o_t, length, GATE: tl.constexpr, EXACT: tl.constexpr, PTX: tl.constexpr):
    """The decays of tokens o_t [R] from their gate's input [BK, R], 1 past the end."""
    return tl.where((o_t < length)[None, :], gate_decay(b_x, a, lower_bound, GATE, EXACT, PTX), 1.0)


@triton.jit
def span_decay(b_decay, b_x, a, lower_bound, o_t, length, GATE: tl.constexpr):
    """The decay over a span [BK, 1], of which b_decay is the product of its tokens' decays."""
    b_log = tl.sum(tl.where((o_t < length)[None, :], exact_log_decay(b_x, a, lower_bound, GATE), 0.0), 1, keep_dims=True)
    return decay_over(b_log, b_decay)


@triton.jit
def load_d_tile(p_d_tiles, o_x, o_k, b_I, KP: tl.constexpr):
    """Elements of d_tiles, `placed_by_product`, channels o_k [BK]; float16 ones are still to be scaled."""
    b_x = tl.load(p_d_tiles + o_x, mask=(o_k < KP)[:, None], other=0.0)
    return product(b_x, b_I.to(tl.float16), "ieee") if b_x.dtype.is_fp16() else placed_by_product(b_x, b_I)


@triton.jit
def times_scales(b_x, p_scales, i: tl.constexpr, o_k, KP: tl.constexpr):
    """Part i [BK, 32], channels o_k, times its scales, if it has any."""
    return b_x if p_scales is None else b_x * tl.load(p_scales + i * KP + o_k, mask=o_k < KP, other=0.0)[:, None]


@triton.jit
def load_d_rows(p_d_tiles, p_scales, p_d_q_lost, first, FIRST: tl.constexpr, o_k, b_I, b_I1, KP: tl.constexpr, R: tl.constexpr):
    """Gradients of q_decayed and k_in of the span that begins at token FIRST, [BK, 32] each. p_d_q_lost: what the former lost, if
    `first`."""
    o_p = tl.arange(0, 64)[None, :]
    o_x = (o_p // 32 * KP + o_k[:, None]) * R + FIRST + o_p % 32
    b_q, b_k = split_sides(load_d_tile(p_d_tiles, o_x, o_k, b_I, KP))
    if p_d_q_lost is not None:
        o_x = o_k[:, None] * R + FIRST + tl.arange(0, 32)[None, :]
        b_lost = tl.load(p_d_q_lost + o_x, mask=(o_k < KP)[:, None] & first, other=0.0)
        b_q += product(b_lost, b_I1.to(tl.float16), "ieee")
    return times_scales(b_q, p_scales, 0, o_k, KP), times_scales(b_k, p_scales, 1, o_k, KP)


@triton.jit
def load_d_columns(p_d_tiles, p_scales, FIRST: tl.constexpr, o_k, b_I, KP: tl.constexpr, R: tl.constexpr):
    """Gradients of k_decayed of the span that begins at token FIRST, [BK, 32]."""
    o_x = (2 * KP + o_k)[:, None] * R + FIRST + tl.arange(0, 32)[None, :]
    return times_scales(load_d_tile(p_d_tiles, o_x, o_k, b_I, KP), p_scales, 2, o_k, KP)


@triton.jit
def span_gradient(
    b_q, b_k, b_e, d, b_extra, b_lost, b_top, b_other, p_pairs, p_d_tiles, p_scales, p_d_q_lost, first, b_I2, b_I1, o_k,
    KP: tl.constexpr, R: tl.constexpr, PLACE: tl.constexpr, BOUNDED: tl.constexpr, TURNED: tl.constexpr, DTYPE: tl.constexpr,
    PTX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One span, the 'first' of a chunk (or the only one) or its 'second'. d: its `octet_decays`. For the first
    b_extra is the gradient of its columns, k decayed to its end. For the second it is the first's columns decayed to its start, with b_lost
    what rounding took from them, or None, b_top the pairs with them, and b_other [BK, 1] is the first's decay.

    Returns d_q, d_k, d_g [BK, 32], d_g without what the other span and the state give to all its gates; and what the second gives to all
    gates of the first, [BK, 1].
    """
    FIRST: tl.constexpr = 32 if PLACE == "second" else 0
    b_prefix, b_suffix, c, b_ahead = d
    b_dA = load_pairs(p_pairs, FIRST, FIRST, R, TURNED)
    if BOUNDED:
        b_dq, b_dk, b_d_g = bounded_pairs(b_q, b_k, b_prefix, c, b_dA, DTYPE, PTX, PRECISION)
    else:
        b_dq, b_dk, b_d_g = unbounded_pairs(b_q, b_k, b_e, b_prefix, b_suffix, c, b_dA, DTYPE, PRECISION)
    b_col = to_end(b_suffix, c) * (load_d_columns(p_d_tiles, p_scales, 32, o_k, b_I1, KP, R) if PLACE == "second" else b_extra)
    b_dk += b_col
    b_col = b_k * b_col
    b_from = from_start(b_prefix, c)
    b_dqd, b_dki = load_d_rows(p_d_tiles, p_scales, p_d_q_lost, first, FIRST, o_k, b_I2, b_I1, KP, R)
    if PLACE == "second":
        b_dqd, b_dki = b_dqd * b_other, b_dki * b_other
        b_ahead = tl.sum(b_from * (b_q * b_dqd + b_k * b_dki), 1, keep_dims=True)
        b_Lq, b_Lk = split_sides(whole_with_pairs(b_extra, b_lost, tl.trans(b_top), PRECISION))
        b_dqd, b_dki = b_dqd + b_Lq, b_dki + b_Lk
    b_dqd, b_dki = b_from * b_dqd, b_from * b_dki
    b_d_g += span_sums(b_q * b_dqd + b_k * b_dki, b_col)
    return b_dq + b_dqd, b_dk + b_dki, b_d_g, b_ahead


@triton.jit
def store_gradient(p_d, o_t, HV, o_k, length, b_d, K: tl.constexpr, KP: tl.constexpr):
    """b_d [BK, 32] -> rows o_t, channels o_k."""
    p_d += (o_t * HV)[:, None] * K + o_k[None, :]
    m_d = (o_t < length)[:, None]
    if K < KP:
        m_d = m_d & (o_k < K)[None, :]
    tl.store(p_d, round_to(tl.trans(b_d), p_d.dtype.element_ty), mask=m_d)


@triton.jit
def normalised_backward(b_d, b_x, p_norm, o_t, C: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr):
    """d - r^2 (x . d) x for tiles of all channels, r = 1 / |x|: normalising takes from a gradient what lies along x."""
    b_r = tl.load(p_norm + row_of_token(o_t, HALF, GROUP), mask=o_t < C, other=0.0)
    return b_d - (b_r * b_r * tl.sum(b_x * b_d, 0))[None, :] * b_x


@triton.jit
def store_span(
    p_d_q, p_d_k, p_d_g, p_factors, b_q, b_k, b_x, b_lost, b_dq, b_dk, b_d_g, a, a_lost, lower_bound, o_t, o_k, HV, length,
    K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, GATE: tl.constexpr, L2NORM: tl.constexpr,
    EXACT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Stores a span's gradients; returns the sums over its tokens of that of the gate's input and of the terms of d_A_log, both [BK]."""
    if L2NORM and b_q.shape[0] == KP:
        b_dq = normalised_backward(b_dq, b_q, p_factors + C, o_t, C, HALF, GROUP)
        b_dk = normalised_backward(b_dk, b_k, p_factors + 2 * C, o_t, C, HALF, GROUP)
    store_gradient(p_d_q, o_t, HV, o_k, length, b_dq, K, KP)
    store_gradient(p_d_k, o_t, HV, o_k, length, b_dk, K, KP)
    b_d_g = tl.where((o_t < length)[None, :], b_d_g, 0.0)
    b_d_x, b_d_A = gate_backward(b_x, b_lost, b_d_g, a, a_lost, lower_bound, GATE, EXACT, PTX)
    store_gradient(p_d_g, o_t, HV, o_k, length, b_d_x, K, KP)
    if EXACT:
        return tl.sum(b_d_x, 1), sum_whole(b_d_A, tl.zeros_like(b_d_A), 1)
    return tl.sum(b_d_x, 1), tl.sum(b_d_A, 1)


@triton.jit
def finish_l2norm(
    p_d, p_x, p_norm, o_t, HV, s_t, length, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """`normalised_backward` for rows o_t that were written slice by slice, in place."""
    o_k = tl.arange(0, KP)
    m_x = (o_t < length)[:, None]
    if K < KP:
        m_x = m_x & (o_k < K)[None, :]
    b_r = tl.load(p_norm + row_of_token(o_t, HALF, GROUP), mask=o_t < C, other=0.0)
    b_x = tl.load(p_x + (o_t * s_t)[:, None] * ALIGN + o_k[None, :], mask=m_x, other=0.0).to(tl.float32)
    p_d += (o_t * HV)[:, None] * K + o_k[None, :]
    b_d = tl.load(p_d, mask=m_x, other=0.0).to(tl.float32)
    b_d = b_d - (b_r * b_r * tl.sum(b_x * b_d, 1))[:, None] * b_x
    tl.store(p_d, round_to(b_d, p_d.dtype.element_ty), mask=m_x)


@triton.jit
def slice_gradient(
    p_q, p_k, p_g, p_dt_bias, p_factors, p_pairs, p_d_tiles, p_scales, p_d_q_lost, first, p_d_decay, p_d_q, p_d_k, p_d_g,
    a, a_lost, lower_bound, o_k, length, HV, s_qt, s_kt, s_gt,
    K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, ALIGN: tl.constexpr, GATE: tl.constexpr,
    BOUNDED: tl.constexpr, L2NORM: tl.constexpr, HAS_DT_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr, EXACT: tl.constexpr,
    EXACT_SHARE: tl.constexpr, TURNED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, PTX: tl.constexpr, HIP: tl.constexpr,
):  # fmt: skip
    """Channels o_k [BK] of a chunk: its second span, if it has one, then its first, with operands of DTYPE. Stores the gradients of
    q, k and g; returns the chunk's share of those of dt_bias and, before it is summed over channels, of A_log, both [BK]."""
    R: tl.constexpr = C if C > 32 else 32
    # Pairs in float32 beside operands that are not: rounding alike keys, decayed, each in its way takes as much from sums over them.
    WHOLE: tl.constexpr = p_pairs.dtype.element_ty != DTYPE and not (L2NORM and KP == 128)  # the forms whose speed counts
    o_0, b_I1, b_I2 = span_tokens(32), identity_matrix(32), identity_matrix(64)
    b_d_decay = tl.load(p_d_decay + o_k, mask=o_k < KP, other=0.0)[:, None]
    if C > 32:
        b_x, _lost = load_gate_input(p_g, p_dt_bias, o_0, s_gt, o_k, length, b_I1, K, KP, ALIGN, HAS_DT_BIAS)
        d = octet_decays(decay_of(b_x, a, lower_bound, o_0, length, GATE, EXACT, PTX))
        b_before = d[3]
        b_right = load_span(p_k, o_0, s_kt, o_k, length, b_I1, K, KP, ALIGN) * to_end(d[1], d[2])
        b_dkd = load_d_columns(p_d_tiles, p_scales, 0, o_k, b_I1, KP, R)
        b_behind = tl.sum(b_right * b_dkd, 1, keep_dims=True)  # what columns of the first span give to every gate of the second
        b_right_lost = rounded_off(b_right, DTYPE) if WHOLE else None
        b_right = round_to(b_right, DTYPE)
        b_x, b_lost = load_gate_input(p_g, p_dt_bias, o_0 + 32, s_gt, o_k, length, b_I1, K, KP, ALIGN, HAS_DT_BIAS)
        b_e = decay_of(b_x, a, lower_bound, o_0 + 32, length, GATE, EXACT, PTX)
        d = octet_decays(b_e)
        b_after = d[3]
        b_q, b_k = load_both(p_q, p_k, 32, s_qt, s_kt, o_k, length, b_I2, K, KP, ALIGN, HIP)
        b_left = side_by_side(from_start(b_q * d[0], d[2]), from_start(b_k * d[0], d[2]))
        b_left_lost = rounded_off(b_left, DTYPE) if WHOLE else None
        b_left = round_to(b_left, DTYPE)
        b_top = load_pairs(p_pairs, 32, 0, R, TURNED)
        b_dkd0 = b_after * b_dkd + whole_with_pairs(b_left, b_left_lost, b_top, PRECISION)
        b_dq, b_dk, b_d_g, b_ahead = span_gradient(
            b_q, b_k, b_e, d, b_right, b_right_lost, b_top, b_before, p_pairs, p_d_tiles, p_scales, p_d_q_lost, first, b_I2, b_I1, o_k, KP,
            R, "second", BOUNDED, TURNED, DTYPE, PTX, PRECISION,
        )  # fmt: skip
        b_d_g += b_after * (b_behind + b_before * b_d_decay)
        b_d_bias1, b_d_A1 = store_span(
            p_d_q, p_d_k, p_d_g, p_factors, b_q, b_k, b_x, b_lost, b_dq, b_dk, b_d_g, a, a_lost, lower_bound, o_0 + 32, o_k, HV, length,
            K, KP, C, HALF, GROUP, GATE, L2NORM, EXACT, PTX,
        )  # fmt: skip
        b_d_decay = b_after * b_d_decay
    else:
        b_dkd0 = load_d_columns(p_d_tiles, p_scales, 0, o_k, b_I1, KP, R)
    b_x, b_lost = load_gate_input(p_g, p_dt_bias, o_0, s_gt, o_k, length, b_I1, K, KP, ALIGN, HAS_DT_BIAS)
    b_e = decay_of(b_x, a, lower_bound, o_0, length, GATE, EXACT, PTX)
    d = octet_decays(b_e)
    b_q, b_k = load_both(p_q, p_k, 0, s_qt, s_kt, o_k, length, b_I2, K, KP, ALIGN, HIP)
    b_dq, b_dk, b_d_g, _rest = span_gradient(
        b_q, b_k, b_e, d, b_dkd0, None, 0.0, 1.0, p_pairs, p_d_tiles, p_scales, p_d_q_lost, first, b_I2, b_I1, o_k, KP, R, "first", BOUNDED,
        TURNED, DTYPE, PTX, PRECISION,
    )  # fmt: skip
    if C > 32:
        b_d_g += b_ahead
    b_decay = d[3]
    if EXACT_SHARE:
        b_decay = span_decay(b_decay, b_x, a, lower_bound, o_0, length, GATE)
    b_d_g += b_decay * b_d_decay
    if not HAS_INITIAL:
        b_d_g = without_first(b_d_g, o_0, first)
    b_d_bias, b_d_A = store_span(
        p_d_q, p_d_k, p_d_g, p_factors, b_q, b_k, b_x, b_lost, b_dq, b_dk, b_d_g, a, a_lost, lower_bound, o_0, o_k, HV, length,
        K, KP, C, HALF, GROUP, GATE, L2NORM, EXACT, PTX,
    )  # fmt: skip
    if C > 32:
        b_d_bias, b_d_A = b_d_bias + b_d_bias1, b_d_A + b_d_A1
    return b_d_bias, b_d_A


@kernel
def gradient_kernel(
    p_q, p_k, p_g, p_A_log, p_dt_bias, p_cu_seqlens, p_factors, p_pairs, p_d_tiles, p_scales, p_d_q_lost, p_d_decay, p_d_q, p_d_k, p_d_g,
    p_d_A_log, p_d_dt_bias,
    T, N, NT, H, HV, lower_bound,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_gb, s_gt, s_gh,
    K: tl.constexpr, KP: tl.constexpr, KR: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
    ALIGN: tl.constexpr, VARLEN: tl.constexpr, GATE: tl.constexpr, BOUNDED: tl.constexpr, L2NORM: tl.constexpr, HAS_A_LOG: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr, EXACT_SHARE: tl.constexpr, TURNED: tl.constexpr, GRADIENT_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr, PTX: tl.constexpr, HIP: tl.constexpr,
):  # fmt: skip
    """From what `products_kernel` wrote through the decayed products, the gates and the activations.

    Tiles are [channels, tokens]: channels in slices of BK, tokens in spans of 32. Grid: (slots * HV,), heads fastest.
    d_A_log, d_dt_bias [slot, HV, KP] are the chunk's share. What l2norm takes along q and k needs all channels: a last step, unless one
    slice has them.
    """
    R: tl.constexpr = C if C > 32 else 32
    EXACT: tl.constexpr = p_q.dtype.element_ty.is_fp32()
    i_p = tl.program_id(0).to(tl.int64)
    i_s, i_h = i_p // HV, i_p % HV
    i_b, i_n, i_c, bos, eos = locate_chunk(p_cu_seqlens, i_s, T, N, NT, C, VARLEN)
    start = bos + i_c * C
    if start >= eos:
        o_k = tl.arange(0, KP)
        if HAS_A_LOG:
            tl.store(p_d_A_log + i_p * KP + o_k, tl.zeros([KP], tl.float32))
        if HAS_DT_BIAS:
            tl.store(p_d_dt_bias + i_p * KP + o_k, tl.zeros([KP], tl.float32))
        return
    length = tl.minimum(eos - start, C).to(tl.int32)
    i_hk = i_h // (HV // H)
    i_row = (i_b * T + start) * HV + i_h
    p_q += (i_b * s_qb + start * s_qt + i_hk * s_qh) * ALIGN
    p_k += (i_b * s_kb + start * s_kt + i_hk * s_kh) * ALIGN
    p_g += (i_b * s_gb + start * s_gt + i_h * s_gh) * ALIGN
    p_d_q += i_row * K
    p_d_k += i_row * K
    p_d_g += i_row * K
    p_factors += i_p * 3 * C
    p_pairs += i_p * 2 * R * R
    p_d_tiles += i_p * 3 * KP * R
    if p_scales is not None:
        p_scales += i_p * 3 * KP
    if p_d_q_lost is not None:
        p_d_q_lost += (i_n * HV + i_h) * KP * R
    a_lost = 0.0
    if EXACT:
        a, a_lost = exact_gate_slope(p_A_log, i_h, HAS_A_LOG)
    else:
        a = gate_slope(p_A_log, i_h, False, HAS_A_LOG)
    if HAS_DT_BIAS:
        p_dt_bias += i_h * K

    for i_k in tl.range(0, KR, BK, num_stages=1):
        o_k = i_k + tl.arange(0, BK)
        b_d_bias, b_d_A = slice_gradient(
            p_q, p_k, p_g, p_dt_bias, p_factors, p_pairs, p_d_tiles, p_scales, p_d_q_lost, i_c == 0, p_d_decay + i_p * KP,
            p_d_q, p_d_k, p_d_g, a, a_lost, lower_bound, o_k, length, HV, s_qt, s_kt, s_gt,
            K, KP, C, HALF, GROUP, ALIGN, GATE, BOUNDED, L2NORM, HAS_DT_BIAS, HAS_INITIAL, EXACT, EXACT_SHARE, TURNED, GRADIENT_DTYPE,
            PRECISION, PTX, HIP,
        )  # fmt: skip
        if HAS_DT_BIAS:
            tl.store(p_d_dt_bias + i_p * KP + o_k, b_d_bias, mask=o_k < KP)
        if HAS_A_LOG:
            tl.store(p_d_A_log + i_p * KP + o_k, b_d_A, mask=o_k < KP)
    if L2NORM and BK < KP:
        tl.debug_barrier()  # d_q and d_k are read back
        o_0 = span_tokens(32)
        for i in tl.static_range(R // 32):
            finish_l2norm(p_d_q, p_q, p_factors + C, o_0 + 32 * i, HV, s_qt, length, K, KP, C, HALF, GROUP, ALIGN)
            finish_l2norm(p_d_k, p_k, p_factors + 2 * C, o_0 + 32 * i, HV, s_kt, length, K, KP, C, HALF, GROUP, ALIGN)


@lru_cache(maxsize=1024)
def launch(problem: Problem, config: Config, layout: Layout) -> Launch:
    grid = chunk_slots(problem, config.chunk) * problem.HV
    values = arguments(problem, config, layout) | dict(BK=config.slice_k, BOUNDED=config.differences)
    return Launch(gradient_kernel, grid, values, num_warps=config.slice_warps, num_stages=1, registers=config.registers)
