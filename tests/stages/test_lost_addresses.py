"""Tiles of 64 channels in the gradient kernel: their addresses survive the assembler, see helpers/lost_addresses.py. Needs no GPU.

Run as a script it prints a JSON line for each assembler there is, with pairs by rows and turned.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

BROKEN = "12.8"


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    pytest.importorskip("triton", minversion="3.6")
    import fresh  # which a script has no path to

    with tempfile.TemporaryDirectory() as cache:
        done = fresh.run(__file__, "ptxas", TRITON_CACHE_DIR=cache, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_turned_pairs_keep_every_address(rows):
    turned = [r for r in rows if r["turned"]]
    assert turned
    assert not any(r["two_formats"] or r["lost"] for r in turned), turned


def test_the_assembler_that_loses_addresses_is_caught(rows):
    by_rows = [r for r in rows if not r["turned"]]
    assert all(r["two_formats"] for r in by_rows), "no place has two formats: is turning still needed?"
    assert all(r["lost"] for r in by_rows if r["version"].startswith(BROKEN)), by_rows


def gradient_kernel(turned: bool):
    """`gradient_normed` with 64 channels as Triton compiles it for Hopper."""
    from test_triton_compiled import problem_of
    from triton.runtime import driver
    from triton_offline import offline_driver

    from kdakit.backends.triton_gpu import call
    from kdakit.backends.triton_gpu import config as configs

    chip = configs.CHIPS["sm_90"]
    driver.set_active(offline_driver(chip))
    problem, arrays = problem_of("bfloat16", 64, 64, True, 64, T=128)
    problem = problem.replace(needs_grad=True)
    for kernel, args, constants, options in call.launches(problem, arrays, configs.choose(problem, chip)):
        if kernel.__name__ == "gradient_normed_kernel":
            assert constants["TURNED"]
            return kernel.warmup(*args, grid=(1,), **(constants | {"TURNED": turned}), **options)
    raise AssertionError("64 channels do not take gradient_normed")


def assembled(ptx: str, assembler: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        subprocess.run([assembler, "--gpu-name=sm_90a", str(source), "-o", str(made)], check=True, capture_output=True)
        return made.read_bytes()


def main() -> None:
    from lost_addresses import lost_addresses, two_formats
    from triton_offline import tool

    assemblers = [tool("ptxas")] if sys.argv[1:] else [x for x in (tool("ptxas"), tool("ptxas-blackwell"), shutil.which("ptxas")) if x]
    for turned in (False, True):
        ptx = gradient_kernel(turned).asm["ptx"]
        for assembler in assemblers:
            said = subprocess.run([assembler, "--version"], capture_output=True, text=True).stdout
            version = said.rpartition("release ")[2].partition(",")[0]
            found = dict(turned=turned, version=version, two_formats=len(two_formats(ptx)), lost=lost_addresses(assembled(ptx, assembler)))
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "helpers")]
    main()
