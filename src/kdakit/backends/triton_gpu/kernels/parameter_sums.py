"""Backward, last launch: gradients of the gate's parameters from what each chunk adds to them."""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.arguments import arguments
from kdakit.backends.triton_gpu.config import Config, chunk_slots
from kdakit.backends.triton_gpu.device.matrix import round_to
from kdakit.backends.triton_gpu.device.whole_sums import add_whole, sum_whole
from kdakit.backends.triton_gpu.runtime.kernel import kernel
from kdakit.backends.triton_gpu.runtime.launch import Launch
from kdakit.backends.triton_gpu.runtime.layout import Layout
from kdakit.problem import Problem


@triton.jit
def over_slots(p_shares, i_h, slots, HV, KP: tl.constexpr, KR: tl.constexpr, R: tl.constexpr, UNROLL: tl.constexpr, WHOLE: tl.constexpr):
    """shares [slots, HV, KP] of a head, of which KR channels are there, summed over slots -> [KP]: R sums beside each other, then those. It
    asks for UNROLL R slots at once. And what rounding takes from the sums, if WHOLE, else 0."""
    o_s, o_k = tl.arange(0, R), tl.arange(0, KP)
    b_sum, b_lost = tl.zeros([R, KP], tl.float32), tl.zeros([R, KP], tl.float32)
    for i in tl.range(0, slots, R, loop_unroll_factor=UNROLL):
        i_row = (tl.cast(i, tl.int64) + o_s) * HV + i_h
        m_x = (i + o_s < slots)[:, None]
        if KR < KP:
            m_x = m_x & (o_k < KR)[None, :]
        b_x = tl.load(p_shares + i_row[:, None] * KP + o_k[None, :], mask=m_x, other=0.0)
        if WHOLE:
            b_sum, b_lost = add_whole(b_sum, b_lost, b_x, 0.0)
        else:
            b_sum += b_x
    if WHOLE:
        return tl.reduce((b_sum, b_lost), 0, add_whole)
    return tl.sum(b_sum, 0), tl.zeros([KP], tl.float32)


@triton.jit
def sum_A_log(p_shares, p_d_A_log, i_h, slots, HV, KP: tl.constexpr, KR: tl.constexpr, UNROLL: tl.constexpr, WHOLE: tl.constexpr):
    b_d, b_lost = over_slots(p_shares, i_h, slots, HV, KP, KR, 32, UNROLL, WHOLE)
    d_A = sum_whole(b_d, b_lost) if WHOLE else tl.sum(b_d, 0)
    tl.store(p_d_A_log + i_h, round_to(d_A, p_d_A_log.dtype.element_ty))


@triton.jit
def sum_dt_bias(p_shares, p_d_dt_bias, i_h, slots, HV, K: tl.constexpr, KP: tl.constexpr, KR: tl.constexpr, UNROLL: tl.constexpr,
                WHOLE: tl.constexpr):  # fmt: skip
    o_k = tl.arange(0, KP)
    b_d, b_lost = over_slots(p_shares, i_h, slots, HV, KP, KR, 32, UNROLL, WHOLE)
    if WHOLE:
        b_d += b_lost
    tl.store(p_d_dt_bias + i_h * K + o_k, round_to(b_d, p_d_dt_bias.dtype.element_ty), mask=o_k < K)


@kernel
def sums_kernel(
    p_d_g, p_A_shares, p_bias_shares, p_d_A_log, p_d_dt_bias, slots, HV,
    K: tl.constexpr, KP: tl.constexpr, KR: tl.constexpr, HAS_A_LOG: tl.constexpr, HAS_DT_BIAS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """d_A_log [HV], d_dt_bias [HV, K] from shares [slots, HV, KP]. Grid: (HV,), or (2 HV,) where there are both: first those of A_log.
    WHOLE, for float32: as if they were rounded but once; where terms cancel, a sum has errors of its largest parts. d_g is there for its
    device."""
    i_h = tl.program_id(0).to(tl.int64)
    if HAS_A_LOG and HAS_DT_BIAS:
        UNROLL: tl.constexpr = 1 if WHOLE else 4  # two numbers a sum: registers
        if i_h < HV:
            sum_A_log(p_A_shares, p_d_A_log, i_h, slots, HV, KP, KR, UNROLL, WHOLE)
        else:
            sum_dt_bias(p_bias_shares, p_d_dt_bias, i_h - HV, slots, HV, K, KP, KR, UNROLL, WHOLE)
    elif HAS_A_LOG:
        sum_A_log(p_A_shares, p_d_A_log, i_h, slots, HV, KP, KR, 1, WHOLE)
    else:
        sum_dt_bias(p_bias_shares, p_d_dt_bias, i_h, slots, HV, K, KP, KR, 1, WHOLE)


@lru_cache(maxsize=1024)
def launch(problem: Problem, config: Config, layout: Layout) -> Launch:
    values = arguments(problem, config, layout) | dict(slots=chunk_slots(problem, config.chunk), WHOLE=problem.dtype == "float32")
    programs = problem.HV * (2 if problem.has_A_log and problem.has_dt_bias else 1)
    return Launch(sums_kernel, programs, values, num_warps=config.sums_warps)
