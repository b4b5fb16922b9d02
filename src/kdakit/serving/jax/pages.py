"""States in memory that somebody else owns: an engine's pool, with its own pages, slots and conventions.

    o, states = decode(states, slots, q, k, v, g, beta)                     # one token a row, or a few
    o, states = decode(states, slots [N, T], .., accepted=accepted)         # reads slots[n, accepted[n] - 1], token t goes to slots[n, t]

A row whose slot is nobody's (below `first`, or past the last page) outputs zeros and touches no state. The states are an array like any
other: jit the call with them donated, and the next ones are in their memory. On a TPU one kernel finds and leaves them there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from kdakit import dispatch
from kdakit.problem import Arrays, Problem
from kdakit.serving.arguments import PoolSizes, describe
from kdakit.serving.jax.calls import device_of, pooled_kernels

DTYPES = ("float32", "bfloat16", "float16")
TOKENS = ("q", "k", "v", "g", "beta")


def decode(
    states, slots, q, k, v, g, beta, A_log=None, dt_bias=None, accepted=None, state_v_first: bool = False, first: int = 0,
    backend: str = "auto", **options: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """The next tokens of each row: o [N, T, HV, V], and the states.

    states: [pages, HV, K, V], or [pages, HV, V, K] with state_v_first; float32, bfloat16 or float16. Donate them: else they are copied.
    q, k [N, T, H, K], v [N, T, HV, V], g [N, T, HV, K], beta [N, T, HV].
    slots: [N], the state of row n, read and written; or [N, T], one for each token, where the state after token t goes to slots[n, t], and
        comes from slots[n, accepted[n] - 1] (slots[n, 0] without accepted [N]). No page may belong to two rows.
    first: slots below it are nobody's. options: those of `fused_recurrent_kda`.
    """
    states, slots = jnp.asarray(states), jnp.asarray(slots)
    arrays = Arrays(*(None if x is None else jnp.asarray(x) for x in (q, k, v, g, beta, A_log, dt_bias)))
    sizes = _sizes(states, state_v_first)
    problem = describe("decode", "recurrent", sizes, arrays, _rows(slots), options)
    if slots.ndim == 2 and slots.shape[1] < problem.T:
        raise ValueError(f"slots must be [N, T] with T >= {problem.T} tokens, got {slots.shape}")
    if accepted is not None:
        accepted = jnp.asarray(accepted)
        if slots.ndim != 2:
            raise ValueError(f"accepted needs slots [N, T], one for each token, got {slots.shape}")
        if accepted.shape != slots.shape[:1] or not jnp.issubdtype(accepted.dtype, jnp.integer):
            raise TypeError(f"accepted must be ({len(slots)},) integers, got {accepted.shape} {accepted.dtype}")
    return _decode(states, slots, accepted, arrays, problem.replace(state_v_first=state_v_first), first, backend, device_of(arrays.q))


@partial(jax.jit, static_argnames=("problem", "first", "backend", "device"))
def _decode(states, slots, accepted, arrays: Arrays, problem: Problem, first: int, backend: str, device: str):
    inside = (slots >= first) & (slots < states.shape[0])
    target = jnp.where(inside, slots, -1).astype(jnp.int32)
    source = target
    if slots.ndim == 2:
        column = jnp.zeros_like(target[:, 0]) if accepted is None else jnp.clip(accepted.astype(jnp.int32), 1, slots.shape[1]) - 1
        source, target = jnp.take_along_axis(target, column[:, None], 1)[:, 0], target[:, : problem.T]
    module = dispatch.select("jax", problem, device, backend)
    if (kernels := pooled_kernels(module, problem, states, backend, device)) is not None:
        return kernels.decode(problem, arrays, states, kernels.Rows(source, target), module.default_config(problem, device))
    return _plain(problem, arrays, states, source, target, module, device)


def _plain(problem: Problem, arrays: Arrays, states, source, target, module, device: str):
    """With any backend's token recurrence: states out of their pages and back."""
    layout = lambda x: x.swapaxes(-1, -2) if problem.options.state_v_first else x
    live = (source >= 0)[:, None, None, None]
    S = jnp.where(live, layout(states[jnp.maximum(source, 0)]).astype(jnp.float32), 0)
    every = target.ndim == 2
    one = problem.replace(state_v_first=False, state_dtype="float32", T=1 if every else problem.T)
    config, found = module.default_config(one, device), []
    for t in range(problem.T if every else 1):
        own = arrays._replace(**{n: getattr(arrays, n)[:, t : t + 1] for n in TOKENS}) if every else arrays
        step = module.step(one, own._replace(initial_state=S), config)
        S = step.final_state
        found.append(step.o)
        page = target[:, t] if every else target
        place = jnp.where((source >= 0) & (page >= 0), page, states.shape[0])
        states = states.at[place].set(layout(S).astype(states.dtype), mode="drop")
    return jnp.where(live, jnp.concatenate([arrays.v[:, :0], *found], 1), 0), states


def _sizes(states, state_v_first: bool) -> PoolSizes:
    if states.ndim != 4 or states.dtype.name not in DTYPES:
        want = f"[pages, HV, K, V] (or [pages, HV, V, K]) of {', '.join(DTYPES)}"
        raise TypeError(f"states must be {want}, got {states.shape} {states.dtype}")
    _, HV, K, V = states.shape
    K, V = (V, K) if state_v_first else (K, V)
    return PoolSizes(HV, K, V, states.dtype.name, state_v_first)


def _rows(slots) -> int:
    if slots.ndim not in (1, 2) or not jnp.issubdtype(slots.dtype, jnp.integer):
        raise TypeError(f"slots must be [N] or [N, T] integers, got {slots.shape} {slots.dtype}")
    return slots.shape[0]
