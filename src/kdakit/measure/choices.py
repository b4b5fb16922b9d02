"""What the user may name on the command line, with the nearest valid name in every error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"--{kind} must be 'all' or some of {', '.join(known)}, got {name!r}{hint}")
    return list(dict.fromkeys(wanted))
