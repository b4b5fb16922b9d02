"""Triton kernels for NVIDIA and AMD GPUs.

    call        forward, backward and step; how to repeat one; what a first one compiles ahead
    config      how a problem is cut on a chip, from the data in tiles
    host        forward, backward, pool: buffers and launches
    borrowed    kernels of another backend in place of these
    kernels     a file per kernel
    device      what kernels call
    runtime     Triton without KDA

Two launches forward: `prepare` over chunks, `scan` over sequences. Five backward: `rebuild` over chunks, `replay` over segments, `reverse`
over sequences, `products` and `gradient` over chunks; and two short ones. Those over chunks have a twin for bfloat16 and normalised keys.
With disable_recompute `prepare`'s twin and `scan` leave to the backward what `rebuild`'s and `replay` would make again.
Without a GPU they run in Triton's interpreter when TRITON_INTERPRET=1 is set. This file needs neither Triton nor a GPU.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from functools import lru_cache
from types import ModuleType
from typing import Any

from kdakit.backends.triton_gpu import borrowed
from kdakit.backends.triton_gpu.arithmetic import as_computed, overwritten
from kdakit.backends.triton_gpu.config import Chip, Config, chip_of, choose, chosen
from kdakit.backends.triton_gpu.runtime.interpreter import interpreter_asked_for
from kdakit.problem import Arrays, Problem
from kdakit.reference import Result


def supports(problem: Problem, device: Any) -> str | None:
    """Why this backend cannot run `problem` on `device`; None: it can."""
    if _kind(device) != "cuda" and interpreted(device) is None:
        return f"needs a GPU, or TRITON_INTERPRET=1 for Triton's interpreter; the tensors are on {_kind(device)}"
    return unsupported(problem, chip_of(device))


def unsupported(problem: Problem, chip: Chip) -> str | None:
    """Why it cannot run on such a chip, whatever framework calls it."""
    reason = _unusable()
    if reason is not None:
        return reason
    if problem.dtype == "float64" or "float64" in (problem.gate_dtype, problem.beta_dtype, problem.state_dtype):
        return "computes in float32; use backend='torch_native' for float64"
    if problem.varlen == "segment_ids":
        return "takes cu_seqlens, not segment_ids"
    return (overwritten(problem) or waiting(problem, chip)) if problem.needs_grad else None


def unshown(problem: Problem, device: Any) -> str | None:
    """Why 'auto' leaves the problem to others: no GPU of this kind has shown that it is right. Gradients are refused for that reason even
    where the backend is named."""
    return waiting(problem, chip_of(device))


def waiting(problem: Problem, chip: Chip) -> str | None:
    from kdakit.backends.triton_gpu import shown

    return shown.waits(as_computed(problem), chip)


def keeping_if_shown(c: Config, problem: Problem, chip: Chip) -> Config:
    """c, which keeps tiles and states for a backward only if that has been shown on the chip."""
    from kdakit.backends.triton_gpu import shown

    return shown.keeping_if_shown(c, problem, chip)


def borrow(lender: ModuleType) -> None:
    """`lender`: a backend whose kernel for gradients of chunks may take the place of this one's."""
    borrowed.lender = lender


def interpreted(device: Any) -> str | None:
    """Why it would run in Triton's interpreter; None: it would not."""
    return "TRITON_INTERPRET=1 is set: Triton's interpreter, not the GPU" if interpreter_asked_for() else None


def operand_dtype(problem: Problem) -> str:
    """Half-precision inputs go to the matrix units as they are; the token recurrence has no matrix products, but its gradients are those
    of chunks."""
    return problem.dtype if problem.op == "chunk" or problem.needs_grad else "float32"


def default_config(problem: Problem, device: Any) -> Config:
    from kdakit.backends.triton_gpu import widened

    return widened.config_for(problem, chip_of(device))


def expected_us(problem: Problem, device: Any) -> float | None:
    """Microseconds of a forward call, where they are known."""
    from kdakit.backends.triton_gpu import times

    chip = chip_of(device)
    return None if problem.needs_grad else times.expected_us(problem, chip.name, chosen(problem, chip))


def forms(problem: Problem, device: Any) -> tuple[str, ...]:
    """What a problem launches there, as the table of what a chip has shown names it."""
    from kdakit.backends.triton_gpu import shown

    c = default_config(problem, device)
    wide = problem.replace(K=c.wide_K, V=c.wide_V, dtype=c.wide_dtype) if c.wide_K else problem
    return shown.forms(wide, c)


def saved_specs(problem: Problem, device: Any) -> list[tuple[tuple[int, ...], str]]:
    """What `forward` keeps for `backward` beside the inputs."""
    from kdakit.backends.triton_gpu import widened
    from kdakit.backends.triton_gpu.host import backward

    chip = chip_of(device)
    K, V, dtype = widened.run_as(problem, chip)
    problem = problem.replace(K=K, V=V, dtype=dtype)
    return backward.saved_specs(problem, keeping_if_shown(choose(problem.replace(N=1), chip), problem, chip), device)


def forward(problem: Problem, arrays: Arrays, config: Config) -> tuple[Result, list]:
    return _calls(config).forward(problem, arrays, config)


def backward(problem: Problem, arrays: Arrays, saved, d_o, d_final_state, config: Config) -> Arrays:
    return _calls(config).backward(problem, arrays, saved, d_o, d_final_state, config)


def step(problem: Problem, arrays: Arrays, config: Config, final_state: Any = None) -> Result:
    return _calls(config).step(problem, arrays, config, final_state)


def planned(problem: Problem, arrays: Arrays, config: Config, final_state: Any = None) -> tuple[Any, Any]:
    """`forward` or `step`, and a function of the tensors that repeats it, if it can be."""
    return _calls(config).planned(problem, arrays, config, final_state)


def planned_backward(problem: Problem, arrays: Arrays, saved, d_o, d_final_state, config: Config) -> tuple[Arrays, Any]:
    """`backward`, and a function of (*arrays, *saved, d_o, d_final_state) that repeats it, if it can be."""
    return _calls(config).planned_backward(problem, arrays, saved, d_o, d_final_state, config)


def _calls(config: Config) -> Any:
    """What makes such calls: `call`, or `widened` around it."""
    if not config.wide_K:
        return _call()
    from kdakit.backends.triton_gpu import widened

    return widened.InTorch(_call())


@lru_cache
def _call() -> ModuleType:
    """Needs Triton, which is hashed while the kernels are imported."""
    if interpreted(None) is None:
        from kdakit.backends.triton_gpu.runtime import precompile

        precompile.hash_triton()
    from kdakit.backends.triton_gpu import call

    return call


OLDEST = (3, 6)  # before it, what `launch` and `ahead` ask of Triton has other names or is not there


@lru_cache
def _unusable() -> str | None:
    """Why the Triton that is installed cannot be used; its version is looked up, not imported."""
    if importlib.util.find_spec("triton") is None:
        return "needs triton (pip install kdakit[gpu])"
    found = _triton_version()
    numbers = tuple(int(x) for x in re.findall(r"\d+", found)[:2])
    if numbers < OLDEST:
        return f"needs triton {'.'.join(map(str, OLDEST))} or newer, found {found} (pip install -U 'kdakit[gpu]')"
    return None


def _triton_version() -> str:
    for name in ("triton", "pytorch-triton-rocm", "pytorch-triton", "pytorch-triton-xpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return str(importlib.import_module("triton").__version__)


def _kind(device: Any) -> str:
    return getattr(device, "type", str(device)).partition(":")[0]


def pooled() -> Any:
    """The kernels over a pool of states, for kdakit.serving: decode, verify, commit."""
    from kdakit.backends.triton_gpu.host import pool

    return pool
