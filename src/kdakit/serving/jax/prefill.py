"""Prompts, whole or in slices, many in one call, with the states at chosen positions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdakit import dispatch
from kdakit import jax as kda
from kdakit.problem import Arrays, Problem, check_cu_seqlens, checks_enabled
from kdakit.serving.arguments import check_checkpoints
from kdakit.serving.jax import storage as storages
from kdakit.serving.jax.calls import device_of, prepare
from kdakit.serving.jax.pool import Rows, Snapshot, StatePool, alongside

TOKENS = ("q", "k", "v", "g", "beta")


def prefill(
    pool: StatePool, slots: Any, q, k, v, g, beta, cu_seqlens=None, checkpoints: Iterable[Iterable[int]] | None = None, A_log=None,
    dt_bias=None, window_inputs: Mapping[str, Any] | None = None, deterministic: bool = False, chunk_size: int = 64, backend: str = "auto",
    **options: Any,
) -> tuple[Any, StatePool, list[list[Snapshot]]]:  # fmt: skip
    """Tokens of N sequences, each going on from its slot's state: o, the pool moved on, and the checkpoints that were asked for.

    Arguments as in kdakit.serving.torch.prefill; the given pool is used up. cu_seqlens may be traced unless there are checkpoints or
    deterministic=True, which run as several programs: there one of a single chunk, the same for every sequence, slice and company, so that
    the bits of a sequence are its own. That is for tests and audits; it is not fast.
    """
    arrays = Arrays(q, k, v, g, beta, A_log, dt_bias, None, cu_seqlens)
    given, problem, arrays = prepare("prefill", "chunk", pool, slots, arrays, options, chunk_size=chunk_size)
    inputs = pool.check_inputs(window_inputs, problem.B, problem.T)
    place = dict(backend=backend, device=device_of(arrays.q))
    shape = arrays.v.shape
    if not problem.N:
        return jnp.zeros(shape, arrays.v.dtype), pool, []
    problem, arrays, inputs = _packed(problem, arrays, inputs)
    visible = not isinstance(arrays.cu_seqlens, jax.core.Tracer)
    if visible and (place["device"] == "cpu" or checks_enabled()):
        check_cu_seqlens(np.asarray(arrays.cu_seqlens), problem.T)
    if checkpoints is None and not deterministic:
        o, moved = _run(pool.bare(), given, arrays, inputs, problem=problem, **place)
        return o.reshape(shape), moved.of(pool), []
    if not visible:
        raise ValueError("cu_seqlens must be known on the host with checkpoints or deterministic=True, got a traced one")
    edges = np.asarray(arrays.cu_seqlens)
    check_cu_seqlens(edges, problem.T, padding=False)
    lengths = np.diff(edges).tolist()
    wanted = check_checkpoints(checkpoints if checkpoints is not None else [[]] * len(lengths), lengths)
    step = problem.options.chunk_size
    cuts = [[0, *own, length] for own, length in zip(wanted, lengths, strict=True)]
    if deterministic:
        cuts = [list(chain(*([*range(a, b, step)] for a, b in pairwise(own)), own[-1:])) for own in cuts]
    room = lambda a, b: -(-(b - a) // step) * step
    for size in {room(a, b) for own in cuts for a, b in pairwise(own) if b > a}:  # who refuses any of them does so before the first
        dispatch.select("jax", problem.replace(T=size, N=2), place["device"], backend)
    o, made = jnp.zeros((1, *arrays.v.shape[1:]), arrays.v.dtype), [[] for _ in wanted]  # type: ignore[var-annotated]
    rows, moved = pool.rows(given), pool.bare()
    named = jnp.where(rows.valid, given, -1)
    for n, own in enumerate(cuts):
        made[n] += [_kept(moved, rows.place, n)] * (wanted[n][:1] == [0])
        for a, b in pairwise(own):
            if b == a:
                continue
            o, moved = _slice(moved, o, named, n, int(edges[n]) + a, b - a, arrays, inputs, problem=problem, room=room(a, b), **place)
            made[n] += [_kept(moved, rows.place, n)] * (b in wanted[n])
    return o.reshape(shape), moved.of(pool), made


@partial(jax.jit, static_argnames=("problem", "room", "backend", "device"), donate_argnums=(0, 1))
def _slice(pool: StatePool, o, named, n, start, count, arrays: Arrays, inputs, problem: Problem, room: int, backend: str, device: str):
    """One slice of one sequence in `room` places, whatever its length: few programs. Behind it a second sequence, of nobody."""
    token = start + jnp.arange(room)
    cut = lambda x: x.take(token, axis=1, mode="clip")
    edges = jnp.stack([0 * count, count, 0 * count + room]).astype(jnp.int32)
    part = arrays._replace(**{name: cut(getattr(arrays, name)) for name in TOKENS}, cu_seqlens=edges)
    own = jnp.stack([named[n], jnp.full_like(named[n], -1)])
    own_inputs = {name: cut(x) for name, x in inputs.items()}
    piece, pool = _run(pool, own, part, own_inputs, problem=problem.replace(T=room, N=2), backend=backend, device=device)
    return o.at[:, jnp.where(token < start + count, token, o.shape[1])].set(piece, mode="drop"), pool


@partial(jax.jit, static_argnames=("problem", "backend", "device"), donate_argnums=0)
def _run(pool: StatePool, slots, arrays: Arrays, inputs, problem: Problem, backend: str, device: str):
    rows = pool.rows(slots)
    state = storages.read(pool.sizes, pool.contents.storage, rows.place)
    out, _ = kda.run(problem, backend, device, arrays._replace(initial_state=state))  # what is not finite stays in its own sequence
    moved = jnp.where(jnp.diff(arrays.cu_seqlens) > 0, rows.place, pool.capacity)  # no token, no rounding
    storage = storages.write(pool.sizes, pool.contents.storage, moved, out.final_state)
    t = jnp.arange(problem.T)
    owner = jnp.minimum((t[:, None] >= arrays.cu_seqlens[1:]).sum(1), problem.N - 1)
    o = jnp.where(rows.valid[owner][None, :, None, None], out.o, 0)
    return o, pool.replace(storage=storage, windows=_shifted(pool, rows, arrays.cu_seqlens, inputs))


def _packed(problem: Problem, arrays: Arrays, inputs):
    """[B, T, ..] as one row of B sequences."""
    if problem.varlen:
        return problem, arrays, inputs
    flat = lambda x: x.reshape(1, -1, *x.shape[2:])
    edges = jnp.arange(problem.B + 1, dtype=jnp.int32) * problem.T
    arrays = arrays._replace(**{n: flat(getattr(arrays, n)) for n in TOKENS}, cu_seqlens=edges)
    problem = problem.replace(B=1, T=problem.B * problem.T, N=problem.B, varlen="cu_seqlens")
    return problem, arrays, {n: flat(jnp.asarray(x)) for n, x in inputs.items()}


def _shifted(pool: StatePool, rows: Rows, cu_seqlens, inputs) -> dict[str, Any]:
    """Windows moved on by the tokens of their sequence; a short one keeps part of its old window."""
    windows = dict(pool.contents.windows)
    for name, x in inputs.items():
        window = windows[name]
        keep = window.shape[1]
        place = jnp.diff(cu_seqlens)[:, None] - keep + jnp.arange(keep)  # [N, keep], within the sequence
        old = jnp.take_along_axis(window[rows.place], alongside(jnp.clip(place + keep, 0, max(keep - 1, 0)), window), 1)
        new = x[0].take(cu_seqlens[:-1, None] + place, axis=0, mode="clip") if x.shape[1] else old
        windows[name] = window.at[rows.place].set(jnp.where(alongside(place >= 0, window), new.astype(window.dtype), old))
    return windows


def _kept(pool: StatePool, index, n: int) -> Snapshot:
    return jax.tree.map(lambda x: x[index[n]][None], Snapshot(pool.contents.storage, pool.contents.windows))
