"""Build libkdakit.so with nvcc alone: `kdakit build-cuda`, or in a checkout `make cuda`.

CMakeLists.txt builds the same sources for C and C++ users, with a static library beside it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from kdakit.backends.cuda.library import PLACE

ARCHITECTURES = ("80", "89", "90a", "100a")
FLAGS = ("-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-Xptxas", "-v")


class Usage(NamedTuple):
    """What the compiler says of one kernel on one architecture."""

    kernel: str
    architecture: str
    registers: int
    spills: int
    stack: int


def source_folder() -> Path:
    """csrc/ of the checkout, or the copy of it that a wheel carries."""
    inside = Path(__file__).with_name("csrc")
    return inside if inside.exists() else Path(__file__).parents[4] / "csrc"


def sources() -> list[Path]:
    """The library's files: the ABI and the kernels."""
    root = source_folder()
    return [*sorted(root.glob("*.cu")), *sorted((root / "prefill").glob("*.cu")), *sorted((root / "backward").glob("*.cu"))]


def for_hopper(source: Path) -> bool:
    """The bfloat16 kernels, which only sm_90a has."""
    return source.name.startswith("hopper_")


def nvcc() -> str | None:
    """The compiler: $CUDACXX, or on the path, or in $CUDA_HOME."""
    for found in (
        os.environ.get("CUDACXX"),
        shutil.which("nvcc"),
        os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc"),
    ):
        if found and Path(found).is_file():
            return found
    return None


def unbuildable() -> str | None:
    """Why nothing can be built here; None: it can."""
    if nvcc() is None:
        return "nvcc was not found: install the CUDA toolkit, or set CUDACXX or CUDA_HOME"
    if not (source_folder() / "c_api.cu").exists():
        return f"the sources are not at {source_folder()}: build from a checkout or an installed wheel"
    return None


def compile_one(source: Path, target: Path, architectures: tuple[str, ...]) -> str:
    """One object file; returns the compiler's report."""
    if for_hopper(source):
        architectures = ("90a",)
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    hopper = ["-DKDAKIT_HOPPER"] if any(map(for_hopper, sources())) and "90a" in architectures else []
    command = [str(nvcc()), *FLAGS, *hopper, *codes, "-c", "-o", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvcc failed on {source.name}:\n{done.stderr[-4000:]}")
    return done.stdout + done.stderr


def build(target: Path = PLACE, architectures: tuple[str, ...] = ARCHITECTURES, jobs: int = 1) -> list[Usage]:
    """Compile and link; returns every kernel's resource usage."""
    reason = unbuildable()
    if reason is not None:
        raise RuntimeError(reason)
    chosen = [s for s in sources() if not for_hopper(s) or "90a" in architectures]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        objects = [Path(folder) / f"{s.stem}.o" for s in chosen]
        reports = list(pool.map(lambda pair: compile_one(*pair, architectures), zip(chosen, objects, strict=True)))
        target.parent.mkdir(parents=True, exist_ok=True)
        link = [str(nvcc()), "-shared", "-cudart", "static", "-Xlinker", "--no-undefined", "-o", str(target), *map(str, objects)]
        done = subprocess.run(link, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"linking {target.name} failed:\n{done.stderr[-4000:]}")
    return [usage for report in reports for usage in usages(report)]


def build_jax(library: Path = PLACE) -> Path:
    """libkdakit_jax.so beside a `library` that has been built, whatever its name: the XLA custom call, with the headers of the installed
    jaxlib."""
    import jax

    target = library.with_name("libkdakit_jax.so")
    compiler = os.environ.get("CXX", "g++")
    command = [
        compiler, "-O2", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", f"-I{jax.ffi.include_dir()}", "-o", str(target),
        str(source_folder() / "xla_ffi.cpp"), f"-L{library.parent}", f"-l:{library.name}", "-Wl,-rpath,$ORIGIN",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{compiler} failed on xla_ffi.cpp:\n{done.stderr[-4000:]}")
    return target


def usages(report: str) -> list[Usage]:
    """The kernels in the report of `ptxas -v`; what the functions they call spill is counted with them."""
    entry = re.compile(r"Compiling entry function '(?P<name>\w+)' for 'sm_(?P<arch>\w+)'")
    spills = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
    starts = list(entry.finditer(report))
    found = []
    for m, end in zip(starts, [*(m.start() for m in starts[1:]), len(report)], strict=False):
        functions = [[int(n) for n in numbers] for numbers in spills.findall(report, m.end(), end)]
        registers = re.compile(r"Used (\d+) registers").search(report, m.end(), end)
        if functions and registers:
            spilled = sum(stores + loads for _, stores, loads in functions)
            found.append(Usage(m["name"], m["arch"], int(registers[1]), spilled, functions[0][0]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kdakit.backends.cuda.build", description=__doc__)
    parser.add_argument("--arch", nargs="+", default=list(ARCHITECTURES), metavar="SM", help=f"default: {' '.join(ARCHITECTURES)}")
    parser.add_argument("--out", type=Path, default=PLACE, metavar="FILE", help="default: beside this module")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    for usage in build(args.out, tuple(args.arch), args.jobs):
        print(f"sm_{usage.architecture:<5} {usage.registers:>3} registers {usage.spills:>4} bytes spilled  {usage.kernel}")
    print(f"wrote {args.out}")
    if importlib.util.find_spec("jax") is not None and shutil.which(os.environ.get("CXX", "g++")):
        print(f"wrote {build_jax(args.out)}")


if __name__ == "__main__":
    main()
