"""The kernels over an engine's pages compile for a Hopper on a machine without a GPU: every form of decode, both scans of a prefill.

Run as a script it prints a JSON line per kernel.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest


def test_kernels_compile():
    pytest.importorskip("triton")
    import fresh  # which a script has no path to

    with tempfile.TemporaryDirectory() as cache:
        done = fresh.run(__file__, TRITON_CACHE_DIR=cache, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    kernels = [row["kernel"] for row in rows]
    assert kernels.count("decode_kernel") == 4 and {"scan_kernel", "staged_scan_kernel", "wide_scan_kernel"} <= set(kernels), kernels
    for row in rows:
        assert row["shared"] <= row["limit"] and row["stack"] <= (800 if row["kernel"] == "wide_scan_kernel" else 64), row


def compile_all() -> None:
    import torch
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from kdakit.backends.triton_gpu import config as configs
    from kdakit.backends.triton_gpu.host import pool as pooled
    from kdakit.backends.triton_gpu.runtime import launch
    from kdakit.problem import Arrays, make_options, make_problem
    from kdakit.serving.torch import pages

    sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
    from triton_offline import offline_driver, resources

    chip = configs.CHIPS["sm_90"]
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        if self.__name__.startswith(("prepare", "parts", "combine")):  # know of no pages: test_triton_compiled.py compiles them
            return
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        row = dict(kernel=self.__name__, shared=kernel.metadata.shared, limit=chip.shared_memory, **resources(kernel))
        print(json.dumps(row), flush=True)

    driver.set_active(offline_driver(chip))
    JITFunction.run = compile_only
    launch.launch = lambda kernel, grid, args, constants, **options: kernel[launch.axes(grid)](
        *args, **{n: constants[n] for n in kernel.arg_names[len(args) :]}, **options
    )

    def arrays_of(rows: int, T: int, H: int, cu=None, D: int = 128) -> Arrays:
        zeros = lambda *shape: torch.zeros(shape, dtype=torch.bfloat16)
        x = zeros(rows, T, H, D), zeros(rows, T, H, D), zeros(rows, T, H, D), zeros(rows, T, H, D), zeros(rows, T, H)
        return Arrays(*x, torch.zeros(H), torch.zeros(H * D), cu_seqlens=cu)

    options = dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True, output_final_state=True)

    def problem_of(op: str, arrays: Arrays, v_first: bool):
        return make_problem(op, arrays, make_options(arrays, **options, state_v_first=v_first)).replace(has_initial_state=True)

    memory = torch.zeros(8, 4 * 128 * 128 + 64)
    spans = torch.tensor([0, 2, 4])
    for v_first, T, cu, drafted in ((True, 1, None, False), (True, 4, spans, True), (False, 4, spans, False)):
        held = pages.Pages(memory[:, : 4 * 128 * 128].unflatten(1, (4, 128, 128)), v_first, 1)
        arrays = arrays_of(2 if cu is None else 1, T, 4, cu)
        slots = torch.zeros(2, T, dtype=torch.int32) if drafted else torch.zeros(2, dtype=torch.int32)
        accepted = torch.ones(2, dtype=torch.int32) if drafted else None
        pooled.decode_pages(problem_of("recurrent", arrays, v_first), arrays, held, slots, accepted, torch.empty_like(arrays.v))
    for H, T, D in ((4, 8192, 128), (96, 256, 128), (2, 256, 256)):  # few heads, in parts, and many, and large ones: other scans
        memory = torch.zeros(2, H * D * D + 64)
        held = pages.Pages(memory[:, : H * D * D].unflatten(1, (H, D, D)), True, 1)
        arrays = arrays_of(1, T, H, torch.tensor([0, T]), D)
        one = torch.ones(1, dtype=torch.int64)
        marks = pages.Marks(one * 0, one * 64, one, aligned=H != 4)
        problem = problem_of("chunk", arrays, True)
        config = configs.choose(problem, chip)
        pooled.prefill_pages(problem, arrays, held, one, one.to(torch.int8), marks, config)


if __name__ == "__main__":
    compile_all()
