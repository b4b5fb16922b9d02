"""`kdakit bench --suite serving`: a model served from pools of states, 1 to 256 sequences at a time, on one GPU.

first token    a prompt that arrives alone: its prefill and the choice of its first token; the very first, which compiles, and later ones
decode         one token of every sequence: integers to the device, the captured graph, the chosen tokens back on the host;
  following    the same where each step is begun before the tokens of the last one have been seen, as the engine does without drafts;
  kernels      the GPU's time inside it; what a step takes above that is launching, waiting and copying
engine         a turn of `kdakit.serving.engine.Engine` in which all have a token made: with its bookkeeping
generate       `kdakit.models.generation.generate` for one sequence of the model as it is trained, with and without CUDA graphs
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from kdakit.measure.choices import UsageError

WARM = 5  # steps that are not counted


@dataclass(frozen=True)
class Settings:
    size: str = "340m"
    sequences: tuple[int, ...] = (1, 8, 64, 256)
    prompt: int = 1024
    steps: int = 100
    lengths: tuple[int, ...] = (4096, 32768, 131072)  # of the key-value caches beside which memory is shown
    generated: int = 128


def run(args) -> dict[str, Any]:
    from kdakit.measure import records
    from kdakit.models import place

    try:
        where = place.find("torch", "cuda", "bfloat16")
    except ValueError as problem:
        raise UsageError(f"--suite serving needs a CUDA device: {problem}") from problem
    settings = Settings()
    known = entries(settings, where)
    wanted = args.entry or list(known)  # in the order in which they were named
    if unknown := set(wanted) - set(known):
        raise UsageError(f"entry must be among {', '.join(known)}, got {', '.join(sorted(unknown))}")
    rows: list[dict[str, Any]] = []
    found = records.record("serving", vars(settings) | {"suite": "serving", "dtype": where.dtype}, rows, [])
    for name in wanted:
        rows.append(known[name]())
        records.keep(found, args.json)
    return found


def entries(settings: Settings, where: Any) -> dict[str, Callable[[], dict[str, Any]]]:
    """{name: what measures it}. The model is made when the first one asks for it."""
    subject = Subject(settings, where)
    made: dict[str, Callable[[], dict[str, Any]]] = {
        "first token": lambda: {"entry": "first token", **_first_token(subject.served, settings.prompt)}
    }
    for n in settings.sequences:
        made[f"decode n{n}"] = lambda n=n: {"entry": "decode", "sequences": n, **_decode(subject.served, n, settings)}
    for n in settings.sequences:
        made[f"engine n{n}"] = lambda n=n: {"entry": "engine", "sequences": n, **_engine(subject.served, n, settings)}
    made["memory"] = lambda: {"entry": "memory", **_memory(subject, settings)}
    made["generate"] = lambda: {"entry": "generate", **_generate(subject, settings)}
    return made


class Subject:
    """The model that is served: KDA in every layer, since a pool holds what does not grow."""

    def __init__(self, settings: Settings, where: Any):
        self.settings, self.where = settings, where

    def model(self, **changes: Any) -> Any:
        import torch

        from kdakit.measure.whole_models import configuration
        from kdakit.models.torch import KimiLinear, cast

        config = replace(configuration(self.settings.size), **changes)
        model = KimiLinear(config, weights=quick_weights(config)).to(self.where.device)
        return cast(model, getattr(torch, self.where.dtype))

    @cached_property
    def served(self) -> Any:
        from kdakit.serving.torch.model import ServedModel

        return ServedModel(self.model(attention_every=0), max(self.settings.sequences))


def quick_weights(config: Any) -> dict[str, Any]:
    """Sized like first weights, and the same few numbers in every matrix: what is timed does not depend on them, and 340 million take ten
    seconds to draw."""
    import numpy as np

    drawn = np.random.default_rng(0).standard_normal(1_000_003, np.float32)
    made = {}
    for name, shape in config.parameters().items():
        norm = "norm" in name
        made[name] = (
            np.ones(shape, np.float32) if norm else np.resize(drawn, shape) * np.float32(1 / shape[-1] ** 0.5 if shape[1:] else 0.1)
        )
    return made


def _first_token(served: Any, length: int) -> dict[str, float]:
    """Milliseconds of the first prompt of the process, and of later ones."""
    samples = []
    for _ in range(7):
        slot = served.allocate()
        begin = time.perf_counter()
        served.choose(served.prefill([slot], [[1] * length], [[]])[0])
        samples.append(1000 * (time.perf_counter() - begin))
        served.free(slot)
    return {"very_first_ms": samples[0], "ms": statistics.median(samples[1:]), "samples_ms": samples}


def _decode(served: Any, count: int, settings: Settings) -> dict[str, Any]:
    slots = [served.allocate() for _ in range(count)]
    tokens = served.choose(served.prefill(slots, [[i % 251, 2, 3] for i in range(count)], [[] for _ in slots])[0])
    alone, following = [], []
    for _ in range(settings.steps + WARM):
        begin = time.perf_counter()
        tokens = [max(t, 0) for t in served.next_tokens(slots, tokens)]
        alone.append(1000 * (time.perf_counter() - begin))
    step = served.begin(slots, tokens)
    for _ in range(settings.steps + WARM):
        begin = time.perf_counter()
        after = served.follow(step)
        step.tokens()
        step = after
        following.append(1000 * (time.perf_counter() - begin))
    kernels = _kernels(lambda: served.follow(step))
    for slot in slots:
        served.free(slot)
    median, ordered = statistics.median(alone[WARM:]), sorted(alone[WARM:])
    return {
        "median_ms": median, "p99_ms": ordered[int(0.99 * (len(ordered) - 1))], "following_ms": statistics.median(following[WARM:]),
        "kernels_ms": kernels, "tokens_per_s": 1000 * count / median, "samples_ms": alone[WARM:],
    }  # fmt: skip


def _kernels(call: Callable[[], Any]) -> float:
    """Milliseconds that the GPU computes in a call."""
    import torch

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(e.self_device_time_total for e in profile.key_averages()) / 1000


def _engine(served: Any, count: int, settings: Settings) -> dict[str, Any]:
    """Turns in which every request has a token made, without drafts."""
    from kdakit.serving.engine import Engine, Request

    engine = Engine(served, guesses=0, entries=0)
    requests = [Request([i % 251, 2, 3], settings.steps + WARM + 2) for i in range(count)]
    for request in requests:
        engine.submit(request)
    engine.turn()
    samples = []
    for _ in range(settings.steps + WARM):
        begin = time.perf_counter()
        engine.turn()
        samples.append(1000 * (time.perf_counter() - begin))
    while engine.turn():
        pass
    if engine.counts.finished != count:
        raise RuntimeError(f"{count} requests must have finished, {engine.counts.finished} have: {list(engine.faults)}")
    median = statistics.median(samples[WARM:])
    return {"median_ms": median, "tokens_per_s": 1000 * count / median, "samples_ms": samples[WARM:]}


def _memory(subject: Subject, settings: Settings) -> dict[str, float]:
    attention = replace(subject.served.model.config, attention_every=1)
    kept = {f"kv_mib_at_{n}": attention.cache_bytes(n, 2) / 2**20 for n in settings.lengths}
    return {"state_mib": subject.served.bytes_per_slot() / 2**20, **kept}


def _generate(subject: Subject, settings: Settings) -> dict[str, float]:
    """Tokens a second after the first token."""
    model = subject.model()
    return {f"{name}_tokens_per_s": _generated(model, graph, settings.generated) for name, graph in (("graph", True), ("plain", False))}


def _generated(model: Any, graph: bool, count: int) -> float:
    import numpy as np

    from kdakit.models.generation import generate
    from kdakit.models.sampling import greedy

    call, best = model.inference(graph), 0.0
    for _ in range(3):  # the first compiles and captures
        begin = 0.0
        for i, _ in enumerate(generate(model, np.ones((1, 16), np.int64), count, greedy, call=call)):
            if i == 1:
                begin = time.perf_counter()
        best = max(best, (count - 2) / (time.perf_counter() - begin))
    return best


def tables(record: dict[str, Any]):
    s, results = record["settings"], record["results"]
    of = lambda entry: [r for r in results if r["entry"] == entry]
    about = f"serving the {s['size']} model (KDA in every layer), {s['dtype']}"
    if of("decode"):
        title = about + "".join(f"; first token of {s['prompt']} in {r['ms']:.1f} ms" for r in of("first token"))
        yield title, *_steps(of("decode"))
    if of("engine"):
        rows = [[str(r["sequences"]), f"{r['median_ms']:.2f}", f"{r['tokens_per_s']:,.0f}"] for r in of("engine")]
        yield "turns of the engine in which all have a token made", ["sequences", "ms a turn", "tokens/s"], rows
    for memory in of("memory"):
        names = ["states of KDA", *(f"key-value cache of {n:,} tokens" for n in s["lengths"])]
        sizes = [memory["state_mib"], *(memory[f"kv_mib_at_{n}"] for n in s["lengths"])]
        yield "memory of one sequence, MiB", names, [[f"{x:,.1f}" for x in sizes]]
    for r in of("generate"):
        rates = [f"{r[f'{name}_tokens_per_s']:,.0f}" for name in ("graph", "plain")]
        yield f"generating with the {s['size']} model, one sequence, tokens/s", ["CUDA graphs", "kernel by kernel"], [rates]


def _steps(decoded: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    header = ["sequences", "ms a step", "p99 of a token, ms", "kernels in it, ms", "step over kernels", "tokens/s"]
    followed = all("following_ms" in r for r in decoded)
    header += ["step begun before the last was read, ms", "over kernels"] if followed else []
    made = []
    for r in decoded:
        over = lambda ms, r=r: f"{ms / r['kernels_ms'] if r['kernels_ms'] else float('nan'):.2f}"
        times = [f"{r[name]:.2f}" for name in ("median_ms", "p99_ms", "kernels_ms")]
        row = [str(r["sequences"]), *times, over(r["median_ms"]), f"{r['tokens_per_s']:,.0f}"]
        made.append(row + ([f"{r['following_ms']:.2f}", over(r["following_ms"])] if followed else []))
    return header, made
