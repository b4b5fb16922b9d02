"""Text from a model of either framework: a prefill, then one token at a time with the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


def generate(
    model: Any, prompt: np.ndarray, count: int, sample: Callable[[np.ndarray], np.ndarray], piece: int = 0,
    call: Callable[..., Any] | None = None,
) -> Iterator[np.ndarray]:  # fmt: skip
    """Continue prompt [B, T] by `count` tokens a sequence; yields them as they come, [B] each.

    sample(logits [B, vocab_size]) chooses; see `kdakit.models.sampling`. piece > 0 prefills in pieces of that many tokens.
    call: the model's inference(), where it is to be another than the default.
    """
    prompt = np.asarray(prompt)
    if prompt.ndim != 2 or prompt.size < 1:
        raise ValueError(f"prompt must be [B, T] with at least one token, got {prompt.shape}")
    if not np.issubdtype(prompt.dtype, np.integer):
        raise TypeError(f"prompt must hold integers, got {prompt.dtype}")
    vocabulary = model.config.vocab_size
    if prompt.min() < 0 or prompt.max() >= vocabulary:
        raise ValueError(f"prompt must hold tokens 0 .. {vocabulary - 1}, got {prompt.min()} .. {prompt.max()}")
    for name, value in (("count", count), ("piece", piece)):
        if value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    prompt = prompt.astype(np.int64, copy=False)
    call, cache = call or model.inference(in_place=True), model.new_cache(prompt.shape[0], prompt.shape[1] + count)
    piece = piece or prompt.shape[1]
    for start in range(0, prompt.shape[1], piece):
        logits, cache = call(prompt[:, start : start + piece], cache)
    for i in range(count):
        if not np.isfinite(logits[:, -1]).all():
            raise FloatingPointError(f"the logits after {prompt.shape[1] + i} tokens must be finite, and are not: look at the weights")
        chosen = sample(logits[:, -1])
        yield chosen
        if i + 1 < count:
            logits, cache = call(chosen[:, None], cache)
