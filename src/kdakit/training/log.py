"""Every step of a run in a CSV file: step, loss, learning rate, tokens a second, the model's share of the chip's peak."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

NAME = "log.csv"


class Row(NamedTuple):
    step: int
    loss: float
    learning_rate: float
    tokens_per_second: float
    peak_share: float | None = None  # of the chip's FLOP/s in this dtype; None: not known


def append(folder: Path, rows: list[Row]) -> None:
    new = not (folder / NAME).exists()
    with open(folder / NAME, "a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(Row._fields)
        writer.writerows(rows)


def forget_after(folder: Path, step: int) -> None:
    """Drops what a killed run had written after its last checkpoint: a resumed one writes it again."""
    path = folder / NAME
    if not path.exists():
        return
    header, *rows = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [row for row in rows if row.endswith("\n") and row.partition(",")[0].isdigit() and int(row.partition(",")[0]) <= step]
    path.write_text("".join([header, *kept]), encoding="utf-8")
