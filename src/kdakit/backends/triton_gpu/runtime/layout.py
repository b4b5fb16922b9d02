"""The token tensors as the kernels read them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from kdakit.problem import Arrays

FAR = 2**24  # elements: within a chunk offsets are 32-bit


@dataclass(frozen=True, eq=False)
class Layout:
    """Of q, k, v, g and beta. Equal layouts are one object, see `_layout`."""

    near: bool  # whether the kernels can read them
    align: int
    strides: dict[str, tuple[int, ...]]  # "q": (batch, token, head) in units of `align` elements; "b" in elements


class Views(NamedTuple):
    """The token tensors with unit stride in their last dimension."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    layout: Layout

    @property
    def align(self) -> int:
        return self.layout.align

    @property
    def strides(self) -> dict[str, tuple[int, ...]]:
        return self.layout.strides


def views(arrays: Arrays) -> Views:
    """Strides are honoured; only a tensor whose channels are not adjacent in memory, or whose tokens lie absurdly far apart, is copied."""
    q, k, v, g, beta = arrays[:5]
    layouts = (q.shape, q.stride()), (k.shape, k.stride()), (v.shape, v.stride()), (g.shape, g.stride())
    anywhere = (q.data_ptr() | k.data_ptr() | v.data_ptr() | g.data_ptr()) % 16 != 0
    layout = _layout(layouts, beta.stride(), anywhere)
    if not layout.near:
        near = [_layout((x,), ()).near for x in layouts]
        q, k, v, g = (x if keep else x.contiguous() for x, keep in zip((q, k, v, g), near, strict=True))
        layout = _layout(tuple((x.shape, x.stride()) for x in (q, k, v, g)), beta.stride(), anywhere)
    return Views(q, k, v, g, layout)


@lru_cache(maxsize=1024)
def _layout(layouts: tuple, beta: tuple, anywhere: bool = False) -> Layout:
    """Of tensors' (shape, strides); `anywhere`: not all begin at a multiple of 16 bytes."""
    near = all((stride[3] == 1 or shape[3] == 1) and stride[1] < FAR for shape, stride in layouts)
    own = [[s if n > 1 else 0 for s, n in zip(stride[:3], shape[:3], strict=True)] for shape, stride in layouts]
    align = 1 if anywhere else math.gcd(16, *(s for strides in own for s in strides))
    strides = {name: tuple(s // align for s in x) for name, x in zip("qkvg", own, strict=False)}
    return Layout(near, align, strides | {"b": beta})


def contiguous_parameters(arrays: Arrays) -> Arrays:
    """The small tensors as the kernels index them."""
    if all(x is None or x.is_contiguous() for x in arrays[5:9]):
        return arrays
    A_log, dt_bias, initial_state, cu_seqlens = (x if x is None or x.is_contiguous() else x.contiguous() for x in arrays[5:9])
    return Arrays(*arrays[:5], A_log, dt_bias, initial_state, cu_seqlens, *arrays[9:])
