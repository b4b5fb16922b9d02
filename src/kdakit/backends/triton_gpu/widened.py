"""Head sizes with which a chip has not been seen to be right, run as larger ones with which it has: zeros are added, and cut off again.

Channels of zeros change nothing: k = q = 0 there, so that whatever their gate is, their rows of the state stay 0, and a value channel of
zeros is a column of its own. And heads so small that bfloat16 is too coarse for their gradients, run as float32 (`arithmetic.as_computed`).
PyTorch and JAX have it alike, but for how tensors are padded, cut and cast.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from types import ModuleType
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


class Widened:
    """Calls of `calls`, a module with forward, backward and step, on wider tensors."""

    def __init__(self, calls: ModuleType):
        self.calls = calls

    def pad(self, x: Any, columns: int, rows: int = 0) -> Any:
        """x with so many zeros more along its last axis, and along the one before it."""
        raise NotImplementedError

    def cut(self, x: Any, columns: int, rows: int | None = None) -> Any:
        """The first of each, packed; rows: None: all."""
        raise NotImplementedError

    def cast(self, x: Any, dtype: str) -> Any:
        raise NotImplementedError

    def forward(self, problem: Problem, arrays: Arrays, c: Config) -> tuple[Result, list]:
        wide, own = wide_problem(problem, c)
        result, saved = self.calls.forward(wide, self._wide(problem, arrays, c), own)
        return self._narrow(problem, result), saved

    def backward(self, problem: Problem, arrays: Arrays, saved: Any, d_o: Any, d_final: Any, c: Config) -> Arrays:
        wide, own = wide_problem(problem, c)
        d_o = self.cast(self.pad(d_o, c.wide_V - problem.V), c.wide_dtype)
        found = self.calls.backward(wide, self._wide(problem, arrays, c), saved, d_o, self._wide_state(problem, d_final, c), own)
        q, k, v = (self.cast(self.cut(x, n), problem.dtype) for x, n in zip(found[:3], (problem.K, problem.K, problem.V), strict=True))
        bias = found.dt_bias
        if bias is not None:
            bias = self.cut(bias.reshape(problem.HV, c.wide_K), problem.K).reshape(arrays.dt_bias.shape)
        initial = self._narrow_state(problem, found.initial_state)
        return found._replace(q=q, k=k, v=v, g=self.cut(found.g, problem.K), dt_bias=bias, initial_state=initial)

    def step(self, problem: Problem, arrays: Arrays, c: Config) -> Result:
        wide, own = wide_problem(problem, c)
        return self._narrow(problem, self.calls.step(wide, self._wide(problem, arrays, c), own))

    def _wide(self, problem: Problem, arrays: Arrays, c: Config) -> Arrays:
        K, V = c.wide_K - problem.K, c.wide_V - problem.V
        q, k, v = (self.cast(self.pad(x, n), c.wide_dtype) for x, n in zip(arrays[:3], (K, K, V), strict=True))
        bias = arrays.dt_bias
        if bias is not None:
            bias = self.pad(bias.reshape(problem.HV, problem.K), K).reshape(-1)
        initial = self._wide_state(problem, arrays.initial_state, c)
        return arrays._replace(q=q, k=k, v=v, g=self.pad(arrays.g, K), dt_bias=bias, initial_state=initial)

    def _wide_state(self, problem: Problem, state: Any, c: Config) -> Any:
        if state is None:
            return None
        K, V = c.wide_K - problem.K, c.wide_V - problem.V
        return self.pad(state, K, V) if problem.options.state_v_first else self.pad(state, V, K)

    def _narrow(self, problem: Problem, result: Result) -> Result:
        o, states = self.cast(self.cut(result.o, problem.V), problem.dtype), self._narrow_state(problem, result.states)
        states = None if states is None else self.cast(states, problem.dtype)
        return Result(o, self._narrow_state(problem, result.final_state), states)

    def _narrow_state(self, problem: Problem, state: Any) -> Any:
        rows, columns = problem.state_shape[2:]
        return None if state is None else self.cut(state, columns, rows)


class InTorch(Widened):
    def pad(self, x, columns, rows=0):
        import torch.nn.functional as F

        return F.pad(x, (0, columns, 0, rows)) if columns or rows else x

    def cut(self, x, columns, rows=None):
        return (x[..., :columns] if rows is None else x[..., :rows, :columns]).contiguous()

    def cast(self, x, dtype):
        import torch

        return x.to(getattr(torch, dtype))

    def step(self, problem, arrays, c, final_state: Any = None):
        result = super().step(problem if final_state is None else problem.replace(output_final_state=True), arrays, c)
        return result if final_state is None else result._replace(final_state=final_state.copy_(result.final_state))

    def planned(self, problem: Problem, arrays: Arrays, c: Config, final_state: Any = None) -> tuple[Any, None]:
        """A call that cannot be repeated: each pads its tensors anew."""
        if problem.op == "recurrent":
            return self.step(problem, arrays, c, final_state), None
        result, saved = self.forward(problem, arrays, c)
        return (result, saved) if problem.needs_grad else result, None

    def planned_backward(self, problem: Problem, arrays: Arrays, saved, d_o, d_final, c: Config) -> tuple[Arrays, None]:
        return self.backward(problem, arrays, saved, d_o, d_final, c), None
