"""A training run on disk: a folder that is whole at every moment, whatever happens to the process.

    checkpoint.json                  what the run is, how far it is, and which two files belong to it, with their sizes and SHA-256
    weights-00000200.safetensors     the model, readable by itself with kdakit.models.weights.load
    moments-00000200.safetensors     AdamW's two moments

New files are written under new names; then checkpoint.json is replaced in one step, and the old files go. A process that is killed leaves
the last complete checkpoint, and so does a disk that is full; what either leaves beside it goes with the next save. One process writes at
a time (`disk.only_writer`). Reading changes nothing.
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
from kdakit.models.disk import only_writer, remove_parts
from kdakit.models.weights import WeightsError
from kdakit.training.optimizer import AdamW, TrainingState

FORMAT = "kdakit checkpoint 1"
INDEX = "checkpoint.json"
PARTS = ("weights-*.safetensors", "moments-*.safetensors")


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
    """Replace the folder's checkpoint. Whatever raises, the one before is there and whole."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with only_writer(folder):
        for pattern in (INDEX, *PARTS):
            remove_parts(folder, pattern)
        kept = _named_files(folder)
        parts = _parts(checkpoint, kept)
        try:
            for name, data in parts.items():
                files.write_whole(folder / name, data)
            files.write_whole(folder / INDEX, _describe(checkpoint, parts))
        except BaseException:
            for name in parts.keys() - _named_files(folder).keys():  # a full disk needs the room
                (folder / name).unlink(missing_ok=True)
            raise
        for path in (path for pattern in PARTS for path in folder.glob(pattern)):
            if path.name not in parts:
                path.unlink(missing_ok=True)


def _parts(checkpoint: Checkpoint, kept: dict[str, Any]) -> dict[str, bytes]:
    """The files of a checkpoint by name: names that are not in use, unless for the same bytes."""
    state = checkpoint.state
    moments = {f"first.{n}": x for n, x in state.first.items()} | {f"second.{n}": x for n, x in state.second.items()}
    made = {}
    for kind, arrays, header in (
        ("weights", state.weights, {files.CONFIG_KEY: json.dumps(checkpoint.config.to_dict())}), ("moments", moments, None),
    ):  # fmt: skip
        data = files.to_bytes(arrays, header)
        name, digest = f"{kind}-{state.step:08}", hashlib.sha256(data).hexdigest()
        if kept.get(f"{name}.safetensors", digest) != digest:
            name += f"-{digest[:16]}"
        made[f"{name}.safetensors"] = data
    return made


def _describe(checkpoint: Checkpoint, parts: dict[str, bytes]) -> bytes:
    index = {
        "format": FORMAT,
        "step": checkpoint.state.step,
        "files": {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in parts.items()},
        "config": checkpoint.config.to_dict(),
        "optimizer": asdict(checkpoint.optimizer),
        "data": checkpoint.data,
        "curve": checkpoint.curve,
    }
    return (json.dumps(index, indent=1) + "\n").encode()


def _named_files(folder: Path) -> dict[str, Any]:
    """{name: SHA-256} of the files that the folder's index names; none where there is no index that can be read."""
    try:
        return {str(name): own["sha256"] for name, own in _index(folder)["files"].items()}
    except (CheckpointError, KeyError, TypeError, AttributeError):
        return {}


def load(folder: str | Path) -> Checkpoint:
    """The folder's checkpoint, every byte checked; CheckpointError says what is wrong with it."""
    folder = Path(folder)
    index = _index(folder)
    try:
        config, optimizer, step = ModelConfig.from_dict(index["config"]), AdamW(**index["optimizer"]), _step(index["step"])
        data, curve = index.get("data", {}), index.get("curve", [])
        if not isinstance(data, dict) or not isinstance(curve, list):
            raise ValueError(f"data must be an object and curve a list, got {type(data).__name__} and {type(curve).__name__}")
        kinds = {name.partition("-")[0]: name for name in index["files"]}
        weights, moments = (_arrays(folder, kinds[kind], index["files"][kinds[kind]]) for kind in ("weights", "moments"))
        files.check_weights(config, weights)
        first, second = ({n: moments[f"{kind}.{n}"] for n in weights} for kind in ("first", "second"))
        for one in (first, second):
            files.check_weights(config, one)
    except CheckpointError:
        raise
    except KeyError as problem:
        raise CheckpointError(f"{folder / INDEX} must name {problem}, which is missing") from problem
    except (ValueError, TypeError, AttributeError, OverflowError) as problem:
        raise CheckpointError(f"{folder / INDEX} does not describe a kdakit checkpoint: {problem}") from problem
    return Checkpoint(config, optimizer, TrainingState(weights, first, second, step), data, curve)


def _step(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"step must be an integer of at least 0, got {value!r}")
    return value


def _index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    if not path.is_file():
        raise CheckpointError(f"{folder} must be a folder with {INDEX}, as kdakit train writes it; there is none")
    try:
        index = files.parse_json(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as problem:
        raise CheckpointError(f"{path} must be JSON, as kdakit train writes it: {problem}") from problem
    if index.get("format") != FORMAT:
        raise CheckpointError(f"{path} must have the format {FORMAT!r}, got {index.get('format')!r}")
    return index


def _arrays(folder: Path, name: str, expected: dict[str, Any]) -> dict[str, np.ndarray]:
    path = folder / name
    if path.name != name:
        raise CheckpointError(f"{folder / INDEX} must name files of its own folder, got {name!r}")
    if not path.is_file():
        raise CheckpointError(f"{path} belongs to the checkpoint and is missing")
    if path.stat().st_size != expected["bytes"]:
        raise CheckpointError(f"{path} must have {expected['bytes']} bytes, got {path.stat().st_size}: it is truncated or from elsewhere")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != expected["sha256"]:
        raise CheckpointError(f"{path} must have SHA-256 {expected['sha256'][:12]}.., got another: its bytes have changed")
    return files.from_bytes(data, path)
