"""Interleaved medians by the host's clock or the GPU's, and peak memory."""

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


FLUSH_BYTES = 256 * 2**20  # more than any level-2 cache holds


class GpuClock:
    """CUDA events, and a buffer whose writing empties the level-2 cache."""

    def __init__(self):
        import torch

        self._buffer = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
        self._event = lambda: torch.cuda.Event(enable_timing=True)
        self.wait = torch.cuda.synchronize

    def flush(self) -> None:
        self._buffer.zero_()

    def mark(self) -> Any:
        event = self._event()
        event.record()
        return event

    def between(self, start, end) -> float:
        """Milliseconds between two marks that the GPU has reached."""
        return start.elapsed_time(end)


def on_gpu(runs: dict[str, Any], repeat: int, seconds: float, tick=lambda name: None, clock=None) -> dict[str, Any]:
    """{name: (milliseconds of each call by the GPU's clock, by the host's clock until the call returned)}, all runs taking turns.

    Each turn empties the level-2 cache first, so that nobody finds inputs there, and nobody waits for the GPU in between: the host runs
    ahead as it does in a model. A call whose host time exceeds its GPU time is bound by the host, and its time says so.
    """
    clock = clock or GpuClock()

    def turn(name):
        clock.flush()
        start = clock.mark()
        began = time.perf_counter()
        runs[name].call()
        host = 1000 * (time.perf_counter() - began)
        return start, clock.mark(), host

    for name in runs:
        turn(name)
    clock.wait()
    began = time.perf_counter()
    for name in runs:
        turn(name)
    clock.wait()
    rounds = max(min(repeat, 3), min(repeat, int(seconds / max(time.perf_counter() - began, 1e-9))))
    turns: dict[str, list] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in runs:
            turns[name].append(turn(name))
            tick(name)
    clock.wait()
    samples = {name: [clock.between(s, e) / run.calls for s, e, _ in turns[name]] for name, run in runs.items()}
    return {name: (samples[name], [host / run.calls for _, _, host in turns[name]]) for name, run in runs.items()}


def gpu_extra_mib(run) -> float:
    """Peak of the memory that one call takes beyond what was there before it, results included."""
    import torch

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def median(samples: list[float]) -> float:
    return statistics.median(samples)


def _timed(run) -> float:
    start = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - start) / getattr(run, "calls", 1)


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
