"""How long a forward call takes, in closed form, so that 'auto' can compare backends: a JSON file of constants per chip.

Of the rows the first counts whose conditions (`when`) all hold; a problem that none describes has no time. In microseconds, with c chunks
of 64 tokens in all heads, NT chunks in a sequence on average, and R sequences times value heads:

    launch + max(least, prepare c) + NT max(chain, row R) + state R

`prepare`: the chunks, side by side. `chain`: one chunk of the walk along a sequence; `row`: the same where memory is what it waits for.
`state`: reading and writing a state. Where the library cuts sequences into n parts, as long as 2 n R blocks fit the chip's `blocks`, the
walk takes ceil(NT / n) (again + chain) + (n - 2) link + cut for the best n, if that is less: `again` a chunk of the first pass, `link` a
part, `cut` once. `kdakit bench --tune times` fits the constants to the GPU at hand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from kdakit.problem import Problem

FOLDER = Path(__file__).parent
CHUNK = 64


def expected_us(problem: Problem, chip: str) -> float | None:
    """Microseconds of a forward call; None where the chip's file does not describe the problem."""
    row = row_of(problem, load(chip))
    return None if row is None else microseconds(problem, row["use"])


def microseconds(problem: Problem, use: dict[str, float]) -> float:
    """The closed form."""
    chunks = problem.T / CHUNK * (1 if problem.varlen else problem.B) * problem.HV
    rows = problem.N * problem.HV
    walk = _walk(chunks / rows, rows, use) if rows else 0.0
    return use["launch"] + max(use["least"], use["prepare"] * chunks) + walk + use["state"] * rows


def _walk(chunks: float, rows: int, use: dict[str, float]) -> float:
    """Along a sequence of so many chunks, in one piece or in parts."""
    whole = chunks * max(use["chain"], use["row"] * rows)
    most = int(use.get("blocks", 0)) // (2 * rows)
    cut = (math.ceil(chunks / n) * (use["again"] + use["chain"]) + (n - 2) * use["link"] + use["cut"] for n in range(3, min(64, most) + 1))
    return min(whole, *cut) if most >= 3 else whole


def facts(problem: Problem) -> dict[str, Any]:
    """What the rows of a file ask about."""
    o = problem.options
    bounded = o.lower_bound is not None and (o.gate == "bounded" or o.safe_gate)
    return dict(dtype=problem.dtype, K=problem.K, V=problem.V, gate="bounded" if bounded else "any", g=problem.gate_dtype)


def row_of(problem: Problem, rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The first row that describes the problem."""
    found = facts(problem)
    return next((row for row in rows if all(found[name] == x for name, x in row["when"].items())), None)


@lru_cache
def load(chip: str) -> tuple[dict[str, Any], ...]:
    """The rows of the chip's file; none where it has no file."""
    path = FOLDER / f"{chip}.json"
    return tuple(json.loads(path.read_text())["rows"]) if path.exists() else ()
