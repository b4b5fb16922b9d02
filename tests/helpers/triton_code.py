"""Hashes of what the Triton kernels compile to, without line information: moves and new names leave them as they are.

    python tests/helpers/triton_code.py sm_90 gfx942 > before.jsonl        # all problems: minutes
    python tests/helpers/triton_code.py sm_90 --problems "K128 V128 H96"   # those whose names have this in them

prints a JSON line per launch of many problems. `launch`: its grid, numbers, constants and options. `code`: Triton's first representation
of the kernel, of which all further ones are made; `of_compiled` is the hash of PTX or AMD's assembly, which `test_triton_compiled.py` and
`test_pool_compiled.py` print.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import sys
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

DEBUG = re.compile(r"^\s*(\.loc|\.file|\.section\s+\.debug|//|;).*$|\.L__?\w+:|\$L__\w+:|\.Ltmp\w+:|\.Lfunc\w+:", re.MULTILINE)
BLOCK = re.compile(r"\.section\s+\.debug\w*\s*\{.*?\n\s*\}", re.DOTALL)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def of_compiled(kernel) -> str:
    """Of PTX or AMD's assembly."""
    text = kernel.asm.get("ptx") or kernel.asm["amdgcn"].partition(".section\t.debug")[0]
    text = BLOCK.sub("", text)
    return digest("\n".join(line.partition("//")[0].rstrip() for line in DEBUG.sub("", text).splitlines() if line.strip()))


def of_representation(text: str) -> str:
    """Of MLIR, whose locations may hold parentheses within parentheses, and whose values are named after variables: here by their order.
    A name may come again in the next block."""
    text = re.sub(r"^#loc.*\n", "", text, flags=re.MULTILINE)  # of which there may be more
    text = re.sub(r" loc\((?:[^()]|\([^()]*\))*\)", "", text)
    order: dict[str, int] = {}
    made = count()

    def numbered(name: re.Match[str]) -> str:
        if name[2] or name[1] not in order:
            order[name[1]] = next(made)
        return f"%{order[name[1]]}{name[2]}"

    return digest(re.sub(r"(%\w+)(:\d+ =| =|)", numbered, text))


def stop_after_first_stage(codes: list[str]) -> None:
    """From here on Triton compiles no kernel further than to its first representation, of which the hash goes to the list."""
    from triton import compiler
    from triton._C.libtriton import ir

    def compile_little(src, target=None, options=None, **rest):
        backend, stages = compiler.make_backend(target), {}
        parsed = backend.parse_options(dict(options, **src.parse_options()))
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        backend.add_stages(stages, parsed, src.language)
        module = src.make_ir(target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)
        codes.append(of_representation(str(stages["ttir"](module, {}))))

    compiler.compile = compile_little


def remember_grids(grids: list) -> None:
    """From here on the grid of every launch that is recorded goes to the list."""
    from kdakit.backends.triton_gpu.runtime import launch

    usual = launch.launch

    def remember(kernel, grid, *args, **options):
        grids.append(launch.axes(grid))
        return usual(kernel, grid, *args, **options)

    launch.launch = remember


def described(x) -> str:
    return f"{x.dtype}{tuple(x.shape)}{x.stride()}" if hasattr(x, "stride") else repr(x)


def problems():
    """(label, problem, arrays, kinds): every gate, dtype, padded size, option that a kernel is compiled for."""
    import torch

    from kdakit.cases import CASES, FUSED, Case
    from kdakit.problem import Arrays

    named = ("plain", "odd_sizes", "wide", "tall", "grouped", "v_first", "chunk16", "keep", "gate_bounded", "softplus", "lower_bound",
             "lower_bound_bare", "no_state", "no_final", "varlen", "varlen_fused")  # fmt: skip
    cases = [CASES[name] for name in named]
    for K, V, H, bounded in ((16, 16, 96, True), (64, 64, 96, False), (128, 128, 96, True), (128, 128, 40, False), (128, 128, 4, True),
                             (64, 64, 2, True), (256, 256, 96, True), (101, 128, 1, True)):  # fmt: skip
        options = FUSED | {"chunk_size": 64} | ({"lower_bound": -5.0, "safe_gate": True} if bounded else {})
        name = f"K{K} V{V} H{H} {'bounded' if bounded else 'softplus'}"
        cases.append(Case(name, "", T=128, H=H, HV=H, K=K, V=V, gate="raw", beta="logits", A_log=True, dt_bias=True, options=options))
    for case in cases:
        dtypes = ("bfloat16", "float32") if case.name in ("plain", "grouped", "v_first", "varlen") else ("bfloat16",)
        for dtype in ("bfloat16", "float16", "float32") if case.name not in CASES else dtypes:
            small = dataclasses.replace(case, T=1) if case.name not in CASES else case
            given = zip(small.arrays(dtype), case.dtypes(dtype), strict=True)
            shapes = [None if x is None else ((1, case.T, *x.shape[2:]) if small is not case and x.shape[:2] == (1, 1) else x.shape, d)
                      for x, d in given]  # fmt: skip
            arrays = Arrays(*(None if s is None else torch.empty(s[0], dtype=getattr(torch, s[1]), device="meta") for s in shapes))
            yield case.name, small.problem(dtype).replace(T=case.T), arrays


def launches_of_pools(chip):
    """(label, what is launched) of every call over a pool of states."""
    import torch

    from kdakit.backends.triton_gpu import config as configs
    from kdakit.backends.triton_gpu.host import pool as pools
    from kdakit.backends.triton_gpu.runtime import launch
    from kdakit.cases import FUSED, Case
    from kdakit.problem import Arrays
    from kdakit.serving.torch import Draft, StatePool

    pools.chained = lambda device: chip.wgmma
    for dtype, feedback, v_first, K, V, T in (("float32", False, False, 128, 128, 4), ("float32", False, True, 256, 256, 8),
                                              ("bfloat16", False, False, 128, 128, 8), ("bfloat16", False, True, 64, 64, 4),
                                              ("int8", False, False, 128, 128, 4), ("int8", True, True, 64, 48, 4)):  # fmt: skip
        case = Case("pool", "", B=2, T=T, H=2, HV=2, K=K, V=V, gate="raw", beta="logits", A_log=True, dt_bias=True,
                    initial_state=False, options=FUSED | {"lower_bound": -5.0})  # fmt: skip
        arrays = Arrays(*(None if x is None else torch.zeros(x.shape, dtype=getattr(torch, d))
                          for x, d in zip(case.arrays("bfloat16"), case.dtypes("bfloat16"), strict=True)))  # fmt: skip
        problem, slots = case.problem("bfloat16", op="recurrent"), torch.zeros(2, dtype=torch.int64)
        pool = StatePool(2, 2, K, V, dtype=getattr(torch, dtype), state_v_first=v_first, feedback=feedback)
        config = configs.choose(problem, chip)
        with launch.recording() as recorded:
            pools.decode(problem, arrays, pool, slots)
            _, owners, log = pools.verify(problem, arrays, pool, slots, config)
            draft = Draft(pool, None, *owners, log, {}, None, T)
            pools.verify(problem, arrays, pool, slots, config, (draft, slots))
            pools.commit(pool, draft, slots)
        yield f"pool {dtype}{' feedback' * feedback} {'VK' if v_first else 'KV'} {K} {V} T{T}", recorded


def print_codes(target: str, wanted: str, known: dict) -> None:
    """known: codes by what they were compiled for, NVIDIA's chips alike."""
    from triton.runtime import driver
    from triton_offline import offline_driver

    from kdakit.backends.triton_gpu import call
    from kdakit.backends.triton_gpu import config as configs

    chip, codes, seen, grids = configs.CHIPS[target], [], set(), []
    stop_after_first_stage(codes)
    remember_grids(grids)
    driver.set_active(offline_driver(chip))

    def everything():
        for label, problem, arrays in problems():
            if wanted not in f"{label} {problem.dtype}":
                continue
            config = configs.choose(problem, chip)
            yield f"{label} {problem.dtype} fwdbwd", call.launches(problem.replace(needs_grad=True), arrays, config)
            yield f"{label} {problem.dtype} fwd", call.launches(problem, arrays, config)
            yield f"{label} {problem.dtype} step", call.launches(problem.replace(op="recurrent"), arrays, config)
        yield from ((label, launched) for label, launched in launches_of_pools(chip) if wanted in label)

    for label, launched in everything():
        where = grids[-len(launched) :]
        for grid, (kernel, args, constants, options) in zip(where, launched, strict=True):
            values = [constants[name] for name in kernel.arg_names[len(args) :]]
            signature = [str(x.dtype) if hasattr(x, "dtype") else type(x).__name__ for x in args]
            key = chip.hip, kernel.__name__, str(signature), str(values), str(sorted(options.items()))
            if key not in known:
                if kernel not in seen:
                    kernel.device_caches.clear()  # of another target
                    seen.add(kernel)
                kernel.warmup(*args, grid=(1,), **constants, **options)
                known[key] = codes[-1]
            launch = digest(str(grid) + str([described(x) for x in args]) + str(values) + str(sorted(options.items())))
            print(json.dumps(dict(target=target, problem=label, kernel=kernel.__name__, launch=launch, code=known[key])), flush=True)


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--problems", default="")
    words, found = parser.parse_args(), {}
    for name in words.targets:
        print_codes(name, words.problems, found)
