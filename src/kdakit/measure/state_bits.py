"""`kdakit bench --suite state_bits`: how far decoding strays from float64 over 100,000 tokens, for every way of storing states.

One sequence, H = 4, K = V = 128, unit q and k, beta uniform in [0, 1], log-decays uniform in [-GATES, 0]; a launch and a rounding of the
state per token. Errors of the last 1,000 outputs before each position, and of the state after the last.
"""

from __future__ import annotations

from typing import Any

from kdakit.measure import records, suites
from kdakit.measure.choices import UsageError

GATES = {"none": 0.0, "to -1e-4": 1e-4, "to -0.05": 0.05, "to -5": 5.0}
STORAGES = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "int8"},
    "int8 + feedback": {"dtype": "int8", "feedback": True},
}
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1.125, "int8 + feedback": 2.125}  # per element
TOKENS, IN_A_GRAPH, POSITIONS = 100_000, 1000, (1_000, 10_000, 100_000)
H, K = 4, 128


def run(args) -> dict[str, Any]:
    if (reason := suites.cannot_run()) is not None:
        raise UsageError(f"--suite state_bits cannot run here: {reason}")
    from kdakit.torch import chunk_kda

    rows: list[dict[str, Any]] = []
    for gate, bound in GATES.items():
        x = inputs(bound)
        truth, state = chunk_kda(**{n: y.double() for n, y in x.items()}, output_final_state=True, backend="torch_native")
        off = lambda a, b: float((a.double() - b).norm() / b.norm())
        for stored, options in STORAGES.items():
            o, after = decode_all(x, options)
            errors = {str(p): off(o[:, p - 1000 : p], truth[:, p - 1000 : p]) for p in POSITIONS}
            rows.append({"entry": gate, "contestant": stored, "errors": errors, "error_state": off(after, state)})
            made = records.record("state_bits", {"suite": "state_bits", "tokens": TOKENS}, rows, [])
            if args.json:
                records.save(made, args.json)
    return made


def inputs(bound: float):
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    normal = lambda: torch.randn(1, TOKENS, H, K, device="cuda", generator=generator)
    uniform = lambda *size: torch.rand(1, TOKENS, H, *size, device="cuda", generator=generator)
    unit = lambda x: x / x.norm(dim=-1, keepdim=True)
    return {"q": unit(normal()), "k": unit(normal()), "v": normal(), "g": -bound * uniform(K), "beta": uniform()}


def decode_all(x, options: dict[str, Any]):
    """o of one sequence and its last state."""
    import torch

    from kdakit.serving.torch import StatePool, decode

    pool = StatePool(1, H, K, K, device="cuda", **{n: getattr(torch, y) if n == "dtype" else y for n, y in options.items()})
    slots = torch.tensor(pool.allocate(1), device="cuda")
    buffers = {n: y[:, :IN_A_GRAPH].clone() for n, y in x.items()}
    token = lambda t: decode(pool, slots, **{n: y[:, t : t + 1] for n, y in buffers.items()})
    token(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = torch.cat([token(t) for t in range(IN_A_GRAPH)], 1)
    for tensor in pool.tensors():
        tensor.zero_()
    parts = []
    for start in range(0, TOKENS, IN_A_GRAPH):
        for n, y in buffers.items():
            y.copy_(x[n][:, start : start + IN_A_GRAPH])
        graph.replay()
        parts.append(o.clone())
    return torch.cat(parts, 1), pool.states([0])


def tables(record: dict[str, Any]):
    header = ["log-decay", "states", "bytes per element", *(f"after {int(p):,}" for p in POSITIONS), "state"]
    rows = []
    for r in record["results"]:
        errors = [f"{r['errors'][str(p)]:.1e}" for p in POSITIONS]
        rows.append([r["entry"], r["contestant"], f"{BYTES[r['contestant']]:g}", *errors, f"{r['error_state']:.1e}"])
    yield "relative errors of decoding, against float64", header, rows
