"""Prompts, whole or in slices, many in one call, with the states at chosen positions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain, pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kdakit import dispatch
from kdakit.problem import Arrays, Problem, check_cu_seqlens, check_devices, checks_enabled
from kdakit.serving.arguments import check_checkpoints, describe
from kdakit.serving.torch.pages import Pages
from kdakit.serving.torch.plainly import plainly
from kdakit.serving.torch.pool import Rows, Slots, Snapshot, StatePool

TOKENS = ("q", "k", "v", "g", "beta")
CONFIGURED_FOR = 32  # sequences: with deterministic=True kernels are configured for so many, however many there are


@plainly
def prefill(
    pool: StatePool, slots: Slots, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, checkpoints: Iterable[Iterable[int]] | None = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, window_inputs: Mapping[str, Tensor] | None = None, deterministic: bool = False, chunk_size: int = 64,
    backend: str = "auto", **options: Any,
) -> tuple[Tensor, list[list[Snapshot]]]:  # fmt: skip
    """Tokens of N sequences, each going on from its slot's state: o, and the checkpoints that were asked for.

    q .. beta [B, T, ..] with one slot a row, or [1, T, ..] with cu_seqlens [N + 1] and one slot a sequence. Sequences may be slices of
    prompts, cut anywhere, and single tokens: prefill and decode rows mix. `options` as in `decode`.

    checkpoints: for each sequence the positions, ascending, after which its slot is wanted: [[64, 100], []] returns two snapshots of the
        first sequence and none of the second, for pool.restore. Every position costs a call of the backend, shared by the sequences.
    window_inputs: {name: [B, T, D]} as the convolutions see them, packed like q.
    deterministic: a sequence's bits depend on no other sequence in the call, and not on where the prompt was cut as long as that was at
        multiples of chunk_size, with states stored as they are computed; cut elsewhere, results agree within the accuracy rule.
    """
    arrays = Arrays(q, k, v, g, beta, A_log, dt_bias, None, cu_seqlens, cu_seqlens_cpu)
    for name, x in arrays._asdict().items():
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    check_devices(arrays)
    if q.device != pool.device:
        raise ValueError(f"q must be on the pool's device {pool.device}, got {q.device}")
    given = pool.device_slots(slots)
    problem = describe("prefill", "chunk", pool.sizes, arrays, len(given), options, chunk_size=chunk_size)
    _check_edges(problem, arrays)
    rows, inputs = pool.rows(given), pool.check_inputs(window_inputs, problem.B, problem.T)
    if checkpoints is None:
        return _run(pool, rows, problem, arrays, inputs, deterministic, backend).reshape(v.shape), []  # it may have packed the rows
    return _rounds(pool, rows, problem, arrays, inputs, deterministic, backend, checkpoints)


class Planned(NamedTuple):
    """How the layers of a model, which are alike, run the same tokens."""

    problem: Problem
    module: ModuleType
    config: Any


def plan(pool: StatePool, rows: int, arrays: Arrays, backend: str, options: dict[str, Any]) -> Planned:
    """Of packed sequences without checkpoints; `options` as in `prefill`."""
    problem = describe("prefill", "chunk", pool.sizes, arrays, rows, options, chunk_size=64)
    module = dispatch.select_pooled("torch", problem, arrays.q.device, backend)
    return Planned(problem, module, module.default_config(problem, arrays.q.device))


def run_planned(pool: StatePool, rows: Rows, arrays: Arrays, inputs: dict[str, Tensor], planned: Planned) -> Tensor:
    """o [1, T, HV, V]; states move on, and windows by their `inputs`."""
    return _move(pool, rows, planned.problem, arrays, inputs, planned.module, planned.config)


def _check_edges(problem: Problem, arrays: Arrays) -> None:
    """Where the sequences begin and end, as far as the host can see it."""
    seen = []
    for name in ("cu_seqlens", "cu_seqlens_cpu"):
        cu = getattr(arrays, name)
        if cu is not None and (cu.device.type == "cpu" or checks_enabled()):
            seen.append(cu.cpu())
            check_cu_seqlens(seen[-1].numpy(), problem.T, name, padding=False)
    if len(seen) == 2 and seen[0].tolist() != seen[1].tolist():
        raise ValueError(f"cu_seqlens_cpu must be cu_seqlens on the host, {seen[0].tolist()}, got {seen[1].tolist()}")


def _run(pool: StatePool, rows: Rows, problem: Problem, arrays: Arrays, inputs: dict[str, Tensor], deterministic: bool, backend: str):
    if deterministic:
        problem, arrays, inputs = _packed(problem.replace(deterministic=True), arrays, inputs)
    device = arrays.q.device
    module = dispatch.select_pooled("torch", problem, device, backend)
    config = module.default_config(problem.replace(N=CONFIGURED_FOR) if deterministic else problem, device)
    return _move(pool, rows, problem, arrays, inputs, module, config)


def _move(pool: StatePool, rows: Rows, problem: Problem, arrays: Arrays, inputs: dict[str, Tensor], module: ModuleType, config: Any):
    pool.settle(rows.place)
    if module.pooled is not None and pool.sizes.dtype != "int8":  # the kernels find and leave states themselves
        held = Pages(pool.storage.states[: pool.capacity], pool.sizes.state_v_first)
        own = problem.replace(state_v_first=held.state_v_first)
        o = module.pooled().prefill_pages(own, arrays, held, rows.place, None, None, config)
        _shift(pool, rows, arrays.cu_seqlens, inputs)
        return o
    state = pool.storage.read(rows.place)
    result, _ = module.forward(problem, arrays._replace(initial_state=state), config)
    lengths = torch.full_like(rows.place, problem.T) if arrays.cu_seqlens is None else arrays.cu_seqlens.diff()
    pool.storage.write(torch.where(lengths > 0, rows.place, pool.capacity), result.final_state)  # no token, no rounding
    _shift(pool, rows, arrays.cu_seqlens, inputs)
    if arrays.cu_seqlens is None:
        return torch.where(rows.valid[:, None, None, None], result.o, 0)
    t = torch.arange(problem.T, device=arrays.q.device)
    owner = torch.searchsorted(arrays.cu_seqlens[1:].contiguous(), t, right=True).clamp(max=problem.N - 1)
    return torch.where(rows.valid[owner][None, :, None, None], result.o, 0)


def _rounds(pool, rows: Rows, problem: Problem, arrays: Arrays, inputs, deterministic, backend, checkpoints):
    """Round r runs every sequence from its r-th cut to the next one; at the end of a round the pool holds the checkpoints."""
    shape = (*arrays.q.shape[:2],)
    problem, arrays, inputs = _packed(problem, arrays, inputs)
    edges = _lengths_on_host(arrays)
    wanted = check_checkpoints(checkpoints, [b - a for a, b in pairwise(edges)])
    cuts = [[start, *(start + p for p in own), end] for own, (start, end) in zip(wanted, pairwise(edges), strict=True)]
    o = torch.empty_like(arrays.v)
    made: list[list[Snapshot]] = [[] for _ in wanted]
    rounds = [[n for n, own in enumerate(cuts) if r + 1 < len(own)] for r in range(max(map(len, cuts), default=1) - 1)]
    for r, members in enumerate(rounds):  # who refuses any of them does so before the first
        tokens = sum(cuts[n][r + 1] - cuts[n][r] for n in members)
        dispatch.select_pooled("torch", problem.replace(T=tokens, N=len(members), deterministic=deterministic), arrays.q.device, backend)
    for r, members in enumerate(rounds):
        spans = [(cuts[n][r], cuts[n][r + 1]) for n in members]
        token = torch.tensor(list(chain(*(range(*span) for span in spans))), dtype=torch.int64, device=o.device)
        lengths = torch.tensor([0, *(b - a for a, b in spans)], device="cpu").cumsum(0)
        here = torch.tensor(members, device=o.device)
        part = arrays._replace(**{n: getattr(arrays, n)[:, token] for n in TOKENS}, cu_seqlens=lengths.to(o.device), cu_seqlens_cpu=lengths)
        own = Rows(*(x[here] for x in rows))
        smaller = problem.replace(T=len(token), N=len(members))
        o[:, token] = _run(pool, own, smaller, part, {n: x[:, token] for n, x in inputs.items()}, deterministic, backend)
        for n, i in zip(members, own.place, strict=True):
            if r < len(wanted[n]):
                made[n].append(Snapshot([x[i[None]] for x in pool.tensors()]))
    return o.view(*shape, *o.shape[2:]), made


def _packed(problem: Problem, arrays: Arrays, inputs: dict[str, Tensor]):
    """[B, T, ..] as one row of B sequences."""
    if problem.varlen:
        return problem, arrays, inputs
    edges = torch.arange(problem.B + 1, device="cpu") * problem.T
    flat = {n: getattr(arrays, n).flatten(0, 1)[None] for n in TOKENS}
    arrays = arrays._replace(**flat, cu_seqlens=edges.to(arrays.q.device), cu_seqlens_cpu=edges)
    problem = problem.replace(B=1, T=problem.B * problem.T, N=problem.B, varlen="cu_seqlens")
    return problem, arrays, {n: x.flatten(0, 1)[None] for n, x in inputs.items()}


def _lengths_on_host(arrays: Arrays) -> list[int]:
    for cu in (arrays.cu_seqlens_cpu, arrays.cu_seqlens):
        if cu is not None and cu.device.type == "cpu":
            return cu.tolist()
    raise ValueError("checkpoints need cu_seqlens_cpu, the copy of cu_seqlens on the host, got None")


def _shift(pool: StatePool, rows: Rows, cu_seqlens: Tensor | None, inputs: dict[str, Tensor]) -> None:
    if cu_seqlens is None:
        pool.shift(rows, inputs)
    else:
        _shift_packed(pool, rows, cu_seqlens, inputs)


def _shift_packed(pool: StatePool, rows: Rows, cu_seqlens: Tensor, inputs: dict[str, Tensor]) -> None:
    """Windows [N, keep, D] move on by the tokens of their sequence; a short one keeps part of its old window."""
    for name, x in inputs.items():
        window = pool.windows[name]
        keep = window.shape[1]
        place = cu_seqlens.diff()[:, None] - keep + torch.arange(keep, device=x.device)  # [N, keep], within the sequence
        old = window[rows.place].gather(1, (place + keep).clamp(0, max(keep - 1, 0))[..., None].expand(-1, -1, x.shape[2]))
        if x.shape[1]:
            new = x[0, (cu_seqlens[:-1, None] + place).clamp(0, x.shape[1] - 1)]
            old = torch.where((place >= 0)[..., None], new.to(window.dtype), old)
        window[rows.place] = old
