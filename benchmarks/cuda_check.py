"""On a GPU: the CUDA backend's float32 kernels against float64, and their times beside FLA's, as JSON in $OUT (or here).

PYTHONPATH=src python benchmarks/cuda_check.py cases [BACKEND]   every shared case that it takes, by default cuda; gradients for some
PYTHONPATH=src python benchmarks/cuda_check.py accuracy          o, w, u, final state at B1 H16 T4096, three kinds of inputs
PYTHONPATH=src python benchmarks/cuda_check.py time              the same sizes, beside FLA's chunk_kda with float32 inputs
PYTHONPATH=src python benchmarks/cuda_check.py once K C          one call, for a profiler
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

import kdakit.backends.cuda.op
import kdakit.torch
from kdakit.cases import CASES
from kdakit.measure import checking, machine

SIZES = [(128, 64), (128, 32), (64, 64), (64, 32)]  # K = V, C
B, H, T = 1, 16, 4096
LIMITS = {"random": 5e-6, "large_gate": 5e-6, "correlated": 2e-5}


def inputs(kind: str, K: int, seed: int = 0, tokens: int = T):
    """q, k, v, g [B, H, T, K], beta [B, H, T], initial state, float32 on the device."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*size):
        return torch.randn(*size, device="cuda", generator=generator)

    def uniform(*size):
        return torch.rand(*size, device="cuda", generator=generator)

    q, k, v = (draw(B, H, tokens, K) for _ in range(3))
    g, beta = torch.nn.functional.logsigmoid(1 + 1.5 * draw(B, H, tokens, K)), uniform(B, H, tokens)
    if kind == "large_gate":
        g = -torch.exp(uniform(B, H, tokens, K) * 14.9 - 6.9)  # -1e-3 .. -3000
    if kind == "correlated":
        k, g, beta = k[:, :, :1] + 0.1 * k, torch.zeros_like(g), torch.ones_like(beta)
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    return q, k, v, g, beta, draw(B, H, K, K)


def truth(q, k, v, g, beta, S, C: int):
    """o and the final state by the token recurrence, w and u by the definition, float64."""
    q, k, v, g, beta, S = (x.double() for x in (q, k, v, g, beta, S))
    K, o = q.shape[-1], torch.empty_like(v)
    for t in range(q.shape[2]):
        S = g[:, :, t, :, None].exp() * S
        error = v[:, :, t] - torch.einsum("bhk,bhkv->bhv", k[:, :, t], S)
        S = S + torch.einsum("bhk,bhv->bhkv", beta[:, :, t, None] * k[:, :, t], error)
        o[:, :, t] = torch.einsum("bhk,bhkv->bhv", q[:, :, t] * K**-0.5, S)
    w, u = [], []
    lower = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    for start in range(0, q.shape[2], C):
        kc, vc, gc, bc = (x[:, :, start : start + C] for x in (k, v, g, beta))
        after = torch.where(lower.tril(-1)[..., None], gc[:, :, :, None], 0)
        decays = torch.where(lower[..., None], after.cumsum(2), -torch.inf).exp()
        A = torch.einsum("bhi,bhik,bhjk,bhijk->bhij", bc, kc, kc, decays).tril(-1)
        rhs = torch.cat([kc * gc.cumsum(2).exp(), vc], -1) * bc[..., None]
        both = torch.linalg.solve_triangular(A, rhs, upper=False, unitriangular=True)
        w.append(both[..., :K])
        u.append(both[..., K:])
    return dict(o=o, w=torch.stack(w, 2), u=torch.stack(u, 2), final_state=S)


def relative(got, want) -> float:
    return float((got.double() - want).norm() / want.norm()) if torch.isfinite(got).all() else float("inf")


def accuracy():
    rows = []
    for K, C in SIZES:
        for kind, limit in LIMITS.items():
            x = inputs(kind, K)
            want = truth(*x, C)
            o, w, u, final = torch.ops.kdakit.prefill(*x[:5], C, None, x[5])
            again = torch.ops.kdakit.prefill(*x[:5], C, None, x[5])
            errors = {n: relative(y, want[n]) for n, y in (("o", o), ("w", w), ("u", u), ("final_state", final))}
            same = all(torch.equal(a, b) for a, b in zip((o, w, u, final), again, strict=True))
            rows.append(
                dict(K=K, C=C, inputs=kind, limit=limit, ok=same and all(e < limit for e in errors.values()), same_bits=same, **errors)
            )
            print(K, C, kind, {n: f"{e:.1e}" for n, e in errors.items()}, "ok" if rows[-1]["ok"] else "FAILED", flush=True)
            write("accuracy", rows)
    return rows


WITH_GRADIENTS = ("plain", "softplus", "varlen_fused")


def cases(backend: str = "cuda"):
    rows, bad = [], 0
    for case in CASES.values():
        grad = case.name in WITH_GRADIENTS
        reason = checking.refusal(backend, case, "float32", "chunk", grad)
        if reason:
            rows.append(dict(case=case.name, skipped=reason))
            continue
        try:
            found = checking.check(backend, case, grad=grad)
            row = dict(case=case.name, ok=all(r.ok for r in found), **{r.name: [r.error, r.used] for r in found})
        except Exception as problem:
            row = dict(case=case.name, ok=False, raised=repr(problem)[:300])
        bad += not row["ok"]
        rows.append(row)
        if not row["ok"]:
            print("BAD", row, flush=True)
    worst = sorted((v[1], r["case"], n) for r in rows for n, v in r.items() if isinstance(v, list))[-4:]
    print(
        "cases",
        sum("ok" in r for r in rows),
        "bad",
        bad,
        "skipped",
        [r["case"] for r in rows if "skipped" in r],
        "worst",
        worst,
        flush=True,
    )
    return rows


def measure(calls: dict, repeat: int = 30, warmup: int = 3) -> dict[str, float]:
    """Median milliseconds of each call, interleaved; events on the device."""
    samples: dict[str, list] = {name: [] for name in calls}
    for n in range(repeat + warmup):
        for name, call in calls.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            if n >= warmup:
                samples[name].append((start, end))
    torch.cuda.synchronize()
    return {name: sorted(s.elapsed_time(e) for s, e in pairs)[len(pairs) // 2] for name, pairs in samples.items()}


def graph_of(call):
    """A captured call: its time is the device's alone."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def by_kernel(call, repeat: int = 10) -> dict[str, float]:
    """Median microseconds of the two kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeat):
            call()
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = {}
    for event in profile.events():
        for name in ("intra", "state"):
            if f"{name}_kernel" in event.name:
                spent.setdefault(name, []).append(event.device_time)
    return {f"{name}_us": sorted(times)[len(times) // 2] for name, times in spent.items()}


def our_calls(K: int):
    """The two calls at chunk sizes 32 and 64, eager and captured, and the tensors they work on."""
    x = inputs("random", K)
    tokens_first = [a.transpose(1, 2).contiguous() for a in x[:5]]
    calls = {}
    for C in (32, 64):
        calls[f"prefill_{C}"] = lambda C=C: torch.ops.kdakit.prefill(*x[:5], C, None, x[5])
        calls[f"chunk_kda_{C}"] = lambda C=C: kdakit.torch.chunk_kda(
            *tokens_first, initial_state=x[5], output_final_state=True, chunk_size=C, backend="cuda"
        )
        calls[f"prefill_{C}_graph"] = graph_of(calls[f"prefill_{C}"])
    return x, tokens_first, calls


def show(rows, row):
    rows.append(row)
    print({n: float(f"{v:.3g}") if isinstance(v, float) else v for n, v in row.items()}, flush=True)


def times():
    """Milliseconds. Ours first; then, where FLA can be imported, interleaved with FLA's chunk_kda on the same float32 tensors."""
    rows: list[dict] = []
    made = {K: our_calls(K) for K in (64, 128)}
    for K, (_, _, calls) in made.items():
        show(rows, dict(K=K, alone=True, **measure(calls)))
        for C in (32, 64):
            show(rows, dict(K=K, C=C, **by_kernel(calls[f"prefill_{C}"])))
    write("time", rows)
    try:
        from fla.ops.kda import chunk_kda as fla_chunk_kda
    except ImportError as problem:
        print("no FLA:", problem)
        return rows
    for K, (x, tokens_first, calls) in made.items():
        with torch.no_grad():
            start = time.time()
            calls["fla"] = lambda x=x, t=tokens_first: fla_chunk_kda(*t, initial_state=x[5], output_final_state=True)
            theirs = calls["fla"]()
            torch.cuda.synchronize()
            print("FLA first call", round(time.time() - start, 1), "s", flush=True)
            calls["fla_graph"] = graph_of(calls["fla"])
            row = dict(K=K, alone=False, **measure(calls))
        two = [a[:, :2] for a in x]  # heads
        want = truth(*two, 64)["o"].transpose(1, 2)
        row |= {"error": relative(calls["chunk_kda_64"]()[0][:, :, :2], want), "fla_error": relative(theirs[0][:, :, :2], want)}
        for C in (32, 64):
            row[f"ratio_{C}"] = row["fla"] / row[f"prefill_{C}"]
            row[f"ratio_{C}_chunk_kda"] = row["fla"] / row[f"chunk_kda_{C}"]
            row[f"ratio_{C}_graph"] = row["fla_graph"] / row[f"prefill_{C}_graph"]
        show(rows, row)
        write("time", rows)
    return rows


def write(name: str, rows) -> None:
    about = dict(
        gpu=torch.cuda.get_device_name(),
        torch=torch.__version__,
        commit=os.environ.get("COMMIT") or machine.commit(),
        B=B,
        H=H,
        T=T,
        rows=rows,
    )
    Path(os.environ.get("OUT", "."), f"cuda_{name}.json").write_text(json.dumps(about, indent=1) + "\n")


def once(K: int, C: int):
    x = inputs("random", K)
    for _ in range(2):
        torch.ops.kdakit.prefill(*x[:5], C, None, x[5])
    torch.cuda.synchronize()


def main():
    mode = sys.argv[1]
    if mode == "once":
        once(int(sys.argv[2]), int(sys.argv[3]))
        return
    rows = dict(cases=cases, accuracy=accuracy, time=times)[mode](*sys.argv[2:])
    write("_".join(sys.argv[1:]), rows)
    sys.exit(any(row.get("ok") is False for row in rows))


if __name__ == "__main__":
    main()
