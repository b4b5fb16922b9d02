"""Launches that follow each other closely: a kernel begins while the one before it ends (programmatic dependent launch)."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_last(CHAINED: tl.constexpr):
    """From here on all that earlier launches wrote is there, and the next launch may begin."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
