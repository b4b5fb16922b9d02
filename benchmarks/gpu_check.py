"""On a GPU: the Triton backend against float64 on the shared cases, and its kernels' times, as JSON in $OUT (or here).

    PYTHONPATH=src python benchmarks/gpu_check.py check [dtype ..]     every case, compiled in parallel
    PYTHONPATH=src python benchmarks/gpu_check.py time [shape ..]      forward, its two kernels, decode; beside FLA where it can be imported
    PYTHONPATH=src python benchmarks/gpu_check.py sweep [shape ..]     the configurations in SWEEP
    PYTHONPATH=src python benchmarks/gpu_check.py once shape [json]    one forward with changes to its Config, for a profiler
"""

from __future__ import annotations

import dataclasses
import functools
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

from kdakit import accuracy
from kdakit.backends import triton_gpu
from kdakit.backends.triton_gpu import launch
from kdakit.cases import CASES, SHAPES
from kdakit.problem import Arrays

SWEEP = {
    "prepare": [dict(), dict(vector=8), dict(prepare_registers=168), dict(prepare_warps=8), dict(prepare_warps=8, prepare_registers=128)],
    "scan": [
        dict(block_v=64, scan_warps=4, scan_stages=2), dict(block_v=64, scan_warps=4, scan_stages=3),
        dict(block_v=128, scan_warps=8, scan_stages=2), dict(block_v=128, scan_warps=8, scan_stages=3),
        dict(block_v=32, scan_warps=4, scan_stages=3), dict(block_v=32, scan_warps=4, scan_stages=4),
    ],
    "step": [dict(), dict(step_block_v=64), dict(step_block_v=16), dict(step_warps=4)],
}  # fmt: skip


def tensors(case, dtype, device="cuda"):
    return Arrays(*(None if x is None else torch.as_tensor(np.array(x)).to(device, getattr(torch, d))
                    for x, d in zip(case.arrays(dtype), case.dtypes(dtype), strict=True)))  # fmt: skip


def shape_tensors(shape, device="cuda"):
    """Random bfloat16 inputs drawn on the device: big shapes are slow to draw in NumPy."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size, dtype=torch.bfloat16):
        return torch.randn(*size, device=device, generator=generator).to(dtype)

    B, T, H, K, N = shape.B, shape.T, shape.H, shape.K, len(shape.lengths) or shape.B
    tokens = [normal(B, T, H, K) for _ in range(4)]
    parameters = torch.rand(H, device=device, generator=generator) * 2.7, normal(H * K, dtype=torch.float32)
    cu_seqlens = torch.tensor([0, *np.cumsum(shape.lengths)], device=device) if shape.lengths else None
    return Arrays(*tokens, normal(B, T, H), *parameters, normal(N, H, K, K, dtype=torch.float32), cu_seqlens)


def check_case(job):
    name, dtype, op = job
    case = CASES[name]
    problem, arrays = case.problem(dtype, op=op), case.arrays(dtype)
    truth = accuracy.truths(problem, arrays)
    plain = accuracy.plain_errors(problem, arrays, truth, operand_dtype=triton_gpu.operand_dtype(problem))
    x, config = tensors(case, dtype), triton_gpu.default_config(problem, "cuda")
    start = time.time()
    try:
        result = triton_gpu.step(problem, x, config) if op == "recurrent" else triton_gpu.forward(problem, x, config)[0]
        torch.cuda.synchronize()
    except Exception as error:
        return dict(case=name, dtype=dtype, op=op, failed=repr(error)[:300])
    dtypes = accuracy.output_dtypes(problem)
    ratios = {}
    for key in truth:
        error = accuracy.error(getattr(result, key).double().cpu().numpy(), truth[key])
        ratios[key] = [error, error / accuracy.tolerance(plain[key], dtypes[key])]
    return dict(case=name, dtype=dtype, op=op, seconds=round(time.time() - start, 2), **ratios)


def check(dtypes):
    jobs = [(name, dtype, op) for op in ("chunk", "recurrent") for dtype in dtypes for name in CASES]
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        rows = pool.map(check_case, jobs, chunksize=2)
    bad = [r for r in rows if "failed" in r or any(not v[1] <= 1 for v in r.values() if isinstance(v, list))]
    worst = sorted((v[1], r["case"], r["dtype"], r["op"], k) for r in rows for k, v in r.items() if isinstance(v, list))[-8:]
    print("cases", len(rows), "bad", len(bad), "worst", worst)
    for row in bad:
        print("BAD", row)
    return rows


def median(call, repeat=30, warmup=5):
    for _ in range(warmup):
        call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeat)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(np.median([s.elapsed_time(e) for s, e in events]))


def problem_of(name, bounded=True):
    shape = SHAPES[name]
    small = dataclasses.replace(shape.case(bounded=bounded), T=1, lengths=())
    sizes = dict(B=shape.B, T=shape.T, N=len(shape.lengths) or shape.B, varlen="cu_seqlens" if shape.lengths else "")
    return small.problem("bfloat16").replace(**sizes), shape_tensors(shape)


def warm(job):
    """Compile in a process of its own."""
    name, bounded, changes = job
    problem, arrays = problem_of(name, bounded)
    config = dataclasses.replace(triton_gpu.default_config(problem, "cuda"), **changes)
    try:
        launch.forward(problem, arrays, config)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{changes}: {error!r}"[:200]
    return None


def stages(problem, arrays, config):
    """Milliseconds of (prepare, scan, both)."""
    x = launch.views(arrays)
    space = launch.prepare(problem, arrays, x, config)
    return dict(prepare=median(lambda: launch.prepare(problem, arrays, x, config)),
                scan=median(lambda: launch.scan(problem, arrays, x, space, config)),
                forward=median(lambda: triton_gpu.forward(problem, arrays, config)))  # fmt: skip


def sweep(names):
    jobs = [("h16", bounded, c) for c in SWEEP["prepare"] for bounded in (True, False)] + [("h16", True, c) for c in SWEEP["scan"]]
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        print("compile", [r for r in pool.map(warm, jobs, chunksize=1) if r])
    rows = []
    for name in names:
        for part, bounded in (("prepare", True), ("prepare", False), ("scan", True)):
            problem, arrays = problem_of(name, bounded)
            x = launch.views(arrays)
            for changes in SWEEP[part]:
                config = dataclasses.replace(triton_gpu.default_config(problem, "cuda"), **changes)
                try:
                    space = launch.prepare(problem, arrays, x, config)
                    call = {"prepare": lambda p=problem, a=arrays, c=config, x=x: launch.prepare(p, a, x, c),
                            "scan": lambda p=problem, a=arrays, c=config, x=x, s=space: launch.scan(p, a, x, s, c)}[part]  # fmt: skip
                    rows.append(dict(shape=name, part=part, bounded=bounded, ms=median(call, 20, 3), **changes))
                except Exception as error:
                    rows.append(dict(shape=name, part=part, bounded=bounded, failed=repr(error)[:120], **changes))
                print(rows[-1], flush=True)
    return rows


def times(names):
    rows = []
    for name in names:
        for bounded in (True, False):
            problem, arrays = problem_of(name, bounded)
            row = dict(shape=name, bounded=bounded, **stages(problem, arrays, triton_gpu.default_config(problem, "cuda")))
            if name in os.environ.get("FLA_SHAPES", "").split(",") and bounded:  # each shape costs FLA minutes of autotuning
                row["fla"] = fla_time(problem, arrays)
            rows.append(row)
            print(row, flush=True)
    return rows


def fla_time(problem, arrays):
    try:
        from fla.ops.kda import chunk_kda
    except ImportError:
        return None
    bound = dict(safe_gate=True, lower_bound=problem.options.lower_bound) if problem.options.gate == "bounded" else {}
    options = dict(A_log=arrays.A_log, dt_bias=arrays.dt_bias, initial_state=arrays.initial_state, output_final_state=True,
                   use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                   cu_seqlens=arrays.cu_seqlens)  # fmt: skip
    with torch.no_grad():
        return median(lambda: chunk_kda(*arrays[:5], **options, **bound))


def decode():
    rows = []
    for B, H in ((1, 32), (8, 32), (32, 32), (128, 32), (256, 32), (32, 96)):
        shape = dataclasses.replace(SHAPES["h16"], B=B, T=1, H=H)
        problem = dataclasses.replace(shape.case(), B=1).problem("bfloat16", op="recurrent").replace(B=B, N=B)
        arrays = shape_tensors(shape)
        for changes in SWEEP["step"]:
            config = dataclasses.replace(triton_gpu.default_config(problem, "cuda"), **changes)
            call = functools.partial(triton_gpu.step, problem, arrays, config)
            call()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(10):
                    call()
            rows.append(dict(B=B, H=H, us=median(graph.replay) * 100, eager_us=median(call) * 1000, **changes))
            print(rows[-1], flush=True)
    return rows


def main():
    mode, rest = sys.argv[1], sys.argv[2:]
    if mode == "once":
        problem, arrays = problem_of(rest[0])
        config = dataclasses.replace(triton_gpu.default_config(problem, "cuda"), **json.loads("".join(rest[1:2]) or "{}"))
        for _ in range(2):
            triton_gpu.forward(problem, arrays, config)
        torch.cuda.synchronize()
        return
    rows = dict(check=lambda: check(rest or ["bfloat16", "float32", "float16"]), sweep=lambda: sweep(rest or ["h96", "h64", "h32"]),
                time=lambda: times(rest or ["h96", "h64", "h32", "h16", "varlen96", "tiny"]), decode=decode)[mode]()  # fmt: skip
    Path(os.environ.get("OUT", "."), f"gpu_{mode}.json").write_text(json.dumps(dict(gpu=torch.cuda.get_device_name(), rows=rows), indent=1))


if __name__ == "__main__":
    main()
