"""`kdakit bench --tune times`: fit the constants of the closed forms by which 'auto' compares backends (backends/*/times) to this GPU.

Calls of several shapes and gates are timed in CUDA graphs; then, for every row of a backend's file that describes at least LEAST of them,
constants move by small factors, one after the other, as long as the sum of squared logarithms of predicted over measured times falls.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kdakit.problem import Problem

FREE = ("least", "prepare", "chain", "row")  # the others are too small to be seen in whole calls
STEPS = (1.3, 1.1, 1.03, 1.01, 1.1, 1.03, 1.01, 1.003)  # again from large ones: what moved last may let others move
LEAST = 3
Form = Callable[[Problem, dict[str, float]], float]


def loss(measured: Sequence[tuple[Problem, float]], use: dict[str, float], form: Form) -> float:
    return sum(math.log(form(problem, use) / us) ** 2 for problem, us in measured)


def fitted(measured: Sequence[tuple[Problem, float]], use: dict[str, float], form: Form) -> dict[str, float]:
    """The constants that describe these calls best, from `use` on."""
    best = loss(measured, use, form)
    for step in STEPS:
        moved = True
        while moved:
            moved = False
            for name in FREE:
                for factor in (step, 1 / step):
                    tried = use | {name: use[name] * factor}
                    if (now := loss(measured, tried, form)) < best * (1 - 1e-6):
                        use, best, moved = tried, now, True
    return {name: float(f"{x:.3g}") for name, x in use.items()}


def refit(rows: Sequence[dict[str, Any]], measured: Sequence[tuple[Problem, float]], row_of: Callable, form: Form) -> list[dict[str, Any]]:
    """The rows of a file with new constants, where enough was measured."""
    made = copy.deepcopy(list(rows))
    for old, new in zip(rows, made, strict=True):
        mine = [(problem, us) for problem, us in measured if row_of(problem, rows) is old]
        if len(mine) >= LEAST:
            new["use"] = fitted(mine, old["use"], form)
    return made


def dump(table: dict[str, Any]) -> str:
    """A chip's file: a line per row."""
    rows = ",\n".join("  " + json.dumps(row) for row in table["rows"])
    return f'{{\n "chip": {json.dumps(table["chip"])},\n "source": {json.dumps(table["source"])},\n "rows": [\n{rows}\n ]\n}}\n'


def run(args, device: Any) -> dict[str, Any]:
    """Time, fit, write both files, and return the record to show."""
    import datetime

    import torch

    from kdakit.backends import triton_gpu
    from kdakit.backends.cuda import times as of_cuda
    from kdakit.backends.triton_gpu import chip_of
    from kdakit.backends.triton_gpu import times as of_triton
    from kdakit.measure import race, records, tuning
    from kdakit.measure.contestants import GATES, Job
    from kdakit.measure.suites import REGIME_SHAPES

    chip, found = chip_of(device), {"triton_gpu": [], "cuda": []}
    for gate in GATES:
        for shape in REGIME_SHAPES.values():
            job = Job(shape, "graph", "bfloat16", gate)
            for row in race.run(list(found), job, args.repeat, args.seconds)[0]:
                found[row["contestant"]].append((tuning.problem_of(job), 1000 * row["median_ms"]))
    forms: dict[str, tuple[Any, Form]] = {
        "cuda": (of_cuda, of_cuda.microseconds),
        "triton_gpu": (of_triton, lambda problem, use: of_triton.microseconds(problem, use, triton_gpu.default_config(problem, device))),
    }
    shown = []
    for name, (times, form) in forms.items():
        rows = refit(times.load(chip.name), found[name], times.row_of, form)
        when = datetime.datetime.now(datetime.UTC).date().isoformat()
        table = {"chip": chip.name, "source": f"{torch.cuda.get_device_name(device)}, {when}: kdakit bench --tune times", "rows": rows}
        path = Path(args.tiles) / f"{name}_{chip.name}.json" if args.tiles else times.FOLDER / f"{chip.name}.json"
        path.write_text(dump(table))
        print(f"wrote {path}")
        for problem, us in found[name]:
            row = times.row_of(problem, rows)
            if row is not None:
                use = {"expected": round(form(problem, row["use"]) / 1000, 4)}
                shown.append({"kernel": name, "mode": "graph", "when": {"call": str(problem)}, "use": use, "ms": us / 1000, "verdict": ""})
    return records.record("tune", {"chip": chip.name, "kernels": ["times"], "repeat": args.repeat}, shown, [])
