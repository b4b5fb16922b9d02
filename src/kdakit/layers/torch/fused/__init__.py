"""The parts of a layer around its operator as single kernels, forward and backward, in Triton; `kdakit.layers.torch` has their plain form.

short_convolution   convolution and SiLU of several tensors that lie in one row
gated_norm          RMSNorm, times the sigmoid of a gate
projection          one row from several matrices
swiglu              silu(a) b
step                one token, or a few, of sequences that carry a cache: everything between the projections
"""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fits(*tensors: Tensor | None) -> bool:
    """Whether the kernels take these tensors: on a GPU, in one of their dtypes, and not split over ranks."""
    given = [x for x in tensors if x is not None]
    return all(x.is_cuda and x.dtype in DTYPES and not hasattr(x, "to_local") for x in given) and shown(given[0].get_device())


@torch.compiler.assume_constant_result
def shown(device: int) -> bool:
    """Whether such a GPU has shown that the kernels are right there; KDAKIT_UNCHECKED=1 takes them elsewhere too."""
    return _shown(device)


@lru_cache
def _shown(device: int) -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    if os.environ.get("KDAKIT_UNCHECKED", "0") == "1":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def fast(x: Tensor) -> bool:
    """Whether single PTX instructions, right to 2^-22, are exact enough: for what is rounded to 11 bits or fewer, on NVIDIA's GPUs."""
    return x.is_cuda and x.dtype != torch.float32 and torch.version.hip is None
