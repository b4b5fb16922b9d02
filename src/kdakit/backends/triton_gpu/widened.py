"""Head sizes with which a chip has not been seen to be right, run as larger ones with which it has: zeros are added, and cut off again.

Channels of zeros change nothing: k = q = 0 there, so that whatever their gate is, their rows of the state stay 0, and a value channel of
zeros is a column of its own. And heads so small that bfloat16 is too coarse for their gradients, run as float32 (`arithmetic.as_computed`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from kdakit.backends.triton_gpu import arithmetic, config, shown
from kdakit.backends.triton_gpu.config import Chip, Config, choose
from kdakit.problem import Arrays, Problem
from kdakit.reference import Result


@lru_cache(maxsize=1024)
def config_for(problem: Problem, chip: Chip) -> Config:
    """The problem's own configuration, or that of the least wider one which the chip has shown. For sizes that are plain numbers."""
    pick = choose if config.UNCHECKED or config.INTERPRETED else shown.settled
    K, V, dtype = run_as(problem, chip)
    wide = problem.replace(K=K, V=V, dtype=dtype)
    return pick(problem, chip) if wide == problem else replace(pick(wide, chip), wide_K=K, wide_V=V, wide_dtype=dtype)


def run_as(problem: Problem, chip: Chip) -> tuple[int, int, str]:
    """K, V and dtype to run with: the problem's own where others are not needed or would not help."""
    exact = arithmetic.as_computed(problem)
    own = exact.K, exact.V, exact.dtype
    if config.UNCHECKED or config.INTERPRETED or not shown.shown(chip.name) or not shown.missing(exact, chip):
        return own
    K, V = shown.wider(exact, chip)
    return (K, V, exact.dtype) if K else own


def wide_problem(problem: Problem, c: Config) -> tuple[Problem, Config]:
    return problem.replace(K=c.wide_K, V=c.wide_V, dtype=c.wide_dtype), replace(c, wide_K=0, wide_V=0, wide_dtype="")


def wide_arrays(problem: Problem, arrays: Arrays, c: Config) -> Arrays:
    K, V = c.wide_K - problem.K, c.wide_V - problem.V
    q, k, v = (_cast(_pad(x, n), c.wide_dtype) for x, n in zip(arrays[:3], (K, K, V), strict=True))
    g = _pad(arrays.g, K)
    bias = arrays.dt_bias
    if bias is not None:
        bias = _pad(bias.reshape(problem.HV, problem.K), K).reshape(-1)
    return arrays._replace(q=q, k=k, v=v, g=g, dt_bias=bias, initial_state=_wide_state(problem, arrays.initial_state, K, V))


def _wide_state(problem: Problem, state: Any, K: int, V: int) -> Any:
    if state is None:
        return None
    return _pad(state, K, V) if problem.options.state_v_first else _pad(state, V, K)


def _pad(x: Any, last: int, before: int = 0) -> Any:
    import torch.nn.functional as F

    return F.pad(x, (0, last, 0, before)) if last or before else x


def _cast(x: Any, dtype: str) -> Any:
    import torch

    return None if x is None else x.to(getattr(torch, dtype))


def _cut_state(problem: Problem, state: Any) -> Any:
    rows, columns = problem.state_shape[2:]
    return None if state is None else state[..., :rows, :columns].contiguous()


def _cut(problem: Problem, result: Result) -> Result:
    states = None if result.states is None else _cast(_cut_state(problem, result.states), problem.dtype)
    o = _cast(result.o[..., : problem.V].contiguous(), problem.dtype)
    return Result(o, _cut_state(problem, result.final_state), states)


def forward(problem: Problem, arrays: Arrays, c: Config) -> tuple[Result, list]:
    from kdakit.backends.triton_gpu import call

    wide, own = wide_problem(problem, c)
    result, saved = call.forward(wide, wide_arrays(problem, arrays, c), own)
    return _cut(problem, result), saved


def step(problem: Problem, arrays: Arrays, c: Config, final_state: Any = None) -> Result:
    from kdakit.backends.triton_gpu import call

    wide, own = wide_problem(problem if final_state is None else problem.replace(output_final_state=True), c)
    result = _cut(problem, call.step(wide, wide_arrays(problem, arrays, c), own))
    return result if final_state is None else result._replace(final_state=final_state.copy_(result.final_state))


def backward(problem: Problem, arrays: Arrays, saved, d_o, d_final, c: Config) -> Arrays:
    from kdakit.backends.triton_gpu import call

    wide, own = wide_problem(problem, c)
    K, V = c.wide_K - problem.K, c.wide_V - problem.V
    d_o = _cast(_pad(d_o, V), c.wide_dtype)
    found = call.backward(wide, wide_arrays(problem, arrays, c), saved, d_o, _wide_state(problem, d_final, K, V), own)
    q, k, v, g = (x[..., :n].contiguous() for x, n in zip(found[:4], (problem.K, problem.K, problem.V, problem.K), strict=True))
    q, k, v = (_cast(x, problem.dtype) for x in (q, k, v))
    bias = found.dt_bias
    if bias is not None:
        bias = bias.reshape(problem.HV, c.wide_K)[:, : problem.K].reshape(arrays.dt_bias.shape)
    return found._replace(q=q, k=k, v=v, g=g, dt_bias=bias, initial_state=_cut_state(problem, found.initial_state))


def planned(problem: Problem, arrays: Arrays, c: Config, final_state: Any = None) -> tuple[Any, None]:
    """A call that cannot be repeated: each pads its tensors anew."""
    if problem.op == "recurrent":
        return step(problem, arrays, c, final_state), None
    result, saved = forward(problem, arrays, c)
    return (result, saved) if problem.needs_grad else result, None


def planned_backward(problem: Problem, arrays: Arrays, saved, d_o, d_final, c: Config) -> tuple[Arrays, None]:
    return backward(problem, arrays, saved, d_o, d_final, c), None
