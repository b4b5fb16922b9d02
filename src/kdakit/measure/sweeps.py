"""Runs over many jobs: shapes and modes, a suite's entries, growing lengths, growing numbers of processes. Each returns a record.

`keep` gets the record after every job, since a peer may tune itself for minutes at the next; `tick` hears what is being timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kdakit.cases import Shape
from kdakit.measure import race, ranks, records, suites, worker
from kdakit.measure.contestants import Job

LENGTHS = (2048, 4096, 8192, 16384, 32768)


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class Plan:
    """What to time, checked before anything is."""

    names: tuple[str, ...]  # contestants
    modes: tuple[str, ...]
    shapes: dict[str, Shape]  # by what was typed
    dtype: str = "float32"
    gate: str = "bounded"
    chunk_size: int = 64
    repeat: int = 20
    seconds: float = 30.0
    with_errors: bool = False
    with_memory: bool = False
    lengths: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    keep: Callable[[dict[str, Any]], None] = _nothing
    tick: Callable[[str], None] = _nothing

    def job(self, shape: Shape, mode: str) -> Job:
        return Job(shape, mode, self.dtype, self.gate, self.chunk_size)

    def record(self, kind: str, measured: list, missing: list) -> dict[str, Any]:
        made = records.record(kind, {"dtype": self.dtype, "gate": self.gate, "repeat": self.repeat}, measured, missing)
        self.keep(made)
        return made


def compete(plan: Plan) -> dict[str, Any]:
    """All contestants on every shape and mode."""
    measured: list[dict[str, Any]] = []
    missing: list[dict[str, Any]] = []
    for text, shape in plan.shapes.items():
        for mode in plan.modes:
            job = plan.job(shape, mode)
            tick = lambda name, where=f"{text} {mode}": plan.tick(f"{where} {name}")
            rows, out = race.run(plan.names, job, plan.repeat, plan.seconds, tick, plan.with_errors)
            for row in rows:
                if plan.with_memory:
                    row |= {k: v for k, v in worker.measure(row["contestant"], job, 1, 1.0).items() if k.endswith("_mib")}
                measured.append({"shape_name": text, **row})
            missing += [{"shape_name": text, **row} for row in out]
            made = plan.record("bench", measured, missing)
    return made


def suite(name: str, entries: list[str], plan: Plan) -> dict[str, Any]:
    """Every entry of a suite, its contestants among `plan.names` taking turns."""
    measured: list[dict[str, Any]] = []
    missing: list[dict[str, Any]] = []
    for entry in entries:
        plan.tick(entry)
        job, known = suites.SUITES[name][entry]
        rows, out = race.run([n for n in known if n in plan.names], job, plan.repeat, plan.seconds, with_errors=plan.with_errors)
        measured += [{"entry": entry, **row} for row in rows]
        missing += [{"entry": entry, **row} for row in out]
        made = records.record("suite", {"suite": name, "repeat": plan.repeat}, measured, missing)
        plan.keep(made)
    return made


def scaling(plan: Plan) -> dict[str, Any]:
    """Every contestant at growing T, a process per point, so that peak memory is its own."""
    measured: list[dict[str, Any]] = []
    missing: list[dict[str, Any]] = []
    base = next(iter(plan.shapes.values()))
    for name in plan.names:
        for mode in plan.modes:
            for T in plan.lengths or LENGTHS:
                plan.tick(f"{name} {mode} T={T}")
                shape = replace(base, T=T, lengths=())
                got = worker.measure(name, plan.job(shape, mode), min(plan.repeat, 5), plan.seconds)
                about = {"contestant": name, "shape": race.sizes(shape), "mode": mode}
                (missing if "reason" in got else measured).append(about | got)
    return plan.record("scaling", measured, missing)


def over_ranks(plan: Plan) -> dict[str, Any]:
    """Context parallel: the same tokens cut over growing numbers of processes."""
    measured: list[dict[str, Any]] = []
    missing: list[dict[str, Any]] = []
    base = next(iter(plan.shapes.values()))
    for T in plan.lengths or (base.T,):
        for mode in plan.modes:
            for count in plan.ranks:
                plan.tick(f"{mode} T={T} on {count} ranks")
                shape = replace(base, T=T, lengths=base.lengths if T == base.T else ())
                got = ranks.measure(count, plan.job(shape, mode), min(plan.repeat, 9))
                about = {"contestant": f"{count} ranks", "ranks": count, "shape": race.sizes(shape), "mode": mode}
                (missing if "reason" in got else measured).append(about | got)
    return plan.record("ranks", measured, missing)


def jobs(plan: Plan, kind: str) -> int:
    """How often `tick` will be called, for a bar."""
    if kind == "compete":
        return len(plan.shapes) * len(plan.modes) * len(plan.names) * plan.repeat
    if kind == "ranks":
        return len(plan.lengths or (0,)) * len(plan.modes) * len(plan.ranks)
    return len(plan.names) * len(plan.modes) * len(plan.lengths or LENGTHS)
