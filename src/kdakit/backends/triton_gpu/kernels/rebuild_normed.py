"""Backward, first launch, for what `prepare_normed` prepares: the tiles of every chunk again, laid out as there."""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.arguments import arguments
from kdakit.backends.triton_gpu.config import Config, chunk_slots
from kdakit.backends.triton_gpu.device.gate import (
    ROW_FLOOR,
    gate_share,
    gate_slope,
    gate_unit,
    inverse_norm,
    power_of_2,
    scaled_bias,
    write_strength,
)
from kdakit.backends.triton_gpu.device.matrix import product, round_to
from kdakit.backends.triton_gpu.device.program import locate_chunk
from kdakit.backends.triton_gpu.device.token_tiles import by_token, channel_index, half_sums, running_sums, to_float32, token_index
from kdakit.backends.triton_gpu.device.versions import either, rows_at
from kdakit.backends.triton_gpu.runtime.kernel import kernel
from kdakit.backends.triton_gpu.runtime.launch import Launch
from kdakit.backends.triton_gpu.runtime.layout import Layout
from kdakit.problem import Problem


@triton.jit
def load_half(p_q, p_k, p_g, length, s_qt, s_kt, s_gt, K: tl.constexpr, J: tl.constexpr, c: tl.constexpr,
               ALIGN: tl.constexpr, GATE: tl.constexpr):  # fmt: skip
    """Of 32 tokens, of which `length` are there, q above k [8 J, 8, c], and g [8 J, 4, c]; where there is none, g is what
    GATE makes no decay of ("log_decay": 0)."""
    o_k = channel_index(J, c)
    o_t = token_index(J, 4)
    none: tl.constexpr = 0.0 if GATE == "log_decay" else float("-inf")
    b_g = tl.load(rows_at(p_g + o_t * s_gt * ALIGN, o_k), mask=(o_t < length) & (o_k < K), other=none)
    o_t = token_index(J, 8)
    m_q = (tl.arange(0, 8) < 4)[None, :, None]
    p_qk = rows_at(either(m_q, p_q + o_t * s_qt * ALIGN, p_k + o_t * s_kt * ALIGN, ALIGN), o_k)
    return tl.load(p_qk, mask=(o_t < length) & (o_k < K), other=0.0), b_g


@triton.jit
def k_part(b_qk):
    """b_qk [8 J, 2, 4, c] -> k [8 J, 4, c]."""
    o_2 = tl.arange(0, 2)[None, :, None, None]
    return tl.sum(tl.where(o_2 == 1, b_qk.to(tl.int32, bitcast=True), 0), 1).to(tl.float32, bitcast=True)


@triton.jit
def store_norms(b_qk, p_norms, C: tl.constexpr):
    """1 / |q| and 1 / |k| of b_qk [8 J, 8, c], q above k: stored at p_norms [2, C], returned as [8 J, 8]."""
    J: tl.constexpr = b_qk.shape[0] // 8
    b_x = b_qk.to(tl.float32)
    b_norm = inverse_norm(tl.sum(tl.reshape(tl.sum(b_x * b_x, 2), [J, 8, 8]), 0))  # [8, 8]
    o_p, o_r = tl.arange(0, 8)[:, None], tl.arange(0, 8)[None, :]
    tl.store(p_norms + o_r // 4 * C + o_p * 4 + o_r % 4, b_norm)
    return tl.reshape(tl.broadcast_to(b_norm[None], [J, 8, 8]), [8 * J, 8])


@triton.jit
def decay_sums(b_g, unit):
    """b_g [8 J, 4, c], shares of the gate -> log2-decay from the half's start to each token, and over the half [8 J, c]."""
    b_s, b_total = running_sums(b_g)
    b_in, b_total = half_sums(b_total)
    return (b_s + b_in[:, None, :]) * unit, b_total * unit


@triton.jit
def half_tiles(
    p_q, p_k, p_g, p_dt_bias, p_tiles, p_norms, p_first, a, scale, unit, length, b_before, first, s_qt, s_kt, s_gt,
    K: tl.constexpr, KP: tl.constexpr, ALIGN: tl.constexpr, GATE: tl.constexpr, BOUNDED: tl.constexpr, HAS_DT_BIAS: tl.constexpr,
    HAS_FIRST: tl.constexpr, SOLVE_DTYPE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Of a half, with the log2-decay before it [8 J, c]: stores k_in and q_decayed; returns k decayed to the half's end [8 J, 4, c], as
    SOLVE_DTYPE, and the log2-decay over it."""
    J: tl.constexpr = 4
    c: tl.constexpr = KP // J
    C: tl.constexpr = 64
    DTYPE: tl.constexpr = p_tiles.dtype.element_ty
    b_qk, b_g = load_half(p_q, p_k, p_g, length, s_qt, s_kt, s_gt, K, J, c, ALIGN, GATE)
    b_norm = store_norms(b_qk, p_norms, C) * tl.where(tl.arange(0, 8) < 4, scale, 1.0)[None, :]
    b_bias = tl.zeros([8 * J, 1, c], tl.float32)
    if HAS_DT_BIAS:
        o_k = tl.arange(0, 8 * J)[:, None] // 8 * c + tl.arange(0, c)[None, :]
        b_bias = scaled_bias(tl.load(p_dt_bias + o_k, mask=o_k < K, other=0.0).to(tl.float32), a, GATE)[:, None, :]
    b_s, b_total = decay_sums(gate_share(b_g.to(tl.float32), b_bias, a, unit, GATE, BOUNDED, PTX, ROW_FLOOR), unit)
    b_qk = tl.reshape(to_float32(b_qk, PTX) * b_norm[:, :, None], [8 * J, 2, 4, c])
    b_k = round_to(k_part(b_qk) * power_of_2(b_total[:, None, :] - b_s, PTX), SOLVE_DTYPE)
    b_rows = tl.reshape(b_qk * power_of_2(b_s + b_before[:, None, :], PTX)[:, None], [8 * J, 8, c])
    o_row = (token_index(J, 8) + tl.where((tl.arange(0, 8) < 4)[None, :, None], C, 0)) * KP + channel_index(J, c)
    b_tile = round_to(b_rows, DTYPE)
    tl.store(rows_at(p_tiles, o_row), b_tile)
    if HAS_FIRST:  # noqa: SIM102 - the compiler decides the one, the device the other
        if first:
            tl.store(rows_at(p_first, o_row), round_to(b_rows - b_tile.to(tl.float32), p_first.dtype.element_ty))
    return b_k, b_total


@kernel
def rebuild_normed_kernel(
    p_q, p_k, p_g, p_beta, p_A_log, p_dt_bias, p_cu_seqlens, p_lower, p_tiles, p_k_solved, p_decay, p_factors, p_first,
    T, N, NT, H, HV, scale, lower_bound,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_gb, s_gt, s_gh, s_bb, s_bt, s_bh,
    K: tl.constexpr, KP: tl.constexpr, ALIGN: tl.constexpr, VARLEN: tl.constexpr, GATE: tl.constexpr, BOUNDED: tl.constexpr,
    BETA: tl.constexpr, HAS_A_LOG: tl.constexpr, HAS_DT_BIAS: tl.constexpr, HAS_FIRST: tl.constexpr, PRECISION: tl.constexpr,
    SOLVE_DTYPE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """What `rebuild_kernel` makes. Grid: (slots * HV,), heads fastest."""
    C: tl.constexpr = 64
    J: tl.constexpr = 4
    c: tl.constexpr = KP // J
    i_p = tl.program_id(0).to(tl.int64)
    i_s, i_h = i_p // HV, i_p % HV
    i_b, i_n, i_c, bos, eos = locate_chunk(p_cu_seqlens, i_s, T, N, NT, C, VARLEN)
    start = bos + i_c * C
    if start >= eos:
        return
    length = tl.minimum(eos - start, C).to(tl.int32)
    i_hk = i_h // (HV // H)
    p_q += (i_b * s_qb + start * s_qt + i_hk * s_qh) * ALIGN
    p_k += (i_b * s_kb + start * s_kt + i_hk * s_kh) * ALIGN
    p_g += (i_b * s_gb + start * s_gt + i_h * s_gh) * ALIGN
    p_beta += i_b * s_bb + start * s_bt + i_h * s_bh
    p_tiles += i_p * 3 * C * KP
    p_factors += i_p * 3 * C
    if HAS_DT_BIAS:
        p_dt_bias += i_h * K
    if HAS_FIRST:
        p_first += (i_n * HV + i_h) * 2 * C * KP
    a = tl.maximum(gate_slope(p_A_log, i_h, False, HAS_A_LOG), 1e-30, tl.PropagateNan.ALL)  # a zero times no g is not no decay
    unit = gate_unit(a, lower_bound, GATE)
    o_i = tl.arange(0, 64)
    b_beta = write_strength(tl.load(p_beta + o_i * s_bt, mask=o_i < length, other=0.0).to(tl.float32), BETA)
    b_beta = tl.where(o_i < length, b_beta, 0.0)
    tl.store(p_factors + o_i, b_beta)
    b_k0, b_total0 = half_tiles(
        p_q, p_k, p_g, p_dt_bias, p_tiles, p_factors + C, p_first, a, scale, unit, length, tl.zeros([8 * J, c], tl.float32), i_c == 0,
        s_qt, s_kt, s_gt, K, KP, ALIGN, GATE, BOUNDED, HAS_DT_BIAS, HAS_FIRST, SOLVE_DTYPE, PTX,
    )  # fmt: skip
    b_k1, b_total1 = half_tiles(
        p_q + 32 * s_qt * ALIGN, p_k + 32 * s_kt * ALIGN, p_g + 32 * s_gt * ALIGN, p_dt_bias, p_tiles + 32 * KP, p_factors + C + 32,
        p_first + 32 * KP, a, scale, unit, length - 32, b_total0, i_c == 0, s_qt, s_kt, s_gt,
        K, KP, ALIGN, GATE, BOUNDED, HAS_DT_BIAS, HAS_FIRST, SOLVE_DTYPE, PTX,
    )  # fmt: skip
    b_k0 = round_to(b_k0.to(tl.float32) * power_of_2(b_total1, PTX)[:, None, :], SOLVE_DTYPE)
    b_k = tl.permute(tl.join(b_k0, b_k1), (0, 3, 1, 2))  # [8 J, 2, 4, c]
    b_N = tl.load(p_lower + i_p * C * C + o_i[:, None] * C + o_i[None, :]).to(tl.float32)
    b_T = (tl.where(o_i[:, None] == o_i[None, :], 1.0, 0.0) - b_beta[:, None] * b_N).to(SOLVE_DTYPE)
    b_solved = product(tl.trans(b_T), by_token(tl.reshape(b_k, [8 * J, 8, c])), PRECISION)  # [64, KP]
    o_k = tl.arange(0, KP)
    p_k_solved += (i_p * 3 + 2) * C * KP
    tl.store(p_k_solved + o_i[:, None] * KP + o_k[None, :], round_to(b_solved, p_k_solved.dtype.element_ty))
    o_m = tl.arange(0, 8 * J)[:, None]
    p_total = p_decay + i_p * KP + o_m // 8 * c + tl.arange(0, c)[None, :]  # [8 J, c]
    tl.store(p_total, power_of_2(b_total0 + b_total1, PTX), mask=o_m % 8 == 0)


@lru_cache(maxsize=1024)
def launch(problem: Problem, config: Config, layout: Layout) -> Launch:
    grid = chunk_slots(problem, config.chunk) * problem.HV
    return Launch(rebuild_normed_kernel, grid, arguments(problem, config, layout), num_warps=config.rebuild_warps, num_stages=1)
