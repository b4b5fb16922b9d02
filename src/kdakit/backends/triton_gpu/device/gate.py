"""Stage gate, as device functions: log-decay, l2 norm and write strength. Decays are in base 2, as the hardware's exponential is."""

from __future__ import annotations

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.device.whole_sums import product_whole

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LN2_HIGH = tl.constexpr(0.693359375)  # 9 bits
LN2_LOW = tl.constexpr(-0.00021219444005469057)
L2_EPSILON = tl.constexpr(1e-6)
# An unbounded gate is raised to this. 2^-29 is far below what bfloat16 factors of pairs resolve; but where all channels forget so much, the
# gradient of the initial state is made of nothing else, so that rows by themselves have a floor of their own: its power of 2 is 0.
FLOOR = tl.constexpr(-29.0)
ROW_FLOOR = tl.constexpr(-160.0)


@triton.jit
def log2_one_plus(e, EXACT: tl.constexpr, PTX: tl.constexpr):
    """log2(1 + e), 0 <= e <= 1. EXACT keeps the relative accuracy of small e, which 1 + e forgets. PTX: one instruction, to 2^-22."""
    if PTX and not EXACT:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + e], dtype=tl.float32, is_pure=True, pack=1)
    u = 1.0 + e
    y = tl.log2(u)
    if EXACT:
        series = e * (1.0 - e * (0.5 - e * (0.33333333 - e * (0.25 - e * (0.2 - e * 0.16666667)))))
        quotient = tl.div_rn(e, tl.maximum(u - 1.0, 1e-9))  # 1 + e, rounded, is u: it knows by how much
        y = tl.where(e < 0.03, series * LOG2E, y * quotient)
    return y


@triton.jit
def exact_log_one_plus(e):
    """ln(1 + e), 0 <= e <= 1, to a rounding. The hardware's logarithm is off by 2^-22 and to one side; of a small result that is much.

    With 1 + e = 2^n (1 + f), |f| < 0.42, and s = f / (2 + f):  ln(1 + f) = f - (h - s (h + 2/3 s^2 + 2/5 s^4 + ..)),  h = f^2 / 2.
    """
    m_2 = e > 0.41421356
    f = tl.where(m_2, 0.5 * (e - 1.0), e)
    s, h = tl.div_rn(f, 2.0 + f), 0.5 * f * f
    z = s * s
    y = f - (h - s * (h + z * (0.6666667 + z * (0.4 + z * (0.2857143 + z * 0.22222222)))))
    return tl.where(m_2, LN2_HIGH + (y + LN2_LOW), y)


@triton.jit
def log_one_plus(e, PTX: tl.constexpr):
    """ln(1 + e), 0 <= e <= 1, to 1e-5 of itself. One instruction is off by 2^-22 whatever e is, and always to one side: where every gate is
    slow, a sum over tokens keeps that."""
    return tl.where(e < 0.03, e * (1.0 - e * (0.5 - e * 0.33333333)), log2_one_plus(e, False, PTX) * LN2)


@triton.jit
def power_of_2(x, PTX: tl.constexpr):
    """2^x. PTX: one instruction, to 2^-22; results below 2^-126 are 0."""
    if PTX:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return tl.exp2(x)


@triton.jit
def reciprocal(x, PTX: tl.constexpr):
    """1 / x. PTX: one instruction, to 2^-23."""
    if PTX:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return 1.0 / x


@triton.jit
def log2_decay(b_g, b_bias, a, lower_bound, GATE: tl.constexpr, EXACT: tl.constexpr, PTX: tl.constexpr):
    """The gate's log-decay times log2(e).

    log_decay: g        softplus: -a softplus(g + bias)        bounded: lower_bound sigmoid(a (g + bias))
    """
    if GATE == "log_decay":
        return b_g * LOG2E
    b_x = b_g + b_bias
    if GATE == "softplus":
        b_x = b_x * LOG2E
        return -a * (tl.maximum(b_x, 0.0) + log2_one_plus(power_of_2(-tl.abs(b_x), PTX), EXACT, PTX))
    if PTX and not EXACT:
        return (lower_bound * LOG2E) * reciprocal(1.0 + power_of_2(b_x * (-a * LOG2E), PTX), PTX)
    return (lower_bound * LOG2E) / (1.0 + tl.exp2(b_x * (-a * LOG2E)))


@triton.jit
def exponential(x, EXACT: tl.constexpr, PTX: tl.constexpr):
    """e^x, x < 80. EXACT: to one rounding, 0 below 2^-126; the hardware's 2^y is off by several, and y = x log2(e) by x times as much."""
    if EXACT:
        x = tl.maximum(x, -100.0, tl.PropagateNan.ALL)
        n = tl.floor(x * LOG2E + 0.5)
        r = (x - n * LN2_HIGH) - n * LN2_LOW
        y = 0.041666668 + r * (0.008333334 + r * (0.0013888889 + r * 0.0001984127))
        y = 1.0 + (r + r * r * (0.5 + r * (0.16666667 + r * y)))
        power = ((tl.maximum(n, -126.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
        y = tl.where(n < -126.0, 0.0, y * power)
    else:
        y = power_of_2(x * LOG2E, PTX)
    return y


@triton.jit
def whole_exponential(x):
    """y and rest with e^x = y (1 + rest), x <= 0: y is rounded, 0 below 2^-126, and rest is what that took."""
    x = tl.maximum(x, -100.0, tl.PropagateNan.ALL)
    n = tl.floor(x * LOG2E + 0.5)
    r_high = tl.fma(n, -LN2_HIGH, x)
    r = tl.fma(n, -LN2_LOW, r_high)
    r_lost = tl.fma(n, -LN2_LOW, r_high - r)
    y = 0.041666668 + r * (0.008333334 + r * (0.0013888889 + r * 0.0001984127))
    y = r * r * (0.5 + r * (0.16666667 + r * y))
    one_and_r = 1.0 + r
    whole = one_and_r + y
    rest = (y - (whole - one_and_r)) + ((r - (one_and_r - 1.0)) + r_lost)
    power = ((tl.maximum(n, -126.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(n < -126.0, 0.0, whole * power), rest / whole


@triton.jit
def exact_log_decay(b_x, a, lower_bound, GATE: tl.constexpr):
    """The gate's log-decay of x = g + bias, to a rounding or two."""
    if GATE == "softplus":
        b_x = -a * (tl.maximum(b_x, 0.0) + exact_log_one_plus(exponential(-tl.abs(b_x), True, False)))
    elif GATE == "bounded":
        b_x = tl.div_rn(lower_bound, 1.0 + exponential(tl.minimum(-a * b_x, 79.0, tl.PropagateNan.ALL), True, False))
    return b_x


@triton.jit
def gate_decay(b_x, a, lower_bound, GATE: tl.constexpr, EXACT: tl.constexpr, PTX: tl.constexpr):
    """e^g for g = the gate's log-decay of x = g + bias."""
    if EXACT:
        b_e = exponential(exact_log_decay(b_x, a, lower_bound, GATE), True, False)
    else:
        b_e = power_of_2(log2_decay(b_x, 0.0, a, lower_bound, GATE, False, PTX), PTX)
    return b_e


@triton.jit
def exact_decays(b_x, m_x, a, lower_bound, GATE: tl.constexpr):
    """Decays and log-decays of x = g + bias to a rounding or two, 1 and 0 where m_x is false."""
    b_log = tl.where(m_x, exact_log_decay(b_x, a, lower_bound, GATE), 0.0)
    return exponential(b_log, True, False), b_log


@triton.jit
def decay_over(b_log, b_product):
    """The decay over many tokens: from the sum of their log-decays, or, where that is far from 0, the product of their decays. The latter
    has a rounding for every token, one for all that it decays; the former has one or two where little is forgotten."""
    return tl.where(b_log > -2.0, exponential(b_log, True, False), b_product)


@triton.jit
def write_strength(b_beta, BETA: tl.constexpr, EXACT: tl.constexpr = True):
    """given: beta        sigmoid: 1 / (1 + e^-beta)        double_sigmoid: twice that.

    EXACT: to a rounding or two, as a caller's own sigmoid is: both then round to the same bfloat16 numbers nearly everywhere. A rounded
    quotient is a call, which a program of one token waits for.
    """
    if BETA == "given":
        return b_beta
    b_e = exponential(tl.minimum(-b_beta, 79.0), True, False) if EXACT else tl.exp2(-b_beta * LOG2E)
    b_s = tl.div_rn(1.0, 1.0 + b_e) if EXACT else 1.0 / (1.0 + b_e)
    return 2.0 * b_s if BETA == "double_sigmoid" else b_s


@triton.jit
def gate_slope(p_A_log, i_h, EXACT: tl.constexpr, HAS_A_LOG: tl.constexpr):
    """a = e^A_log of head i_h, or 1."""
    return exponential(tl.load(p_A_log + i_h).to(tl.float32), EXACT, False) if HAS_A_LOG else 1.0


@triton.jit
def exact_gate_slope(p_A_log, i_h, HAS_A_LOG: tl.constexpr):
    """a = e^A_log of head i_h, or 1, and what rounding took from it. e^(a x) has x times the error of a, the same for all tokens."""
    a, a_lost = 1.0, 0.0
    if HAS_A_LOG:
        x = tl.maximum(tl.load(p_A_log + i_h).to(tl.float32), -100.0, tl.PropagateNan.ALL).to(tl.float64)
        n = tl.floor(x * LOG2E + 0.5)
        r = x - n * LN2
        y = r * 0.0 + 1.0
        for i in tl.static_range(12):  # the series of e^r, |r| < 0.35, to 1e-15
            y = y * r * (1.0 / (12.0 - i)) + 1.0
        power = ((tl.minimum(tl.maximum(n, -126.0), 127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
        y = tl.where(n < -126.0, 0.0, y * power.to(tl.float64))
        a = y.to(tl.float32)
        a_lost = (y - a.to(tl.float64)).to(tl.float32)
    return a, a_lost


@triton.jit
def inverse_norm(b_sum, EXACT: tl.constexpr = False):
    """1 / sqrt(sum of squares + 1e-6). EXACT: root and quotient are rounded, where one instruction is off to one side."""
    if EXACT:
        return tl.div_rn(1.0, tl.sqrt_rn(b_sum + L2_EPSILON))
    return tl.rsqrt(b_sum + L2_EPSILON)


@triton.jit
def gate_backward(b_x, b_lost, b_d, a, a_lost, lower_bound, GATE: tl.constexpr, EXACT: tl.constexpr, PTX: tl.constexpr):
    """From d the gradient of the log-decay: that of the gate's input x = g + bias, and the terms of that of A_log, with a = e^A_log.

    softplus: -a sigmoid(x) d,  -a softplus(x) d        bounded, s = sigmoid(a x): a z,  a x z  with  z = lower_bound s (1 - s) d

    EXACT: to a rounding or two; b_lost is what rounding took from x, a_lost from a. Where a x is -10, its exponential is off by ten times
    as much. And a few gates may hold all of d_A_log: there roundings one after the other show.
    """
    if GATE == "log_decay":
        return b_d, b_d
    if GATE == "softplus":
        if EXACT:
            return exact_softplus_backward(b_x, b_lost, b_d, a, a_lost)
        b_e = exponential(-tl.abs(b_x), False, PTX)
        b_s = tl.where(b_x >= 0, 1.0, b_e) * reciprocal(1.0 + b_e, PTX)
        b_softplus = tl.maximum(b_x, 0.0) + log_one_plus(b_e, PTX)
        return -a * b_s * b_d, -a * b_softplus * b_d
    if EXACT:
        return exact_bounded_backward(b_x, b_lost, b_d, a, a_lost, lower_bound)
    b_ax = a * b_x
    b_h = exponential(-0.5 * tl.abs(b_ax), False, PTX)  # twice a factor, since e = h^2 alone may be too small for a float32
    b_r = reciprocal(1.0 + b_h * b_h, PTX)
    b_z = (b_h * b_r) * (b_h * (b_r * (lower_bound * b_d)))
    return a * b_z, b_ax * b_z


@triton.jit
def whole_reciprocal(b_x, b_lost):
    """1 / (x + lost), rounded, and what that took."""
    b_r = tl.div_rn(1.0, b_x)
    return b_r, b_r * (tl.fma(b_x, -b_r, 1.0) - b_lost * b_r)


@triton.jit
def exact_softplus_backward(b_x, b_lost, b_d, a, a_lost):
    """`gate_backward` of a softplus gate. Every step keeps what rounding takes from it."""
    b_e, b_rest = whole_exponential(-tl.abs(b_x))
    b_e_lost = b_e * (b_rest - tl.where(b_x >= 0, b_lost, -b_lost))
    b_sum = 1.0 + b_e
    b_r, b_r_lost = whole_reciprocal(b_sum, (b_e - (b_sum - 1.0)) + b_e_lost)
    b_s, b_s_lost = product_whole(tl.where(b_x >= 0, 1.0, b_e), tl.where(b_x >= 0, 0.0, b_e_lost), b_r, b_r_lost)
    b_w, b_w_lost = product_whole(b_d, 0.0, -a, -a_lost)
    b_softplus = tl.maximum(b_x, 0.0) + (exact_log_one_plus(b_e) + (tl.where(b_x >= 0, b_lost, 0.0) + b_e_lost * b_r))
    return tl.fma(b_s, b_w, b_s * b_w_lost + b_s_lost * b_w), tl.fma(b_softplus, b_w, b_softplus * b_w_lost)


@triton.jit
def exact_bounded_backward(b_x, b_lost, b_d, a, a_lost, lower_bound):
    """`gate_backward` of a bounded gate, s (1 - s) = p^2 with p = h / (1 + h^2), h = e^(-|a x| / 2). Every step keeps what rounding takes
    from it."""
    b_ax, b_ax_lost = product_whole(b_x, b_lost, a, a_lost)
    b_h, b_rest = whole_exponential(-0.5 * tl.abs(b_ax))
    b_rest -= tl.where(b_ax >= 0, 0.5 * b_ax_lost, -0.5 * b_ax_lost)
    b_sum = tl.fma(b_h, b_h, 1.0)
    b_sum_lost = tl.fma(b_h, b_h, -(b_sum - 1.0)) + 2.0 * b_rest * (b_sum - 1.0)
    b_r, b_r_lost = whole_reciprocal(b_sum, b_sum_lost)
    b_p, b_p_lost = product_whole(b_h, b_h * b_rest, b_r, b_r_lost)
    slope, slope_lost = product_whole(lower_bound, 0.0, a, a_lost)
    b_w, b_w_lost = product_whole(b_d, 0.0, slope, slope_lost)
    b_y, b_y_lost = product_whole(b_p, b_p_lost, b_w, b_w_lost)  # and p again at the end: p^2 alone may be too small for a float32
    b_d_x = tl.fma(b_p, b_y, b_p * b_y_lost + b_p_lost * b_y)
    return b_d_x, tl.fma(b_x, b_d_x, b_lost * b_d_x)


@triton.jit
def bounded_gate_backward(b_x, b_d, a, lower_bound, PTX: tl.constexpr):
    """`gate_backward` of a bounded gate in fewer steps: that of x = g + bias, and the terms of that of A_log."""
    b_h = power_of_2(-tl.abs(b_x * (a * (0.5 * LOG2E))), PTX)
    b_r = reciprocal(1.0 + b_h * b_h, PTX)
    b_d = (b_h * b_r) * (b_h * (b_r * (b_d * (a * lower_bound))))
    return b_d, b_x * b_d


@triton.jit
def tiny_strength(b_beta, DTYPE: tl.constexpr):
    """Where a given beta is too small to divide by what was multiplied by it and rounded to DTYPE."""
    return tl.abs(b_beta) < (0.0625 if DTYPE.is_fp16() else 5.421010862427522e-20)


@triton.jit
def write_strength_backward(b_beta, b_d, BETA: tl.constexpr, DTYPE: tl.constexpr):
    """From d, the gradient of the strength times it. given: d / beta, or d where that is `tiny_strength`, which d is then not times. Else,
    with s = 1 / (1 + e^-beta) or 2 s the strength: (1 - s) d."""
    if BETA == "given":
        return b_d / tl.where(tiny_strength(b_beta, DTYPE), 1.0, b_beta)
    if DTYPE.is_fp32():
        b_e = exponential(-tl.abs(b_beta), True, False)
        b_d = tl.div_rn(tl.where(b_beta >= 0, b_e, 1.0) * b_d, 1.0 + b_e)
    else:
        b_e = tl.exp2(-tl.abs(b_beta) * LOG2E)
        b_d = tl.where(b_beta >= 0, b_e, 1.0) * b_d / (1.0 + b_e)
    return b_d


@triton.jit
def inverse_power_of_2(x, PTX: tl.constexpr):
    """2^-x. PTX: one instruction as well, where a minus before its argument would be another."""
    if PTX:
        asm: tl.constexpr = "{ .reg .f32 y; neg.f32 y, $1; ex2.approx.ftz.f32 $0, y; }"
        return tl.inline_asm_elementwise(asm, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return tl.exp2(-x)


@triton.jit
def gate_share(b_g, b_bias, a, unit, GATE: tl.constexpr, BOUNDED: tl.constexpr, PTX: tl.constexpr, LOWEST: tl.constexpr = FLOOR):
    """The log2-decay in (negative) units of `gate_unit`, which is left to its sums; b_bias as `scaled_bias` makes it.

    log_decay: -g        softplus: max(x, 0) + log2(1 + 2^-|x|)        bounded: 1 / (1 + 2^-a x)        with x = log2(e) (g + bias)
    """
    if GATE == "bounded":
        return reciprocal(1.0 + power_of_2(b_g * (-a * LOG2E) + b_bias, PTX), PTX)
    if GATE == "softplus":
        b_x = b_g * LOG2E + b_bias
        b_y = tl.maximum(b_x, 0.0) + log2_one_plus(inverse_power_of_2(tl.abs(b_x), PTX), False, PTX)
    else:
        b_y = -b_g
    return b_y if BOUNDED else tl.minimum(b_y, LOWEST / unit, tl.PropagateNan.ALL)  # NaN is no gate that forgets


@triton.jit
def gate_unit(a, lower_bound, GATE: tl.constexpr):
    if GATE == "bounded":
        return lower_bound * LOG2E
    return -a if GATE == "softplus" else lower_bound * 0.0 - LOG2E


@triton.jit
def scaled_bias(b_bias, a, GATE: tl.constexpr):
    return b_bias * (-a * LOG2E) if GATE == "bounded" else b_bias * LOG2E
