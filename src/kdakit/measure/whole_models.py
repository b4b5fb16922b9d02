"""`kdakit bench --suite model`: a whole model learning, with our KDA layers and with flash-linear-attention's, in turn and in one run.

Both models have the same first weights, data, attention layers, norms and optimizer; only the KDA layers differ. A third run begins with
weights that are off by one rounding to bfloat16: how far its losses part from the first one's is what rounding alone does to a run.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdakit.measure.choices import UsageError

CURVE_BATCH = 2  # sequences a step of the loss curves
AGAIN = "kdakit, other rounding"


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
    reason = missing_peer()
    missing = [{"entry": "train", "contestant": "fla", "reason": reason}] if reason else []
    rows: list[dict[str, Any]] = []
    found = records.record("model", vars(settings) | {"suite": "model", "dtype": where.dtype}, rows, missing)
    for row in measure(settings, where, ["kdakit", *([] if reason else ["fla"])]):
        rows.append(row)
        records.keep(found, args.json)
    return found


def measure(settings: Settings, where: Any, contestants: list[str]) -> Iterator[dict[str, Any]]:
    data = _book()
    for name in contestants:
        yield {"entry": "train", "contestant": name, **_timed(settings, where, name, data)}
    for name in [*contestants, *([AGAIN] if settings.curve else [])]:
        if settings.curve:
            yield {"entry": "curve", "contestant": name, "losses": _curve(settings, where, name, data)}


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
    from kdakit.models.initial import initial_weights
    from kdakit.models.torch import KimiLinear
    from kdakit.rounding import round_to
    from kdakit.training.optimizer import AdamW
    from kdakit.training.torch import Learner

    config = configuration(settings.size)
    weights = initial_weights(config, settings.seed)
    if name == AGAIN:
        weights = {n: round_to(w, "bfloat16").astype(np.float32) for n, w in weights.items()}
    optimizer = AdamW(learning_rate=3e-4, steps=1000, warmup=30, decay=0.1)
    build = with_fla_layers if name == "fla" else KimiLinear
    return Learner(config, optimizer, place=where, weights=weights, build=build)


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


def _curve(settings: Settings, where: Any, name: str, data) -> list[float]:
    one = learner(settings, where, name)
    losses = [one.advance(*_batch(data, settings.seed, 100 + i, CURVE_BATCH, settings.length)) for i in range(settings.curve)]
    return [round(float(x), 5) for x in losses]


def tables(record: dict[str, Any]):
    timed = [r for r in record["results"] if r["entry"] == "train"]
    s = record["settings"]
    slowest = max(timed, key=lambda r: r["median_ms"])
    header = ["layers of", "ms a step", "tokens/s", "of peak", "peak memory, MiB", f"times as fast as {slowest['contestant']}"]
    made = []
    for r in timed:
        share = "–" if r["peak_share"] is None else f"{r['peak_share']:.1%}"
        ratio = f"{slowest['median_ms'] / r['median_ms']:.2f}"
        made.append([r["contestant"], f"{r['median_ms']:.1f}", f"{r['tokens_per_s']:,.0f}", share, f"{r['extra_mib']:,.0f}", ratio])
    yield f"training the {s['size']} model, {s['batch']} x {s['length']} tokens a step, {s['dtype']}", header, made
    curves = {r["contestant"]: np.asarray(r["losses"]) for r in record["results"] if r["entry"] == "curve"}
    if "kdakit" in curves and len(curves) > 1:
        parts = []
        for name, curve in curves.items():
            apart = np.abs(curve - curves["kdakit"])
            parts.append([name, f"{curve[-20:].mean():.4f}", f"{apart.max():.4f}", f"{apart.mean():.4f}"])
        title = f"loss over {len(curves['kdakit'])} steps"
        yield title, ["layers of", "mean of the last 20", "largest distance from kdakit's", "mean distance"], parts
