"""Weights between frameworks and files: {name: array}, the same names and shapes in PyTorch, in JAX and in a safetensors file.

save("model.safetensors", model.config, model.weights())          # from either framework
config, weights = load("model.safetensors")
KimiLinear(config).load_weights(weights)                          # into either framework
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kdakit.models.config import ModelConfig
from kdakit.models.disk import write_whole

CONFIG_KEY = "kdakit.config"
LARGEST_HEADER = 100_000_000  # bytes; safetensors' own limit
FLOATS = ("float64", "float32", "float16", "bfloat16", "F64", "F32", "F16", "BF16")  # as arrays and as headers name them


DTYPES = {  # of safetensors
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4",
    "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip


class WeightsError(ValueError):
    """A file that is not what it should be."""


def save(path: str | Path, config: ModelConfig, weights: Mapping[str, np.ndarray]) -> None:
    """One safetensors file with the configuration in its header, complete or not there at all."""
    check_weights(config, weights)
    write_whole(path, to_bytes(weights, {CONFIG_KEY: json.dumps(config.to_dict())}))


def load(path: str | Path) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """The configuration and the weights of a file that `save` wrote; WeightsError says what is wrong with any other.

    What a file claims is held against its size before any of it is read: a bad one costs no more than its header.
    """
    path = Path(path)
    header, metadata = read_header(path)
    if CONFIG_KEY not in metadata:
        raise WeightsError(f"{path} must carry {CONFIG_KEY!r} in its header, as kdakit.models.weights.save writes it; it has none")
    try:
        config = ModelConfig.from_dict(parse_json(metadata[CONFIG_KEY]))
        check_weights(config, header)
    except (ValueError, TypeError, OverflowError) as problem:
        raise WeightsError(f"{path}: {problem}") from problem
    return config, from_bytes(path.read_bytes(), path)


class Claim:
    """What a header says of one array."""

    def __init__(self, dtype: str, shape: list[int]):
        self.dtype, self.shape = dtype, tuple(shape)


def read_header(path: Path) -> tuple[dict[str, Claim], dict[str, Any]]:
    """Names, dtypes and shapes in a safetensors file, and its metadata; sizes that do not add up to the file's are refused."""
    total = os.path.getsize(path)

    def refused(why: Any) -> WeightsError:
        return WeightsError(f"{path} must be a whole safetensors file, got {total} bytes that are none: {why}")

    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= min(LARGEST_HEADER, total - 8):
            raise refused(f"its header claims {size} bytes")
        text = file.read(size)
    try:
        found = parse_json(text)
        metadata = found.pop("__metadata__", {})
        claims = {name: Claim(x["dtype"], x["shape"]) for name, x in found.items()}
        lengths = [int(x["data_offsets"][1]) - int(x["data_offsets"][0]) for x in found.values()]
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError) as problem:
        raise refused(f"its header cannot be read ({type(problem).__name__}: {problem})") from problem
    if sum(lengths) != total - 8 - size or min(lengths, default=0) < 0:
        raise refused(f"its header claims {sum(lengths)} bytes of arrays, it has {total - 8 - size}")
    if not isinstance(metadata, dict):
        raise refused("its metadata is no mapping")
    return claims, metadata


def parse_json(text: str | bytes) -> dict[str, Any]:
    """An object; ValueError for anything else, however deep."""
    try:
        found = json.loads(text)
    except RecursionError as problem:
        raise ValueError("JSON that is nested too deeply") from problem
    if not isinstance(found, dict):
        raise ValueError(f"must be a JSON object, got {type(found).__name__}")
    return found


def to_bytes(arrays: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> bytes:
    from safetensors.numpy import save as serialise

    return serialise({name: np.ascontiguousarray(value) for name, value in arrays.items()}, metadata)


def from_bytes(data: bytes, path: str | Path) -> dict[str, np.ndarray]:
    """Arrays of a safetensors file's bytes."""
    from safetensors import SafetensorError, deserialize

    try:
        return {name: _array(x["dtype"], x["shape"], x["data"]) for name, x in deserialize(data)}
    except (SafetensorError, ValueError, KeyError) as problem:
        raise WeightsError(f"{path} must be a whole safetensors file, got {len(data)} bytes that are none: {problem}") from problem


def _array(dtype: str, shape: list[int], data: Any) -> np.ndarray:
    """An array of a file; NumPy has no bfloat16, which float32 holds exactly."""
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return np.frombuffer(data, DTYPES[dtype]).reshape(shape).copy()


def as_plain_floats(x: np.ndarray) -> np.ndarray:
    """Contiguous, and of a dtype that NumPy and PyTorch both know: bfloat16 of another package as float32."""
    return np.ascontiguousarray(x, np.float32 if str(x.dtype) == "bfloat16" else None)


def check_weights(config: ModelConfig, weights: Mapping[str, Any]) -> None:
    """Every parameter of `config` with its shape, in floats, and nothing else."""
    if (count := config.parameter_count()) > 2 * len(weights) + 1000:  # do not name a million of them
        raise ValueError(f"weights must hold the {count} parameters of the model, got {len(weights)}")
    wanted = config.parameters()
    missing, foreign = [n for n in wanted if n not in weights], [n for n in weights if n not in wanted]
    if missing or foreign:
        parts = [f"{len(names)} {what} ({_some(names)})" for names, what in ((missing, "missing"), (foreign, "unknown")) if names]
        raise ValueError(f"weights must hold the {len(wanted)} parameters of the model, got {' and '.join(parts)}")
    for name, shape in wanted.items():
        if tuple(weights[name].shape) != shape:
            raise ValueError(f"{name} must be {list(shape)}, got {list(weights[name].shape)}")
        if str(weights[name].dtype) not in FLOATS:
            raise TypeError(f"{name} must be floats ({', '.join(FLOATS)}), got {weights[name].dtype}")


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
