"""What a trained model does after training: prefill and steps that agree, tokens a second, and what it keeps in memory."""

from __future__ import annotations

import importlib
import time
from dataclasses import replace
from typing import Any

import numpy as np

from kdakit.models.config import ModelConfig
from kdakit.models.place import Place

LENGTHS = (256, 1024, 4096, 16384, 65536)
BATCH, CPU_BATCH = 64, 16  # sequences that are decoded at once


def build(framework: str, config: ModelConfig, weights: dict[str, np.ndarray] | None = None, place: Place | None = None) -> Any:
    """The model on its device in its dtype; float32 on the CPU (PyTorch) or on the first device (JAX) without a place."""
    models = importlib.import_module(f"kdakit.models.{framework}")
    if framework == "jax":
        return models.KimiLinear(config, weights=weights, dtype=None if place is None else place.dtype)
    model = models.KimiLinear(config, weights=weights)
    if place is None:
        return model
    import torch

    return models.cast(model.to(place.device), getattr(torch, place.dtype))


def use_one_thread(framework: str) -> None:
    """Models this small are slower on more. JAX decides when it starts."""
    if framework == "torch":
        importlib.import_module("torch").set_num_threads(1)


def stepwise(model: Any, tokens: np.ndarray, prompt: int) -> tuple[np.ndarray, float]:
    """Logits of tokens [B, T] with the first `prompt` at once and the others one by one, and their largest distance from those of one
    forward pass over everything, relative to the largest logit."""
    call, B, T = model.inference(), *tokens.shape
    whole, _ = call(tokens, model.new_cache(B, T))
    logits, cache = call(tokens[:, :prompt], model.new_cache(B, T))
    parts = [logits]
    for t in range(prompt, T):
        logits, cache = call(tokens[:, t : t + 1], cache)
        parts.append(logits)
    apart = np.concatenate(parts, 1)
    return apart, float(np.abs(apart - whole).max() / np.abs(whole).max())


def prefill_rate(model: Any, tokens: int = 2048, repeat: int = 3) -> float:
    """Tokens a second of one sequence."""
    call, given = model.inference(), np.zeros((1, tokens), np.int64)
    return tokens / min(_seconds(lambda: call(given, model.new_cache(1, tokens))) for _ in range(repeat + 1))


def decode_rate(model: Any, call: Any, length: int, batch: int = 1, steps: int = 20) -> float:
    """Tokens a second of `batch` sequences that have `length` tokens behind them; `call` is the model's inference()."""
    token = np.zeros((batch, 1), np.int64)
    cache = [_as_if(entry, length) for entry in model.new_cache(batch, length + steps + 3)]
    times = []
    for _ in range(steps + 3):
        begin = time.perf_counter()
        _, cache = call(token, cache)
        times.append(time.perf_counter() - begin)
    return batch / float(np.median(times[3:]))


def _as_if(entry: Any, length: int) -> Any:
    """A cache that has seen `length` tokens; what they were does not change how long a step takes."""
    return entry._replace(lengths=entry.lengths + length) if hasattr(entry, "lengths") else entry


def _seconds(run) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def accelerated(place: Place | None) -> bool:
    return place is not None and "cpu" not in str(place.device).lower()


def serving_size(config: ModelConfig, place: Place | None) -> tuple[ModelConfig, int]:
    """The model and the batch of sequences at which decoding is timed: on an accelerator two layers of a size that is served there."""
    if not accelerated(place):
        return config, CPU_BATCH
    return replace(config, hidden_size=1024, intermediate_size=None, num_layers=2, num_heads=8, head_dim=128), BATCH


def memory(framework: str, config: ModelConfig, lengths=LENGTHS, batch: int = 1, place: Place | None = None) -> list[dict[str, float]]:
    """Bytes a sequence and measured tokens/s of `batch` of them, for `config` and for the same model with full attention in every layer."""
    attention = replace(config, attention_every=1)
    kda, full = build(framework, config, place=place), build(framework, attention, place=place)
    step_kda, step_full = kda.inference(), full.inference()
    element = 4 if place is None or place.dtype == "float32" else 2
    rows = []
    for length in lengths:
        rows.append({
            "length": length, "batch": batch,
            "state_bytes": config.cache_bytes(length), "kv_bytes": attention.cache_bytes(length, element),
            "state_rate": decode_rate(kda, step_kda, length, batch), "kv_rate": decode_rate(full, step_full, length, batch),
        })  # fmt: skip
    return rows
