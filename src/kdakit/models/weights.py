"""Weights between frameworks and files: {name: array}, the same names and shapes in PyTorch, in JAX and in a safetensors file.

save("model.safetensors", model.config, model.weights())          # from either framework
config, weights = load("model.safetensors")
KimiLinear(config).load_weights(weights)                          # into either framework
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kdakit.models.config import ModelConfig

CONFIG_KEY = "kdakit.config"


class WeightsError(ValueError):
    """A file that is not what it should be."""


def save(path: str | Path, config: ModelConfig, weights: Mapping[str, np.ndarray]) -> None:
    """One safetensors file with the configuration in its header, complete or not there at all."""
    check_weights(config, weights)
    write_whole(path, to_bytes(weights, {CONFIG_KEY: json.dumps(config.to_dict())}))


def load(path: str | Path) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """The configuration and the weights of a file that `save` wrote; WeightsError says what is wrong with any other."""
    arrays, metadata = from_bytes(Path(path).read_bytes(), path)
    if CONFIG_KEY not in metadata:
        raise WeightsError(f"{path} must carry {CONFIG_KEY!r} in its header, as kdakit.models.weights.save writes it; it has none")
    try:
        config = ModelConfig.from_dict(json.loads(metadata[CONFIG_KEY]))
        check_weights(config, arrays)
    except (ValueError, TypeError) as problem:
        raise WeightsError(f"{path}: {problem}") from problem
    return config, arrays


def to_bytes(arrays: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> bytes:
    from safetensors.numpy import save as serialise

    return serialise({name: np.ascontiguousarray(value) for name, value in arrays.items()}, metadata)


def from_bytes(data: bytes, path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Arrays and header of a safetensors file's bytes."""
    from safetensors import SafetensorError
    from safetensors.numpy import load as parse

    try:
        arrays = parse(data)
        size = int.from_bytes(data[:8], "little")
        return arrays, json.loads(data[8 : 8 + size]).get("__metadata__", {})
    except (SafetensorError, ValueError, KeyError) as problem:
        raise WeightsError(f"{path} must be a whole safetensors file, got {len(data)} bytes that are none: {problem}") from problem


def write_whole(path: str | Path, data: bytes) -> None:
    """Into a new file, onto the disk, then under its name: whoever looks sees the old file or the new one, never a part."""
    path = Path(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def check_weights(config: ModelConfig, weights: Mapping[str, Any]) -> None:
    """Every parameter of `config` with its shape, and nothing else."""
    wanted = config.parameters()
    missing, foreign = [n for n in wanted if n not in weights], [n for n in weights if n not in wanted]
    if missing or foreign:
        parts = [f"{len(names)} {what} ({_some(names)})" for names, what in ((missing, "missing"), (foreign, "unknown")) if names]
        raise ValueError(f"weights must hold the {len(wanted)} parameters of the model, got {' and '.join(parts)}")
    for name, shape in wanted.items():
        if tuple(weights[name].shape) != shape:
            raise ValueError(f"{name} must be {list(shape)}, got {list(weights[name].shape)}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", .." if len(names) > 3 else "")


def check_tokens(shape, mask_shape, packed: bool) -> None:
    """The input of a model: tokens [B, T], a mask [B, T], or B = 1 packed with cu_seqlens; never both."""
    if len(shape) != 2:
        raise ValueError(f"tokens must be [B, T], got {tuple(shape)}")
    if mask_shape is not None and packed:
        raise ValueError("attention_mask and cu_seqlens exclude each other: packed sequences have no padding, got both")
    if mask_shape is not None and tuple(mask_shape) != tuple(shape):
        raise ValueError(f"attention_mask must be [B, T] = {tuple(shape)}, 1 at tokens and 0 at padding, got {tuple(mask_shape)}")
    if packed and shape[0] != 1:
        raise ValueError(f"tokens must have B = 1 with cu_seqlens, got B = {shape[0]}")
