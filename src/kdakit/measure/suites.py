"""Named sets of jobs for one run, and what they are meant to show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kdakit.cases import SHAPES, Shape
from kdakit.measure import inputs
from kdakit.measure.contestants import Job
from kdakit.measure.regimes import REGIMES


class Entry(NamedTuple):
    job: Job
    contestants: tuple[str, ...]


class Aim(NamedTuple):
    """`value(ms)` is compared with `limit`; ms(entry, contestant, field='median_ms') looks a number up."""

    text: str
    value: Callable[[Any], float]
    at_least: bool
    limit: float


ALL = ("triton_gpu", "cuda", "fla", "flash_kda", "cudnn", "flash_kda_vllm")
TORCH = ("triton_gpu", "cuda", "fla")


# Forward in a CUDA graph, in every regime of gates: of those that run it, no time may hold for one kind of gate only.
REGIME_SHAPES = {
    "h96": SHAPES["h96"], "h64": SHAPES["h64"], "h32": SHAPES["h32"], "h16": SHAPES["h16"], "t8192 h24": Shape(1, 8192, 24),
    "t4096 h8": Shape(1, 4096, 8), "t2048 h12": Shape(1, 2048, 12), "t65536 h4": Shape(1, 65536, 4),
}  # fmt: skip
IN_REGIMES = ("triton_gpu", "cuda", "cudnn", "cudnn_g32", "flash_kda_vllm")


def _half(shape: Shape, mode: str = "fwd", gate: str = "bounded", regime: str = "") -> Job:
    return Job(shape, mode, "bfloat16", gate, regime=regime)


def _given(shape: Shape) -> Job:
    return Job(shape, "fwdbwd", "bfloat16", "log_decay", wide_beta=True)


def _step(shape: Shape, gate: str, kept: bool) -> Job:
    given = gate == "given"
    return Job(shape, "train", "bfloat16", "log_decay" if given else gate, wide_beta=given, states=False, disable_recompute=kept)


def _single(K: int, chunk_size: int) -> Job:
    return Job(Shape(1, 4096, 16, K), "fwd", "float32", "log_decay", chunk_size)


SUITES: dict[str, dict[str, Entry]] = {
    # bfloat16, K = V = 128, everything in the kernel, initial and final state
    "gpu": {
        "fwd h96": Entry(_half(SHAPES["h96"]), ALL),
        "fwd h64": Entry(_half(SHAPES["h64"]), ALL),
        "fwd h32": Entry(_half(SHAPES["h32"]), ALL),
        "fwd h16": Entry(_half(SHAPES["h16"]), ALL),
        "fwd varlen96": Entry(_half(SHAPES["varlen96"]), ALL),
        "fwd h96 softplus": Entry(_half(SHAPES["h96"], gate="softplus"), TORCH),
        "fwd h32 softplus": Entry(_half(SHAPES["h32"], gate="softplus"), ("triton_gpu", "cuda")),
        **{
            f"{regime} {name}": Entry(_half(shape, "graph", regime=regime), IN_REGIMES)
            for regime in REGIMES
            for name, shape in REGIME_SHAPES.items()
        },
        # log-decays given in float32, q and k normalised outside: what training stacks call
        "given h96": Entry(_half(SHAPES["h96"], "graph", "log_decay"), ("triton_gpu", "cuda", "cudnn")),
        "given h32": Entry(_half(SHAPES["h32"], "graph", "log_decay"), ("triton_gpu", "cuda", "cudnn")),
        "fwdbwd h32": Entry(_half(SHAPES["h32"], "fwdbwd"), ("triton_gpu", "fla", "cudnn")),
        "fwdbwd h96": Entry(_half(SHAPES["h96"], "fwdbwd"), ("triton_gpu", "fla", "cudnn")),
        # beta in float32 as well, which cuDNN's backward asks for
        "fwdbwd h32 given": Entry(_given(SHAPES["h32"]), ("triton_gpu", "fla", "cudnn")),
        "fwdbwd h96 given": Entry(_given(SHAPES["h96"]), ("triton_gpu", "fla", "cudnn")),
        "eager h2": Entry(_half(Shape(1, 512, 2), "eager"), ALL),
        "eager h16": Entry(_half(SHAPES["h16"], "eager"), ALL),
        "decode b1": Entry(_half(Shape(1, 1, 32), "decode"), ("triton_gpu", "fla")),
        "decode b32": Entry(_half(Shape(32, 1, 32), "decode"), ("triton_gpu", "fla")),
        "decode b256": Entry(_half(Shape(256, 1, 32), "decode"), ("triton_gpu", "fla")),
    },
    # float32 with ready-made log-decays, `cuda_prefill` also giving out w and u; bfloat16 beside it. fla has no
    # chunk size, writes its own w and u and drops them: its time stands for both chunk sizes and both calls.
    "cuda": {
        **{f"fwd k{K} c64": Entry(_single(K, 64), ("triton_gpu", "cuda", "cuda_prefill", "fla")) for K in (64, 128)},
        **{f"fwd k{K} c32": Entry(_single(K, 32), ("cuda", "cuda_prefill")) for K in (64, 128)},
        "fwd h96": Entry(_half(SHAPES["h96"]), ALL),
        "fwd h64": Entry(_half(SHAPES["h64"]), ALL),
        "fwd h32": Entry(_half(SHAPES["h32"]), ALL),
    },
    # Other head sizes, K = V, as many channels in all: what a multiplication costs there.
    "sizes": {
        f"{mode} k{K}": Entry(_half(Shape(1, 8192, 4096 // K, K), mode), TORCH if mode == "fwd" else ("triton_gpu", "fla"))
        for mode in ("fwd", "fwdbwd")
        for K in (32, 64, 96, 128, 192, 256)
    },
    # Steps as a trainer takes them, in a CUDA graph, without states; `kept`: with disable_recompute.
    "training": {
        f"{name} {gate}{' kept' if kept else ''}": Entry(_step(SHAPES[name], gate, kept), ("triton_gpu", "fla"))
        for name in ("h32", "h96")
        for gate in ("bounded", "softplus", "given")
        for kept in (False, True)
    },
}


# Suites that are not made of single calls: modules with `run(args)`, which makes the record, and `tables(record)`.
WHOLE = {
    "layer": "kdakit.measure.whole_layers",
    "model": "kdakit.measure.whole_models",
    "serving": "kdakit.measure.whole_serving",
    "pool": "kdakit.measure.pool_times",
    "state_bits": "kdakit.measure.state_bits",
    "first_calls": "kdakit.measure.first_calls",
    "pages": "kdakit.measure.page_times",
    "stacks": "kdakit.measure.stack_times",
}


def cannot_run() -> str | None:
    """Why no suite can run on this machine; None: they can."""
    return "torch sees no GPU" if inputs.gpu() is None else None


def _faster(entry: str, ours: str, peer: str, times: float, theirs: str = "", what: str = "") -> Aim:
    """`theirs`: the peer's own entry where that is another one; `what`: more on what is timed."""
    return Aim(f"{entry}: {ours}{what}, times as fast as {peer}", lambda ms: ms(theirs or entry, peer) / ms(entry, ours), True, times)


def _below(entry: str, ours: str, limit: float) -> Aim:
    return Aim(f"{entry}: {ours}, ms", lambda ms: ms(entry, ours), False, limit)


def _per_flop(mode: str, K: int, limit: float) -> Aim:
    value = lambda ms: ms(f"{mode} k128", "triton_gpu", "flops_per_s") / ms(f"{mode} k{K}", "triton_gpu", "flops_per_s")
    return Aim(f"{mode} k{K}: triton_gpu, time per FLOP over that of K = 128", value, False, limit)


def _memory(entry: str, limit: float) -> Aim:
    value = lambda ms: ms(entry, "triton_gpu", "extra_mib") / ms(entry, "fla", "extra_mib")
    return Aim(f"{entry}: triton_gpu, peak memory as a share of fla's", value, False, limit)


AIMS: dict[str, tuple[Aim, ...]] = {
    "gpu": (
        _faster("fwd h96", "triton_gpu", "fla", 3.3), _faster("fwd h96", "triton_gpu", "flash_kda", 1.75),
        _faster("fwd h64", "triton_gpu", "fla", 2.8), _faster("fwd h64", "triton_gpu", "flash_kda", 1.8),
        _faster("fwd h32", "triton_gpu", "flash_kda", 2.2), _faster("fwd varlen96", "triton_gpu", "flash_kda", 1.5),
        _faster("fwd h16", "triton_gpu", "fla", 3.5), _faster("eager h16", "triton_gpu", "fla", 3.5),
        _below("eager h2", "triton_gpu", 0.15),
        Aim("fwd h96 softplus: triton_gpu, times its bounded time",
            lambda ms: ms("fwd h96 softplus", "triton_gpu") / ms("fwd h96", "triton_gpu"), False, 1.25),
        _faster("fwd h96 softplus", "triton_gpu", "fla", 2.5),
        _faster("fwdbwd h32", "triton_gpu", "fla", 2.2), _faster("fwdbwd h96", "triton_gpu", "fla", 2.2),
        _memory("fwdbwd h32", 0.6), _memory("fwdbwd h96", 0.6),
        _below("decode b1", "triton_gpu", 0.005), _below("decode b32", "triton_gpu", 0.042), _below("decode b256", "triton_gpu", 0.3),
        *(_faster(entry, "cuda", "flash_kda", 2.0) for entry in ("fwd h96", "fwd h64", "fwd h32")),
    ),
    "cuda": (
        *(_faster(f"fwd k{K} c{C}", "cuda", "fla", 2.0, f"fwd k{K} c64") for K in (64, 128) for C in (64, 32)),
        *(_faster(f"fwd k{K} c{C}", "cuda_prefill", "fla", 2.0, f"fwd k{K} c64", ", w and u too") for K in (64, 128) for C in (64, 32)),
        *(_faster(entry, "cuda", "flash_kda", 2.0) for entry in ("fwd h96", "fwd h64", "fwd h32")),
    ),
    "sizes": (_per_flop("fwd", 64, 1.15), _per_flop("fwdbwd", 64, 1.15)),
    "training": (
        _below("h32 bounded", "triton_gpu", 1.1), _below("h96 bounded", "triton_gpu", 3.0),
        _below("h32 given", "triton_gpu", 1.3), _below("h96 given", "triton_gpu", 3.5),
        _below("h32 bounded kept", "triton_gpu", 1.1), _below("h96 bounded kept", "triton_gpu", 3.0),
    ),
}  # fmt: skip


def judge(record: dict[str, Any]) -> list[tuple[str, str, float, float | None, bool | None]]:
    """(text, 'at least' or 'at most', limit, value, met) of every aim of the suite that was run; None where a number is missing."""
    rows = {(r["entry"], r["contestant"]): r for r in record["results"]}

    def look_up(entry: str, contestant: str, field: str = "median_ms") -> float:
        return rows[entry, contestant][field]

    found = []
    for aim in AIMS.get(record["settings"]["suite"], ()):
        try:
            value = aim.value(look_up)
        except KeyError:
            found.append((aim.text, "at least" if aim.at_least else "at most", aim.limit, None, None))
            continue
        met = value >= aim.limit if aim.at_least else value <= aim.limit
        found.append((aim.text, "at least" if aim.at_least else "at most", aim.limit, value, met))
    return found
