"""Launches that follow each other closely: a kernel begins while the one before it ends (programmatic dependent launch)."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_last(CHAINED: tl.constexpr):
    """From here on all that earlier launches wrote is there."""
    if CHAINED:
        gdc_wait()


@triton.jit
def let_next_begin(CHAINED: tl.constexpr):
    """The next launch may begin; what it sees before it waits is what this one saw when it came here."""
    if CHAINED:
        gdc_launch_dependents()
