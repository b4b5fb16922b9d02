"""Where a model computes, and in which dtype: by default the accelerator that is there, with bfloat16 on it; a CPU computes in float32.

Weights, moments and states between tokens stay float32 whatever the dtype of the products is: see `kept_float32`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Place:
    device: Any  # torch.device, or one of jax.devices()
    dtype: str  # of activations and of the weights that multiply them

    def __str__(self) -> str:
        return f"{self.device}, {self.dtype}"


def find(framework: str, device: str | None = None, dtype: str | None = None) -> Place:
    """The place for `--device` and `--dtype` as typed; None asks for the default. ValueError says what there is."""
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    found, accelerated = (_torch_device if framework == "torch" else _jax_device)(device)
    return Place(found, dtype or ("bfloat16" if accelerated else "float32"))


def kept_float32(name: str) -> bool:
    """Whether a parameter stays float32 where others are bfloat16: those of the gate, where a small step matters, and the norms'."""
    return name.endswith(("A_log", "dt_bias", "norm.weight"))


def _torch_device(wanted: str | None) -> tuple[Any, bool]:
    import torch

    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if wanted is None:
        wanted = "cpu" if here is None else here.type
    wanted = {"gpu": "cuda"}.get(wanted, wanted)
    try:
        device = torch.device(wanted)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as problem:
        there = ["cpu"] if here is None else ["cpu", *(f"{here.type}:{i}" for i in range(torch.accelerator.device_count()))]
        raise ValueError(f"device must be one that PyTorch has here ({', '.join(there)}), got {wanted!r}: {_first(problem)}") from problem
    return device, device.type != "cpu"


def _jax_device(wanted: str | None) -> tuple[Any, bool]:
    import jax

    if wanted is None:
        device = jax.devices()[0]
        return device, device.platform != "cpu"
    kind, _, number = wanted.partition(":")
    try:
        device = jax.devices(kind)[int(number or 0)]
    except (RuntimeError, IndexError, ValueError) as problem:
        there = ", ".join(f"{d.platform}:{d.id}" for d in jax.devices())
        raise ValueError(f"device must be one that JAX has here ({there}), got {wanted!r}: {_first(problem)}") from problem
    return device, device.platform != "cpu"


def _first(problem: BaseException) -> str:
    """The first sentence of somebody else's message."""
    return re.split(r"[\n.]", str(problem), maxsplit=1)[0]
