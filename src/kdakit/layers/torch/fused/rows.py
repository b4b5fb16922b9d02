"""Small device functions of the layer's kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.device.gate import LOG2E, power_of_2, reciprocal


@triton.jit
def sigmoid(x, PTX: tl.constexpr = False):
    """1 / (1 + e^-x), finite for any x. PTX: to 2^-21, in two instructions."""
    return reciprocal(1.0 + power_of_2(-x * LOG2E, PTX), PTX)


@triton.jit
def silu_slope(x, PTX: tl.constexpr):
    """d/dx x sigmoid(x) = s (1 + x (1 - s))."""
    s = sigmoid(x, PTX)
    return s * (1.0 + x * (1.0 - s))
