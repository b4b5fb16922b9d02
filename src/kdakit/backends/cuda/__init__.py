"""The native library (csrc/) behind PyTorch: prefill kernels for NVIDIA GPUs, reached through ctypes.

float32 on any of them, head sizes below 128 padded to 64 or 128; bfloat16 on Hopper, K = V = 64 or 128. Needs libkdakit.so (`make cuda`),
no torch headers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from kdakit.backends.cuda import library
from kdakit.problem import SAFE_BOUND, Arrays, Problem
from kdakit.reference import Result

backward = None
gradients = "torch_native"
step = None

HEAD_DIMS = (64, 128)


@dataclass(frozen=True)
class Config:
    """How one problem is run."""

    dtype: str  # of the kernels: "f32" or "bf16"
    head_dim: int  # of the kernel, K = V
    chunk: int
    parts: int = 0  # of a sequence's scan, beside each other, in bfloat16; 1: one piece, 0: the library's choice
    block: int = 0  # tokens from state to state, in bfloat16: 16 or 64; 0: the library's choice


def supports(problem: Problem, device: Any) -> str | None:
    """Why this backend cannot run `problem` on `device`; None: it can."""
    kind = getattr(device, "type", str(device)).partition(":")[0]
    if kind != "cuda":
        return f"needs an NVIDIA GPU; the tensors are on {kind}"
    reason = unsupported(problem)
    if reason is not None:
        return reason
    return _old_device(device, problem.dtype == "bfloat16") or library.missing()


@lru_cache(maxsize=64)
def _old_device(device: Any, hopper: bool) -> str | None:
    import torch

    if torch.version.hip:
        return "needs an NVIDIA GPU; this is ROCm"
    major, minor = torch.cuda.get_device_capability(device)
    if hopper and (major, minor) != (9, 0):
        return f"computes bfloat16 on compute capability 9.0 only, this device has {major}.{minor}"
    return None if major >= 8 else f"needs compute capability 8.0 or newer, this device has {major}.{minor}"


def unsupported(problem: Problem) -> str | None:
    """The part of `supports` that concerns neither device nor library."""
    o = problem.options
    dtypes = {problem.dtype, problem.gate_dtype, problem.beta_dtype, problem.state_dtype}
    if problem.dtype == "bfloat16":
        if not dtypes <= {"bfloat16", "float32"} or problem.state_dtype != "float32":
            return f"takes float32 states beside bfloat16 inputs, gates and betas of either; these are {', '.join(sorted(dtypes))}"
        if problem.K != problem.V or problem.K not in HEAD_DIMS:
            return f"computes bfloat16 with K = V = 64 or 128, got K = {problem.K}, V = {problem.V}"
    elif dtypes != {"float32"}:
        return f"computes float32 or bfloat16 inputs; these are {', '.join(sorted(dtypes))}"
    if max(problem.K, problem.V) > HEAD_DIMS[-1]:
        return f"takes head sizes up to {HEAD_DIMS[-1]}, got K = {problem.K}, V = {problem.V}"
    if problem.varlen == "segment_ids":
        return "takes cu_seqlens, not segment_ids"
    if o.return_intermediate_states:
        return "does not return intermediate states"
    if o.lower_bound is not None and o.lower_bound < SAFE_BOUND:
        return f"takes a lower_bound of at least {SAFE_BOUND:g}, got {o.lower_bound:g}"
    if o.scale == 0:
        return "takes a scale other than 0"
    return None


# K = V of the kernels that another backend may have, by stage.
LENT_HEADS = {"gradient": (64, 128), "rebuild": (64, 128), "reverse": (64, 128), "forward": (64, 128)}


def _not_lent(stage: str, problem: Problem, device: Any) -> str | None:
    """Why no other backend can have that stage's kernel for such a problem there; None: it can."""
    if problem.dtype != "bfloat16":
        return "takes bfloat16"
    if problem.K != problem.V or problem.K not in LENT_HEADS[stage]:
        return f"has that kernel for K = V in {LENT_HEADS[stage]}, got K = {problem.K}, V = {problem.V}"
    rest = problem.replace(needs_grad=False, K=128, V=128)  # what else it asks for does not depend on them
    if getattr(device, "type", device) == "meta":  # a call that is written down for a GPU that another framework has
        return unsupported(rest) or library.missing()
    return supports(rest, device)


def chunk_gradient(problem: Problem, device: Any) -> tuple[Any, str | None]:
    """(`op.chunk_gradient`, None), for another backend's backward; or (None, why it cannot run such a problem there)."""
    reason = _not_lent("gradient", problem, device)
    if reason is not None:
        return None, reason
    from kdakit.backends.cuda import op

    return op.chunk_gradient, None


def chunk_rebuild(problem: Problem, device: Any) -> tuple[Any, str | None]:
    """(`op.chunk_rebuild`, None), for another backend's backward; or (None, why it cannot run such a problem there)."""
    reason = _not_lent("rebuild", problem, device)
    if reason is not None:
        return None, reason
    from kdakit.backends.cuda import op

    return op.chunk_rebuild, None


def reverse(problem: Problem, device: Any) -> tuple[Any, str | None]:
    """(`op.reverse`, None), for another backend's backward; or (None, why it cannot run such a problem there)."""
    reason = _not_lent("reverse", problem, device)
    if reason is not None:
        return None, reason
    from kdakit.backends.cuda import op

    return op.reverse, None


def kept_forward(problem: Problem, device: Any) -> tuple[Any, str | None]:
    """(`op.forward_kept` for the problem, None), before another backend's backward; or (None, why it cannot run such a problem there)."""
    o = problem.options
    kept = o.gate == "log_decay" or o.l2norm
    reason = _not_lent("forward", problem, device) if kept else "keeps for a backward what given log-decays leave, or normalised keys"
    if reason is not None:
        return None, reason
    from kdakit.backends.cuda import op

    return partial(op.forward_kept, config=default_config(problem, device)), None


def expected_us(problem: Problem, device: Any) -> float | None:
    """Microseconds of a forward call, where they are known; gradients would come from torch_native."""
    from kdakit.backends.cuda import times

    return None if problem.needs_grad else times.expected_us(problem, _architecture(device))


@lru_cache(maxsize=64)
def _architecture(device: Any) -> str:
    """Such as sm_90, which it also is where no device can be asked."""
    import torch

    major, minor = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (9, 0)
    return f"sm_{major}{minor}"


def default_config(problem: Problem, device: Any) -> Config:
    """Chunks of 64; of 32 where the caller asks for at most that, or a block's shared memory is too small for 64."""
    if problem.dtype == "bfloat16":
        # The library's choice depends on the other sequences of a call.
        return Config("bf16", problem.K, 64, parts=1, block=64) if problem.options.deterministic else Config("bf16", problem.K, 64)
    D = next(d for d in HEAD_DIMS if d >= max(problem.K, problem.V))
    small = problem.options.chunk_size <= 32 or _shared_memory(device) < CHUNK_64_BYTES[D]
    return Config("f32", D, 32 if small else 64)


def operand_dtype(problem: Problem) -> str:
    """bfloat16 goes to the matrix units as it is; float32 in parts that keep its accuracy."""
    return problem.dtype


# Shared memory per block that the kernels need for chunks of 64, by head size.
CHUNK_64_BYTES = {64: 92 * 1024, 128: 154 * 1024}


@lru_cache(maxsize=64)
def _shared_memory(device: Any) -> int:
    """Bytes that one block may ask for; 0 where no device can be asked."""
    import torch

    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def saved_specs(problem: Problem, device: Any) -> list[tuple[tuple[int, ...], str]]:
    return []


def forward(problem: Problem, arrays: Arrays, config: Config) -> tuple[Result, list]:
    from kdakit.backends.cuda import op

    return op.forward(problem, arrays, config), []


def planned(problem: Problem, arrays: Arrays, config: Config, final_state: Any = None) -> tuple[Result, Any]:
    """Repeated, a call has its arguments, but for addresses."""
    from kdakit.backends.cuda import repeat

    return repeat.planned(problem, arrays, config)
