"""What lies past the last of the packed sequences: tokens that take part in nothing. Their outputs and gradients are zero.

Every other kernel visits the tokens of sequences alone, so one launch writes these, for all results of a call. Where there is no such token
its programs end at once.
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.runtime.interpreter import INTERPRETED
from kdakit.backends.triton_gpu.runtime.kernel import kernel
from kdakit.backends.triton_gpu.runtime.launch import Launch
from kdakit.problem import Problem

PROGRAMS, BLOCK = 1 if INTERPRETED else 128, 2048  # the latter in elements


@triton.jit
def clear_rows(p_x, first, T, size, BLOCK: tl.constexpr):
    """x [T, size] <- 0 from row `first` on."""
    start = first * size + tl.program_id(0).to(tl.int64) * BLOCK
    end = tl.cast(T, tl.int64) * size
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    while start < end:
        o_x = start + tl.arange(0, BLOCK)
        tl.store(p_x + o_x, tl.zeros([BLOCK], p_x.dtype.element_ty), mask=o_x < end)
        start += step


@kernel
def tail_kernel(p_cu_seqlens, p_v, p_q, p_k, p_g, p_beta, T, N, keys, values, heads, BLOCK: tl.constexpr, GRADIENTS: tl.constexpr):
    """Rows cu_seqlens[N] .. T of o, or of the gradients of v, q, k, g and beta. A row has `values` elements (o, v), `keys` (q, k, g) or
    `heads` (beta)."""
    first = tl.load(p_cu_seqlens + N).to(tl.int64)
    clear_rows(p_v, first, T, values, BLOCK)
    if GRADIENTS:
        clear_rows(p_q, first, T, keys, BLOCK)
        clear_rows(p_k, first, T, keys, BLOCK)
        clear_rows(p_g, first, T, keys, BLOCK)
        clear_rows(p_beta, first, T, heads, BLOCK)


@lru_cache(maxsize=1024)
def launch(problem: Problem, gradients: bool) -> Launch:
    sizes = dict(T=problem.T, N=problem.N, keys=problem.HV * problem.K, values=problem.HV * problem.V, heads=problem.HV)
    return Launch(tail_kernel, PROGRAMS, sizes | dict(BLOCK=BLOCK, GRADIENTS=gradients), num_warps=4)
