"""Every Triton kernel compiles for every shipped target on a machine without a GPU, within its shared memory and without heavy spills.

Run as a script with a target's name it prints a JSON line per kernel. Each target has a process: wrong code for one can abort LLVM. With
KDAKIT_EVERY_TILE=1 (`make test-full`) every row of every chip's tile sizes is compiled, forward and backward, which takes minutes a chip.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from itertools import product
from pathlib import Path

import pytest

TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942")
# (dtype, K, V, bounded gate, heads): what is timed, its unbounded twin, the largest heads, float32, few heads; float32 compiled quickly
PROBLEMS = (("bfloat16", 128, 128, True, 96), ("bfloat16", 128, 128, False, 96), ("bfloat16", 256, 256, True, 96),
            ("float32", 128, 128, True, 96), ("bfloat16", 128, 128, False, 4), ("float32", 32, 32, True, 96))  # fmt: skip
FULL = os.environ.get("KDAKIT_FULL") == "1"  # make test-full: every problem for every target
# Where it was timed: all but the largest heads. Elsewhere the forward's kernels, and on an AMD GPU the backward's too. Few heads take other
# kernels on sm_90 alone. float32 prepares twice as many channels in three times the compiler's time.
TAKEN = dict.fromkeys(TARGETS, range(5)) | (
    {} if FULL else dict.fromkeys(("sm_80", "sm_89", "sm_100"), (0,)) | {"sm_90": (0, 1, 4, 5), "gfx942": (0, 5)}
)
ODD = ("bfloat16", 101, 128, True, 1)  # rows of an odd number of elements: loads of two bytes
TRAINED = dict.fromkeys(TAKEN, (0,)) | ({"sm_90": (0, 3)} if FULL else dict.fromkeys(("sm_80", "sm_89", "sm_100"), ()))
# {(target, dtype): chips with the same instructions}: what they launch alike is compiled for the target, and held to their shared memory.
STANDS_FOR = {} if FULL else {("sm_80", "bfloat16"): ("sm_89",), ("sm_80", "float32"): ("sm_89",)}
FORWARD_KERNELS = {"prepare_kernel", "scan_kernel", "step_kernel"}
NVIDIA_KERNELS = {"prepare_normed_kernel", "rebuild_normed_kernel", "gradient_normed_kernel"}
BACKWARD_KERNELS = {"replay_kernel", "reverse_kernel", "products_kernel", "sums_kernel", "restore_kernel"}
WIDE_KERNELS = {"wide_replay_kernel", "wide_reverse_kernel"}
PLAIN_KERNELS = {"rebuild_kernel", "gradient_kernel"}  # of problems that the normed ones do not take; theirs on every chip takes too long
PLAIN = ("sm_90", "gfx942") if FULL else ("gfx942",)
# Bytes of stack per thread: spills that were measured not to matter, or that nobody has had a reason to remove yet.
STACK = 1536
TIMED, TIMED_STACK = "K128 V128 C64 bfloat16", 400  # on sm_90, where it is timed


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile(target):
    rows = compiled(target)
    needed = FORWARD_KERNELS | BACKWARD_KERNELS
    needed |= {"parts_kernel", "combine_kernel", "staged_scan_kernel"} if target == "sm_90" else set()
    needed |= {"wide_scan_kernel", *WIDE_KERNELS} if target == "sm_90" else set()
    needed |= NVIDIA_KERNELS if target.startswith("sm_") else set()
    needed |= PLAIN_KERNELS if target in PLAIN else set()
    trained = {"scan_kernel", "reverse_kernel", "replay_kernel", "products_kernel"}
    if not TRAINED[target]:
        needed, trained = {"prepare_normed_kernel", "scan_kernel", "step_kernel"}, {"scan_kernel"}
        needed |= {"prepare_kernel"} if {3, 5} & {*TAKEN[target]} else set()
    assert {r["kernel"] for r in rows} == needed
    rows = [r for r in rows if not r["elsewhere"]]
    assert trained <= {r["kernel"] for r in rows}, "their tiles differ"
    for row in rows:
        check(target, row)
        assert row["new"], f"compiled again for another length: {row}"


@pytest.mark.skipif(os.environ.get("KDAKIT_EVERY_TILE") != "1", reason="KDAKIT_EVERY_TILE=1 is not set: minutes a chip")
@pytest.mark.parametrize("target", TARGETS)
def test_every_row_of_tile_sizes_compiles(target):
    for row in compiled(target, "every"):
        check(target, row)


NAMES = """
import importlib, pkgutil, sys
from kdakit.backends.triton_gpu import kernels as room
from kdakit.backends.triton_gpu.runtime import names
files = [importlib.import_module(f"{room.__name__}.{x.name}") for x in pkgutil.iter_modules(room.__path__)]
kernels = [x for file in files for n, x in sorted(vars(file).items()) if n.endswith("_kernel")]
for kernel in kernels[:: int(sys.argv[1])]:
    names.settle(kernel)
print(len(kernels), *(kernel.cache_key for kernel in kernels))
"""


def test_names_in_the_cache_do_not_depend_on_what_came_first():
    """A second process finds what a first one compiled, in whatever order both compile."""
    pytest.importorskip("triton")
    import fresh

    def names(step):
        done = fresh.run("-c", NAMES, step, TRITON_INTERPRET="0")
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.split()

    forward = names("1")
    assert int(forward[0]) >= 20 and len(set(forward)) == len(forward) and names("-1") == forward


FACTORS = """
import sys
import torch
from triton import compiler
from triton._C.libtriton import ir
from triton.runtime import driver
from triton_offline import offline_driver
from kdakit.backends.triton_gpu import call
from kdakit.backends.triton_gpu.config import CHIPS, choose
from kdakit.cases import Case
from kdakit.problem import Arrays

def compile_until_layouts_are_known(src, target=None, options=None, **rest):
    backend, stages, context, metadata = compiler.make_backend(target), {}, ir.context(), {}
    parsed = backend.parse_options(dict(options, **src.parse_options()))
    ir.load_dialects(context)
    backend.load_dialects(context)
    backend.add_stages(stages, parsed, src.language)
    module = src.make_ir(target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)
    print(stages["ttgir"](stages["ttir"](module, metadata), metadata))

driver.set_active(offline_driver(CHIPS["sm_90"]))
compiler.compile = compile_until_layouts_are_known
case = Case("given", "", T=64, H=1, HV=1, K=16, V=16)
problem = case.problem("bfloat16")
given = zip(case.arrays("bfloat16"), case.dtypes("bfloat16"), strict=True)
arrays = Arrays(*(None if x is None else torch.empty(x.shape, dtype=getattr(torch, d), device="meta") for x, d in given))
assert arrays.beta.dtype == torch.bfloat16
kernel, args, constants, options = call.launches(problem, arrays, choose(problem, CHIPS["sm_90"]))[0]
kernel.warmup(*args, grid=(1,), **constants, **options)
"""


def test_a_beta_in_16_bits_leaves_float32_factors_as_they_are():
    """Where one is multiplied into them, Triton lays them out for 16-bit numbers, two side by side: 8.4 ms a step instead of 6.9."""
    pytest.importorskip("triton")
    import fresh

    done = fresh.run("-c", FACTORS, TRITON_INTERPRET="0", PYTHONPATH=with_helpers())
    assert done.returncode == 0, done.stderr[-2000:]
    widths = re.findall(r"xf32, #ttg\.dot_op<\{opIdx = \d, parent = #mma\d*, kWidth = (\d)\}>>", done.stdout)
    assert len(widths) > 20 and {*widths} == {"1"}


SUMS = """
import sys
import triton
import triton.language as tl
from triton import compiler
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton_offline import offline_driver
from kdakit.backends.triton_gpu.config import CHIPS
from kdakit.backends.triton_gpu.device.matrix import rounded_product

@triton.jit
def rounded_product_kernel(p_a, p_b, p_out):
    o_m, o_r = tl.arange(0, 32), tl.arange(0, 64)
    b_a, b_b = tl.load(p_a + o_m[:, None] * 64 + o_r[None, :]), tl.load(p_b + o_r[:, None] * 32 + o_m[None, :])
    tl.store(p_out + o_m[:, None] * 32 + o_m[None, :], rounded_product(b_a, b_b))

driver.set_active(offline_driver(CHIPS["sm_90"]))
source = compiler.ASTSource(rounded_product_kernel, {"p_a": "*fp32", "p_b": "*fp32", "p_out": "*fp32"}, {})
print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttgir"])
"""


def test_sums_that_round_stay_apart(tmp_path):
    """Of a sum and a product Triton makes one that begins with the sum, if it can: then a matrix unit cuts it off again."""
    pytest.importorskip("triton")
    import fresh

    script = tmp_path / "sums.py"
    script.write_text(SUMS)
    done = fresh.run(script, TRITON_INTERPRET="0", PYTHONPATH=with_helpers())
    assert done.returncode == 0, done.stderr[-2000:]
    begun = re.findall(r"tt\.dot %\S+, %\S+, (%\w+)", done.stdout)
    assert len(begun) == 9 and sum(name.startswith("%cst") for name in begun) == 5, "four of 16 tokens each, and all the smaller parts"


def with_helpers() -> str:
    return os.pathsep.join([str(Path(__file__).parents[1] / "helpers"), *filter(None, [os.environ.get("PYTHONPATH")])])


def check(target: str, row: dict) -> None:
    assert row["shared"] <= row["limit"], row
    assert row["stack"] <= (TIMED_STACK if target == "sm_90" and TIMED in row["problem"] else STACK), row
    assert row["registers"] > 16, f"the compiler left nothing of {row}"
    assert not row.get("lost"), f"the assembler has lost addresses of {row}"
    assert row["dtype"] != "float32" or not row["inexact"], f"off to one side, which sums over tokens keep: {row}"


def compiled(*words: str) -> list[dict]:
    pytest.importorskip("triton")
    import fresh  # which a script has no path to

    with tempfile.TemporaryDirectory() as cache:
        done = fresh.run(__file__, *words, TRITON_CACHE_DIR=cache, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def covering(target: str) -> list[tuple]:
    """Problems that reach every row of the chip's tile sizes with the longest keys that do, few of them."""
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
    largest = {row: max(K for (_, K, *_), rows in reach.items() if row in rows) for row in left}
    reach = {p: {row for row in rows if p[1] == largest[row]} for p, rows in reach.items()}
    while left:
        chosen.append(max(reach, key=lambda p: len(reach[p] & left)))
        left -= reach[chosen[-1]]
    return chosen


def _case(dtype: str, K: int, V: int, bounded: bool, H: int):
    from kdakit.cases import FUSED, Case

    options = FUSED | {"chunk_size": 64} | ({"lower_bound": -5.0} if bounded else {})
    return Case("offline", "", T=1, H=H, HV=H, K=K, V=V, gate="raw", beta="logits", A_log=True, dt_bias=True, options=options)


def problem_of(dtype: str, K: int, V: int, bounded: bool, H: int, T: int):
    """A problem, and arrays that have its shapes and dtypes only."""
    import torch

    from kdakit.problem import Arrays

    case = _case(dtype, K, V, bounded, H)
    shapes = [None if x is None else (1, T, *x.shape[2:]) if x.shape[:2] == (1, 1) else x.shape for x in case.arrays(dtype)[:5]]
    shapes += [None if x is None else x.shape for x in case.arrays(dtype)[5:]]
    arrays = Arrays(*(None if s is None else torch.empty(s, dtype=getattr(torch, d), device="meta")
                      for s, d in zip(shapes, case.dtypes(dtype), strict=True)))  # fmt: skip
    return case.problem(dtype).replace(T=T), arrays


def compile_all(target: str, every: bool = False) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
    import triton_code
    from lost_addresses import lost_addresses, two_formats
    from triton.runtime import driver
    from triton_offline import offline_driver, resources

    from kdakit.backends.triton_gpu import call
    from kdakit.backends.triton_gpu import config as configs
    from kdakit.backends.triton_gpu.runtime import launch

    chip, seen = configs.CHIPS[target], set()
    driver.set_active(offline_driver(chip))

    def launches(problem, arrays, chip):
        """[(what is compiled, how it is launched)]."""
        known = call.launches(problem, arrays, configs.choose(problem, chip))
        if not every and not FULL:  # a loss of the outputs alone: its forms have less in them
            known = [x for x in known if x[2].get("HAS_FINAL", True) or x[0].__name__ not in BACKWARD_KERNELS | WIDE_KERNELS]
        return [((x[0].__name__, list(map(launch.specialised, x[1])), *x[2:]), x) for x in known]

    def launched_by(what, problem, arrays, chips):
        return [c for c in chips if what in [w for w, _ in launches(problem, arrays, configs.CHIPS[c])]]

    def compile_launches(problem, arrays, longer, only=None):
        first = [t for (t, dtype), chips in STANDS_FOR.items() if target in chips and dtype == problem.dtype and not every]
        others = STANDS_FOR.get((target, problem.dtype), ())
        for what, (kernel, args, constants, options) in launches(problem, arrays, chip):
            if only not in (None, kernel.__name__):
                continue
            elsewhere = bool(launched_by(what, problem, arrays, first))
            facts = dict(kernel=kernel.__name__, problem=str(problem), new=not longer, elsewhere=elsewhere)
            if not elsewhere:
                made = kernel.warmup(*args, grid=(1,), **constants, **options)
                if longer and id(made) in seen:
                    continue
                seen.add(id(made))
                alike = (target, *launched_by(what, problem, arrays, others))
                limit = min(configs.CHIPS[c].shared_memory for c in alike)
                facts |= dict(shared=made.metadata.shared, limit=limit, code=triton_code.of_compiled(made), **resources(made))
                inexact = re.findall(r"(?:lg2|ex2)\.approx", made.asm.get("ptx", ""))
                facts |= dict(dtype=problem.dtype, inexact=sorted(set(inexact)))
                if two_formats(made.asm.get("ptx", "")):
                    facts |= dict(lost=lost_addresses(made.asm["cubin"]))
            print(json.dumps(facts), flush=True)

    for index, sizes in enumerate(covering(target) if every else PROBLEMS):
        if not every and index not in TAKEN.get(target, range(5)):
            continue
        trained = every or index in TRAINED[target]
        for longer in (False,) if every else (False, True):
            problem, arrays = problem_of(*sizes, T=1000 if longer else 128)
            if every or FULL or not trained:  # one that keeps more stands for it
                compile_launches(problem, arrays, longer)
            compile_launches(problem.replace(op="recurrent"), arrays, longer)
            if trained:
                compile_launches(problem.replace(needs_grad=True), arrays, longer)
    if target == "sm_90" and not every:
        compile_launches(*problem_of(*ODD, T=128), False, None if FULL else "prepare_normed_kernel")
        if not FULL:  # of the largest heads what no others launch
            compile_launches(*problem_of("bfloat16", 256, 256, True, 96, T=128), False, "wide_scan_kernel")
            for D, options in ((256, {}), (256, dict(l2norm=False, scale=0.125)), (192, {})):  # the second: a tile more a stage
                problem, arrays = problem_of("bfloat16", D, D, True, 96, T=128)
                for kernel in sorted(WIDE_KERNELS):
                    compile_launches(problem.replace(needs_grad=True, **options), arrays, False, kernel)
        problem, arrays = problem_of("bfloat16", 128, 128, True, 96, T=128)  # keys as they are, scale a power of 2: see config.exact_q
        compile_launches(problem.replace(needs_grad=True, l2norm=False, scale=0.125), arrays, False, "reverse_kernel")
        if FULL:  # tiles and states that are kept
            keeping, arrays = dict(needs_grad=True, disable_recompute=True, has_initial_state=False), arrays._replace(initial_state=None)
            for name in ("prepare_normed_kernel", "scan_kernel"):
                compile_launches(problem.replace(**keeping), arrays, False, name)
            for K, heads in ((128, 32), (64, 96)):
                problem, arrays = problem_of("bfloat16", K, K, True, heads, T=128)
                compile_launches(problem.replace(**keeping), arrays._replace(initial_state=None), False, "staged_scan_kernel")


if __name__ == "__main__":
    compile_all(sys.argv[1], sys.argv[2:] == ["every"])
