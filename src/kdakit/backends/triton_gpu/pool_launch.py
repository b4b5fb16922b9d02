"""Host side of the pooled kernels: one launch a call, and no value on the device is looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton

from kdakit.backends.triton_gpu import launch as launches
from kdakit.backends.triton_gpu.config import Config
from kdakit.backends.triton_gpu.launch import contiguous_parameters, on_device, views
from kdakit.backends.triton_gpu.pool_kernels import commit_kernel, pooled_kernel
from kdakit.problem import Arrays, Problem


@dataclass(frozen=True)
class Cut:
    """How a call is cut. Scales of 8-bit states belong to 32 value channels, so there a program takes as many."""

    block_v: int = 32
    warps: int = 2


# By call and layout, from benchmarks/serving_check.py on an H200, H = 32, K = V = 128.
CUTS = {
    ("decode", False): Cut(32, 2), ("verify", False): Cut(32, 1), ("advance", False): Cut(32, 1), ("commit", False): Cut(32, 2),
    ("decode", True): Cut(16, 1), ("verify", True): Cut(16, 1), ("advance", True): Cut(16, 1), ("commit", True): Cut(16, 1),
}  # fmt: skip
CUT_8_BIT = Cut()


def cut_for(call: str, pool: Any) -> Cut:
    return CUT_8_BIT if pool.sizes.dtype == "int8" else CUTS[call, pool.sizes.state_v_first]


class Log(NamedTuple):
    """Of each draft token, float32."""

    k: torch.Tensor  # [N, T, HV, K] as it came
    decay: torch.Tensor  # [N, T, HV, K]
    u: torch.Tensor  # [N, T, HV, V], divided by k's norm


def decode(problem: Problem, arrays: Arrays, pool: Any, slots: torch.Tensor, config: Config) -> torch.Tensor:
    return _run(problem, arrays, pool, slots, cut_for("decode", pool))


def verify(problem: Problem, arrays: Arrays, pool: Any, slots: torch.Tensor, config: Config, past=None):
    """o, the generation of each row's slot (-1: skipped), and the log. past: an earlier draft of these slots and what of it is accepted."""
    p, device = problem, slots.device
    key, value = (p.N, p.T, p.HV, p.K), (p.N, p.T, p.HV, p.V)
    log = Log(*(torch.empty(shape, device=device) for shape in (key, key, value)))
    generation = torch.empty(p.N, dtype=torch.int32, device=device)
    cut = cut_for("verify" if past is None else "advance", pool)
    return _run(problem, arrays, pool, slots, cut, log, generation, past), generation, log


def commit(pool: Any, draft: Any, accepted: torch.Tensor) -> None:
    s, storage = pool.sizes, pool.storage
    N, T, HV, V = draft.log.u.shape
    cut = cut_for("commit", pool)
    args = (storage.states, storage.scales, storage.residual, draft.slots.contiguous(), pool.generation, accepted.contiguous(),
            *draft.log, draft.generation, T, HV)  # fmt: skip
    constants = dict(K=s.K, V=V, KP=triton.next_power_of_2(s.K), BV=cut.block_v, V_FIRST=s.state_v_first, FEEDBACK=s.feedback)
    grid = N * HV * -(-V // cut.block_v)
    if grid:
        with on_device(storage.states):
            launches.launch(commit_kernel, grid, args, constants, num_warps=cut.warps)


def _run(problem: Problem, arrays: Arrays, pool: Any, slots, cut: Cut, log: Log | None = None, generation=None, past=None):
    o, storage = problem.options, pool.storage
    arrays = contiguous_parameters(arrays)
    x = views(arrays)
    out = torch.empty((problem.B, problem.T, problem.HV, problem.V), dtype=x.v.dtype, device=x.v.device)
    grid = problem.N * problem.HV * -(-problem.V // cut.block_v)
    if grid == 0 or problem.T == 0:
        return out
    before = (None,) * 5 if past is None else (*past[0].log, past[0].generation, past[1].contiguous())
    args = (
        x.q, x.k, x.v, x.g, arrays.beta, arrays.A_log, arrays.dt_bias, out, storage.states, storage.scales, storage.residual,
        slots.contiguous(), pool.generation, *(log or (None, None, None)), generation, *before,
        problem.T, 0 if past is None else past[0].tokens, problem.H, problem.HV, pool.capacity, o.scale, o.lower_bound or 0.0,
        *x.strides["q"], *x.strides["k"], *x.strides["v"], *x.strides["g"], *x.strides["b"],
    )  # fmt: skip
    constants = dict(
        K=problem.K, V=problem.V, KP=triton.next_power_of_2(problem.K), BV=cut.block_v, ALIGN=x.align, V_FIRST=pool.sizes.state_v_first,
        GATE=o.gate, BETA=o.beta, L2NORM=o.l2norm, HAS_A_LOG=problem.has_A_log, HAS_DT_BIAS=problem.has_dt_bias,
        FEEDBACK=pool.sizes.feedback, DRAFT=log is not None, PAST=past is not None, SINGLE=problem.T == 1,
    )  # fmt: skip
    with on_device(arrays.q):
        launches.launch(pooled_kernel, grid, args, constants, num_warps=cut.warps)
    return out
