"""Calls: the forward, the backward and the step; how to repeat one; and what a first one compiles ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from kdakit.backends.triton_gpu.config import Config
from kdakit.backends.triton_gpu.host import backward as backwards
from kdakit.backends.triton_gpu.host import forward as forwards
from kdakit.backends.triton_gpu.host import recorded
from kdakit.backends.triton_gpu.host.forward import step
from kdakit.backends.triton_gpu.runtime import precompile
from kdakit.backends.triton_gpu.runtime.launch import on_device, recording, watching
from kdakit.backends.triton_gpu.runtime.layout import contiguous_parameters, views
from kdakit.backends.triton_gpu.runtime.repeat import Plan, plan_of
from kdakit.problem import Arrays, Problem
from kdakit.reference import Result

Repeat = Callable[[Sequence[torch.Tensor | None]], Any]  # of other tensors


def forward(problem: Problem, arrays: Arrays, config: Config) -> tuple[Result, list]:
    arrays = contiguous_parameters(arrays)
    x = views(arrays)
    with on_device(arrays.q):
        if arrays.q.is_cuda:
            key, lent = kind(problem, config, arrays.q.get_device()), backwards.replaced(problem, config, arrays.q.device)
            precompile.compile_once((key, lent), lambda: [x for x in launches(problem, arrays, config) if x[0].__name__ not in lent])
        made = forwards.borrowed_forward(problem, arrays, config)
        if made is not None:
            return made[0], backwards.saved(problem, made[1], config)
        space = forwards.prepare(problem, arrays, x, config)
        result = forwards.scan(problem, arrays, x, space, config)
        if not problem.needs_grad:
            return result, []
        return result, backwards.saved(problem, space, config)


def backward(problem: Problem, arrays: Arrays, kept, d_o, d_final, config: Config) -> Arrays:
    return backwards.over_groups(problem, of_value_heads(problem, arrays, kept, d_o, d_final, config))


def of_value_heads(problem: Problem, arrays: Arrays, kept, d_o, d_final, config: Config) -> Arrays:
    """All launches of a backward: d_q and d_k have HV heads, in float32 where these are more than H."""
    if not kept:  # the forward was the token recurrence
        problem = problem.replace(op="chunk", needs_grad=True, output_final_state=False)
        kept = forward(problem, arrays, config)[1]
    arrays, d_o, d_final = contiguous_parameters(arrays), _packed(d_o), _packed(d_final)
    with on_device(arrays.q):
        host = recorded if recorded.here(problem, config, d_o) else backwards
        return host.backward(problem, arrays, kept, d_o, d_final, config)


def planned(problem: Problem, arrays: Arrays, config: Config, final_state: torch.Tensor | None = None) -> tuple[Any, Plan | None]:
    """A call, and how to repeat it; None where it cannot be. The result is a Result; of a call that will be differentiated it is that and
    what is saved."""
    with watching() as seen:
        if problem.op == "recurrent":
            result, saved = step(problem, arrays, config, final_state), []
        else:
            result, saved = forward(problem, arrays, config)

    def shaped(made: list) -> Any:
        return (Result(*made[:2]), made[2:]) if problem.needs_grad else Result(*made)

    plan = None if result.states is not None else plan_of(arrays, [*result[:2], *saved], seen, shaped)
    return (result, saved) if problem.needs_grad else result, plan


def planned_backward(problem: Problem, arrays: Arrays, saved, d_o, d_final, config: Config) -> tuple[Arrays, Repeat | None]:
    """A backward, and how to repeat it with (*arrays, *saved, d_o, d_final). What was saved is never copied, and some of it perhaps for
    kernels of which another backend has better ones; where states were kept, so was all that v is needed for. Cotangents that are not
    packed, as that of a sum, are copied first by the plan too."""
    given = d_o, d_final
    d_o, d_final = map(_packed, given)
    with watching() as seen:
        found = of_value_heads(problem, arrays, saved, d_o, d_final, config)
    unread = [*saved, arrays.v] if saved and (config.keeps_states or recorded.here(problem, config, d_o)) else saved
    shaped = lambda made: backwards.over_groups(problem, Arrays(*made))
    plan = plan_of([*arrays, *saved, d_o, d_final], found, seen, shaped, unread)
    if plan is None or (d_o is given[0] and d_final is given[1]):
        return shaped(found), plan
    return shaped(found), lambda tensors: plan((*tensors[:-2], *map(_packed, tensors[-2:])))


def _packed(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


@lru_cache(maxsize=1024)
def kind(problem: Problem, config: Config, device: int) -> Any:
    """What calls that launch the same kernels have in common."""
    return problem.replace(B=1, T=1, N=1), config, device


def launches(problem: Problem, arrays: Arrays, config: Config) -> list[precompile.Recorded]:
    """(kernel, arguments, constants, options) of a call's launches, in order, on tensors without memory. Nothing runs."""
    problem = problem.replace(return_intermediate_states=False)  # their number would have to be looked up on the device
    arrays = Arrays(*(None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in arrays))
    with recording() as recorded:
        if problem.op == "recurrent":
            step(problem, arrays, config)
            return recorded
        kept = forward(problem, arrays, config)[1]
        if problem.needs_grad:
            # Not torch.empty_like, which for tensors without memory imports sympy: seconds.
            d_o = torch.empty(arrays.v.shape, dtype=arrays.v.dtype, device="meta")
            of_value_heads(problem, arrays, kept, d_o, None, config)
            if problem.options.output_final_state:  # a loss may be made of the final state, or not: some kernels have a form for each
                known = [(kernel, constants) for kernel, _, constants, _ in recorded]
                first = len(recorded)
                of_value_heads(problem, arrays, kept, d_o, torch.empty(problem.state_shape, dtype=torch.float32, device="meta"), config)
                recorded[first:] = [x for x in recorded[first:] if (x[0], x[2]) not in known]
    return recorded
