"""What versions of Triton after 3.6 are to be told, which 3.6 finds out by itself."""

from __future__ import annotations

import triton
import triton.language as tl

NEWER = tl.constexpr(tuple(int(x) for x in triton.__version__.split(".")[:2]) > (3, 6))


@triton.jit
def either(m, p_x, p_y, ALIGN: tl.constexpr):
    """p_x where m is, else p_y: pointers to multiples of ALIGN elements in tensors that begin at one of 16 bytes. Of a choice Triton 3.9
    forgets that, and then loads single elements."""
    p_z = tl.where(m, p_x, p_y)
    if NEWER:
        BYTES: tl.constexpr = ALIGN * (p_x.dtype.element_ty.primitive_bitwidth // 8)
        UNIT: tl.constexpr = BYTES if BYTES < 16 else 16
        if len(p_z.shape) == 1:
            p_z = tl.multiple_of(p_z, UNIT)
        elif len(p_z.shape) == 2:
            p_z = tl.multiple_of(p_z, [UNIT, UNIT])
        else:
            p_z = tl.multiple_of(p_z, [UNIT, UNIT, UNIT])
    return p_z


@triton.jit
def rows_at(p_x, o_x, ALWAYS: tl.constexpr = False):
    """p_x + o_x [8 J, R, c] (`token_tiles`), for a load or a store in which a thread is to have its channels of all R rows.

    Triton orders axes by how much lies together along them, so after the channels the first is to have most. That it has 2 is not so, and
    nothing else looks. 3.6 takes this order by itself; 3.9 takes another, and sums over tokens go between threads. ALWAYS: 3.6 is told too,
    where that is the code that GPUs have shown. The sum is made here: a hint is kept with what computes a value, not with the value."""
    p_x += o_x
    if NEWER or ALWAYS:
        p_x = tl.max_contiguous(p_x, [2, 1, 8 if p_x.shape[2] == 32 else 4])
    return p_x
