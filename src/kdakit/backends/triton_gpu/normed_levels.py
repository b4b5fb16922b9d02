"""What `normed_gradient` does for a bounded gate, for any gate: pairs by levels, as in `pairs`, so that no share of a gate is a difference."""

from __future__ import annotations

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.gate import power_of_2
from kdakit.backends.triton_gpu.gradient import load_pairs
from kdakit.backends.triton_gpu.normed import gate_share, gate_unit, scaled_bias, widened
from kdakit.backends.triton_gpu.normed_inputs import (
    along,
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
    """b_g [32, KP] -> [KP, 32]; the tokens' decays, 8 x [KP, 4]; decays from the octet's start to each token and from it to the octet's
    end, [KP, 32]; the octets' decays, [KP, 4]."""
    o_k = tl.arange(0, b_g.shape[1])
    b_g = placed(tl.trans(b_g), b_I)
    b_bias = tl.zeros([b_g.shape[0], 1], tl.float32)
    if HAS_DT_BIAS:
        b_bias = scaled_bias(tl.load(p_dt_bias + o_k, mask=o_k < K, other=0.0).to(tl.float32), a, GATE)[:, None]
    e = octets(power_of_2(gate_share(b_g, b_bias, a, unit, GATE, True, PTX) * unit, PTX))
    prefix, suffix = running_product(e), remaining_product(e)
    return narrow(b_g, tl.bfloat16), e, span(prefix), span(suffix), prefix[7]


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
def near_levels(b_q, b_k, e, b_Mq, b_Mk, b_dq, b_dk, PRECISION: tl.constexpr):
    """Levels 4, 2 and 1, which lie within octets, and their shares of the gates [KP, 32]."""
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
def far_levels(b_q, b_k, b_prefix, b_suffix, b_c, b_Mq, b_Mk, b_rows, b_cols, b_dq, b_dk, PRECISION: tl.constexpr):
    """Levels 16 and 8. b_rows goes to all gates of the half up to each token, b_cols to all after it; returns the gates' shares of these
    and of both levels."""
    o_t = tl.arange(0, 4)[None, :]
    b_1 = tl.full(b_c.shape, 1.0, tl.float32)
    b_late, b_odd = spread(tl.where(o_t >= 2, b_1, 0.0)), spread(tl.where(o_t % 2 == 1, b_1, 0.0))
    b_r, b_s = octet_sums(b_rows), octet_sums(b_cols)
    b_other = other_octet(b_r, 1)
    b_carry = tl.where(o_t % 2 == 0, b_other, 0.0) + tl.where(o_t < 2, other_octet(b_r + b_other, 2), 0.0)
    b_other = other_octet(b_s, 1)
    b_carry += tl.where(o_t % 2 == 1, b_other, 0.0) + tl.where(o_t >= 2, other_octet(b_s + b_other, 2), 0.0)
    b_f = tl.where(b_late > 0, b_prefix, b_suffix) * spread(tl.where((o_t == 0) | (o_t == 3), other_octet(b_c, 1), 1.0))
    b_dq, b_dk, b_u = level(b_q, b_k, b_f, b_Mq, b_Mk, 16, b_dq, b_dk, PRECISION)
    b_rows += b_u * b_late
    b_cols += b_u * (1.0 - b_late)
    b_carry += tl.where((o_t == 1) | (o_t == 2), other_octet(octet_sums(b_u), 1), 0.0)
    b_dq, b_dk, b_u = level(b_q, b_k, tl.where(b_odd > 0, b_prefix, b_suffix), b_Mq, b_Mk, 8, b_dq, b_dk, PRECISION)
    return b_dq, b_dk, gate_sums(b_rows + b_u * b_odd, b_cols + b_u * (1.0 - b_odd), b_carry)


@triton.jit
def half_levels(
    p_d_q, p_d_k, FIRST: tl.constexpr, x, M, d, b_before, b_after, b_I, b_far, b_top, b_X, SECOND: tl.constexpr, HV, length,
    K: tl.constexpr, KP: tl.constexpr, PTX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores d_q and d_k of a half, x as `load_half`, M as `load_squares` and d as `half_decays` has it; b_before and b_after [KP, 4] decay
    over the other half, if that comes before or after it; b_far are the first half's keys decayed to its end, b_top the pairs with them,
    b_X what those give to the keys.

    Returns the gates' shares [KP, 32], without what the other half and the state give to all of them; what the second gives to those of
    the first, [KP, 4]; and to its keys.
    """
    _g, b_qk, b_r_q, b_r_k, b_dq, b_dk, b_dc, _dA = x
    _g, e, b_prefix, b_suffix, b_c = d
    b_in, b_out, _all = around(b_c)
    b_q, b_k = sides(placed(tl.trans(b_qk), b_I))
    b_q, b_k = b_q * b_r_q, b_k * b_r_k
    b_from, b_to = b_prefix * spread(b_in), b_suffix * spread(b_out)
    b_dq, b_dk = widened(as_span(b_dq), PTX), widened(as_span(b_dk), PTX)
    b_ahead = b_c
    if SECOND:
        b_qf, b_kf, b_before = b_q * b_from, b_k * b_from, spread(b_before)
        b_dq, b_dk = b_dq * b_before, b_dk * b_before
        b_ahead = total(b_qf * b_dq + b_kf * b_dk)
        b_left = narrow(side_by_side(b_qf, b_kf), tl.bfloat16)
        b_dq, b_dk = sides(product_add(b_far, tl.trans(b_top), side_by_side(b_dq, b_dk), PRECISION))
        b_X = product(b_left, b_top, PRECISION)
    b_dq, b_dk = b_dq * b_from, b_dk * b_from
    b_rows = b_q * b_dq + b_k * b_dk
    b_col = widened(as_span(b_dc), PTX)
    if not SECOND:
        b_col = b_col * spread(b_after) + b_X
    b_col = b_to * b_col
    b_cols = b_k * b_col
    b_Mq, b_Mk, b_diagonal = M
    b_dq, b_dk = b_dq + b_diagonal * b_k, b_dk + b_col + b_diagonal * b_q
    b_dq, b_dk, b_d_g = far_levels(b_q, b_k, b_prefix, b_suffix, b_c, b_Mq, b_Mk, b_rows, b_cols, b_dq, b_dk, PRECISION)
    b_dq, b_dk, b_u = near_levels(b_q, b_k, e, b_Mq, b_Mk, b_dq, b_dk, PRECISION)
    store_rows(p_d_q, p_d_k, FIRST, HV, length, along(b_dq, b_q, b_r_q), along(b_dk, b_k, b_r_k), K, KP)
    return b_d_g + b_u, b_ahead, b_X


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
    b_r_k, b_dc = tl.load(p_norms + 64 + span_tokens(32))[None, :], load_part(p_parts, 2, 0, KP)
    x = load_half(p_q, p_k, p_g, p_norms, p_pairs, p_parts, 32, length, s_qt, s_kt, s_gt, K, KP, ALIGN, GATE)
    M, b_top, b_d_decay = load_squares(p_pairs, 32), load_pairs(p_pairs, 32, 0, 64), tl.load(p_d_decay + o_k)[:, None]

    d = half_decays(b_g, p_dt_bias, b_I, a, unit, K, GATE, HAS_DT_BIAS, PTX)
    _in, b_out, b_before = around(d[4])
    b_far = placed(tl.trans(b_k), b_I) * b_r_k * d[3] * spread(b_out)
    b_behind = total(b_far * widened(as_span(b_dc), PTX))  # what keys of the first half give to every gate of the second
    b_far = narrow(b_far, tl.bfloat16)
    d = half_decays(x[0], p_dt_bias, b_I, a, unit, K, GATE, HAS_DT_BIAS, PTX)
    _in, _out, b_after = around(d[4])
    b_d, b_ahead, b_X = half_levels(
        p_d_q, p_d_k, 32, x, M, d, b_before, b_after, b_I2, b_far, b_top, b_before, True, HV, length, K, KP, PTX, PRECISION
    )
    b_d += spread(b_after * (b_behind + b_before * b_d_decay))
    x = load_half(p_q, p_k, p_g, p_norms, p_pairs, p_parts, 0, length, s_qt, s_kt, s_gt, K, KP, ALIGN, GATE)
    M = load_squares(p_pairs, 0)
    b_bias1, b_A1 = half_gates(p_d_g, p_dt_bias, 32, d[0], b_d, a, lower_bound, HV, length, K, KP, GATE, HAS_DT_BIAS, PTX)

    d = half_decays(x[0], p_dt_bias, b_I, a, unit, K, GATE, HAS_DT_BIAS, PTX)
    b_d, _ahead, _X = half_levels(
        p_d_q, p_d_k, 0, x, M, d, b_before, b_after, b_I2, b_far, b_top, b_X, False, HV, length, K, KP, PTX, PRECISION
    )
    b_d += spread(b_ahead + b_before * b_after * b_d_decay)
    b_bias, b_A = half_gates(p_d_g, p_dt_bias, 0, d[0], b_d, a, lower_bound, HV, length, K, KP, GATE, HAS_DT_BIAS, PTX)
    return b_bias + b_bias1, b_A + b_A1
