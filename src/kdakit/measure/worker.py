"""One contestant, one job, in a process of its own: time and peak memory as a line of JSON. Started by `kdakit bench`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from kdakit.cases import Shape
from kdakit.measure import contestants, timing


def measure(name: str, job: contestants.Job, repeat: int, seconds: float = 5.0) -> dict[str, Any]:
    """`work` in a fresh Python process; {'reason': ...} where that fails."""
    spec = {"name": name, "job": asdict(job), "repeat": repeat, "seconds": seconds}
    done = subprocess.run([sys.executable, "-m", "kdakit.measure.worker", json.dumps(spec)], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        return {"reason": f"its process ended with code {done.returncode}: {last}"}
    return json.loads(done.stdout.splitlines()[-1])


def work(name: str, job: contestants.Job, repeat: int, seconds: float) -> dict[str, Any]:
    """The memory is that of one call after the warm-up: neither imports nor compilation count, inputs and results do."""
    contestants.reserve([name])
    try:
        run = contestants.prepare(name, job)
    except contestants.Unavailable as problem:
        return contestants.why(problem)
    resident, _ = timing.memory_mib()
    run()
    timing.reset_peak()
    run()
    _, peak = timing.memory_mib()
    samples = timing.interleaved({name: run}, repeat, seconds)[name]
    return {"median_ms": timing.median(samples), "samples_ms": samples, "peak_mib": peak, "extra_mib": max(peak - resident, 0.0)}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    shape = given["job"].pop("shape")
    made = contestants.Job(Shape(**shape | {"lengths": tuple(shape["lengths"])}), **given["job"])
    print(json.dumps(work(given["name"], made, given["repeat"], given["seconds"])))
