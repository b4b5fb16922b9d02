"""Host side: buffers, strides and grids of the launches. No value on the device is looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kdakit.backends.triton_gpu.config import INTERPRETED, Config, bounded, padded, parts
from kdakit.backends.triton_gpu.intra import prepare_kernel
from kdakit.backends.triton_gpu.layout import Layout, Views, views
from kdakit.backends.triton_gpu.names import settle
from kdakit.backends.triton_gpu.normed import prepare_normed_kernel
from kdakit.backends.triton_gpu.parts import combine_kernel, parts_kernel
from kdakit.backends.triton_gpu.recurrent import step_kernel
from kdakit.backends.triton_gpu.staged import staged_scan_kernel
from kdakit.backends.triton_gpu.state import scan_kernel
from kdakit.backends.triton_gpu.streams import aside_here, seen_here
from kdakit.problem import Arrays, Problem
from kdakit.reference import Result

DTYPES = {"float16": tl.float16, "bfloat16": tl.bfloat16, "float32": tl.float32}
FAR_INT = 2**31
SECOND = 2**15  # the most programs along a grid's second axis
CHECKPOINT = 8  # chunks between the states that a backward starts from
Grid = int | tuple[int, int, int]
_compiled: dict[Any, Any] = {}
_recorded: ContextVar[list | None] = ContextVar("recorded", default=None)


class Seen(NamedTuple):
    """A launch that ran; aside: on the second stream of `beside`."""

    compiled: Any
    grid: Grid
    tensors: tuple
    rest: tuple
    aside: bool


def launch(kernel, grid: Grid, args: tuple, constants: dict[str, Any], **options: int) -> Any:
    """Run `kernel` on `grid` programs; `args` and those of `constants` that it has are its parameters. Returns the compiled kernel.

    Triton binds and inspects every parameter on every launch, which for short sequences takes longer than the kernel. Here a compiled
    kernel is found again by what it was specialised on - constants, dtypes, alignment of pointers, wide integers - and called directly.
    Constants that it does not name are left out.
    """
    values = [constants[name] for name in kernel.arg_names[len(args) :]]
    record = _recorded.get()
    if INTERPRETED or record is not None:
        named = dict(zip(kernel.arg_names[len(args) :], values, strict=True))
        if record is not None:
            settle(kernel)
            record.append((kernel, args, named, options))
        elif grid:
            kernel[axes(grid)](*args, **named)
        return None
    key = kernel, torch.cuda.current_device(), *options.values(), *values, *map(_specialised, args)
    compiled = _compiled.get(key)
    if compiled is None:
        settle(kernel)
        named = dict(zip(kernel.arg_names[len(args) :], values, strict=True))
        compiled = kernel[axes(grid)](*args, **named, **options) if grid else kernel.warmup(*args, grid=(1,), **named, **options)
        _compiled[key] = compiled
    else:
        start(compiled, grid, args, values)
    return compiled


def axes(grid: Grid) -> tuple[int, ...]:
    return grid if isinstance(grid, tuple) else (grid, 1, 1)


def start(compiled, grid: Grid, args: Iterable, values: Iterable, stream: int | None = None) -> None:
    """What Triton does once it has found the compiled kernel, less its calls of hooks that nobody has set."""
    if not grid:
        return
    driver, hooks = triton.runtime.driver.active, triton.knobs.runtime
    if stream is None:
        stream = driver.get_current_stream(driver.get_current_device())
    run = compiled.run  # loads the kernel when asked for the first time
    enter, leave, about = hooks.launch_enter_hook, hooks.launch_exit_hook, None
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        about = compiled.launch_metadata(axes(grid), stream, *args, *values)
    else:
        enter = leave = None
    run(*axes(grid), stream, compiled.function, compiled.packed_metadata, about, enter, leave, *args, *values)


class Launch:
    """A kernel with its grid and all its parameters but the tensors, for calls that come again.

    What Triton specialises on is then settled but for the tensors, so that a compiled kernel is found by

        (device, dtype of each tensor, which of them start at a multiple of 16 bytes)

    and gets addresses: Triton would ask each tensor for its own, and the driver whose it is.
    """

    def __init__(self, kernel, grid: Grid, numbers: tuple, constants: dict[str, Any], **options: int):
        self.kernel, self.grid, self.numbers, self.constants, self.options = kernel, grid, numbers, constants, options
        self.rest = *numbers, *(constants[name] for name in kernel.arg_names if name in constants)  # constants come last
        self.compiled: dict[Any, Any] = {}

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        compiled = None
        if _recorded.get() is None:
            addresses = [None if x is None else x.data_ptr() for x in tensors]
            key = tensors[0].get_device(), *[x and x % 16 for x in addresses], *[None if x is None else x.dtype for x in tensors]
            compiled = self.compiled.get(key)
        if compiled is not None:
            start(compiled, self.grid, addresses, self.rest)
        else:
            compiled = launch(self.kernel, self.grid, (*tensors, *self.numbers), self.constants, **self.options)
            if compiled is None:
                return
            self.compiled[key] = compiled
        if (seen := seen_here.get()) is not None:
            seen.append(Seen(compiled, self.grid, tensors, self.rest, aside_here.get()))


@contextlib.contextmanager
def recording() -> Iterator[list]:
    """Within, `launch` runs nothing: it adds (kernel, arguments, constants, options) to the list."""
    token = _recorded.set(record := [])
    try:
        yield record
    finally:
        _recorded.reset(token)


@contextlib.contextmanager
def watching() -> Iterator[list]:
    """Within, every `Launch` that runs is added to the list as `Seen`; FORK and JOIN are where `beside` begins and ends."""
    token = seen_here.set(seen := [])
    try:
        yield seen
    finally:
        seen_here.reset(token)


def _specialised(x: Any) -> Any:
    """What Triton compiles a kernel parameter for."""
    kind = type(x)
    if kind is int:
        return -FAR_INT <= x < FAR_INT
    if kind is float or x is None:
        return kind
    return x.dtype, x.data_ptr() % 16 == 0


def chunk_slots(problem: Problem, C: int) -> int:
    """Places for chunks: with cu_seqlens a bound that needs no look at them, see tile.first_slot."""
    return problem.T // C + problem.N if problem.varlen else problem.B * -(-problem.T // C)


class Workspace(NamedTuple):
    """What the prepare kernel hands to the scan; slots are chunks, see tile.first_slot."""

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
    points = torch.empty((-(-slots // CHECKPOINT), HV, padded(problem.V), KP), dtype=dtype, device=device)
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


@lru_cache(maxsize=1024)
def _scan(problem: Problem, config: Config, layout: Layout, number: int, checkpoint: int) -> Scan:
    """In `number` parts."""
    o, NT, HV, KP, VP = problem.options, -(-problem.T // config.chunk), problem.HV, padded(problem.K), padded(problem.V)
    constants = dict(
        K=problem.K, V=problem.V, KP=KP, VP=VP, C=config.chunk, S=config.half, GROUP=config.group,
        ALIGN=layout.align, VARLEN=bool(problem.varlen), V_FIRST=o.state_v_first, HAS_INITIAL=problem.has_initial_state,
        PRECISION=config.precision, STAGES=config.scan_stages, BV=config.block_v,
        HAS_FINAL=o.output_final_state, HAS_STATES=o.return_intermediate_states, HAS_CHECKPOINTS=problem.needs_grad, PART="whole",
    )  # fmt: skip
    options = {"num_warps": config.scan_warps} | ({"maxnreg": config.registers} if config.registers else {})
    numbers = problem.T, problem.N, NT, HV, *layout.strides["v"], max(1, o.chunk_size // config.chunk), checkpoint
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


def scan(problem: Problem, arrays: Arrays, x: Views, space: Workspace, config: Config) -> Result:
    """Stages state and output of every sequence."""
    o, device = problem.options, arrays.q.device
    out = torch.empty((problem.B, problem.T, problem.HV, problem.V), dtype=x.v.dtype, device=device)
    final = torch.empty(problem.state_shape, dtype=torch.float32, device=device) if o.output_final_state else None
    states, offsets = intermediate_states(problem, arrays) if o.return_intermediate_states else (None, None)
    if problem.N:
        number = parts(problem, config) if config.split else 1
        launches = _scan(problem, config, x.layout, number, CHECKPOINT)
        tensors = (
            x.v, space.tiles, space.squares, space.decay, arrays.cu_seqlens, out, arrays.initial_state, final, states, offsets,
            space.checkpoints,
        )  # fmt: skip
        if config.staged:
            tensors = *tensors, space.decay if config.split else None
        if config.split and (number > 1 or _recorded.get() is not None):  # compiled even then, so that a longer sequence finds it
            KP, VP = padded(problem.K), padded(problem.V)
            made = torch.empty((problem.N * problem.HV, max(number - 1, 1), VP + KP, KP), device=device)
            tensors = *tensors[:-1], made
            launches.first(*tensors)
            launches.parts(x.v, space.tiles, space.decay, arrays.cu_seqlens, made)
            launches.combine(made, arrays.cu_seqlens)
        launches.all(*tensors)
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


def contiguous_parameters(arrays: Arrays) -> Arrays:
    """The small tensors as the kernels index them."""
    if all(x is None or x.is_contiguous() for x in arrays[5:9]):
        return arrays
    A_log, dt_bias, initial_state, cu_seqlens = (x if x is None or x.is_contiguous() else x.contiguous() for x in arrays[5:9])
    return Arrays(*arrays[:5], A_log, dt_bias, initial_state, cu_seqlens, *arrays[9:])


def forward(problem: Problem, arrays: Arrays, config: Config) -> tuple[Result, list]:
    arrays = contiguous_parameters(arrays)
    x = views(arrays)
    with on_device(arrays.q):
        if arrays.q.is_cuda:
            from kdakit.backends.triton_gpu import ahead

            ahead.compile_all(problem, arrays, config)
        space = prepare(problem, arrays, x, config)
        result = scan(problem, arrays, x, space, config)
        if not problem.needs_grad:
            return result, []
        from kdakit.backends.triton_gpu import training

        return result, training.saved(problem, arrays, x, space, config)


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
    return Result(out, final)


def on_device(x: torch.Tensor):
    """Launches go to the current device: make it the tensors' own."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)
