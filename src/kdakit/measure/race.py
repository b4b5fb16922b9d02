"""One job, all its contestants: the same inputs, taking turns, each output held against the others and, if asked, against float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kdakit import accuracy
from kdakit.measure import contestants, inputs, records, roofline, timing


def run(names, job, repeat: int, seconds: float, tick=lambda name: None, with_errors: bool = False):
    """One job, all contestants: rows of results, and of those who cannot take part with the reason."""
    runs, outputs, missing = {}, {}, []
    about = {"shape": sizes(job.shape), "mode": job.mode, "dtype": job.dtype, "gate": job.gate, "chunk_size": job.chunk_size}
    if job.regime:
        about["regime"] = job.regime
    if job.wide_beta:
        about["beta_dtype"] = "float32"
    if not job.states:
        about["states"] = False
    if job.disable_recompute:
        about["disable_recompute"] = True
    for name in names:
        try:
            run = contestants.prepare(name, job)
            outputs[name] = inputs.picked(run())
            runs[name] = run
        except contestants.Unavailable as problem:
            missing.append({"contestant": name, **about, **contestants.why(problem)})
        except Exception as problem:
            missing.append({"contestant": name, **about, "reason": f"raised {type(problem).__name__}: {problem}"})
    if not runs:
        return [], missing
    first = next(iter(outputs.values()))[0]
    truth = inputs.picked_truth(job) if with_errors else None
    rows = []
    for name, found in measured(runs, job, repeat, seconds, tick).items():
        off = float(np.linalg.norm(outputs[name][0] - first) / np.linalg.norm(first))
        rows.append({"contestant": name, **about, **found, "difference": off} | _errors(outputs[name], truth))
    return rows, missing


def measured(runs, job, repeat: int, seconds: float, tick) -> dict[str, dict[str, Any]]:
    """Times of all runs; on a GPU also memory, and what the time means on that chip."""
    found: dict[str, dict[str, Any]] = {}
    if all(run.gpu for run in runs.values()):
        for name, (taken, host) in timing.on_gpu(runs, repeat, seconds, tick).items():
            found[name] = {"samples_ms": taken, "host_ms": timing.median(host)}
            if runs[name].calls == 1 and job.mode != "train":  # a graph has its memory before it runs
                found[name]["extra_mib"] = timing.gpu_extra_mib(runs[name])
    else:
        found = {name: {"samples_ms": taken} for name, taken in timing.interleaved(runs, repeat, seconds, tick).items()}
    for row in found.values():
        middle = timing.median(row["samples_ms"])
        row |= {"median_ms": middle, "best_ms": min(row["samples_ms"]), "tokens_per_s": 1000 * job.tokens / middle}
        if "host_ms" in row:
            row |= roofline.compare(job, middle, records.device())
    return found


def _errors(output, truth) -> dict[str, float | None]:
    if truth is None:
        return {}
    found = {f"error_{n}": accuracy.error(x, y) for n, x, y in zip(("o", "state"), output, truth, strict=False)}
    return {n: x if math.isfinite(x) else None for n, x in found.items()}


def sizes(shape) -> dict[str, Any]:
    return {"B": shape.B, "T": shape.T, "H": shape.H, "K": shape.K, "lengths": list(shape.lengths)}
