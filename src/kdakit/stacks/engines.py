"""What the plugins of serving engines have in common: names replaced in a module of a version that is known, and put back."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from kdakit.problem import Arrays
from kdakit.stacks import counts
from kdakit.stacks.verdict import why_not

log = logging.getLogger("kdakit.stacks")


class Replaced:
    """Attributes of an engine's module or class, with what was there before."""

    def __init__(self, stack: str, distribution: str, versions: tuple[str, ...]):
        self.stack, self.distribution, self.versions = stack, distribution, versions
        self.before: list[tuple[Any, str, Any]] = []
        self.warned = False

    def known(self) -> bool:
        """Whether the installed version is one that was read; others are left alone, with one warning."""
        try:
            found = importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            found = None
        if found is not None and found.startswith(self.versions):
            return True
        if not self.warned:
            self.warned = True
            state = "is not installed" if found is None else f"{found} is not known"
            log.warning("%s %s to kdakit, which knows %s.*: it is left alone", self.distribution, state, ".*, ".join(self.versions))
        return False

    def put(self, owner: Any, name: str, make: Callable[[Callable], Callable]) -> None:
        theirs = getattr(owner, name)
        self.before.append((owner, name, theirs))
        setattr(owner, name, make(theirs))

    def undo(self) -> None:
        while self.before:
            setattr(*self.before.pop())


def refusal(stack: str, function: str, op: str, arrays: Arrays, **flags: Any) -> bool:
    """Whether a call goes back to its engine: counted either way."""
    reason = why_not(op, arrays, **flags)
    if reason is None:
        counts.take(stack, function)
    else:
        counts.pass_on(stack, function, reason)
    return reason is not None


def split_row(mixed: Tensor, H: int, HV: int, K: int, V: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [N, 1, H, K] and v [N, 1, HV, V] as parts of rows [N, 2 H K + HV V]: no copy."""
    q, k, v = mixed.split([H * K, H * K, HV * V], -1)
    return q.unflatten(-1, (H, K))[:, None], k.unflatten(-1, (H, K))[:, None], v.unflatten(-1, (HV, V))[:, None]
