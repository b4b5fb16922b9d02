"""Small device functions of the layer's kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.device.gate import LOG2E


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x), finite for any x."""
    return 1.0 / (1.0 + tl.exp2(-x * LOG2E))


@triton.jit
def silu_slope(x):
    """d/dx x sigmoid(x) = s (1 + x (1 - s))."""
    s = sigmoid(x)
    return s * (1.0 + x * (1.0 - s))
