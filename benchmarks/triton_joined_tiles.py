"""What Triton 3.6 makes of a product whose first factor is two tiles joined side by side, on Hopper's matrix unit.

    PYTHONPATH=src python benchmarks/triton_joined_tiles.py

x and y are [ROWS, 32]; [x, y] @ b, with b [64, 32], is the same thing as x @ b[:32] + y @ b[32:]. Rows are independent of each other, so a
program with 64 rows and two with 32 must agree. With 32 rows and 2 warps Triton takes the older matrix instructions and they do; with 64
rows and 4 warps it takes wgmma with its first factor in registers, and the result is off by more than its own size (an H200, Triton 3.6.0:
relative difference 1.3). With 8 warps this product is right, but the same one inside `device.pair_gradients.level_gradient` is not. That is
why `slice_k` in tiles/sm_90.json is never 64: gradients with 33 <= K <= 64 were wrong, or pointers that went through the same shared memory
led to "illegal memory access". The interpreter, which multiplies in NumPy, sees nothing of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def joined_product(p_x, p_y, p_b, p_out, ROWS: tl.constexpr):
    """out = [x, y] @ b for ROWS rows, the two tiles joined in registers."""
    o_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_32, o_64 = tl.arange(0, 32), tl.arange(0, 64)
    b_I = tl.where(o_32[:, None] == o_32[None, :], 1.0, 0.0).to(tl.bfloat16)
    # A product with the identity, as the kernels have it: what is joined lies in registers as a product leaves it.
    b_x = tl.dot(tl.load(p_x + o_r[:, None] * 32 + o_32[None, :]), b_I)
    b_y = tl.dot(tl.load(p_y + o_r[:, None] * 32 + o_32[None, :]), b_I)
    b_b = tl.load(p_b + o_64[:, None] * 32 + o_32[None, :])
    b_xy = tl.reshape(tl.permute(tl.join(b_x, b_y), (0, 2, 1)), [ROWS, 64]).to(tl.bfloat16)
    tl.store(p_out + o_r[:, None] * 32 + o_32[None, :], tl.dot(b_xy, b_b))


def main() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x, y, b = (torch.randn(rows, 32, device="cuda", generator=generator).bfloat16() for rows in (128, 128, 64))
    halves = b.view(2, 32, 32)
    for rows, warps in ((32, 2), (64, 4), (64, 8), (128, 8)):
        found = []
        for first, second in ((1, 1), (1, 0), (0, 1)):  # both tiles, and either alone
            own = torch.cat([halves[0] * first, halves[1] * second])
            want, out = x.double() @ own[:32].double() + y.double() @ own[32:].double(), torch.zeros(128, 32, device="cuda")
            made = joined_product[(128 // rows,)](x, y, own, out, ROWS=rows, num_warps=warps)
            found.append(float((out.double() - want).norm() / want.norm()))
        unit = "wgmma" if "wgmma.mma" in made.asm["ptx"] else "mma"
        both, first, second = (f"{off:.1e}" for off in found)
        print(f"{rows} rows, {warps} warps ({unit}): relative error {both}, of the first tile alone {first}, of the second {second}")


if __name__ == "__main__":
    main()
