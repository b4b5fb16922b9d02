"""The bfloat16 forward along blocks of 16 tokens on a CPU: both of its kernels, thread by thread."""

from __future__ import annotations

import ctypes

import emulated
import numpy as np
from hopper_records import call_of, floats, slots_of

from kdakit.backends.cuda import library


def records(problem, arrays, order=1):
    """Records of blocks [slots, HV, 4, bytes]; guarded."""
    kernels = emulated.load("hopper")
    each, slots = 4 * kernels.kda_emulate_block_record_bytes(), slots_of(problem)
    size = slots * problem.HV * each
    space = np.full(size + 512, 0xFF, np.uint8)
    start = -space.ctypes.data % 256
    args, _held = call_of(problem, arrays, space.ctypes.data + start, size)
    kernels.kda_emulate_prepare_blocks_bf16(ctypes.byref(args), order)
    assert (space[start + size :] == 0xFF).all() and (space[:start] == 0xFF).all(), "written past an end"
    return space[start : start + size].reshape(slots, problem.HV, 4, -1)


def forward(problem, arrays, groups=1, order=1):
    """o and final_state, of a scan with so many warp groups a thread block."""
    found = records(problem, arrays, order)
    space = np.zeros(found.nbytes + 256, np.uint8)
    start = -space.ctypes.data % 256
    space[start : start + found.nbytes] = found.reshape(-1)
    B, T, HV, D = problem.B, problem.T, problem.HV, problem.V
    guarded = np.full(B * T * HV * D + 16, 0x7FC1, np.uint16)  # NaN
    o = guarded[8:-8].reshape(B, T, HV, D)
    assert o.ctypes.data % 16 == 0
    final = np.full((problem.N, HV, D, D), np.nan, np.float32)
    initial = None if arrays.initial_state is None else np.ascontiguousarray(arrays.initial_state, np.float32)
    args, _held = call_of(
        problem, arrays, space.ctypes.data + start, found.nbytes, o=library.Tensor(o.ctypes.data, 1, 0, T * HV * D, D, HV * D),
        final_state=final.ctypes.data, initial_state=None if initial is None else initial.ctypes.data,
    )  # fmt: skip
    emulated.load("scan").kda_emulate_scan_blocks_bf16(ctypes.byref(args), groups, order)
    assert (guarded[:8] == 0x7FC1).all() and (guarded[-8:] == 0x7FC1).all(), "written past an end"
    return {"o": floats(o).astype(np.float64), "final_state": final.astype(np.float64)}
