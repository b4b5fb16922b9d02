"""Tile sizes per chip: data and plain Python, no device needed. No choice depends on the sequence length."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from kdakit.problem import Problem

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
# What is right in Triton's interpreter and compiles, but has not been compared with float64 on a GPU, waits for KDAKIT_UNCHECKED=1.
UNCHECKED = INTERPRETED or os.environ.get("KDAKIT_UNCHECKED", "0") not in ("", "0")


@dataclass(frozen=True)
class Config:
    """How one problem is cut. Every field is a compile key except those of the grid."""

    chunk: int  # tokens per chunk of the kernels; a divisor of the problem's chunk_size where its states are asked for
    group: int  # consecutive tokens in one thread's registers, see tile.row_tokens
    diagonal: int  # blocks of so many tokens are one product with one-sided factors
    floor: float  # log2-decays are raised to this, 0: not; keeps the one-sided factors finite
    half: int  # the prepare kernel works on a chunk in two parts of so many tokens, or in one
    prepare_warps: int
    block_v: int  # value channels per program of the scan
    scan_warps: int
    scan_stages: int
    precision: str  # of float32 products
    solve: str  # operand dtype of the triangular inverse and what follows it
    registers: int = 0  # per thread at most, in all kernels but the prepare kernel; 0: the compiler's choice
    hip: bool = False
    ptx: bool = False  # single PTX instructions may be used
    vector: int = 4  # adjacent channels per thread of the prepare kernel
    prepare_registers: int = 0  # per thread at most; 0: the compiler's choice
    split: bool = False  # so few heads that long sequences are scanned in parts
    processors: int = 132  # of the chip; not a compile key
    normed: bool = False  # the prepare kernel of `normed`
    pieces: bool = False  # a long sequence's pieces may be prepared and scanned at the same time
    early: bool = False  # kernels may begin before the one ahead of them has ended
    small: str = "float32"  # operand dtype of the backward's gradients within a chunk
    slice_k: int = 64  # channels at a time in the rebuild and gradient kernels
    slice_warps: int = 4  # of these two
    slice_v: int = 64  # value channels at a time in the products kernel
    product_slice_k: int = 64
    product_warps: int = 4
    product_stages: int = 2
    replay_block_v: int = 64
    replay_warps: int = 4
    replay_stages: int = 2
    reverse_block_v: int = 64
    reverse_warps: int = 4
    reverse_stages: int = 2
    step_block_v: int = 32
    step_warps: int = 2


class Piece(NamedTuple):
    """A share of a problem's chunks (of every sequence; packed ones are not cut) and of its value heads."""

    first: int
    chunks: int
    head: int
    heads: int


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


def backward_sizes(problem: Problem, chip: Chip) -> dict[str, Any]:
    """The Config fields of the backward. Gradients have no scale of their own, so float16 does not hold those within a chunk."""
    KP, VP, half = padded(problem.K), padded(problem.V), problem.dtype == "bfloat16"
    roomy = chip.shared_memory > 150_000
    # For sm_100 Triton 3.6 makes nothing at all of slices as wide as Blackwell's matrix unit.
    slice_k = 64 if half and not chip.hip and chip.name != "sm_100" else 32
    # All channels in one slice save a pass over q and k. On Hopper Triton 3.6 makes something wrong of several slices of 64 channels.
    slice_k = min(KP, slice_k if not chip.wgmma else 128 if half and KP <= 128 else 32)
    # Narrow tiles stay below the 64 rows of Hopper's matrix unit: Triton 3.6 misplaces their shared memory there.
    block_v = min(VP, 64 if problem.dtype != "float32" and KP >= 64 and (KP <= 128 or roomy) else 32)
    crowded = problem.N * problem.HV * max(1, VP // 128) * 2 > chip.processors
    reverse_v, reverse_warps = (128, 8) if chip.wgmma and block_v == 64 and VP >= 128 and KP <= 128 and crowded else (block_v, 4)
    return dict(
        small="bfloat16" if half else "float32", slice_k=slice_k, slice_warps=max(1, slice_k // 16) if half and not chip.hip else 4,
        slice_v=min(VP, 64 if half else 32), product_stages=2 if half and roomy else 1, replay_block_v=block_v, reverse_block_v=reverse_v,
        reverse_warps=reverse_warps, reverse_stages=2 if roomy and problem.dtype != "float32" else 1,
        replay_stages=2 if roomy and problem.dtype != "float32" else 1,
    )  # fmt: skip


def parts(problem: Problem, config: Config) -> int:
    """Into how many parts the scan of each sequence is split, by the times of a chunk in microseconds that an H200 takes; 1: not at all.

    All parts but the last are scanned twice, first without outputs but with K more columns than V; each then waits for those before it.
    """
    again, outputs, step, launch = 1.3, 1.6, 2.5, 12.0
    rows = problem.N * problem.HV
    blocks, more = padded(problem.V) // config.block_v, padded(problem.K) // config.block_v
    chunks = problem.T / config.chunk / (problem.N if problem.varlen else 1)

    def waves(programs: int) -> int:
        return -(-programs // config.processors)

    def time(n: int) -> float:
        if n == 1:
            return chunks * outputs * waves(rows * blocks)
        first = again * waves(rows * ((n - 2) * (blocks + more) + blocks))
        return chunks / n * (first + outputs * waves(rows * n * blocks)) + (n - 2) * step + launch

    return min(range(1, 17), key=time)


PIECES = 4  # of a sequence's chunks, or of the heads of packed sequences
PIECE = 6  # waves of prepare programs that a piece should have at least


def pieces(problem: Problem, config: Config) -> list[Piece]:
    """What is prepared and scanned together: while a piece is scanned, which keeps few threads busy and waits for memory, the next one is
    prepared, which does neither."""
    chunks = max(1, -(-problem.T // config.chunk))
    programs = chunks * problem.HV * (1 if problem.varlen else problem.B)
    n = min(PIECES, programs // (PIECE * 3 * config.processors), problem.HV if problem.varlen else chunks) if config.pieces else 1
    if n <= 1:
        return [Piece(0, chunks, 0, problem.HV)]
    size = problem.HV if problem.varlen else chunks
    ends = [size * i // n for i in range(n + 1)]
    if problem.varlen:
        return [Piece(0, chunks, a, b - a) for a, b in pairwise(ends)]
    return [Piece(a, b - a, 0, problem.HV) for a, b in pairwise(ends)]


def trusted_backward(problem: Problem, chip: Chip) -> bool:
    """Whether the backward of such a problem has been compared with float64 on such a GPU: Triton 3.6 has compiled right kernels of it to
    wrong ones, see `backward_sizes`."""
    seen = chip.name == "sm_90" and problem.K == problem.V == 128 and not problem.varlen
    return UNCHECKED or (seen and choose(problem, chip).normed)


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
    group, diagonal = (2, 2) if problem.dtype != "bfloat16" else (8, 16) if bounded(problem) else (4, 4)
    floor = -40.0 if diagonal == 4 else 0.0
    # The scan is one chain of products per program: wide programs move fewer bytes, narrow ones fill the chip when there are few sequences.
    sequences = problem.N * problem.HV * max(1, VP // 128)
    block_v, scan_warps = (128, 8) if sequences * 2 > chip.processors else (64, 4) if sequences * 4 > chip.processors else (32, 4)
    if KP > 128 or wide or not (chip.wgmma or chip.name == "sm_100"):
        block_v, scan_warps = min(block_v, 16 if wide else 64), 4
    if block_v > VP:
        block_v, scan_warps = VP, 4
    stages = 3 if chip.shared_memory > 200_000 and not wide and KP <= 128 else 2 if chip.shared_memory > 150_000 and not wide else 1
    precision = "ieee" if chip.hip else "tf32" if problem.dtype == "bfloat16" else "tf32x3"
    half = min(chunk, 32) if KP * (2 if wide else 1) <= 128 or chunk == 64 else max(16, chunk // 2)
    o = problem.options
    # Normalised keys keep the inverse within a few units, so that float16, as accurate as tf32 and twice as fast, holds it.
    solve = "float16" if o.l2norm and problem.dtype == "bfloat16" and abs(o.scale) <= 1024 else "float32"
    normed = solve == "float16" and abs(o.scale) <= 16 and chunk == 64 and KP <= 128 and not chip.hip
    normed = normed and (UNCHECKED or (bounded(problem) and KP == 128))
    # Elsewhere it would want more shared memory.
    split = UNCHECKED and sequences * 6 <= chip.processors and chip.wgmma and KP <= 128 and not wide
    if split:
        block_v, scan_warps = min(64, VP, KP), 4
    return Config(
        split=split, processors=chip.processors, normed=normed,
        chunk=chunk, half=half, group=1 if normed else group, diagonal=min(diagonal, chunk), floor=floor, prepare_warps=4,
        prepare_registers=168 if normed and bounded(problem) else 0, block_v=block_v,
        scan_warps=scan_warps, scan_stages=stages, precision=precision, solve=solve, step_block_v=min(VP, 32),
        # Where a kernel needs many registers, ptxas sometimes gives it 32: on sm_80, and for float32.
        registers=255 if not chip.hip and (wide or chip.name == "sm_80") else 0, hip=chip.hip, ptx=not (chip.hip or INTERPRETED),
        **backward_sizes(problem, chip),
    )  # fmt: skip
