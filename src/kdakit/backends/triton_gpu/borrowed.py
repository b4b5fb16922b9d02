"""Kernels of another backend inside this one's calls: stages of a backward in CUDA C++ (csrc/backward), and a forward (csrc/prefill).

`dispatch.load` brings the lender. Its kernels are taken where GPUs have shown them to be right and faster, with tokens and heads enough:

    gradient   gradients of chunks, for `products` and `gradient`        KDAKIT_CUDA_GRADIENT
    rebuild    the tiles of every chunk again                            KDAKIT_CUDA_REBUILD
    reverse    the gradient of the state, from each sequence's end       KDAKIT_CUDA_REVERSE
    forward    `prepare` and `scan`, which leave what the backward       KDAKIT_CUDA_TRAINING
               here begins with: where there are heads enough, for
               64 channels, for keys that are normalised here, and
               for given log-decays without a bound of others

The variables: 0: never; 1: wherever it can run (forward: all given log-decays, and other gates of normalised keys), to measure it.
Where nothing is to be made again the lender's forward keeps its own records (`records`).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from kdakit.backends.triton_gpu.config import Config, exact_pairs, exact_q, scaled_by_two
from kdakit.problem import Problem

VARIABLES = {name: f"KDAKIT_CUDA_{name.upper()}" for name in ("gradient", "rebuild", "reverse")} | {"forward": "KDAKIT_CUDA_TRAINING"}
ENOUGH = 2**14  # tokens times value heads, the fewest with which a GPU has shown them to be faster
RECORDED = 32  # value heads, the fewest with which a GPU has shown steps with records to be faster
SHORT = 128  # tokens a sequence, on the average
# By what is lent, the kernels that it is in place of.
REPLACED = {
    "forward": ("prepare_kernel", "prepare_normed_kernel", "scan_kernel", "staged_scan_kernel", "parts_kernel", "combine_kernel"),
    "rebuild": ("rebuild_kernel", "rebuild_normed_kernel"),
    "reverse": ("reverse_kernel",),
    "gradient": ("products_kernel", "gradient_kernel", "gradient_normed_kernel"),
}

lender: ModuleType | None = None
_writing: ContextVar[bool] = ContextVar("writing", default=False)


@contextlib.contextmanager
def writing(lends: bool) -> Iterator[None]:
    """Within, calls on tensors without memory are written down for another framework; lends: for a GPU that has the lender's kernels."""
    token = _writing.set(lends)
    try:
        yield
    finally:
        _writing.reset(token)


def lends_to(x: Any) -> bool:
    """Whether a call on tensor x may have the lender's kernels. Without memory it may not, since then Triton's are to be compiled, but for
    a call that is written down."""
    return not x.is_meta or _writing.get()


def gradient(problem: Problem, config: Config, device: Any) -> Callable[..., Any] | None:
    """The lender's kernel for the gradients of chunks; None: Triton's, and where more is wanted of gates' gradients. With K = 128 and
    normalised keys Triton's kernel may round pairs as the lender's does."""
    half = config.solve_dtype == "float16"
    fits = config.chunk == 64 and not (half and not config.normed) and not exact_chunks(problem, config)
    return lent("gradient", problem, device, fits, needed=records(problem, config, device))


def exact_chunks(problem: Problem, config: Config) -> bool:
    """Triton's kernels of chunks are more exact than the lender's, and that counts."""
    return exact_gates(problem) or (exact_pairs(problem, config) and (problem.K == 64 or not problem.options.l2norm))


def exact_gates(problem: Problem) -> bool:
    """Calls in which a plain recurrence may round next to nothing. The rule then wants gates' gradients to 1e-3, and the lender's kernel
    has 2e-3 to 3e-3: it rounds decayed rows and columns, pairs, v_new and what states give to columns to bfloat16. Keys are as they were
    given, the scale is a power of two, gradients of gates or of their parameters are float32, and either strengths may all be 1, or
    sequences are SHORT, so that gates have most of their gradients from the caller's state."""
    o = problem.options
    if o.l2norm or not scaled_by_two(problem) or (o.gate == "log_decay" and problem.gate_dtype != "float32"):
        return False
    ones = o.gate == "log_decay" and o.beta == "given"
    return ones or (exact_q(problem) and problem.B * problem.T < SHORT * problem.N)


def rebuild(problem: Problem, config: Config, device: Any) -> Callable[..., Any] | None:
    """The lender's kernel for the tiles of chunks; None: Triton's, and where what rounding takes from q counts, but with K = 64."""
    half, exact = config.solve_dtype == "float16", exact_q(problem)
    fits = config.chunk == 64 and config.half == 32 and not (exact and (half or problem.K != 64)) and not (half and not config.normed)
    return lent("rebuild", problem, device, fits)


def reverse(problem: Problem, config: Config, device: Any) -> Callable[..., Any] | None:
    """The lender's kernel for the gradient of the state; None: Triton's, and where what rounding takes from q counts, but with K = 64."""
    fits = config.chunk == 64 and config.half == 32 and problem.T > 0 and (problem.K == 64 or not exact_q(problem))
    return lent("reverse", problem, device, fits, needed=records(problem, config, device))


def forward(problem: Problem, config: Config, device: Any) -> Callable[..., Any] | None:
    """The lender's forward of a call that will be differentiated; None: Triton's, and where Triton's tiles are kept."""
    needed = records(problem, config, device)
    fits = config.chunk == 64 and config.half == 32 and problem.T > 0 and (needed or not config.keep)
    return lent("forward", problem, device, fits, fewest(problem, config) <= problem.N * problem.HV, needed)


def records(problem: Problem, config: Config, device: Any) -> bool:
    """The lender's forward leaves its own records to the lender's backward, which need not make anything again. What a forward keeps does
    not depend on how many tokens there are, so neither does this. Either all is computed here, from normalised keys, or log-decays and
    betas are given, with keys of any norm. With a final state the last state is wanted in float32, and that of the caller's as exactly as
    `rebuild` makes its rows."""
    o, asked = problem.options, os.environ.get(VARIABLES["forward"])
    if lender is None or asked == "0" or (asked != "1" and (problem.HV < RECORDED or o.deterministic)):
        return False
    fits = config.chunk == 64 and config.half == 32 and problem.dtype == "bfloat16" and problem.K == problem.V == 128
    alone = problem.needs_grad and o.disable_recompute and not problem.has_initial_state and not o.output_final_state
    if not fits or not alone or exact_chunks(problem, config) or not (o.gate == "log_decay" if o.beta == "given" else config.keeps_states):
        return False
    stages = [what for what in LENT if what != "rebuild"]
    return all(os.environ.get(VARIABLES[what]) != "0" and getattr(lender, LENT[what])(problem, device)[0] is not None for what in stages)


def fewest(problem: Problem, config: Config) -> float:
    """Sequences times value heads, the fewest of which the lender's forward, in one piece or two, is faster than Triton's in parts."""
    o = problem.options
    if problem.K == 64:
        return 40 if config.bounded else 24 if o.l2norm else 16
    if o.gate == "log_decay" and not config.bounded and not o.l2norm:
        return 0
    return 24 if o.l2norm else math.inf


LENT = {"gradient": "chunk_gradient", "rebuild": "chunk_rebuild", "reverse": "reverse", "forward": "kept_forward"}  # by the lender


def lent(what: str, problem: Problem, device: Any, fits: bool, faster: bool = True, needed: bool = False) -> Callable[..., Any] | None:
    """fits: such a call can have it; faster: and gains by it; needed: it reads or leaves records."""
    asked = os.environ.get(VARIABLES[what], "")
    if lender is None or asked == "0" or not fits or not (asked == "1" or needed or (faster and enough(problem))):
        return None
    kernel, reason = getattr(lender, LENT[what])(problem, device)
    if asked == "1" and reason is not None and reason == lender.library.missing():
        raise FileNotFoundError(f"{VARIABLES[what]}=1: {reason}")
    return kernel


def enough(problem: Problem) -> bool:
    """So many tokens that a GPU is faster. Not where results may not depend on their number."""
    return not problem.options.deterministic and problem.B * problem.T * problem.HV >= ENOUGH


def replaced(problem: Problem, config: Config, device: Any) -> tuple[str, ...]:
    """Names of the kernels that a call that will be differentiated, and its backward, do not launch."""
    lenders = dict(forward=forward, rebuild=rebuild, reverse=reverse, gradient=gradient)
    taken = [what for what, lend in lenders.items() if lend(problem, config, device) is not None]
    return tuple(name for what in taken for name in REPLACED[what])
