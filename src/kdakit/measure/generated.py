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


def merged(old: str, new: str) -> str:
    """`old` with the rows of `new`: both are tables under headings, rows known by their first cell. What has other columns is replaced."""
    before, after = _tables(old), _tables(new)
    parts = []
    for title, (head, rows) in (before | after).items():
        if title in before and title in after and before[title][0] == after[title][0]:
            rows = before[title][1] | after[title][1]
        parts.append("\n".join([title, "", *head, *rows.values()]))
    return "\n\n".join(parts)


def _tables(text: str) -> dict[str, tuple[list[str], dict[str, str]]]:
    """{heading: (header and rule, {first cell: row})}"""
    found: dict[str, tuple[list[str], dict[str, str]]] = {}
    title = ""
    for line in text.splitlines():
        if line.startswith("#"):
            title, found[line] = line, ([], {})
        elif line.startswith("|") and title:
            head, rows = found[title]
            if len(head) < 2:
                head.append(line)
            else:
                rows[line.split("|")[1].strip()] = line
    return found
