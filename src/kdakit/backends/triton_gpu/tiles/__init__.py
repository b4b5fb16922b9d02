"""Tile sizes as data: a JSON file per chip, written by hand or by `kdakit bench --tune`, read by plain Python.

A file has rows per kernel. Of each kernel the first row counts whose conditions all hold; the last has none. Conditions:

    dtype        of the inputs                      K, V          the head size, padded to a power of two, is at most this
    gate         "bounded": at least -5 a token     K_is, V_is    it is exactly this
    form         "normed": the prepare kernel for normalised keys
    heads        "many", "some" or "few" sequences times heads for the chip's processors, see `crowd`

`use` sets fields of `config.Config`; `why` says what the row must keep. Where `kdakit bench --tune` wrote a row, `ms` is the time of the
whole call with it and `was` the time without.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
CONDITIONS = ("dtype", "gate", "form", "heads", "K", "V", "K_is", "V_is")
# Chips without a file of their own take that of one which holds no more.
LIKE = {"sm_86": "sm_89", "sm_120": "sm_89", "gfx950": "gfx942"}


def crowd(rows: int, processors: int) -> str:
    """How sequences times heads (twice where V is 256) fill a chip."""
    return "many" if rows * 2 > processors else "some" if rows * 4 > processors else "few"


@lru_cache(maxsize=256)
def pick(chip: str, dtype: str, K: int, V: int, heads: str, gate: str, form: str) -> dict[str, Any]:
    """The fields of Config that the chip's file gives for such a problem."""
    facts = {"dtype": dtype, "K": K, "V": V, "K_is": K, "V_is": V, "heads": heads, "gate": gate, "form": form}
    fields: dict[str, Any] = {}
    for rows in load(chip)["tiles"].values():
        fields |= next(row["use"] for row in rows if holds(row["when"], facts))
    return fields


def holds(when: dict[str, Any], facts: dict[str, Any]) -> bool:
    """Whether all conditions of a row are met."""
    return all(facts[name] <= wanted if name in ("K", "V") else facts[name] == wanted for name, wanted in when.items())


@lru_cache
def load(chip: str) -> dict[str, Any]:
    """The chip's file, or that of the one it is like."""
    own = FOLDER / f"{chip}.json"
    return json.loads((own if own.exists() else FOLDER / f"{LIKE[chip]}.json").read_text())


@lru_cache
def pool() -> dict[str, Any]:
    """How calls over a pool of states are cut, by call and by the order of a state, KV or VK, on every chip."""
    return json.loads((FOLDER / "pool" / "any.json").read_text())


def dump(table: dict[str, Any]) -> str:
    """A chip's file: a line per row."""
    lines = ["{", f' "chip": {json.dumps(table["chip"])},', f' "source": {json.dumps(table["source"])},', ' "tiles": {']
    kernels = []
    for kernel, rows in table["tiles"].items():
        kernels.append(f'  "{kernel}": [\n' + ",\n".join("   " + json.dumps(row) for row in rows) + "\n  ]")
    return "\n".join([*lines, ",\n".join(kernels), " }", "}"]) + "\n"
