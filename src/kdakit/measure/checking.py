"""Run one (backend, case, dtype) through the public frontends and hold the numbers against the truth.

`kdakit verify`, `kdakit demo` and the contract test all go through here, so they measure the same thing.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from kdakit import accuracy, dispatch
from kdakit.cases import Case
from kdakit.problem import DIFFERENTIABLE, Arrays, Problem

OUTPUTS = ("o", "final_state", "states")
CALLS = {"chunk": "chunk_kda", "recurrent": "fused_recurrent_kda"}
COMPILER_OPTIONS: dict[str, Any] | None = None  # of XLA, for JAX backends that are not interpreted; None: whatever XLA_FLAGS says


class Row(NamedTuple):
    """One output of one run: its error, that of the plain recurrence, and what the rule allows."""

    name: str
    error: float
    plain: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance

    @property
    def used(self) -> float:
        """The share of the tolerance that is used up; above 1 is a failure."""
        return self.error / self.tolerance


def framework_of(backend: str) -> str:
    for entry in dispatch.BACKENDS:
        if entry.name == backend:
            return entry.framework
    raise ValueError(f"backend must be one of {', '.join(dispatch.names())}, got {backend!r}")


def default_device(framework: str) -> Any:
    """Where `run_case` puts its arrays, as the frontends name it to `supports`: the first accelerator, or the CPU."""
    if framework == "torch":
        import torch

        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    import jax

    return jax.default_backend()


def interpreted(backend: str) -> str | None:
    """Why this backend would run in an interpreter here; None: it would not, or cannot run at all. Never raises."""
    framework = framework_of(backend)
    if importlib.util.find_spec(framework) is None:
        return None
    try:
        return dispatch.load(backend).interpreted(default_device(framework))
    except Exception:
        return None


def native_backends() -> list[str]:
    """The backends that are not interpreted here: what a command takes where none is named."""
    return [name for name in dispatch.names() if interpreted(name) is None]


def refusal(backend: str, case: Case, dtype: str, op: str = "chunk", grad: bool = False) -> str | None:
    """Why this combination cannot run here; None: it can. Never raises."""
    framework = framework_of(backend)
    if importlib.util.find_spec(framework) is None:
        return f"{framework} is not installed: pip install 'kdakit[{framework}]'"
    if case.segments and framework != "jax":
        return f"kdakit.{framework} takes no segment_ids"
    try:
        return dispatch.supports(backend, case.problem(dtype, op, grad), default_device(framework))
    except Exception as problem:
        return f"cannot be loaded: {type(problem).__name__}: {problem}"


def run_case(
    backend: str, case: Case, dtype: str = "float32", seed: int = 0, grad: bool = True, op: str = "chunk"
) -> dict[str, np.ndarray]:
    """{name: float64 array} of o, final_state and, with `grad`, the gradient of every input by the input's name."""
    return run_arrays(backend, case, dtype, case.arrays(dtype, seed), case.cotangents(dtype) if grad else None, op)


def run_arrays(backend: str, case: Case, dtype: str, arrays: Arrays, cotangents=None, op: str = "chunk") -> dict[str, np.ndarray]:
    """`run_case` on arrays of the caller's; `case` gives options and dtypes. With return_intermediate_states there are `states` too."""
    run = {"torch": _run_torch, "jax": _run_jax}[framework_of(backend)]
    return run(backend, case, dtype, arrays, cotangents, op)


def call(framework: str, backend: str, case: Case, op: str):
    """The public call as a function of the arrays alone: call(arrays) -> (o, final_state[, states])."""
    return _call(framework, backend, case.call_options, op)


def _call(framework: str, backend: str, options: dict[str, Any], op: str):
    function = getattr(importlib.import_module(f"kdakit.{framework}"), CALLS[op])
    takes = inspect.signature(function).parameters
    # The token recurrence has no chunks: options that only steer them may be absent there.
    options = {n: x for n, x in options.items() if n in takes or n not in ("chunk_size", "disable_recompute")}

    def run(arrays: Arrays):
        given = {name: x for name, x in arrays._asdict().items() if x is not None}
        return function(**given, **options, backend=backend)

    return run


def to_torch(arrays: Arrays, dtypes: Arrays, device: Any) -> Arrays:
    """The same values as torch tensors, bit for bit: they are exact in the dtypes they go to."""
    import torch

    def convert(x, dtype):
        return None if x is None else torch.from_numpy(np.ascontiguousarray(x)).to(device=device, dtype=getattr(torch, dtype))

    return Arrays(*(convert(x, dtype) for x, dtype in zip(arrays, dtypes, strict=True)))


def to_jax(arrays: Arrays, dtypes: Arrays) -> Arrays:
    """The same values as JAX arrays, bit for bit; integers are int32 unless 64-bit types are on."""
    import jax
    import jax.numpy as jnp

    def convert(x, dtype):
        if dtype == "int64" and not jax.config.jax_enable_x64:
            dtype = "int32"
        return None if x is None else jnp.asarray(np.asarray(x).astype(jnp.dtype(dtype)))

    return Arrays(*(convert(x, dtype) for x, dtype in zip(arrays, dtypes, strict=True)))


def jax_precision(dtype: str):
    """The context in which JAX computes in `dtype`: float64 exists only with 64-bit types switched on."""
    import jax

    return jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()


def _run_torch(backend, case, dtype, arrays, cotangents, op):
    return run_torch(call("torch", backend, case, op), case, dtype, arrays, cotangents)


def run_torch(function, case: Case, dtype: str, arrays: Arrays, cotangents=None) -> dict[str, np.ndarray]:
    """`run_arrays` for a torch function of the arrays, ours or another's."""
    import torch

    device = default_device("torch")
    tensors = to_torch(arrays, case.dtypes(dtype), device)
    named = {n: getattr(tensors, n) for n in DIFFERENTIABLE if getattr(tensors, n) is not None}
    for x in named.values():
        x.requires_grad_(cotangents is not None)
    out = dict(zip(OUTPUTS, function(tensors), strict=False))
    out = {n: x for n, x in out.items() if x is not None}
    results = {n: x.detach().to("cpu", torch.float64).numpy() for n, x in out.items()}
    if cotangents is not None:
        seeds = dict(zip(("o", "final_state"), cotangents, strict=True))
        reached = [n for n in out if out[n].requires_grad]
        weights = [torch.from_numpy(seeds[n]).to(out[n]) for n in reached]
        gradients = torch.autograd.grad([out[n] for n in reached], list(named.values()), weights, allow_unused=True)
        for (name, x), d in zip(named.items(), gradients, strict=True):
            results[name] = np.zeros(x.shape) if d is None else d.to("cpu", torch.float64).numpy()
    return results


def _run_jax(backend, case, dtype, arrays, cotangents, op):
    import jax.numpy as jnp

    with jax_precision(dtype):
        given = to_jax(arrays, case.dtypes(dtype))
        inputs = {n: getattr(given, n) for n in DIFFERENTIABLE if getattr(given, n) is not None}
        rest = {n: x for n, x in given._asdict().items() if x is not None and n not in inputs}
        forward, with_gradients = _jax_functions(backend, tuple(sorted(case.call_options.items())), op)
        if cotangents is None:
            results = forward(inputs, rest)
        else:
            out, gradients = with_gradients(inputs, rest, *(jnp.asarray(d) for d in cotangents))
            results = out | gradients
        return {n: np.asarray(x).astype(np.float64) for n, x in results.items()}


@lru_cache(maxsize=64)
def _jax_functions(backend: str, call_options: tuple[tuple[str, Any], ...], op: str):
    """The jitted call, and the call with its gradients. Kept: cases of equal sizes and options differ in values only."""
    import jax
    import jax.numpy as jnp

    function = _call("jax", backend, dict(call_options), op)

    def forward(inputs, rest):
        arrays = Arrays(**dict.fromkeys(Arrays._fields) | inputs | rest)
        return {n: x for n, x in zip(OUTPUTS, function(arrays), strict=False) if x is not None}

    def with_gradients(inputs, rest, d_o, d_final_state):
        out, pullback = jax.vjp(lambda inputs: forward(inputs, rest), inputs)
        seeds = {"o": d_o, "final_state": d_final_state}
        return out, pullback({n: seeds[n].astype(x.dtype) if n in seeds else jnp.zeros_like(x) for n, x in out.items()})[0]

    options = quick_options() if interpreted(backend) else COMPILER_OPTIONS
    return jax.jit(forward, compiler_options=options), jax.jit(with_gradients, compiler_options=options)


def quick_options() -> dict[str, Any]:
    """XLA's for an interpreted kernel, a large program that runs once or twice: compiling it dearly does not pay. An option that XLA does
    not know is an error, and after JAX 0.10 it has no fusion emitters to do without."""
    emitters = {"xla_cpu_use_fusion_emitters": False} if importlib.metadata.version("jax").startswith("0.10.") else {}
    return {"xla_backend_optimization_level": 0} | emitters


class Expected(NamedTuple):
    truth: dict[str, np.ndarray]
    plain: dict[str, float]


def expect(problem: Problem, arrays: Arrays, cotangents=None, operand_dtype: str = "float32") -> Expected:
    """The float64 truth of every output and the plain recurrence's error against it. `cotangents` None: no gradients."""
    seeds = cotangents or (None, None)
    if not problem.options.output_final_state:
        seeds = (seeds[0], None)
    truth = accuracy.truths(problem, arrays, *seeds)
    return Expected(truth, accuracy.plain_errors(problem, arrays, truth, *seeds, operand_dtype=operand_dtype))


def compare(
    problem: Problem, arrays: Arrays, results: dict, cotangents=None, operand_dtype: str = "float32", expected: Expected | None = None
) -> list[Row]:
    """A row per output that is due; one that is missing has infinite error. `expected` saves computing the truth twice."""
    truth, plain = expected or expect(problem, arrays, cotangents, operand_dtype)
    return _rows(problem, _errors(problem, results, truth), plain)


def compare_quickly(problem: Problem, arrays: Arrays, results: dict, cotangents=None, operand_dtype: str = "float32") -> list[Row]:
    """`compare`, with the same verdict: no more of the plain recurrence is run than it takes to see that everything is within."""
    seeds = cotangents or (None, None)
    if not problem.options.output_final_state:
        seeds = (seeds[0], None)
    truth = accuracy.truths(problem, arrays, *seeds)
    errors, nothing = _errors(problem, results, truth), dict.fromkeys(truth, 0.0)

    def enough(plain: dict[str, float]) -> bool:
        return all(row.ok for row in _rows(problem, errors, plain))

    hopeless = not all(np.isfinite(error) for error in errors.values())
    if hopeless or enough(nothing):
        return _rows(problem, errors, nothing)
    plain = accuracy.plain_errors(problem, arrays, truth, *seeds, operand_dtype=operand_dtype, enough=enough)
    return _rows(problem, errors, plain)


def _errors(problem: Problem, results: dict, truth: dict) -> dict[str, float]:
    dtypes = accuracy.output_dtypes(problem)
    return {n: accuracy.error(results[n], x, dtypes[n]) if n in results else float("inf") for n, x in truth.items()}


def _rows(problem: Problem, errors: dict[str, float], plain: dict[str, float]) -> list[Row]:
    dtypes = accuracy.output_dtypes(problem)
    return [Row(name, error, plain[name], accuracy.tolerance(plain[name], dtypes[name])) for name, error in errors.items()]


def check(backend: str, case: Case, dtype: str = "float32", seed: int = 0, grad: bool = True, op: str = "chunk") -> list[Row]:
    """`run_case` and `compare_quickly` in one."""
    problem, arrays = case.problem(dtype, op, grad), case.arrays(dtype, seed)
    cotangents, results = case.cotangents(dtype) if grad else None, run_case(backend, case, dtype, seed, grad, op)
    return compare_quickly(problem, arrays, results, cotangents, dispatch.operand_dtype(backend, problem))
