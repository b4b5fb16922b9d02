"""`normed_gradient` for any gate: pairs by levels, as in `pairs`, so that no share of a gate is a difference."""

from __future__ import annotations

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.gate import power_of_2
from kdakit.backends.triton_gpu.gradient import load_pairs
from kdakit.backends.triton_gpu.normed import gate_share, gate_unit, scaled_bias, widened
from kdakit.backends.triton_gpu.normed_inputs import (
    across,
    half_gates,
    load_half,
    load_part,
    load_rows,
    nothing,
    other_octet,
    store_rows,
    total,
)  # fmt: skip
from kdakit.backends.triton_gpu.pairs import gate_sums
from kdakit.backends.triton_gpu.span import (
    as_span,
    identity,
    octet_sums,
    octets,
    placed,
    remaining_product,
    running_product,
    side_by_side,
    sides,
    span,
    span_tokens,
    spread,
)  # fmt: skip
from kdakit.backends.triton_gpu.tile import narrow, product, product_add


@triton.jit
def half_decays(b_g, p_dt_bias, b_I, a, unit, K: tl.constexpr, GATE: tl.constexpr, HAS_DT_BIAS: tl.constexpr, PTX: tl.constexpr):
    """b_g [32, KP] -> [KP, 32], and the tokens' decays, 8 x [KP, 4]."""
    o_k = tl.arange(0, b_g.shape[1])
    b_g = placed(tl.trans(b_g), b_I)
    b_bias = tl.zeros([b_g.shape[0], 1], tl.float32)
    if HAS_DT_BIAS:
        b_bias = scaled_bias(tl.load(p_dt_bias + o_k, mask=o_k < K, other=0.0).to(tl.float32), a, GATE)[:, None]
    return narrow(b_g, tl.bfloat16), octets(power_of_2(gate_share(b_g, b_bias, a, unit, GATE, True, PTX) * unit, PTX))


@triton.jit
def around(b_c):
    """b_c [KP, 4], the octets' decays -> decays of the half before each octet and after it, and of all of it, [KP, 4]."""
    o_t = tl.arange(0, 4)[None, :]
    b_other = other_octet(b_c, 1)
    b_two = b_c * b_other
    b_far = other_octet(b_two, 2)
    b_before = tl.where(o_t % 2 == 1, b_other, 1.0) * tl.where(o_t >= 2, b_far, 1.0)
    b_after = tl.where(o_t % 2 == 0, b_other, 1.0) * tl.where(o_t < 2, b_far, 1.0)
    return b_before, b_after, b_two * b_far


@triton.jit
def level_pairs(b_dA, b: tl.constexpr):
    """The pairs of level b of b_dA [32, 32], the others 0."""
    o_i, o_j = span_tokens(32)[:, None], span_tokens(32)[None, :]
    return tl.where((o_i // b % 2 == 1) & (o_i // b == o_j // b + 1), b_dA, tl.zeros_like(b_dA))


@triton.jit
def level(b_q, b_k, b_f, b_Mq, b_Mk, b: tl.constexpr, b_dq, b_dk, PRECISION: tl.constexpr):
    """Adds the gradients of one level to b_dq and b_dk: q and k times b_f, which decays tokens of odd blocks from the boundary and tokens
    of even blocks to it. Returns also what each token, a row or a column, has to do with the gates."""
    b_Mq, b_Mk = level_pairs(b_Mq, b), level_pairs(b_Mk, b)
    b_zq, b_zk = b_q * b_f, b_k * b_f
    b_q1, b_k1 = narrow(b_zq, tl.bfloat16), narrow(b_zk, tl.bfloat16)
    b_aq = product(b_k1, tl.trans(b_Mq), PRECISION)
    b_ak = product_add(b_k1, b_Mk, product_add(b_k1, tl.trans(b_Mk), product(b_q1, b_Mq, PRECISION), PRECISION), PRECISION)
    return b_dq + b_f * b_aq, b_dk + b_f * b_ak, b_zq * b_aq + b_zk * b_ak


@triton.jit
def near_levels(b_q, b_k, e, b_Mq, b_Mk, b_diagonal, PRECISION: tl.constexpr):
    """The diagonal and levels 4, 2 and 1, which lie within octets, and their shares of the gates [KP, 32]."""
    b_dq, b_dk = b_diagonal * b_k, b_diagonal * b_q
    b_1 = tl.full(e[0].shape, 1.0, tl.float32)
    b_0 = tl.zeros_like(b_1)
    b_45, b_23 = e[4] * e[5], e[2] * e[3]
    b_456 = b_45 * e[6]
    b_f = span((e[1] * b_23, b_23, e[3], b_1, e[4], b_45, b_456, b_456 * e[7]))
    b_dq, b_dk, b_u = level(b_q, b_k, b_f, b_Mq, b_Mk, 4, b_dq, b_dk, PRECISION)
    u = octets(b_u)
    b_67, b_01 = u[6] + u[7], u[0] + u[1]
    b_567 = u[5] + b_67
    b_d_g = span((b_0, u[0], b_01, b_01 + u[2], u[4] + b_567, b_567, b_67, u[7]))
    b_f = span((e[1], b_1, e[2], b_23, e[5], b_1, e[6], e[6] * e[7]))
    b_dq, b_dk, b_u = level(b_q, b_k, b_f, b_Mq, b_Mk, 2, b_dq, b_dk, PRECISION)
    u = octets(b_u)
    b_d_g += span((b_0, u[0], u[2] + u[3], u[3], b_0, u[4], u[6] + u[7], u[7]))
    b_f = span((b_1, e[1], b_1, e[3], b_1, e[5], b_1, e[7]))
    b_dq, b_dk, b_u = level(b_q, b_k, b_f, b_Mq, b_Mk, 1, b_dq, b_dk, PRECISION)
    u = octets(b_u)
    return b_dq, b_dk, b_d_g + span((b_0, u[1], b_0, u[3], b_0, u[5], b_0, u[7]))


@triton.jit
def far_levels(b_q, b_k, b_prefix, b_suffix, b_c, b_Mq, b_Mk, b_dq, b_dk, PRECISION: tl.constexpr):
    """Levels 16 and 8. Returns also what goes to the gates of its octet up to each token, to those after it, and to all [KP, 4]."""
    o_t = tl.arange(0, 4)[None, :]
    b_1 = tl.full(b_c.shape, 1.0, tl.float32)
    b_late, b_odd = spread(tl.where(o_t >= 2, b_1, 0.0)), spread(tl.where(o_t % 2 == 1, b_1, 0.0))
    b_f = tl.where(b_late > 0, b_prefix, b_suffix) * spread(tl.where((o_t == 0) | (o_t == 3), other_octet(b_c, 1), 1.0))
    b_dq, b_dk, b_u = level(b_q, b_k, b_f, b_Mq, b_Mk, 16, b_dq, b_dk, PRECISION)
    b_rows, b_cols = b_u * b_late, b_u * (1.0 - b_late)
    b_carry = tl.where((o_t == 1) | (o_t == 2), other_octet(octet_sums(b_u), 1), 0.0)
    b_dq, b_dk, b_u = level(b_q, b_k, tl.where(b_odd > 0, b_prefix, b_suffix), b_Mq, b_Mk, 8, b_dq, b_dk, PRECISION)
    return b_dq, b_dk, b_rows + b_u * b_odd, b_cols + b_u * (1.0 - b_odd), b_carry


@triton.jit
def carried(b_rows, b_cols):
    """What goes to all gates of an octet [KP, 4] where b_rows goes to all gates of the half up to each token, and b_cols to all after it."""
    o_t = tl.arange(0, 4)[None, :]
    b_r, b_s = octet_sums(b_rows), octet_sums(b_cols)
    b_other = other_octet(b_r, 1)
    b_carry = tl.where(o_t % 2 == 0, b_other, 0.0) + tl.where(o_t < 2, other_octet(b_r + b_other, 2), 0.0)
    b_other = other_octet(b_s, 1)
    return b_carry + tl.where(o_t % 2 == 1, b_other, 0.0) + tl.where(o_t >= 2, other_octet(b_s + b_other, 2), 0.0)


@triton.jit
def half_levels(
    p_d_q, p_d_k, FIRST: tl.constexpr, x, M, e, b_before, b_after, b_I, b_far, b_top, b_X, SECOND: tl.constexpr, HV, length,
    K: tl.constexpr, KP: tl.constexpr, PTX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores d_q and d_k of a half, x as `load_half`, M as `load_squares` and e as `half_decays` has it; b_before and b_after [KP, 4] decay
    over the other half, if that comes before or after it; b_far are the first half's keys decayed to its end, b_top the pairs with them,
    b_X what those give to the keys.

    Returns the gates' shares [KP, 32], without what the other half and the state give to all of them; what the second gives to those of
    the first, [KP, 4], and to its keys; and the half's decay, [KP, 4].
    """
    _g, b_qk, b_r_q, b_r_k, b_dqd, b_dki, b_dc, _dA = x
    b_q, b_k = sides(placed(tl.trans(b_qk), b_I))
    b_dq, b_dk, b_d_g = near_levels(b_q, b_k, e, M[0], M[1], M[2], PRECISION)
    prefix, suffix = running_product(e), remaining_product(e)
    b_prefix, b_suffix = span(prefix), span(suffix)
    b_dq, b_dk, b_rows, b_cols, b_carry = far_levels(b_q, b_k, b_prefix, b_suffix, prefix[7], M[0], M[1], b_dq, b_dk, PRECISION)
    b_in, b_out, b_all = around(prefix[7])
    b_from, b_to = b_prefix * spread(b_in), b_suffix * spread(b_out)
    b_dqd, b_dki, b_col = widened(as_span(b_dqd), PTX), widened(as_span(b_dki), PTX), widened(as_span(b_dc), PTX)
    b_ahead = b_all
    if SECOND:
        b_qf, b_kf, b_before = b_q * b_from, b_k * b_from, spread(b_before)
        b_dqd, b_dki = b_dqd * b_before, b_dki * b_before
        b_ahead = total(b_qf * b_dqd + b_kf * b_dki)
        b_X = product(narrow(side_by_side(b_qf, b_kf), tl.bfloat16), b_top, PRECISION)
        b_dqd, b_dki = sides(product_add(b_far, tl.trans(b_top), side_by_side(b_dqd, b_dki), PRECISION))
    else:
        b_col = b_col * spread(b_after) + b_X
    b_dqd, b_dki, b_col = b_dqd * b_from, b_dki * b_from, b_col * b_to
    b_row, b_kc = b_q * b_dqd + b_k * b_dki, b_k * b_col
    b_d_g += gate_sums(b_rows + b_row, b_cols + b_kc, b_carry + carried(b_row, b_kc))
    b_dq, b_dk = b_dq + b_dqd, b_dk + b_dki + b_col
    store_rows(p_d_q, p_d_k, FIRST, HV, length, across(b_dq, b_q, b_r_q), across(b_dk, b_k, b_r_k), K, KP)
    return b_d_g, b_ahead, b_X, b_all


@triton.jit
def load_squares(p_pairs, FIRST: tl.constexpr):
    """The pairs of a half with q and with k [32, 32], and the diagonal of the former [1, 32]."""
    o_p = FIRST + tl.arange(0, 32)
    p_M = p_pairs + o_p[:, None] * 64 + o_p[None, :]
    return tl.load(p_M), tl.load(p_M + 4096), tl.load(p_pairs + o_p * 65).to(tl.float32)[None, :]


@triton.jit
def chunk_levels(
    p_q, p_k, p_g, p_dt_bias, p_norms, p_pairs, p_parts, p_d_decay, p_d_q, p_d_k, p_d_g, a, lower_bound, length, HV, s_qt, s_kt, s_gt,
    K: tl.constexpr, KP: tl.constexpr, ALIGN: tl.constexpr, GATE: tl.constexpr, HAS_DT_BIAS: tl.constexpr, PTX: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As `normed_gradient.chunk_gradient`."""
    unit = gate_unit(a, lower_bound, GATE)
    b_I, b_I2, o_k = identity(32), identity(64), tl.arange(0, KP)
    b_g = load_rows(p_g, p_g, 0, s_gt, s_gt, length, nothing(GATE), 32, K, KP, ALIGN)
    b_k = load_rows(p_k, p_k, 0, s_kt, s_kt, length, 0.0, 32, K, KP, ALIGN)
    b_dc = load_part(p_parts, 2, 0, KP)
    x = load_half(p_q, p_k, p_g, p_norms, p_pairs, p_parts, 32, length, s_qt, s_kt, s_gt, K, KP, ALIGN, GATE)
    M, b_top, b_d_decay = load_squares(p_pairs, 32), load_pairs(p_pairs, 32, 0, 64), tl.load(p_d_decay + o_k)[:, None]

    _g, e = half_decays(b_g, p_dt_bias, b_I, a, unit, K, GATE, HAS_DT_BIAS, PTX)
    suffix = remaining_product(e)
    _in, b_out, b_before = around(suffix[0] * e[0])
    b_far = placed(tl.trans(b_k), b_I) * span(suffix) * spread(b_out)
    b_behind = total(b_far * widened(as_span(b_dc), PTX))  # what keys of the first half give to every gate of the second
    b_far = narrow(b_far, tl.bfloat16)
    b_g, e = half_decays(x[0], p_dt_bias, b_I, a, unit, K, GATE, HAS_DT_BIAS, PTX)
    b_d, b_ahead, b_X, b_after = half_levels(
        p_d_q, p_d_k, 32, x, M, e, b_before, b_before, b_I2, b_far, b_top, b_before, True, HV, length, K, KP, PTX, PRECISION
    )
    b_d += spread(b_after * (b_behind + b_before * b_d_decay))
    x = load_half(p_q, p_k, p_g, p_norms, p_pairs, p_parts, 0, length, s_qt, s_kt, s_gt, K, KP, ALIGN, GATE)
    M = load_squares(p_pairs, 0)
    b_bias1, b_A1 = half_gates(p_d_g, p_dt_bias, 32, b_g, b_d, a, lower_bound, HV, length, K, KP, GATE, HAS_DT_BIAS, PTX)

    b_g, e = half_decays(x[0], p_dt_bias, b_I, a, unit, K, GATE, HAS_DT_BIAS, PTX)
    b_d, _ahead, _X, _all = half_levels(
        p_d_q, p_d_k, 0, x, M, e, b_before, b_after, b_I2, b_far, b_top, b_X, False, HV, length, K, KP, PTX, PRECISION
    )
    b_d += spread(b_ahead + b_before * b_after * b_d_decay)
    b_bias, b_A = half_gates(p_d_g, p_dt_bias, 0, b_g, b_d, a, lower_bound, HV, length, K, KP, GATE, HAS_DT_BIAS, PTX)
    return b_bias + b_bias1, b_A + b_A1
