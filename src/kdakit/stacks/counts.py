"""How many calls of a stack kdakit has taken, and how many it has passed on and why.

With KDAKIT_COUNTS=FILE a process writes its counts there when it ends, and `kdakit doctor` shows them.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

log = logging.getLogger("kdakit.stacks")

_lock = threading.Lock()
_taken: dict[str, Counter[str]] = {}  # {stack: {function: calls}}
_passed: dict[str, Counter[tuple[str, str]]] = {}  # {stack: {(function, reason): calls}}


def take(stack: str, function: str) -> None:
    with _lock:
        _begun(stack)
        _taken[stack][function] += 1


def pass_on(stack: str, function: str, reason: str) -> None:
    with _lock:
        _begun(stack)
        _passed[stack][function, reason] += 1
    log.debug("%s: %s goes to %s itself: %s", stack, function, stack, reason)


def of(stack: str) -> dict[str, Any]:
    """{"taken": {function: calls}, "passed on": {"function: reason": calls}}."""
    with _lock:
        passed = {f"{function}: {reason}": n for (function, reason), n in _passed.get(stack, Counter()).items()}
        return {"taken": dict(_taken.get(stack, {})), "passed on": passed}


def reset() -> None:
    with _lock:
        _taken.clear()
        _passed.clear()


def written() -> dict[str, Any] | None:
    """What an earlier process wrote to KDAKIT_COUNTS."""
    file = Path(os.environ.get("KDAKIT_COUNTS", ""))
    return json.loads(file.read_text()) if file.is_file() else None


def _begun(stack: str) -> None:
    if not _taken and not _passed and os.environ.get("KDAKIT_COUNTS"):
        atexit.register(_write, os.environ["KDAKIT_COUNTS"])
    _taken.setdefault(stack, Counter())
    _passed.setdefault(stack, Counter())


def _write(file: str) -> None:
    try:
        Path(file).write_text(json.dumps({stack: of(stack) for stack in _taken}, indent=1))
    except OSError as problem:  # of somebody's program, which ends here
        log.warning("KDAKIT_COUNTS must be a file that can be written to: %s", problem)
