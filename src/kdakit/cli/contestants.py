"""What `kdakit bench` can time: every backend through its public frontend, and peers where they are installed.

All contestants get the same inputs. `prepare` returns a function that runs one call to its end and returns o.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from kdakit.cases import SHAPES, Case, Shape
from kdakit.cli import checking
from kdakit.cli.choices import UsageError
from kdakit.problem import DIFFERENTIABLE

MODES = ("fwd", "fwdbwd", "decode")
GATES = ("bounded", "softplus", "log_decay")
PEERS = ("fla", "fla_chunk")  # flash-linear-attention: its readable references, and its Triton kernels


class Unavailable(Exception):
    """Why a contestant cannot take part."""


@dataclass(frozen=True)
class Job:
    """One thing to time, for any contestant."""

    shape: Shape
    mode: str = "fwd"
    dtype: str = "float32"
    gate: str = "bounded"

    @property
    def op(self) -> str:
        return "recurrent" if self.mode == "decode" else "chunk"

    @property
    def tokens(self) -> int:
        return self.shape.B * (1 if self.mode == "decode" else self.shape.T)

    def case(self) -> Case:
        """`shape` as a case; decode takes one token of each of B sequences."""
        shape = replace(self.shape, T=1, lengths=()) if self.mode == "decode" else self.shape
        case = shape.case(bounded=self.gate == "bounded")
        if self.gate != "log_decay":
            return case
        return replace(case, gate="mild", beta="uniform", A_log=False, dt_bias=False, options={"chunk_size": 64})


def parse_shape(text: str) -> Shape:
    """A name of cases.SHAPES, or BxTxHxK."""
    if text in SHAPES:
        return SHAPES[text]
    parts = text.lower().split("x")
    if len(parts) != 4 or not all(p.isdigit() and int(p) > 0 for p in parts):
        raise UsageError(f"--shape must be one of {', '.join(SHAPES)} or BxTxHxK such as 1x2048x4x128, got {text!r}")
    return Shape(*map(int, parts))


def prepare(name: str, job: Job) -> Callable[[], Any]:
    """A function that does the job once and waits for the result; raises Unavailable with the reason."""
    if name in PEERS:
        return _prepare_fla(job) if name == "fla" else _prepare_fla_chunk(job)
    if (why := checking.interpreted(name)) is not None:
        raise Unavailable(f"{why}, and the time of an interpreter says nothing")
    case, grad = job.case(), job.mode == "fwdbwd"
    tiny = replace(job.shape, T=1, lengths=())
    # The answer depends on sizes and options only: ask about a one-token copy, draw the real arrays once.
    reason = checking.refusal(name, replace(job, shape=tiny).case() if not job.shape.lengths else case, job.dtype, job.op, grad)
    if reason is not None:
        raise Unavailable(reason)
    arrays, cotangents = case.arrays(job.dtype), case.cotangents(job.dtype) if grad else None
    framework = checking.framework_of(name)
    function = checking.call(framework, name, case, job.op)
    if framework == "torch":
        device = checking.default_device("torch")
        return _torch_runner(function, checking.to_torch(arrays, case.dtypes(job.dtype), device), cotangents)
    return _jax_runner(function, arrays, case.dtypes(job.dtype), cotangents, job.dtype)


def _torch_runner(function, tensors, cotangents):
    import torch

    wait = torch.cuda.synchronize if tensors.q.device.type == "cuda" else lambda: None
    if cotangents is None:

        def forward():
            with torch.no_grad():
                o, _ = function(tensors)
            wait()
            return o

        return forward

    inputs = [x.requires_grad_() for x in (getattr(tensors, n) for n in DIFFERENTIABLE) if x is not None]
    like = (tensors.v, tensors.initial_state)
    seeds = [torch.from_numpy(d).to(device=x.device, dtype=x.dtype) for d, x in zip(cotangents, like, strict=True)]

    def forward_backward():
        outputs = function(tensors)
        torch.autograd.grad(outputs, inputs, seeds)
        wait()
        return outputs[0].detach()

    return forward_backward


def _jax_runner(function, arrays, dtypes, cotangents, dtype):
    import jax

    with checking.jax_precision(dtype):
        given = checking.to_jax(arrays, dtypes)
    names = [n for n in DIFFERENTIABLE if getattr(given, n) is not None]
    values = tuple(getattr(given, n) for n in names)

    def forward(*values):
        return tuple(function(given._replace(**dict(zip(names, values, strict=True)))))

    def forward_backward(seeds, *values):
        outputs, pullback = jax.vjp(forward, *values)
        return outputs, pullback(tuple(d.astype(x.dtype) for d, x in zip(seeds, outputs, strict=True)))

    step = jax.jit(forward if cotangents is None else forward_backward)
    with checking.jax_precision(dtype):
        leading = () if cotangents is None else (tuple(jax.numpy.asarray(d) for d in cotangents),)

    def run():
        with checking.jax_precision(dtype):
            out = jax.block_until_ready(step(*leading, *values))
        return out[0] if cotangents is None else out[0][0]

    return run


def load_fla() -> ModuleType:
    """FLA's readable references, loaded from their file: importing fla.ops.kda itself needs Triton and a GPU."""
    package = importlib.util.find_spec("fla")
    if package is None or not package.submodule_search_locations:
        raise Unavailable("fla is not installed: pip install fla-core")
    path = Path(package.submodule_search_locations[0]) / "ops" / "kda" / "naive.py"
    if not path.is_file():
        raise Unavailable("the installed fla has no ops/kda/naive.py: pip install 'fla-core>=0.5'")
    spec = importlib.util.spec_from_file_location("fla_kda_naive", path)
    if spec is None or spec.loader is None:
        raise Unavailable(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as problem:
        raise Unavailable(f"its naive.py cannot be imported: {problem}") from problem
    return module


def _prepare_fla(job: Job):
    """naive_chunk_kda with autograd; naive_recurrent_kda for decode."""
    module = load_fla()
    if job.gate != "log_decay":
        raise Unavailable("its references take log-decays: use --gate log_decay")
    if job.shape.lengths:
        raise Unavailable("its references take no packed sequences")
    if job.op == "chunk" and job.shape.T % 64:
        raise Unavailable(f"naive_chunk_kda needs T to be a multiple of 64, got {job.shape.T}")
    reference = module.naive_recurrent_kda if job.op == "recurrent" else module.naive_chunk_kda
    case = job.case()
    tensors = checking.to_torch(case.arrays(job.dtype), case.dtypes(job.dtype), checking.default_device("torch"))

    def function(x):
        return reference(x.q, x.k, x.v, x.g, x.beta, initial_state=x.initial_state, output_final_state=True)

    return _torch_runner(function, tensors, case.cotangents(job.dtype) if job.mode == "fwdbwd" else None)


def _prepare_fla_chunk(job: Job):
    """fla.ops.kda.chunk_kda on a GPU, in the job's dtype. Its first call tunes itself: minutes, unless Triton's cache holds the result."""
    if job.op != "chunk":
        raise Unavailable("it is a chunk kernel: use --mode fwd or fwdbwd")
    device = checking.default_device("torch")
    if device.type != "cuda":
        raise Unavailable("its kernels need a GPU")
    try:
        kernels = importlib.import_module("fla.ops.kda")
    except ImportError as problem:
        raise Unavailable(f"fla.ops.kda cannot be imported: {problem}") from problem
    case = job.case()
    tensors = checking.to_torch(case.arrays(job.dtype), case.dtypes(job.dtype), device)
    options = case.call_options

    def function(x):
        return kernels.chunk_kda(**{n: a for n, a in x._asdict().items() if a is not None}, **options)

    return _torch_runner(function, tensors, case.cotangents(job.dtype) if job.mode == "fwdbwd" else None)
