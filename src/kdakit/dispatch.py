"""Backends by name, and which of them runs a problem.

A backend is a module with

    supports(problem, device) -> str | None        why it cannot run this problem there; None: it can
    default_config(problem, device)                how it would run it (tile sizes and the like); plain Python, no device needed
    forward(problem, arrays, config) -> (Result, saved)
    backward(problem, arrays, saved, d_o, d_final_state, config) -> Arrays          or None
    step(problem, arrays, config) -> Result                                         or None: the token recurrence; of a torch backend
                                                                also with final_state=, where the state goes, perhaps over the initial one
    saved_specs(problem, device) -> [(shape, dtype name)]       torch backends: the tensors that `forward` saves when problem.needs_grad

and, where they apply, `gradients` (the name of the backend that differentiates this one's calls, where `backward` is None; it gets nothing
saved), `interpreted(device) -> str | None` (why it would run in an interpreter, which 'auto' never picks), `expected_us(problem, device) ->
float | None` (the microseconds of a chunked call by a closed form with the chip's constants, where it knows: of those that do 'auto' takes
the fastest; `timed` below), `operand_dtype(problem)` (the dtype in which products take their factors, for accuracy.py; float32 where
absent) and, of a torch backend, `planned(problem, arrays, config, final_state) -> (Result, function | None)`: a call that is not
differentiated, and a function of the tensors that repeats it for others of the same shapes, strides, dtypes, device and addresses modulo
16. One that also has `planned_backward(problem, arrays, saved, d_o, d_final_state, config) -> (Arrays,
function | None)`, whose function takes (*arrays, *saved, d_o, d_final_state), plans chunked calls that are differentiated too: `planned`
then gives and repeats (Result, saved).
"""

from __future__ import annotations

import importlib
import logging
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from kdakit.problem import Problem, check_backend_name

log = logging.getLogger("kdakit")


@dataclass(frozen=True)
class Backend:
    name: str
    framework: str  # "torch" or "jax"
    module: str
    summary: str
    timed: bool = False  # has `expected_us`


# In the order in which 'auto' asks them: the first that can, or a faster one behind it.
BACKENDS = (
    Backend(
        "triton_gpu", "torch", "kdakit.backends.triton_gpu", "Triton kernels, NVIDIA and AMD GPUs; forward, backward and decode", timed=True
    ),
    Backend("cuda", "torch", "kdakit.backends.cuda", "CUDA C++ kernels, NVIDIA GPUs; forward, float32; bfloat16 on Hopper", timed=True),
    Backend("torch_native", "torch", "kdakit.backends.torch_native", "vectorised PyTorch, any device"),
    Backend("pallas_tpu", "jax", "kdakit.backends.pallas_tpu", "Mosaic kernels, TPUs"),
    Backend("cuda_ffi", "jax", "kdakit.backends.cuda.ffi", "the CUDA C++ kernels as an XLA custom call; float32; bfloat16 on Hopper"),
    Backend("xla", "jax", "kdakit.backends.xla", "pure JAX, any XLA device"),
)

# One library, two frameworks: each may call it by its plain name.
ALIASES = {("jax", "cuda"): "cuda_ffi"}


def names(framework: str | None = None) -> list[str]:
    return [b.name for b in BACKENDS if framework in (None, b.framework)]


def load(name: str) -> ModuleType:
    """The backend's module, imported on first use."""
    for backend in BACKENDS:
        if backend.name == name:
            return sys.modules.get(backend.module) or importlib.import_module(backend.module)
    raise ValueError(f"backend must be one of {', '.join(names())}, got {name!r}")


def supports(name: str, problem: Problem, device: Any) -> str | None:
    """Why backend `name` cannot run `problem` on `device`, including what its module does not offer; None: it can."""
    module = load(name)
    if problem.op == "recurrent" and module.step is None:
        return "has no token recurrence"
    if problem.needs_grad and module.backward is None and not hasattr(module, "gradients"):
        return "has no backward"
    return module.supports(problem, device)


def differentiates(module: ModuleType) -> ModuleType:
    """The module whose `backward` goes with `module`'s forward."""
    return load(module.gradients) if module.backward is None else module


def operand_dtype(name: str, problem: Problem) -> str:
    module = load(name)
    return module.operand_dtype(problem) if hasattr(module, "operand_dtype") else "float32"


def select(framework: str, problem: Problem, device: Any, backend: str = "auto") -> ModuleType:
    """The module that runs `problem`: the one named, or the first that can."""
    check_backend_name(backend)
    candidates = names(framework)
    backend = ALIASES.get((framework, backend), backend)
    if backend != "auto":
        if backend not in candidates:
            raise ValueError(f"backend must be 'auto' or one of {', '.join(candidates)} for {framework}, got {backend!r}")
        reason = supports(backend, problem, device)
        if reason is not None:
            raise ValueError(f"backend {backend!r} cannot run this call on {device}: {reason} ({problem})")
        return load(backend)
    refusals: list[str] = []
    for name in candidates:
        reason = supports(name, problem, device) or interpreted(name, device)
        if reason is None:
            name, why = fastest(name, framework, problem, device)
            log.debug("%s on %s: %s%s%s", problem, device, name, why, f" (not {'; '.join(refusals)})" if refusals else "")
            return load(name)
        refusals.append(f"{name}: {reason}")
    raise ValueError(f"no {framework} backend can run this call on {device}: {'; '.join(refusals)} ({problem})")


# A call that must not depend on its company is judged as this many sequences of so many tokens, whatever it holds.
USUAL_COMPANY, USUAL_TOKENS = 32, 1024


def fastest(first: str, framework: str, problem: Problem, device: Any) -> tuple[str, str]:
    """(`first` or a backend behind it that is expected to be faster, why): by `expected_us`, where both know it."""
    if problem.op != "chunk" or not isinstance(problem.B * problem.T * problem.N, int):  # sizes of torch.compile need not be known yet
        return first, ""
    judged = problem
    if problem.options.deterministic:
        judged = problem.replace(B=1, N=USUAL_COMPANY, T=USUAL_COMPANY * USUAL_TOKENS, varlen="cu_seqlens")
    known = [b.name for b in BACKENDS if b.framework == framework]
    later = [b.name for b in BACKENDS if b.timed and b.name in known[known.index(first) :]]
    if first not in later or len(later) == 1:
        return first, ""
    times = {}
    for name in later:
        if name == first or (supports(name, problem, device) or interpreted(name, device)) is None:
            times[name] = load(name).expected_us(judged, device)
    times = {name: us for name, us in times.items() if us is not None}
    if first not in times:
        return first, ""
    best = min(times, key=times.__getitem__)
    return best, f" (expected us: {', '.join(f'{name} {us:.0f}' for name, us in times.items())})"


def interpreted(name: str, device: Any) -> str | None:
    module = load(name)
    return module.interpreted(device) if hasattr(module, "interpreted") else None
