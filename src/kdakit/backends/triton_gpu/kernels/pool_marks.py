"""Where in a scan the states that a prefill leaves on its way are to be left: one short launch, since the host knows no position."""

from __future__ import annotations

from functools import lru_cache

import triton.language as tl

from kdakit.backends.triton_gpu.config import Config, chunk_slots
from kdakit.backends.triton_gpu.device.program import let_next_begin, wait_for_last
from kdakit.backends.triton_gpu.runtime.kernel import kernel
from kdakit.backends.triton_gpu.runtime.launch import Launch
from kdakit.problem import Problem

BLOCK = 512


@kernel
def marks_kernel(
    p_sequence, p_position, p_slot, p_owners, p_cu_seqlens, p_places, p_spans, p_left, T, SLOTS, MARKS, FIRST, CAPACITY, C: tl.constexpr,
    VARLEN: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """places [SLOTS]: for each place of a chunk of C tokens the page for the state before it; -1: none. One program.

    A mark at `position` is at the last chunk's beginning before it, or at its own where a chunk begins there. spans [MARKS, 2]: first and
    last token + 1 between that and the mark, in the row of all tokens; left [MARKS]: its page, -1 where nothing is between. A sequence
    whose slot in owners [N] is nobody's leaves no state.

    CHAINED: it runs beside the end of the kernel before it, and ends after that: who waits for this one waits for both, and is let
    in at once.
    """
    let_next_begin(CHAINED)
    start = 0
    while start < SLOTS:
        o_s = start + tl.arange(0, BLOCK)
        tl.store(p_places + o_s, tl.full([BLOCK], -1, tl.int64), mask=o_s < SLOTS)
        start += BLOCK
    tl.debug_barrier()  # the same threads or not: places come after
    start = 0
    while start < MARKS:
        o_m = start + tl.arange(0, BLOCK)
        m_m = o_m < MARKS
        i_n = tl.load(p_sequence + o_m, mask=m_m, other=0).to(tl.int64)
        position = tl.load(p_position + o_m, mask=m_m, other=1).to(tl.int64)
        owner = tl.load(p_owners + i_n, mask=m_m, other=-1).to(tl.int64)
        slot = tl.load(p_slot + o_m, mask=m_m & (owner >= FIRST) & (owner < CAPACITY), other=-1).to(tl.int64)
        if VARLEN:
            bos = tl.load(p_cu_seqlens + i_n, mask=m_m, other=0).to(tl.int64)
            eos = tl.load(p_cu_seqlens + i_n + 1, mask=m_m, other=0).to(tl.int64)
            place = bos // C + i_n
        else:
            bos, eos = i_n * T, i_n * T + T
            place = i_n * tl.cdiv(T, C)
        direct = tl.where((position % C == 0) & (position < eos - bos), position, position - 1) // C
        place += direct
        tl.store(p_places + place, slot, mask=m_m & (place >= 0) & (place < SLOTS))
        if p_spans is not None:
            tl.store(p_spans + 2 * o_m, bos + direct * C, mask=m_m)
            tl.store(p_spans + 2 * o_m + 1, bos + position, mask=m_m)
            tl.store(p_left + o_m, tl.where(position > direct * C, slot, -1), mask=m_m)
        start += BLOCK
    wait_for_last(CHAINED)


@lru_cache(maxsize=1024)
def launch(problem: Problem, config: Config, marks: int, first: int, capacity: int) -> Launch:
    """Slots below `first` and from `capacity` on are nobody's."""
    C, chained = config.chunk, config.split and config.ptx
    values = dict(T=problem.T, SLOTS=chunk_slots(problem, C), MARKS=marks, FIRST=first, CAPACITY=capacity)
    values |= dict(C=C, VARLEN=bool(problem.varlen), BLOCK=BLOCK, CHAINED=chained)
    return Launch(marks_kernel, 1, values, num_warps=4, **({"launch_pdl": True} if chained else {}))
