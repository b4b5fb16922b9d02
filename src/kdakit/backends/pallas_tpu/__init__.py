"""KDA as Mosaic kernels for TPUs, written in Pallas. Without a TPU they run in Pallas' TPU interpreter, when asked for by name."""

from __future__ import annotations

import math

from kdakit.backends.pallas_tpu import pool, tile
from kdakit.backends.pallas_tpu.call import Saved, backward, forward, step
from kdakit.backends.pallas_tpu.chip import SMALL, UNKNOWN, this_chip
from kdakit.backends.pallas_tpu.tile import Config
from kdakit.problem import Problem

__all__ = [
    "Config", "Saved", "backward", "default_config", "folds", "forward", "interpreted", "mixes", "operand_dtype", "pooled", "step",
    "supports", "unshown",
]  # fmt: skip

folds = True  # no vmap of a kernel whose steps run in order
MOST, MOST_BACKWARD = 32, 16  # heads of a step; a backward's 32 spill what 16 do not
FEW_CHANNELS = 8  # see `overwritten`
# Heads fill the latencies of each other's products: a forward's step on a v6e takes about so many bundles, and so many more for each head.
STEP_BUNDLES, HEAD_BUNDLES = 1100, 225


def supports(problem: Problem, device) -> str | None:
    """Why this backend cannot run `problem` on `device`; None: it can."""
    if str(device) not in ("tpu", "cpu"):
        return f"runs on TPUs, or in its interpreter on the CPU, not on {device}"
    wide = [name for name in ("dtype", "gate_dtype", "beta_dtype", "state_dtype") if getattr(problem, name) == "float64"]
    if wide:
        return "TPUs have no float64"
    return overwritten(problem, "double_sigmoid")


def unshown(problem: Problem, device) -> str | None:
    """Why 'auto' leaves the problem to others."""
    return overwritten(problem, "given")


def overwritten(problem: Problem, beta: str) -> str | None:
    """Why chunks of so few channels are not for such strengths: of up to 2, a token may write as much as all channels hold, and what is
    left of it in a chunk is a difference. With double sigmoids, in float32, a gate's gradient is off by 6.7, 2.8, 1.2, 0.6 times what is
    allowed with 2, 4, 8, 16 channels."""
    if problem.K > FEW_CHANNELS or problem.options.beta != beta or (problem.op != "chunk" and not problem.needs_grad):
        return None
    return f"strengths of up to 2 overwrite what up to {FEW_CHANNELS} key channels hold; use backend='xla'"


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
    """Where VMEM is small, as on a TPU v4, or half a v6e's, what wants much room takes shorter chunks."""
    chip, narrow = this_chip(), max(problem.K, problem.V) <= 128
    little = chip.vmem_mib <= SMALL
    much = (problem.needs_grad or tile.packed_with_states(problem)) if not narrow else problem.needs_grad and problem.dtype != "bfloat16"
    many = narrow and problem.dtype == "bfloat16" and not little
    if problem.op == "recurrent":  # has no products, but states to copy while others are at work
        heads = min(problem.HV, 16 if many and problem.HV % 16 == 0 else 8)
    else:
        heads = heads_of_step(problem, MOST if many else 8, chip.cores)
    backward = heads_of_step(problem, MOST_BACKWARD, chip.cores) if heads > MOST_BACKWARD and heads % MOST_BACKWARD == 0 else heads
    chunk = 32 if little and much else 64 if much and chip.vmem_mib <= UNKNOWN else 128
    return Config(heads=heads, interpret=str(device) != "tpu", chunk=chunk, backward_heads=backward)


def pooled():
    """Kernels over a pool of states."""
    return pool


def heads_of_step(problem: Problem, most: int, cores: int = 1) -> int:
    """Of the numbers that divide all heads the one that takes the least time, if a core takes whole blocks of heads.

    Blocks in which XLA keeps 8 heads together take multiples of 8 or all there are; others, pairs, as two heads share matrices.
    """
    HV = problem.HV
    unit = 8 if HV % 8 == 0 else 2 if HV % 2 == 0 else 1
    found = [n for n in range(1, min(HV, most) + 1) if HV % n == 0 and (n % unit == 0 or n == HV)]
    return min(found, key=lambda n: (math.ceil(problem.B * (HV // n) / cores) * (STEP_BUNDLES + HEAD_BUNDLES * n), -n))
