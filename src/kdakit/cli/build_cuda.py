"""Compile the CUDA library on this machine with nvcc, and say what was done.

From a checkout or from an installed wheel, which carries the sources. Without --arch for the GPUs that are here, or for all that are known
where there is none.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path


def add_arguments(parser) -> None:
    parser.add_argument("--arch", nargs="+", metavar="SM", help="such as 80 89 90a 100a; default: the GPUs of this machine")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: beside the module, or in the user's cache")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)


def run(args) -> int:
    try:
        return make(args)
    except RuntimeError as problem:  # what a compiler says
        print(f"kdakit build-cuda: {problem}", file=sys.stderr)
        return 1


def make(args) -> int:
    from kdakit.backends.cuda import build, library
    from kdakit.measure.choices import UsageError, writable

    reason = build.unbuildable()
    if reason is not None:
        raise UsageError(reason)
    if args.jobs < 1:
        raise UsageError(f"--jobs must be positive, got {args.jobs}")
    found = args.arch or architectures_here()
    chosen = tuple(found or build.ARCHITECTURES)
    target = args.out or (library.PLACE if os.access(library.PLACE.parent, os.W_OK) else library.cache_place())
    if Path(target).parts[0] == "~":
        raise UsageError("there is no home to keep the library in: name a file with --out")
    writable(str(target))
    why = "as asked" if args.arch else "the GPUs of this machine" if found else "no GPU is here: all that are known"
    print(f"compiler   {build.nvcc()} ({compiler_version(build.nvcc())})")
    print(f"sources    {build.source_folder()}")
    print(f"for        {', '.join(f'sm_{a}' for a in chosen)} ({why})")
    began = time.perf_counter()
    usages = build.build(target, chosen, args.jobs)
    spilled = sum(u.spills > 0 for u in usages)
    print(f"compiled   {len(usages)} kernels in {time.perf_counter() - began:.0f} s; {spilled} of them spill registers")
    print(f"wrote      {target} ({target.stat().st_size / 2**20:.1f} MiB)")
    library.check(target)
    print("loads      yes, with the ABI that this package needs")
    if target != library.path():
        print(f"           set {library.VARIABLE}={target} to use it")
    if importlib.util.find_spec("jax") is not None and shutil.which(os.environ.get("CXX", "g++")):
        print(f"wrote      {build.build_jax(target)} (the same for JAX)")
    return 0


def architectures_here() -> list[str]:
    """As nvcc names them: '90a' for compute capability 9.0."""
    try:
        asked = subprocess.run(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True, text=True)
    except FileNotFoundError:
        return []
    if asked.returncode:
        return []
    capabilities = sorted({line.strip() for line in asked.stdout.splitlines() if line.strip()})
    return [c.replace(".", "") + ("a" if c.split(".")[0] in ("9", "10") else "") for c in capabilities]


def compiler_version(nvcc: str | None) -> str:
    lines = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True).stdout.splitlines()
    return next((line.split(", ")[1] for line in lines if "release" in line), "of unknown version")
