"""Host side of the norm's kernels."""

from __future__ import annotations

from functools import lru_cache

from kdakit.backends.triton_gpu.runtime.launch import Launch
from kdakit.layers.torch.fused.gated_norm_kernels import norm_backward_kernel, norm_kernel, norm_sums_kernel

TILE, BACKWARD_TILE, WARPS = 4096, 2048, 4  # numbers of a program at a time
MANY = 512  # shares from which on their sum is worth more programs


@lru_cache(maxsize=1024)
def norm(V: int, tokens: int, heads: int, eps: float, has_gate: bool, has_bias: bool, has_residual: bool, ptx: bool) -> Launch:
    VP = max(16, 1 << (V - 1).bit_length())
    rows = max(1, TILE // VP)
    values = dict(T=tokens, HV=heads, eps=eps, V=V, VP=VP, ROWS=rows, HAS_GATE=has_gate, HAS_BIAS=has_bias, PTX=ptx)
    values["HAS_RESIDUAL"] = has_residual
    return Launch(norm_kernel, -(-tokens * heads // rows), values, num_warps=WARPS)


@lru_cache(maxsize=1024)
def norm_backward(
    V: int, tokens: int, heads: int, eps: float, has_gate: bool, has_bias: bool, has_sum: bool, strip: int, ptx: bool
) -> Launch:
    VP = max(16, 1 << (V - 1).bit_length())
    rows = max(1, min(16, BACKWARD_TILE // VP))
    values = dict(T=tokens, HV=heads, eps=eps, STRIP=strip, V=V, VP=VP, ROWS=rows, HAS_GATE=has_gate, HAS_BIAS=has_bias, PTX=ptx)
    values["HAS_SUM"] = has_sum
    return Launch(norm_backward_kernel, (heads, -(-tokens // strip), 1), values, num_warps=WARPS)


@lru_cache(maxsize=1024)
def sums(strips: int, heads: int, V: int, has_bias: bool) -> Launch:
    columns, rows, warps = (8, 256, 8) if strips * heads >= MANY and not has_bias else (16, 128, 4)
    values = dict(S=strips, HV=heads, V=V, COLUMNS=columns, ROWS=rows, HAS_BIAS=has_bias)
    grid = -(-V // columns) + (-(-heads * V // columns) if has_bias else 0)
    return Launch(norm_sums_kernel, grid, values, num_warps=warps)
