"""`kdakit bench --suite pool`: the calls over a pool of states, inside CUDA graphs: decode, and drafts with some or all accepted.

One token or a draft of 4 or 8 for each row, H = 32, K = V = 128, bfloat16 tokens with gate, norms and sigmoid in the kernel; all drafts
accepted. `both` is `verify` and then `commit`; `cold` the same over four pools in turn, so that none finds its own states in the cache.
`seldom` is `decode` over a pool that writes states at every eighth token, in the mean of eight.
"""

from __future__ import annotations

from typing import Any

from kdakit.cases import FUSED
from kdakit.measure import records, suites, timing
from kdakit.measure.choices import UsageError

OPTIONS = {name: value for name, value in FUSED.items() if name != "output_final_state"} | {"lower_bound": -5.0, "safe_gate": True}
STORAGES: dict[str, dict[str, Any]] = {
    "float32": {}, "float32, [V, K]": {"state_v_first": True}, "bfloat16": {"dtype": "bfloat16"}, "int8": {"dtype": "int8"},
    "int8 + feedback": {"dtype": "int8", "feedback": True},
}  # fmt: skip
ROWS = (1, 32, 256)  # of decode
DRAFTS = (4, 8)  # tokens, 32 rows
POOLS, PENDING = 4, 8
H, K = 32, 128


def run(args) -> dict[str, Any]:
    if (reason := suites.cannot_run()) is not None:
        raise UsageError(f"--suite pool cannot run here: {reason}")
    rows: list[dict[str, Any]] = []
    for stored, options in STORAGES.items():
        whole = stored.startswith("float32")
        for B in ROWS:
            calls = pooled_calls(B, 1, options)
            rows += timed(stored, B, 1, {n: call for n, call in calls.items() if whole or n != "step"}, args)
        for T in DRAFTS:
            several = [pooled_calls(32, T, options) for _ in range(POOLS if whole else 1)]
            calls = several[0] if whole else {"both": several[0]["both"]}
            if whole:
                calls["both, cold"] = lambda several=several: [each["both"]() for each in several]
            rows += timed(stored, 32, T, calls, args)
            made = records.record("pool", {"suite": "pool", "repeat": args.repeat}, rows, [])
            if args.json:
                records.save(made, args.json)
    return made


def timed(stored: str, B: int, T: int, calls: dict[str, Any], args) -> list[dict[str, Any]]:
    """Microseconds a call, all taking turns."""
    from kdakit.measure.runners import in_graph

    runs = {name: in_graph(call, 3 * PENDING) for name, call in calls.items()}
    taken = timing.on_gpu(runs, args.repeat, args.seconds)
    found = []
    for name, (samples, _) in taken.items():
        us = [1000 * ms / (POOLS if name.endswith("cold") else 1) for ms in samples]
        found.append({"entry": f"{stored} {B} x {T}", "contestant": name, "stored": stored, "rows": B, "tokens": T, "samples_us": us,
                      "median_us": timing.median(us)})  # fmt: skip
    return found


def pooled_calls(B: int, T: int, options: dict[str, Any]) -> dict[str, Any]:
    """{name: call} of the plain step and the pooled calls on random bfloat16 tokens."""
    import torch

    from kdakit.serving.torch import StatePool, advance, commit, decode, verify
    from kdakit.torch import fused_recurrent_kda

    generator = torch.Generator("cuda").manual_seed(0)
    normal = lambda *size: torch.randn(*size, device="cuda", generator=generator).bfloat16()
    tokens = {name: normal(B, T, H, K) for name in ("q", "k", "v", "g")} | {"beta": normal(B, T, H)}
    given = tokens | {"A_log": torch.rand(H, device="cuda"), "dt_bias": torch.zeros(H * K, device="cuda")}
    stored = {name: getattr(torch, x) if name == "dtype" else x for name, x in options.items()}
    pool = StatePool(B, H, K, K, device="cuda", **stored)
    slots = torch.tensor(pool.allocate(B), device="cuda").flip(0).contiguous()
    accepted = torch.full((B,), T, device="cuda")
    draft = verify(pool, slots, **given, **OPTIONS)[1] if T > 1 else None
    states = torch.zeros(B, H, K, K, device="cuda")
    turned = {"state_v_first": bool(options.get("state_v_first"))}

    def both():
        commit(pool, verify(pool, slots, **given, **OPTIONS)[1], accepted)

    def again(call, *more, **tokens):
        draft.spent = False
        return call(pool, draft, accepted, *more, **tokens)

    if T == 1:
        step = lambda: fused_recurrent_kda(**given, **OPTIONS, initial_state=states, inplace_final_state=True, **turned)
        seldom = StatePool(B, H, K, K, device="cuda", pending=PENDING, **stored)
        seldom.allocate(B)
        pools = {"decode": pool, "seldom": seldom}
        return {"step": step} | {name: lambda own=own: decode(own, slots, **given, **OPTIONS) for name, own in pools.items()}
    return {"verify": lambda: verify(pool, slots, **given, **OPTIONS), "commit": lambda: again(commit), "both": both,
            "advance": lambda: again(advance, **given, **OPTIONS)}  # fmt: skip


def tables(record: dict[str, Any]):
    """A column per storage."""
    found = {(r["stored"], r["rows"], r["tokens"], r["contestant"]): r["median_us"] for r in record["results"]}
    stored = [name for name in STORAGES if any(key[0] == name for key in found)]
    calls = [(f"{name}, {B} rows" if B > 1 else f"{name}, 1 row", B, 1, name) for name in ("step", "decode", "seldom") for B in ROWS]
    calls += [(f"{name}, {T} draft tokens", 32, T, name) for T in DRAFTS for name in ("verify", "commit", "both", "both, cold", "advance")]
    rows = [[text, *(f"{found[name, *key]:.1f}" if (name, *key) in found else "–" for name in stored)] for text, *key in calls]
    yield "microseconds per call", ["", *stored], [row for row in rows if set(row[1:]) != {"–"}]
