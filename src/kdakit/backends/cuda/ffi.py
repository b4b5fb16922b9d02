"""The native library behind JAX: the same kernels as an XLA custom call on NVIDIA GPUs. Gradients are those of `xla`.

Needs libkdakit.so and libkdakit_jax.so beside it (`make cuda`).
"""

from __future__ import annotations

import ctypes
import threading
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdakit.backends.cuda import HEAD_DIMS, Config, library, operand_dtype, unsupported
from kdakit.problem import Arrays, Problem
from kdakit.reference import Result

__all__ = ["backward", "default_config", "expected_us", "forward", "gradients", "operand_dtype", "step", "supports"]

backward = None
gradients = "xla"
step = None

NAME = "libkdakit_jax.so"
TARGET = "kdakit_prefill"
HANDLER = "kdakit_xla_prefill"


def supports(problem: Problem, device: Any) -> str | None:
    """Why this backend cannot run `problem` on `device`; None: it can."""
    if str(device) not in ("gpu", "cuda"):
        return f"needs an NVIDIA GPU; the arrays are on {device}"
    reason = unsupported(problem) or _old_device(problem.dtype == "bfloat16") or library.missing()
    if reason is not None:
        return reason
    try:
        _register(str(library.path().with_name(NAME)))
    except OSError as problem_found:
        return str(problem_found)
    return None


_registering = threading.Lock()


def _register(where: str) -> None:
    """Open the library and make its call known to XLA, once."""
    with _registering:  # XLA takes a call once, and two threads may come first
        _register_once(where)


@lru_cache(maxsize=4)
def _register_once(where: str) -> None:
    if not library.path().with_name(NAME).exists():
        raise FileNotFoundError(f"{where} is not there: build it with `make cuda` (needs nvcc, g++ and jax)")
    found = ctypes.CDLL(where)
    if not hasattr(found, HANDLER):
        raise OSError(f"{where} is not kdakit's library for JAX: it has no {HANDLER}; build it again with `make cuda`")
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(getattr(found, HANDLER)), platform="CUDA")


@lru_cache(maxsize=1)
def _capability() -> str:
    """Of the first device; "0.0" where it has none."""
    return str(getattr(jax.devices()[0], "compute_capability", "0.0"))


def _old_device(hopper: bool) -> str | None:
    if hopper and _capability() != "9.0":
        return f"computes bfloat16 on compute capability 9.0 only, this device has {_capability()}"
    return None


def expected_us(problem: Problem, device: Any) -> float | None:
    """Microseconds of a forward call, where they are known; gradients are another backend's."""
    from kdakit.backends.cuda import times

    return None if problem.needs_grad else times.expected_us(problem, f"sm_{_capability().replace('.', '')}")


def default_config(problem: Problem, device: Any) -> Config:
    """bfloat16: one size. float32: chunks of 32 fit the shared memory of every device that can run the kernels."""
    if problem.dtype == "bfloat16":
        return Config("bf16", problem.K, 64)
    D = next(d for d in HEAD_DIMS if d >= max(problem.K, problem.V))
    return Config("f32", D, 64 if problem.options.chunk_size > 32 and _large(D) else 32)


def _large(D: int) -> bool:
    """Whether a block may have the shared memory of a chunk of 64: Ampere's and Hopper's data-centre parts, not Ada."""
    return HEAD_DIMS[0] >= D or _capability() in ("8.0", "9.0", "10.0", "10.3")


def forward(problem: Problem, arrays: Arrays, config: Config) -> tuple[Result, None]:
    o, D = problem.options, config.head_dim
    none = jnp.zeros((0,), jnp.float32)
    initial = arrays.initial_state
    dt_bias = None if arrays.dt_bias is None else _padded(arrays.dt_bias.astype(jnp.float32).reshape(problem.HV, problem.K), D)
    given = (
        *(_padded(x, D) for x in arrays[:4]),
        arrays.beta,
        none if arrays.A_log is None else arrays.A_log.astype(jnp.float32).reshape(-1),
        none if dt_bias is None else dt_bias,
        none if initial is None else _padded(initial, D, D),
        jnp.zeros((0,), jnp.int32) if arrays.cu_seqlens is None else arrays.cu_seqlens,
    )
    results = (
        jax.ShapeDtypeStruct((problem.B, problem.T, problem.HV, D), arrays.v.dtype),
        jax.ShapeDtypeStruct((problem.N, problem.HV, D, D), jnp.float32),
    )
    call = jax.ffi.ffi_call(TARGET, results, vmap_method="sequential")
    gates = library.GATES[o.gate], library.BETAS[o.beta]
    out, final = call(
        *given, chunk_size=np.int64(config.chunk), scale=np.float32(o.scale), gate=np.int32(gates[0]),
        lower_bound=np.float32(o.lower_bound or 0.0), safe_gate=np.int32(o.safe_gate and o.lower_bound is not None),
        beta_kind=np.int32(gates[1]), l2norm=np.int32(o.l2norm), state_v_first=np.int32(o.state_v_first),
    )  # fmt: skip
    rows, columns = problem.state_shape[2:]
    if arrays.cu_seqlens is not None:
        out = jnp.where((jnp.arange(problem.T) < arrays.cu_seqlens[-1])[:, None, None], out, 0)
    return Result(out[..., : problem.V], final[..., :rows, :columns] if o.output_final_state else None), None


def _padded(x, *sizes: int):
    """The last axes with zeros added up to `sizes`."""
    missing = [(0, 0)] * (x.ndim - len(sizes)) + [(0, size - n) for size, n in zip(sizes, x.shape[-len(sizes) :], strict=True)]
    return jnp.pad(x, missing) if any(high for _, high in missing) else x
