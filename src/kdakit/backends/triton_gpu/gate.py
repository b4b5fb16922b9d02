"""Stage gate, as device functions: log-decay, l2 norm and write strength. Decays are in base 2, as the hardware's exponential is."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
L2_EPSILON = tl.constexpr(1e-6)


@triton.jit
def log2_one_plus(e, EXACT: tl.constexpr, PTX: tl.constexpr):
    """log2(1 + e), 0 <= e <= 1. EXACT keeps the relative accuracy of small e, which 1 + e forgets. PTX: one instruction, to 2^-22."""
    if PTX and not EXACT:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + e], dtype=tl.float32, is_pure=True, pack=1)
    y = tl.log2(1.0 + e)
    if EXACT:
        series = e * (1.0 - e * (0.5 - e * (0.33333333 - e * (0.25 - e * (0.2 - e * 0.16666667)))))
        y = tl.where(e < 0.03, series * LOG2E, y)
    return y


@triton.jit
def log2_decay(b_g, b_bias, a, lower_bound, GATE: tl.constexpr, EXACT: tl.constexpr, PTX: tl.constexpr):
    """The gate's log-decay times log2(e).

    log_decay: g        softplus: -a softplus(g + bias)        bounded: lower_bound sigmoid(a (g + bias))
    """
    if GATE == "log_decay":
        return b_g * LOG2E
    b_x = (b_g + b_bias) * LOG2E
    if GATE == "softplus":
        return -a * (tl.maximum(b_x, 0.0) + log2_one_plus(tl.exp2(-tl.abs(b_x)), EXACT, PTX))
    return (lower_bound * LOG2E) / (1.0 + tl.exp2(-a * b_x))


@triton.jit
def write_strength(b_beta, BETA: tl.constexpr):
    """given: beta        sigmoid: 1 / (1 + e^-beta)        double_sigmoid: twice that."""
    if BETA == "given":
        return b_beta
    b_s = 1.0 / (1.0 + tl.exp2(-b_beta * LOG2E))
    return 2.0 * b_s if BETA == "double_sigmoid" else b_s


@triton.jit
def inverse_norm(b_sum):
    """1 / sqrt(sum of squares + 1e-6)."""
    return tl.rsqrt(b_sum + L2_EPSILON)
