"""How long a forward call takes, in closed form, so that 'auto' can compare backends: a JSON file of constants per chip.

Of the rows the first counts whose conditions (`when`) all hold; a problem that none describes has no time. In microseconds, with c chunks
of 64 tokens in all heads, NT chunks in a sequence on average, and R sequences times value heads:

    launch + max(least, prepare c) + NT max(chain, row R) + state R

`prepare`: the chunks, side by side. `chain`: one chunk of the walk along a sequence; `row`: the same where memory is what it waits for;
where the walk is cut into parts, `config.scan_us` takes its place, times `parts` where the row has that. `state`: reading and writing a
state. `kdakit bench --tune times` fits the constants to the GPU at hand.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from kdakit.backends.triton_gpu.config import Config, bounded, parts, scan_us
from kdakit.problem import Problem

FOLDER = Path(__file__).parent
CHUNK = 64


def expected_us(problem: Problem, chip: str, config: Config) -> float | None:
    """Microseconds of a forward call; None where the chip's file does not describe the problem."""
    row = row_of(problem, load(chip))
    return None if row is None else microseconds(problem, row["use"], config)


def microseconds(problem: Problem, use: dict[str, float], config: Config) -> float:
    """The closed form."""
    chunks = problem.T / CHUNK * (1 if problem.varlen else problem.B) * problem.HV
    rows = problem.N * problem.HV
    n = parts(problem, config) if config.split and rows else 1
    in_parts = use.get("parts", 1.0) * scan_us(problem, config, n) if n > 1 else 0.0
    walk = in_parts or (chunks / rows * max(use["chain"], use["row"] * rows) if rows else 0.0)
    return use["launch"] + max(use["least"], use["prepare"] * chunks) + walk + use["state"] * rows


def facts(problem: Problem) -> dict[str, Any]:
    """What the rows of a file ask about."""
    gate = "bounded" if bounded(problem) else "any"
    return dict(dtype=problem.dtype, K=problem.K, V=problem.V, gate=gate, g=problem.gate_dtype, l2norm=problem.options.l2norm)


def row_of(problem: Problem, rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The first row that describes the problem."""
    found = facts(problem)
    return next((row for row in rows if all(found[name] == x for name, x in row["when"].items())), None)


@lru_cache
def load(chip: str) -> tuple[dict[str, Any], ...]:
    """The rows of the chip's file; none where it has no file."""
    path = FOLDER / f"{chip}.json"
    return tuple(json.loads(path.read_text())["rows"]) if path.exists() else ()
