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
from functools import lru_cache
from pathlib import Path
from typing import Any

from kdakit.measure import checking, inputs, machine, peers


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
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(record, indent=1) + "\n")
