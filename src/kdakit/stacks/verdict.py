"""Whether a call from another stack is ours: why not, or None.

A call is taken only where a fast backend runs it, or on a CPU, where the stacks have nothing or plain PyTorch. What a stack would refuse
goes to the stack, so that its users see its own message.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kdakit import dispatch
from kdakit.problem import DIFFERENTIABLE, Arrays, Options, Spec, make_options, make_problem

FAST = {"kdakit.backends.triton_gpu": True, "kdakit.backends.cuda": False}  # module: whether it is fast with gradients too


def why_not(op: str, arrays: Arrays, **flags: Any) -> str | None:
    """op: 'chunk' or 'recurrent'; flags: as of `make_options`."""
    q, k, v = arrays[:3]
    if not all(isinstance(x, Tensor) for x in arrays[:5]):
        return "not all inputs are tensors"
    if q.device.type not in ("cpu", "cuda"):
        return f"no fast backend for {q.device.type}"
    if q.device.type == "cuda" and not q.dtype == k.dtype == v.dtype:
        return f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}: kdakit would compute in the widest"
    flags["scale"] = None  # any number
    differentiated = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arrays[: len(DIFFERENTIABLE)])
    specs = [None if x is None else (x.shape, x.dtype, x.device) for x in arrays]
    return _why_not(op, differentiated, tuple(sorted(flags.items())), *specs)


@lru_cache(maxsize=4096)
def _why_not(op: str, differentiated: bool, flags: tuple, *specs: tuple | None) -> str | None:
    arrays = Arrays(*(None if x is None else Spec(*x) for x in specs))
    device = arrays.q.device
    if device.type == "cpu":  # dtypes may meet
        arrays = arrays._replace(k=arrays.k._replace(dtype=arrays.q.dtype), v=arrays.v._replace(dtype=arrays.q.dtype))
    for name, x in zip(Arrays._fields, arrays, strict=True):
        if x is not None and x.device != device and name != "cu_seqlens_cpu":
            return f"{name} is on {x.device}, q on {device}"
    try:
        options: Options = make_options(arrays, **dict(flags))
        problem = make_problem(op, arrays, options, differentiated)
        module = dispatch.select("torch", problem, device)
    except (TypeError, ValueError) as refusal:
        return str(refusal)
    if device.type == "cpu" or FAST.get(module.__name__) is True or (module.__name__ in FAST and not differentiated):
        return None
    return f"kdakit would run it on {module.__name__.rpartition('.')[2]}, which is not fast"
