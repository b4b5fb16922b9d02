"""Every (backend, case, dtype) of a list against the float64 truth, in this process or in several."""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import NamedTuple

from kdakit import dispatch
from kdakit.cases import Case
from kdakit.measure import checking
from kdakit.measure.checking import Row
from kdakit.measure.interrupts import unheard


class Outcome(NamedTuple):
    backend: str
    case: str
    dtype: str
    rows: list[Row]
    raised: str | None  # what the backend raised instead of returning numbers
    seconds: float

    @property
    def ok(self) -> bool:
        return self.raised is None and all(row.ok for row in self.rows)

    @property
    def worst(self) -> Row:
        return max(self.rows, key=lambda row: row.used)


class Refusal(NamedTuple):
    backend: str
    case: str
    dtype: str
    reason: str


def verify(backends, cases: list[Case], dtypes, seed=0, grad=True, op="chunk", tick=lambda what: None):
    """Outcomes and refusals of all combinations. The truth of a case is computed once for all backends."""
    outcomes, refusals = [], []
    for dtype in dtypes:
        for case in cases:
            problem, arrays = case.problem(dtype, op, grad), case.arrays(dtype, seed)
            cotangents = case.cotangents(dtype) if grad else None
            expected: dict[str, checking.Expected] = {}
            for backend in backends:
                tick(f"{backend} {case.name} {dtype}")
                reason = checking.refusal(backend, case, dtype, op, grad)
                if reason is not None:
                    refusals.append(Refusal(backend, case.name, dtype, reason))
                    continue
                start = time.perf_counter()
                try:
                    results = checking.run_case(backend, case, dtype, seed, grad, op)
                    seconds = time.perf_counter() - start
                    operand = dispatch.operand_dtype(backend, problem)
                    if operand not in expected:
                        expected[operand] = checking.expect(problem, arrays, cotangents, operand)
                    rows = checking.compare(problem, arrays, results, cotangents, operand, expected[operand])
                    outcomes.append(Outcome(backend, case.name, dtype, rows, None, seconds))
                except Exception as raised:
                    message = f"{type(raised).__name__}: {raised}"
                    outcomes.append(Outcome(backend, case.name, dtype, [], message, time.perf_counter() - start))
    return outcomes, refusals


def in_processes(workers: int, backends, cases: list[Case], dtypes, seed=0, grad=True, op="chunk", tick=lambda what: None):
    """`verify` with each (case, dtype) in one of `workers` processes: truths take a core each, kernels compile beside them."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before they start: libraries read it once
    outcomes: dict[int, list[Outcome]] = {}
    refusals: dict[int, list[Refusal]] = {}
    pairs = [(case, dtype) for dtype in dtypes for case in cases]
    others = multiprocessing.active_children()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            with unheard():
                waiting = {
                    pool.submit(verify, backends, [case], [dtype], seed, grad, op, _nothing): n for n, (case, dtype) in enumerate(pairs)
                }
            for done in as_completed(waiting):
                n = waiting[done]
                outcomes[n], refusals[n] = done.result()
                for backend in backends:
                    tick(f"{backend} {pairs[n][0].name} {pairs[n][1]}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - set(others):
                process.kill()
                process.join()
            raise
    return [x for n in sorted(outcomes) for x in outcomes[n]], [x for n in sorted(refusals) for x in refusals[n]]


def _nothing(what: str) -> None:
    pass
