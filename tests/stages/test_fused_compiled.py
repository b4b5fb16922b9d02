"""The layer's kernels compile for shipped targets on a machine without a GPU, without spills. As a script: JSON lines for a target."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942") if os.environ.get("KDAKIT_FULL") == "1" else ("sm_90",)  # make test-full: all
KERNELS = {
    "convolution_kernel", "convolution_backward_kernel", "weight_sums_kernel", "last_inputs_kernel", "places_kernel", "norm_kernel",
    "norm_backward_kernel", "norm_sums_kernel", "layer_step_kernel", "commit_window_kernel", "swiglu_kernel", "swiglu_backward_kernel",
    "turn_kernel",
}  # fmt: skip
# Short ones, of which nobody waits for bytes.
NARROW = {"places_kernel", "weight_sums_kernel", "norm_sums_kernel", "last_inputs_kernel", "commit_window_kernel"}
# Bytes a thread that four drafted tokens spill: sm_90 was timed with them, sm_100 has not run.
STACK = {"sm_80": 400, "sm_90": 400, "sm_100": 560, "gfx942": 400}


@pytest.mark.parametrize("target", TARGETS)
def test_layer_kernels_compile(target):
    pytest.importorskip("triton")
    import fresh  # which a script has no path to

    with tempfile.TemporaryDirectory() as cache:
        done = fresh.run(__file__, target, TRITON_CACHE_DIR=cache, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {r["kernel"] for r in rows} == KERNELS
    for row in rows:
        assert row["stack"] <= (STACK[target] if row["kernel"] == "layer_step_kernel" else 0) and row["registers"] >= 8, row
        assert row["wide"] or row["kernel"] in NARROW, f"memory is not read in 16, or 8, bytes at a time: {row}"


def launches():
    """What a layer of 32 heads of 128 channels launches, forward and backward, packed and not."""
    import torch

    from kdakit.backends.triton_gpu.runtime import launch
    from kdakit.layers.torch.fused import adjacent, gated_norm, short_convolution, swiglu

    empty = lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype, device="meta")
    sizes = (4096, 4096, 4096)
    x, weight, window, cu = empty(1, 1000, 12576)[..., :12288], empty(12288, 4), empty(2, 3, 12288), empty(3, dtype=torch.int64)
    d_ys, o = [empty(1, 1000, 4096)] * 3, empty(1, 1000, 32, 128)
    with launch.recording() as record:
        short_convolution.forward(x, weight, None, None, None, None, sizes)
        short_convolution.backward(d_ys, [True, True, False, False], x, weight, None, None, None, None, sizes)
        short_convolution.forward(x, weight, None, window, cu, None, sizes)
        short_convolution.backward([*d_ys, None], [True, True, False, True], x, weight, None, window, cu, None, sizes)
        gated_norm.forward(o, empty(128), o, empty(4096), 1e-5)
        gated_norm.backward([o], [True] * 4, o, empty(128), o, empty(4096), 1e-5)
        gated_norm.forward(empty(1000, 2304), empty(2304), None, None, 1e-5)
        gated_norm.backward([empty(1000, 2304)], [True, True, False, False], empty(1000, 2304), empty(2304), None, None, 1e-5)
        gated_norm.forward(empty(40000, 1024), empty(1024), None, None, 1e-5, empty(40000, 1024))
        wide = empty(40000, 1024)
        gated_norm.backward([wide], [True, True, False, False], wide, empty(1024), None, None, 1e-5, wide)
        swiglu.forward(wide, wide)
        swiglu.backward([wide], [True, True], wide, wide)
        adjacent.turned(empty(1, 12288, 8192)[:, :4096].unflatten(1, (32, 128)).permute(0, 3, 1, 2))
        steps()
    return record


# N, T, pool, draft
FORMS = ((1, 1, False, False), (32, 1, False, False), (32, 1, True, False), (32, 4, True, True))
FORMS = (*FORMS, (1, 4, True, True)) if len(TARGETS) > 1 else FORMS


def steps() -> None:
    """One token of one sequence and of 32 in a cache; 32 in a pool; and four drafted ones, of 32 and of one."""
    import torch

    from kdakit.layers.torch import KimiDeltaAttention
    from kdakit.layers.torch.fused import step

    with torch.device("meta"):
        layer = KimiDeltaAttention(hidden_size=64, head_dim=128, num_heads=32).bfloat16()
    empty = lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype, device="meta")
    for N, T, pooled, draft in FORMS:
        cache = step.Carried(*layer.new_cache(N))
        slots = step.Slots(empty(N, dtype=torch.int64), empty(N + 1, dtype=torch.int32), N) if pooled else None
        row = empty(N, T, 12288)
        _, log = step.step(layer, row, empty(N, T, 4096), empty(N, T, 288)[..., -32:], empty(N, T, 4096), cache, cache, slots, draft)
        if draft:
            step.commit_windows(row, list(cache[:3]), slots, log.generation, empty(N, dtype=torch.int64))


def compile_all(target: str) -> None:
    from triton.runtime import driver

    sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
    from triton_offline import offline_driver, resources

    from kdakit.backends.triton_gpu import config as configs

    chip = configs.CHIPS[target]
    driver.set_active(offline_driver(chip))
    for kernel, args, constants, options in launches():
        made = kernel.warmup(*args, grid=(1,), **constants, **options)
        text = made.asm.get("ptx") or made.asm["amdgcn"]
        wide = re.search(r"ld\.global\.v[24]\.b32|load_dwordx[24]|load_b(64|128)", text) is not None
        facts = dict(kernel=kernel.__name__, wide=wide, constants={name: str(value) for name, value in constants.items()})
        print(json.dumps(facts | resources(made)), flush=True)


if __name__ == "__main__":
    compile_all(sys.argv[1])
