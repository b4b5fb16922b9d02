"""A training run on disk: a folder that is whole at every moment, whatever happens to the process.

    checkpoint.json                  what the run is, how far it is, and which two files belong to it, with their sizes and SHA-256
    weights-00000200.safetensors     the model, readable by itself with kdakit.models.weights.load
    moments-00000200.safetensors     AdamW's two moments

New files are written under new names; then checkpoint.json is replaced in one step, and the old files go. A process that is killed leaves
the last complete checkpoint. Reading changes nothing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kdakit.models import weights as files
from kdakit.models.config import ModelConfig
from kdakit.models.weights import WeightsError
from kdakit.training.optimizer import AdamW, TrainingState

FORMAT = "kdakit checkpoint 1"
INDEX = "checkpoint.json"


class CheckpointError(WeightsError):
    """A folder that is not a whole checkpoint."""


@dataclass
class Checkpoint:
    config: ModelConfig
    optimizer: AdamW
    state: TrainingState
    data: dict[str, Any] = field(default_factory=dict)  # where the training text comes from, and how batches are drawn
    curve: list[dict[str, float]] = field(default_factory=list)  # what was measured on the way


def exists(folder: str | Path) -> bool:
    return (Path(folder) / INDEX).exists()


def save(folder: str | Path, checkpoint: Checkpoint) -> None:
    """Replace the folder's checkpoint."""
    folder, state = Path(folder), checkpoint.state
    folder.mkdir(parents=True, exist_ok=True)
    header = {files.CONFIG_KEY: json.dumps(checkpoint.config.to_dict())}
    moments = {f"first.{n}": x for n, x in state.first.items()} | {f"second.{n}": x for n, x in state.second.items()}
    parts = {
        f"weights-{state.step:08}.safetensors": files.to_bytes(state.weights, header),
        f"moments-{state.step:08}.safetensors": files.to_bytes(moments),
    }
    for name, data in parts.items():
        files.write_whole(folder / name, data)
    index = {
        "format": FORMAT,
        "step": state.step,
        "files": {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in parts.items()},
        "config": checkpoint.config.to_dict(),
        "optimizer": asdict(checkpoint.optimizer),
        "data": checkpoint.data,
        "curve": checkpoint.curve,
    }
    files.write_whole(folder / INDEX, (json.dumps(index, indent=1) + "\n").encode())
    for pattern in ("weights-*.safetensors", "moments-*.safetensors"):
        for path in folder.glob(pattern):
            if path.name not in parts:
                path.unlink()


def load(folder: str | Path) -> Checkpoint:
    """The folder's checkpoint, every byte checked; CheckpointError says what is wrong with it."""
    folder = Path(folder)
    index = _index(folder)
    try:
        config, optimizer = ModelConfig.from_dict(index["config"]), AdamW(**index["optimizer"])
        names, step = list(index["files"]), int(index["step"])
        kinds = {name.partition("-")[0]: name for name in names}
        weights, moments = (_arrays(folder / kinds[kind], index["files"][kinds[kind]]) for kind in ("weights", "moments"))
        files.check_weights(config, weights)
        first, second = ({n: moments[f"{kind}.{n}"] for n in weights} for kind in ("first", "second"))
    except CheckpointError:
        raise
    except KeyError as problem:
        raise CheckpointError(f"{folder / INDEX} must name {problem}, which is missing") from problem
    except (ValueError, TypeError, AttributeError) as problem:
        raise CheckpointError(f"{folder / INDEX} does not describe a kdakit checkpoint: {problem}") from problem
    return Checkpoint(config, optimizer, TrainingState(weights, first, second, step), index.get("data", {}), index.get("curve", []))


def _index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    if not path.is_file():
        raise CheckpointError(f"{folder} must be a folder with {INDEX}, as kdakit train writes it; there is none")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as problem:
        raise CheckpointError(f"{path} must be JSON, as kdakit train writes it: {problem}") from problem
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        found = index.get("format") if isinstance(index, dict) else type(index).__name__
        raise CheckpointError(f"{path} must have the format {FORMAT!r}, got {found!r}")
    return index


def _arrays(path: Path, expected: dict[str, Any]) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise CheckpointError(f"{path} belongs to the checkpoint and is missing")
    data = path.read_bytes()
    if len(data) != expected["bytes"]:
        raise CheckpointError(f"{path} must have {expected['bytes']} bytes, got {len(data)}: it is truncated or from elsewhere")
    if hashlib.sha256(data).hexdigest() != expected["sha256"]:
        raise CheckpointError(f"{path} must have SHA-256 {expected['sha256'][:12]}.., got another: its bytes have changed")
    return files.from_bytes(data, path)[0]
