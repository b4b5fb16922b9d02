"""One KDA call, described: `Arrays` are its tensors, `Problem` is everything else. All validation of user input is here.

Nothing in this module knows a framework: it reads `.shape`, `.dtype` and, where a frontend asks for it, `.device`, so NumPy arrays,
JAX tracers and fake torch tensors all pass through the same rules.
"""

from __future__ import annotations

import ast
import difflib
import math
import numbers
import os
import warnings
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

CHUNK_SIZES = (16, 32, 64, 128)
FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")
MAX_HEAD_DIM = 256
SAFE_BOUND = -5.0  # log-decays of at least this a token: short paths may rely on it, where the call promises it or the gate ensures it
GATES = ("log_decay", "softplus", "bounded")
BETAS = ("given", "sigmoid", "double_sigmoid")


class Arrays(NamedTuple):
    """The tensors of a call; also the shape in which a backend returns their gradients."""

    q: Any  # [B, T, H, K]
    k: Any  # [B, T, H, K]
    v: Any  # [B, T, HV, V]
    g: Any  # [B, T, HV, K]   log-decay, or the raw gate input
    beta: Any  # [B, T, HV]
    A_log: Any = None  # HV elements
    dt_bias: Any = None  # HV * K elements
    initial_state: Any = None  # [N, HV, K, V], or [N, HV, V, K] with state_v_first
    cu_seqlens: Any = None  # [N + 1]
    cu_seqlens_cpu: Any = None  # [N + 1], a copy on the host
    segment_ids: Any = None  # [B, T]


DIFFERENTIABLE = Arrays._fields[:8]


class Spec(NamedTuple):
    """As much of a tensor as the checks look at: calls that agree in it need be checked once."""

    shape: Any
    dtype: Any
    device: Any


@dataclass(frozen=True)
class Passed:
    """Options that the public calls take under the same name: a new one is a line here and an argument of the frontends."""

    output_final_state: bool = False
    return_intermediate_states: bool = False
    state_v_first: bool = False  # states are [.., V, K]
    disable_recompute: bool = False  # keep the intermediates for the backward
    chunk_size: int = 64


@dataclass(frozen=True)
class Options(Passed):
    """What is computed, whatever the sizes."""

    scale: float | None = None  # None until the problem's K is known: K ** -0.5
    gate: str = "log_decay"  # one of GATES
    lower_bound: float | None = None  # the bounded gate's bound, or the bound that safe_gate promises
    safe_gate: bool = False  # the log-decay lies in [lower_bound, 0): a fast path may rely on it
    l2norm: bool = False  # normalise q and k first
    beta: str = "given"  # one of BETAS
    deterministic: bool = False  # the bits of a sequence depend on no other sequence in the call

    def encode(self) -> str:
        """A string for interfaces that carry only plain values; `Options.decode` reads it back."""
        # By name: torch.compile cannot follow vars() in every version.
        return repr(tuple([getattr(self, name) for name in OPTION_NAMES]))

    @staticmethod
    @lru_cache(maxsize=4096)
    def decode(text: str) -> Options:
        return Options(*ast.literal_eval(text))


OPTION_NAMES = tuple(f.name for f in fields(Options))
PASSED_NAMES = tuple(f.name for f in fields(Passed))


@dataclass(frozen=True)
class Problem:
    """Sizes, dtypes and options of one call: all that a backend needs to decide. Hashable, printable."""

    op: str  # "chunk" or "recurrent"
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int  # sequences, and so states: B, or len(cu_seqlens) - 1
    dtype: str  # of q, k, v and o
    gate_dtype: str  # of g
    beta_dtype: str
    state_dtype: str  # of initial_state and final_state
    varlen: str  # "", "cu_seqlens" or "segment_ids"
    has_A_log: bool
    has_dt_bias: bool
    has_initial_state: bool
    needs_grad: bool
    options: Options

    @property
    def group(self) -> int:
        """Value heads per q/k head."""
        return self.HV // self.H

    @property
    def compute_dtype(self) -> str:
        """Accumulation and state arithmetic: float32, or float64 for float64 inputs."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        rows, columns = (self.V, self.K) if self.options.state_v_first else (self.K, self.V)
        return self.N, self.HV, rows, columns

    @property
    def chunks(self) -> int:
        """Chunks per row; with cu_seqlens the most that any split of T tokens into N sequences can need."""
        size = self.options.chunk_size
        if self.varlen == "cu_seqlens":
            return min(self.T, (self.T + self.N * (size - 1)) // size)
        return -(-self.T // size)

    def replace(self, **changes: Any) -> Problem:
        """A copy with some fields changed; option fields may be named directly."""
        own = {f.name for f in fields(Problem)}
        options = {name: changes.pop(name) for name in list(changes) if name not in own}
        return replace(self, options=replace(self.options, **options), **changes)

    def __str__(self) -> str:
        shape = f"{self.op} B{self.B} T{self.T} H{self.H}" + (f" HV{self.HV}" if self.HV != self.H else "")
        o = self.options
        extras = [f"{self.varlen} N{self.N}"] if self.varlen else []
        extras += [f"{o.gate} gate" + (f" >= {o.lower_bound:g}" if o.lower_bound is not None else "")]
        extras += [name for name, on in (("l2norm", o.l2norm), (f"beta {o.beta}", o.beta != "given"), ("grad", self.needs_grad)) if on]
        return f"{shape} K{self.K} V{self.V} C{o.chunk_size} {self.dtype}, " + ", ".join(extras)


def dtype_name(array: Any) -> str:
    """'float32' for a NumPy, JAX or torch array alike."""
    return str(array.dtype).rpartition(".")[2]


def checks_enabled() -> bool:
    """KDAKIT_CHECKS=1 looks at values too, even where that makes the host wait for the device."""
    return os.environ.get("KDAKIT_CHECKS", "0") not in ("", "0")


def make_options(
    arrays: Arrays, *, scale=None, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False, safe_gate=False, lower_bound=None, **passed: Any,
) -> Options:  # fmt: skip
    """The public calls' keyword arguments, checked and reduced to `Options`; `passed` are fields of `Passed`."""
    flags = dict(use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
                 use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval, safe_gate=safe_gate)  # fmt: skip
    on = {name: _flag(name, value) for name, value in flags.items()}
    as_they_are = {name: _passed(name, value) for name, value in passed.items()}
    bound = None if lower_bound is None else _real("lower_bound", lower_bound)
    if on["allow_neg_eigval"] and not on["use_beta_sigmoid_in_kernel"]:
        raise ValueError("allow_neg_eigval=True requires use_beta_sigmoid_in_kernel=True: it doubles the sigmoid; "
                         "a beta that is already activated may simply be passed up to 2")  # fmt: skip
    gate = "log_decay" if not on["use_gate_in_kernel"] else "softplus" if bound is None else "bounded"
    safe = bound is not None and SAFE_BOUND <= bound < 0
    if bound is not None and gate == "bounded" and not (bound < 0 and (safe or not on["safe_gate"])):
        raise ValueError(f"lower_bound must be negative, and lie in [-5, 0) with safe_gate=True, got {lower_bound}")
    if gate == "softplus" and on["safe_gate"]:
        raise ValueError("safe_gate=True with use_gate_in_kernel=True requires lower_bound in [-5, 0), got lower_bound=None")
    if gate == "softplus" and arrays.A_log is None:
        raise ValueError("A_log is required with use_gate_in_kernel=True unless lower_bound selects the bounded gate, got None")
    if gate == "log_decay":
        for name in ("A_log", "dt_bias"):
            if getattr(arrays, name) is not None:
                raise ValueError(f"{name} is used only with use_gate_in_kernel=True; without it g must already be the log-decay")
        bound = bound if on["safe_gate"] and safe else None
    return Options(
        scale=None if scale is None else _real("scale", scale),
        gate=gate,
        lower_bound=bound,
        safe_gate=on["safe_gate"],
        l2norm=on["use_qk_l2norm_in_kernel"],
        beta="given" if not on["use_beta_sigmoid_in_kernel"] else "double_sigmoid" if on["allow_neg_eigval"] else "sigmoid",
        **as_they_are,
    )


def _passed(name: str, value: Any) -> Any:
    if name not in PASSED_NAMES:
        raise TypeError(f"a call takes no option {name!r}")
    if name != "chunk_size":
        return _flag(name, value)
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value not in CHUNK_SIZES:
        raise ValueError(f"chunk_size must be one of {', '.join(map(str, CHUNK_SIZES))}, got {value!r}")
    return int(value)


def make_problem(op: str, arrays: Arrays, options: Options, needs_grad: bool = False) -> Problem:
    """Check every shape and dtype of a call against the contract and describe it."""
    for name in ("q", "k", "v", "g", "beta"):
        if not hasattr(getattr(arrays, name), "shape"):
            raise TypeError(f"{name} must be an array, got {type(getattr(arrays, name)).__name__}")
    _check_ndim("q", arrays.q, "B, T, H, K")
    _check_ndim("v", arrays.v, "B, T, HV, V")
    B, T, H, K = arrays.q.shape
    HV, V = arrays.v.shape[2:]
    for name, size in (("H", H), ("HV", HV), ("K", K), ("V", V)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size} (q {_shape_of(arrays.q)}, v {_shape_of(arrays.v)})")
    for name, size in (("K", K), ("V", V)):
        if size > MAX_HEAD_DIM:
            raise ValueError(f"{name} must be at most {MAX_HEAD_DIM}, got {size}")
    if HV % H:
        raise ValueError(f"v must have a multiple of q's heads: HV % H == 0, got HV={HV}, H={H}")
    _check_shape("k", arrays.k, "B, T, H, K", (B, T, H, K))
    _check_shape("v", arrays.v, "B, T, HV, V", (B, T, HV, V))
    _check_shape("g", arrays.g, "B, T, HV, K", (B, T, HV, K))
    _check_shape("beta", arrays.beta, "B, T, HV", (B, T, HV))
    dtype = _check_float("q", arrays.q)
    for name in ("k", "v"):
        if _check_float(name, getattr(arrays, name)) != dtype:
            raise TypeError(f"{name} must have q's dtype {dtype}, got {dtype_name(getattr(arrays, name))}")
    varlen, N = _check_sequences(arrays, B, T)
    _check_parameter("A_log", arrays.A_log, "HV", HV)
    _check_parameter("dt_bias", arrays.dt_bias, "HV * K", HV * K)
    if options.scale is None:
        options = replace(options, scale=K**-0.5)
    state_dtype = _check_state(op, arrays.initial_state, options, (N, HV, K, V), dtype)
    return Problem(
        op=op, B=B, T=T, H=H, HV=HV, K=K, V=V, N=N, dtype=dtype,
        gate_dtype=_check_float("g", arrays.g), beta_dtype=_check_float("beta", arrays.beta), state_dtype=state_dtype,
        varlen=varlen, has_A_log=arrays.A_log is not None, has_dt_bias=arrays.dt_bias is not None,
        has_initial_state=arrays.initial_state is not None, needs_grad=needs_grad, options=options,
    )  # fmt: skip


def check_devices(arrays: Arrays) -> None:
    """Every tensor on q's device; cu_seqlens_cpu on the host."""
    device = arrays.q.device
    for name, array in zip(arrays._fields, arrays, strict=True):
        if array is None:
            continue
        if name == "cu_seqlens_cpu":
            if array.device.type != "cpu":
                raise ValueError(f"cu_seqlens_cpu must be on the host (cpu), got {array.device}")
        elif array.device != device:
            hint = "; its copy on the host goes into cu_seqlens_cpu" if name == "cu_seqlens" else ""
            raise ValueError(f"{name} must be on q's device {device}, got {array.device}{hint}")


def check_cu_seqlens(values: np.ndarray, T: int, name: str = "cu_seqlens", padding: bool = True) -> None:
    """The values rule, for whoever can see them: starts at 0, never decreases, ends at T or, with padding, before it."""
    if not len(values):
        return
    ends = values[-1] <= T if padding else values[-1] == T
    if values[0] != 0 or not ends or (np.diff(values.astype(np.int64)) < 0).any():
        shown = np.array2string(np.asarray(values), threshold=16, separator=", ")
        raise ValueError(f"{name} must start at 0, never decrease and end at {'most ' if padding else ''}T = {T}, got {shown}")


def check_backend_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"backend must be a string such as 'auto', got {name!r}")


def fold_compatibility(call: str, valid: list[str], state_v_first: bool, extra: dict[str, Any]) -> bool:
    """Keyword arguments of older or other signatures. Returns state_v_first; raises TypeError for what nobody knows.

    use_graph and max_num_seqs of flash-linear-attention ask for calls that a CUDA graph can capture. Ours always are, so both are accepted.
    """
    for name in ("use_graph", "max_num_seqs"):
        extra.pop(name, None)
    if extra.pop("cp_context", None) is not None:
        raise TypeError(f"{call}() takes no cp_context: context parallel calls live in kdakit.parallel")
    if "transpose_state_layout" in extra:
        old = extra.pop("transpose_state_layout")
        if state_v_first:
            raise ValueError("transpose_state_layout is the old name of state_v_first: pass one of them, got both")
        warnings.warn("transpose_state_layout is deprecated, use state_v_first", DeprecationWarning, stacklevel=3)
        state_v_first = old
    for name in extra:
        near = difflib.get_close_matches(name, valid, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(valid)}"
        raise TypeError(f"{call}() got an unexpected keyword argument {name!r}; {hint}")
    return state_v_first


def _shape_of(array: Any) -> Any:
    return tuple(array.shape) if hasattr(array, "shape") else type(array).__name__


def _flag(name: str, value: Any) -> bool:
    """True or False; also None, 0 and 1, which others write for them."""
    if value is None or isinstance(value, (bool, np.bool_)) or (isinstance(value, numbers.Integral) and value in (0, 1)):
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {value!r}")


def _real(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, np.floating, np.integer)):
        raise TypeError(f"{name} must be a real number, got {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    return float(value)


def _check_ndim(name: str, array: Any, dims: str) -> None:
    if len(array.shape) != dims.count(",") + 1:
        raise ValueError(f"{name} must be [{dims}], got {_shape_of(array)}")


def _check_shape(name: str, array: Any, dims: str, want: tuple[int, ...], hint: str = "") -> None:
    _check_ndim(name, array, dims)
    if tuple(array.shape) != want:
        raise ValueError(f"{name} must be [{dims}] = {want}, got {_shape_of(array)}{hint}")


def _check_float(name: str, array: Any) -> str:
    if dtype_name(array) not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be one of {', '.join(FLOAT_DTYPES)}, got {dtype_name(array)}")
    return dtype_name(array)


def _check_parameter(name: str, array: Any, dims: str, size: int) -> None:
    if array is None:
        return
    if not hasattr(array, "shape"):
        raise TypeError(f"{name} must be an array of {dims} = {size} elements, got {type(array).__name__}")
    _check_float(name, array)
    if math.prod(array.shape) != size:
        raise ValueError(f"{name} must hold [{dims}] = {size} elements, got {_shape_of(array)}")


def _check_sequences(arrays: Arrays, B: int, T: int) -> tuple[str, int]:
    cu, host, ids = arrays.cu_seqlens, arrays.cu_seqlens_cpu, arrays.segment_ids
    if cu is None and host is not None:
        raise ValueError("cu_seqlens_cpu is the host copy of cu_seqlens: pass cu_seqlens too, got None")
    if cu is not None and ids is not None:
        raise ValueError("segment_ids and cu_seqlens say the same thing twice: pass one of them, got both")
    if ids is not None:
        _check_int("segment_ids", ids)
        _check_shape("segment_ids", ids, "B, T", (B, T))
        return "segment_ids", B
    if cu is None:
        return "", B
    for name, array in (("cu_seqlens", cu), ("cu_seqlens_cpu", host)):
        if array is not None:
            _check_int(name, array)
            _check_ndim(name, array, "N + 1")
    if cu.shape[0] < 2:
        raise ValueError(f"cu_seqlens must be [N + 1] with at least one sequence (2 entries), got {_shape_of(cu)}")
    if host is not None and tuple(host.shape) != tuple(cu.shape):
        raise ValueError(f"cu_seqlens_cpu must have cu_seqlens' shape {_shape_of(cu)}, got {_shape_of(host)}")
    if B != 1:
        raise ValueError(f"q must have B = 1 with cu_seqlens (pack the sequences along T), got B = {B}")
    return "cu_seqlens", cu.shape[0] - 1


def _check_int(name: str, array: Any) -> None:
    if not hasattr(array, "shape"):
        raise TypeError(f"{name} must be an integer array, got {type(array).__name__}")
    if dtype_name(array) not in ("int32", "int64"):
        raise TypeError(f"{name} must be int32 or int64, got {dtype_name(array)}")


def _check_state(op: str, state: Any, options: Options, sizes: tuple[int, int, int, int], dtype: str) -> str:
    compute = "float64" if dtype == "float64" else "float32"
    if state is None:
        return compute
    N, HV, K, V = sizes
    if not hasattr(state, "shape"):
        raise TypeError(f"initial_state must be an array, got {type(state).__name__}")
    (dims, want), (_, other) = sorted(
        [("N, HV, K, V", (N, HV, K, V)), ("N, HV, V, K", (N, HV, V, K))], reverse=options.state_v_first, key=lambda x: x[0]
    )
    hint = ""
    if tuple(state.shape) == other != want:
        hint = f"; that is the other layout: pass state_v_first={not options.state_v_first}"
    elif len(state.shape) == 4 and state.shape[0] != N:
        hint = f"; one state for each of the N = {N} sequences"
    _check_shape("initial_state", state, dims, want, hint)
    # A recurrent call may keep its state in half precision: it is read and written once per call, not once per chunk.
    allowed = (compute, "float32") + (("bfloat16", "float16") if op == "recurrent" else ())
    if dtype_name(state) not in allowed:
        raise TypeError(f"initial_state must be {' or '.join(dict.fromkeys(allowed))}, got {dtype_name(state)}")
    return compute if dtype_name(state) == "float32" else dtype_name(state)
