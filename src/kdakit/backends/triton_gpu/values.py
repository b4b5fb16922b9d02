"""The order of rows in which a chunk's values and outputs pass between memory and the matrix units."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def traded(b_x):
    """[C, X] -> the same rows, row c at (c // 2 % 4) C / 4 + c // 8 * 2 + c % 2. Names registers, moves nothing.

    Between rows of memory and the matrix units' order a tile goes through shared memory in rounds, each with two barriers, one for every
    value of the indices that a thread keeps on both sides. The units have rows c and c + 8 in a thread, loads and stores rows r and
    r + C / 4: traded, these have nothing in common, and one round is enough.
    """
    C: tl.constexpr = b_x.shape[0]
    X: tl.constexpr = b_x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(b_x, [C // 8, 4, 2, X]), (1, 0, 2, 3)), [C, X])


@triton.jit
def traded_back(b_x):
    """The inverse of `traded`."""
    C: tl.constexpr = b_x.shape[0]
    X: tl.constexpr = b_x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(b_x, [4, C // 8, 2, X]), (1, 0, 2, 3)), [C, X])
