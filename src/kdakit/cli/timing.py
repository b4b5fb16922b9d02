"""Interleaved medians, and the peak memory of a process."""

from __future__ import annotations

import contextlib
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def interleaved(runs: dict[str, Callable[[], Any]], repeat: int, seconds: float, tick=lambda name: None) -> dict[str, list[float]]:
    """{name: milliseconds of each repetition}, all runs taking turns so that a noisy moment hits everybody.

    Every run has been called once before, as its warm-up. It is repeated `repeat` times, or as often as fits in about `seconds`, but at
    least 3 times. Each turn begins with an untimed call, so that nobody pays for the caches and freed pages that the one before left
    behind; a run of more than a second is long enough to do without.
    """
    counts, short = {}, set()
    for name, run in runs.items():
        once = _timed(run)
        if once < 1000:
            short.add(name)
        counts[name] = max(min(repeat, 3), min(repeat, int(1000 * seconds / max(once, 1e-6))))
    rounds = max(counts.values(), default=0)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for r in range(rounds):
        for name, run in runs.items():
            # A run with fewer repetitions takes its turns spread over all rounds.
            if (r + 1) * counts[name] // rounds > r * counts[name] // rounds:
                if name in short:
                    run()
                samples[name].append(_timed(run))
                tick(name)
    return samples


def median(samples: list[float]) -> float:
    return statistics.median(samples)


def _timed(run) -> float:
    start = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - start)


def reset_peak() -> None:
    """Start measuring the peak anew, where the kernel allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def memory_mib() -> tuple[float, float]:
    """(resident now, peak) of this process. ru_maxrss, the fallback, starts at the parent's size under some ways of spawning."""
    try:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
        return tuple(int(status[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]
    except (OSError, KeyError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)
        return peak, peak
