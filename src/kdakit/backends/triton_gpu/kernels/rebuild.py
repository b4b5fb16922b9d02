"""Backward, first launch: what the forward did not keep of every chunk, its tiles."""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.arguments import arguments
from kdakit.backends.triton_gpu.config import Config, chunk_slots
from kdakit.backends.triton_gpu.device.channel_tiles import (
    from_start,
    identity_matrix,
    load_decay,
    load_span,
    octet_decays,
    side_by_side,
    span_tokens,
    to_end,
)
from kdakit.backends.triton_gpu.device.gate import decay_over, gate_slope, inverse_norm, write_strength
from kdakit.backends.triton_gpu.device.inverse import load_inverse
from kdakit.backends.triton_gpu.device.matrix import product, round_to
from kdakit.backends.triton_gpu.device.program import locate_chunk, row_of_token, row_tokens
from kdakit.backends.triton_gpu.runtime.kernel import kernel
from kdakit.backends.triton_gpu.runtime.launch import Launch
from kdakit.backends.triton_gpu.runtime.layout import Layout
from kdakit.problem import Problem


@triton.jit
def row_norms(p_x, o_t, s_t, eos, K: tl.constexpr, KP: tl.constexpr, ALIGN: tl.constexpr):
    """1 / norm of rows o_t [R] of a token tensor."""
    o_k = tl.arange(0, KP)
    p_x += (o_t.to(tl.int64) * s_t)[:, None] * ALIGN + o_k[None, :]
    b_x = tl.load(p_x, mask=(o_t < eos)[:, None] & (o_k < K)[None, :], other=0.0).to(tl.float32)
    return inverse_norm(tl.sum(b_x * b_x, 1), p_x.dtype.element_ty.is_fp32())


@triton.jit
def token_norms(p_q, p_k, p_norms, o_i, start, eos, s_qt, s_kt, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr,
                GROUP: tl.constexpr, ALIGN: tl.constexpr):  # fmt: skip
    """1 / norms of q and k of tokens o_i into their rows of [2, C]."""
    o_r, m_r = row_of_token(o_i, HALF, GROUP), o_i < C
    tl.store(p_norms + o_r, row_norms(p_q, start + o_i, s_qt, eos, K, KP, ALIGN), mask=m_r)
    tl.store(p_norms + C + o_r, row_norms(p_k, start + o_i, s_kt, eos, K, KP, ALIGN), mask=m_r)


@triton.jit
def unit_span(p_x, p_norm, o_t, o_r, m_r, s_t, o_k, eos, b_I, K: tl.constexpr, KP: tl.constexpr, ALIGN: tl.constexpr, L2NORM: tl.constexpr):
    """Rows o_t, channels o_k of q or k, normalised -> [BK, 32]. Its 1 / norms are in rows o_r of p_norm unless all channels are here: then
    this puts them there."""
    b_x = load_span(p_x, o_t, s_t, o_k, eos, b_I, K, KP, ALIGN)
    if o_k.shape[0] == KP:
        b_r = tl.full([32], 1.0, tl.float32)
        if L2NORM:
            b_r = inverse_norm(tl.sum(b_x * b_x, 0), p_x.dtype.element_ty.is_fp32())
        tl.store(p_norm + o_r, b_r, mask=m_r)
    else:
        b_r = tl.load(p_norm + o_r, mask=m_r, other=0.0)
    return b_x * b_r[None, :]


@triton.jit
def store_span(p_tile, o_r, m_r, o_k, b_x, KP: tl.constexpr):
    """b_x [BK, R] -> rows o_r, channels o_k of a tile [C, KP]."""
    b_x = round_to(tl.trans(b_x), p_tile.dtype.element_ty)
    tl.store(p_tile + o_r[:, None] * KP + o_k[None, :], b_x, mask=m_r[:, None] & (o_k < KP)[None, :])


@triton.jit
def rebuild_span(
    p_q, p_k, p_tile, p_norms, p_first, p_q_lost, b_I, b_from, b_to, scale, o_t, o_r, m_r, o_k, s_qt, s_kt, eos, first,
    K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, ALIGN: tl.constexpr, L2NORM: tl.constexpr, HAS_FIRST: tl.constexpr,
    SOLVE_DTYPE: tl.constexpr,
):  # fmt: skip
    """Stores k_in and q_decayed of 32 tokens and returns k_decayed as SOLVE_DTYPE, [BK, 32]. Of a first chunk also what rounding took,
    and of every chunk what it took from q_decayed, if that is asked for: in bfloat16 the first chunk's is then what was lost of that."""
    DTYPE: tl.constexpr = p_tile.dtype.element_ty
    b_k = unit_span(p_k, p_norms + C, o_t, o_r, m_r, s_kt, o_k, eos, b_I, K, KP, ALIGN, L2NORM)
    b_q = unit_span(p_q, p_norms, o_t, o_r, m_r, s_qt, o_k, eos, b_I, K, KP, ALIGN, L2NORM) * (b_from * scale)
    b_in = b_k * b_from
    store_span(p_tile, o_r, m_r, o_k, b_in, KP)
    store_span(p_tile + C * KP, o_r, m_r, o_k, b_q, KP)
    b_q_lost = b_q - round_to(b_q, DTYPE).to(tl.float32)
    if p_q_lost is not None:
        store_span(p_q_lost, o_r, m_r, o_k, b_q_lost, KP)
        if DTYPE.is_bf16():
            b_q_lost -= round_to(b_q_lost, DTYPE).to(tl.float32)
    if HAS_FIRST:  # noqa: SIM102 - the compiler decides the one, the device the other
        if first:
            store_span(p_first, o_r, m_r, o_k, b_in - round_to(b_in, DTYPE).to(tl.float32), KP)
            store_span(p_first + C * KP, o_r, m_r, o_k, b_q_lost, KP)
    return round_to(b_k * b_to, SOLVE_DTYPE)


@triton.jit
def rebuild_chunk(
    p_q, p_k, p_g, p_beta, p_dt_bias, p_lower, p_tile, p_k_solved, p_decay, p_factors, p_first, p_q_lost, a, scale, lower_bound,
    start, eos, first, s_qt, s_kt, s_gt, s_bt,
    K: tl.constexpr, KP: tl.constexpr, KR: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
    ALIGN: tl.constexpr, GATE: tl.constexpr, BETA: tl.constexpr, L2NORM: tl.constexpr, HAS_DT_BIAS: tl.constexpr,
    HAS_FIRST: tl.constexpr, PRECISION: tl.constexpr, SOLVE_DTYPE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """k_in, q_decayed, k_solved, decay and factors (beta, 1 / |q|, 1 / |k|) of the chunk that begins at token `start`, from its inputs and
    its inverse."""
    DTYPE: tl.constexpr = p_tile.dtype.element_ty
    R: tl.constexpr = C if C > 32 else 32
    EXACT: tl.constexpr = DTYPE.is_fp32()
    EXACT_EACH: tl.constexpr = EXACT or p_q_lost is not None  # then nothing is lost of q, nor of its decays
    o_0 = span_tokens(32)
    o_1 = o_0 + 32
    o_r0, o_r1 = row_of_token(o_0, HALF, GROUP), row_of_token(o_1, HALF, GROUP)
    o_t0, o_t1 = start + o_0, start + o_1
    m_r0, m_r1 = o_0 < C, o_1 < C
    eos = tl.minimum(eos, start + C)
    o_c = tl.arange(0, R)
    o_ct = start + row_tokens(R, HALF, GROUP)
    b_beta = write_strength(tl.load(p_beta + o_ct * s_bt, mask=o_ct < eos, other=0.0).to(tl.float32), BETA)
    tl.store(p_factors + o_c, tl.where(o_ct < eos, b_beta, 0.0), mask=o_c < C)
    o_i = span_tokens(R)
    b_beta = write_strength(tl.load(p_beta + (start + o_i) * s_bt, mask=start + o_i < eos, other=0.0).to(tl.float32), BETA)
    b_beta = tl.where(start + o_i < eos, b_beta, 0.0)
    b_T = load_inverse(p_lower, b_beta, o_i, o_c, C, HALF, GROUP).to(SOLVE_DTYPE)  # [R, R]
    b_I = identity_matrix(32)
    p_norms = p_factors + C
    if BK < KP:
        if L2NORM:
            for i in tl.static_range(R // 32):
                token_norms(p_q, p_k, p_norms, o_0 + 32 * i, start, eos, s_qt, s_kt, K, KP, C, HALF, GROUP, ALIGN)
        else:
            tl.store(p_norms + o_c, tl.full([R], 1.0, tl.float32), mask=o_c < C)
            tl.store(p_norms + C + o_c, tl.full([R], 1.0, tl.float32), mask=o_c < C)
        tl.debug_barrier()  # they are read back
    for i_k in tl.range(0, KR, BK, num_stages=1):
        o_k = i_k + tl.arange(0, BK)
        b_e, b_log = load_decay(p_g, p_dt_bias, a, lower_bound, o_t0, s_gt, o_k, eos, b_I, K, KP, ALIGN, GATE, HAS_DT_BIAS, EXACT_EACH, PTX)
        b_prefix, b_suffix, c, b_decay0 = octet_decays(b_e)
        b_from0, b_to0 = from_start(b_prefix, c), to_end(b_suffix, c)
        if C > 32:
            b_e, b_log1 = load_decay(
                p_g, p_dt_bias, a, lower_bound, o_t1, s_gt, o_k, eos, b_I, K, KP, ALIGN, GATE, HAS_DT_BIAS, EXACT_EACH, PTX
            )
            b_prefix, b_suffix, c, b_decay1 = octet_decays(b_e)
            b_to0 = b_to0 * b_decay1
        b_k_decayed = rebuild_span(
            p_q, p_k, p_tile, p_norms, p_first, p_q_lost, b_I, b_from0, b_to0, scale, o_t0, o_r0, m_r0, o_k, s_qt, s_kt, eos, first,
            K, KP, C, ALIGN, L2NORM, HAS_FIRST, SOLVE_DTYPE,
        )  # fmt: skip
        if C > 32:
            b_k_decayed1 = rebuild_span(
                p_q, p_k, p_tile, p_norms, p_first, p_q_lost, b_I, from_start(b_prefix, c) * b_decay0, to_end(b_suffix, c), scale, o_t1,
                o_r1, m_r1, o_k, s_qt, s_kt, eos, first, K, KP, C, ALIGN, L2NORM, HAS_FIRST, SOLVE_DTYPE,
            )  # fmt: skip
            b_k_decayed = side_by_side(b_k_decayed, b_k_decayed1)
            b_decay0 = b_decay0 * b_decay1
            if EXACT:
                b_log += b_log1
        b_solved = product(b_k_decayed, b_T, PRECISION)  # [BK, R], in the order of `row_tokens`
        store_span(p_k_solved + 2 * C * KP, o_c, o_c < C, o_k, b_solved, KP)
        if EXACT:
            b_decay0 = decay_over(b_log, b_decay0)
        tl.store(p_decay + o_k, tl.sum(b_decay0, 1), mask=o_k < KP)


@kernel
def rebuild_kernel(
    p_q, p_k, p_g, p_beta, p_A_log, p_dt_bias, p_cu_seqlens, p_lower, p_tiles, p_k_solved, p_decay, p_factors, p_first,
    p_q_lost, T, N, NT, H, HV, scale, lower_bound,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_gb, s_gt, s_gh, s_bb, s_bt, s_bh,
    K: tl.constexpr, KP: tl.constexpr, KR: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
    ALIGN: tl.constexpr, VARLEN: tl.constexpr, GATE: tl.constexpr, BETA: tl.constexpr, L2NORM: tl.constexpr, HAS_A_LOG: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr, HAS_FIRST: tl.constexpr, PRECISION: tl.constexpr, SOLVE_DTYPE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The tiles of a chunk (see `prepare_kernel`) from its inputs and its saved inverse. Grid: (slots * HV,), heads fastest."""
    i_p = tl.program_id(0).to(tl.int64)
    i_s, i_h = i_p // HV, i_p % HV
    i_b, i_n, i_c, bos, eos = locate_chunk(p_cu_seqlens, i_s, T, N, NT, C, VARLEN)
    start = bos + i_c * C
    if start >= eos:
        return
    i_hk = i_h // (HV // H)
    if HAS_DT_BIAS:
        p_dt_bias += i_h * K
    if HAS_FIRST:
        p_first += (i_n * HV + i_h) * 2 * C * KP
    if p_q_lost is not None:
        p_q_lost += i_p * C * KP
    rebuild_chunk(
        p_q + (i_b * s_qb + i_hk * s_qh) * ALIGN, p_k + (i_b * s_kb + i_hk * s_kh) * ALIGN, p_g + (i_b * s_gb + i_h * s_gh) * ALIGN,
        p_beta + i_b * s_bb + i_h * s_bh, p_dt_bias, p_lower + i_p * C * C, p_tiles + i_p * 3 * C * KP, p_k_solved + i_p * 3 * C * KP,
        p_decay + i_p * KP, p_factors + i_p * 3 * C, p_first, p_q_lost, gate_slope(p_A_log, i_h, p_q.dtype.element_ty.is_fp32(), HAS_A_LOG),
        scale, lower_bound, start, eos, i_c == 0, s_qt, s_kt, s_gt, s_bt,
        K, KP, KR, BK, C, HALF, GROUP, ALIGN, GATE, BETA, L2NORM, HAS_DT_BIAS, HAS_FIRST, PRECISION, SOLVE_DTYPE, PTX,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def launch(problem: Problem, config: Config, layout: Layout) -> Launch:
    grid = chunk_slots(problem, config.chunk) * problem.HV
    values = arguments(problem, config, layout) | dict(BK=config.slice_k)
    registers = config.rebuild_registers or config.registers
    return Launch(rebuild_kernel, grid, values, num_warps=config.slice_warps, num_stages=1, registers=registers)
