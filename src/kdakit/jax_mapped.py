"""vmap of a backend whose kernels cannot be mapped: mapped calls become one of a larger batch, or a loop.

Rows of a batch know nothing of each other, so a mapped axis goes into B at no cost; so does what a forward saves, whose first axis is B.
Where it cannot, because packed sequences have no batch or because each call has gate parameters of its own, calls run one after the other,
as a grid does on a TPU's core. The rules hold under any number of vmaps, inside a gradient and around it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from kdakit.problem import Arrays, Problem


def forward(module, problem: Problem, arrays: Arrays, config):
    """As the module's."""
    if not module.folds:
        return module.forward(problem, arrays, config)
    return _mapped(lambda problem, parts, arrays: module.forward(problem, arrays, config), problem, None)(arrays)


def step(module, problem: Problem, arrays: Arrays, config):
    if not module.folds:
        return module.step(problem, arrays, config)
    return _mapped(lambda problem, parts, arrays: module.step(problem, arrays, config), problem, None)(arrays)


def backward(module, problem: Problem, arrays: Arrays, saved, d_o, d_final_state, config) -> Arrays:
    if not module.folds:
        return module.backward(problem, arrays, saved, d_o, d_final_state, config)

    def run(problem, parts, arrays, saved, d_o, d_final_state):
        return module.backward(problem, arrays, saved, d_o, d_final_state, config, parts=parts)

    return _mapped(run, problem, None)(arrays, saved, d_o, d_final_state)


def _mapped(run, problem: Problem, parts: int | None):
    """run(problem, parts, arrays, *rest) under vmap. `parts`: of the batch, for gradients of A_log and dt_bias; None: they are no parts."""

    @custom_vmap
    def call(*given):
        return run(problem, parts, *given)

    @call.def_vmap
    def mapped(size, batched, *given):
        arrays, which = given[0], batched[0]
        if problem.varlen == "cu_seqlens" or which.A_log or which.dt_bias:
            found = _one_by_one(_mapped(run, problem, parts), batched, given)
        else:
            larger = problem.replace(B=size * problem.B, N=size * problem.N)
            whole = arrays._replace(A_log=None, dt_bias=None)
            whole, *rest = jax.tree.map(lambda x, on: _fold(x, on, size), (whole, *given[1:]), (_without(which), *batched[1:]))
            whole = whole._replace(A_log=arrays.A_log, dt_bias=arrays.dt_bias)
            found = _mapped(run, larger, size * (parts or 1))(whole, *rest)
            found = jax.tree.map(lambda x: x.reshape(size, x.shape[0] // size, *x.shape[1:]), found)
            if parts is None:  # one part a call: without its axis
                found = _one_part(found)
        return found, jax.tree.map(lambda _: True, found)

    return call


def _one_by_one(call, batched, given):
    leaves, tree = jax.tree.flatten(given)
    on = jax.tree.leaves(batched)
    mapped = [x for x, flag in zip(leaves, on, strict=True) if flag]

    def one(own):
        own = iter(own)
        return call(*tree.unflatten([next(own) if flag else x for x, flag in zip(leaves, on, strict=True)]))

    return lax.map(one, mapped)


def _fold(x, mapped: bool, size: int):
    """[size, B, ..] -> [size * B, ..]; what is not mapped is repeated."""
    x = x if mapped else jnp.broadcast_to(x, (size, *x.shape))
    return x.reshape(size * x.shape[1], *x.shape[2:])


def _without(which: Arrays) -> Arrays:
    return which._replace(A_log=None, dt_bias=None)


def _one_part(found: Any) -> Any:
    """A backward's gradients of A_log and dt_bias are [size, 1, ..]; a forward has none."""
    if not isinstance(found, Arrays):
        return found
    inner = lambda x: None if x is None else x[:, 0]
    return found._replace(A_log=inner(found.A_log), dt_bias=inner(found.dt_bias))
