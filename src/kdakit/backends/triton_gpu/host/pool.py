"""Host side of the pooled kernels: no value on the device is looked at."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton

from kdakit.backends.triton_gpu.config import Config, chip_of, chunk_slots, padded
from kdakit.backends.triton_gpu.host import forward
from kdakit.backends.triton_gpu.kernels.pool_decode import decode_kernel
from kdakit.backends.triton_gpu.kernels.pool_draft import commit_kernel, draft_kernel, tokens_kernel
from kdakit.backends.triton_gpu.runtime import launch as launches
from kdakit.backends.triton_gpu.runtime.interpreter import INTERPRETED
from kdakit.backends.triton_gpu.runtime.launch import on_device
from kdakit.backends.triton_gpu.runtime.layout import Layout, contiguous_parameters, views
from kdakit.problem import Arrays, Problem


@dataclass(frozen=True)
class Cut:
    """How a call is cut, for up to 128 key channels; with more a program takes fewer value channels."""

    block_v: int
    warps: int


# By call and layout, from benchmarks/serving_check.py on an H200, H = 32, K = V = 128.
CUTS = {
    ("decode", False): Cut(32, 2), ("verify", False): Cut(32, 1), ("advance", False): Cut(32, 1), ("commit", False): Cut(64, 4),
    ("decode", True): Cut(16, 1), ("verify", True): Cut(64, 4), ("commit", True): Cut(32, 4),
}  # fmt: skip
TOKEN_WARPS = 2
FETCHED = (8 << 20, 32 << 20)  # bytes of the states, in the order of the rows, that `tokens_kernel` asks for: the first are read at once


def cut_for(call: str, s: Any) -> Cut:
    """For a pool of sizes s. Scales of 8-bit states belong to 32 value channels, so there a program takes as many."""
    if s.dtype == "int8":
        return Cut(s.scale_group, 2)
    cut = CUTS[call, s.state_v_first]
    return Cut(max(16, min(cut.block_v * 128 // max(128, padded(s.K)), padded(s.V))), cut.warps)


def padded_tokens(tokens: int) -> int:
    """4 or 8: a draft's length as the kernels are compiled for it."""
    return max(4, triton.next_power_of_2(tokens))


@functools.lru_cache
def chained(device: torch.device) -> bool:
    """Whether a kernel can be launched before the one before it has ended: on NVIDIA's GPUs from Hopper on."""
    return not INTERPRETED and chip_of(device).name in ("sm_90", "sm_100", "sm_120")


def _options(warps: int, chain: bool, registers: int = 0) -> dict[str, Any]:
    """Of a launch. registers: a thread's at most, 0: the compiler's choice."""
    return {"num_warps": warps} | ({"launch_pdl": True} if chain else {}) | ({"maxnreg": registers} if registers else {})


class Log(NamedTuple):
    """Of each draft token."""

    k: torch.Tensor  # [N, T, HV, K] as it came
    decay: torch.Tensor  # [N, T, HV, K] float32
    u: torch.Tensor  # [N, T, HV, V] float32, divided by k's norm


def decode(problem: Problem, arrays: Arrays, pool: Any, slots: torch.Tensor, config: Config) -> torch.Tensor:
    """One launch."""
    storage = pool.storage
    arrays = contiguous_parameters(arrays)
    x = views(arrays)
    out = torch.empty((problem.B, problem.T, problem.HV, problem.V), dtype=x.v.dtype, device=x.v.device)
    if problem.N and problem.T:
        with on_device(arrays.q):
            held = Held(0, pool.capacity, storage.states.stride(0), 1, out.stride()[:3])
            _decode(problem, x.layout, pool.sizes, held, cut_for("decode", pool.sizes))(
                x.q, x.k, x.v, x.g, arrays.beta, arrays.A_log, arrays.dt_bias, out, storage.states, storage.scales, storage.residual,
                slots.contiguous(), pool.generation, None, None,
            )  # fmt: skip
    return out


class Held(NamedTuple):
    """Where a decode finds states and leaves outputs."""

    first: int  # slots below are nobody's
    capacity: int  # and from this on
    page: int  # elements from one state to the next
    slot: int  # elements from one row's slots to the next row's
    out: tuple[int, ...]  # strides of o: row, token, head
    owned: bool = True
    drafted: bool = False
    span: int = 1  # entries of cu_seqlens from one row's first token to the next row's


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
        _decode(problem, x.layout, pages.sizes, held, cut_for("decode", pages.sizes))(
            x.q, x.k, x.v, x.g, arrays.beta, arrays.A_log, arrays.dt_bias, out, pages.states, None, None, slots, None, accepted,
            arrays.cu_seqlens,
        )  # fmt: skip
        if out is not None and problem.varlen:
            _clear(problem, arrays, out)


@functools.lru_cache(maxsize=1024)
def _decode(problem: Problem, layout: Layout, sizes: Any, held: Held, cut: Cut) -> launches.Launch:
    o, strides, unit = problem.options, layout.strides, math.gcd(16, held.page)
    numbers = (
        problem.T, problem.H, problem.HV, held.first, held.capacity, held.page // unit, held.slot, held.span, o.scale, o.lower_bound or 0.0,
        *strides["q"], *strides["k"], *strides["v"], *strides["g"], *strides["b"], *held.out,
    )  # fmt: skip
    constants = _activations(problem) | dict(
        K=problem.K, V=problem.V, KP=triton.next_power_of_2(problem.K), BV=cut.block_v, ALIGN=layout.align, PAGE=unit,
        V_FIRST=sizes.state_v_first, FEEDBACK=sizes.feedback, SINGLE=problem.T == 1 and not problem.varlen, OWNED=held.owned,
        DRAFTED=held.drafted, VARLEN=bool(problem.varlen),
    )  # fmt: skip
    grid = problem.N * problem.HV * -(-problem.V // cut.block_v)
    return launches.Launch(decode_kernel, grid, numbers, constants, num_warps=cut.warps)


def _clear(problem: Problem, arrays: Arrays, out: torch.Tensor) -> None:
    """Rows past the last sequence; of an `out` that is part of a wider one by PyTorch."""
    if out.is_contiguous():
        forward.clear_output(problem, arrays, out)
    else:
        out.masked_fill_((torch.arange(problem.T, device=out.device) >= arrays.cu_seqlens[-1])[:, None, None], 0)


def prefill_pages(problem: Problem, arrays: Arrays, pages: Any, slots, known, marks: Any, out: torch.Tensor, config: Config) -> None:
    """Two launches and, for marks inside a chunk, a third: see kdakit.serving.torch.pages.prefill."""
    arrays = contiguous_parameters(arrays)
    x, C = views(arrays), config.chunk
    with on_device(arrays.q):
        placed = None if marks is None else marks.by_chunk(chunk_slots(problem, C), C, arrays.cu_seqlens, problem.T)
        paged = forward.Paged(pages.states, slots.contiguous(), known, placed, pages.first)
        space = forward.prepare(problem, arrays, x, config)
        o = forward.scan(problem, arrays, x, space, config, paged).o
    out.copy_(o)
    if marks is not None and not marks.aligned:
        spans, left = marks.left_over(C, arrays.cu_seqlens, problem.T)
        step = problem.replace(op="recurrent", B=1, N=len(left), varlen="cu_seqlens", T=problem.B * problem.T)
        flat = Arrays(*(a.flatten(0, 1)[None] for a in arrays[:5]), arrays.A_log, arrays.dt_bias, None, spans)
        decode_pages(step, flat, pages, left, None, None)


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
    log = Log(torch.empty(key, dtype=x.k.dtype, device=device), torch.empty(key, device=device), torch.empty(value, device=device))
    owners = torch.empty_like(slots), torch.empty(p.N, dtype=torch.int32, device=device)
    out = torch.empty(value, dtype=x.v.dtype, device=device)
    if out.numel() == 0:
        return out, tuple(x.fill_(-1) for x in owners), log
    sizes = dict(K=p.K, KP=padded(p.K), TP=padded_tokens(p.T), ALIGN=x.align, CHAINED=chained(device))
    with on_device(arrays.q):
        made = _tokens(p, arrays, x, pool, slots, owners, log, sizes)
        _draft(p, x, pool, slots, made, owners[1], log, out, past, sizes, config)
    return out, owners, log


def _tokens(problem: Problem, arrays: Arrays, x, pool: Any, slots, owners, log: Log, sizes: dict[str, Any]):
    """The vectors that meet the states, and the coefficients: see `tokens_kernel`."""
    o, rows, TP = problem.options, problem.N * problem.HV, sizes["TP"]
    vectors = torch.empty((rows, TP, 2, sizes["KP"]), device=x.k.device)
    coefficients = torch.empty((rows, 2, TP, TP), device=x.k.device)
    args = (
        x.q, x.k, x.g, arrays.beta, arrays.A_log, arrays.dt_bias, pool.storage.states, slots, pool.generation,
        log.k, log.decay, *owners, vectors, coefficients,
        problem.T, problem.H, problem.HV, pool.capacity, *_fetched(pool), o.scale, o.lower_bound or 0.0,
        *x.strides["q"], *x.strides["k"], *x.strides["g"], *x.strides["b"],
    )  # fmt: skip
    registers = (
        128 if sizes["CHAINED"] and TP == 8 and sizes["KP"] <= 128 else 0
    )  # so that all programs of 32 rows of 32 heads begin at once
    options = _options(TOKEN_WARPS, sizes["CHAINED"], registers)
    launches.launch(tokens_kernel, problem.N + rows, args, sizes | _activations(problem), **options)
    return vectors, coefficients


def _fetched(pool: Any) -> tuple[int, int, int]:
    """From which head of which row on, and up to which, `tokens_kernel` asks for states; and the bytes of one."""
    size = pool.sizes.K * pool.sizes.V * pool.storage.states.element_size()
    return (FETCHED[0] // size, FETCHED[1] // size, size) if size % 16 == 0 else (0, 0, size)


def _draft(problem: Problem, x, pool: Any, slots, made, generation, log: Log, out, past, sizes: dict[str, Any], config: Config) -> None:
    storage, cut = pool.storage, cut_for("verify" if past is None else "advance", pool.sizes)
    before = (None,) * 5 if past is None else (*past[0].log, past[0].generation, past[1].contiguous())
    tokens = 0 if past is None else past[0].tokens
    args = (x.v, out, storage.states, storage.scales, storage.residual, slots, pool.generation, *made, log.u, generation, *before,
            problem.T, tokens, problem.HV, pool.capacity, *x.strides["v"])  # fmt: skip
    constants = sizes | dict(
        V=problem.V, BV=cut.block_v, PAST=padded_tokens(tokens) if past else 0, V_FIRST=pool.sizes.state_v_first,
        FEEDBACK=pool.sizes.feedback, PRODUCT="sums" if not pool.sizes.state_v_first else "ieee" if config.hip else "tf32",
    )  # fmt: skip
    grid = problem.N * problem.HV * -(-problem.V // cut.block_v)
    registers = 0 if config.hip or not pool.sizes.state_v_first else 168 if sizes["KP"] <= 128 else 255
    if past is None and cut.warps == 1 and problem.T <= 4 and sizes["KP"] == 128 and not config.hip:
        registers = 200  # eight warps a processor with as with 255, but in a better order: 23.2 us instead of 25.1 for 32 rows of 32 heads
    launches.launch(draft_kernel, grid, args, constants, **_options(cut.warps, sizes["CHAINED"], registers))


def commit(pool: Any, draft: Any, accepted: torch.Tensor) -> None:
    """One launch."""
    s, storage, cut = pool.sizes, pool.storage, cut_for("commit", pool.sizes)
    N, T, HV, V = draft.log.u.shape
    args = (storage.states, storage.scales, storage.residual, draft.slots.contiguous(), pool.generation, accepted.contiguous(),
            *draft.log, draft.generation, T, HV)  # fmt: skip
    chain = chained(storage.states.device)
    constants = dict(K=s.K, V=V, KP=padded(s.K), BV=cut.block_v, TP=padded_tokens(T), V_FIRST=s.state_v_first,
                     FEEDBACK=s.feedback, CHAINED=chain)  # fmt: skip
    if draft.log.u.numel():
        with on_device(storage.states):
            launches.launch(commit_kernel, N * HV * -(-V // cut.block_v), args, constants, **_options(cut.warps, chain))


def _activations(problem: Problem) -> dict[str, Any]:
    o = problem.options
    return dict(GATE=o.gate, BETA=o.beta, L2NORM=o.l2norm, HAS_A_LOG=problem.has_A_log, HAS_DT_BIAS=problem.has_dt_bias)
