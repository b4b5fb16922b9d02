"""Host side: buffers, strides and grids of the launches. No value on the device is looked at."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kdakit.backends.triton_gpu.config import INTERPRETED, Config, bounded, padded, parts
from kdakit.backends.triton_gpu.intra import prepare_kernel
from kdakit.backends.triton_gpu.names import settle
from kdakit.backends.triton_gpu.normed import prepare_normed_kernel
from kdakit.backends.triton_gpu.parts import parts_kernel
from kdakit.backends.triton_gpu.recurrent import step_kernel
from kdakit.backends.triton_gpu.state import scan_kernel
from kdakit.problem import Arrays, Problem
from kdakit.reference import Result

DTYPES = {"float16": tl.float16, "bfloat16": tl.bfloat16, "float32": tl.float32}
FAR_INT = 2**31
FAR = 2**24  # elements: within a chunk offsets are 32-bit
CHECKPOINT = 8  # chunks between the states that a backward starts from
_compiled: dict[Any, Any] = {}
_recorded: ContextVar[list | None] = ContextVar("recorded", default=None)


def launch(kernel, grid: int, args: tuple, constants: dict[str, Any], **options: int) -> None:
    """Run `kernel` on `grid` programs; `args` and those of `constants` that it has are its parameters.

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
            kernel[(grid,)](*args, **named)
        return
    key = kernel, torch.cuda.current_device(), *options.values(), *values, *map(_specialised, args)
    compiled = _compiled.get(key)
    if compiled is None:
        settle(kernel)
        named = dict(zip(kernel.arg_names[len(args) :], values, strict=True))
        _compiled[key] = kernel[(grid,)](*args, **named, **options) if grid else kernel.warmup(*args, grid=(1,), **named, **options)
    elif grid:
        compiled[(grid, 1, 1)](*args, *values)


@contextlib.contextmanager
def recording() -> Iterator[list]:
    """Within, `launch` runs nothing: it adds (kernel, arguments, constants, options) to the list."""
    token = _recorded.set(record := [])
    try:
        yield record
    finally:
        _recorded.reset(token)


def _specialised(x: Any) -> Any:
    """What Triton compiles a kernel parameter for."""
    kind = type(x)
    if kind is int:
        return -FAR_INT <= x < FAR_INT
    if kind is float or x is None:
        return kind
    return x.dtype, x.data_ptr() % 16 == 0


class Views(NamedTuple):
    """The token tensors with unit stride in their last dimension, their other strides in units of `align` elements."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    align: int
    strides: dict[str, tuple[int, int, int]]  # "q": (batch, token, head)


def views(arrays: Arrays) -> Views:
    """Strides are honoured; only a tensor whose channels are not adjacent in memory, or whose tokens lie absurdly far apart, is copied."""
    q, k, v, g, beta = arrays[:5]
    layouts = (q.shape, q.stride()), (k.shape, k.stride()), (v.shape, v.stride()), (g.shape, g.stride())
    near, align, strides = _layout(layouts, beta.stride())
    if not near:
        near = [_layout((layout,), ())[0] for layout in layouts]
        q, k, v, g = (x if keep else x.contiguous() for x, keep in zip((q, k, v, g), near, strict=True))
        _, align, strides = _layout(tuple((x.shape, x.stride()) for x in (q, k, v, g)), beta.stride())
    return Views(q, k, v, g, align, strides)


@lru_cache(maxsize=1024)
def _layout(layouts: tuple, beta: tuple) -> tuple[bool, int, dict]:
    """Of tensors' (shape, strides): whether the kernels can read them, and what `Views` says of them."""
    near = all((stride[3] == 1 or shape[3] == 1) and stride[1] < FAR for shape, stride in layouts)
    own = [[s if n > 1 else 0 for s, n in zip(stride[:3], shape[:3], strict=True)] for shape, stride in layouts]
    align = math.gcd(16, *(s for strides in own for s in strides))
    strides = {name: tuple(s // align for s in x) for name, x in zip("qkvg", own, strict=False)}
    return near, align, strides | {"b": beta}


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
def prepare_constants(problem: Problem, config: Config, align: int) -> dict[str, Any]:
    o = problem.options
    return dict(
        K=problem.K, KP=padded(problem.K), C=config.chunk, S=config.half, GROUP=config.group, DIAGONAL=config.diagonal, FLOOR=config.floor,
        ALIGN=align, VECTOR=config.vector, VARLEN=bool(problem.varlen), GATE=o.gate, BETA=o.beta, L2NORM=o.l2norm,
        HAS_A_LOG=problem.has_A_log, HAS_DT_BIAS=problem.has_dt_bias,
        PRECISION=config.precision, SOLVE=DTYPES[config.solve], PTX=config.ptx, HIP=config.hip,
        HAS_LOWER=problem.needs_grad, BOUNDED=bounded(problem),
    )  # fmt: skip


def prepare(problem: Problem, arrays: Arrays, x: Views, config: Config) -> Workspace:
    """Stage intra of every chunk."""
    o, C = problem.options, config.chunk
    space = workspace(problem, config, arrays.q.device)
    if space.slots == 0:
        return space
    args = (
        x.q, x.k, x.g, arrays.beta, arrays.A_log, arrays.dt_bias, arrays.cu_seqlens, space.tiles, space.squares, space.decay,
        space.beta, space.lower, space.solved, problem.T, problem.N, -(-problem.T // C), problem.H, problem.HV, o.scale,
        o.lower_bound or 0.0,
        *x.strides["q"], *x.strides["k"], *x.strides["g"], *x.strides["b"],
    )  # fmt: skip
    constants = prepare_constants(problem, config, x.align)
    registers = {"maxnreg": config.prepare_registers} if config.prepare_registers else {}
    kernel = prepare_normed_kernel if config.normed else prepare_kernel
    launch(kernel, space.slots * problem.HV, args, constants, num_warps=config.prepare_warps, num_stages=1, **registers)
    return space


@lru_cache(maxsize=1024)
def scan_constants(problem: Problem, config: Config, align: int) -> dict[str, Any]:
    o = problem.options
    return dict(
        K=problem.K, V=problem.V, KP=padded(problem.K), VP=padded(problem.V), C=config.chunk, S=config.half, GROUP=config.group,
        ALIGN=align, VARLEN=bool(problem.varlen), V_FIRST=o.state_v_first, HAS_INITIAL=problem.has_initial_state,
        PRECISION=config.precision, STAGES=config.scan_stages, BV=config.block_v, HAS_FINAL=o.output_final_state,
        HAS_STATES=o.return_intermediate_states, HAS_CHECKPOINTS=problem.needs_grad, SPLIT=config.split,
    )  # fmt: skip


def scan(problem: Problem, arrays: Arrays, x: Views, space: Workspace, config: Config) -> Result:
    """Stages state and output of every sequence."""
    o, C, device = problem.options, config.chunk, arrays.q.device
    out = torch.empty((problem.B, problem.T, problem.HV, problem.V), dtype=x.v.dtype, device=device)
    final = torch.empty(problem.state_shape, dtype=torch.float32, device=device) if o.output_final_state else None
    states, offsets = intermediate_states(problem, arrays) if o.return_intermediate_states else (None, None)
    grid = problem.N * problem.HV * -(-problem.V // config.block_v)
    if grid:
        constants = scan_constants(problem, config, x.align)
        number, parts = split(problem, arrays, x, space, config, constants) if config.split else (1, None)
        args = (
            x.v, space.tiles, space.squares, space.decay, arrays.cu_seqlens, out, arrays.initial_state, final, states,
            offsets, space.checkpoints, parts, problem.T, problem.N, -(-problem.T // C), problem.HV, *x.strides["v"],
            max(1, o.chunk_size // C), CHECKPOINT, number,
        )  # fmt: skip
        registers = {"maxnreg": config.registers} if config.registers else {}
        launch(scan_kernel, grid * number, args, constants, num_warps=config.scan_warps, **registers)
    return Result(out, final, states)


def split(problem: Problem, arrays: Arrays, x: Views, space: Workspace, config: Config, constants: dict) -> tuple[int, torch.Tensor]:
    """Into how many parts sequences are split, and what leads from part to part: see `parts`."""
    number = parts(problem, config)
    if number == 1 and _recorded.get() is None:  # compiled even then, so that a longer sequence finds it
        return number, space.decay
    KP, VP = constants["KP"], constants["VP"]
    made = torch.empty((problem.N * problem.HV, number, VP + KP, KP), device=arrays.q.device)
    args = (
        x.v, space.tiles, space.decay, arrays.cu_seqlens, arrays.initial_state, made,
        problem.T, -(-problem.T // config.chunk), problem.HV, number, *x.strides["v"],
    )  # fmt: skip
    grid = problem.N * problem.HV * (number - 1) * (VP + KP) // config.block_v
    registers = {"maxnreg": config.registers} if config.registers else {}
    launch(parts_kernel, grid, args, constants, num_warps=config.scan_warps, **registers)
    return number, made


def intermediate_states(problem: Problem, arrays: Arrays):
    """The buffer for the states before each chunk, and per sequence the index of its first one. The number of chunks of packed sequences is
    known only to whoever reads cu_seqlens: the one place where the host waits, unless cu_seqlens_cpu is given."""
    offsets, chunks = None, problem.chunks
    if problem.varlen:
        cu = arrays.cu_seqlens if arrays.cu_seqlens_cpu is None else arrays.cu_seqlens_cpu
        counts = (cu.diff() + problem.options.chunk_size - 1) // problem.options.chunk_size
        ends = counts.cumsum(0)
        chunks = int(ends[-1])
        offsets = (ends - counts).to(device=arrays.q.device, dtype=torch.int64)
    return torch.empty((problem.B, chunks, *problem.state_shape[1:]), dtype=arrays.q.dtype, device=arrays.q.device), offsets


def contiguous_parameters(arrays: Arrays) -> Arrays:
    """The small tensors as the kernels index them."""
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


def step(problem: Problem, arrays: Arrays, config: Config, final_state: torch.Tensor | None = None) -> Result:
    """The token recurrence in one launch. final_state: where the state goes, perhaps over the initial one, of which every program reads and
    writes a part of its own."""
    o = problem.options
    if final_state is not None and not final_state.is_contiguous():
        result = step(problem.replace(output_final_state=True), arrays, config)
        return result._replace(final_state=final_state.copy_(result.final_state))
    arrays = contiguous_parameters(arrays)
    x = views(arrays)
    out = torch.empty((problem.B, problem.T, problem.HV, problem.V), dtype=x.v.dtype, device=x.v.device)
    final = final_state
    if final is None and o.output_final_state:
        final = torch.empty(problem.state_shape, dtype=getattr(torch, problem.state_dtype), device=x.v.device)
    grid = problem.N * problem.HV * -(-problem.V // config.step_block_v)
    if grid:
        args = (
            x.q, x.k, x.v, x.g, arrays.beta, arrays.A_log, arrays.dt_bias, arrays.cu_seqlens, out, arrays.initial_state, final,
            problem.T, problem.H, problem.HV, o.scale, o.lower_bound or 0.0,
            *x.strides["q"], *x.strides["k"], *x.strides["v"], *x.strides["g"], *x.strides["b"],
        )  # fmt: skip
        constants = dict(
            K=problem.K, V=problem.V, KP=triton.next_power_of_2(problem.K), BV=config.step_block_v, ALIGN=x.align,
            VARLEN=bool(problem.varlen), V_FIRST=o.state_v_first, GATE=o.gate, BETA=o.beta, L2NORM=o.l2norm,
            HAS_A_LOG=problem.has_A_log, HAS_DT_BIAS=problem.has_dt_bias, HAS_INITIAL=problem.has_initial_state,
            HAS_FINAL=final is not None,
        )  # fmt: skip
        with on_device(arrays.q):
            launch(step_kernel, grid, args, constants, num_warps=config.step_warps)
    return Result(out, final)


def on_device(x: torch.Tensor):
    """Launches go to the current device: make it the tensors' own."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


_second: dict[tuple[int, int], torch.cuda.Stream] = {}  # by device and stream: one that is being captured has its own


@contextlib.contextmanager
def beside(x: torch.Tensor):
    """Yields a context whose launches run beside the others of this one: they see what came before it, and what follows sees them."""
    if not x.is_cuda:
        yield contextlib.nullcontext
        return
    main = torch.cuda.current_stream()
    key = main.device_index, main.cuda_stream
    second = _second.get(key)
    if second is None:
        second = _second[key] = torch.cuda.Stream()
    second.wait_stream(main)
    yield lambda: torch.cuda.stream(second)
    main.wait_stream(second)
