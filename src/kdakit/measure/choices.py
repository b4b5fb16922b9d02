"""What the user may name on the command line, with the nearest valid name in every error."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path


class UsageError(Exception):
    """A mistake in what was typed: printed without a traceback, exit code 2."""


def pick(kind: str, wanted: Iterable[str] | None, known: Iterable[str]) -> list[str]:
    """`wanted` checked against `known`; all of `known` where nothing, or 'all', was asked for."""
    known = list(known)
    wanted = list(wanted or ["all"])
    if wanted == ["all"]:
        return known
    for name in wanted:
        if name not in known:
            raise UsageError(f"--{kind} must be 'all' or some of {', '.join(known)}, got {name!r}{_nearest(name, known)}")
    return list(dict.fromkeys(wanted))


def pick_one(kind: str, name: str, known: Iterable[str]) -> str:
    """`name`, which must be one of `known`."""
    known = list(known)
    if name not in known:
        raise UsageError(f"--{kind} must be one of {', '.join(known)}, got {name!r}{_nearest(name, known)}")
    return name


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def writable(*files: str | None) -> None:
    """Each can be written, in a folder that is there or can be made: known before anything is measured."""
    for file in filter(None, files):
        place = Path(os.path.abspath(file))
        if place.is_symlink() and not place.exists():
            place = Path(os.path.realpath(place))
        if place.is_dir():
            raise UsageError(f"{file} is a folder: name a file")
        there = next(path for path in (place, *place.parents) if os.path.lexists(path))
        if there != place and not there.is_dir():
            raise UsageError(f"{file} must lie in a folder, and {there} is none")
        if not os.access(there, os.W_OK):
            raise UsageError(f"{file} must be a file that can be written to, and {there} cannot")
