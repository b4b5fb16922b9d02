"""The machine and the software a measurement was made with."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import kdakit

FAILED = "failed: "

# distribution -> what it is needed for
PACKAGES = {
    "numpy": "everything",
    "torch": "kdakit.torch",
    "triton": "Triton kernels",
    "jax": "kdakit.jax",
    "jaxlib": "kdakit.jax",
    "libtpu": "TPU compiler and runtime",
    "safetensors": "weights files, kdakit demo and train",
    "flax": "kdakit.layers.jax and kdakit.models.jax",
    "optax": "training in JAX",
    "rich": "this command line",
    "matplotlib": "plots",
    "fla-core": "bench --against fla",
}
EXTRAS = {"torch": "torch", "jax": "jax", "flax": "flax", "optax": "flax", "safetensors": "models", "matplotlib": "bench"}


def attempt(probe, *args) -> Any:
    """probe(*args), or the reason it failed, in one line."""
    try:
        return probe(*args)
    except (Exception, SystemExit) as problem:
        return failure(problem)


def failure(problem: BaseException) -> str:
    if isinstance(problem, ModuleNotFoundError) and problem.name in EXTRAS:
        return f"{FAILED}{problem.name} is not installed: pip install 'kdakit[{EXTRAS[problem.name]}]'"
    first = (str(problem).strip() or "no message").splitlines()[0]
    return f"{FAILED}{type(problem).__name__}: {first}"


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    found = {name: version(name) for name in PACKAGES}
    return {"kdakit": kdakit.__version__, "python": platform.python_version()} | {n: v for n, v in found.items() if v is not None}


def cpu_model() -> str:
    """The name that Linux gives the processor, or the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return fields.get("model name") or platform.processor() or platform.machine()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def commit() -> str | None:
    """The commit of the checkout that kdakit is imported from, '+changes' where files differ; None for an installed copy."""
    folder = Path(kdakit.__file__).parent

    def git(*args: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def typed(words: list[str]) -> str:
    """The command line. Of files that are named from the root their names alone: where they lay is nobody's business."""
    return shlex.join(["kdakit", *(Path(word).name if word.startswith("/") else word for word in words)])


def describe(device: str | None = None) -> dict[str, Any]:
    """Everything a reader needs to judge a measurement."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": typed(sys.argv[1:]),
        "machine": {
            "cpu": cpu_model(),
            "cores": cores(),
            "architecture": platform.machine(),
            "memory_gib": memory_gib(),
            "system": platform.system(),
            "device": device or "cpu",
        },
        "versions": versions(),
        "commit": commit(),
    }
