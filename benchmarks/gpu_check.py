"""On a GPU: the Triton backend against float64 on the shared cases, and its kernels' times, as JSON in $OUT (or here).

PYTHONPATH=src python benchmarks/gpu_check.py check [name ..]      cases (and LARGE), dtypes, operations; in that order
PYTHONPATH=src python benchmarks/gpu_check.py time [shape ..]      forward, its two kernels, decode; beside FLA where it can be imported
PYTHONPATH=src python benchmarks/gpu_check.py sweep [shape ..]     the configurations in SWEEP
PYTHONPATH=src python benchmarks/gpu_check.py train [shape ..]     forward + backward, its kernels, peak memory; FLA beside it
PYTHONPATH=src python benchmarks/gpu_check.py compare [shape ..]   beside FLA; a shape named twice: forward + backward too
PYTHONPATH=src python benchmarks/gpu_check.py sweep_backward [shape ..]  the configurations in SWEEP_BACKWARD
PYTHONPATH=src python benchmarks/gpu_check.py once shape [json]    two forward + backward with changes to Config, for a profiler
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

os.environ.setdefault("KDAKIT_UNCHECKED", "1")  # before the backend is imported: this is what checks
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process per core draws truths

import numpy as np
import torch
from gpu_timing import median

from kdakit import accuracy
from kdakit.backends import triton_gpu
from kdakit.backends.triton_gpu import ahead, launch, streams, training
from kdakit.cases import CASES, FUSED, SHAPES, Case
from kdakit.measure import checking
from kdakit.problem import Arrays

# Head sizes as models have them, too large for an interpreter: past a checkpoint, grouped, and with heads enough to fill the chip.
FUSED_BOUNDED = FUSED | {"lower_bound": -5.0, "safe_gate": True, "chunk_size": 64}
MODEL = dict(K=128, V=128, gate="raw", beta="logits", A_log=True, dt_bias=True)
LARGE = {
    case.name: case
    for case in (
        Case("model_long", "K = V = 128, scanned in parts", T=2500, H=1, HV=1, options=FUSED_BOUNDED, **MODEL),
        Case("model_many", "K = V = 128, many heads", T=130, H=70, HV=70, options=FUSED_BOUNDED, **MODEL),
        Case("model", "K = V = 128, bounded", T=600, options=FUSED_BOUNDED, **MODEL),
        Case("model_softplus", "K = V = 128, softplus", T=600, options=FUSED, **MODEL),
        Case("model_grouped", "K = V = 128, packed, grouped", T=300, HV=4, lengths=(0, 130, 5, 165), options=FUSED_BOUNDED, **MODEL),
    )
}
SLOW = {("model_long", "chunk"), ("model_many", "chunk")}  # minutes each to judge
SWEEP = {
    "prepare": [dict(), dict(vector=8), dict(prepare_registers=168), dict(prepare_warps=8), dict(prepare_warps=8, prepare_registers=128)],
    "scan": [
        dict(block_v=64, scan_warps=4, scan_stages=2), dict(block_v=64, scan_warps=4, scan_stages=3),
        dict(block_v=128, scan_warps=8, scan_stages=2), dict(block_v=128, scan_warps=8, scan_stages=3),
        dict(block_v=32, scan_warps=4, scan_stages=3), dict(block_v=32, scan_warps=4, scan_stages=4),
    ],
    "step": [dict(), dict(step_block_v=64), dict(step_block_v=16), dict(step_warps=4)],
}  # fmt: skip
SWEEP_BACKWARD = {
    "gradient": [dict()],
    "products": [
        dict(), dict(slice_v=32, product_stages=3), dict(slice_v=64, product_stages=2), dict(slice_v=32, product_stages=3, registers=168),
        dict(slice_v=32, product_stages=3, product_slice_k=128, product_warps=8),
        dict(slice_v=32, product_stages=3, product_slice_k=128, product_warps=8, registers=128),
    ],
    "rebuild": [dict(), dict(registers=168)],
    "scan": [dict()],
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
    case = (CASES | LARGE)[name]
    problem, arrays = case.problem(dtype, op=op), case.arrays(dtype)
    cotangents = case.cotangents(dtype) if op == "chunk" else ()
    if cotangents and not problem.options.output_final_state:
        cotangents = cotangents[:1]
    truth = accuracy.truths(problem, arrays, *cotangents)
    plain = accuracy.plain_errors(problem, arrays, truth, *cotangents, operand_dtype=triton_gpu.operand_dtype(problem))
    start = time.time()
    try:
        results = checking.run_case("triton_gpu", case, dtype, grad=op == "chunk", op=op)
    except Exception as error:
        return dict(case=name, dtype=dtype, op=op, failed=repr(error)[:300])
    dtypes = accuracy.output_dtypes(problem)
    ratios = {}
    for key in truth:
        error = accuracy.error(results[key], truth[key])
        ratios[key] = [error, error / accuracy.tolerance(plain[key], dtypes[key])]
    return dict(case=name, dtype=dtype, op=op, seconds=round(time.time() - start, 2), **ratios)


def launches(job):
    """A case's launches, and for each what its kernel is compiled for; nothing runs."""
    name, dtype, op = job
    case = (CASES | LARGE)[name]
    problem = case.problem(dtype, op=op, needs_grad=op == "chunk")
    shapes = zip(case.arrays(dtype), case.dtypes(dtype), strict=True)
    arrays = Arrays(*(None if x is None else torch.empty(x.shape, dtype=getattr(torch, d), device="meta") for x, d in shapes))
    made = ahead.launches(problem, arrays, triton_gpu.default_config(problem, "cuda"))
    keys = [
        str((k.__name__, *map(launch._specialised, args), *constants.values(), *options.items())) for k, args, constants, options in made
    ]
    return made, keys


def kernel_keys(job):
    return launches(job)[1]


def slowest_first(item):
    """What takes longest to compile goes first: kernels of many small products, above all in float32 (as float16's gradients are)."""
    key, ((_, dtype, _), _) = item
    return -(("gradient" in key) * 2 + ("prepare" in key)) * (1 if dtype == "bfloat16" else 3)


def compile_one(task):
    job, index = task
    try:
        kernel, args, constants, options = launches(job)[0][index]
        kernel.warmup(*args, **constants, **options, grid=(1,))
    except Exception as error:
        return f"{task}: {error!r}"[:200]
    return None


def check(chosen):
    """Rows of the cases, dtypes and operations named, in that order but SLOW ones first, or of all. Every kernel is compiled once, a case
    is run as soon as its kernels are there, and its verdict printed and written at once: a time limit leaves no doubt about what was seen
    to pass."""

    def some(names):
        return sorted((n for n in names if n in chosen), key=chosen.index) or list(names)

    names, dtypes = some(LARGE | CASES), some(("bfloat16", "float32", "float16"))
    jobs = [(name, dtype, op) for dtype in dtypes for op in some(("chunk", "recurrent")) for name in names]
    jobs.sort(key=lambda job: (job[0], job[2]) not in SLOW)  # they would be what all wait for at the end
    context, rows, number, about = multiprocessing.get_context("spawn"), [], max(2, os.cpu_count() - 2), facts(chosen)
    with (
        context.Pool(number) as compilers,
        context.Pool(number, maxtasksperchild=8) as pool,
    ):  # an illegal access takes its process along
        needs, tasks = dict(zip(jobs, compilers.map(kernel_keys, jobs, chunksize=1), strict=True)), {}
        for job in jobs:
            for i in sorted(range(len(needs[job])), key=lambda i: -len(needs[job][i])):
                tasks.setdefault(needs[job][i], (job, i))
        print(len(jobs), "cases,", len(tasks), "kernels", flush=True)
        made = {key: compilers.apply_async(compile_one, (task,)) for key, task in sorted(tasks.items(), key=slowest_first)}
        running = []
        while jobs or running:
            able = [job for job in jobs if all(made[key].ready() for key in needs[job])]
            for job in able[: number - len(running)]:
                jobs.remove(job)
                running.append(pool.apply_async(check_case, (job,)))
            for done in [r for r in running if r.ready()]:
                running.remove(done)
                rows.append(done.get())
                print(verdict(rows[-1]), flush=True)
                save("check", rows, about)
            time.sleep(0.05)
        errors = [r.get() for r in made.values() if r.get()]
    print("cases", len(rows), "bad", sum(verdict(r).startswith("BAD") for r in rows), errors)
    return rows


def facts(chosen):
    """What a record says beside its rows."""
    import triton

    command = " ".join(("benchmarks/gpu_check.py check", *chosen))
    return dict(command=command, commit=os.environ.get("COMMIT", ""), torch=torch.__version__, triton=triton.__version__)


def verdict(row):
    ratios = {n: v for n, v in row.items() if isinstance(v, list)}
    worst = max(ratios, key=lambda n: ratios[n][1] if ratios[n][1] == ratios[n][1] else np.inf, default=None)
    what = f"{row['case']} {row['dtype']} {row['op']}"
    if worst and ratios[worst][1] <= 1:
        return f"ok {what}: {ratios[worst][1]:.2f} of the tolerance ({worst})"
    return f"BAD {what} {row.get('failed') or ratios}"


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


def train(chosen):
    """Forward + backward through the public calls, and our launches one by one."""
    from kdakit.torch import chunk_kda

    gates = [True] if "bounded" in chosen else [True, False]
    names = [n for n in chosen if n in SHAPES] or ["h96", "h32"]

    with multiprocessing.get_context("spawn").Pool(14) as pool:
        jobs = [(name, bounded, part, {}) for name in names for bounded in gates for part in LAUNCHES]
        print("compile", [r for r in pool.map(warm_training, jobs, chunksize=1) if r], flush=True)
    rows = []
    for name in names:
        for bounded in gates:
            problem, arrays = problem_of(name, bounded)
            problem = problem.replace(needs_grad=True)
            config, x = triton_gpu.default_config(problem, "cuda"), launch.views(arrays)
            d_o, d_final = torch.randn_like(arrays.v), torch.randn_like(arrays.initial_state)
            row = dict(shape=name, bounded=bounded, **train_stages(problem, arrays, x, config, d_o, d_final))
            row |= whole(chunk_kda, problem, arrays, d_o, d_final)
            if name in os.environ.get("FLA_SHAPES", "").split(",") and bounded:
                from fla.ops.kda import chunk_kda as fla_chunk_kda

                row["fla"] = whole(fla_chunk_kda, problem, arrays, d_o, d_final)
                row["ratio"] = row["fla"]["fwdbwd"] / row["fwdbwd"]
                row["memory"] = row["extra_mib"] / row["fla"]["extra_mib"]
            rows.append({n: round(v, 4) if isinstance(v, float) else v for n, v in row.items()})
            print(rows[-1], flush=True)
    return rows


LAUNCHES = ("forward", "replay", "reverse", "products", "gradient")


def sweep_backward(chosen):
    gates = [True] if "bounded" in chosen else [True, False]
    names = [n for n in chosen if n in SHAPES] or ["h96", "h32"]
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        jobs = [(names[0], b, part, c) for part in SWEEP_BACKWARD for c in SWEEP_BACKWARD[part] for b in gates]
        print("compile", [r for r in pool.map(warm_training, jobs, chunksize=1) if r], flush=True)
    rows = []
    for name in names if "compile" not in chosen else ():
        for bounded in gates:
            problem, arrays = problem_of(name, bounded)
            problem = problem.replace(needs_grad=True)
            x, d_o, d_final = launch.views(arrays), torch.randn_like(arrays.v), torch.randn_like(arrays.initial_state)
            for part, all_changes in SWEEP_BACKWARD.items():
                for changes in all_changes:
                    config = dataclasses.replace(triton_gpu.default_config(problem, "cuda"), **changes)
                    try:
                        row = train_stages(problem, arrays, x, config, d_o, d_final, part)
                    except Exception as error:
                        row = dict(failed=repr(error)[:120])
                    rows.append(dict(shape=name, bounded=bounded, part=part, **changes, **row))
                    print(rows[-1], flush=True)
    return rows


def warm_training(job):
    """Compile one of the launches in a process of its own, on inputs that mean nothing: nothing depends on the length."""
    name, bounded, part, changes = job
    shape = dataclasses.replace(SHAPES[name], T=64, lengths=())
    problem = problem_of(name, bounded)[0].replace(T=64, needs_grad=True)
    arrays, config = shape_tensors(shape), dataclasses.replace(triton_gpu.default_config(problem, "cuda"), **changes)
    x, d_o, d_final = launch.views(arrays), torch.zeros_like(arrays.v), torch.zeros_like(arrays.initial_state)
    kept = [torch.zeros(s, dtype=getattr(torch, d), device="cuda") for s, d in triton_gpu.saved_specs(problem, "cuda")]
    y = training.Replayed(*(torch.zeros(s, dtype=getattr(torch, d), device="cuda") for s, d in training.replayed_specs(problem, config)))
    try:
        if part == "forward":
            launch.forward(problem, arrays, config)
        elif part in ("rebuild", "replay"):
            training.replay(problem, arrays, x, training.rebuild(problem, arrays, x, kept[0], config), kept[2], config)
        elif part == "reverse":
            training.reverse(problem, arrays, x, y, kept[1], d_o, d_final, config)
        else:
            d_states, d_v, lost, _ = training.reverse(problem, arrays, x, y, kept[1], d_o, d_final, config)
            z = training.products(problem, arrays, x, y, kept[0], d_states, d_o, d_v, lost, d_final, config)
            training.gradients(problem, arrays, x, y, z, d_o.dtype, config)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{job}: {error!r}"[:400]
    return None


def train_stages(problem, arrays, x, config, d_o, d_final, only=None):
    """Milliseconds of every launch, or of one."""
    space = launch.prepare(problem, arrays, x, config)
    ahead = lambda: launch.scan(problem, arrays, x, space, config)
    ahead()
    tiles = lambda: training.rebuild(problem, arrays, x, space.lower, config)
    replayed = tiles()
    again = lambda: training.replay(problem, arrays, x, replayed, space.checkpoints, config)
    again()
    back = lambda: training.reverse(problem, arrays, x, replayed, space.solved, d_o, d_final, config)
    d_states, d_v, lost, _ = back()
    over_v = lambda: training.products(problem, arrays, x, replayed, space.lower, d_states, d_o, d_v, lost, d_final, config)
    z = over_v()
    last = lambda: training.gradients(problem, arrays, x, replayed, z, d_o.dtype, config)

    def both():
        with streams.beside(d_o) as aside:
            back()
            with aside():
                again()

    calls = dict(prepare=lambda: launch.prepare(problem, arrays, x, config), scan=ahead, rebuild=tiles, replay=again, reverse=back,
                 replay_and_reverse=both, products=over_v, gradient=last)  # fmt: skip
    return {name: median(call, 15, 3) for name, call in calls.items() if only in (name, None)}


def whole(chunk_kda, problem, arrays, d_o, d_final):
    """Milliseconds and peak extra memory of one forward + backward with gradients of everything."""
    leaves = [None if a is None else a.detach().clone().requires_grad_(a.is_floating_point()) for a in arrays[:8]]
    bound = dict(safe_gate=True, lower_bound=problem.options.lower_bound) if problem.options.gate == "bounded" else {}
    options = dict(A_log=leaves[5], dt_bias=leaves[6], initial_state=leaves[7], output_final_state=True, use_qk_l2norm_in_kernel=True,
                   use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, cu_seqlens=arrays.cu_seqlens, **bound)  # fmt: skip

    def run():
        outputs = chunk_kda(*leaves[:5], **options)
        return torch.autograd.grad(outputs, leaves, (d_o, d_final))

    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return dict(extra_mib=(torch.cuda.max_memory_allocated() - before) / 2**20, fwdbwd=median(run, 15, 3))


def compare(chosen):
    """Beside FLA in one run: forward of every shape named, forward + backward of those named twice. Written as it goes."""
    import fla
    import triton
    from fla.ops.kda import chunk_kda as fla_chunk_kda

    from kdakit.torch import chunk_kda

    versions = dict(torch=torch.__version__, triton=triton.__version__, fla=fla.__version__, commit=os.environ.get("COMMIT", ""))
    rows = []
    for name in sorted(set(chosen), key=lambda n: (-chosen.count(n), chosen.index(n))):
        problem, arrays = problem_of(name)
        d_o, d_final = torch.randn_like(arrays.v), torch.randn_like(arrays.initial_state)
        rows.append(dict(shape=name))
        for suffix, call in (("", chunk_kda), ("_fla", fla_chunk_kda)):
            if chosen.count(name) > 1:
                rows[-1] |= {f"training_{n}{suffix}": round(x, 4) for n, x in whole(call, problem, arrays, d_o, d_final).items()}
            rows[-1][f"forward{suffix}"] = round(forward_time(call, problem, arrays), 4)
            print(rows[-1], flush=True)
            save("compare", rows, versions)
    return rows


def forward_time(chunk_kda, problem, arrays):
    bound = dict(safe_gate=True, lower_bound=problem.options.lower_bound) if problem.options.gate == "bounded" else {}
    options = dict(A_log=arrays.A_log, dt_bias=arrays.dt_bias, initial_state=arrays.initial_state, output_final_state=True,
                   use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                   cu_seqlens=arrays.cu_seqlens)  # fmt: skip
    with torch.no_grad():
        return median(lambda: chunk_kda(*arrays[:5], **options, **bound))


def save(mode, rows, more=None):
    out = dict(gpu=torch.cuda.get_device_name(), **(more or {}), rows=rows)
    Path(os.environ.get("OUT", "."), f"gpu_{mode}.json").write_text(json.dumps(out, indent=1))


def fla_time(problem, arrays):
    try:
        from fla.ops.kda import chunk_kda
    except ImportError:
        return None
    return forward_time(chunk_kda, problem, arrays)


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
        problem = problem.replace(needs_grad=True)
        for _ in range(2):
            _, kept = triton_gpu.forward(problem, arrays, config)
            triton_gpu.backward(problem, arrays, kept, torch.ones_like(arrays.v), torch.ones_like(arrays.initial_state), config)
        torch.cuda.synchronize()
        return
    rows = dict(check=lambda: check(rest), sweep=lambda: sweep(rest or ["h96", "h64", "h32"]),
                time=lambda: times(rest or ["h96", "h64", "h32", "h16", "varlen96", "tiny"]), decode=decode,
                train=lambda: train(rest), compare=lambda: compare(rest or ["h96", "h32"] * 2),
                sweep_backward=lambda: sweep_backward(rest))[mode]()  # fmt: skip
    if mode not in ("compare", "check"):
        save(mode, rows)
    if mode == "check" and any(verdict(row).startswith("BAD") for row in rows):
        sys.exit("some cases are wrong")


if __name__ == "__main__":
    main()
