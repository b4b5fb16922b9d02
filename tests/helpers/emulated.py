"""CUDA kernels compiled for the CPU: csrc/tests/emulate_NAME.cpp as a library, built once for all workers and processes of a session."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kdakit.backends.cuda import build

OPTIONS = ("-std=c++17", "-shared", "-fPIC", "-DKDA_EMULATE", "-Wall", "-Wno-unknown-pragmas")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ was not found")


def load(name: str, optimise: str = "-O1") -> ctypes.CDLL:
    target = Path(os.environ["KDAKIT_SESSION"]) / f"emulate_{name}.so"
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # who comes second waits for what the first one builds
        if not target.exists():
            part = target.with_suffix(".part")
            source = build.source_folder() / "tests" / f"emulate_{name}.cpp"
            done = subprocess.run(["g++", optimise, *OPTIONS, "-o", str(part), str(source)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-3000:]
            part.replace(target)
    return ctypes.CDLL(str(target))
