"""Backward, last launch: gradients of the gate's parameters from what each chunk adds to them."""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.arguments import arguments
from kdakit.backends.triton_gpu.config import Config, chunk_slots
from kdakit.backends.triton_gpu.device.matrix import round_to
from kdakit.backends.triton_gpu.runtime.kernel import kernel
from kdakit.backends.triton_gpu.runtime.launch import Launch
from kdakit.backends.triton_gpu.runtime.layout import Layout
from kdakit.problem import Problem


@triton.jit
def over_slots(p_shares, i_h, slots, HV, KP: tl.constexpr, R: tl.constexpr, UNROLL: tl.constexpr):
    """shares [slots, HV, KP] of a head, summed over slots -> [KP]: R sums beside each other, then those. It asks for UNROLL R slots at
    once."""
    o_s, o_k = tl.arange(0, R), tl.arange(0, KP)
    b_sum = tl.zeros([R, KP], tl.float32)
    for i in tl.range(0, slots, R, loop_unroll_factor=UNROLL):
        i_row = (tl.cast(i, tl.int64) + o_s) * HV + i_h
        b_sum += tl.load(p_shares + i_row[:, None] * KP + o_k[None, :], mask=(i + o_s < slots)[:, None], other=0.0)
    return tl.sum(b_sum, 0)


@triton.jit
def sum_A_log(p_shares, p_d_A_log, i_h, slots, HV, KP: tl.constexpr, UNROLL: tl.constexpr):
    d_A = tl.sum(over_slots(p_shares, i_h, slots, HV, KP, 32, UNROLL), 0)
    tl.store(p_d_A_log + i_h, round_to(d_A, p_d_A_log.dtype.element_ty))


@triton.jit
def sum_dt_bias(p_shares, p_d_dt_bias, i_h, slots, HV, K: tl.constexpr, KP: tl.constexpr, UNROLL: tl.constexpr):
    o_k = tl.arange(0, KP)
    b_d = over_slots(p_shares, i_h, slots, HV, KP, 32, UNROLL)
    tl.store(p_d_dt_bias + i_h * K + o_k, round_to(b_d, p_d_dt_bias.dtype.element_ty), mask=o_k < K)


@kernel
def sums_kernel(
    p_d_g, p_A_shares, p_bias_shares, p_d_A_log, p_d_dt_bias, slots, HV,
    K: tl.constexpr, KP: tl.constexpr, HAS_A_LOG: tl.constexpr, HAS_DT_BIAS: tl.constexpr,
):  # fmt: skip
    """d_A_log [HV], d_dt_bias [HV, K] from shares [slots, HV, KP]. Grid: (HV,), or (2 HV,) where there are both: first those of A_log.
    d_g is there for its device."""
    i_h = tl.program_id(0).to(tl.int64)
    if HAS_A_LOG and HAS_DT_BIAS:
        if i_h < HV:
            sum_A_log(p_A_shares, p_d_A_log, i_h, slots, HV, KP, 4)
        else:
            sum_dt_bias(p_bias_shares, p_d_dt_bias, i_h - HV, slots, HV, K, KP, 4)
    elif HAS_A_LOG:
        sum_A_log(p_A_shares, p_d_A_log, i_h, slots, HV, KP, 1)
    else:
        sum_dt_bias(p_bias_shares, p_d_dt_bias, i_h, slots, HV, K, KP, 1)


@lru_cache(maxsize=1024)
def launch(problem: Problem, config: Config, layout: Layout) -> Launch:
    values = arguments(problem, config, layout) | dict(slots=chunk_slots(problem, config.chunk))
    programs = problem.HV * (2 if problem.has_A_log and problem.has_dt_bias else 1)
    return Launch(sums_kernel, programs, values, num_warps=config.sums_warps)
