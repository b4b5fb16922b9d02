"""Calls of the Triton backend with changes to its Config: compiled ahead, held against float64, timed. For `kdakit bench --tune`."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kdakit.backends import triton_gpu
from kdakit.measure import checking, inputs, timing, tuning
from kdakit.measure.contestants import Job
from kdakit.measure.runners import Run, in_graph
from kdakit.problem import DIFFERENTIABLE


class Calls:
    """Remembers inputs and truths between candidates."""

    def __init__(self, device: torch.device, repeat: int = 20, seconds: float = 30.0):
        self.device, self.repeat, self.seconds = device, repeat, seconds
        self.device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self._drawn: tuple[Job | None, Any] = (None, None)
        self._expected: dict[Job, Any] = {}

    def measure(self, job: Job, changes: list[dict[str, Any]]) -> list[float]:
        """Milliseconds of the whole call with each change."""
        problem = tuning.problem_of(job)
        if self._drawn[0] != job:
            self._drawn = job, (inputs.tensors(job.case(), job.dtype, self.device), inputs.cotangents(job.case(), job.dtype, self.device))
        tensors, seeds = self._drawn[1]
        config = triton_gpu.default_config(problem, self.device)
        made = [partial(_call, problem, tensors, seeds, replace(config, **change)) for change in changes]
        ready = in_graph if job.mode == "decode" else partial(Run, gpu=True)
        taken = timing.on_gpu({str(i): ready(call) for i, call in enumerate(made)}, self.repeat, self.seconds)
        return [timing.median(taken[str(i)][0]) for i in range(len(changes))]

    def verify(self, job: Job, change: dict[str, Any]) -> str | None:
        """Why the call with this change is not right on a small problem of the job's kind; None: it is."""
        small = tuning.small(job)
        case, grad = small.case(), job.trains
        if small not in self._expected:
            problem = case.problem(job.dtype, job.op, grad)
            arrays, seeds = case.arrays(job.dtype), case.cotangents(job.dtype) if grad else None
            self._expected[small] = problem, arrays, seeds, checking.expect(problem, arrays, seeds, triton_gpu.operand_dtype(problem))
        problem, arrays, seeds, expected = self._expected[small]
        config = replace(triton_gpu.default_config(tuning.problem_of(job), self.device), **change)
        tensors = checking.to_torch(arrays, case.dtypes(job.dtype), self.device)
        try:
            given = None if seeds is None else inputs.cotangents(case, job.dtype, torch.device("cpu"))
            results = _results(problem, tensors, None if given is None else tuple(x.to(self.device) for x in given), config)
        except Exception as reason:
            return f"raised {type(reason).__name__}: {str(reason)[:80]}"
        rows = checking.compare(problem, arrays, results, seeds, expected=expected)
        worst = max(rows, key=lambda row: row.used)
        return None if worst.ok else f"wrong: {worst.name} is off by {worst.error:.1e}, {worst.tolerance:.1e} is allowed"

    def compile(self, tasks: list[tuple[Job, dict[str, Any]]]) -> None:
        """Every candidate once in a process of its own; Triton's cache then has it. What cannot be compiled says so when it is verified."""
        context = multiprocessing.get_context("spawn")
        with context.Pool(max(1, min(len(tasks), (os.cpu_count() or 2) - 2))) as pool:
            pool.map(_compile, [(str(self.device), job, change) for job, change in tasks], chunksize=1)


def _compile(task: tuple[str, Job, dict[str, Any]]) -> None:
    device, job, change = task
    try:
        problem = tuning.problem_of(job)
        config = replace(triton_gpu.default_config(problem, torch.device(device)), **change)
        case = replace(job, shape=replace(job.shape, T=64, lengths=())).case()
        tensors, seeds = (f(case, job.dtype, torch.device(device)) for f in (inputs.tensors, inputs.cotangents))
        _call(problem.replace(T=case.T), tensors, seeds, config)
    except Exception:
        return  # `verify` meets the same candidate again and keeps the reason


def _call(problem, tensors, seeds, config):
    if problem.op == "recurrent":
        return triton_gpu.step(problem, tensors, config), None
    result, saved = triton_gpu.forward(problem, tensors, config)
    return result, triton_gpu.backward(problem, tensors, saved, *seeds, config) if problem.needs_grad else None


def _results(problem, tensors, seeds, config) -> dict[str, Any]:
    result, gradients = _call(problem, tensors, seeds, config)
    named = {"o": result.o, "final_state": result.final_state}
    if gradients is not None:
        named |= {n: getattr(gradients, n) for n in DIFFERENTIABLE if getattr(gradients, n) is not None}
    return {n: x.detach().to("cpu", torch.float64).numpy() for n, x in named.items()}
