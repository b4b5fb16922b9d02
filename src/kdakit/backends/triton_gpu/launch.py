"""Host side: buffers, strides and grids of the launches. No value on the device is looked at."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kdakit.backends.triton_gpu.config import Config, padded
from kdakit.backends.triton_gpu.intra import prepare_kernel
from kdakit.backends.triton_gpu.state import scan_kernel
from kdakit.backends.triton_gpu.step import step_kernel
from kdakit.problem import Arrays, Problem
from kdakit.reference import Result

DTYPES = {"float16": tl.float16, "bfloat16": tl.bfloat16, "float32": tl.float32}


class Views(NamedTuple):
    """The token tensors with unit stride in their last dimension, their other strides in units of `align` elements."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    align: int
    strides: dict[str, int]


def views(arrays: Arrays) -> Views:
    """Strides are honoured; only a tensor whose channels are not adjacent in memory is copied."""
    tensors = [x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous() for x in arrays[:4]]
    own = [[s if n > 1 else 0 for s, n in zip(x.stride()[:3], x.shape[:3], strict=True)] for x in tensors]
    align = math.gcd(16, *(s for strides in own for s in strides))
    strides = {f"s_{name}{dim}": s // align for name, x in zip("qkvg", own, strict=True) for dim, s in zip("bth", x, strict=True)}
    strides |= {f"s_b{dim}": s for dim, s in zip("bth", arrays.beta.stride(), strict=True)}
    return Views(*tensors, align, strides)


class Workspace(NamedTuple):
    """What the prepare kernel hands to the scan; slots are chunks, see tile.first_slot."""

    slots: int
    tiles: torch.Tensor  # [slots, HV, 3, C, KP]  k_in, q_decayed, k_decayed
    squares: torch.Tensor  # [slots, HV, 2, C, C]  inverse, A_qk
    decay: torch.Tensor  # [slots, HV, KP]


def workspace(problem: Problem, config: Config, device) -> Workspace:
    C, KP = config.chunk, padded(problem.K)
    slots = problem.T // C + problem.N if problem.varlen else problem.B * -(-problem.T // C)
    dtype = getattr(torch, problem.dtype)
    return Workspace(
        slots,
        torch.empty(slots, problem.HV, 3, C, KP, dtype=dtype, device=device),
        torch.empty(slots, problem.HV, 2, C, C, dtype=dtype, device=device),
        torch.empty(slots, problem.HV, KP, dtype=torch.float32, device=device),
    )


def prepare(problem: Problem, arrays: Arrays, x: Views, config: Config) -> Workspace:
    o, C = problem.options, config.chunk
    space = workspace(problem, config, arrays.q.device)
    if space.slots == 0:
        return space
    strides = {name: s for name, s in x.strides.items() if name[2] != "v"}
    prepare_kernel[(space.slots * problem.HV,)](
        x.q, x.k, x.g, arrays.beta, arrays.A_log, arrays.dt_bias, arrays.cu_seqlens, space.tiles, space.squares, space.decay,
        problem.T, problem.N, -(-problem.T // C), problem.H, problem.HV, o.scale, o.lower_bound or 0.0, **strides,
        K=problem.K, KP=padded(problem.K), C=C, GROUP=config.group, DIAGONAL=config.diagonal, BK=config.block_k, ALIGN=x.align,
        VARLEN=bool(problem.varlen), GATE=o.gate, BETA=o.beta, L2NORM=o.l2norm, HAS_A_LOG=problem.has_A_log,
        HAS_DT_BIAS=problem.has_dt_bias, PRECISION=config.precision, INVERSE_DTYPE=DTYPES[config.inverse],
        INVERSE_PRECISION=config.precision, num_warps=config.prepare_warps, num_stages=1,
    )  # fmt: skip
    return space


def scan(problem: Problem, arrays: Arrays, x: Views, space: Workspace, config: Config) -> Result:
    o, C, device = problem.options, config.chunk, arrays.q.device
    out = torch.empty(problem.B, problem.T, problem.HV, problem.V, dtype=x.v.dtype, device=device)
    final = torch.empty(problem.state_shape, dtype=torch.float32, device=device) if o.output_final_state else None
    states, offsets = intermediate_states(problem, arrays) if o.return_intermediate_states else (None, None)
    grid = problem.N * problem.HV * -(-problem.V // config.block_v)
    if grid:
        scan_kernel[(grid,)](
            x.v, space.tiles, space.squares, space.decay, arrays.cu_seqlens, out, arrays.initial_state, final, states, offsets,
            problem.T, problem.N, -(-problem.T // C), problem.HV, x.strides["s_vb"], x.strides["s_vt"], x.strides["s_vh"],
            max(1, o.chunk_size // C),
            K=problem.K, V=problem.V, KP=padded(problem.K), C=C, GROUP=config.group, BV=config.block_v, ALIGN=x.align,
            VARLEN=bool(problem.varlen), V_FIRST=o.state_v_first, HAS_INITIAL=problem.has_initial_state, HAS_FINAL=final is not None,
            HAS_STATES=states is not None, PRECISION=config.precision, STAGES=config.scan_stages, num_warps=config.scan_warps,
        )  # fmt: skip
    return Result(out, final, states)


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
    return torch.empty(problem.B, chunks, *problem.state_shape[1:], dtype=arrays.q.dtype, device=arrays.q.device), offsets


def contiguous_parameters(arrays: Arrays) -> Arrays:
    """The small tensors as the kernels index them."""
    small = {n: getattr(arrays, n) for n in ("A_log", "dt_bias", "initial_state", "cu_seqlens")}
    return arrays._replace(**{n: x.contiguous() for n, x in small.items() if x is not None})


def forward(problem: Problem, arrays: Arrays, config: Config) -> tuple[Result, list]:
    arrays = contiguous_parameters(arrays)
    x = views(arrays)
    with on_device(arrays.q):
        space = prepare(problem, arrays, x, config)
        return scan(problem, arrays, x, space, config), []


def step(problem: Problem, arrays: Arrays, config: Config) -> Result:
    o = problem.options
    arrays = contiguous_parameters(arrays)
    x = views(arrays)
    out = torch.empty(problem.B, problem.T, problem.HV, problem.V, dtype=x.v.dtype, device=x.v.device)
    final = None
    if o.output_final_state:
        final = torch.empty(problem.state_shape, dtype=getattr(torch, problem.state_dtype), device=x.v.device)
    grid = problem.N * problem.HV * -(-problem.V // config.step_block_v)
    if grid:
        with on_device(arrays.q):
            step_kernel[(grid,)](
                x.q, x.k, x.v, x.g, arrays.beta, arrays.A_log, arrays.dt_bias, arrays.cu_seqlens, out, arrays.initial_state, final,
                problem.T, problem.H, problem.HV, o.scale, o.lower_bound or 0.0, **x.strides,
                K=problem.K, V=problem.V, KP=max(1, triton.next_power_of_2(problem.K)), BV=config.step_block_v, ALIGN=x.align,
                VARLEN=bool(problem.varlen), V_FIRST=o.state_v_first, GATE=o.gate, BETA=o.beta, L2NORM=o.l2norm,
                HAS_A_LOG=problem.has_A_log, HAS_DT_BIAS=problem.has_dt_bias, HAS_INITIAL=problem.has_initial_state,
                HAS_FINAL=final is not None, num_warps=config.step_warps,
            )  # fmt: skip
    return Result(out, final)


def on_device(x: torch.Tensor):
    """Launches go to the current device: make it the tensors' own."""
    return torch.cuda.device(x.device) if x.is_cuda else torch.no_grad()
