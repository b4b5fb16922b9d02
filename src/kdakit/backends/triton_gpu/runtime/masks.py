"""Masks in the interpreter of Triton 3.9: a single comparison that is spread over a block is to stay Boolean.

There what compares numbers has their type, and where it is one for a whole block its copies become numbers, too. 3.6 takes such for masks,
3.9 raises "mask has unsupported dtype". Compiled kernels have no such thing."""

from __future__ import annotations

from typing import Any

import numpy as np


def keep_booleans(builder: Any, handle: Any) -> None:
    """builder: the interpreter's class that computes; handle: its values."""
    spread = builder.create_splat

    def spread_as_it_is(self: Any, kind: Any, x: Any) -> Any:
        made = spread(self, kind, x)
        return handle(made.data.astype(bool), made.dtype) if x.data.dtype == np.bool_ else made

    builder.create_splat = spread_as_it_is
