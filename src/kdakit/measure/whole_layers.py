"""`kdakit bench --suite layer`: a KimiDeltaAttention as Kimi-Linear-48B sizes it, learning and decoding, beside flash-linear-attention's.

train     forward without gradients, forward and backward, and the memory above weights and input; ours eager and under torch.compile
decode    a token, or a few, of sequences that carry a cache, in a CUDA graph: the layer, its projections alone, and what is between them
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kdakit.measure import timing
from kdakit.measure.choices import UsageError
from kdakit.measure.whole_models import missing_peer

KEEP = 400 << 20  # bytes of states that take turns in a graph of decode steps: more than any cache holds


@dataclass(frozen=True)
class Settings:
    hidden: int = 2304
    head_dim: int = 128
    heads: tuple[int, ...] = (16, 32, 64)
    lengths: tuple[int, ...] = (1024, 8192, 32768)
    compiled: tuple[int, int] = (32, 8192)  # heads and tokens that are also timed under torch.compile
    decoded: tuple[tuple[int, int], ...] = ((1, 1), (8, 1), (32, 1), (128, 1), (1, 4), (32, 4), (32, 8))  # sequences, tokens
    repeat: int = 20
    seconds: float = 0.5


@dataclass(frozen=True)
class Run:
    """What `timing` calls, and how many calls that is."""

    call: Callable[[], Any]
    calls: int = 1


def run(args) -> dict[str, Any]:
    from kdakit.measure import inputs, records

    if inputs.gpu() is None:
        raise UsageError("--suite layer needs a CUDA device")
    settings = Settings()
    known = entries(settings)
    wanted = args.entry or list(known)  # in the order in which they were named
    if unknown := set(wanted) - set(known):
        raise UsageError(f"entry must be among {', '.join(known)}, got {', '.join(sorted(unknown))}")
    rows: list[dict[str, Any]] = []
    missing: list[dict[str, Any]] = []
    found = records.record("layer", vars(settings) | {"suite": "layer", "dtype": "bfloat16"}, rows, missing)
    for name in wanted:
        made, left_out = known[name]()
        rows += [{"entry": name, **row} for row in made]
        missing += [{"entry": name, **row} for row in left_out]
        records.keep(found, args.json)
    return found


def entries(settings: Settings) -> dict[str, Callable[[], tuple[list, list]]]:
    made: dict[str, Callable[[], tuple[list, list]]] = {}
    for H in settings.heads:
        for T in settings.lengths:
            made[f"train h{H} t{T}"] = lambda H=H, T=T: train(settings, H, T)
    for N, T in settings.decoded:
        made[f"decode n{N} t{T}"] = lambda N=N, T=T: (decode(settings, N, T), [])
    return made


def layers(settings: Settings, H: int, T: int):
    """{contestant: layer} on the same weights, and who is missing."""
    import torch

    from kdakit.layers.torch import KimiDeltaAttention

    torch.manual_seed(0)
    sizes = dict(hidden_size=settings.hidden, head_dim=settings.head_dim, num_heads=H)
    ours = KimiDeltaAttention(**sizes).cuda().bfloat16()
    made = {"kdakit": ours}
    if settings.compiled == (H, T):
        made["kdakit, compiled"] = torch.compile(ours, fullgraph=True)
    if reason := missing_peer():
        return made, [{"contestant": "fla", "reason": reason}]
    from fla.layers import KimiDeltaAttention as Theirs

    made["fla"] = Theirs(**sizes).cuda().bfloat16()
    made["fla"].load_state_dict(ours.state_dict())
    return made, []


def train(settings: Settings, H: int, T: int) -> tuple[list, list]:
    import torch

    made, missing = layers(settings, H, T)
    x = torch.randn(1, T, settings.hidden, device="cuda", dtype=torch.bfloat16)
    given, d_o = x.clone().requires_grad_(), torch.randn_like(x)

    def forward(layer):
        with torch.no_grad():
            return layer(x)[0]

    def both(layer):
        layer(given)[0].backward(d_o)
        given.grad = None
        layer.zero_grad()

    rows = {name: {"contestant": name} for name in made}
    for what, call in (("forward", forward), ("fwdbwd", both)):
        runs = {name: Run(partial(call, layer)) for name, layer in made.items()}
        for name, (gpu, host) in timing.on_gpu(runs, settings.repeat, settings.seconds).items():
            rows[name] |= {f"{what}_ms": statistics.median(gpu), f"{what}_host_ms": statistics.median(host)}
    for name, layer in made.items():
        torch.cuda.empty_cache()
        rows[name]["extra_mib"] = timing.gpu_extra_mib(partial(both, layer))
    return list(rows.values()), missing


def decode(settings: Settings, N: int, T: int, H: int = 32) -> list[dict[str, Any]]:
    """Microseconds of one call in a graph that goes through several caches, so that no state is found in a cache of the chip."""
    import torch
    import torch.nn.functional as F

    from kdakit.layers.torch.fused.layer import projected
    from kdakit.layers.torch.fused.step import Carried, step

    made, _ = layers(settings, H, 0)
    ours = made["kdakit"].eval()
    s = ours.sizes
    draw = lambda width: torch.randn(N, T, width, device="cuda", dtype=torch.bfloat16)
    caches = [ours.new_cache(N) for _ in range(max(2, KEEP // (4 * N * H * s.head_dim * s.head_v_dim) // 8))][:64]
    x, row, g, beta, gate = draw(settings.hidden), draw(2 * s.key_dim + s.value_dim), draw(s.gate_dim), draw(H), draw(s.value_dim)

    def whole(cache):
        ours(x, cache=cache, in_place=True)

    def between(cache):
        step(ours, row, g, beta, gate, Carried(*cache), Carried(*cache))

    def projections(cache):
        _, f, low, _ = projected(ours, x)
        return ours.f_proj[1](f), F.linear(low, ours.g_proj[1].weight), ours.o_proj(gate)

    with torch.no_grad():
        parts = (("layer", whole), ("projections", projections), ("between", between))
        return [{"contestant": "kdakit", **{f"{name}_us": graph_us(call, caches) for name, call in parts}}]


def graph_us(call: Callable[[Any], Any], caches: list, replays: int = 10) -> float:
    import torch

    call(caches[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for cache in caches:
            call(cache)
    gpu, _ = timing.on_gpu({"graph": Run(graph.replay, len(caches))}, replays, 0.2)["graph"]
    return 1000 * statistics.median(gpu)


def tables(record: dict[str, Any]):
    s, rows = record["settings"], record["results"]
    header = ["", "layer", "forward, ms", "forward + backward, ms", "peak memory, MiB"]
    made = []
    for r in (r for r in rows if r["entry"].startswith("train")):
        made.append([r["entry"][6:], r["contestant"], f"{r['forward_ms']:.3f}", f"{r['fwdbwd_ms']:.2f}", f"{r['extra_mib']:,.0f}"])
    if made:
        yield f"the layer, hidden size {s['hidden']}, heads of {s['head_dim']}, softplus gate, {s['dtype']}, one sequence", header, made
    header = ["", "layer, us", "its projections, us", "between them, us"]
    made = [[r["entry"][7:], *(f"{r[f'{n}_us']:.1f}" for n in ("layer", "projections", "between"))] for r in rows if "layer_us" in r]
    if made:
        yield "decoding with the layer of 32 heads, in a CUDA graph", header, made
