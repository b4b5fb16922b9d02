"""KDA against the same model without the delta rule: both learn at the same time, each in a process and on a share of the cores."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

from kdakit.cli import console
from kdakit.cli.recall_worker import Race, command
from kdakit.measure import machine

MODELS = {"KDA": True, "no delta rule": False}  # name: delta_rule


class WorkerFailed(Exception):
    """A training process ended badly."""


def weights_path(folder: Path, name: str) -> Path:
    return folder / f"recall_{name.lower().replace(' ', '_')}.safetensors"


def run(race: Race, framework: str, folder: Path, device: str | None = None) -> dict[str, list[dict[str, float]]]:
    """Train both models; {name: what was measured on the way}. Their weights are in `folder` afterwards."""
    curves: dict[str, list[dict[str, float]]] = {name: [] for name in MODELS}
    threads = str(max(1, machine.cores() // len(MODELS)))
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC"), threads)
    limits["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # two processes share a GPU
    workers = {}
    for name, delta_rule in MODELS.items():
        words = command(race, framework, delta_rule, str(weights_path(folder, name)), device)
        workers[name] = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | limits)
    try:
        _watch(race, workers, curves)
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()
    return curves


def _watch(race: Race, workers: dict[str, Any], curves: dict[str, list[dict[str, float]]]) -> None:
    errors: dict[str, list[str]] = {name: [] for name in workers}
    with console.progress() as bar:
        tasks = {name: bar.add_task(f"{name:14} starting", total=race.steps) for name in workers}

        def follow(name: str) -> None:
            for line in workers[name].stdout:
                row = json.loads(line)
                curves[name].append(row)
                bar.update(tasks[name], completed=row["step"], description=f"{name:14} {row['accuracy']:6.1%} right")

        readers = [threading.Thread(target=follow, args=(name,)) for name in workers]
        # A full pipe would stop a worker that complains a lot.
        readers += [threading.Thread(target=lambda n=name: errors[n].extend(workers[n].stderr)) for name in workers]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    for name, worker in workers.items():
        if worker.wait():
            last = (errors[name] or ["no message"])[-1].strip()
            raise WorkerFailed(f"training {name} ended with code {worker.returncode}: {last}")


def plot(record: dict[str, Any], path: str) -> None:
    """Both curves, and what each kind of model keeps in memory per sequence."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    race = Race(**record["settings"])
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8), gridspec_kw={"width_ratios": [3, 2]})
    for (name, rows), colour in zip(((r["contestant"], r["curve"]) for r in record["results"]), ("#2f6f9f", "#d98032"), strict=True):
        steps, right_share = [0, *(r["step"] for r in rows)], [1 / race.values, *(r["accuracy"] for r in rows)]
        left.plot(steps, [100 * share for share in right_share], color=colour, label=f"{name}: {right_share[-1]:.1%}")
    left.axhline(100 / race.values, color="#999999", linewidth=1, linestyle=":")
    left.axvline(race.warm_share * race.steps, color="#999999", linewidth=1, linestyle=":")
    left.set(ylim=(0, 102), xlabel="training step (dotted: chance; end of the short sequences)", ylabel="answers right, %")
    left.set_title(f"Recall: {race.pairs} keys of {race.keys}, each written {race.writes} times; the last value counts", fontsize=10)
    left.legend(fontsize=9, loc="lower right")
    rows = record["memory"]
    lengths = [r["length"] for r in rows]
    for field, label, colour in (("state_bytes", "KDA state", "#2f6f9f"), ("kv_bytes", "key-value cache", "#777777")):
        right.plot(lengths, [r[field] / 1024 for r in rows], "o-", color=colour, label=label)
    right.set(xscale="log", yscale="log", xlabel="tokens seen", ylabel="KiB a sequence")
    right.set_title("What generation keeps", fontsize=10)
    right.legend(fontsize=9)
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.3)
    m = record["machine"]
    note = f"{record['framework']}, seed {race.seed}, {m['cpu']}, {m['cores']} cores, {record['date']}"
    figure.text(0.01, 0.01, note, fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=140)
    plt.close(figure)
