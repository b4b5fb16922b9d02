"""`kdakit bench --suite pages`: an engine's pool of padded pages beside our own, inside CUDA graphs: decode, prefill that leaves states.

H = 32, K = V = 128, bfloat16 tokens with gate, norms and sigmoid in the kernel. Prefill: 8192 tokens, alone, leaving 16 states at chunk
boundaries, and leaving 16 anywhere.
"""

from __future__ import annotations

from typing import Any

from kdakit.cases import FUSED
from kdakit.measure import records, suites, timing
from kdakit.measure.choices import UsageError

H, K, TOKENS, STATES, PADDING = 32, 128, 8192, 16, 4096


def run(args) -> dict[str, Any]:
    if (reason := suites.cannot_run()) is not None:
        raise UsageError(f"--suite pages cannot run here: {reason}")
    rows: list[dict[str, Any]] = []
    for dtype in ("float32", "bfloat16"):
        for count in (32, 256):
            for v_first in (False, True):
                entry = f"decode, {count} rows, {dtype} states {'[V, K]' if v_first else '[K, V]'}"
                rows += timed(entry, decode_calls(count, dtype, v_first), args, 20)
        rows += timed(f"prefill, {TOKENS} tokens, {dtype} states", prefill_calls(dtype), args, 1)
        made = records.record("pages", {"suite": "pages", "repeat": args.repeat}, rows, [])
        if args.json:
            records.save(made, args.json)
    return made


def timed(entry: str, calls: dict[str, Any], args, in_a_graph: int) -> list[dict[str, Any]]:
    from kdakit.measure.runners import in_graph

    taken = timing.on_gpu({name: in_graph(call, in_a_graph) for name, call in calls.items()}, args.repeat, args.seconds)
    samples = {name: [1000 * ms for ms in found] for name, (found, _) in taken.items()}
    return [{"entry": entry, "contestant": n, "samples_us": us, "median_us": timing.median(us)} for n, us in samples.items()]


def inputs(rows: int, T: int) -> dict[str, Any]:
    import torch

    draw = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    tokens = {name: draw(rows, T, H, K) for name in ("q", "k", "v", "g")} | {"beta": draw(rows, T, H)}
    return tokens | {"A_log": torch.zeros(H, device="cuda"), "dt_bias": torch.zeros(H * K, device="cuda")}


def an_engines_pool(count: int, dtype: str, v_first: bool):
    """Pages with padding behind each state, slot 0 nobody's."""
    import torch

    from kdakit.serving.torch import pages

    memory = torch.zeros(count, H * K * K + PADDING, dtype=getattr(torch, dtype), device="cuda")
    return pages.Pages(memory[:, : H * K * K].unflatten(1, (H, K, K)), v_first, first=1)


def decode_calls(rows: int, dtype: str, v_first: bool) -> dict[str, Any]:
    import torch

    from kdakit.serving.torch import StatePool, decode, pages

    x, slots = inputs(rows, 1), torch.randperm(rows, device="cuda").int()
    pool = StatePool(rows, H, K, K, dtype=getattr(torch, dtype), state_v_first=v_first, device="cuda")
    pool.allocate(rows)
    theirs, moved = an_engines_pool(rows + 1, dtype, v_first), slots + 1
    ours = lambda: decode(pool, slots, **x, **FUSED)
    return {"own pool": ours, "engine's pages": lambda: pages.decode(theirs, moved, **x, **FUSED)}


def prefill_calls(dtype: str) -> dict[str, Any]:
    import torch

    from kdakit.serving.torch import pages

    x, slot, cu = inputs(1, TOKENS), torch.ones(1, dtype=torch.int32, device="cuda"), torch.tensor([0, TOKENS], device="cuda")
    theirs = an_engines_pool(STATES + 4, dtype, True)
    where = torch.arange(1, STATES + 1, device="cuda") * (TOKENS // (STATES + 1) // 64 * 64)
    row, targets = torch.zeros_like(where), torch.arange(2, STATES + 2, device="cuda")
    call = lambda marks: lambda: pages.prefill(theirs, slot, **x, cu_seqlens=cu, marks=marks, **FUSED)
    return {"no states": call(None), f"{STATES} at chunks": call(pages.Marks(row, where, targets, aligned=True)),
            f"{STATES} anywhere": call(pages.Marks(row, where + 13, targets))}  # fmt: skip


def tables(record: dict[str, Any]):
    """Decode and prefill, each with its ratios to the first column."""
    for kind in ("decode", "prefill"):
        every = [r for r in record["results"] if r["entry"].startswith(kind)]
        names = list(dict.fromkeys(r["contestant"] for r in every))
        rows = []
        for entry in dict.fromkeys(r["entry"] for r in every):
            us = {r["contestant"]: r["median_us"] for r in every if r["entry"] == entry}
            rows.append([entry, *(f"{us[n]:.1f}" for n in names), *(f"{us[n] / us[names[0]]:.2f}" for n in names[1:])])
        if rows:
            yield f"{kind}: microseconds per call", ["", *names, *(f"{n}: times {names[0]}" for n in names[1:])], rows
