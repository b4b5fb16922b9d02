"""Host side of the forward and of the step: buffers, strides and grids of the launches. No value on the device is looked at."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton

from kdakit.backends.triton_gpu import config as configs
from kdakit.backends.triton_gpu.config import Config, bounded, chunk_slots, padded, parts
from kdakit.backends.triton_gpu.kernels.prepare import prepare_kernel
from kdakit.backends.triton_gpu.kernels.prepare_normed import prepare_normed_kernel
from kdakit.backends.triton_gpu.kernels.scan import scan_kernel
from kdakit.backends.triton_gpu.kernels.scan_parts import combine_kernel, parts_kernel
from kdakit.backends.triton_gpu.kernels.scan_staged import staged_scan_kernel
from kdakit.backends.triton_gpu.kernels.step import step_kernel
from kdakit.backends.triton_gpu.kernels.tail import tail_kernel
from kdakit.backends.triton_gpu.runtime.interpreter import INTERPRETED
from kdakit.backends.triton_gpu.runtime.launch import DTYPES, Launch, is_recording, on_device
from kdakit.backends.triton_gpu.runtime.layout import Layout, Views, contiguous_parameters, views
from kdakit.problem import Arrays, Problem
from kdakit.reference import Result

SECOND = 2**15  # the most programs along a grid's second axis
TAIL_PROGRAMS, TAIL_BLOCK = 1 if INTERPRETED else 128, 2048  # the latter in elements


class Workspace(NamedTuple):
    """What the prepare kernel hands to the scan; slots are chunks, see device.program.first_slot."""

    slots: int
    tiles: torch.Tensor  # [slots, HV, 3, C, KP]  k_in, q_decayed, k_solved
    squares: torch.Tensor  # [slots, HV, C, C]  A_solved
    decay: torch.Tensor  # [slots, HV, KP]
    beta: torch.Tensor  # [slots, HV, C]  the prepare kernel's own
    lower: torch.Tensor | None = None  # [slots, HV, C, C]  for a backward
    solved: torch.Tensor | None = None  # [slots, HV, C, C]  for a backward: A_qk inverse
    checkpoints: torch.Tensor | None = None  # [slots / CHECKPOINT, HV, VP, KP]  for a backward


def workspace(problem: Problem, config: Config, device) -> Workspace:
    C, KP, HV = config.chunk, padded(problem.K), problem.HV
    slots = chunk_slots(problem, C)

    def empty(*shape, dtype=torch.float32):
        return torch.empty((slots, HV, *shape), dtype=dtype, device=device)

    dtype = getattr(torch, problem.dtype)
    space = Workspace(slots, empty(3, C, KP, dtype=dtype), empty(C, C, dtype=dtype), empty(KP), empty(C))
    if not problem.needs_grad:
        return space
    points = torch.empty((-(-slots // configs.CHECKPOINT), HV, padded(problem.V), KP), dtype=dtype, device=device)
    lower = empty(C, C, dtype=getattr(torch, config.solve))
    return space._replace(lower=lower, solved=empty(C, C, dtype=dtype), checkpoints=points)


@lru_cache(maxsize=1024)
def _prepare(problem: Problem, config: Config, layout: Layout) -> Launch:
    o, C, strides = problem.options, config.chunk, layout.strides
    numbers = (
        problem.T, problem.N, -(-problem.T // C), problem.H, problem.HV, o.scale, o.lower_bound or 0.0,
        *strides["q"], *strides["k"], *strides["g"], *strides["b"],
    )  # fmt: skip
    constants = dict(
        K=problem.K, KP=padded(problem.K), C=C, S=config.half, GROUP=config.group, DIAGONAL=config.diagonal, FLOOR=config.floor,
        ALIGN=layout.align, VECTOR=config.vector, VARLEN=bool(problem.varlen), GATE=o.gate, BETA=o.beta, L2NORM=o.l2norm,
        HAS_A_LOG=problem.has_A_log, HAS_DT_BIAS=problem.has_dt_bias,
        PRECISION=config.precision, SOLVE=DTYPES[config.solve], PTX=config.ptx, HIP=config.hip,
        HAS_LOWER=problem.needs_grad, BOUNDED=bounded(problem),
    )  # fmt: skip
    registers = {"maxnreg": config.prepare_registers} if config.prepare_registers else {}
    slots, kernel = chunk_slots(problem, C), prepare_normed_kernel if config.normed else prepare_kernel
    grid = (problem.HV, min(slots, SECOND), -(-slots // SECOND)) if config.normed else slots * problem.HV
    return Launch(kernel, grid, numbers, constants, num_warps=config.prepare_warps, num_stages=1, **registers)


def prepare(problem: Problem, arrays: Arrays, x: Views, config: Config) -> Workspace:
    """Stage intra of every chunk."""
    space = workspace(problem, config, arrays.q.device)
    if space.slots:
        _prepare(problem, config, x.layout)(
            x.q, x.k, x.g, arrays.beta, arrays.A_log, arrays.dt_bias, arrays.cu_seqlens, space.tiles, space.squares, space.decay,
            space.beta, space.lower, space.solved,
        )  # fmt: skip
    return space


class Scan(NamedTuple):
    """The scan of sequences, or of all their parts but the first, and what comes before that: see `parts`."""

    all: Launch
    first: Launch | None = None
    parts: Launch | None = None
    combine: Launch | None = None


class Paged(NamedTuple):
    """Where a scan finds and leaves states: in pages, by slot."""

    states: torch.Tensor  # [pages, HV, K, V] or [pages, HV, V, K], pages apart
    slots: torch.Tensor  # [N]
    known: torch.Tensor | None  # [N]: 0 where a sequence begins with zeros, whatever its page holds
    marks: torch.Tensor | None  # [chunk slots]: the page for the state before that chunk, or nobody's
    first: int  # slots below are nobody's

    def numbers(self) -> tuple[int, int, int, int]:
        """FIRST, CAPACITY, s_page and PAGE of the kernels."""
        unit = math.gcd(16, self.states.stride(0))
        return self.first, len(self.states), self.states.stride(0) // unit, unit


@lru_cache(maxsize=1024)
def _scan(problem: Problem, config: Config, layout: Layout, number: int, checkpoint: int, paged: tuple[int, ...] = ()) -> Scan:
    """In `number` parts. paged: as of `Paged.numbers`."""
    o, NT, HV, KP, VP = problem.options, -(-problem.T // config.chunk), problem.HV, padded(problem.K), padded(problem.V)
    constants = dict(
        K=problem.K, V=problem.V, KP=KP, VP=VP, C=config.chunk, S=config.half, GROUP=config.group,
        ALIGN=layout.align, VARLEN=bool(problem.varlen), V_FIRST=o.state_v_first, HAS_INITIAL=problem.has_initial_state,
        PRECISION=config.precision, STAGES=config.scan_stages, BV=config.block_v,
        HAS_FINAL=o.output_final_state, HAS_STATES=o.return_intermediate_states, HAS_CHECKPOINTS=problem.needs_grad, PART="whole",
        PAGED=bool(paged), PAGE=paged[3] if paged else 1,
    )  # fmt: skip
    options = {"num_warps": config.scan_warps} | ({"maxnreg": config.registers} if config.registers else {})
    numbers = problem.T, problem.N, NT, HV, *layout.strides["v"], max(1, o.chunk_size // config.chunk), checkpoint
    numbers = *numbers, *(paged[:3] or (0, 0, 0))
    rows, blocks = problem.N * HV, problem.N * HV * -(-problem.V // config.block_v)
    if not config.staged:
        return Scan(Launch(scan_kernel, blocks, numbers, constants, **options))
    numbers = *numbers, number
    if not config.split:
        return Scan(Launch(staged_scan_kernel, blocks, numbers, constants, **options))
    chained = {"launch_pdl": True} if config.ptx else {}
    options |= chained
    part_options = {"num_warps": config.part_warps} | ({"maxnreg": config.part_registers} if config.part_registers else {}) | chained
    of_parts = constants | dict(BV=config.part_block, STAGES=config.part_stages)
    of_states = constants | dict(BV=config.combine_block, STAGES=config.combine_stages)
    part_numbers = problem.T, NT, HV, number, *layout.strides["v"]
    return Scan(
        Launch(staged_scan_kernel, blocks * max(number - 1, 1), numbers, constants | dict(PART="later"), **options),
        Launch(staged_scan_kernel, blocks, numbers, constants | dict(PART="first"), **options),
        Launch(parts_kernel, rows * max(number - 2, 1) * (VP + KP) // config.part_block, part_numbers, of_parts, **part_options),
        Launch(combine_kernel, rows * VP // config.combine_block, part_numbers[:4], of_states, num_warps=config.combine_warps, **chained),
    )


def scan(problem: Problem, arrays: Arrays, x: Views, space: Workspace, config: Config, paged: Paged | None = None) -> Result:
    """Stages state and output of every sequence. paged: states come from pages and stay there."""
    o, device = problem.options, arrays.q.device
    out = torch.empty((problem.B, problem.T, problem.HV, problem.V), dtype=x.v.dtype, device=device)
    initial, final, held = arrays.initial_state, None, (None, None, None)
    if paged is not None:
        initial = final = paged.states
        held = paged.slots, paged.known, paged.marks
    elif o.output_final_state:
        final = torch.empty(problem.state_shape, dtype=torch.float32, device=device)
    states, offsets = intermediate_states(problem, arrays) if o.return_intermediate_states else (None, None)
    if problem.N:
        number = parts(problem, config) if config.split else 1
        launches = _scan(problem, config, x.layout, number, configs.CHECKPOINT, () if paged is None else paged.numbers())
        tensors = (
            x.v, space.tiles, space.squares, space.decay, arrays.cu_seqlens, out, initial, final, states, offsets, space.checkpoints, *held,
        )  # fmt: skip
        if config.staged:
            tensors = *tensors, space.decay if config.split else None
        if config.split and (number > 1 or is_recording()):  # compiled even then, so that a longer sequence finds it
            KP, VP = padded(problem.K), padded(problem.V)
            made = torch.empty((problem.N * problem.HV, max(number - 1, 1), VP + KP, KP), device=device)
            tensors = *tensors[:-1], made
            launches.first(*tensors)
            launches.parts(x.v, space.tiles, space.decay, arrays.cu_seqlens, made)
            launches.combine(made, arrays.cu_seqlens)
        launches.all(*tensors)
        clear_output(problem, arrays, out)
    return Result(out, final, states)


def intermediate_states(problem: Problem, arrays: Arrays):
    """The buffer for the states before each chunk, and per sequence the index of its first one. The number of chunks of packed sequences is
    known only to whoever reads cu_seqlens: the one place where the host waits, unless cu_seqlens_cpu is given."""
    like = dict(dtype=arrays.q.dtype, device=arrays.q.device)
    if not problem.varlen:
        return torch.empty((problem.B, problem.chunks, *problem.state_shape[1:]), **like), None
    size, host = problem.options.chunk_size, arrays.cu_seqlens_cpu
    counts = (arrays.cu_seqlens.diff() + size - 1) // size
    ends = counts.cumsum(0)
    offsets = (ends - counts).to(torch.int64)
    if host is None:
        return torch.empty((problem.B, int(ends[-1]), *problem.state_shape[1:]), **like), offsets
    # Room for as many as there can be, whatever the two copies say: kernels go by the one on the device.
    chunks = int(((host.diff() + size - 1) // size).sum())
    return torch.zeros((problem.B, problem.chunks, *problem.state_shape[1:]), **like)[:, :chunks], offsets


@lru_cache(maxsize=1024)
def _step(problem: Problem, config: Config, layout: Layout, has_final: bool) -> Launch:
    o, strides = problem.options, layout.strides
    numbers = (
        problem.T, problem.H, problem.HV, o.scale, o.lower_bound or 0.0,
        *strides["q"], *strides["k"], *strides["v"], *strides["g"], *strides["b"],
    )  # fmt: skip
    constants = dict(
        K=problem.K, V=problem.V, KP=triton.next_power_of_2(problem.K), BV=config.step_block_v, ALIGN=layout.align,
        VARLEN=bool(problem.varlen), V_FIRST=o.state_v_first, GATE=o.gate, BETA=o.beta, L2NORM=o.l2norm,
        HAS_A_LOG=problem.has_A_log, HAS_DT_BIAS=problem.has_dt_bias, HAS_INITIAL=problem.has_initial_state, HAS_FINAL=has_final,
    )  # fmt: skip
    grid = problem.N * problem.HV * -(-problem.V // config.step_block_v)
    return Launch(step_kernel, grid, numbers, constants, num_warps=config.step_warps)


def step(problem: Problem, arrays: Arrays, config: Config, final_state: torch.Tensor | None = None) -> Result:
    """The token recurrence in one launch. final_state: where the state goes, perhaps over the initial one, of which every program reads and
    writes a part of its own."""
    if final_state is not None and not final_state.is_contiguous():
        result = step(problem.replace(output_final_state=True), arrays, config)
        return result._replace(final_state=final_state.copy_(result.final_state))
    arrays = contiguous_parameters(arrays)
    x = views(arrays)
    out = torch.empty((problem.B, problem.T, problem.HV, problem.V), dtype=x.v.dtype, device=x.v.device)
    final = final_state
    if final is None and problem.options.output_final_state:
        final = torch.empty(problem.state_shape, dtype=getattr(torch, problem.state_dtype), device=x.v.device)
    if problem.N:
        with on_device(arrays.q):
            _step(problem, config, x.layout, final is not None)(
                x.q, x.k, x.v, x.g, arrays.beta, arrays.A_log, arrays.dt_bias, arrays.cu_seqlens, out, arrays.initial_state, final
            )
            clear_output(problem, arrays, out)
    return Result(out, final)


def clear_output(problem: Problem, arrays: Arrays, o: torch.Tensor) -> None:
    """Zeros in the rows of o [1, T, HV, V] past the last packed sequence, which no other launch visits."""
    if problem.varlen and problem.T:
        _tail(problem, False)(arrays.cu_seqlens, o, None, None, None, None)


def clear_gradients(problem: Problem, arrays: Arrays, d_q, d_k, d_v, d_g, d_beta) -> None:
    """The same for gradients; d_q and d_k have HV heads."""
    if problem.varlen and problem.T:
        _tail(problem, True)(arrays.cu_seqlens, d_v, d_q, d_k, d_g, d_beta)


@lru_cache(maxsize=1024)
def _tail(problem: Problem, gradients: bool) -> Launch:
    numbers = problem.T, problem.N, problem.HV * problem.K, problem.HV * problem.V, problem.HV
    return Launch(tail_kernel, TAIL_PROGRAMS, numbers, dict(BLOCK=TAIL_BLOCK, GRADIENTS=gradients), num_warps=4)
