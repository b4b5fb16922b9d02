"""Whether kernels run in Triton's interpreter, which is settled when Triton is imported. Needs no Triton itself."""

from __future__ import annotations

import os


def interpreter_asked_for() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


INTERPRETED = interpreter_asked_for()
