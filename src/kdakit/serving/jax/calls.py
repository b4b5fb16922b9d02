"""decode, verify and commit: from a pool to the next one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from kdakit import dispatch
from kdakit.problem import Arrays, Problem
from kdakit.serving.arguments import check_accepted, check_drafts, describe
from kdakit.serving.jax import storage as storages
from kdakit.serving.jax.pool import Rows, StatePool


@partial(jax.tree_util.register_dataclass, data_fields=("rows", "log", "inputs"), meta_fields=("problem", "backend", "device"))
@dataclass(frozen=True, eq=False)
class Draft:
    """What `verify` leaves for `commit`: which rows took part, and the log of their tokens."""

    rows: Rows
    log: Any
    inputs: Mapping[str, Any]  # of the convolutions
    problem: Problem
    backend: str
    device: str

    @property
    def generation(self):
        return self.rows.generation


def decode(
    pool: StatePool, slots: Any, q, k, v, g, beta, A_log=None, dt_bias=None, window_inputs: Mapping[str, Any] | None = None,
    backend: str = "auto", **options: Any,
) -> tuple[Any, StatePool]:  # fmt: skip
    """The next token (or few) of each row: o [N, T, HV, V], and the pool moved on; the given one is used up.

    q, k [N, T, H, K], v [N, T, HV, V], g [N, T, HV, K], beta [N, T, HV], row n for slots[n]. `options` are those of `fused_recurrent_kda`.
    """
    given, problem, arrays = prepare("decode", "recurrent", pool, slots, Arrays(q, k, v, g, beta, A_log, dt_bias), options)
    inputs = pool.check_inputs(window_inputs, problem.B, problem.T)
    o, moved = _decode(pool.bare(), given, arrays, inputs, problem, backend, device_of(arrays.q))
    return o, moved.of(pool)


def verify(
    pool: StatePool, slots: Any, q, k, v, g, beta, A_log=None, dt_bias=None, window_inputs: Mapping[str, Any] | None = None,
    backend: str = "auto", **options: Any,
) -> tuple[Any, Draft]:  # fmt: skip
    """Outputs of T <= 8 draft tokens a row, and a Draft; the pool stays as it is."""
    given, problem, arrays = prepare("verify", "recurrent", pool, slots, Arrays(q, k, v, g, beta, A_log, dt_bias), options)
    check_drafts(problem.T)
    inputs = pool.check_inputs(window_inputs, problem.B, problem.T)
    return _verify(pool.bare(), given, arrays, inputs, problem, backend, device_of(arrays.q))


def commit(pool: StatePool, draft: Draft, accepted: Iterable[int] | Any) -> StatePool:
    """The pool moved on by the first accepted[n] tokens of each row's draft; the given one is used up.

    A draft does not count for a slot that has been freed or restored since `verify`. Between the two, no other call may move its rows, and
    each draft is to be committed once.
    """
    if not isinstance(draft, Draft):
        raise TypeError(f"draft must be what verify returned, got {type(draft).__name__}")
    N, T = draft.log.u.shape[:2]
    if not isinstance(accepted, jax.Array):
        accepted = jnp.asarray(check_accepted(accepted, N, T), jnp.int32)
    if accepted.shape != (N,) or not jnp.issubdtype(accepted.dtype, jnp.integer):
        raise TypeError(f"accepted must be ({N},) integers, got {accepted.shape} {accepted.dtype}")
    return _commit(pool.bare(), draft, accepted).of(pool)


def prepare(call: str, op: str, pool: StatePool, slots: Any, arrays: Arrays, options: dict[str, Any], **more: Any):
    """Slots on the device, the problem, and the arrays as JAX's own."""
    arrays = Arrays(*(None if x is None else jnp.asarray(x) for x in arrays))
    given = pool.device_slots(slots)
    return given, describe(call, op, pool.sizes, arrays, given.shape[0], options, **more), arrays


def device_of(array: Any) -> str:
    concrete = isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer)
    return next(iter(array.devices())).platform if concrete else jax.default_backend()


def pooled_kernels(module: Any, problem: Problem, states, backend: str, device: str) -> Any:
    """The backend's kernels over pools, if it has some that take the call; 'auto' takes them where such a device has shown them right."""
    kernels = None if module.pooled is None else module.pooled()
    if kernels is None or not kernels.takes(problem, states) or (backend == "auto" and kernels.unshown(device) is not None):
        return None
    return kernels


@partial(jax.jit, static_argnames=("problem", "backend", "device"), donate_argnums=0)
def _decode(pool: StatePool, slots, arrays: Arrays, inputs, problem: Problem, backend: str, device: str):
    rows, module = pool.rows(slots), dispatch.select("jax", problem, device, backend)
    everything = jnp.full_like(rows.place, problem.T)
    own, states = problem.replace(state_v_first=pool.sizes.state_v_first), pool.contents.storage.states
    if (kernels := pooled_kernels(module, own, states, backend, device)) is not None:
        o, states = kernels.decode(own, arrays, states, kernels.Rows(_pages(rows), _pages(rows)), module.default_config(own, device))
        return o, pool.replace(storage=storages.Storage(states), windows=pool.shifted(rows, inputs, everything))
    state = storages.read(pool.sizes, pool.contents.storage, rows.place)
    decay = None
    if pool.sizes.dtype == "int8":  # the scales follow the decays, which the log knows
        drafts = dispatch.load("xla").draft
        o, log = drafts.verify(problem, arrays, state)
        state, decay = drafts.replay(state, log, everything), drafts.total_decay(log, everything)
    else:
        out = module.step(problem, arrays._replace(initial_state=state), module.default_config(problem, device))
        o, state = out.o, out.final_state
    storage = storages.write(pool.sizes, pool.contents.storage, rows.place, state, decay)
    return only(rows, o), pool.replace(storage=storage, windows=pool.shifted(rows, inputs, everything))


@partial(jax.jit, static_argnames=("problem", "backend", "device"))
def _verify(pool: StatePool, slots, arrays: Arrays, inputs, problem: Problem, backend: str, device: str):
    rows, module, drafts = pool.rows(slots), dispatch.select("jax", problem, device, backend), dispatch.load("xla").draft
    own, states = problem.replace(state_v_first=pool.sizes.state_v_first), pool.contents.storage.states
    if (kernels := pooled_kernels(module, own, states, backend, device)) is not None:
        o, u = kernels.verify(own, arrays, states, _pages(rows), module.default_config(own, device))
        log = drafts.log_of(problem, arrays, u)
    else:
        o, log = drafts.verify(problem, arrays, storages.read(pool.sizes, pool.contents.storage, rows.place))
    return only(rows, o), Draft(rows, log, inputs, problem, backend, device)


@partial(jax.jit, donate_argnums=0)
def _commit(pool: StatePool, draft: Draft, accepted) -> StatePool:
    drafts, rows = dispatch.load("xla").draft, draft.rows
    accepted = jnp.clip(accepted, 0, draft.log.u.shape[1])
    same = rows.valid & (pool.contents.generation[rows.place] == rows.generation)
    rows = rows._replace(place=jnp.where(same, rows.place, pool.capacity), valid=same)
    problem, device = draft.problem.replace(state_v_first=pool.sizes.state_v_first), draft.device
    module = dispatch.select("jax", draft.problem, device, draft.backend)
    states, log = pool.contents.storage.states, draft.log
    if (kernels := pooled_kernels(module, problem, states, draft.backend, device)) is not None:
        config = module.default_config(problem, device)
        states = kernels.commit(problem, log.k, log.decay, log.u, states, _pages(rows), accepted, config)
        return pool.replace(storage=storages.Storage(states), windows=pool.shifted(rows, draft.inputs, accepted))
    state = drafts.replay(storages.read(pool.sizes, pool.contents.storage, rows.place), draft.log, accepted)
    moved = jnp.where(accepted > 0, rows.place, pool.capacity)
    storage = storages.write(pool.sizes, pool.contents.storage, moved, state, drafts.total_decay(draft.log, accepted))
    return pool.replace(storage=storage, windows=pool.shifted(rows, draft.inputs, accepted))


def _pages(rows: Rows):
    """As kernels over pools name them: -1 is nobody's."""
    return jnp.where(rows.valid, rows.place, -1)


def only(rows: Rows, o):
    """Zero where a row was skipped."""
    return jnp.where(rows.valid[:, None, None, None], o, 0)
