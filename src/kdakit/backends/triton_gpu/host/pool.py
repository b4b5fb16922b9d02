"""Host side of the pooled kernels: no value on the device is looked at."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from kdakit.backends.triton_gpu import tiles
from kdakit.backends.triton_gpu.config import Chip, Config, Cut, by_rows, chip_of, chunk_slots, padded
from kdakit.backends.triton_gpu.host import forward
from kdakit.backends.triton_gpu.kernels import pool_decode, pool_draft, pool_marks, pool_pending
from kdakit.backends.triton_gpu.kernels.pool_decode import Held
from kdakit.backends.triton_gpu.runtime.interpreter import INTERPRETED
from kdakit.backends.triton_gpu.runtime.launch import on_device, watching
from kdakit.backends.triton_gpu.runtime.layout import contiguous_parameters, views
from kdakit.backends.triton_gpu.runtime.repeat import Plan, plan_of
from kdakit.problem import Arrays, Problem


class Log(NamedTuple):
    """Of each draft token."""

    k: torch.Tensor  # [N, T, HV, K] as it came
    decay: torch.Tensor  # [N, T, HV, K] float32
    u: torch.Tensor  # [N, T, HV, V] float32, divided by k's norm


def cut_for(call: str, s: Any) -> Cut:
    """For a pool of sizes s. Scales of 8-bit states belong to 32 value channels, so there a program takes as many."""
    table = tiles.pool()
    if s.dtype == "int8":
        return Cut(s.scale_group, table["int8"].get(call, table["int8"]["warps"]))
    cut = table["cuts"][call]["VK" if s.state_v_first else "KV"]
    return Cut(max(16, min(cut["block_v"] * 128 // max(128, padded(s.K)), padded(s.V))), cut["warps"], cut.get("registers", 0))


@functools.lru_cache
def chained(device: torch.device) -> bool:
    """Whether a kernel can be launched before the one before it has ended: on NVIDIA's GPUs from Hopper on."""
    return not INTERPRETED and chip_of(device).name in ("sm_90", "sm_100", "sm_120")


def decode(problem: Problem, arrays: Arrays, pool: Any, slots: torch.Tensor) -> tuple[torch.Tensor, Plan | None]:
    """One launch; and how to repeat it with (q, k, v, g, beta, A_log, dt_bias, slots, *pool.seen_by_kernels()), if it can be."""
    storage = pool.storage
    own = contiguous_parameters(arrays)
    x = views(own)
    out = torch.empty((problem.B, problem.T, problem.HV, problem.V), dtype=x.v.dtype, device=x.v.device)
    if not (problem.N and problem.T):
        return out, None
    held = Held(0, pool.capacity, storage.states.stride(0), 1, out.stride()[:3])
    with on_device(own.q), watching() as seen:
        pool_decode.launch(problem, x.layout, pool.sizes, held, cut_for("decode", pool.sizes))(
            q=x.q,
            k=x.k,
            v=x.v,
            g=x.g,
            beta=own.beta,
            A_log=own.A_log,
            dt_bias=own.dt_bias,
            o=out,
            states=storage.states,
            scales=storage.scales,
            residual=storage.residual,
            slots=slots.contiguous(),
            generation=pool.generation,
            accepted=None,
            cu_seqlens=None,
        )
    return out, plan_of([*arrays[:7], slots, *pool.seen_by_kernels()], [out], seen, _only)


def decode_pending(problem: Problem, arrays: Arrays, pool: Any, slots: torch.Tensor) -> tuple[torch.Tensor, Plan | None]:
    """One token of each row in two launches, the second of which writes a state where the log of waiting tokens is full; and how to repeat
    them, as `decode`."""
    p, storage, pending, chain = problem, pool.storage, pool.pending, chained(slots.device)
    own, packed = contiguous_parameters(arrays), slots.contiguous()
    x = views(own)
    pending.possible = True
    out = torch.empty((p.N, 1, p.HV, p.V), dtype=x.v.dtype, device=x.v.device)
    if not p.N:
        return out, None
    rows, TP, KP = p.N * p.HV, pool_pending.padded_tokens(pending.tokens), padded(p.K)
    wide = lambda *shape: torch.empty((rows, *shape), dtype=torch.float32, device=out.device)
    made = dict(vectors=wide(2, KP), coefficients=wide(2, TP), writes=wide(TP + 1, KP))
    made |= dict(waiting=torch.empty(rows, dtype=torch.int32, device=out.device))
    with on_device(own.q), watching() as seen:
        pool_pending.launch_arrive(p, x.layout, pool.capacity, pending.tokens, chain)(
            q=x.q,
            k=x.k,
            g=x.g,
            beta=own.beta,
            A_log=own.A_log,
            dt_bias=own.dt_bias,
            slots=packed,
            generation=pool.generation,
            count=pending.count,
            log_k=pending.k,
            log_decay=pending.decay,
            **made,
        )
        cut = cut_for("pending", pool.sizes)
        cut = replace(cut, chained=chain, registers=cut.registers if chain else 0)  # as timed on Hopper
        pool_pending.launch(p, x.layout, pool.sizes, pool.capacity, pending.tokens, cut)(
            v=x.v,
            o=out,
            states=storage.states,
            scales=storage.scales,
            residual=storage.residual,
            slots=packed,
            log_u=pending.u,
            **made,
        )
    return out, plan_of([*arrays[:7], slots, *pool.seen_by_kernels()], [out], seen, _only)


def _only(made: list) -> torch.Tensor:
    return made[0]


def decode_pages(problem: Problem, arrays: Arrays, pages: Any, slots, accepted, out: torch.Tensor | None) -> None:
    """One launch over memory that somebody else owns: see kdakit.serving.torch.pages.decode. out: None where only states are wanted;
    cu_seqlens may then be [N, 2], the first and last token + 1 of each row."""
    arrays = contiguous_parameters(arrays)
    x = views(arrays)
    if not (problem.N and problem.T):
        return
    drafted = slots.dim() == 2
    strides = (0, 0, 0) if out is None else out.stride()[:3]
    span = arrays.cu_seqlens.stride(0) if problem.varlen else 1
    held = Held(pages.first, len(pages.states), pages.states.stride(0), slots.stride(0), strides, False, drafted, span)
    with on_device(arrays.q):
        pool_decode.launch(problem, x.layout, pages.sizes, held, cut_for("decode", pages.sizes))(
            q=x.q,
            k=x.k,
            v=x.v,
            g=x.g,
            beta=arrays.beta,
            A_log=arrays.A_log,
            dt_bias=arrays.dt_bias,
            o=out,
            states=pages.states,
            scales=None,
            residual=None,
            slots=slots,
            generation=None,
            accepted=accepted,
            cu_seqlens=arrays.cu_seqlens,
        )
        if out is not None and problem.varlen:
            _clear(problem, arrays, out)


def _clear(problem: Problem, arrays: Arrays, out: torch.Tensor) -> None:
    """Rows past the last sequence; of an `out` that is part of a wider one by PyTorch."""
    if out.is_contiguous():
        forward.clear_output(problem, arrays, out)
    else:
        out.masked_fill_((torch.arange(problem.T, device=out.device) >= arrays.cu_seqlens[-1])[:, None, None], 0)


def prefill_pages(problem: Problem, arrays: Arrays, pages: Any, slots, known, marks: Any, config: Config) -> torch.Tensor:
    """o: see kdakit.serving.torch.pages.prefill. Two launches; for marks a short one between, for marks inside a chunk one after."""
    arrays = contiguous_parameters(arrays)
    x, slots, places, spans, left = views(arrays), slots.contiguous(), None, None, None
    if marks is not None:
        config = with_marks(problem, config, chip_of(arrays.q.device), pages.states.element_size())
    with on_device(arrays.q):
        space = forward.prepare(problem, arrays, x, config)
        if marks is not None:
            places, spans, left = place_marks(problem, arrays, pages, slots, marks, config)
        paged = forward.Paged(pages.states, slots, known, places, pages.first)
        o = forward.scan(problem, arrays, x, space, config, paged).o
    if spans is not None:
        step = problem.replace(op="recurrent", B=1, N=len(spans), varlen="cu_seqlens", T=problem.B * problem.T)
        flat = Arrays(*(a.flatten(0, 1)[None] for a in arrays[:5]), arrays.A_log, arrays.dt_bias, None, spans)
        decode_pages(step, flat, pages, left, None, None)
    return o


def place_marks(
    problem: Problem, arrays: Arrays, pages: Any, slots: torch.Tensor, marks: Any, config: Config
) -> tuple[torch.Tensor | None, ...]:
    """Places of a scan, and of marks inside a chunk what is left to do: see `marks_kernel`."""
    M, like = len(marks.slot), dict(dtype=torch.int64, device=marks.slot.device)
    places = torch.empty(chunk_slots(problem, config.chunk), **like)
    spans, left = (None, None) if marks.aligned else (torch.empty(M, 2, **like), torch.empty(M, **like))
    where = (x.contiguous() for x in (marks.sequence, marks.position, marks.slot))
    tensors = dict(zip(("sequence", "position", "slot"), where, strict=True), owners=slots, cu_seqlens=arrays.cu_seqlens)
    pool_marks.launch(problem, config, M, pages.first, len(pages.states))(**tensors, places=places, spans=spans, left=left)
    return places, spans, left


def with_marks(problem: Problem, config: Config, chip: Chip, state_bytes: int) -> Config:
    """With fewer stages where the scan's buffers and what turns a [V, K] state around want more shared memory than there is: all of it,
    half by rows, nothing where every thread stores what it holds, see `store_mark`."""
    KP, C = padded(problem.K), config.chunk
    stage = (3 * C * KP + C * C + C * config.block_v * config.staged) * (4 if problem.dtype == "float32" else 2) + 4 * KP * 2
    turned = config.block_v * KP * state_bytes if problem.options.state_v_first else 0
    turned = turned // 2 if by_rows(problem, config) else 0 if config.ptx and state_bytes == 4 else turned
    return replace(config, scan_stages=max(1, min(config.scan_stages, (chip.shared_memory - turned) // stage)))


def verify(problem: Problem, arrays: Arrays, pool: Any, slots: torch.Tensor, config: Config, past=None):
    """o, each row's slot (-1: skipped) and its generation, and the log. past: an earlier draft of these slots and what of it is accepted.

    Two launches, the first of which looks at no state.
    """
    if past is not None and pool.sizes.state_v_first:  # there the two in one kernel want more registers than there are
        commit(pool, *past)
        past = None
    p, device = problem, slots.device
    arrays, slots = contiguous_parameters(arrays), slots.contiguous()
    x = views(arrays)
    key, value = (p.N, p.T, p.HV, p.K), (p.N, p.T, p.HV, p.V)
    wide = dict(dtype=torch.float32, device=device)
    log = Log(torch.empty(key, dtype=x.k.dtype, device=device), torch.empty(key, **wide), torch.empty(value, **wide))
    owners = torch.empty_like(slots), torch.empty(p.N, dtype=torch.int32, device=device)
    out = torch.empty(value, dtype=x.v.dtype, device=device)
    if out.numel() == 0:
        return out, tuple(x.fill_(-1) for x in owners), log
    with on_device(arrays.q):
        made = _tokens(p, arrays, x, pool, slots, owners, log)
        _draft(p, x, pool, slots, made, owners[1], log, out, past, config)
    return out, owners, log


def _tokens(problem: Problem, arrays: Arrays, x, pool: Any, slots, owners, log: Log) -> dict[str, torch.Tensor]:
    """The vectors that meet the states, and the coefficients: see `tokens_kernel`."""
    rows, TP, KP = problem.N * problem.HV, pool_draft.padded_tokens(problem.T), padded(problem.K)
    vectors = torch.empty((rows, TP, 2, KP), dtype=torch.float32, device=x.k.device)
    coefficients = torch.empty((rows, 2, TP, TP), dtype=torch.float32, device=x.k.device)
    table, chain = tiles.pool()["tokens"], chained(slots.device)
    cut = Cut(0, table["warps"], table["registers"] if chain and TP == 8 and KP <= 128 else 0, chain)
    pool_draft.launch_tokens(problem, x.layout, pool.capacity, _fetched(pool), cut)(
        q=x.q,
        k=x.k,
        g=x.g,
        beta=arrays.beta,
        A_log=arrays.A_log,
        dt_bias=arrays.dt_bias,
        states=pool.storage.states,
        slots=slots,
        generation=pool.generation,
        log_k=log.k,
        log_decay=log.decay,
        log_slots=owners[0],
        log_generation=owners[1],
        vectors=vectors,
        coefficients=coefficients,
    )
    return dict(vectors=vectors, coefficients=coefficients)


def _fetched(pool: Any) -> tuple[int, int, int]:
    """From which head of which row on, and up to which, `tokens_kernel` asks for states; and the bytes of one."""
    size, fetched = pool.sizes.K * pool.sizes.V * pool.storage.states.element_size(), tiles.pool()["fetched_bytes"]
    return (fetched["from"] // size, fetched["to"] // size, size) if size % 16 == 0 else (0, 0, size)


def _draft(problem: Problem, x, pool: Any, slots, made: dict[str, torch.Tensor], generation, log: Log, out, past, config: Config) -> None:
    storage, cut = pool.storage, cut_for("verify" if past is None else "advance", pool.sizes)
    product = "sums" if not pool.sizes.state_v_first else "ieee" if config.hip else "tf32"
    cut = replace(cut, chained=chained(slots.device), registers=0 if config.hip else _draft_registers(problem, pool, past, cut))
    before = past[0].log if past else Log(None, None, None)
    pool_draft.launch_draft(problem, x.layout, pool.sizes, pool.capacity, past[0].tokens if past else None, product, cut)(
        v=x.v,
        o=out,
        states=storage.states,
        scales=storage.scales,
        residual=storage.residual,
        slots=slots,
        generation=pool.generation,
        **made,
        log_u=log.u,
        log_generation=generation,
        past_k=before.k,
        past_decay=before.decay,
        past_u=before.u,
        past_generation=past[0].generation if past else None,
        accepted=past[1].contiguous() if past else None,
    )


def _draft_registers(problem: Problem, pool: Any, past: Any, cut: Cut) -> int:
    table, KP = tiles.pool()["draft_registers"], padded(problem.K)
    if past is None and cut.warps == 1 and problem.T <= 4 and KP == 128:
        return table["KV_short"]
    return 0 if not pool.sizes.state_v_first else table["VK" if KP <= 128 else "VK_wide"]


def commit(pool: Any, draft: Any, accepted: torch.Tensor) -> None:
    """One launch."""
    write_pending(pool, draft.slots, draft.generation, accepted, draft.log)


def write_pending(pool: Any, slots: torch.Tensor, generation: torch.Tensor, accepted: torch.Tensor, log: Any) -> None:
    """The first accepted[n] tokens of a log into the state of slots[n], while it is of that generation."""
    storage, cut = pool.storage, replace(cut_for("commit", pool.sizes), chained=chained(pool.storage.states.device))
    N, T = log.u.shape[:2]
    if log.u.numel():
        with on_device(storage.states):
            pool_draft.launch_commit(N, T, pool.sizes, cut)(
                states=storage.states,
                scales=storage.scales,
                residual=storage.residual,
                slots=slots.contiguous(),
                generation=pool.generation,
                accepted=accepted.contiguous(),
                log_k=log.k,
                log_decay=log.decay,
                log_u=log.u,
                log_generation=generation,
            )
