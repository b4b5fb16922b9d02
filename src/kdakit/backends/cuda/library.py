"""libkdakit.so through ctypes: csrc/include/kdakit.h in Python. Needs neither framework."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from functools import lru_cache
from pathlib import Path

ABI_VERSION = 2
VARIABLE = "KDAKIT_LIBRARY"
PLACE = Path(__file__).with_name("libkdakit.so")

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
FUNCTIONS = (
    "kda_abi_version", "kda_last_error", "kda_status_name", "kda_prefill_workspace_f32", "kda_prefill_f32", "kda_prefill_workspace_bf16",
    "kda_prefill_bf16", "kda_gradient_bf16", "kda_rebuild_bf16", "kda_reverse_bf16",
)  # fmt: skip
GATES = {"log_decay": 0, "softplus": 1, "bounded": 2}
BETAS = {"given": 0, "sigmoid": 1, "double_sigmoid": 2}


class Tensor(Structure):
    """kda_tensor: [batch, head, token, dim], dim adjacent, strides in elements; all zero: packed."""

    _fields_ = [
        ("data", c_void_p),
        ("dtype", c_int32),
        ("reserved", c_int32),
        ("batch_stride", c_int64),
        ("head_stride", c_int64),
        ("token_stride", c_int64),
    ]


class PrefillArgs(Structure):
    """kda_prefill_args; zero is every field's default."""

    _fields_ = [
        ("size", c_size_t),
        *((name, c_int64) for name in ("batch", "tokens", "heads", "value_heads", "key_dim", "value_dim", "chunk_size")),
        *((name, Tensor) for name in ("q", "k", "v", "g", "beta", "o")),
        *((name, c_void_p) for name in ("initial_state", "final_state", "w", "u", "workspace")),
        ("workspace_size", c_size_t),
        ("stream", c_void_p),
        ("scale", c_float),
        ("gate", c_int32),
        ("lower_bound", c_float),
        *((name, c_int32) for name in ("safe_gate", "beta_kind", "l2norm", "state_v_first", "cu_seqlens_64")),
        *((name, c_void_p) for name in ("A_log", "dt_bias", "cu_seqlens")),
        ("sequences", c_int64),
        *((name, c_int32) for name in ("parts", "checkpoint")),
        *((name, c_void_p) for name in ("lower", "solved", "checkpoints")),
        *((name, c_int32) for name in ("lower_dtype", "group", "checkpoint_float32", "block")),
        *((name, c_void_p) for name in ("record", "r", "factors")),
    ]

    def __init__(self, **fields):
        super().__init__(size=ctypes.sizeof(PrefillArgs), **fields)


class GradientArgs(Structure):
    """kda_gradient_args: the backward over chunks. `forward` is kept alive with it."""

    _fields_ = [
        ("size", c_size_t),
        ("forward", POINTER(PrefillArgs)),
        *((name, c_void_p) for name in ("lower", "factors", "states", "d_states", "r", "d_o", "d_v", "alone", "d_final")),
        *((name, c_void_p) for name in ("d_q", "d_k", "d_g", "d_beta", "A_shares", "bias_shares")),
        *((name, c_int32) for name in ("lower_dtype", "d_q_dtype", "group", "reserved")),
        *((name, c_void_p) for name in ("before_last", "after_first", "states_lost", "d_states_lost")),
    ]

    def __init__(self, forward: PrefillArgs, **fields):
        super().__init__(size=ctypes.sizeof(GradientArgs), forward=ctypes.pointer(forward), **fields)


class RebuildArgs(Structure):
    """kda_rebuild_args: a forward's tiles again. `forward` is kept alive with it."""

    _fields_ = [
        ("size", c_size_t),
        ("forward", POINTER(PrefillArgs)),
        *((name, c_void_p) for name in ("lower", "tiles", "decay", "factors", "first")),
        *((name, c_int32) for name in ("lower_dtype", "group")),
        ("q_lost", c_void_p),
    ]

    def __init__(self, forward: PrefillArgs, **fields):
        super().__init__(size=ctypes.sizeof(RebuildArgs), forward=ctypes.pointer(forward), **fields)


class ReverseArgs(Structure):
    """kda_reverse_args: the gradient of the state, from the end of each sequence. `forward` is kept alive with it."""

    _fields_ = [
        ("size", c_size_t),
        ("forward", POINTER(PrefillArgs)),
        *((name, c_void_p) for name in ("tiles", "solved", "decay", "factors", "d_o", "d_final")),
        *((name, c_void_p) for name in ("d_states", "d_v", "alone", "y_lost", "d_initial")),
        *((name, c_int32) for name in ("k_solved_dtype", "group", "channels", "reserved")),
        *((name, c_void_p) for name in ("after_first", "d_states_lost", "q_lost", "record")),
    ]

    def __init__(self, forward: PrefillArgs, **fields):
        super().__init__(size=ctypes.sizeof(ReverseArgs), forward=ctypes.pointer(forward), **fields)


class NativeError(RuntimeError):
    """A call of the library that did not return KDA_OK."""


def path() -> Path:
    """Where the library is looked for: $KDAKIT_LIBRARY; beside this file; in the user's cache, where `kdakit build-cuda` puts it if it may
    not write here."""
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    return cache_place() if not PLACE.exists() and cache_place().exists() else PLACE


def cache_place() -> Path:
    """One for each version of the interface. Nothing is there for a user without a home, of whom nothing is expanded."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "kdakit" / f"abi-{ABI_VERSION}" / PLACE.name


def check(where: Path) -> None:
    """Raises OSError where the file at `where` cannot be used."""
    _load(str(where))


def missing() -> str | None:
    """Why the library cannot be used here; None: it can. Found out once per process: 'auto' asks at every call."""
    return _missing(str(path()))


@lru_cache(maxsize=4)
def _missing(where: str) -> str | None:
    try:
        _load(where)
    except OSError as problem:
        return str(problem)
    return None


def load() -> ctypes.CDLL:
    return _found(os.environ.get(VARIABLE))


@lru_cache(maxsize=4)
def _found(named: str | None) -> ctypes.CDLL:
    """Looked for once: every launch asks, and to look at the disk takes it as long as all the rest."""
    return _load(str(path()))


@lru_cache(maxsize=4)
def _load(where: str) -> ctypes.CDLL:
    if not Path(where).exists():
        raise FileNotFoundError(f"{where} is not there: build it with `kdakit build-cuda` (needs nvcc), or name another with {VARIABLE}")
    library = ctypes.CDLL(where)
    absent = [name for name in FUNCTIONS if not hasattr(library, name)]
    if absent:
        raise OSError(f"{where} is not kdakit's library, or a part of it: it has no {', '.join(absent)}; `kdakit build-cuda` builds it")
    library.kda_abi_version.restype = c_int
    found = library.kda_abi_version()
    if found != ABI_VERSION:
        raise OSError(f"{where} has ABI version {found}, this package needs {ABI_VERSION}: build it again with `kdakit build-cuda`")
    library.kda_last_error.restype = library.kda_status_name.restype = c_char_p
    for dtype in ("f32", "bf16"):
        query, run = getattr(library, f"kda_prefill_workspace_{dtype}"), getattr(library, f"kda_prefill_{dtype}")
        query.argtypes, run.argtypes = [POINTER(PrefillArgs), POINTER(c_size_t)], [POINTER(PrefillArgs)]
        query.restype = run.restype = c_int
    library.kda_gradient_bf16.argtypes, library.kda_gradient_bf16.restype = [POINTER(GradientArgs)], c_int
    library.kda_reverse_bf16.argtypes, library.kda_reverse_bf16.restype = [POINTER(ReverseArgs)], c_int
    library.kda_rebuild_bf16.argtypes, library.kda_rebuild_bf16.restype = [POINTER(RebuildArgs)], c_int
    return library


def workspace_size(args: PrefillArgs, dtype: str = "f32") -> int:
    """Bytes of device memory that a call needs."""
    bytes_needed = c_size_t()
    _check(getattr(load(), f"kda_prefill_workspace_{dtype}")(ctypes.byref(args), ctypes.byref(bytes_needed)))
    return bytes_needed.value


def prefill(args: PrefillArgs, dtype: str = "f32") -> None:
    """Enqueue one call."""
    _check(getattr(load(), f"kda_prefill_{dtype}")(ctypes.byref(args)))


def gradient(args: GradientArgs) -> None:
    """Enqueue the backward over chunks."""
    _check(load().kda_gradient_bf16(ctypes.byref(args)))


def rebuild(args: RebuildArgs) -> None:
    """Enqueue the tiles of every chunk again."""
    _check(load().kda_rebuild_bf16(ctypes.byref(args)))


def reverse(args: ReverseArgs) -> None:
    """Enqueue the gradient of the state, from the end of each sequence."""
    _check(load().kda_reverse_bf16(ctypes.byref(args)))


def address(function: str) -> int:
    """Of one of FUNCTIONS, in this process."""
    return ctypes.cast(getattr(load(), function), c_void_p).value or 0


def _check(status: int) -> None:
    if status:
        library = load()
        raise NativeError(f"{library.kda_status_name(status).decode()}: {library.kda_last_error().decode()}")
