"""Few heads and a long sequence: the scan in parts that run at the same time.

A part's chunks map the state before them to the state after them by  S -> M S + b.  While the first part is scanned with its outputs,
`parts_kernel` finds M and b of the others; the last needs neither. `combine_kernel` follows the state from part to part, and all parts but
the first are scanned. Every decay is at most 1, so M is as safe to compute as S is, column by column with the same products.
"""

from __future__ import annotations

from functools import lru_cache

import triton.language as tl

from kdakit.backends.triton_gpu.arguments import arguments
from kdakit.backends.triton_gpu.config import Config, padded
from kdakit.backends.triton_gpu.device.matrix import INTERPRETED, product, product_add, round_to
from kdakit.backends.triton_gpu.device.program import let_next_begin, part_of, row_tokens, sequence_of, wait_for_last
from kdakit.backends.triton_gpu.runtime.kernel import kernel
from kdakit.backends.triton_gpu.runtime.launch import Launch
from kdakit.backends.triton_gpu.runtime.layout import Layout
from kdakit.problem import Problem


@kernel
def parts_kernel(
    p_v, p_tiles, p_k_solved, p_decay, p_cu_seqlens, p_maps,
    T, NT, HV, PARTS, s_vb, s_vt, s_vh,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
    BV: tl.constexpr, ALIGN: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """b^T above M^T of every part but the first and the last: parts [N * HV, PARTS - 1, VP + KP, KP], M^T as the sum of two [KP, KP] in
    bfloat16.

    The recurrence of `staged_scan_kernel`, for b from zero, for M from the identity and without v. The launch before it is the scan
    of the first part, which it does not need: it waits for that at its end, so that the next launch has to wait for one only.
    Grid: (N * HV * max(PARTS - 2, 1) * (VP + KP) / BV,), blocks of rows fastest, then parts, then heads.
    """
    DTYPE: tl.constexpr = p_tiles.dtype.element_ty
    BLOCKS: tl.constexpr = (VP + KP) // BV
    let_next_begin(not INTERPRETED)
    i_p = tl.program_id(0).to(tl.int64)
    i_row, i_p = (i_p % BLOCKS).to(tl.int32) * BV, i_p // BLOCKS
    between = tl.maximum(PARTS - 2, 1)
    i_part, i_nh = (i_p % between).to(tl.int32) + 1, i_p // between
    i_n, i_h = i_nh // HV, i_nh % HV
    i_b, bos, length, i_slot = sequence_of(p_cu_seqlens, i_n, T, NT, C, VARLEN)
    first, end, last = part_of(length, i_part, PARTS, C)
    if last:
        wait_for_last(not INTERPRETED)
        return
    o_c, o_k, o_t = tl.arange(0, C), tl.arange(0, KP), row_tokens(C, HALF, GROUP)
    o_v = i_row + tl.arange(0, BV)  # beyond VP: rows of M
    m_v = o_v < V
    b_S = tl.where(o_v[:, None] - VP == o_k[None, :], 1.0, 0.0)  # [BV, KP]
    i_slot = (i_slot + first) * HV + i_h
    p_v += (i_b * s_vb + (bos + first * C) * s_vt + i_h * s_vh) * ALIGN
    p_v += (o_t.to(tl.int64) * s_vt)[:, None] * ALIGN + o_v[None, :]  # [C, BV]
    p_tile = p_tiles + i_slot * 3 * C * KP + o_c[:, None] * KP + o_k[None, :]  # [C, KP]
    if p_k_solved is not None:
        p_k_solved += i_slot * C * KP + o_c[:, None] * KP + o_k[None, :]  # [C, KP]
    p_decay += i_slot * KP + o_k
    b_minus = tl.where(o_c[:, None] == o_c[None, :], -1.0, 0.0).to(DTYPE)
    for _ in tl.range(first, end, num_stages=STAGES):  # no part but the last has a chunk that is not full
        b_v = tl.load(p_v, mask=m_v[None, :], other=0.0)  # [C, BV]
        b_k_in = tl.load(p_tile)  # [C, KP]
        b_k_solved = tl.load(p_tile + 2 * C * KP if p_k_solved is None else p_k_solved)  # [C, KP]
        b_decay = tl.load(p_decay)  # [KP]
        b_r = product(tl.trans(b_v), b_minus, PRECISION)  # [BV, C]
        b_r = product_add(round_to(b_S, DTYPE), tl.trans(b_k_in), b_r, PRECISION)  # [BV, C]: -r
        b_S = product_add(round_to(-b_r, DTYPE), b_k_solved, b_S * b_decay[None, :], PRECISION)  # [BV, KP]
        p_v += tl.cast(C, tl.int64) * s_vt * ALIGN
        p_tile += tl.cast(3 * C * KP, tl.int64) * HV
        if p_k_solved is not None:
            p_k_solved += tl.cast(C * KP, tl.int64) * HV
        p_decay += tl.cast(KP, tl.int64) * HV
    p_maps += (i_nh * (PARTS - 1) + i_part) * (VP + KP) * KP
    if i_row >= VP:
        b_high = round_to(b_S, tl.bfloat16)
        p_M = (p_maps + VP * KP).to(tl.pointer_type(tl.bfloat16)) + (o_v - VP)[:, None] * KP + o_k[None, :]
        tl.store(p_M, b_high)
        tl.store(p_M + KP * KP, round_to(b_S - b_high.to(tl.float32), tl.bfloat16))
    else:
        tl.store(p_maps + o_v[:, None] * KP + o_k[None, :], b_S)
    wait_for_last(not INTERPRETED)


@kernel
def combine_kernel(
    p_maps, p_cu_seqlens, T, NT, HV, PARTS,
    KP: tl.constexpr, VP: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, VARLEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """b^T of every part but the first and the last becomes the state after it:  S <- M S + b.  Grid: (N * HV * VP / BV,)."""
    BLOCKS: tl.constexpr = VP // BV
    wait_for_last(not INTERPRETED)
    let_next_begin(not INTERPRETED)
    i_p = tl.program_id(0).to(tl.int64)
    i_row, i_nh = (i_p % BLOCKS).to(tl.int32) * BV, i_p // BLOCKS
    _, _, length, _ = sequence_of(p_cu_seqlens, i_nh // HV, T, NT, C, VARLEN)
    chunks = tl.cdiv(length, C).to(tl.int32)
    used = tl.cdiv(chunks, tl.maximum(tl.cdiv(chunks, PARTS), 1))  # parts that are not empty
    o_k = tl.arange(0, KP)
    p_maps += i_nh * (PARTS - 1) * (VP + KP) * KP
    p_b = p_maps + (i_row + tl.arange(0, BV))[:, None] * KP + o_k[None, :]  # [BV, KP]
    p_M = (p_maps + VP * KP).to(tl.pointer_type(tl.bfloat16)) + o_k[:, None] * KP + o_k[None, :]  # [KP, KP]
    b_S = tl.load(p_b)
    for _ in tl.range(1, used - 1, num_stages=STAGES):
        p_b += (VP + KP) * KP
        p_M += 2 * (VP + KP) * KP
        b_b = tl.load(p_b)
        b_high, b_low = tl.load(p_M), tl.load(p_M + KP * KP)
        b_S_high = round_to(b_S, tl.bfloat16)
        b_S_low = round_to(b_S - b_S_high.to(tl.float32), tl.bfloat16)
        b_S = product_add(b_S_low, b_high, b_b, "tf32")
        b_S = product_add(b_S_high, b_low, b_S, "tf32")
        b_S = product_add(b_S_high, b_high, b_S, "tf32")
        tl.store(p_b, b_S)


@lru_cache(maxsize=1024)
def launch_parts(problem: Problem, config: Config, layout: Layout, parts: int) -> Launch:
    rows = padded(problem.V) + padded(problem.K)
    grid = problem.N * problem.HV * max(parts - 2, 1) * rows // config.part_block
    values = arguments(problem, config, layout) | dict(BV=config.part_block, STAGES=config.part_stages, PARTS=parts)
    chained = {"launch_pdl": True} if config.ptx else {}
    return Launch(parts_kernel, grid, values, num_warps=config.part_warps, registers=config.part_registers, **chained)


@lru_cache(maxsize=1024)
def launch_combine(problem: Problem, config: Config, layout: Layout, parts: int) -> Launch:
    grid = problem.N * problem.HV * padded(problem.V) // config.combine_block
    values = arguments(problem, config, layout) | dict(BV=config.combine_block, STAGES=config.combine_stages, PARTS=parts)
    chained = {"launch_pdl": True} if config.ptx else {}
    return Launch(combine_kernel, grid, values, num_warps=config.combine_warps, **chained)
