"""How a problem is cut on a chip: plain Python over the data in `tiles`, no device needed. No choice depends on the sequence length."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kdakit.backends.triton_gpu import tiles
from kdakit.backends.triton_gpu.runtime.interpreter import INTERPRETED
from kdakit.problem import SAFE_BOUND, Problem

# What no GPU has shown to be right yet runs only where this is asked for, see `shown`.
UNCHECKED = os.environ.get("KDAKIT_UNCHECKED", "0") == "1"


@dataclass(frozen=True)
class Config:
    """How one problem is cut. Every field is a compile key except those of the grid."""

    chunk: int  # tokens per chunk of the kernels; a divisor of the problem's chunk_size where its states are asked for
    group: int  # consecutive tokens in one thread's registers, see device.program.row_tokens
    diagonal: int  # blocks of so many tokens are one product with one-sided factors
    floor: float  # log2-decays are raised to this, 0: not; keeps the one-sided factors finite
    half: int  # the prepare kernel works on a chunk in two parts of so many tokens, or in one
    prepare_warps: int
    block_v: int  # value channels per program of the scan
    scan_warps: int
    scan_stages: int
    precision: str  # of float32 products
    solve_dtype: str  # of operands, in the triangular inverse and what follows it
    bounded: bool  # the log-decay is known to be at least -5 per token
    differences: bool  # a gate's gradient may be a difference of two sums, which a bounded gate allows
    part_us: float  # microseconds, see `scan_us`
    wide_part_us: float
    output_us: float
    link_us: float
    split_us: float
    registers: int = 0  # per thread at most, in all kernels but the prepare kernel; 0: the compiler's choice
    hip: bool = False
    ptx: bool = False  # single PTX instructions may be used
    vector: int = 4  # adjacent channels per thread of the prepare kernel
    prepare_registers: int = 0  # per thread at most; 0: the compiler's choice
    staged: bool = False  # the scan of `scan_staged`
    in_halves: bool = False  # states as in `scan_wide`, `replay_wide` and `reverse_wide`
    split: bool = False  # so few heads that long sequences are scanned in parts
    part_block: int = 64  # rows of b or M per program of the scan of parts
    part_warps: int = 4
    part_stages: int = 3
    part_registers: int = 0  # per thread at most; 0: the compiler's choice
    combine_block: int = 16  # rows of b per program that combines parts
    combine_warps: int = 4
    combine_stages: int = 3
    processors: int = 132  # of the chip; not a compile key
    normed: bool = False  # the prepare kernel of `prepare_normed`
    gradient_warps: int = 8  # of the kernel of `gradient_normed`
    gradient_registers: int = 0  # per thread at most, of the kernel of `gradient_normed`; 0: the compiler's choice
    gradient_dtype: str = "float32"  # of operands, in the backward's gradients within a chunk
    by_token: bool = False  # the gradient kernel of `gradient_normed`: one formula for all gates of a chunk
    checkpoint: int = 8  # chunks between the states that a backward starts from
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
    rebuild_warps: int = 4  # of the kernel of `rebuild_normed`
    rebuild_registers: int = 0  # per thread at most, of the kernel of `rebuild`; 0: as all
    sums_warps: int = 4
    restore_block_v: int = 32
    restore_warps: int = 4
    step_block_v: int = 32
    step_warps: int = 2
    exact_last: bool = False  # half precision: the last chunks keep what rounding takes from rows, for d_beta
    exact_final: bool = False  # half precision: what rounding takes from the gradient of a final state is added to that of keys
    keep: bool = False  # the forward's tiles are kept for the backward, see `keeps`; with a checkpoint of 1 every state too
    exact_share: bool = False  # float32: what all gates of a chunk get, to a rounding or two, see `exact_share`
    wide_K: int = 0  # run with zeros up to so many channels, a form that the chip has shown, see `widened`; 0: as it is
    wide_V: int = 0
    wide_dtype: str = ""  # of q, k, v and o on the way through the kernels, see `arithmetic`; "": their own

    @property
    def prepare_precision(self) -> str:
        """Of `prepare`, whose program takes the compiler a minute as it is: its sums are a third of what being cut off costs."""
        return "bf16x6 cut" if self.precision == "bf16x6" else self.precision

    @property
    def keeps_states(self) -> bool:
        """The forward's states before every chunk, and r, are kept for the backward."""
        return self.keep and self.checkpoint == 1


@dataclass(frozen=True)
class Cut:
    """How a call over a pool of states is cut; for up to 128 key channels, with more a program takes fewer value channels."""

    block_v: int
    warps: int
    registers: int = 0  # per thread at most; 0: the compiler's choice
    chained: bool = False  # begins while the launch before it ends

    @property
    def options(self) -> dict[str, int | bool]:
        return dict(num_warps=self.warps, registers=self.registers) | ({"launch_pdl": True} if self.chained else {})


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
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return _chip_of("cuda", torch.cuda.current_device())
    return _chip_of(device.type, device.index)


@lru_cache
def _chip_of(kind: str, index: int | None) -> Chip:
    import torch

    if kind != "cuda" or not torch.cuda.is_available():
        return CHIPS["sm_90"]
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return CHIPS.get(properties.gcnArchName.partition(":")[0], CHIPS["gfx942"])
    return chip_for(properties.major, properties.minor)


def chip_for(major: int, minor: int) -> Chip:
    """NVIDIA's, by the nearest smaller compute capability."""
    known = [n for n in (80, 86, 89, 90, 100, 120) if n <= major * 10 + minor] or [80]
    return CHIPS[f"sm_{known[-1]}"]


def padded(size: int) -> int:
    """The next power of two, at least 16: the smallest side of a matrix product."""
    return max(16, 1 << (size - 1).bit_length())


def read_channels(problem: Problem, config: Config) -> int:
    """Of a row's channels in the workspace, padded to a power of two, so many are read: where the state is in two halves, three quarters
    may be enough."""
    KP = padded(problem.K)
    return KP * 3 // 4 if config.in_halves and problem.K <= KP * 3 // 4 else KP


def chunk_slots(problem: Problem, C: int) -> int:
    """Places for chunks: with cu_seqlens a bound that needs no look at them, see device.program.first_slot."""
    return problem.T // C + problem.N if problem.varlen else problem.B * -(-problem.T // C)


def bounded(problem: Problem) -> bool:
    """The log-decay is known to be at least -5 per token."""
    o = problem.options
    return o.lower_bound is not None and o.lower_bound >= SAFE_BOUND and (o.gate == "bounded" or o.safe_gate)


def keeps(problem: Problem, normed: bool) -> bool:
    """A forward with disable_recompute leaves the tiles of `prepare_normed` and the states of its scan to its backward, which then need not
    make them again. Elsewhere the option changes nothing. Not where the caller has an initial state: its gradient wants rows of gates that
    forget all as exactly as `rebuild_normed` makes them, and what rounding takes from them."""
    return problem.options.disable_recompute and problem.needs_grad and normed and not problem.has_initial_state


def corrected(problem: Problem) -> bool:
    """Half-precision tiles: the gradient of the initial state gets back what they lost."""
    return problem.has_initial_state and problem.dtype != "float32"


def exact_q(problem: Problem) -> bool:
    """scale q are numbers of q's dtype, of which the plain recurrence loses nothing: neither may the way from q to the caller's state."""
    o = problem.options
    return corrected(problem) and not o.l2norm and scaled_by_two(problem)


def scaled_by_two(problem: Problem) -> bool:
    """The scale is a power of two, which rounds nothing of q."""
    return math.frexp(abs(problem.options.scale))[0] == 0.5


def exact_pairs(problem: Problem, config: Config) -> bool:
    """Pairs' gradients are kept in float32 beside half-precision operands. Where keys are alike and strengths 1 or more, a token takes
    back what the one before it wrote: gradients of pairs cancel in every gate's, and once more in those of the gate's parameters. A given
    beta may be 1, a sigmoid is less. Not where `gradient_normed` takes them, nor in the other forms of its head size with normalised keys,
    whose speed is what they are for."""
    o = problem.options
    fast = config.by_token or (o.beta == "given" and o.l2norm and padded(problem.K) == 128)
    return config.gradient_dtype == "float32" or (o.beta != "sigmoid" and o.gate != "log_decay" and not fast)


def joint(problem: Problem, chip: Chip, normed: bool) -> bool:
    """The gradient kernel of `gradient_normed`. With 64 channels not where `exact_pairs` wants float32, since it multiplies with pairs in
    bfloat16, and on Hopper alone, where it was timed. Smaller heads spill. float16 holds no gate that forgets nothing, which it takes for
    tokens that are not there."""
    o, KP = problem.options, padded(problem.K)
    half = KP == 64 and chip.wgmma and (o.beta == "sigmoid" or o.gate == "log_decay")
    return normed and bounded(problem) and (KP == 128 or half) and problem.gate_dtype != "float16"


def turned(problem: Problem, config: Config) -> bool:
    """Gradients of pairs lie column by column, where the gradient kernel has tiles of 64 channels, rows of 128 bytes in shared memory:
    tiles of pairs then have rows of 128 bytes too, q's and k's after each other; by rows they have 64. ptxas 12.8 may lose the address of a
    place in shared memory that holds tiles of two formats in turn: see tests/helpers/lost_addresses.py."""
    return config.slice_k == 64 or (config.by_token and padded(problem.K) == 64)


def exact_decay(problem: Problem) -> bool:
    """A chunk's gates get sum_v S dS' of states in two parts of half precision. The recurrence multiplies them in float32, and where gates
    are slow that sum is most of their gradients; where they are computed here, a few with the steepest slopes have all of it, and nothing
    averages what rounding takes: gradients of their parameters were off by 2.2 times what is allowed in float16. Not in bfloat16 with 128
    channels or more, nor in it with given log-decays: there the speed counts, or states are most of what is moved."""
    if problem.dtype == "bfloat16":
        return problem.options.gate != "log_decay" and padded(problem.K) < 128
    return problem.dtype == "float16"


def exact_ends(problem: Problem) -> bool:
    """The same for all others, near a sequence's first and last token alone, where either S or dS' is the caller's own or nearly so: there
    both are kept in float32. In a short sequence the recurrence has lost little, and the ends are all there is."""
    return problem.dtype == "bfloat16" and not exact_decay(problem)


def end_chunks(problem: Problem, config: Config) -> int:
    """So many chunks are near either end: 64 tokens, as one chunk has where it is not shorter."""
    return max(1, 64 // config.chunk) if exact_ends(problem) else 1


def exact_share(problem: Problem) -> bool:
    """decay * sum_v S dS', which all gates of a chunk get, has both factors to a rounding or two in float32 too. Where gates have
    parameters, one slow channel can hold all of their gradients, and one error for all its gates averages out of nothing."""
    return problem.dtype == "float32" and problem.options.gate != "log_decay"


def checkpoint_dtype(problem: Problem, config: Config) -> str:
    """Of the states that a backward starts from: as exactly as it then has those before every chunk. Kept ones are these, in two parts."""
    return "float32" if exact_decay(problem) and not config.keeps_states else problem.dtype


def exact_steps(problem: Problem) -> bool:
    """Steps have decays to a rounding: all but those of the form that decodes in models, whose code is what was timed."""
    return not (problem.dtype == "bfloat16" and problem.options.l2norm and padded(problem.K) == 128)


def by_rows(problem: Problem, config: Config) -> bool:
    """States that a scan leaves on its way become whole rows first, see `store_mark`: where each warp has 16 adjacent ones."""
    of_a_warp = config.staged or (config.block_v == 128 and problem.dtype == "bfloat16")
    return problem.options.state_v_first and (INTERPRETED or (config.ptx and of_a_warp))


def facts(problem: Problem, chip: Chip, normed: bool) -> dict[str, Any]:
    """What the rows of `tiles` ask about."""
    K, V = padded(problem.K), padded(problem.V)
    heads = tiles.crowd(problem.N * problem.HV * max(1, V // 128), chip.processors)
    gate, form = "bounded" if bounded(problem) else "any", "normed" if normed else "plain"
    return dict(dtype=problem.dtype, K=K, V=V, heads=heads, gate=gate, form=form)


def tile_sizes(problem: Problem, chip: Chip, normed: bool) -> dict[str, Any]:
    """The Config fields that `tiles` holds for the chip, no block wider than V."""
    VP = padded(problem.V)
    sizes = dict(tiles.pick(chip.name, **facts(problem, chip, normed)))
    for block, warps in (("block_v", "scan_warps"), ("replay_block_v", "replay_warps"), ("reverse_block_v", "reverse_warps")):
        if sizes[block] > VP:
            sizes |= {block: VP, warps: 4}
    if problem.options.state_v_first:  # K is adjacent: more warps would only share out sums over it
        sizes |= {"step_block_v": 16, "step_warps": 1}
    return sizes | {"slice_v": min(VP, sizes["slice_v"]), "step_block_v": min(VP, sizes["step_block_v"])}


@lru_cache(maxsize=1024)
def parts(problem: Problem, config: Config) -> int:
    """Into how many parts the scan of each sequence is split: what takes the least time; 1: not at all."""
    blocks = padded(problem.V) // config.block_v
    most = config.processors // (problem.N * problem.HV * blocks)  # so many programs with outputs have a processor each
    return min((1, *range(3, min(32, most + 1) + 1)), key=lambda n: scan_us(problem, config, n))


def scan_us(problem: Problem, config: Config, n: int) -> float:
    """The microseconds of the scan in n parts.

    All parts but the first and the last are scanned twice, first without outputs but with K more rows than V, while the first is scanned
    with outputs; then the states between them are combined, one after the other, and the others scanned. A processor holds one program.
    """
    again = config.wide_part_us if config.part_block > 64 else config.part_us
    chunks = problem.T / config.chunk / (problem.N if problem.varlen else 1)
    if n == 1:
        return chunks * config.output_us
    more, blocks = (padded(problem.V) + padded(problem.K)) // config.part_block, padded(problem.V) // config.block_v
    rounds = -(-problem.N * problem.HV * (blocks + (n - 2) * more) // config.processors)
    a_chunk = max(again * rounds, config.output_us) + config.output_us
    return chunks / n * a_chunk + (n - 2) * config.link_us + config.split_us


def few_heads(problem: Problem, chip: Chip, sizes: dict[str, Any]) -> dict[str, Any]:
    """The fields of Config for the scan of `scan_staged`, in parts or not: where one program of 64 channels has a processor for itself, and
    its shared memory, which other chips have less of."""
    KP, VP = padded(problem.K), padded(problem.V)
    if not chip.wgmma or problem.dtype == "float32" or KP not in (64, 128) or VP < 64:
        return {}
    sequences = problem.N * problem.HV * max(1, VP // 128)
    if sequences * 4 > chip.processors:
        return {"staged": sizes["block_v"] == 64 and (KP == 128 or problem.dtype == "bfloat16")}  # float16 of 64 channels: nobody has timed
    # Programs of 128 rows take half as long again as those of 64: less than two of these in a row.
    wide = min(KP, VP) >= 128 and sequences >= 3
    part = dict(part_block=128, part_warps=8) if wide else dict(part_block=64, part_warps=4)
    return dict(split=True, staged=True, block_v=64, scan_warps=4, scan_stages=3, **part)


def choose(problem: Problem, chip: Chip) -> Config:
    """The configuration for a problem on a chip."""
    wide = problem.dtype == "float32"
    KP = padded(problem.K)
    # Levels down to pairs of tokens make long programs, which in chunks of 64 spill their registers and take half a minute to compile.
    chunk = 64 if problem.dtype == "bfloat16" and KP <= 128 else 32
    if problem.needs_grad and problem.dtype != "bfloat16":
        chunk = min(chunk, KP)  # as many tokens may overwrite all that was before them
    if chip.shared_memory < 100_000:
        chunk = min(chunk, 32)
    if problem.options.return_intermediate_states:
        chunk = min(chunk, problem.options.chunk_size)
    # float16 cannot hold one-sided factors and float32 wants every bit: both take the levels down to pairs of tokens.
    group, diagonal = (2, 2) if problem.dtype != "bfloat16" else (8, 16) if bounded(problem) else (4, 4)
    floor = -40.0 if diagonal == 4 else 0.0
    # Three tf32 products truncate what is left of a factor; six of bfloat16 round it, for 7 % more time. float16 need not care.
    precision = "ieee" if chip.hip else {"bfloat16": "tf32", "float16": "tf32x3"}.get(problem.dtype, "bf16x6")
    # The rows of 32 tokens in float32 want more shared memory, or on sm_80 and sm_89 more registers, than there are.
    fits = (128 if not wide or chip.shared_memory > 200_000 else 64) >= KP
    half = min(chunk, 32 if fits else 16)
    o = problem.options
    # Normalised keys keep the inverse within a few units, so that float16, as accurate as tf32 and twice as fast, holds it.
    solve_dtype = "float16" if o.l2norm and problem.dtype == "bfloat16" and abs(o.scale) <= 1024 else "float32"
    normed = solve_dtype == "float16" and abs(o.scale) <= 16 and chunk == 64 and KP <= 128 and not chip.hip
    sizes = tile_sizes(problem, chip, normed)
    sizes |= few_heads(problem, chip, sizes)
    in_halves = chip.wgmma and not wide and KP == 256 and sizes["block_v"] >= 64
    keep = keeps(problem, normed)
    return Config(
        processors=chip.processors,
        hip=chip.hip,
        ptx=not (chip.hip or INTERPRETED),
        chunk=chunk,
        half=half,
        group=1 if normed else group,
        diagonal=min(diagonal, chunk),
        floor=floor,
        precision=precision,
        solve_dtype=solve_dtype,
        bounded=bounded(problem),
        # Not in float32, where saturated gates have gradients far below the sums, nor in float16, whose gradients are float32's.
        differences=bounded(problem) and problem.dtype == "bfloat16",
        normed=normed,
        in_halves=in_halves,
        # Gradients have no scale of their own, so float16 does not hold those within a chunk.
        gradient_dtype="bfloat16" if problem.dtype == "bfloat16" else "float32",
        by_token=joint(problem, chip, normed),
        exact_last=not wide,
        exact_final=not wide,
        exact_share=exact_share(problem),
        keep=keep,
        checkpoint=1 if keep else Config.checkpoint,
        **sizes,
    )


@lru_cache(maxsize=1024)
def chosen(problem: Problem, chip: Chip) -> Config:
    """`choose`, remembered: for sizes that are plain numbers."""
    return choose(problem, chip)
