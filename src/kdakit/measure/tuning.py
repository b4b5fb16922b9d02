"""`kdakit bench --tune`: find the tile sizes of the Triton kernels for the GPU at hand, and write them as data.

Kernel by kernel, with what is in use as the first candidate: every candidate must be as right as any backend (accuracy.py) on a small
problem of its kind, then all take turns; the fastest is taken if it beats what is in use by GAIN. The time is that of the whole call.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kdakit.cases import SHAPES, Shape
from kdakit.measure.contestants import Job

GAIN = 0.98
JOBS = (
    *(Job(SHAPES[name], "fwd", "bfloat16", gate) for name in ("h96", "h32", "h16") for gate in ("bounded", "softplus")),
    *(Job(SHAPES[name], "fwdbwd", "bfloat16") for name in ("h96", "h32")),
    *(Job(Shape(B, 1, 32), "decode", "bfloat16") for B in (1, 32)),
)

Measure = Callable[[Job, list[dict[str, Any]]], list[float]]  # milliseconds of the call with each change to its Config
Verify = Callable[[Job, dict[str, Any]], str | None]  # why the call is wrong with a change; None: it is right


def run(args) -> dict[str, Any]:
    """Tune, write the file, and return the record to show."""
    from kdakit.backends.triton_gpu import chip_of, tiles
    from kdakit.measure import inputs, machine, records, time_fit
    from kdakit.measure.choices import UsageError, pick
    from kdakit.measure.tuned_calls import Calls

    device = inputs.gpu()
    if device is None:
        raise UsageError("--tune times kernels and needs a GPU")
    if args.tune == ["times"]:
        return time_fit.run(args, device)
    from kdakit.backends.triton_gpu.tiles.candidates import SEARCHES

    kernels = pick("tune", args.tune, SEARCHES)
    chip, calls = chip_of(device), Calls(device, args.repeat, args.seconds)
    jobs = [job for job in JOBS if job.mode in {SEARCHES[k].mode for k in kernels} and _wanted(job, args.shape)]
    table, rows = search(jobs, kernels, chip, tiles.load(chip.name), calls.measure, calls.verify, calls.compile)
    path = Path(args.tiles or tiles.FOLDER / f"{chip.name}.json")
    when = datetime.datetime.now(datetime.UTC).date().isoformat()
    name = calls.device_name
    table = table | {"chip": chip.name, "source": f"{name}, triton {machine.version('triton')}, {when}: kdakit bench --tune"}
    try:
        path.write_text(tiles.dump(table))
        print(f"wrote {path}")
    except OSError as problem:
        raise UsageError(f"{path} cannot be written ({problem}): name another file with --tiles") from problem
    return records.record("tune", {"chip": chip.name, "kernels": kernels, "repeat": args.repeat}, rows, [])


def _wanted(job: Job, shapes: list[str] | None) -> bool:
    from kdakit.measure.contestants import parse_shape

    return job.mode == "decode" or not shapes or job.shape in [parse_shape(text) for text in shapes]


def search(jobs, kernels, chip, table, measure: Measure, verify: Verify, prepare=lambda tasks: None):
    """(the chip's table with a row for every improvement, all that was tried). `prepare` may compile ahead what will be asked for."""
    from kdakit.backends.triton_gpu import config as configs
    from kdakit.backends.triton_gpu.tiles.candidates import SEARCHES, candidates

    table = table | {"tiles": {kernel: list(rows) for kernel, rows in table["tiles"].items()}}
    seen, tried, todo = set(), [], []
    for job in jobs:
        problem = problem_of(job)
        config = configs.choose(problem, chip)
        found = configs.facts(problem, chip, config.normed)
        found |= {"K_is": found["K"], "V_is": found["V"]}
        for kernel in kernels:
            when = {name: found[name] for name in SEARCHES[kernel].depends}
            key = kernel, tuple(when.items())
            if SEARCHES[kernel].mode == job.mode and key not in seen:
                seen.add(key)
                todo.append((job, kernel, when, candidates(kernel, problem, config)))
    prepare([(job, use) for job, _, _, uses in todo for use in uses])
    better: dict[Job, dict[str, Any]] = {}  # what earlier kernels of the same call have found
    for job, kernel, when, uses in todo:
        best, rows = _best(job, kernel, when, uses, better.get(job, {}), measure, verify)
        tried += rows
        if best is not None:
            table["tiles"][kernel].insert(0, best)
            better[job] = better.get(job, {}) | best["use"]
    return table, tried


def _best(job, kernel, when, uses, given, measure, verify):
    """The row to write, or None where what is in use stays, and a line per candidate."""
    reasons = [verify(job, given | use) for use in uses]
    right = [use for use, reason in zip(uses, reasons, strict=True) if reason is None]
    times = dict(zip(map(_key, right), measure(job, [given | use for use in right]) if right else [], strict=True))
    fastest = min(times, key=times.__getitem__, default=None)
    now = times.get(_key(uses[0]))
    taken = fastest is not None and fastest != _key(uses[0]) and (now is None or times[fastest] < GAIN * now)
    rows = []
    for use, reason in zip(uses, reasons, strict=True):
        verdict = reason or ("taken" if taken and _key(use) == fastest else "in use" if use is uses[0] else "")
        rows.append({"kernel": kernel, "mode": job.mode, "when": when, "use": use, "ms": times.get(_key(use)), "verdict": verdict})
    if not taken:
        return None, rows
    evidence = {"ms": round(times[fastest], 4)} | ({} if now is None else {"was": round(now, 4)})
    return {"when": when, "use": dict(fastest), **evidence}, rows


def _key(use: dict[str, Any]):
    return tuple(use.items())


def problem_of(job: Job):
    """The job's Problem, without drawing its arrays."""
    shape, decode = job.shape, job.mode == "decode"
    problem = job.tiny().problem(job.dtype, job.op, job.trains)
    return problem.replace(B=shape.B, T=1 if decode else shape.T, N=len(shape.lengths) or shape.B)


def small(job: Job) -> Job:
    """A problem of the same kind that the float64 recurrence can follow: past a chunk and a checkpoint, a ragged end, two heads."""
    return replace(job, shape=replace(job.shape, B=2 if job.mode == "decode" else 1, T=600, H=2, lengths=()))
