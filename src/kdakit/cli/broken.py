"""Imports that have failed fail again in the same way, untried: jax 0.12, half imported, ends the process at the second attempt."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


class Broken:
    def __init__(self) -> None:
        self.reasons: dict[str, BaseException] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in self.reasons:
            raise self.reasons[name]


_broken = Broken()
remember = _broken.reasons.__setitem__  # remember(package, what its import raised)


@contextlib.contextmanager
def broken_once() -> Iterator[None]:
    """What is remembered holds until the end."""
    sys.meta_path.insert(0, _broken)
    try:
        yield
    finally:
        sys.meta_path.remove(_broken)
        _broken.reasons.clear()
