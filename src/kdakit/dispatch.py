"""Backends by name, the names that a backend has, and which backend runs a problem.

A backend is a module with the names of CONTRACT. `load` gives it the defaults of those it does not define, so that callers just use them.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

from kdakit.problem import Problem, check_backend_name

log = logging.getLogger("kdakit")


@dataclass(frozen=True)
class Backend:
    name: str
    framework: str  # "torch" or "jax"
    module: str
    summary: str


class Name(NamedTuple):
    """A name of the contract; `default` is what a module without it gets, REQUIRED where there is none."""

    form: str
    meaning: str
    default: Any


REQUIRED: Any = object()


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_: answer


# docs/adding-a-backend.md shows this table; a test holds the two together.
CONTRACT = {
    "supports": Name(
        "(problem, device) -> str | None",
        "Why it cannot run this problem there; None: it can. Users read the string in errors, `doctor`, test skips and docs.",
        REQUIRED,
    ),
    "default_config": Name(
        "(problem, device) -> Any",
        "How it would run it: tile sizes and the like. Plain Python, testable without a device.",
        REQUIRED,
    ),
    "forward": Name(
        "(problem, arrays, config) -> (Result, saved)",
        "o, final state, intermediate states; and what `backward` wants to keep, where `problem.needs_grad`.",
        REQUIRED,
    ),
    "backward": Name(
        "(problem, arrays, saved, d_o, d_final_state, config) -> Arrays",
        "Gradients, in the fields of their inputs. None: it has no backward.",
        None,
    ),
    "gradients": Name(
        "str",
        "The backend that differentiates this one's calls, where `backward` is None. It gets nothing saved.",
        None,
    ),
    "step": Name(
        "(problem, arrays, config) -> Result",
        "The token recurrence; in PyTorch also with `final_state=`, where the state goes, perhaps over the initial one. None: it has none.",
        None,
    ),
    "saved_specs": Name(
        "(problem, device) -> [(shape, dtype name)]",
        "PyTorch: the tensors that `forward` saves where `problem.needs_grad`, for `torch.compile`. Default: none.",
        _always(()),
    ),
    "operand_dtype": Name(
        "(problem) -> str",
        "The dtype in which products take their factors, for the accuracy rule. Default: float32.",
        _always("float32"),
    ),
    "interpreted": Name(
        "(device) -> str | None",
        "Why it would run in an interpreter there, which `auto` never picks. Default: it would not.",
        _always(None),
    ),
    "unshown": Name(
        "(problem, device) -> str | None",
        "Why no such device has shown the problem to be right yet, which `auto` waits for. Default: nobody need ask.",
        _always(None),
    ),
    "expected_us": Name(
        "(problem, device) -> float | None",
        "Microseconds of a chunked call by a closed form with the chip's constants; of the backends that know theirs `auto` takes the "
        "fastest. Default: not known.",
        _always(None),
    ),
    "mixes": Name(
        "(problem, config) -> bool",
        "JAX: whether sequences or heads meet in one product, so that what is not finite must be kept out of it. Default: no.",
        _always(False),
    ),
    "folds": Name(
        "bool",
        "JAX: whether its kernels cannot be mapped, so that mapped calls become a larger batch. All that its `forward` saves then begins "
        "with B, and its `backward` takes `parts=`: gradients of A_log and dt_bias in so many parts of the batch. Default: no.",
        False,
    ),
    "forms": Name(
        "(problem, device) -> [str]",
        "What it launches for such a problem, as the table of what a chip has shown names it. Default: nothing that is asked for there.",
        _always(()),
    ),
    "planned": Name(
        "(problem, arrays, config, final_state) -> (Result, function | None)",
        "PyTorch: a call that is not differentiated, and a function of the tensors that repeats it for others of the same shapes, strides, "
        "dtypes, device and addresses modulo 16. None: it plans nothing.",
        None,
    ),
    "planned_backward": Name(
        "(problem, arrays, saved, d_o, d_final_state, config) -> (Arrays, function | None)",
        "PyTorch: the same for a backward; its function takes `(*arrays, *saved, d_o, d_final_state)`. `planned` then plans calls that are "
        "differentiated too, and gives and repeats `(Result, saved)`. None: it plans no backward.",
        None,
    ),
    "borrow": Name(
        "(backend module) -> None",
        "Told of the backend that LENDERS names, of which it may use kernels inside its own calls. Default: it borrows nothing.",
        _always(None),
    ),
    "pooled": Name(
        "() -> kernels",
        "Kernels over a pool of states, with `decode`, `verify` and `commit`; in JAX also `takes` and `unshown`. None: states "
        "are gathered around `step`.",
        None,
    ),
}


# In the order in which 'auto' asks them: the first that can, or a faster one behind it.
BACKENDS = (
    Backend("triton_gpu", "torch", "kdakit.backends.triton_gpu", "Triton kernels, NVIDIA and AMD GPUs; forward, backward and decode"),
    Backend("cuda", "torch", "kdakit.backends.cuda", "CUDA C++ kernels, NVIDIA GPUs; forward, float32; bfloat16 on Hopper"),
    Backend("torch_native", "torch", "kdakit.backends.torch_native", "vectorised PyTorch, any device"),
    Backend("pallas_tpu", "jax", "kdakit.backends.pallas_tpu", "Mosaic kernels, TPUs"),
    Backend("triton_ffi", "jax", "kdakit.backends.triton_gpu.ffi", "the Triton kernels as one XLA custom call; needs torch too"),
    Backend("cuda_ffi", "jax", "kdakit.backends.cuda.ffi", "the CUDA C++ kernels as an XLA custom call; float32; bfloat16 on Hopper"),
    Backend("xla", "jax", "kdakit.backends.xla", "pure JAX, any XLA device"),
)

# The same kernels in two frameworks: each may call them by their plain name.
ALIASES = {("jax", "cuda"): "cuda_ffi", ("jax", "triton_gpu"): "triton_ffi"}

# Backends that may use kernels of another one inside their own calls: they do not import each other.
LENDERS = {"triton_gpu": "cuda", "triton_ffi": "cuda"}


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
            module = complete(importlib.import_module(backend.module))
            if name in LENDERS:
                module.borrow(load(LENDERS[name]))
            _loaded[name] = module
            return module
    raise ValueError(f"backend must be one of {', '.join(names())}, got {name!r}")


def complete(module: ModuleType) -> ModuleType:
    """`module` with the defaults of CONTRACT for what it does not define."""
    for name, (form, _, default) in CONTRACT.items():
        if not hasattr(module, name):
            if default is REQUIRED:
                raise AttributeError(f"backend module {module.__name__} must define {name}: {form}")
            setattr(module, name, default)
    return module


def supports(name: str, problem: Problem, device: Any) -> str | None:
    """Why backend `name` cannot run `problem` on `device`, including what its module does not offer; None: it can."""
    module = load(name)
    if problem.op == "recurrent" and module.step is None:
        return "has no token recurrence"
    if problem.needs_grad and module.backward is module.gradients is None:
        return "has no backward"
    return module.supports(problem, device)


def differentiates(module: ModuleType) -> ModuleType:
    """The module whose `backward` goes with `module`'s forward."""
    return load(module.gradients) if module.backward is None else module


def operand_dtype(name: str, problem: Problem) -> str:
    return load(name).operand_dtype(problem)


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
    choice = explain(framework, problem, device)
    refusals = "; ".join(choice.refusals)
    if choice.name is None:
        raise ValueError(f"no {framework} backend can run this call on {device}: {refusals} ({problem})")
    _warn_if_slow(choice.name, device, refusals)
    log.debug("%s on %s: %s%s%s", problem, device, choice.name, choice.times, f" (not {refusals})" if refusals else "")
    return load(choice.name)


class Choice(NamedTuple):
    """What 'auto' takes, and why."""

    name: str | None  # None: nobody can run it
    times: str  # what it and others behind it are expected to take, where they know
    refusals: list[str]  # "name: reason" of each before it


def explain(framework: str, problem: Problem, device: Any) -> Choice:
    """What 'auto' takes for `problem`: the first that can run it, or one behind it that is expected to be faster."""
    refusals: list[str] = []
    for name in names(framework):
        reason = _not_for_auto(name, problem, device)
        if reason is None:
            return Choice(*fastest(name, framework, problem, device), refusals)
        refusals.append(f"{name}: {reason}")
    return Choice(None, "", refusals)


def select_pooled(framework: str, problem: Problem, device: Any, backend: str = "auto") -> ModuleType:
    """`select`, but where 'auto' would take a backend without kernels over pools, one that has them and can run `problem`: the other would
    have to copy the states out and back."""
    module = select(framework, problem, device, backend)
    if backend == "auto" and module.pooled is None:
        for name in names(framework):
            if load(name).pooled is not None and _not_for_auto(name, problem, device) is None:
                return load(name)
    return module


def _not_for_auto(name: str, problem: Problem, device: Any) -> str | None:
    module = load(name)
    return supports(name, problem, device) or module.interpreted(device) or module.unshown(problem, device)


# A call that must not depend on its company is judged as this many sequences of so many tokens, whatever it holds.
USUAL_COMPANY, USUAL_TOKENS = 32, 1024

SLOW = ("torch_native", "xla")  # they run anywhere, and are fast on no GPU
_warned: set[str] = set()


def _warn_if_slow(name: str, device: Any, reasons: str) -> None:
    """Once a process and reason: on a GPU 'auto' has nothing left but a backend that is slow there."""
    kind = getattr(device, "type", str(device)).partition(":")[0]
    if name not in SLOW or kind not in ("cuda", "gpu", "rocm") or reasons in _warned:
        return
    _warned.add(reasons)
    message = (
        f"backend='auto' fell back to {name!r}, which is slow on a GPU, for a call on {device}, because {reasons}. "
        f"`kdakit doctor` shows what this machine can run; name backend={name!r} to say that you mean it"
    )
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def fastest(first: str, framework: str, problem: Problem, device: Any) -> tuple[str, str]:
    """(`first` or a backend behind it that is expected to be faster, why): by `expected_us`, where both know it."""
    if problem.op != "chunk" or not isinstance(problem.B * problem.T * problem.N, int):  # sizes of torch.compile need not be known yet
        return first, ""
    judged = problem
    if problem.options.deterministic:
        judged = problem.replace(B=1, N=USUAL_COMPANY, T=USUAL_COMPANY * USUAL_TOKENS, varlen="cu_seqlens")
    candidates = names(framework)
    times = {}
    for name in candidates[candidates.index(first) :]:
        if name == first or _not_for_auto(name, problem, device) is None:
            times[name] = load(name).expected_us(judged, device)
    times = {name: us for name, us in times.items() if us is not None}
    if first not in times:
        return first, ""
    best = min(times, key=times.__getitem__)
    return best, f" (expected us: {', '.join(f'{name} {us:.0f}' for name, us in times.items())})"
