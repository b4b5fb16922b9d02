"""Every Triton kernel compiles for every shipped target on a machine without a GPU, within its shared memory and without heavy spills.

Run as a script with a target's name it prints a JSON line per kernel. Each target has a process: wrong code for one can abort LLVM. With
KDAKIT_EVERY_TILE=1 every row of every chip's tile sizes is compiled, forward and backward, which takes minutes a chip.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from itertools import product

import pytest

TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942")
# (dtype, K, V, bounded gate, heads): what is timed, its unbounded twin, the largest heads, float32, few heads
PROBLEMS = (("bfloat16", 128, 128, True, 96), ("bfloat16", 128, 128, False, 96), ("bfloat16", 256, 256, True, 96),
            ("float32", 128, 128, True, 96), ("bfloat16", 128, 128, True, 4))  # fmt: skip
FORWARD_KERNELS = {"prepare_kernel", "scan_kernel", "step_kernel"}
NVIDIA_KERNELS = {"prepare_normed_kernel", "rebuild_normed_kernel", "gradient_normed_kernel"}
BACKWARD_KERNELS = {"replay_kernel", "reverse_kernel", "products_kernel", "restore_kernel"}
PLAIN_KERNELS = {"rebuild_kernel", "gradient_kernel"}  # of problems that the normed ones do not take; theirs on every chip takes too long
PLAIN = ("sm_90", "gfx942")
# Bytes of stack per thread: spills that were measured not to matter, or that nobody has had a reason to remove yet.
STACK = 1536
TIMED, TIMED_STACK = "K128 V128 C64 bfloat16", 400  # on sm_90, where it is timed


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile(target):
    rows = compiled(target)
    needed = FORWARD_KERNELS | BACKWARD_KERNELS
    needed |= {"parts_kernel"} if target == "sm_90" else set()
    needed |= NVIDIA_KERNELS if target.startswith("sm_") else set()
    needed |= PLAIN_KERNELS if target in PLAIN else set()
    assert {r["kernel"] for r in rows} == needed
    for row in rows:
        check(target, row)
        assert row["new"], f"compiled again for another length: {row}"


@pytest.mark.skipif(os.environ.get("KDAKIT_EVERY_TILE") != "1", reason="KDAKIT_EVERY_TILE=1 is not set: minutes a chip")
@pytest.mark.parametrize("target", TARGETS)
def test_every_row_of_tile_sizes_compiles(target):
    for row in compiled(target, "every"):
        check(target, row)


NAMES = """
import sys
from kdakit.backends.triton_gpu import launch, names, training
kernels = [x for m in (launch, training) for n, x in sorted(vars(m).items()) if n.endswith("_kernel")]
for kernel in kernels[:: int(sys.argv[1])]:
    names.settle(kernel)
print(len(kernels), *(kernel.cache_key for kernel in kernels))
"""


def test_names_in_the_cache_do_not_depend_on_what_came_first():
    """A second process finds what a first one compiled, in whatever order both compile."""
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "0"}

    def names(step):
        return subprocess.run([sys.executable, "-c", NAMES, step], capture_output=True, text=True, env=env, check=True).stdout.split()

    forward = names("1")
    assert int(forward[0]) >= 12 and len(set(forward)) == len(forward) and names("-1") == forward


def check(target: str, row: dict) -> None:
    assert row["shared"] <= row["limit"], row
    assert row["stack"] <= (TIMED_STACK if target == "sm_90" and TIMED in row["problem"] else STACK), row
    assert row["registers"] > 16, f"the compiler left nothing of {row}"


def compiled(*words: str) -> list[dict]:
    pytest.importorskip("triton")
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "TRITON_CACHE_DIR": cache, "TRITON_INTERPRET": "0"}
        done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def covering(target: str) -> list[tuple]:
    """Problems that reach every row of the chip's tile sizes, few of them."""
    from kdakit.backends.triton_gpu import config as configs
    from kdakit.backends.triton_gpu import tiles

    chip, table = configs.CHIPS[target], tiles.load(target)["tiles"]
    base = {bounded: _case("bfloat16", 16, 16, bounded, 1).problem("bfloat16") for bounded in (True, False)}
    reach = {}
    sizes = product(("bfloat16", "float32", "float16"), (128, 64, 32, 16, 256), (128, 32, 256), (True, False), (96, 50, 4))
    for dtype, K, V, bounded, H in sizes:
        problem = base[bounded].replace(dtype=dtype, K=K, V=V, H=H, HV=H)
        facts = configs.facts(problem, chip, configs.choose(problem, chip).normed)
        facts |= {"K_is": facts["K"], "V_is": facts["V"]}
        first = {kernel: next(i for i, r in enumerate(rows) if tiles.holds(r["when"], facts)) for kernel, rows in table.items()}
        reach[dtype, K, V, bounded, H] = set(first.items())
    left, chosen = set().union(*reach.values()), []
    while left:
        chosen.append(max(reach, key=lambda p: len(reach[p] & left)))
        left -= reach[chosen[-1]]
    return chosen


def _case(dtype: str, K: int, V: int, bounded: bool, H: int):
    from kdakit.cases import FUSED, Case

    options = FUSED | {"chunk_size": 64} | ({"lower_bound": -5.0} if bounded else {})
    return Case("offline", "", T=1, H=H, HV=H, K=K, V=V, gate="raw", beta="logits", A_log=True, dt_bias=True, options=options)


def compile_all(target: str, every: bool = False) -> None:
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from kdakit.backends.triton_gpu import ahead
    from kdakit.backends.triton_gpu import config as configs
    from kdakit.problem import Arrays

    chip = configs.CHIPS[target]
    gpu = GPUTarget("hip", target, 64) if chip.hip else GPUTarget("cuda", int(target[3:]), 32)

    class Driver:
        """As much of a GPU driver as a compilation asks for."""

        def get_current_target(self):
            return gpu

        def get_current_device(self):
            return 0

        def get_current_stream(self, device=None):
            return 0

        def get_active_torch_device(self):
            return torch.device("cpu")

        def is_active(self):
            return True

        def map_python_to_cpp_type(self, name):
            return name

    driver.set_active(Driver())
    seen: set[int] = set()

    def compile_launches(problem, arrays, longer):
        for kernel, args, constants, options in ahead.launches(problem, arrays, configs.choose(problem, chip)):
            made = kernel.warmup(*args, grid=(1,), **constants, **options)
            if longer and id(made) in seen:
                continue
            seen.add(id(made))
            sizes = dict(shared=made.metadata.shared, limit=chip.shared_memory, **resources(made))
            print(json.dumps(dict(kernel=kernel.__name__, problem=str(problem), new=not longer, **sizes)), flush=True)

    for index, (dtype, K, V, bounded, H) in enumerate(covering(target) if every else PROBLEMS):
        case = _case(dtype, K, V, bounded, H)
        for longer in (False,) if every else (False, True):
            T = 1000 if longer else 128
            problem = case.problem(dtype).replace(T=T)
            shapes = [None if x is None else (1, T, *x.shape[2:]) if x.shape[:2] == (1, 1) else x.shape for x in case.arrays(dtype)[:5]]
            rest = [None if x is None else x.shape for x in case.arrays(dtype)[5:]]
            arrays = Arrays(*(None if s is None else torch.empty(s, dtype=getattr(torch, d), device="meta")
                              for s, d in zip(shapes + rest, case.dtypes(dtype), strict=True)))  # fmt: skip
            compile_launches(problem, arrays, longer)
            compile_launches(problem.replace(op="recurrent"), arrays, longer)
            if every or index == 0 or (index == 3 and target == "sm_90"):  # a backward takes a while
                compile_launches(problem.replace(needs_grad=True), arrays, longer)


def resources(kernel) -> dict[str, int]:
    """Registers and bytes of stack per thread."""
    if "amdgcn" in kernel.asm:
        found = [re.search(rf"\.{n}:\s+(\d+)", kernel.asm["amdgcn"]) for n in ("vgpr_count", "private_segment_fixed_size")]
        return dict(registers=int(found[0][1]), stack=int(found[1][1]))
    from triton.backends import nvidia

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = os.path.join(os.path.dirname(nvidia.__path__[0] + "/"), "bin", "cuobjdump")
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return dict(registers=int(found[1]), stack=int(found[2]))


if __name__ == "__main__":
    compile_all(sys.argv[1], sys.argv[2:] == ["every"])
