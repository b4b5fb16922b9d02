"""The pooled Triton kernels compile for three targets on a machine without a GPU, and keep the state in registers.

Run as a script with a target's name it prints a JSON line per kernel.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

TARGETS = ("sm_80", "sm_90", "gfx942")
# (stored dtype, feedback, [V, K], K, V)
POOLS = (("float32", False, False, 128, 128), ("float32", False, True, 256, 256), ("bfloat16", False, False, 128, 128),
         ("int8", False, False, 128, 128), ("int8", True, True, 64, 48))  # fmt: skip
# Every kind of pool once, those in float32 and int8 where they are timed; with KDAKIT_FULL=1 (make test-full) all on each.
FEWER = {} if os.environ.get("KDAKIT_FULL") == "1" else {"sm_80": (2,), "sm_90": (0, 3, 4), "gfx942": (0,)}
TAKEN = dict.fromkeys(TARGETS, range(5)) | FEWER
STACK = 64


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile(target):
    pytest.importorskip("triton")
    import fresh  # which a script has no path to

    with tempfile.TemporaryDirectory() as cache:
        done = fresh.run(__file__, target, TRITON_CACHE_DIR=cache, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == sum(6 if v_first else 8 for _, _, v_first, _, _ in (POOLS[i] for i in TAKEN[target]))
    assert {r["kernel"] for r in rows} == {
        "decode_kernel",
        "tokens_kernel",
        "draft_kernel",
        "commit_kernel",
        "arrive_kernel",
        "pending_kernel",
    }
    for row in rows:
        assert row["shared"] <= row["limit"] and (row["stack"] <= STACK or row["K"] > 128), row


def compile_all(target: str) -> None:
    import torch
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from kdakit.backends.triton_gpu import config as configs
    from kdakit.backends.triton_gpu.host import pool as pooled
    from kdakit.backends.triton_gpu.runtime import launch
    from kdakit.cases import FUSED, Case
    from kdakit.problem import Arrays
    from kdakit.serving.torch import Draft, StatePool

    sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
    import triton_code
    from triton_offline import offline_driver, resources

    chip = configs.CHIPS[target]
    run, size = JITFunction.run, 0

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        row = dict(kernel=self.__name__, K=size, shared=kernel.metadata.shared, limit=chip.shared_memory, **resources(kernel))
        row["code"] = triton_code.of_compiled(kernel)
        print(json.dumps(row), flush=True)

    driver.set_active(offline_driver(chip))
    JITFunction.run = compile_only
    pooled.chained = lambda device: chip.wgmma
    launch.launch = lambda kernel, grid, args, constants, **options: kernel[launch.axes(grid)](*args, **constants, **options)
    for dtype, feedback, v_first, size, V in (POOLS[i] for i in TAKEN[target]):
        case = Case("offline", "", B=2, T=4, H=2, HV=2, K=size, V=V, gate="raw", beta="logits", A_log=True, dt_bias=True,
                    initial_state=False, options=FUSED | {"lower_bound": -5.0})  # fmt: skip
        arrays = Arrays(*(None if x is None else torch.zeros(x.shape, dtype=getattr(torch, d))
                          for x, d in zip(case.arrays("bfloat16"), case.dtypes("bfloat16"), strict=True)))  # fmt: skip
        problem = case.problem("bfloat16", op="recurrent")
        pool = StatePool(2, 2, size, V, dtype=getattr(torch, dtype), state_v_first=v_first, feedback=feedback, pending=8)
        slots = torch.zeros(2, dtype=torch.int64)
        config = configs.choose(problem, chip)
        pooled.decode(problem, arrays, pool, slots)
        one = Arrays(*(None if x is None else x[:, :1] if x.dim() > 2 else x for x in arrays))
        pooled.decode_pending(problem.replace(T=1), one, pool, slots)
        _, owners, log = pooled.verify(problem, arrays, pool, slots, config)
        draft = Draft(pool, None, *owners, log, {}, None, 4)
        if not v_first:
            pooled.verify(problem, arrays, pool, slots, config, (draft, slots))
        pooled.commit(pool, draft, slots)


if __name__ == "__main__":
    compile_all(sys.argv[1])
