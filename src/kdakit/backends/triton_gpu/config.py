"""Tile sizes per chip: data and plain Python, no device needed. Nothing here depends on the sequence length's value beyond how many programs run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kdakit.problem import Problem


@dataclass(frozen=True)
class Config:
    """How one problem is cut. Every field is a compile key except those of the grid."""

    chunk: int  # tokens per chunk of the kernels; a divisor of the problem's chunk_size where its states are asked for
    group: int  # consecutive tokens in one thread's registers, see tile.row_tokens
    diagonal: int  # blocks of so many tokens are one product with one-sided factors
    block_k: int  # channels per pass of the prepare kernel
    prepare_warps: int
    block_v: int  # value channels per program of the scan
    scan_warps: int
    scan_stages: int
    precision: str  # of float32 products
    inverse: str  # operand dtype of the triangular inverse
    step_block_v: int = 16
    step_warps: int = 4


@dataclass(frozen=True)
class Chip:
    """What a family of GPUs can hold."""

    name: str
    shared_memory: int
    processors: int
    wgmma: bool = False
    hip: bool = False


CHIPS = {
    "sm_80": Chip("sm_80", 166912, 108),
    "sm_86": Chip("sm_86", 101376, 84),
    "sm_89": Chip("sm_89", 101376, 128),
    "sm_90": Chip("sm_90", 232448, 132, wgmma=True),
    "sm_100": Chip("sm_100", 232448, 148),
    "sm_120": Chip("sm_120", 101376, 170),
    "gfx942": Chip("gfx942", 65536, 304, hip=True),
    "gfx950": Chip("gfx950", 163840, 256, hip=True),
}


def chip_of(device: Any) -> Chip:
    """The Chip of a torch device, by the nearest smaller compute capability; sm_90 where no device can be asked."""
    import torch

    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return CHIPS["sm_90"]
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return CHIPS.get(properties.gcnArchName.partition(":")[0], CHIPS["gfx942"])
    number = properties.major * 10 + properties.minor
    known = [n for n in (80, 86, 89, 90, 100, 120) if n <= number] or [80]
    return CHIPS[f"sm_{known[-1]}"]


def padded(size: int) -> int:
    """The next power of two, at least 16: the smallest side of a matrix product."""
    return max(16, 1 << (size - 1).bit_length())


def bounded(problem: Problem) -> bool:
    """The log-decay is known to be at least -5 per token."""
    o = problem.options
    return o.lower_bound is not None and (o.gate == "bounded" or o.safe_gate)


def choose(problem: Problem, chip: Chip) -> Config:
    """The configuration for a problem on a chip."""
    wide = problem.dtype == "float32"
    KP, VP = padded(problem.K), padded(problem.V)
    chunk = 32 if KP > 128 or (wide and KP > 64) else 64
    if chip.shared_memory < 100_000:
        chunk = min(chunk, 32)
    if problem.options.return_intermediate_states:
        chunk = min(chunk, problem.options.chunk_size)
    # float16 cannot hold one-sided factors and float32 wants every bit: both take the levels down to pairs of tokens.
    group, diagonal = (2, 2) if problem.dtype != "bfloat16" else (4, 16) if bounded(problem) else (4, 4)
    sequences = problem.N * problem.HV
    block_v = min(VP, 64)
    if sequences * (VP // block_v) * 2 <= chip.processors:
        block_v = min(VP, 32)
    precision = "ieee" if chip.hip else "tf32x3" if wide else "tf32"
    inverse = "float16" if problem.options.l2norm and not wide else "float32"
    return Config(
        chunk=chunk, group=group, diagonal=min(diagonal, chunk), block_k=min(KP, 32 if wide else 64), prepare_warps=4, block_v=block_v,
        scan_warps=4, scan_stages=1 if wide or chip.shared_memory < 150_000 else 2, precision=precision, inverse=inverse,
        step_block_v=min(VP, 16),
    )  # fmt: skip
