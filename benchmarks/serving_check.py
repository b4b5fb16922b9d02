"""On a GPU: the pooled calls against float64 and against each other, and their times inside a CUDA graph, as JSON in $OUT (or here).

PYTHONPATH=src python benchmarks/serving_check.py check
PYTHONPATH=src python benchmarks/serving_check.py time       after `check`, which compiles
"""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import os
import sys
import traceback
from pathlib import Path

import numpy as np
import torch
from gpu_timing import median

from kdakit import accuracy
from kdakit.backends import triton_gpu
from kdakit.cases import FUSED, Case
from kdakit.problem import Arrays
from kdakit.serving.torch import StatePool, advance, commit, decode, prefill, verify
from kdakit.torch import chunk_kda

TOKENS = ("q", "k", "v", "g", "beta")
BOUNDED = FUSED | {"lower_bound": -5.0, "safe_gate": True}


def case_of(rows, tokens, **sizes):
    sizes = dict(H=2, HV=4, K=64, V=48) | sizes
    return Case("pooled", "drawn for a pool", B=rows, T=tokens, gate="raw", beta="logits", A_log=True, dt_bias=True, initial_state=False,
                options=BOUNDED, **sizes)  # fmt: skip


def to_device(case, dtype):
    return Arrays(*(None if x is None else torch.as_tensor(np.array(x)).to("cuda", getattr(torch, d))
                    for x, d in zip(case.arrays(dtype), case.dtypes(dtype), strict=True)))  # fmt: skip


def part(x, span):
    return {n: getattr(x, n)[:, span] for n in TOKENS} | dict(A_log=x.A_log, dt_bias=x.dt_bias)


def worst_share(case, dtype, o, state, op="chunk"):
    """The largest share of what the accuracy rule allows."""
    problem, arrays = case.problem(dtype, op=op), case.arrays(dtype)
    truth = accuracy.truths(problem, arrays)
    plain = accuracy.plain_errors(problem, arrays, truth, operand_dtype=triton_gpu.operand_dtype(problem))
    dtypes = accuracy.output_dtypes(problem)
    got = {"o": o.double().cpu().numpy(), "final_state": state.double().cpu().numpy()}
    return round(max(accuracy.error(got[n], truth[n]) / accuracy.tolerance(plain[n], dtypes[n]) for n in truth), 3)


def check_against_float64(dtype, v_first, sizes):
    """Decode, drafts of which a part is accepted, and both at once, through all of a sequence."""
    case = case_of(3, 24, **sizes)
    x = to_device(case, dtype)
    pool = StatePool(5, case.HV, case.K, case.V, state_v_first=v_first, device="cuda")
    slots = torch.tensor(pool.allocate(3), device="cuda")
    parts = [decode(pool, slots, **part(x, slice(t, t + 1)), **BOUNDED) for t in range(3)]
    at, draft, accepted = 3, None, 0
    while at < case.T:
        tokens = min(6, case.T - at)
        given = part(x, slice(at, at + tokens))
        if draft is None or at % 2:
            if draft is not None:
                commit(pool, draft, torch.full((3,), accepted, device="cuda"))
            o, draft = verify(pool, slots, **given, **BOUNDED)
        else:
            o, draft = advance(pool, draft, torch.full((3,), accepted, device="cuda"), **given, **BOUNDED)
        accepted = min(tokens, max(at % 4, 1))
        parts.append(o[:, :accepted])
        at += accepted
    commit(pool, draft, [accepted] * 3)
    return worst_share(case, dtype, torch.cat(parts, 1), pool.states(slots.tolist()), "recurrent")


def check_bits(dtype):
    """Rows have the same bits in any order and beside any others: decode, verify and commit, decode again."""
    case = case_of(4, 8, H=4, HV=4, K=128, V=128)
    x = to_device(case, dtype)

    def run(rows):
        pool = StatePool(9, 4, 128, 128, device="cuda")
        slots = pool.allocate(len(rows))
        given = lambda span: {n: y[rows] if n in TOKENS else y for n, y in part(x, span).items()}
        first = decode(pool, slots, **given(slice(0, 1)), **BOUNDED)
        o, draft = verify(pool, slots, **given(slice(1, 7)), **BOUNDED)
        commit(pool, draft, torch.full((len(rows),), 4, device="cuda"))
        return torch.cat([first, o, decode(pool, slots, **given(slice(7, 8)), **BOUNDED)], 1), pool.states(slots)

    together, alone = run([0, 1, 2, 3]), [run([i]) for i in (2, 0, 3, 1)]
    return {name: all(torch.equal(y[j][0], together[j][i]) for y, i in zip(alone, (2, 0, 3, 1), strict=True))
            for j, name in enumerate(("outputs", "states"))}  # fmt: skip


def check_skips():
    """Bad slots output zeros and change no byte of the pool."""
    case = case_of(6, 2, **LARGE)
    x = to_device(case, "bfloat16")
    pool = StatePool(6, case.HV, case.K, case.V, device="cuda")
    a, b, c = pool.allocate(3)
    pool.storage.states.normal_()
    pool.free([c])
    slots = torch.tensor([b, -1, 77, c, b, a], device="cuda", dtype=torch.int32)
    before = pool.storage.states.clone()
    o = decode(pool, slots, **part(x, slice(0, 1)), **BOUNDED)
    after = pool.storage.states
    same = [i for i in range(7) if torch.equal(before[i], after[i])]
    empty = [i for i in range(6) if not o[i].any()]
    _, draft = verify(pool, slots, **part(x, slice(0, 2)), **BOUNDED)
    pool.free([a])
    (again,) = pool.allocate()
    slots.fill_(again)  # the draft has its own
    before = pool.states([b])
    commit(pool, draft, torch.full((6,), 1, device="cuda"))
    return dict(skipped=empty == [1, 2, 3, 4], untouched=same == [i for i in range(7) if i not in (a, b)],
                new_owner_untouched=again == a and not pool.states([a]).any().item(),
                owner_moved=not torch.equal(before, pool.states([b])))  # fmt: skip


def check_graph():
    """Captured once, replayed with other slots, tokens and accepted counts in the same buffers."""
    case, T = case_of(4, 4, H=4, HV=4, K=128, V=128), 4
    x = to_device(case, "bfloat16")
    pools = [StatePool(8, 4, 128, 128, device="cuda") for _ in range(2)]
    for pool in pools:
        slots = pool.allocate(8)
        pool.storage.states[:8] = torch.randn(8, 4, 128, 128, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    buffers = {n: y.clone() for n, y in part(x, slice(0, T)).items()}
    where, accepted = torch.full((4,), -1, device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")

    def turn(pool):
        o, draft = verify(pool, where, **buffers, **BOUNDED)
        commit(pool, draft, accepted)
        return o

    turn(pools[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = turn(pools[0])
    good = []
    for i in range(3):
        for n in TOKENS:
            buffers[n].copy_(getattr(x, n).roll(i, 0)[:, :T])
        where.copy_(torch.tensor([slots[i], slots[7 - i], -1, slots[3]]))
        accepted.copy_(torch.tensor([i, 4, 2, 3]))
        graph.replay()
        good.append(torch.equal(captured, turn(pools[1])) and torch.equal(pools[0].storage.states[:8], pools[1].storage.states[:8]))
    return dict(replays=good)


def check_prefill(dtype):
    """Which bits of a prefill depend on what: cuts at chunk multiples, cuts elsewhere, other sequences in the call."""
    case = case_of(1, 300, H=4, HV=4, K=128, V=128)
    x = to_device(case, dtype)

    def run(cuts, company, deterministic=True):
        pool = StatePool(40, 4, 128, 128, device="cuda")
        slots, parts = pool.allocate(1 + len(company)), []
        for a, b in itertools.pairwise((0, *cuts, 300)):
            tokens = {n: torch.cat([getattr(x, n)[:, a:b], *(getattr(x, n)[:, :c] for c in company)], 1) for n in TOKENS}
            cu = torch.tensor([0, b - a, *company]).cumsum(0).cuda()
            o, _ = prefill(pool, slots, **tokens, cu_seqlens=cu, A_log=x.A_log, dt_bias=x.dt_bias, deterministic=deterministic, **BOUNDED)
            parts.append(o[:, : b - a])
        return torch.cat(parts, 1), pool.states(slots[:1])

    def same(a, b):
        return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))

    whole, elsewhere = run((), ()), run((100, 131), ())
    return dict(cut_at_chunks=same(whole, run((64, 256), ())), cut_elsewhere=same(whole, elsewhere),
                company=same(whole, run((), (40, 7, 200))), many=same(whole, run((), (30,) * 30)),
                many_not_deterministic=same(whole, run((), (30,) * 30, False)),
                share_elsewhere=worst_share(case, dtype, *elsewhere))  # fmt: skip


LARGE, ODD = dict(K=128, V=128), dict(H=1, HV=1, K=20, V=37)


def jobs():
    """By process, most important first. All of the first two need the same few kernels, which are those that are timed."""
    far = lambda d, f, s: functools.partial(check_against_float64, d, f, s)
    return [
        {"float64": far("bfloat16", False, LARGE), "bits": functools.partial(check_bits, "bfloat16"), "skips": check_skips,
         "graph": check_graph, "step": functools.partial(compile_kind, KINDS[0]), "float64 float32": far("float32", False, LARGE)},
        {"float64 v_first": far("bfloat16", True, LARGE), "step v_first": functools.partial(compile_kind, KINDS[1]),
         "float64 float32 odd v_first": far("float32", True, ODD)},
        {f"compile {k}": functools.partial(compile_kind, k) for k in KINDS[2:]}
        | {"prefill": functools.partial(check_prefill, "bfloat16")},
    ]  # fmt: skip


def compile_kind(kind):
    """What `time` will run."""
    dtype, v_first, feedback = kind
    one, four, eight = (calls_of(1, 32, T, v_first, dtype, feedback) for T in (1, 4, 8))
    plain = dtype == torch.float32
    wanted = [one["decode"], four["both"], eight["both"]] + ([one["step"], four["advance"], eight["advance"]] if plain else [])
    for call in wanted:
        call()
    torch.cuda.synchronize()
    return "done"


def run_jobs(process, found):
    for name, job in jobs()[process].items():
        try:
            found.put((name, job()))
        except Exception as error:
            found.put((name, f"{error!r}"[:300] + traceback.format_exc(limit=-3)[-600:]))


def check():
    """In three processes: most of the time is compilation."""
    context = multiprocessing.get_context("spawn")
    found, rows = context.Queue(), {}
    processes = [context.Process(target=run_jobs, args=(i, found)) for i in range(len(jobs()))]
    for process in processes:
        process.start()
    for _ in range(sum(map(len, jobs()))):
        name, row = found.get()
        rows[name] = row
        print(name, row, flush=True)
        write("check", rows)
    return rows


def microseconds(call, repeats=10):
    """Inside a CUDA graph of `repeats` calls."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    return round(median(graph.replay) * 1000 / repeats, 2)


def calls_of(B, H, T, v_first=False, dtype=torch.float32, feedback=False):
    """The plain step and the pooled calls on random bfloat16 tokens."""
    case = case_of(1, 1, H=H, HV=H, K=128, V=128)
    generator = torch.Generator("cuda").manual_seed(0)
    normal = lambda *size: torch.randn(*size, device="cuda", generator=generator).bfloat16()
    x = Arrays(
        *(normal(B, T, H, 128) for _ in range(4)), normal(B, T, H), torch.rand(H, device="cuda"), torch.zeros(H * 128, device="cuda")
    )
    pool = StatePool(B, H, 128, 128, dtype=dtype, state_v_first=v_first, feedback=feedback, device="cuda")
    slots = torch.tensor(pool.allocate(B), device="cuda").flip(0).contiguous()
    given = part(x, slice(None))
    accepted = torch.full((B,), T, device="cuda")
    draft = verify(pool, slots, **given, **BOUNDED)[1] if T > 1 else None
    problem = case.problem("bfloat16", op="recurrent").replace(B=B, N=B, T=T, state_v_first=v_first, has_initial_state=True)
    states = torch.zeros(B, H, 128, 128, device="cuda")
    step = functools.partial(triton_gpu.step, problem, x._replace(initial_state=states), triton_gpu.default_config(problem, "cuda"))

    def both():
        _, made = verify(pool, slots, **given, **BOUNDED)
        commit(pool, made, accepted)

    def again():
        draft.spent = False
        commit(pool, draft, accepted)

    def onward():
        draft.spent = False
        advance(pool, draft, accepted, **given, **BOUNDED)

    return dict(step=step, decode=lambda: decode(pool, slots, **given, **BOUNDED), verify=lambda: verify(pool, slots, **given, **BOUNDED),
                commit=again, both=both, advance=onward)  # fmt: skip


KINDS = ((torch.float32, False, False), (torch.float32, True, False), (torch.bfloat16, False, False), (torch.int8, False, False),
         (torch.int8, False, True))  # fmt: skip


POOLS = 4  # in turn, so that none finds its own states in the cache


def times():
    rows = []
    for (dtype, v_first, feedback), (B, T) in itertools.product(KINDS, ((32, 1), (32, 4), (32, 8), (1, 1), (256, 1))):
        row = dict(stored=str(dtype), v_first=v_first, feedback=feedback, B=B, T=T)
        plain = dtype == torch.float32
        wanted = ("step", "decode") if T == 1 else ("both", "advance", "verify", "commit")
        try:
            several = [calls_of(B, 32, T, v_first, dtype, feedback) for _ in range(POOLS if plain and T > 1 else 1)]
            row |= {n: microseconds(several[0][n]) for n in wanted if plain or n in ("decode", "both")}
            if len(several) > 1:
                row["both_cold"] = round(microseconds(lambda calls=several: [c["both"]() for c in calls], 3) / POOLS, 2)
        except Exception as error:
            row["failed"] = repr(error)[:150]
        rows.append(row)
        print({n: str(x).replace("torch.", "") for n, x in row.items()}, flush=True)
        write("time", rows)
    return rows


STORED = {"float32": {}, "bfloat16": dict(dtype=torch.bfloat16), "int8": dict(dtype=torch.int8),
          "int8 + feedback": dict(dtype=torch.int8, feedback=True)}  # fmt: skip
TOKENS_IN_ALL, IN_A_GRAPH, SHOWN = 100_000, 1000, (1_000, 10_000, 100_000)


def long_inputs(gate, H=4, K=128):
    generator = torch.Generator("cuda").manual_seed(0)
    normal = lambda *size: torch.randn(*size, device="cuda", generator=generator)
    shape = (1, TOKENS_IN_ALL, H, K)
    uniform = torch.rand(shape, device="cuda", generator=generator)
    g = {"none": 0 * uniform, "slow": -1e-4 * uniform, "mild": -0.05 * uniform, "bounded": -5 * uniform}[gate]
    unit = lambda x: x / x.norm(dim=-1, keepdim=True)
    beta = torch.rand(shape[:3], device="cuda", generator=generator)
    return dict(q=unit(normal(*shape)), k=unit(normal(*shape)), v=normal(*shape), g=g, beta=beta)


def decode_all(x, **options):
    """o of one sequence, a launch and a rounding of the state a token."""
    H, K = x["q"].shape[2:]
    pool = StatePool(1, H, K, K, device="cuda", **options)
    slots = torch.tensor(pool.allocate(1), device="cuda")
    buffers = {n: y[:, :IN_A_GRAPH].clone() for n, y in x.items()}
    run = lambda: torch.cat([decode(pool, slots, **{n: y[:, t : t + 1] for n, y in buffers.items()}) for t in range(IN_A_GRAPH)], 1)
    decode(pool, slots, **{n: y[:, :1] for n, y in buffers.items()})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = run()
    for tensor in pool.tensors():
        tensor.zero_()
    parts = []
    for start in range(0, TOKENS_IN_ALL, IN_A_GRAPH):
        for n, y in buffers.items():
            y.copy_(x[n][:, start : start + IN_A_GRAPH])
        graph.replay()
        parts.append(o.clone())
    return torch.cat(parts, 1), pool.states([0])


def bits():
    """Long-run errors of every storage: of the last 1,000 outputs before each position, and of the state after the last."""
    rows = []
    for gate in ("none", "slow", "mild", "bounded"):
        x = long_inputs(gate)
        truth, state = chunk_kda(**{n: y.double() for n, y in x.items()}, output_final_state=True, backend="torch_native")
        for name, options in STORED.items():
            o, after = decode_all(x, **options)
            off = lambda a, b: float((a.double() - b).norm() / b.norm())
            errors = [off(o[:, p - 1000 : p], truth[:, p - 1000 : p]) for p in SHOWN]
            rows.append(dict(gate=gate, stored=name, errors=dict(zip(SHOWN, errors, strict=True)), state=off(after, state)))
            print(gate, name, *(f"{e:.2e}" for e in errors), f"state {rows[-1]['state']:.2e}", flush=True)
        del truth, state
    return rows


def write(mode, rows):
    found = dict(gpu=torch.cuda.get_device_name(), torch=torch.__version__, rows=rows)
    Path(os.environ.get("OUT", "."), f"serving_{mode}.json").write_text(json.dumps(found, indent=1, default=str))


def main():
    mode = sys.argv[1]
    write(mode, dict(check=check, bits=bits, time=times)[mode]())


if __name__ == "__main__":
    main()
