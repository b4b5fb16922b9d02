"""The pass of `reverse` for more than 128 key channels: the gradient of the state in two halves of channels, as in `scan_wide`."""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.arguments import arguments
from kdakit.backends.triton_gpu.config import Config, exact_q
from kdakit.backends.triton_gpu.device.gate import tiny_strength
from kdakit.backends.triton_gpu.device.halves import keep_part, load_part, store_part
from kdakit.backends.triton_gpu.device.matrix import exponents, product, product_add, round_to, rounded_off, scaled_by
from kdakit.backends.triton_gpu.device.program import row_tokens, sequence_of, zero_here
from kdakit.backends.triton_gpu.runtime.kernel import kernel
from kdakit.backends.triton_gpu.runtime.launch import Launch
from kdakit.backends.triton_gpu.runtime.layout import Layout
from kdakit.problem import Problem


@triton.jit
def begin_next(p_q, p_q_lost, p_decay, b_d_o, b_dS, i_c, o_c, o_k, KP: tl.constexpr, PRECISION: tl.constexpr):
    """Diag(decay) dS' + q_decayed^T d_o, with d_o^T [BV, C]."""
    o_q = o_c[:, None] * KP + o_k[None, :]
    b_dS = product_add(b_d_o, tl.load(p_q + o_q), b_dS * tl.load(p_decay + o_k)[None, :], PRECISION)
    if p_q_lost is not None:
        # The first chunk's is left to `restore_kernel` in float16, in which strong decays leave nothing of it.
        b_lost = tl.load(p_q_lost + o_q, mask=i_c > 0, other=0.0) if b_d_o.dtype.is_fp16() else tl.load(p_q_lost + o_q)
        b_dS = product_add(b_d_o, b_lost, b_dS, PRECISION)
    return b_dS


@kernel
def wide_reverse_kernel(
    p_d_o, p_tiles, p_k_solved, p_solved, p_q_lost, p_decay, p_factors, p_cu_seqlens, p_d_final, p_d_states, p_d_states_lost, p_d_v,
    p_after_first, p_y_lost, p_alone, p_d_initial, T, NT, HV,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, KR: tl.constexpr, VP: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr,
    GROUP: tl.constexpr, BV: tl.constexpr, VARLEN: tl.constexpr, V_FIRST: tl.constexpr, HAS_FINAL: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_LOST: tl.constexpr, ENDS: tl.constexpr, BETA: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, PTX: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """As `reverse_kernel`, of which this has the grid, with dS0 and dS1 the halves of dS^T.

    PART "all": every chunk. Where dS' of the first chunks is wanted, stores of it would cost every chunk registers, and so there are two
    launches: "far", all chunks but the first ENDS, which leaves dS' for "near", those.
    """
    DTYPE: tl.constexpr = p_tiles.dtype.element_ty
    NV: tl.constexpr = (V + BV - 1) // BV
    KH: tl.constexpr = KP // 2
    i_p = tl.program_id(0).to(tl.int64)
    i_v, i_nh = (i_p % NV).to(tl.int32), i_p // NV
    i_n, i_h = i_nh // HV, i_nh % HV
    i_b, bos, length, i_slot = sequence_of(p_cu_seqlens, i_n, T, NT, C, VARLEN)
    o_c, o_k0, o_k1 = tl.arange(0, C), tl.arange(0, KH), KH + tl.arange(0, KR - KH)
    o_v, o_t = i_v * BV + tl.arange(0, BV), row_tokens(C, HALF, GROUP)
    m_v = (o_v < V)[None, :]
    b_dS0, b_dS1 = tl.zeros([BV, KH], tl.float32), tl.zeros([BV, KR - KH], tl.float32)
    m_final, has_last = o_v < V, True
    if PART == "near":
        has_last = length <= ENDS * C
        m_final &= has_last
    if HAS_FINAL:
        b_dS0 = load_part(p_d_final, i_nh, o_v, o_k0, m_final, K, V, V_FIRST)
        b_dS1 = load_part(p_d_final, i_nh, o_v, o_k1, m_final, K, V, V_FIRST)
    chunks = tl.cdiv(length, C).to(tl.int32)
    steps = chunks
    if PART == "far":
        steps = tl.maximum(chunks - ENDS, 0)
    if PART == "near":
        m_left, i_left = (o_v < V) & (chunks > ENDS), i_nh * ENDS + ENDS - 1
        b_dS0 += load_part(p_after_first, i_left, o_v, o_k0, m_left, K, V, V_FIRST)
        b_dS1 += load_part(p_after_first, i_left, o_v, o_k1, m_left, K, V, V_FIRST)
        chunks = tl.minimum(chunks, ENDS)
        steps = chunks
    o_row = ((i_b * T + bos + o_t) * HV + i_h)[:, None] * V  # [C, 1]
    i_slot = i_slot * HV + i_h
    for i in tl.range(0, steps, num_stages=STAGES):
        i_c = chunks - 1 - i
        m_cv = (o_t < length - i_c * C)[:, None] & m_v
        o_cv = o_row + tl.cast(C * i_c, tl.int64) * HV * V
        i_at = i_slot + tl.cast(i_c, tl.int64) * HV
        p_tile, p_k = p_tiles + i_at * 3 * C * KP, p_k_solved + (i_at * 3 + 2) * C * KP
        p_lost = None if p_q_lost is None else p_q_lost + i_at * C * KP
        b_d_o = tl.trans(tl.load(p_d_o + o_cv + o_v[None, :], mask=m_cv, other=0.0))  # [BV, C]
        b_k0 = tl.load(p_k + o_c[:, None] * KP + o_k0[None, :])  # [C, KH]: k_solved
        b_k1 = tl.load(p_k + o_c[:, None] * KP + o_k1[None, :])
        b_A_solved = tl.load(p_solved + i_at * C * C + o_c[:, None] * C + o_c[None, :])  # [C, C]
        b_beta = tl.load(p_factors + i_at * 3 * C + o_c)
        b_y = product(b_d_o, b_A_solved, PRECISION)  # [BV, C]
        b_dSn0 = keep_part(p_d_states, p_d_states_lost, i_at * VP * KP, b_dS0, o_v, o_k0, V, KP)
        b_dSn1 = keep_part(p_d_states, p_d_states_lost, i_at * VP * KP, b_dS1, o_v, o_k1, V, KP)
        if b_k0.dtype == DTYPE:
            b_y = product_add(b_dSn0, tl.trans(b_k0), b_y, PRECISION)
            b_y = product_add(b_dSn1, tl.trans(b_k1), b_y, PRECISION)
        else:
            bits = exponents(tl.maximum(tl.max(tl.abs(b_dS0), 1), tl.max(tl.abs(b_dS1), 1)))
            b_more = product(scaled_by(b_dS0, bits), tl.trans(b_k0), PRECISION)
            b_more = product_add(scaled_by(b_dS1, bits), tl.trans(b_k1), b_more, PRECISION)
            b_y += b_more * bits.to(tl.float32, bitcast=True)[:, None]
        b_dS0 = begin_next(p_tile + C * KP, p_lost, p_decay + i_at * KP, b_d_o, b_dS0, i_c, o_c, o_k0, KP, PRECISION)
        b_dS1 = begin_next(p_tile + C * KP, p_lost, p_decay + i_at * KP, b_d_o, b_dS1, i_c, o_c, o_k1, KP, PRECISION)
        tl.store(p_d_v + o_cv + o_v[None, :], round_to(tl.trans(b_y * b_beta[None, :]), DTYPE), mask=m_cv)
        b_taken = b_beta
        if BETA == "given":
            m_tiny = tiny_strength(b_beta, DTYPE)
            b_taken = tl.where(m_tiny, 1.0, b_beta)
            p_y = p_alone + i_at * C * VP + o_t[:, None] * VP + o_v[None, :]
            tl.store(p_y, round_to(tl.trans(b_y), DTYPE), mask=m_cv & m_tiny[:, None])
        if HAS_LOST:
            b_lost = rounded_off(tl.trans(b_y * b_taken[None, :]), DTYPE)
            tl.store(p_y_lost + i_nh * C * VP + o_t[:, None] * VP + o_v[None, :], b_lost, mask=m_cv & (i == 0) & has_last)
        b_y = round_to(b_y * -b_beta[None, :], DTYPE)
        b_dS0 = product_add(b_y, tl.load(p_tile + o_c[:, None] * KP + o_k0[None, :]), b_dS0, PRECISION)
        b_dS1 = product_add(b_y, tl.load(p_tile + o_c[:, None] * KP + o_k1[None, :]), b_dS1, PRECISION)
        if PART == "near":  # noqa: SIM102 - the one is known when this is compiled
            if i_c >= 1:
                o_here = o_v + zero_here(i, PTX)
                store_part(p_after_first, i_nh * ENDS + i_c - 1, b_dS0, o_here, o_k0, K, V, V_FIRST)
                store_part(p_after_first, i_nh * ENDS + i_c - 1, b_dS1, o_here, o_k1, K, V, V_FIRST)
    if PART == "far":
        if steps > 0:
            store_part(p_after_first, i_nh * ENDS + ENDS - 1, b_dS0, o_v, o_k0, K, V, V_FIRST)
            store_part(p_after_first, i_nh * ENDS + ENDS - 1, b_dS1, o_v, o_k1, K, V, V_FIRST)
    elif HAS_INITIAL:
        store_part(p_d_initial, i_nh, b_dS0, o_v, o_k0, K, V, V_FIRST)
        store_part(p_d_initial, i_nh, b_dS1, o_v, o_k1, K, V, V_FIRST)


@lru_cache(maxsize=1024)
def launch(problem: Problem, config: Config, layout: Layout, has_final: bool, part: str) -> Launch:
    """has_final: the final state has a gradient. part: see the kernel."""
    grid = problem.N * problem.HV * -(-problem.V // config.reverse_block_v)
    wide = exact_q(problem) and problem.dtype == "bfloat16"  # a tile more a stage, for which there is no shared memory
    values = dict(BV=config.reverse_block_v, STAGES=max(1, config.reverse_stages - wide), HAS_FINAL=has_final, PART=part)
    options = dict(num_warps=config.reverse_warps, registers=config.registers)
    return Launch(wide_reverse_kernel, grid, arguments(problem, config, layout) | values, **options)
