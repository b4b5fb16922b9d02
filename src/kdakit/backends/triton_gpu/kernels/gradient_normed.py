"""Backward, fifth launch, for what `prepare_normed` prepares with a bounded gate: one program per chunk of 64 tokens and value head.

With s the log2-decay from the chunk's start to a token and m a whole number near s in the middle of the token's block of 16, every pair is

    A[i,j] = (x_i 2^(s_i - m_i)) 2^(m_i - m_j) (k_j 2^(m_j - s_j))        x = q or k

Factors are 2^59 at most, whatever the scale of the gradients, and what lies between blocks is a power of 2: rounded factors are moved from
block to block without another rounding. So a gate's gradient is a sum over all later tokens of one number each,

    d_g_m = sum_{i >= m} (q_i . d_q_i + k_i . d_k_i as a row - as a column) + sum_j k_decayed_j . d_k_decayed_j + decay . d_decay

in which the pairs that a gate does not lie between cancel but for float32 sums; what is left is no smaller than e^-5 of what vanishes.
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.arguments import arguments
from kdakit.backends.triton_gpu.config import Config, chunk_slots
from kdakit.backends.triton_gpu.device.channel_tiles import (
    identity_matrix,
    join_octets,
    placed_by_product,
    side_by_side,
    span_tokens,
    split_octets,
    split_sides,
    spread_octets,
    without_first,
)
from kdakit.backends.triton_gpu.device.gate import gate_share, gate_slope, gate_unit, power_of_2, scaled_bias
from kdakit.backends.triton_gpu.device.gradient_halves import (
    half_gates,
    input_without_decay,
    load_d_tile,
    load_half,
    load_rows,
    load_scale,
    other_octet,
    store_rows,
    token_totals,
    widened_d_tile,
)
from kdakit.backends.triton_gpu.device.matrix import product, product_add, round_to
from kdakit.backends.triton_gpu.device.pair_gradients import load_pairs
from kdakit.backends.triton_gpu.device.program import locate_chunk
from kdakit.backends.triton_gpu.device.token_tiles import to_float32
from kdakit.backends.triton_gpu.runtime.kernel import kernel
from kdakit.backends.triton_gpu.runtime.launch import Launch
from kdakit.backends.triton_gpu.runtime.layout import Layout
from kdakit.problem import Problem


@triton.jit
def token_exponents(b_share, unit, b_before):
    """b_share [KP, 32], shares of the gate, b_before [KP, 4] the log2-decay from the chunk's start to the half's -> s - m [KP, 32],
    m [KP, 4], s at the half's end [KP, 4]."""
    x = split_octets(b_share)
    b_run = x[0]
    y = (b_run,)
    for i in tl.static_range(1, 8):
        b_run = b_run + x[i]
        y = y + (b_run,)  # noqa: RUF005 - no unpacking in kernels
    o_t = tl.arange(0, 4)[None, :]
    b_other = other_octet(b_run, 1)
    b_two = b_run + b_other
    b_far = other_octet(b_two, 2)
    b_in = tl.where(o_t % 2 == 1, b_other, 0.0) + tl.where(o_t >= 2, b_far, 0.0)
    b_m = tl.floor((b_in + tl.where(o_t % 2 == 1, 0.0, b_run)) * unit + b_before + 0.5)
    b_s = join_octets(y) * unit + spread_octets(b_in * unit + (b_before - b_m))
    return b_s, b_m, (b_two + b_far) * unit + b_before


@triton.jit
def later_sums(b_u, b_all):
    """b_u [KP, 32] -> b_all [KP, 4] and the sums over each token and those after it, [KP, 32]; the sums over all, [KP, 4]."""
    x = split_octets(b_u)
    b_run = x[7]
    y = (b_run,)
    for i in tl.static_range(7):
        b_run = b_run + x[6 - i]
        y = (b_run,) + y  # noqa: RUF005
    o_t = tl.arange(0, 4)[None, :]
    b_other = other_octet(b_run, 1)
    b_two = b_run + b_other
    b_far = other_octet(b_two, 2)
    b_after = tl.where(o_t % 2 == 0, b_other, 0.0) + tl.where(o_t < 2, b_far, 0.0)
    return join_octets(y) + spread_octets(b_after + b_all), b_two + b_far


@triton.jit
def times_powers_of_2(b_x, b_p, PTX: tl.constexpr):
    """bfloat16 b_x times the powers of 2 b_p."""
    if PTX:
        asm: tl.constexpr = "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }"
        return tl.inline_asm_elementwise(asm, "=r,r,r", [b_x, round_to(b_p, tl.bfloat16)], dtype=tl.bfloat16, is_pure=True, pack=2)
    return round_to(b_x.to(tl.float32) * b_p, tl.bfloat16)


@triton.jit
def chosen_pairs(b_dA, WHICH: tl.constexpr):
    """Pairs [64, 32] of a half's rows (q, k), the others 0. 'same': with columns of their block of 16; 'other': rows of the second block
    with columns of the first; 'first', 'second': rows of that block."""
    m_i, m_j = (span_tokens(64) % 32 >= 16)[:, None], (span_tokens(32) >= 16)[None, :]
    if WHICH == "same":
        m_pairs = m_i == m_j
    elif WHICH == "other":
        m_pairs = m_i & (m_j == 0)
    else:
        m_pairs = m_i == (WHICH == "second")
    return tl.where(m_pairs, b_dA, tl.zeros_like(b_dA))


@triton.jit
def half_decay(b_g, p_dt_bias, b_before, b_I, a, unit, K: tl.constexpr, GATE: tl.constexpr, HAS_DT_BIAS: tl.constexpr, PTX: tl.constexpr):
    """b_g [32, KP] -> [KP, 32] and the `token_exponents` of its decays."""
    DTYPE: tl.constexpr = b_g.dtype
    o_k = tl.arange(0, b_g.shape[1])
    b_g = placed_by_product(tl.trans(b_g), b_I)
    b_bias = tl.zeros([b_g.shape[0], 1], tl.float32)
    if HAS_DT_BIAS:
        b_bias = scaled_bias(tl.load(p_dt_bias + o_k, mask=o_k < K, other=0.0).to(tl.float32), a, GATE)[:, None]
    b_s, b_m, b_end = token_exponents(gate_share(b_g, b_bias, a, unit, GATE, True, PTX), unit, b_before)
    return round_to(b_g, DTYPE), b_s, b_m, b_end


@triton.jit
def pair_gradients(b_left, b_right, b_m, b_dq, b_dk, b_dA, p_scales, b_far, b_top, b_R, SECOND: tl.constexpr, PTX: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    """The gradients of a half's rows [KP, 64] and columns [KP, 32], referred to m. b_far: the first half's columns, referred to this one's
    first block; b_R: what the second half's rows gave to these columns. Returns also what these rows give to the first half's
    columns, referred to this half's first block."""
    b_k = power_of_2(-tl.abs(b_m - other_octet(b_m, 2)), PTX)  # between the two blocks
    b_one = tl.full(b_k.shape, 1.0, tl.float32)
    b_late = spread_octets(tl.where(tl.arange(0, 4)[None, :] >= 2, b_k, b_one))
    b_k = spread_octets(b_k)
    b_late = times_powers_of_2(b_left, side_by_side(b_late, b_late), PTX)  # all rows referred to the first block
    KP: tl.constexpr = b_m.shape[0]
    b_F = power_of_2(b_m, PTX)
    b_Fq, b_Fk = b_F * load_scale(p_scales, 0, KP), b_F * load_scale(p_scales, 1, KP)
    b_L = side_by_side(widened_d_tile(b_dq, PTX) * spread_octets(b_Fq), widened_d_tile(b_dk, PTX) * spread_octets(b_Fk))
    b_same, b_other = chosen_pairs(b_dA, "same"), chosen_pairs(b_dA, "other")
    b_L = product_add(b_right, tl.trans(b_same), b_L, PRECISION)
    b_L = product_add(times_powers_of_2(b_right, b_k, PTX), tl.trans(b_other), b_L, PRECISION)
    b_R = product_add(b_left, b_same, b_R, PRECISION)
    b_R = product_add(b_late, b_other, b_R, PRECISION)
    b_X = b_R
    if SECOND:
        b_L = product_add(b_far, tl.trans(chosen_pairs(b_top, "first")), b_L, PRECISION)
        b_L = product_add(times_powers_of_2(b_far, b_k, PTX), tl.trans(chosen_pairs(b_top, "second")), b_L, PRECISION)
        b_X = product(b_late, b_top, PRECISION)
    return b_L, b_R, b_X


@triton.jit
def half_gradient(
    p_d_q, p_d_k, p_scales, FIRST: tl.constexpr, x, b_s, b_m, b_end, b_I, b_far, b_top, b_R, SECOND: tl.constexpr, HV, length,
    K: tl.constexpr, KP: tl.constexpr, PTX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores d_q and d_k of a half, x as `load_half` has it; returns what each token has to do with the gates up to it [KP, 32], the sum
    over tokens of k_decayed d_k_decayed [KP, 4], and what `pair_gradients` gives to the other half. b_end [KP, 4]: the log2-decay over
    the chunk."""
    _g, b_qk, b_r_q, b_r_k, b_dq, b_dk, b_dc, b_dA = x
    b_q, b_k = split_sides(placed_by_product(tl.trans(b_qk), b_I))
    b_row, b_col = power_of_2(b_s, PTX), power_of_2(-b_s, PTX)
    b_left = round_to(side_by_side(b_q * b_row, b_k * b_row), tl.bfloat16)
    b_right = round_to(b_k * b_col, tl.bfloat16)
    b_L, b_R, b_X = pair_gradients(b_left, b_right, b_m, b_dq, b_dk, b_dA, p_scales, b_far, b_top, b_R, SECOND, PTX, PRECISION)
    b_Lq, b_Lk = split_sides(b_L)
    b_Lf, b_Lb = split_sides(b_left)
    b_right = to_float32(b_right, PTX)
    b_C = widened_d_tile(b_dc, PTX) * spread_octets(power_of_2(b_end - b_m, PTX) * load_scale(p_scales, 2, KP))
    b_state = token_totals(b_right * b_C)
    b_C += b_R
    b_uq, b_uk, b_uc = to_float32(b_Lf, PTX) * b_Lq, to_float32(b_Lb, PTX) * b_Lk, b_right * b_C
    b_along_q, b_along_k = tl.sum(b_uq, 0, keep_dims=True), tl.sum(b_uk + b_uc, 0, keep_dims=True)  # q . d_q and k . d_k
    b_dq = b_row * b_Lq - b_q * (b_along_q * b_r_q * b_r_q)
    b_dk = b_row * b_Lk + b_col * b_C - b_k * (b_along_k * b_r_k * b_r_k)
    store_rows(p_d_q, p_d_k, FIRST, HV, length, b_dq, b_dk, K, KP)
    return b_uq + b_uk - b_uc, b_state, b_X


@triton.jit
def chunk_gradient(
    p_q, p_k, p_g, p_dt_bias, p_norms, p_pairs, p_d_tiles, p_scales, first, p_d_decay, p_d_q, p_d_k, p_d_g, a, lower_bound, length, HV,
    s_qt, s_kt, s_gt, K: tl.constexpr, KP: tl.constexpr, ALIGN: tl.constexpr, GATE: tl.constexpr, HAS_DT_BIAS: tl.constexpr,
    HAS_INITIAL: tl.constexpr, TURNED: tl.constexpr, PTX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The second half, which needs the first's columns, then the first."""
    unit = gate_unit(a, lower_bound, GATE)
    b_I, b_I2, o_k = identity_matrix(32), identity_matrix(64), tl.arange(0, KP)
    b_g = load_rows(p_g, p_g, 0, s_gt, s_gt, length, input_without_decay(GATE), 32, K, KP, ALIGN)
    b_k = load_rows(p_k, p_k, 0, s_kt, s_kt, length, 0.0, 32, K, KP, ALIGN)
    b_dc = load_d_tile(p_d_tiles, 2, 0, KP)
    x = load_half(p_q, p_k, p_g, p_norms, p_pairs, p_d_tiles, 32, length, s_qt, s_kt, s_gt, K, KP, ALIGN, GATE, TURNED)
    b_top, b_d_decay = load_pairs(p_pairs, 32, 0, 64, TURNED), tl.load(p_d_decay + o_k)[:, None]

    b_0 = tl.zeros([KP, 4], tl.float32)
    _g, b_s, b_m0, b_half = half_decay(b_g, p_dt_bias, b_0, b_I, a, unit, K, GATE, HAS_DT_BIAS, PTX)
    b_right = round_to(placed_by_product(tl.trans(b_k), b_I) * power_of_2(-b_s, PTX), tl.bfloat16)
    b_g, b_s, b_m, b_end = half_decay(x[0], p_dt_bias, b_half, b_I, a, unit, K, GATE, HAS_DT_BIAS, PTX)
    b_C = widened_d_tile(b_dc, PTX) * spread_octets(power_of_2(b_end - b_m0, PTX) * load_scale(p_scales, 2, KP))
    b_all = power_of_2(b_end, PTX) * b_d_decay + token_totals(to_float32(b_right, PTX) * b_C)  # [KP, 4]
    b_move = spread_octets(
        power_of_2(tl.maximum(b_m, other_octet(b_m, 2)) - b_m0, PTX)
    )  # from the first half's blocks to the second's first
    b_far = times_powers_of_2(b_right, b_move, PTX)
    b_R = tl.zeros([KP, 32], tl.float32)
    b_u, b_state, b_X = half_gradient(
        p_d_q, p_d_k, p_scales, 32, x, b_s, b_m, b_end, b_I2, b_far, b_top, b_R, True, HV, length, K, KP, PTX, PRECISION
    )
    b_all += b_state
    x = load_half(p_q, p_k, p_g, p_norms, p_pairs, p_d_tiles, 0, length, s_qt, s_kt, s_gt, K, KP, ALIGN, GATE, TURNED)
    b_d, b_u1 = later_sums(b_u, b_all)
    b_bias1, b_A1 = half_gates(p_d_g, p_dt_bias, 32, b_g, b_d, a, lower_bound, HV, length, K, KP, GATE, HAS_DT_BIAS, PTX)

    b_g, b_s, b_m, b_half = half_decay(x[0], p_dt_bias, b_0, b_I, a, unit, K, GATE, HAS_DT_BIAS, PTX)
    b_u, _state, _X = half_gradient(
        p_d_q, p_d_k, p_scales, 0, x, b_s, b_m, b_end, b_I2, b_far, b_top, b_X * b_move, False, HV, length, K, KP, PTX, PRECISION
    )
    b_d, _u = later_sums(b_u, b_all + b_u1)
    if not HAS_INITIAL:
        b_d = without_first(b_d, span_tokens(32), first)
    b_bias, b_A = half_gates(p_d_g, p_dt_bias, 0, b_g, b_d, a, lower_bound, HV, length, K, KP, GATE, HAS_DT_BIAS, PTX)
    return b_bias + b_bias1, b_A + b_A1


@kernel
def gradient_normed_kernel(
    p_q, p_k, p_g, p_A_log, p_dt_bias, p_cu_seqlens, p_factors, p_pairs, p_d_tiles, p_scales, p_d_decay, p_d_q, p_d_k, p_d_g, p_d_A_log,
    p_d_dt_bias,
    T, N, NT, H, HV, lower_bound,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_gb, s_gt, s_gh,
    K: tl.constexpr, KP: tl.constexpr, ALIGN: tl.constexpr, VARLEN: tl.constexpr, GATE: tl.constexpr, HAS_A_LOG: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr, TURNED: tl.constexpr, PRECISION: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """What `gradient.gradient_kernel` makes. Tiles are [channels, tokens of a half]. Grid: (slots * HV,), heads fastest."""
    i_p = tl.program_id(0).to(tl.int64)
    i_s, i_h = i_p // HV, i_p % HV
    i_b, _n, i_c, bos, eos = locate_chunk(p_cu_seqlens, i_s, T, N, NT, 64, VARLEN)
    start = bos + i_c * 64
    o_k = tl.arange(0, KP)
    if start >= eos:
        if HAS_A_LOG:
            tl.store(p_d_A_log + i_p * KP + o_k, tl.zeros([KP], tl.float32))
        if HAS_DT_BIAS:
            tl.store(p_d_dt_bias + i_p * KP + o_k, tl.zeros([KP], tl.float32))
        return
    length = tl.minimum(eos - start, 64).to(tl.int32)
    i_hk = i_h // (HV // H)
    i_row = ((i_b * T + start) * HV + i_h) * K
    p_q += (i_b * s_qb + start * s_qt + i_hk * s_qh) * ALIGN
    p_k += (i_b * s_kb + start * s_kt + i_hk * s_kh) * ALIGN
    p_g += (i_b * s_gb + start * s_gt + i_h * s_gh) * ALIGN
    if HAS_DT_BIAS:
        p_dt_bias += i_h * K
    a = tl.maximum(gate_slope(p_A_log, i_h, False, HAS_A_LOG), 1e-30, tl.PropagateNan.ALL)  # a zero times no g is not no decay
    b_bias, b_A = chunk_gradient(
        p_q, p_k, p_g, p_dt_bias, p_factors + i_p * 192 + 64, p_pairs + i_p * 8192, p_d_tiles + i_p * 192 * KP, p_scales + i_p * 3 * KP,
        i_c == 0, p_d_decay + i_p * KP, p_d_q + i_row, p_d_k + i_row, p_d_g + i_row, a, lower_bound, length, HV, s_qt, s_kt, s_gt,
        K, KP, ALIGN, GATE, HAS_DT_BIAS, HAS_INITIAL, TURNED, PTX, PRECISION,
    )  # fmt: skip
    if HAS_DT_BIAS:
        tl.store(p_d_dt_bias + i_p * KP + o_k, b_bias)
    if HAS_A_LOG:
        tl.store(p_d_A_log + i_p * KP + o_k, b_A)


@lru_cache(maxsize=1024)
def launch(problem: Problem, config: Config, layout: Layout) -> Launch:
    grid = chunk_slots(problem, config.chunk) * problem.HV
    options = dict(num_warps=config.gradient_warps, num_stages=1, registers=config.gradient_registers)
    return Launch(gradient_normed_kernel, grid, arguments(problem, config, layout), **options)
