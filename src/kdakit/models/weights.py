"""Weights between frameworks and files: {name: array}, the same names and shapes in PyTorch, in JAX and in a safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kdakit.models.config import ModelConfig


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
    if len(shape) != 2:
        raise ValueError(f"tokens must be [B, T], got {tuple(shape)}")
    if mask_shape is not None and packed:
        raise ValueError("attention_mask and cu_seqlens exclude each other: packed sequences have no padding, got both")
    if mask_shape is not None and tuple(mask_shape) != tuple(shape):
        raise ValueError(f"attention_mask must be [B, T] = {tuple(shape)}, 1 at tokens and 0 at padding, got {tuple(mask_shape)}")
    if packed and shape[0] != 1:
        raise ValueError(f"tokens must have B = 1 with cu_seqlens, got B = {shape[0]}")
