"""A kernel of another backend inside this one's calls: gradients of chunks in CUDA C++ (csrc/backward), for `products` and `gradient`.

`dispatch.load` brings the lender. Its kernel is taken where GPUs have shown it to be right and faster: any gate, and chunks enough to keep
a chip busy.

KDAKIT_CUDA_GRADIENT=0: never; 1: wherever it can run, to measure it.

The gradient of the state from the end of each sequence, for `reverse`: KDAKIT_CUDA_REVERSE=1, wherever it can run. No GPU has shown it.

And a whole forward, `prepare` and `scan`, which leaves what the backward here begins with (csrc/prefill, `Kept`): for given log-decays
without a bound, of keys that are not normalised here. KDAKIT_CUDA_TRAINING=0: never; 1: for all given log-decays.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kdakit.backends.triton_gpu.config import Config, exact_q
from kdakit.problem import Problem

VARIABLE = "KDAKIT_CUDA_GRADIENT"
REVERSE = "KDAKIT_CUDA_REVERSE"
TRAINING = "KDAKIT_CUDA_TRAINING"
ENOUGH = 4096  # chunks times value heads, from which on a GPU has shown it to be faster
# By what is lent, the kernels that it is in place of.
REPLACED = {
    "forward": ("prepare_kernel", "prepare_normed_kernel", "scan_kernel", "staged_scan_kernel", "parts_kernel", "combine_kernel"),
    "reverse": ("reverse_kernel",),
    "gradient": ("products_kernel", "gradient_kernel", "gradient_normed_kernel"),
}

lender: ModuleType | None = None


def gradient(problem: Problem, config: Config, chunks: int, device: Any) -> Callable[..., Any] | None:
    """The lender's kernel for the gradients of so many chunks; None: Triton's."""
    asked = os.environ.get(VARIABLE, "")
    if lender is None or asked == "0" or config.chunk != 64:
        return None
    if asked != "1" and not enough(problem, chunks):
        return None
    return found(VARIABLE, asked, *lender.chunk_gradient(problem, device))


def reverse(problem: Problem, config: Config, chunks: int, device: Any) -> Callable[..., Any] | None:
    """The lender's kernel for the gradient of the state; None: Triton's, and where what rounding takes from q counts."""
    asked = os.environ.get(REVERSE, "")
    if lender is None or asked != "1" or config.chunk != 64 or config.half != 32 or not chunks or exact_q(problem):
        return None
    return found(REVERSE, asked, *lender.reverse(problem, device))


def forward(problem: Problem, config: Config, chunks: int, device: Any) -> Callable[..., Any] | None:
    """The lender's forward of a call that will be differentiated; None: Triton's."""
    asked = os.environ.get(TRAINING, "")
    if lender is None or asked == "0" or config.chunk != 64 or config.half != 32 or not chunks:
        return None
    given = problem.options.gate == "log_decay" and not config.bounded and not problem.options.l2norm
    if asked != "1" and not (given and enough(problem, chunks)):
        return None
    return found(TRAINING, asked, *lender.kept_forward(problem, device))


def enough(problem: Problem, chunks: int) -> bool:
    """So many chunks that a GPU is faster. Not where results may not depend on the number of chunks."""
    return not problem.options.deterministic and chunks * problem.HV >= ENOUGH


def found(variable: str, asked: str, kernel: Callable[..., Any] | None, reason: str | None) -> Callable[..., Any] | None:
    """The kernel; an error where it was asked for and nothing but the library is missing."""
    if asked == "1" and reason is not None and lender is not None and reason == lender.library.missing():
        raise FileNotFoundError(f"{variable}=1: {reason}")
    return kernel


def replaced(problem: Problem, config: Config, chunks: int, device: Any) -> tuple[str, ...]:
    """Names of the kernels that a call that will be differentiated, and its backward, do not launch."""
    lenders = dict(forward=forward, reverse=reverse, gradient=gradient)
    lent = [what for what, lend in lenders.items() if lend(problem, config, chunks, device) is not None]
    return tuple(name for what in lent for name in REPLACED[what])
