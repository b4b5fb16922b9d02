"""launches.cpp as a target of XLA's: compiled on first use with the C++ compiler that Triton needs too, kept in a folder of the user's."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from functools import lru_cache
from pathlib import Path

import jax

TARGET = "kdakit_launches"
HANDLER = "kdakit_xla_launches"
SOURCE = Path(__file__).with_name("launches.cpp")
FLAGS = ("-O2", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden")
_registering = threading.Lock()


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def unbuildable() -> str | None:
    """Why the call cannot be made known to XLA; None: it can."""
    if compiler() is None:
        return "needs a C++ compiler for its call: install g++, or set CXX"
    return _unwritable(folder())


@lru_cache(maxsize=4)
def _unwritable(into: Path) -> str | None:
    if _target(into).exists():
        return None
    there = next(path for path in (into.absolute(), *into.absolute().parents) if os.path.exists(path))
    if into.parts[0] != "~" and there.is_dir() and os.access(there, os.W_OK):  # a "~" that is left: the user has no home
        return None
    return f"needs a folder to keep its compiled call in, and {into} cannot be written to: set KDAKIT_CACHE_DIR"


def register() -> None:
    """Make the call known to XLA, once."""
    with _registering:
        _register()


@lru_cache(maxsize=1)
def _register() -> None:
    library = ctypes.CDLL(str(build(folder())))
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(getattr(library, HANDLER)), platform="CUDA")


def folder() -> Path:
    """Of compiled things: $KDAKIT_CACHE_DIR, or kdakit in the user's cache."""
    if given := os.environ.get("KDAKIT_CACHE_DIR"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "kdakit"


def _target(into: Path) -> Path:
    """The library for this source and this jaxlib."""
    key = hashlib.sha256(SOURCE.read_bytes() + jax.__version__.encode() + " ".join(FLAGS).encode()).hexdigest()[:16]
    return into / f"launches-{key}.so"


def build(into: Path) -> Path:
    """`_target`, whole or not at all."""
    target = _target(into)
    if target.exists():
        return target
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into) as aside:
        made = Path(aside) / target.name
        command = [str(compiler()), *FLAGS, f"-I{jax.ffi.include_dir()}", "-o", str(made), str(SOURCE), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed on {SOURCE.name}:\n{done.stderr[-4000:]}")
        made.replace(target)
    return target
