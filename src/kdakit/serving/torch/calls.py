"""decode, verify and commit over a pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kdakit import dispatch
from kdakit.problem import Arrays, Problem, Spec, check_devices, checks_enabled
from kdakit.serving.arguments import PoolSizes, check_accepted, check_drafts, describe
from kdakit.serving.torch.plainly import plainly
from kdakit.serving.torch.pool import Rows, Slots, StatePool
from kdakit.torch_operators import unwatched


@dataclass
class Draft:
    """What `verify` leaves for `commit`: which rows took part, and the log of their tokens."""

    pool: StatePool
    rows: Rows | None  # None where the backend's kernels read the slots themselves
    slots: Tensor  # [N], a copy: what the caller's tensor holds later does not matter. -1 for rows that were skipped
    generation: Tensor  # [N]: likewise
    log: Any  # of the backend
    inputs: Mapping[str, Tensor]  # of the convolutions
    backend: ModuleType
    tokens: int
    spent: bool = False


@plainly
def decode(
    pool: StatePool, slots: Slots, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, window_inputs: Mapping[str, Tensor] | None = None, backend: str = "auto", **options: Any,
) -> Tensor:  # fmt: skip
    """The next token (or few) of each row: o [N, T, HV, V]; the pool's states, and windows given `window_inputs`, move on.

    q, k [N, T, H, K], v [N, T, HV, V], g [N, T, HV, K], beta [N, T, HV], row n for slots[n]. On a GPU one launch that reads and writes the
    states in place and looks at no slot on the host. `options` are those of `fused_recurrent_kda`: scale, use_qk_l2norm_in_kernel,
    use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, safe_gate.
    """
    arrays = Arrays(q, k, v, g, beta, A_log, dt_bias)
    key = _alike(pool, slots, arrays, backend, options)
    if key is not None and isinstance(slots, Tensor) and (plan := _plans[pool].get(key)) is not None:
        inputs = pool.check_inputs(window_inputs, *q.shape[:2])
        o = plan((*arrays[:7], slots, *pool.seen_by_kernels()))
        if inputs:
            pool.shift(pool.rows(slots), inputs)
        return o
    problem, given, module = _prepare("decode", pool, slots, arrays, backend, options)
    inputs = pool.check_inputs(window_inputs, problem.B, problem.T)
    if module.pooled is not None:
        kernels = module.pooled()
        if pool.pending is not None and problem.T == 1:
            o, plan = kernels.decode_pending(problem, arrays, pool, given)
        else:
            pool.settle(given)
            o, plan = kernels.decode(problem, arrays, pool, given)
            plan = None if pool.pending is not None else plan  # which would not settle
        if key is not None and plan is not None:
            if len(_plans[pool]) >= 1024:
                _plans[pool].clear()
            _plans[pool][key] = plan
        if inputs:
            pool.shift(pool.rows(given), inputs)
        return o
    pool.settle(given)
    rows = pool.rows(given)
    o = _decode(problem, arrays, pool, rows, module)
    pool.shift(rows, inputs)
    return o


@plainly
def verify(
    pool: StatePool, slots: Slots, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, window_inputs: Mapping[str, Tensor] | None = None, backend: str = "auto", **options: Any,
) -> tuple[Tensor, Draft]:  # fmt: skip
    """Outputs o [N, T, HV, V] of T <= 8 draft tokens a row, and a Draft. No state and no window changes before `commit`.

    Arguments as in `decode`. The draft holds 2 K + V numbers a token and head instead of a state, and `window_inputs` themselves: of all
    that was given only they must stay as they are until `commit`.
    """
    arrays = Arrays(q, k, v, g, beta, A_log, dt_bias)
    return _verify("verify", pool, slots, arrays, window_inputs, backend, options)


@plainly
def advance(
    pool: StatePool, draft: Draft, accepted: Iterable[int] | Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None, window_inputs: Mapping[str, Tensor] | None = None, backend: str = "auto",
    **options: Any,
) -> tuple[Tensor, Draft]:  # fmt: skip
    """`commit(pool, draft, accepted)` and then `verify` of the next draft tokens of the same rows.

    On a GPU each state is then read and written once: what a loop of speculative decoding does at every turn. With convolution
    windows, whose inputs depend on what was accepted, make the two calls instead.
    """
    arrays = Arrays(q, k, v, g, beta, A_log, dt_bias)
    counted = check_commit(pool, draft, accepted)
    if draft.inputs or window_inputs:
        raise ValueError("window_inputs must go through commit and verify, one after the other: a window moves before it is read")
    return _verify("advance", pool, draft.slots, arrays, None, backend, options, (draft, counted))


def _verify(call: str, pool: StatePool, slots: Slots, arrays: Arrays, window_inputs, backend: str, options: dict[str, Any], past=None):
    """past: an earlier draft of the same rows and what of it is to be committed first, once it is clear that nothing is refused."""
    problem, given, module = _prepare(call, pool, slots, arrays, backend, options)
    check_drafts(problem.T)
    inputs = pool.check_inputs(window_inputs, problem.B, problem.T)
    pool.settle(given)  # in `advance` too: a slot of the draft may have another owner by now, whose tokens wait
    if past is not None and past[0].backend.commit is None:
        _commit(pool, *past)
        past = None
    if past is not None:
        if module.pooled is None:
            raise ValueError(f"backend must be the one that made the draft, got {backend!r}")
        past[0].spent = True
    if module.pooled is not None:
        kernels = module.pooled()
        o, (own, generation), log = kernels.verify(problem, arrays, pool, given, module.default_config(problem, arrays.q.device), past)
        return o, Draft(pool, pool.rows(given) if inputs else None, own, generation, log, inputs, kernels, problem.T)
    rows, drafts = pool.rows(given), dispatch.load("torch_native").draft
    o, log = drafts.verify(problem, arrays, pool.storage.read(rows.place))
    return _only(rows, o), Draft(pool, rows, torch.where(rows.valid, given, -1), rows.generation, log, inputs, drafts, problem.T)


@plainly
def commit(pool: StatePool, draft: Draft, accepted: Iterable[int] | Tensor) -> None:
    """Move the pool on by the first accepted[n] tokens of each row's draft: 0 leaves a state as it was, the number of drafts takes all.

    As if those tokens had been decoded one by one; states in fewer bits are rounded once instead of once a token. A draft counts once, and
    not for a slot that has been freed or restored since `verify`. Between the two, no other call may move its rows.
    """
    _commit(pool, draft, check_commit(pool, draft, accepted))


def _commit(pool: StatePool, draft: Draft, accepted: Tensor) -> None:
    draft.spent = True
    pool.settle(draft.slots)
    if draft.backend.commit is not None:
        draft.backend.commit(pool, draft, accepted)
    rows = draft.rows
    if rows is None:
        return
    rows = _still(pool, rows)
    if draft.backend.commit is None:
        states = draft.backend.replay(pool.storage.read(rows.place), draft.log, accepted)
        decay = draft.backend.total_decay(draft.log, accepted)
        moved = rows._replace(place=torch.where(accepted > 0, rows.place, pool.capacity))
        pool.storage.write(moved.place, states, decay)
    pool.shift(rows, draft.inputs, accepted)


def check_commit(pool: StatePool, draft: Draft, accepted: Iterable[int] | Tensor) -> Tensor:
    """accepted [N] on the device, where the draft can be committed."""
    if not isinstance(draft, Draft):
        raise TypeError(f"draft must be what verify returned, got {type(draft).__name__}")
    if draft.pool is not pool:
        raise ValueError("draft must have been made of the same pool: its slots are others' elsewhere")
    if draft.spent:
        raise ValueError("draft must not have been committed before: verify again")
    if not isinstance(accepted, Tensor):
        return torch.tensor(check_accepted(accepted, len(draft.slots), draft.tokens), dtype=torch.int64, device=pool.device)
    if tuple(accepted.shape) != tuple(draft.slots.shape) or accepted.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"accepted must be {tuple(draft.slots.shape)} int32 or int64, got {tuple(accepted.shape)} {accepted.dtype}")
    if accepted.device != pool.device:
        raise ValueError(f"accepted must be on the pool's device {pool.device}, got {accepted.device}; a list is taken too")
    return accepted.clamp(0, draft.tokens) if draft.rows is not None else accepted


# Of decodes on a GPU that come again: their launches, with other addresses.
_plans: WeakKeyDictionary[StatePool, dict[Any, Callable[[Sequence[Tensor | None]], Tensor]]] = WeakKeyDictionary()


def _alike(pool: StatePool, slots: Slots, arrays: Arrays, backend: str, options: dict[str, Any]) -> Any:
    """What calls over a pool have in common that differ in values and addresses alone; None where values are looked at."""
    if not isinstance(slots, Tensor) or not unwatched((*arrays[:7], slots)) or not _repeats(arrays.q):
        return None
    if pool not in _plans:
        _plans[pool] = {}
    tensors = [None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) for x in (*arrays[:7], slots)]
    key = backend, *((name, type(x), x) for name, x in options.items()), *tensors
    try:
        hash(key)
    except TypeError:  # an option of a wrong type, which the call will name
        return None
    return key


def _repeats(x: Tensor) -> bool:
    return x.is_cuda and not checks_enabled()


def _prepare(call: str, pool: StatePool, slots: Slots, arrays: Arrays, backend: str, options: dict[str, Any]):
    for name, x in zip(Arrays._fields, arrays, strict=True):
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    given = pool.device_slots(slots)
    specs = [None if x is None else (x.shape, x.dtype, x.device) for x in arrays]
    try:
        problem = _described(call, pool.sizes, pool.device, given.shape[0], *specs, **options)
    except TypeError:  # an option of a wrong type, perhaps one that cannot be looked up: it says which
        problem = _described.__wrapped__(call, pool.sizes, pool.device, given.shape[0], *specs, **options)
    return problem, given, dispatch.select("torch", problem, arrays.q.device, backend)


@lru_cache(maxsize=1024, typed=True)
def _described(call: str, sizes: PoolSizes, device: torch.device, rows: int, /, *specs: tuple | None, **options: Any) -> Problem:
    """A call like an earlier one is not described, nor checked, anew."""
    arrays = Arrays(*(None if x is None else Spec(*x) for x in specs))
    check_devices(arrays)
    if arrays.q.device != device:
        raise ValueError(f"q must be on the pool's device {device}, got {arrays.q.device}")
    return describe(call, "recurrent", sizes, arrays, rows, options)


def _decode(problem: Problem, arrays: Arrays, pool: StatePool, rows: Rows, module: ModuleType) -> Tensor:
    """With any backend's token recurrence: rows out of the pool, and back into it."""
    state = pool.storage.read(rows.place)
    if pool.sizes.dtype == "int8":  # the scales follow the decays, which the log knows
        drafts = dispatch.load("torch_native").draft
        o, log = drafts.verify(problem, arrays, state)
        everything = torch.full_like(rows.place, problem.T)
        pool.storage.write(rows.place, drafts.replay(state, log, everything), drafts.total_decay(log, everything))
        return _only(rows, o)
    out = module.step(problem, arrays._replace(initial_state=state), module.default_config(problem, state.device))
    pool.storage.write(rows.place, out.final_state)
    return _only(rows, out.o)


def _only(rows: Rows, o: Tensor) -> Tensor:
    """Zero where a row was skipped; by selection, so that nothing of what lies in the spare row comes through."""
    return torch.where(rows.valid[:, None, None, None], o, 0)


def _still(pool: StatePool, rows: Rows) -> Rows:
    """The rows whose slots have the same owner and contents as when the draft was made."""
    same = rows.valid & (pool.generation[rows.place] == rows.generation)
    return rows._replace(place=torch.where(same, rows.place, pool.capacity), valid=same)
