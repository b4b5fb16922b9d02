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
def over_slots(p_shares, i_h, slots, HV, KP: tl.constexpr, R: tl.constexpr):
    """shares [slots, HV, KP] of a head, summed over slots -> [KP]: R sums beside each other, then those. It asks for 4 R slots at once."""
    o_s, o_k = tl.arange(0, R), tl.arange(0, KP)
    b_sum = tl.zeros([R, KP], tl.float32)
    for i in tl.range(0, slots, R, loop_unroll_factor=4):
        i_row = (tl.cast(i, tl.int64) + o_s) * HV + i_h
        b_sum += tl.load(p_shares + i_row[:, None] * KP + o_k[None, :], mask=(i + o_s < slots)[:, None], other=0.0)
    return tl.sum(b_sum, 0)


@kernel
def sums_kernel(
    p_d_g, p_A_shares, p_bias_shares, p_d_A_log, p_d_dt_bias, slots, HV,
    K: tl.constexpr, KP: tl.constexpr, HAS_A_LOG: tl.constexpr, HAS_DT_BIAS: tl.constexpr,
):  # fmt: skip
    """d_A_log [HV], d_dt_bias [HV, K] from shares [slots, HV, KP]. Grid: (HV,) for A_log, then as many for dt_bias, of those that there
    are. d_g is there for its device."""
    i_h, o_k = tl.program_id(0).to(tl.int64), tl.arange(0, KP)
    if HAS_A_LOG:
        if i_h < HV:
            d_A = tl.sum(over_slots(p_A_shares, i_h, slots, HV, KP, 32), 0)
            tl.store(p_d_A_log + i_h, round_to(d_A, p_d_A_log.dtype.element_ty))
        i_h -= HV
    if HAS_DT_BIAS and i_h >= 0:
        b_d = over_slots(p_bias_shares, i_h, slots, HV, KP, 32)
        tl.store(p_d_dt_bias + i_h * K + o_k, round_to(b_d, p_d_dt_bias.dtype.element_ty), mask=o_k < K)


@lru_cache(maxsize=1024)
def launch(problem: Problem, config: Config, layout: Layout) -> Launch:
    values = arguments(problem, config, layout) | dict(slots=chunk_slots(problem, config.chunk))
    parameters = problem.has_A_log + problem.has_dt_bias
    return Launch(sums_kernel, problem.HV * parameters, values, num_warps=config.sums_warps)
