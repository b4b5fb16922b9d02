"""Sections of Markdown files that a command writes and nobody types.

<!-- generated: NAME -->
...
<!-- end generated: NAME -->
"""

from __future__ import annotations

import re
from pathlib import Path

from kdakit.measure.choices import UsageError


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- generated: {re.escape(name)} -->\n)(.*?)(<!-- end generated: {re.escape(name)} -->)", re.DOTALL)


def read(path: str | Path, name: str) -> str:
    """What the section holds now."""
    found = _pattern(name).search(Path(path).read_text(encoding="utf-8"))
    if found is None:
        raise UsageError(f"{path} has no section '<!-- generated: {name} -->' .. '<!-- end generated: {name} -->'")
    return found.group(2).strip("\n")


def sections(path: str | Path) -> list[str]:
    """The names of the generated sections of a file, in order."""
    return re.findall(r"<!-- generated: (.+?) -->", Path(path).read_text(encoding="utf-8"))


def write(path: str | Path, name: str, body: str) -> None:
    """Replace the section's text."""
    read(path, name)
    text = Path(path).read_text(encoding="utf-8")
    Path(path).write_text(_pattern(name).sub(lambda m: f"{m.group(1)}\n{body.strip()}\n\n{m.group(3)}", text), encoding="utf-8")


def markdown_table(header: list[str], rows: list[list[str]], right: tuple[int, ...] = ()) -> str:
    """A Markdown table; `right` are the columns to align right."""
    rule = ["--:" if i in right else "---" for i in range(len(header))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])
