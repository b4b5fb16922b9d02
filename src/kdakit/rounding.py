"""Rounding to the dtypes of the inputs, in NumPy, which has no bfloat16."""

from __future__ import annotations

import numpy as np

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def round_to(x, dtype: str):
    """x rounded to the nearest value of `dtype`, ties to even, kept in x's own dtype."""
    x = np.asarray(x)
    if dtype == "float64":
        return x
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return x.astype(dtype).astype(x.dtype)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    kept = bits >> 16
    kept &= 1
    kept += bits
    kept += np.uint32(0x7FFF)
    kept &= np.uint32(0xFFFF0000)
    near = kept.view(np.float32).reshape(x.shape).astype(x.dtype, copy=False)
    missing = np.isnan(x)
    return np.where(missing, x, near) if missing.any() else near
