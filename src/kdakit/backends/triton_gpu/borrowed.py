"""A kernel of another backend inside this one's calls: gradients of chunks in CUDA C++ (csrc/backward), for `products` and `gradient`.

`dispatch.load` brings the lender. Its kernel is taken where GPUs have shown it to be right and faster: gates without a bound, and chunks
enough to keep a chip busy. With a bounded gate Triton's two take less time.

KDAKIT_CUDA_GRADIENT=0: never; 1: wherever it can run, to measure it.

And a whole forward, `prepare` and `scan`, which leaves what the backward here begins with (csrc/prefill, `Kept`). It is faster for given
log-decays of keys that are not normalised here. Random problems have not tried it on a GPU: only KDAKIT_CUDA_TRAINING=1 takes it, wherever
it can run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kdakit.backends.triton_gpu.config import Config
from kdakit.problem import Problem

VARIABLE = "KDAKIT_CUDA_GRADIENT"
TRAINING = "KDAKIT_CUDA_TRAINING"
ENOUGH = 4096  # chunks times value heads, from which on it saves more than the host takes: such a call has no plan to repeat

lender: ModuleType | None = None


def gradient(problem: Problem, config: Config, chunks: int, device: Any) -> Callable[..., None] | None:
    """The lender's kernel for the gradients of so many chunks; None: Triton's."""
    asked = os.environ.get(VARIABLE, "")
    if lender is None or asked == "0" or config.chunk != 64:
        return None
    if asked != "1" and (config.bounded or problem.options.deterministic or chunks * problem.HV < ENOUGH):
        return None
    kernel, reason = lender.chunk_gradient(problem, device)
    if reason is not None and asked == "1" and lender.library.missing():
        raise FileNotFoundError(f"{VARIABLE}=1: {reason}")
    return kernel


def forward(problem: Problem, config: Config, device: Any) -> Callable[..., Any] | None:
    """The lender's forward of a call that will be differentiated; None: Triton's."""
    if lender is None or os.environ.get(TRAINING, "") != "1" or config.chunk != 64 or config.half != 32:
        return None
    kernel, reason = lender.kept_forward(problem, device)
    if reason is not None and lender.library.missing():
        raise FileNotFoundError(f"{TRAINING}=1: {reason}")
    return kernel
