"""A campaign: many random problems in worker processes, of which any may crash, hang or lose its device without ending the rest.

    for verdict in search(numbers(seed, 500), "torch_native"):
        ...

`search` is also for whoever has a kernel of another kind: `judge` may be any function of (label, backend, device) that can be imported by
name and returns something with the fields of `trial.Verdict`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from kdakit.measure.interrupts import unheard
from kdakit.measure.random_problems import form_of, parse
from kdakit.measure.trial import Verdict
from kdakit.measure.trial import judge as judge_drawn

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
WORKER = ONE_THREAD | {"KDAKIT_UNCHECKED": "1", "KDAKIT_COMPILE_AHEAD": "0"}  # this is what checks; a core for each process
STARTS = 300.0  # seconds that a new process may take to begin
HANGS = 300.0  # and to answer
Judge = Callable[[str, str, Any], Verdict]


def judge_label(label: str, backend: str, device: Any) -> Verdict:
    """What a worker does unless told otherwise."""
    return judge_drawn(parse(label), backend, device)


def serve(pipe: Connection, judge: Judge, backend: str, device: Any) -> None:
    """A worker: labels in, verdicts out, until the device is lost."""
    while True:
        try:
            label = pipe.recv()
        except EOFError:
            return
        pipe.send(label)  # it has begun
        verdict = judge(label, backend, device)
        pipe.send(verdict)
        if verdict.deadly:
            os._exit(1)  # nothing on this device can be trusted in this process


class Worker:
    """A process and the problem that it has."""

    def __init__(self, judge: Judge, backend: str, device: Any):
        self.judge, self.backend, self.device = judge, backend, device
        self.label, self.until = "", 0.0
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, judge, backend, device), daemon=True)
        with environment(WORKER), unheard():
            self.process.start()
        theirs.close()

    def give(self, label: str) -> None:
        self.label, self.until = label, time.monotonic() + STARTS
        with contextlib.suppress(BrokenPipeError):  # it is gone, which `take` will say
            self.pipe.send(label)

    def take(self) -> Verdict | None:
        """The verdict that is there, or that of a process that is not; None: it has only begun."""
        try:
            found = self.pipe.recv()
            if isinstance(found, str):
                self.until = time.monotonic() + HANGS
                return None
            return found
        except (EOFError, ConnectionResetError):
            self.process.join(10)
            return self.lost(f"the process ended with exit code {self.process.exitcode}")

    def lost(self, complaint: str) -> Verdict:
        return lost(self.label, self.backend, complaint)

    def wait(self) -> Verdict:
        """The verdict, whenever it comes."""
        while True:
            if not self.pipe.poll(max(0.0, self.until - time.monotonic())):
                self.process.kill()
                return self.lost(f"nothing came for {HANGS:.0f} s")
            if (verdict := self.take()) is not None:
                return verdict

    def stop(self) -> None:
        self.pipe.close()
        self.process.join(0.2)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(5)


def lost(label: str, backend: str, complaint: str) -> Verdict:
    """The verdict on a problem that took its process along."""
    drawn = parse(label)
    about = dict(dtype=drawn.dtype, call=drawn.call, K=drawn.K, V=drawn.V)
    return Verdict(label, str(drawn), backend, ok=False, complaint=complaint, **about)  # type: ignore[arg-type]


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class Queue:
    """Problems by form. A form is one worker's, so that its programs are compiled once; of a family the first form goes ahead, and the
    others find what they share with it in the compiler's cache. Forms begin by `_rank`, or as they were drawn: a queue that time may end
    has then tried a sample of all."""

    def __init__(self, problems: Iterable[int | str], as_drawn: bool = False):
        self.forms: OrderedDict[Any, list[str]] = OrderedDict()
        self.family: dict[Any, Any] = {}
        for label in map(str, problems):
            form, family = form_of(label)
            self.forms.setdefault(form, []).append(label)
            self.family[form] = family
        if not as_drawn:
            self.forms = OrderedDict(sorted(self.forms.items(), key=lambda item: _rank(item[1][0])))
        self.begun: set[Any] = set()
        self.warm: set[Any] = set()

    def next_form(self) -> Any:
        """A form that may begin now; None: there is none, or all wait for their family."""
        for form in self.forms:
            family = self.family[form]
            if family not in self.begun or family in self.warm:
                self.begun.add(family)
                return form
        return None

    def left(self) -> int:
        return sum(map(len, self.forms.values()))


def _rank(label: str) -> tuple[int, int]:
    """What most people run begins first, and of that what takes the compiler longest: nobody waits for it at the end."""
    drawn = parse(label)
    return ("bfloat16", "float32", "float16", "float64").index(drawn.dtype), -drawn.K


def search(
    problems: Iterable[int | str],
    backend: str,
    device: Any = None,
    workers: int = 2,
    minutes: float | None = None,
    judge: Judge = judge_label,
) -> Iterator[Verdict]:
    """Verdicts, on numbers or labels, as they come. Problems that time runs out for have none."""
    end = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    queue = Queue(problems, as_drawn=minutes is not None)
    team: dict[int, tuple[Worker, Any, list[str]]] = {}
    new = lambda: Worker(judge, backend, device)
    idle = [new() for _ in range(min(workers, max(1, len(queue.forms))))]
    try:
        while time.monotonic() < end:
            while idle and (form := queue.next_form()) is not None:
                labels, worker = queue.forms.pop(form), idle.pop()
                worker.give(labels.pop(0))
                team[id(worker)] = (worker, form, labels)
            if not team:
                return
            ready = wait([worker.pipe for worker, _, _ in team.values()], timeout=min(1.0, max(0.0, end - time.monotonic())))
            for worker, form, labels in list(team.values()):
                verdict = worker.take() if worker.pipe in ready else None
                if verdict is None and time.monotonic() > worker.until:
                    worker.process.kill()
                    worker.process.join(5)
                    verdict = worker.lost(f"nothing came for {HANGS:.0f} s")
                if verdict is None:
                    continue
                del team[id(worker)]
                if not verdict.ok and (verdict.deadly or not worker.process.is_alive()):
                    worker.stop()
                    worker = new()
                yield verdict
                if labels:
                    worker.give(labels.pop(0))
                    team[id(worker)] = (worker, form, labels)
                else:
                    queue.warm.add(queue.family[form])
                    idle.append(worker)
    finally:
        for worker in [*idle, *(worker for worker, _, _ in team.values())]:
            if worker in idle:
                worker.stop()
            else:
                worker.process.kill()
