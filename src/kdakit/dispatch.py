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
saved), `interpreted(device) -> str | None` (why it would run in an interpreter, which 'auto' never picks), `preferred(problem) -> bool`
(whether 'auto' should ask it for a chunked call before those ahead of it), `operand_dtype(problem)` (the dtype in which products take
their factors, for accuracy.py; float32 where absent) and, of a JAX backend, `mixes(problem, config) -> bool` (whether
sequences or heads meet in one product, so that what is not finite must be kept out of it: `kdakit.quarantine`) and, of a torch backend,
`planned(problem, arrays, config, final_state) -> (Result, function | None)`: a call that is not differentiated, and a function of the
tensors that repeats it for others of the same shapes, strides, dtypes, device and addresses modulo 16. One that also has `planned_backward(problem, arrays, saved, d_o, d_final_state, config) -> (Arrays,
function | None)`, whose function takes (*arrays, *saved, d_o, d_final_state), plans chunked calls that are differentiated too: `planned`
then gives and repeats (Result, saved).
"""

from __future__ import annotations

import importlib
import logging
import warnings
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


# In the order in which 'auto' asks them, those that prefer the problem first.
BACKENDS = (
    Backend("triton_gpu", "torch", "kdakit.backends.triton_gpu", "Triton kernels, NVIDIA and AMD GPUs; forward, backward and decode"),
    Backend("cuda", "torch", "kdakit.backends.cuda", "CUDA C++ kernels, NVIDIA GPUs; forward, float32; bfloat16 on Hopper"),
    Backend("torch_native", "torch", "kdakit.backends.torch_native", "vectorised PyTorch, any device"),
    Backend("pallas_tpu", "jax", "kdakit.backends.pallas_tpu", "Mosaic kernels, TPUs"),
    Backend("cuda_ffi", "jax", "kdakit.backends.cuda.ffi", "the CUDA C++ kernels as an XLA custom call; float32; bfloat16 on Hopper"),
    Backend("xla", "jax", "kdakit.backends.xla", "pure JAX, any XLA device"),
)

# One library, two frameworks: each may call it by its plain name.
ALIASES = {("jax", "cuda"): "cuda_ffi"}


def names(framework: str | None = None) -> list[str]:
    return [b.name for b in BACKENDS if framework in (None, b.framework)]


_loaded: dict[str, ModuleType] = {}


def load(name: str) -> ModuleType:
    """The backend's module, imported on first use."""
    if name in _loaded:
        return _loaded[name]
    for backend in BACKENDS:
        if backend.name == name:
            # Not what sys.modules has: another thread may be in the middle of importing it, for which import_module waits.
            _loaded[name] = importlib.import_module(backend.module)
            return _loaded[name]
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
    if problem.op == "chunk":
        candidates = sorted(candidates, key=lambda name: not preferred(name, problem))
    for name in candidates:
        reason = supports(name, problem, device) or interpreted(name, device)
        if reason is None:
            _warn_if_slow(name, device, refusals)
            log.debug("%s on %s: %s%s", problem, device, name, f" (not {'; '.join(refusals)})" if refusals else "")
            return load(name)
        refusals.append(f"{name}: {reason}")
    raise ValueError(f"no {framework} backend can run this call on {device}: {'; '.join(refusals)} ({problem})")


SLOW = ("torch_native", "xla")  # they run anywhere, and are fast on no GPU
_warned: set[str] = set()


def _warn_if_slow(name: str, device: Any, refusals: list[str]) -> None:
    """Once a process and reason: on a GPU 'auto' has nothing left but a backend that is slow there."""
    kind = getattr(device, "type", str(device)).partition(":")[0]
    reasons = "; ".join(refusals)
    if name not in SLOW or kind not in ("cuda", "gpu", "rocm") or reasons in _warned:
        return
    _warned.add(reasons)
    warnings.warn(f"backend='auto' fell back to {name!r}, which is slow on a GPU, for a call on {device}, because {reasons}. `kdakit doctor` "
                  f"shows what this machine can run; name backend={name!r} to say that you mean it", RuntimeWarning, stacklevel=3)  # fmt: skip


def preferred(name: str, problem: Problem) -> bool:
    module = load(name)
    return hasattr(module, "preferred") and module.preferred(problem)


def interpreted(name: str, device: Any) -> str | None:
    module = load(name)
    return module.interpreted(device) if hasattr(module, "interpreted") else None
