"""Records of measurements: what was measured, on which machine, with which versions, from which commit. All that is kept has this form.

kind       bench, suite, scaling, ranks, errors, tune, verify, tpu_schedule: which results to expect
date       of the measurement; command: what was typed
machine    cpu, cores, architecture, memory_gib, system, device
versions   of kdakit, python and every package that could matter; commit: of the checkout
settings   of the run, the same for all results
results    a list of rows
missing    what did not run, each with its reason
"""

from __future__ import annotations

import importlib
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from kdakit.measure import checking, inputs, machine, peers
from kdakit.measure.choices import UsageError
from kdakit.models.disk import write_whole


def record(kind: str, settings: dict[str, Any], measured, missing) -> dict[str, Any]:
    described = machine.describe(device())
    described["versions"] |= peers.versions()
    return {"kind": kind, **described, "settings": settings, "results": measured, "missing": missing}


@lru_cache(maxsize=1)
def device() -> str:
    """The accelerators that the frameworks would use, or 'cpu'. With a GPU in torch JAX is not asked: it would take most of the memory."""
    if (gpu := inputs.gpu()) is not None:
        return importlib.import_module("torch").cuda.get_device_name(gpu)

    def name(framework: str) -> str:
        device = checking.default_device(framework)
        if framework == "jax":
            return importlib.import_module("jax").devices()[0].device_kind
        return device.type

    found = {machine.attempt(name, framework) for framework in ("torch", "jax")}
    return ", ".join(sorted(d for d in found if not d.startswith("failed"))) or "cpu"


def save(record: dict[str, Any], path: str) -> None:
    save_text(json.dumps(record, indent=1) + "\n", path)


def save_text(text: str, path: str) -> None:
    """Whoever stops the command finds the whole text or the one before. A link, or what is no file, such as a pipe, is written into."""
    place = Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_symlink() or (place.exists() and not (place.is_file() and os.access(place.parent, os.W_OK))):
        place.write_text(text, encoding="utf-8")
    else:
        write_whole(place, text.encode())


def keep(record: dict[str, Any], path: str | None) -> None:
    """What is known so far of a run that may not come to its end, if it is to be kept at all."""
    if path:
        save(record, path)


def load(path: str | Path) -> dict[str, Any]:
    """A record that has the form above; UsageError says what is wrong with others."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        raise UsageError(f"{path} is no JSON: {problem}") from problem
    if wrong := faults(record):
        raise UsageError(f"{path} is no record: {wrong[0]}")
    return record


PARTS = ("kind", "machine", "versions", "commit", "settings")  # what parts of one measurement agree in


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One record of several that were made in turn, each of some entries. What a later one has again counts."""
    first = parts[0]
    for part in parts[1:]:
        for name in PARTS:
            if part[name] != first[name]:
                raise UsageError(f"records of one measurement must agree in {name}, got {first[name]!r:.80} and {part[name]!r:.80}")
    rows = {_row_key(row): row for part in parts for row in part["results"]}
    missing = {_row_key(row): row for part in parts for row in part["missing"] if _row_key(row) not in rows}
    commands = dict.fromkeys(part["command"] for part in parts)
    return parts[-1] | {"command": "; ".join(commands), "results": list(rows.values()), "missing": list(missing.values())}


def _row_key(row: dict[str, Any]) -> tuple:
    """Which measurement a row is: everything that is said of it in words, and how many sequences took part."""
    return tuple((name, value) for name, value in row.items() if (isinstance(value, str) and name != "reason") or name == "sequences")


KINDS = (
    "bench", "suite", "scaling", "ranks", "errors", "tune", "verify", "tpu_schedule", "demo", "layer", "model", "serving", "pool",
    "state_bits", "first_calls", "pages", "stacks", "random", "trial", "tpu_report",
)  # fmt: skip
FIELDS: dict[str, Any] = {
    "kind": str, "date": str, "command": str, "machine": dict, "versions": dict, "commit": str, "settings": dict, "results": list,
    "missing": list,
}  # fmt: skip


def faults(record: Any) -> list[str]:
    """What keeps `record` from being one, in words; an empty list where nothing does."""
    if not isinstance(record, dict):
        return [f"it must be an object, got {type(record).__name__}"]
    found = [f"{name} must be a {kind.__name__}, got {record.get(name)!r:.60}" for name, kind in FIELDS.items()
             if not isinstance(record.get(name), kind)]  # fmt: skip
    if found:
        return found
    if not all(isinstance(row, dict) for row in [*record["results"], *record["missing"]]):
        return ["every row of results and missing must be an object"]
    if record["kind"] not in KINDS:
        found.append(f"kind must be one of {', '.join(KINDS)}, got {record['kind']!r}")
    found += [f"machine must name its {name}" for name in ("cpu", "device") if not record["machine"].get(name)]
    found += [f"versions must name {name}" for name in ("kdakit", "python") if name not in record["versions"]]
    found += ["every missing row must have a reason"] * any("reason" not in row for row in record["missing"])
    return found
