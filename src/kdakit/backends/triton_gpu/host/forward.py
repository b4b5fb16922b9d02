"""Host side of the forward and of the step: buffers, strides and grids of the launches. No value on the device is looked at."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from kdakit.backends.triton_gpu import borrowed
from kdakit.backends.triton_gpu.config import Config, checkpoint_dtype, chunk_slots, end_chunks, exact_decay, exact_ends, padded, parts
from kdakit.backends.triton_gpu.kernels import prepare as prepare_plain
from kdakit.backends.triton_gpu.kernels import prepare_normed, scan_parts, scan_staged, scan_wide, tail
from kdakit.backends.triton_gpu.kernels import scan as scan_plain
from kdakit.backends.triton_gpu.kernels import step as step_kernel
from kdakit.backends.triton_gpu.runtime.launch import is_recording, note_lent, on_device
from kdakit.backends.triton_gpu.runtime.layout import Layout, Views, contiguous_parameters, views
from kdakit.problem import Arrays, Problem
from kdakit.reference import Result


class Workspace(NamedTuple):
    """What the prepare kernel hands to the scan; slots are chunks, see device.program.first_slot."""

    slots: int
    tiles: torch.Tensor  # [slots, HV, 3, C, KP]  k_in, q_decayed, k_solved
    squares: torch.Tensor  # [slots, HV, C, C]  A_solved
    decay: torch.Tensor  # [slots, HV, KP]
    beta: torch.Tensor  # [slots, HV, C]  the prepare kernel's own; with config.keep [slots, HV, 3, C], a backward's `factors`
    lower: torch.Tensor | None = None  # [slots, HV, C, C]  for a backward
    solved: torch.Tensor | None = None  # [slots, HV, C, C]  for a backward: A_qk inverse
    checkpoints: torch.Tensor | None = None  # [slots / checkpoint, HV, VP, KP]  for a backward
    k_solved: torch.Tensor | None = None  # [slots, HV, C, KP]  the scan's, if config.keep: that of the tiles is then the backward's
    r: torch.Tensor | None = None  # [B, T, HV, V]  this and the rest if config.keeps_states, as in `backward.Replayed`
    r_lost: torch.Tensor | None = None
    states_lost: torch.Tensor | None = None
    before_last: torch.Tensor | None = None


def states_specs(problem: Problem, config: Config) -> dict[str, tuple[tuple[int, ...], str]]:
    """The fields of Workspace and of `backward.Replayed` that go with states of every chunk, those that the call has."""
    slots, HV, KP, VP = chunk_slots(problem, config.chunk), problem.HV, padded(problem.K), padded(problem.V)
    has_before = exact_ends(problem) and problem.options.output_final_state
    every = dict(
        r=(True, (problem.B, problem.T, HV, problem.V), problem.dtype),
        r_lost=(config.exact_last, last_shape(problem, config), problem.dtype),
        states_lost=(exact_decay(problem), (slots, HV, VP, KP), problem.dtype),
        before_last=(has_before, end_states(problem, config), "float32"),
    )
    return {name: (shape, dtype) for name, (here, shape, dtype) in every.items() if here}


def last_shape(problem: Problem, config: Config) -> tuple[int, ...]:
    """Of what rounding takes from rows of the last chunks."""
    return problem.N, problem.HV, config.chunk, padded(problem.V)


def end_states(problem: Problem, config: Config) -> tuple[int, ...]:
    """Of states near either end of every sequence, from the end inwards: [N, HV, end_chunks, K, V], or V before K as the caller's."""
    N, HV, *matrix = problem.state_shape
    return N, HV, end_chunks(problem, config), *matrix


def workspace(problem: Problem, config: Config, device) -> Workspace:
    C, KP, HV = config.chunk, padded(problem.K), problem.HV
    slots = chunk_slots(problem, C)

    def empty(*shape, dtype=torch.float32):
        return torch.empty((slots, HV, *shape), dtype=dtype, device=device)

    dtype = getattr(torch, problem.dtype)
    beta = empty(3, C) if config.keep else empty(C)
    k_solved = empty(C, KP, dtype=dtype) if config.keep else None
    space = Workspace(slots, empty(3, C, KP, dtype=dtype), empty(C, C, dtype=dtype), empty(KP), beta, k_solved=k_solved)
    if config.keeps_states:
        specs = states_specs(problem, config).items()
        space = space._replace(**{name: torch.empty(shape, dtype=getattr(torch, d), device=device) for name, (shape, d) in specs})
    return space._replace(**kept(problem, config, device)._asdict()) if problem.needs_grad else space


class Kept(NamedTuple):
    """What a forward leaves for a backward: fields of Workspace."""

    lower: torch.Tensor
    solved: torch.Tensor
    checkpoints: torch.Tensor


class Recorded(NamedTuple):
    """What a forward leaves for a backward with `borrowed.records`."""

    lower: torch.Tensor  # as in Workspace
    record: torch.Tensor  # [slots, HV, RECORD]  tiles, A_solved and decay as the lender's kernels have them
    checkpoints: torch.Tensor  # [slots, HV, V, K]  the states before every chunk
    factors: torch.Tensor  # [slots, HV, 3, C]  beta, 1 / |q|, 1 / |k|
    r: torch.Tensor  # [B, T, HV, V]  v - k_in S


RECORD = 54784  # bytes: KDA_RECORD_BYTES in kdakit.h


def recorded_specs(problem: Problem, config: Config) -> list[tuple[tuple[int, ...], str]]:
    """(shape, dtype) of the fields of Recorded."""
    C, HV, slots = config.chunk, problem.HV, chunk_slots(problem, config.chunk)
    return [
        ((slots, HV, C, C), config.solve_dtype),
        ((slots, HV, RECORD), "uint8"),
        ((slots, HV, problem.V, problem.K), problem.dtype),
        ((slots, HV, 3, C), "float32"),
        ((problem.B, problem.T, HV, problem.V), problem.dtype),
    ]


def record(problem: Problem, config: Config, device) -> Recorded:
    specs = recorded_specs(problem, config)
    return Recorded(*(torch.empty(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in specs))


def kept(problem: Problem, config: Config, device) -> Kept:
    slots, square, dtype = chunk_slots(problem, config.chunk), (config.chunk, config.chunk), getattr(torch, problem.dtype)
    lower = torch.empty((slots, problem.HV, *square), dtype=getattr(torch, config.solve_dtype), device=device)
    solved = torch.empty((slots, problem.HV, *square), dtype=dtype, device=device)
    points = -(-slots // config.checkpoint), problem.HV, padded(problem.V), padded(problem.K)
    return Kept(lower, solved, torch.empty(points, dtype=getattr(torch, checkpoint_dtype(problem, config)), device=device))


def borrowed_forward(problem: Problem, arrays: Arrays, config: Config) -> tuple[Result, Kept | Recorded] | None:
    """Both launches of a call that will be differentiated by `borrowed.forward`, and what they keep; None: there is no such forward."""
    device = arrays.q.device
    if not problem.needs_grad or not borrowed.lends_to(arrays.q):
        return None
    recorded, kernel = borrowed.records(problem, config, device), borrowed.forward(problem, config, device)
    if recorded and not problem.B * problem.T:
        return Result(torch.empty(arrays.v.shape, dtype=arrays.v.dtype, device=device), None), record(problem, config, device)
    if kernel is None:
        return None
    space: Kept | Recorded = (record if recorded else kept)(problem, config, device)
    group = 1 if config.normed or recorded else config.group
    result, repeat = kernel(problem, arrays, **space._asdict(), checkpoint=1 if recorded else config.checkpoint, group=group)
    note_lent(repeat)
    clear_output(problem, arrays, result.o)
    return result, space


def prepare(problem: Problem, arrays: Arrays, x: Views, config: Config) -> Workspace:
    """Stage intra of every chunk."""
    space = workspace(problem, config, arrays.q.device)
    kernel = prepare_normed if config.normed else prepare_plain
    if space.slots:
        kernel.launch(problem, config, x.layout)(
            q=x.q,
            k=x.k,
            g=x.g,
            beta=arrays.beta,
            A_log=arrays.A_log,
            dt_bias=arrays.dt_bias,
            cu_seqlens=arrays.cu_seqlens,
            tiles=space.tiles,
            squares=space.squares,
            decay=space.decay,
            betas=space.beta,
            lower=space.lower,
            solved=space.solved,
            **({"k_solved": space.k_solved} if config.normed else {}),
        )
    return space


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


KEPT_STATES = "r", "r_lost", "states_lost", "before_last"


def scan(problem: Problem, arrays: Arrays, x: Views, space: Workspace, config: Config, paged: Paged | None = None) -> Result:
    """Stages state and output of every sequence. paged: states come from pages and stay there."""
    o, device = problem.options, arrays.q.device
    out = torch.empty((problem.B, problem.T, problem.HV, problem.V), dtype=x.v.dtype, device=device)
    initial, final = arrays.initial_state, None
    if paged is not None:
        initial = final = paged.states
    elif o.output_final_state:
        final = torch.empty(problem.state_shape, dtype=torch.float32, device=device)
    states, offsets = intermediate_states(problem, arrays) if o.return_intermediate_states else (None, None)
    if not problem.N:
        return Result(out, final, states)
    tensors = dict(
        v=x.v,
        tiles=space.tiles,
        k_solved=space.k_solved,
        squares=space.squares,
        decay=space.decay,
        cu_seqlens=arrays.cu_seqlens,
        o=out,
        initial=initial,
        final=final,
        states=states,
        chunk_offsets=offsets,
        checkpoints=space.checkpoints,
        slots=paged.slots if paged else None,
        known=paged.known if paged else None,
        marks=paged.marks if paged else None,
        r=space.r,
        r_lost=space.r_lost,
        states_lost=space.states_lost,
        before_last=space.before_last,
    )
    of_pages = paged.numbers() if paged else None
    if config.split:
        scan_in_parts(problem, config, x.layout, of_pages, tensors)
    elif config.staged:
        scan_staged.launch(problem, config, x.layout, 1, "whole", of_pages)(**tensors, maps=None)
    elif config.in_halves:
        own = {name: tensor for name, tensor in tensors.items() if name not in ("k_solved", *KEPT_STATES)}
        scan_wide.launch(problem, config, x.layout, of_pages)(**own)
    else:
        scan_plain.launch(problem, config, x.layout, of_pages)(**tensors)
    clear_output(problem, arrays, out)
    return Result(out, final, states)


def scan_in_parts(problem: Problem, config: Config, layout: Layout, of_pages: tuple | None, tensors: dict[str, Any]) -> None:
    """The first part beside the maps of those between it and the last; the states between parts; then all parts but the first."""
    number, maps = parts(problem, config), tensors["decay"]  # of one part nothing reads the maps
    if number > 1 or is_recording():  # compiled even then, so that a longer sequence finds it
        KP, VP = padded(problem.K), padded(problem.V)
        room = problem.N * problem.HV, max(number - 1, 1), VP + KP, KP
        maps = torch.empty(room, dtype=torch.float32, device=tensors["v"].device)
        scan_staged.launch(problem, config, layout, number, "first", of_pages)(**tensors, maps=maps)
        of_parts = {name: tensors[name] for name in ("v", "tiles", "k_solved", "decay", "cu_seqlens")}
        scan_parts.launch_parts(problem, config, layout, number)(**of_parts, maps=maps)
        scan_parts.launch_combine(problem, config, layout, number)(maps=maps, cu_seqlens=tensors["cu_seqlens"])
    scan_staged.launch(problem, config, layout, number, "later", of_pages)(**tensors, maps=maps)


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
            step_kernel.launch(problem, config, x.layout, final is not None)(
                q=x.q,
                k=x.k,
                v=x.v,
                g=x.g,
                beta=arrays.beta,
                A_log=arrays.A_log,
                dt_bias=arrays.dt_bias,
                cu_seqlens=arrays.cu_seqlens,
                o=out,
                initial=arrays.initial_state,
                final=final,
            )
            clear_output(problem, arrays, out)
    return Result(out, final)


def clear_output(problem: Problem, arrays: Arrays, o: torch.Tensor) -> None:
    """Zeros in the rows of o [1, T, HV, V] past the last packed sequence, which no other launch visits."""
    if problem.varlen and problem.T:
        tail.launch(problem, False)(cu_seqlens=arrays.cu_seqlens, v=o, q=None, k=None, g=None, beta=None)


def clear_gradients(problem: Problem, arrays: Arrays, d_q, d_k, d_v, d_g, d_beta) -> None:
    """The same for gradients; d_q and d_k have HV heads."""
    if problem.varlen and problem.T:
        tail.launch(problem, True)(cu_seqlens=arrays.cu_seqlens, v=d_v, q=d_q, k=d_k, g=d_g, beta=d_beta)
