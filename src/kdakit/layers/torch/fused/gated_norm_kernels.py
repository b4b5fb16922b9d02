"""RMSNorm of rows [.., HV, V], times the sigmoid of a gate where one is given, forward and backward.

n = x / sqrt(mean(x^2) + eps)        s = sigmoid(gate + bias)        y = n weight s
dgate = dy n weight s (1 - s)        dn = dy weight s        dx = (dn - n mean(dn n)) / sqrt(mean(x^2) + eps)

With a residual, x is the sum of the two, which is also handed on. What comes back through it is added to dx.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.device.matrix import round_to
from kdakit.layers.torch.fused.rows import sigmoid


@triton.jit(do_not_specialize=["T", "HV", "eps"])
def norm_kernel(
    p_x, p_residual, p_gate, p_weight, p_bias, p_sum, p_y, T, HV, eps,
    V: tl.constexpr, VP: tl.constexpr, ROWS: tl.constexpr, HAS_GATE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """ROWS of the T * HV rows of V numbers. Grid: (cdiv(T * HV, ROWS),)."""
    o_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_v = tl.arange(0, VP)
    m_v = o_v < V
    m = (o_r < tl.cast(T, tl.int64) * HV)[:, None] & m_v[None, :]
    o = o_r[:, None] * V + o_v[None, :]
    b_x = tl.load(p_x + o, mask=m, other=0.0).to(tl.float32)  # [ROWS, VP]
    if HAS_RESIDUAL:
        b_sum = round_to(b_x + tl.load(p_residual + o, mask=m, other=0.0).to(tl.float32), p_sum.dtype.element_ty)
        tl.store(p_sum + o, b_sum, mask=m)
        b_x = b_sum.to(tl.float32)
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, 1) / V + eps)[:, None] * tl.load(p_weight + o_v, mask=m_v, other=0.0).to(tl.float32)[None, :]
    if HAS_GATE:
        b_gate = tl.load(p_gate + o, mask=m, other=0.0).to(tl.float32)
        if HAS_BIAS:
            b_gate += tl.load(p_bias + (o_r % HV)[:, None] * V + o_v[None, :], mask=m, other=0.0).to(tl.float32)
        b_y *= sigmoid(b_gate, PTX)
    tl.store(p_y + o, round_to(b_y, p_y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["T", "HV", "eps", "STRIP"])
def norm_backward_kernel(
    p_x, p_gate, p_weight, p_bias, p_dy, p_dsum, p_dx, p_dgate, p_shares, T, HV, eps, STRIP,
    V: tl.constexpr, VP: tl.constexpr, ROWS: tl.constexpr, HAS_GATE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SUM: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """STRIP tokens of one head, ROWS at a time. Its shares of the gradients of weight and bias go to shares [2, strips, HV, V].

    Grid: (HV, strips).
    """
    i_h, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o_v = tl.arange(0, VP)
    m_v = o_v < V
    b_weight = tl.load(p_weight + o_v, mask=m_v, other=0.0).to(tl.float32)[None, :]
    b_bias = tl.zeros([1, VP], tl.float32)
    if HAS_BIAS:
        b_bias = tl.load(p_bias + i_h * V + o_v, mask=m_v, other=0.0).to(tl.float32)[None, :]
    b_dweight = tl.zeros([ROWS, VP], tl.float32)
    b_dbias = tl.zeros([ROWS, VP], tl.float32)
    o_t = i_s * STRIP + tl.arange(0, ROWS)
    for _ in range(0, STRIP, ROWS):
        m = (o_t < T)[:, None] & m_v[None, :]
        o = (o_t[:, None] * HV + i_h) * V + o_v[None, :]
        b_x = tl.load(p_x + o, mask=m, other=0.0).to(tl.float32)  # [ROWS, VP]
        b_dy = tl.load(p_dy + o, mask=m, other=0.0).to(tl.float32)
        b_inverse = tl.rsqrt(tl.sum(b_x * b_x, 1) / V + eps)[:, None]
        b_n = b_x * b_inverse
        if HAS_GATE:
            b_s = sigmoid(tl.load(p_gate + o, mask=m, other=0.0).to(tl.float32) + b_bias, PTX)
            b_dgate = b_dy * b_n * b_weight * b_s * (1.0 - b_s)
            tl.store(p_dgate + o, round_to(b_dgate, p_dgate.dtype.element_ty), mask=m)
            if HAS_BIAS:
                b_dbias += b_dgate
            b_dy *= b_s
        b_dweight += b_dy * b_n
        b_dn = b_dy * b_weight
        b_dx = (b_dn - b_n * (tl.sum(b_dn * b_n, 1) / V)[:, None]) * b_inverse
        if HAS_SUM:
            b_dx += tl.load(p_dsum + o, mask=m, other=0.0).to(tl.float32)
        tl.store(p_dx + o, round_to(b_dx, p_dx.dtype.element_ty), mask=m)
        o_t += ROWS
    p_shares += (i_s * HV + i_h) * V + o_v
    tl.store(p_shares, tl.sum(b_dweight, 0), mask=m_v)
    if HAS_BIAS:
        tl.store(p_shares + tl.num_programs(1) * HV * V, tl.sum(b_dbias, 0), mask=m_v)


@triton.jit(do_not_specialize=["S", "HV", "V"])
def norm_sums_kernel(p_shares, p_d_weight, p_d_bias, S, HV, V, COLUMNS: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """d_weight [V], over strips and heads, and d_bias [HV, V], over strips, from shares [2, S, HV, V]; COLUMNS of one of the two.

    Grid: (cdiv(V, COLUMNS) + cdiv(HV * V, COLUMNS),), without a bias the first alone.
    """
    i_c, rows, width, p_out = tl.program_id(0), S * HV, V, p_d_weight
    if HAS_BIAS:
        second = i_c >= tl.cdiv(V, COLUMNS)
        i_c -= tl.where(second, tl.cdiv(V, COLUMNS), 0)
        rows, width = tl.where(second, S, rows), tl.where(second, HV * V, width)
        p_out = tl.where(second, p_d_bias, p_out)
        p_shares += tl.where(second, tl.cast(S, tl.int64) * HV * V, 0)
    o_c, o_r = i_c * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, ROWS)
    b_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, rows, ROWS):
        m = (start + o_r < rows)[:, None] & (o_c < width)[None, :]
        b_sum += tl.load(p_shares + (start + o_r).to(tl.int64)[:, None] * width + o_c[None, :], mask=m, other=0.0)
    tl.store(p_out + o_c, round_to(tl.sum(b_sum, 0), p_out.dtype.element_ty), mask=o_c < width)
