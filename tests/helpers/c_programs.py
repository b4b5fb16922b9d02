"""The C programs of csrc/tests, linked to the library under test, alone and under compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kdakit.backends.cuda import build, library

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def link(name: str, folder: Path) -> Path:
    """csrc/tests/NAME.c -> folder/NAME."""
    if build.nvcc() is None:
        pytest.skip("nvcc was not found: the C program cannot be built")
    root, target = build.source_folder(), folder / name
    command = [str(build.nvcc()), "-O2", "-cudart", "static", f"-I{root / 'include'}", "-o", str(target), str(root / "tests" / f"{name}.c")]
    subprocess.run([*command, f"-L{library.path().parent}", "-lkdakit", "-lm"], check=True, capture_output=True)
    return target


def run(program: Path, *words: str, tool: str | None = None) -> subprocess.CompletedProcess:
    """tool: of compute-sanitizer."""
    if tool and shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer was not found")
    sanitizer = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "3"] if tool else []
    environment = os.environ | {"LD_LIBRARY_PATH": str(library.path().parent)}
    return subprocess.run([*sanitizer, str(program), *words], capture_output=True, text=True, env=environment)
