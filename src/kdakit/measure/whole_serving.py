"""`kdakit bench --suite serving`: a model served from pools of states, 1 to 256 sequences at a time, on one GPU.

step           one token of every sequence: the captured graph, its inputs and the chosen tokens back on the host
kernels        the GPU's time inside it; what the step takes above that is launching, waiting and copying
first token    a prompt that arrives alone: its prefill and the choice of its first token
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from kdakit.measure.choices import UsageError


@dataclass(frozen=True)
class Settings:
    size: str = "340m"
    sequences: tuple[int, ...] = (1, 8, 64, 256)
    prompt: int = 1024
    steps: int = 100
    lengths: tuple[int, ...] = (4096, 32768, 131072)  # of the key-value caches beside which memory is shown


def run(args) -> dict[str, Any]:
    from kdakit.measure import records
    from kdakit.models import place

    try:
        where = place.find("torch", "cuda", "bfloat16")
    except ValueError as problem:
        raise UsageError(f"--suite serving needs a CUDA device: {problem}") from problem
    settings = Settings()
    rows: list[dict[str, Any]] = []
    found = records.record("serving", vars(settings) | {"suite": "serving", "dtype": where.dtype}, rows, [])
    for row in measure(settings, where):
        rows.append(row)
        records.keep(found, args.json)
    return found


def measure(settings: Settings, where: Any) -> Iterator[dict[str, Any]]:
    import torch

    from kdakit.measure.whole_models import configuration
    from kdakit.models.torch import KimiLinear, cast
    from kdakit.serving.torch.model import ServedModel

    config = replace(configuration(settings.size), attention_every=0)
    model = cast(KimiLinear(config).to(where.device), getattr(torch, where.dtype))
    served = ServedModel(model, max(settings.sequences))
    yield {"entry": "first token", "ms": _first_token(served, settings.prompt)}
    for count in settings.sequences:
        yield {"entry": "decode", "sequences": count, **_decode(served, count, settings)}
    attention = replace(config, attention_every=1)
    kept = {f"kv_mib_at_{n}": attention.cache_bytes(n, 2) / 2**20 for n in settings.lengths}
    yield {"entry": "memory", "state_mib": served.bytes_per_slot() / 2**20, **kept}


def _first_token(served: Any, length: int) -> float:
    """Median milliseconds."""
    samples = []
    for _ in range(5):
        slot = served.allocate()
        begin = time.perf_counter()
        served.choose(served.prefill([slot], [[1] * length], [[]])[0])
        samples.append(1000 * (time.perf_counter() - begin))
        served.free(slot)
    return statistics.median(samples[1:])


def _decode(served: Any, count: int, settings: Settings) -> dict[str, Any]:
    import torch

    slots = [served.allocate() for _ in range(count)]
    tokens = served.choose(served.prefill(slots, [[i % 251, 2, 3] for i in range(count)], [[] for _ in slots])[0])
    samples = []
    for step in range(settings.steps + 5):
        begin = time.perf_counter()
        tokens = [max(t, 0) for t in served.choose(served.decode(slots, tokens))]
        if step >= 5:
            samples.append(1000 * (time.perf_counter() - begin))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        served.decode(slots, tokens)
        torch.cuda.synchronize()
    kernels = sum(e.self_device_time_total for e in profile.key_averages()) / 1000
    for slot in slots:
        served.free(slot)
    median, ordered = statistics.median(samples), sorted(samples)
    return {
        "median_ms": median, "p99_ms": ordered[int(0.99 * (len(ordered) - 1))], "kernels_ms": kernels,
        "tokens_per_s": 1000 * count / median, "samples_ms": samples,
    }  # fmt: skip


def tables(record: dict[str, Any]):
    s, results = record["settings"], record["results"]
    header = ["sequences", "ms a step", "p99 of a token, ms", "kernels in it, ms", "step over kernels", "tokens/s"]
    made = []
    for r in (r for r in results if r["entry"] == "decode"):
        ratio = r["median_ms"] / r["kernels_ms"] if r["kernels_ms"] else float("nan")
        times = [f"{r[name]:.2f}" for name in ("median_ms", "p99_ms", "kernels_ms")]
        made.append([str(r["sequences"]), *times, f"{ratio:.2f}", f"{r['tokens_per_s']:,.0f}"])
    first = next(r["ms"] for r in results if r["entry"] == "first token")
    yield f"serving the {s['size']} model (KDA in every layer), {s['dtype']}; first token of {s['prompt']} in {first:.1f} ms", header, made
    memory = next(r for r in results if r["entry"] == "memory")
    names = ["states of KDA", *(f"key-value cache of {n:,} tokens" for n in s["lengths"])]
    sizes = [memory["state_mib"], *(memory[f"kv_mib_at_{n}"] for n in s["lengths"])]
    yield "memory of one sequence, MiB", names, [[f"{x:,.1f}" for x in sizes]]
