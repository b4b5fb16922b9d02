"""KDA as Mosaic kernels for TPUs, written in Pallas. Without a TPU they run in Pallas' TPU interpreter, when asked for by name."""

from __future__ import annotations

import math

from jax.experimental.pallas import tpu as pltpu

from kdakit.backends.pallas_tpu import pool, tile
from kdakit.backends.pallas_tpu.call import Saved, backward, forward, step
from kdakit.backends.pallas_tpu.tile import Config
from kdakit.problem import Problem

__all__ = [
    "Config", "Saved", "backward", "default_config", "folds", "forward", "interpreted", "mixes", "operand_dtype", "pooled", "step",
    "supports",
]  # fmt: skip

folds = True  # no vmap of a kernel whose steps run in order


def supports(problem: Problem, device) -> str | None:
    """Why this backend cannot run `problem` on `device`; None: it can."""
    if str(device) not in ("tpu", "cpu"):
        return f"runs on TPUs, or in its interpreter on the CPU, not on {device}"
    wide = [name for name in ("dtype", "gate_dtype", "beta_dtype", "state_dtype") if getattr(problem, name) == "float64"]
    if wide:
        return "TPUs have no float64"
    return None


def mixes(problem: Problem, config: Config) -> bool:
    """A chunk may hold several sequences, and two heads may lie side by side in one product."""
    shape = tile.make_tile(problem, config)
    return shape.segments or shape.group > 1


def interpreted(device) -> str | None:
    return None if str(device) == "tpu" else "runs in the TPU interpreter here"


def operand_dtype(problem: Problem) -> str:
    """The dtype in which products take their factors."""
    return "bfloat16" if problem.dtype == "bfloat16" else "float32"


def default_config(problem: Problem, device) -> Config:
    """Heads of a step fill the latencies of each other's products: 16 take 0.82 times the cycles of 8, each. Fewer where VMEM is small, as
    on a TPU v4, or where there are fewer: blocks may be as wide as the array. There, what wants much room also takes shorter chunks."""
    narrow, little = max(problem.K, problem.V) <= 128, _vmem_mib() <= 16
    heads = 16 if problem.HV % 16 == 0 and narrow and problem.dtype == "bfloat16" and not little else 8
    much = (problem.needs_grad or tile.packed_with_states(problem)) if not narrow else problem.needs_grad and problem.dtype != "bfloat16"
    chunk = 32 if little and much else 128
    return Config(heads=min(problem.HV, heads), interpret=str(device) != "tpu", chunk=chunk)


def pooled():
    """Kernels over a pool of states."""
    return pool


def _vmem_mib() -> float:
    """Of the TPU that programs are made for; infinite if that is none, but its interpreter."""
    try:
        return pltpu.get_tpu_info().vmem_capacity_bytes / 2**20
    except ValueError:
        return math.inf
