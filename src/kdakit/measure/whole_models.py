"""`kdakit bench --suite model`: a whole model learning, with our KDA layers and with flash-linear-attention's, in turn and in one run.

Both models have the same first weights, data, attention layers, norms and optimizer; only the KDA layers differ.

train      milliseconds a step, tokens a second, memory
curve      losses of so many steps; once more from weights that are off by one rounding to bfloat16: how far these losses part from the
           others is what rounding alone does to a run, the band in which two right implementations may lie apart
profile    where a step's time goes: by part, by kernel, and how long the GPU waits; only where it is named
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any

import numpy as np

from kdakit.measure.choices import UsageError

CURVE_BATCH = 2  # sequences a step of the loss curves
KERNELS_SHOWN = 16  # those that take longest
AGAIN = ", other rounding"  # of the first weights


@dataclass(frozen=True)
class Settings:
    size: str = "340m"
    batch: int = 8
    length: int = 4096
    steps: int = 12  # timed, after as many that are not as it takes to be warm
    curve: int = 200
    seed: int = 0


def run(args) -> dict[str, Any]:
    from kdakit.measure import records
    from kdakit.models import place

    where = place.find("torch", "cuda", "bfloat16")
    if where.device.type != "cuda":
        raise UsageError("--suite model needs a CUDA device")
    settings = Settings(**{k: v for k, v in (("steps", args.model_steps), ("curve", args.curve)) if v is not None})
    known = entries(settings, where)
    wanted = args.entry or [name for name in known if name.startswith("train" if not settings.curve else ("train", "curve"))]
    if unknown := set(wanted) - set(known):
        raise UsageError(f"entry must be among {', '.join(known)}, got {', '.join(sorted(unknown))}")
    reason = missing_peer()
    missing = [{"entry": name, "contestant": "fla", "reason": reason} for name in wanted if reason and "fla" in name]
    rows: list[dict[str, Any]] = []
    found = records.record("model", vars(settings) | {"suite": "model", "dtype": where.dtype}, rows, missing)
    for name in wanted:
        if not (reason and "fla" in name):
            rows.append(known[name]())
            records.keep(found, args.json)
    return found


def entries(settings: Settings, where: Any) -> dict[str, Callable[[], dict[str, Any]]]:
    made: dict[str, Callable[[], dict[str, Any]]] = {}
    for name in ("kdakit", "fla"):
        made[f"train {name}"] = lambda n=name: {"entry": "train", "contestant": n, **_timed(settings, where, n, _book())}
    for name in ("kdakit", "fla", "kdakit" + AGAIN, "fla" + AGAIN):
        made[f"curve {name}"] = lambda n=name: {"entry": "curve", "contestant": n, "losses": _curve(settings, where, n, _book())}
    for name in ("kdakit", "fla"):
        made[f"profile {name}"] = lambda n=name: {"entry": "profile", "contestant": n, **_profile(settings, where, n, _book())}
    return made


def missing_peer() -> str | None:
    return None if importlib.util.find_spec("fla") and importlib.util.find_spec("fla.layers") else (
        "flash-linear-attention is not installed: pip install flash-linear-attention"
    )  # fmt: skip


def configuration(size: str):
    from kdakit.models.config import ModelConfig
    from kdakit.training.sizes import SIZES

    s = SIZES[size]
    return ModelConfig(
        vocab_size=256, hidden_size=s.hidden, num_layers=s.layers, intermediate_size=s.intermediate or None, num_heads=s.heads,
        head_dim=s.head_dim, attention_every=s.attention_every, safe_gate=True, lower_bound=-5.0,
    )  # fmt: skip


def learner(settings: Settings, where: Any, name: str):
    """The Learner of one contestant, from the same first weights."""
    from kdakit.models.torch import KimiLinear
    from kdakit.rounding import round_to
    from kdakit.training.optimizer import AdamW
    from kdakit.training.torch import Learner

    config = configuration(settings.size)
    weights = _first_weights(settings.size, settings.seed)
    if name.endswith(AGAIN):
        weights = {n: round_to(w, "bfloat16").astype(np.float32) for n, w in weights.items()}
    optimizer = AdamW(learning_rate=3e-4, steps=1000, warmup=30, decay=0.1)
    build = with_fla_layers if name.startswith("fla") else KimiLinear
    return Learner(config, optimizer, place=where, weights=weights, build=build)


@lru_cache(maxsize=1)
def _first_weights(size: str, seed: int) -> dict[str, np.ndarray]:
    from kdakit.models.initial import initial_weights

    return initial_weights(configuration(size), seed)


def with_fla_layers(config, **given):
    """KimiLinear with flash-linear-attention's KimiDeltaAttention, whose parameters have the same names, in place of ours."""
    from fla.layers import KimiDeltaAttention
    from torch import nn

    from kdakit.models.torch import KimiLinear

    class Layer(KimiDeltaAttention):
        def mix(self, x, rows, cache=None):
            return self.forward(x, cu_seqlens=rows.cu_seqlens)[0], cache

    weights = given.pop("weights")
    model = KimiLinear(config, weights=weights, **given)
    options = {name: value for name, value in config.layer_options().items() if name != "delta_rule"}
    for i, block in enumerate(model.blocks()):
        if not config.is_attention(i):
            block.attn = Layer(layer_idx=i, **options)
    nn.Module.train(model)
    model.load_weights(weights)
    return model


@lru_cache(maxsize=1)
def _book() -> np.ndarray:
    from kdakit.training import text

    return text.split(text.book(2_000_000))[0]


def _batch(data, seed: int, step: int, size: int, length: int):
    from kdakit.training import text

    return text.batch(data, np.random.default_rng([seed, step]), size, length)


def _timed(settings: Settings, where: Any, name: str, data) -> dict[str, Any]:
    import torch

    from kdakit.measure import roofline

    one = learner(settings, where, name)
    given = [_batch(data, settings.seed, i, settings.batch, settings.length) for i in range(4)]
    for i in range(4):
        one.advance(*given[i])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    samples = []
    for i in range(settings.steps):
        begin = time.perf_counter()
        one.advance(*given[i % 4])
        torch.cuda.synchronize()
        samples.append(1000 * (time.perf_counter() - begin))
    median = statistics.median(samples)
    tokens = settings.batch * settings.length
    flops = 3 * tokens * one.model.config.flops_per_token(settings.length)
    chip = roofline.chip(torch.cuda.get_device_name())
    return {
        "samples_ms": samples, "median_ms": median, "best_ms": min(samples), "tokens_per_s": 1000 * tokens / median,
        "peak_share": None if chip is None else 1000 * flops / median / chip.half,
        "extra_mib": (torch.cuda.max_memory_allocated() - before) / 2**20,
    }  # fmt: skip


def _profile(settings: Settings, where: Any, name: str, data) -> dict[str, Any]:
    from kdakit.measure import step_profile

    one = learner(settings, where, name)
    given = [_batch(data, settings.seed, i, settings.batch, settings.length) for i in range(4)]
    for batch in given:
        one.advance(*batch)
    return step_profile.on_gpu(one, given[:3])


def _curve(settings: Settings, where: Any, name: str, data) -> list[float]:
    one = learner(settings, where, name)
    losses = [one.advance(*_batch(data, settings.seed, 100 + i, CURVE_BATCH, settings.length)) for i in range(settings.curve)]
    return [round(float(x), 5) for x in losses]


def tables(record: dict[str, Any]):
    timed = [r for r in record["results"] if r["entry"] == "train"]
    s = record["settings"]
    if timed:
        slowest = max(timed, key=lambda r: r["median_ms"])
        header = ["layers of", "ms a step", "tokens/s", "of peak", "peak memory, MiB", f"times as fast as {slowest['contestant']}"]
        made = []
        for r in timed:
            share = "–" if r["peak_share"] is None else f"{r['peak_share']:.1%}"
            ratio = f"{slowest['median_ms'] / r['median_ms']:.2f}"
            made.append([r["contestant"], f"{r['median_ms']:.1f}", f"{r['tokens_per_s']:,.0f}", share, f"{r['extra_mib']:,.0f}", ratio])
        yield f"training the {s['size']} model, {s['batch']} x {s['length']} tokens a step, {s['dtype']}", header, made
    yield from _profiles([r for r in record["results"] if r["entry"] == "profile"])
    curves = {r["contestant"]: np.asarray(r["losses"]) for r in record["results"] if r["entry"] == "curve"}
    if len(curves) > 1:
        yield f"loss over {len(next(iter(curves.values())))} steps", ["layers of", "mean of the last 20"], [
            [name, f"{curve[-20:].mean():.4f}"] for name, curve in curves.items()
        ]  # fmt: skip
        names = ["", "largest", "mean", "of the means of the last 20"]
        yield "how far apart two curves are", names, [[f"{a} – {b}", *apart(curves[a], curves[b])] for a, b in combinations(curves, 2)]


def _profiles(rows: list[dict[str, Any]]):
    if not rows:
        return
    names = [r["contestant"] for r in rows]
    shown = {"step": "step_ms", "host until the call returns": "host_ms", "some kernel runs": "busy_ms", "no kernel runs": "idle_ms"}
    made = [[label, *(f"{r[field]:.1f}" for r in rows)] for label, field in shown.items()]
    parts = dict.fromkeys(part for r in rows for part in r["parts_ms"])
    made += [[part, *(f"{r['parts_ms'].get(part, 0.0):.2f}" for r in rows)] for part in parts]
    yield "where a step's time goes, ms", ["", *names], made
    for r in rows:
        longest = [[k["kernel"][:60], f"{k['ms']:.2f}", f"{k['launches']:.0f}"] for k in r["kernels"][:KERNELS_SHOWN]]
        yield f"kernels of a step, layers of {r['contestant']}", ["", "ms", "launches"], longest


def apart(a: np.ndarray, b: np.ndarray) -> list[str]:
    distance = np.abs(a - b)
    return [f"{distance.max():.4f}", f"{distance.mean():.4f}", f"{abs(a[-20:].mean() - b[-20:].mean()):.4f}"]
