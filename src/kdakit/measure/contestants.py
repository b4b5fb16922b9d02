"""What `kdakit bench` can time: every backend through its public frontend, and peers where they are installed.

All contestants get the same inputs. `prepare` returns a Run of one call. `cuda_prefill` is the `cuda` backend's operator for [B, H, T, K]
tensors, which also gives out w and u. `xla@2` is a JAX backend with its heads over two devices: to JAX all cores of a CPU are one
device, of which XLA hardly uses more than one core, unless JAX is told to make several.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from dataclasses import dataclass, replace
from typing import Any

from kdakit import dispatch
from kdakit.cases import SHAPES, Case, Shape
from kdakit.measure import checking, inputs, peers, runners
from kdakit.measure.choices import UsageError
from kdakit.measure.peers import PEERS, Absent, Unavailable

__all__ = ["GATES", "MODES", "OPERATORS", "PEERS", "Job", "Unavailable", "parse_shape", "prepare", "reserve", "split", "why"]

# eager: fwd by the host's clock, call after call; graph: fwd in a CUDA graph; train: fwdbwd in one
MODES = ("fwd", "fwdbwd", "decode", "eager", "graph", "train")
GATES = ("bounded", "softplus", "log_decay")
OPERATORS = ("cuda_prefill",)


@dataclass(frozen=True)
class Job:
    """One thing to time, for any contestant."""

    shape: Shape
    mode: str = "fwd"
    dtype: str = "float32"
    gate: str = "bounded"
    chunk_size: int = 64
    regime: str = ""  # one of regimes.REGIMES; "": as the case draws its gates
    wide_beta: bool = False  # float32 beta beside half precision
    states: bool = True  # initial and final; a training step has neither
    disable_recompute: bool = False

    @property
    def op(self) -> str:
        return "recurrent" if self.mode == "decode" else "chunk"

    @property
    def trains(self) -> bool:
        return self.mode in ("fwdbwd", "train")

    @property
    def tokens(self) -> int:
        return self.shape.B * (1 if self.mode == "decode" else self.shape.T)

    def case(self) -> Case:
        """`shape` as a case; decode takes one token of each of B sequences."""
        shape = replace(self.shape, T=1, lengths=()) if self.mode == "decode" else self.shape
        case = shape.case(bounded=self.gate == "bounded")
        options: dict[str, Any] = {"chunk_size": self.chunk_size}
        if not self.states:
            case, options = replace(case, initial_state=False), options | {"output_final_state": False}
        if self.disable_recompute:
            options |= {"disable_recompute": True}
        case = replace(case, wide_beta=self.wide_beta, options=case.options | options)
        if self.gate != "log_decay":
            return case
        return replace(case, gate="mild", beta="uniform", A_log=False, dt_bias=False, options=options)

    def tiny(self) -> Case:
        """A case with the same options and few tokens: what a backend is asked, whose answer does not depend on the length."""
        lengths = (1,) * len(self.shape.lengths)
        return replace(self, shape=replace(self.shape, B=1, T=max(1, len(lengths)), lengths=lengths)).case()


def parse_shape(text: str) -> Shape:
    """A name of cases.SHAPES, or BxTxHxK."""
    if text in SHAPES:
        return SHAPES[text]
    parts = text.lower().split("x")
    if len(parts) != 4 or not all(p.isdecimal() and int(p) > 0 for p in parts):
        raise UsageError(f"--shape must be one of {', '.join(SHAPES)} or BxTxHxK such as 1x2048x4x128, got {text!r}")
    return Shape(*map(int, parts))


def split(name: str) -> tuple[str, int]:
    """'xla@2' -> ('xla', 2): a backend and its devices."""
    backend, at, devices = name.partition("@")
    if not at:
        return name, 1
    if not devices.isdecimal() or int(devices) < 1 or backend not in dispatch.names() or checking.framework_of(backend) != "jax":
        raise UsageError(f"--backend NAME@N must be a JAX backend and its number of devices, such as xla@2, got {name!r}")
    return backend, int(devices)


def reserve(names) -> None:
    """As many CPU devices as these contestants want, before JAX counts those it has."""
    devices = max((split(name)[1] for name in names), default=1)
    if devices > 1 and importlib.util.find_spec("jax") is not None:
        with contextlib.suppress(RuntimeError):  # JAX has counted: `prepare` finds too few, or enough
            importlib.import_module("jax").config.update("jax_num_cpu_devices", devices)


def prepare(name: str, job: Job) -> runners.Run:
    """One contestant's call, ready to be timed; raises Unavailable with the reason."""
    case, grad = job.case(), job.trains
    name, devices = split(name)
    if name in PEERS:
        function, framework = peers.find(name, case, job.dtype, job.op, grad), "torch"
    elif name in OPERATORS:
        function, framework = _prefill(job), "torch"
    else:
        if (why := checking.interpreted(name)) is not None:
            raise Unavailable(f"{why}, and the time of an interpreter says nothing")
        if (why := checking.refusal(name, job.tiny(), job.dtype, job.op, grad)) is not None:
            raise Unavailable(why)
        framework = checking.framework_of(name)
        function = checking.call(framework, name, case, job.op)
    if framework == "jax":
        seeds = inputs.host_cotangents(case, job.dtype) if grad else None
        place = runners.over_heads(case, devices) if devices > 1 else None
        return runners.jax_run(function, inputs.arrays(case, job.dtype, job.regime), case.dtypes(job.dtype), seeds, job.dtype, place)
    device = checking.default_device("torch")
    seeds = inputs.cotangents(case, job.dtype, device) if grad else None
    return runners.torch_run(function, inputs.tensors(case, job.dtype, device, regime=job.regime), seeds, job.mode)


def why(problem: Unavailable) -> dict[str, Any]:
    """The reason as fields of a record's row."""
    return {"reason": str(problem)} | ({"absent": True} if isinstance(problem, Absent) else {})


def _prefill(job: Job):
    """torch.ops.kdakit.prefill: o, w, u and the final state; tensors are turned to [B, H, T, K] before anything is timed."""
    case = job.case()
    if job.dtype != "float32" or job.mode not in ("fwd", "eager", "graph") or job.gate != "log_decay" or case.lengths:
        raise Unavailable("it takes float32 log-decays, forward alone, no packed sequences: use --gate log_decay --mode fwd")
    if case.K not in (64, 128) or job.chunk_size not in (32, 64):
        raise Unavailable(f"it takes K = V = 64 or 128 in chunks of 32 or 64, got {case.K} in chunks of {job.chunk_size}")
    if (why := checking.refusal("cuda", job.tiny(), job.dtype)) is not None:
        raise Unavailable(why)
    operator = importlib.import_module("kdakit.backends.cuda.op").prefill
    turned: dict[int, list] = {}

    def call(x):
        if id(x) not in turned:
            turned[id(x)] = [y.transpose(1, 2).contiguous() for y in x[:5]]
        o, _, _, final_state = operator(*turned[id(x)], job.chunk_size, None, x.initial_state)
        return o.transpose(1, 2), final_state

    return call
