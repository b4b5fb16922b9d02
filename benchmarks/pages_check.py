"""An engine's pool against our own, on a GPU: decode with padded pages, and prefill with states left on the way.

python benchmarks/pages_check.py --out FILE
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from kdakit.serving.torch import StatePool, decode, pages

OPTIONS = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)


def inputs(rows: int, T: int, H: int, K: int = 128) -> dict:
    draw = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    return dict(q=draw(rows, T, H, K), k=draw(rows, T, H, K), v=draw(rows, T, H, K), g=draw(rows, T, H, K), beta=draw(rows, T, H),
                A_log=torch.zeros(H, device="cuda"), dt_bias=torch.zeros(H * K, device="cuda"))  # fmt: skip


def captured(call) -> torch.cuda.CUDAGraph:
    """A graph of 20 calls: what the GPU does, without the host."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            call()
    return graph


def timed(*calls) -> list[float]:
    """Median microseconds of each call, in turns."""
    graphs = [captured(call) for call in calls]
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(15):
        for graph, times in zip(graphs, found, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(1e3 * start.elapsed_time(end) / 20)
    return [statistics.median(times) for times in found]


def decoding(found: dict, rows: int, H: int = 32, K: int = 128) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for v_first in (False, True):
            x, slots = inputs(rows, 1, H), torch.randperm(rows, device="cuda").int()
            pool = StatePool(rows, H, K, K, dtype=dtype, state_v_first=v_first, device="cuda")
            pool.allocate(rows)
            memory = torch.zeros(rows + 1, H * K * K + 4096, dtype=dtype, device="cuda")
            theirs = pages.Pages(memory[:, : H * K * K].unflatten(1, (H, K, K)), v_first, first=1)
            ours, engine = timed(lambda: decode(pool, slots, **x, **OPTIONS), lambda: pages.decode(theirs, slots + 1, **x, **OPTIONS))  # noqa: B023
            moved = slots + 1
            (engine,) = timed(lambda: pages.decode(theirs, moved, **x, **OPTIONS))  # noqa: B023
            name = f"decode N{rows} H{H} {str(dtype)[6:]} {'[V, K]' if v_first else '[K, V]'}"
            found[name] = {"own pool us": ours, "engine's pages us": engine, "ratio": engine / ours}
            print(name, found[name], flush=True)


def prefilling(found: dict, T: int = 8192, H: int = 32, K: int = 128) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, slot = inputs(1, T, H), torch.ones(1, dtype=torch.int32, device="cuda")
        cu = torch.tensor([0, T], device="cuda")
        memory = torch.zeros(20, H * K * K + 4096, dtype=dtype, device="cuda")
        theirs = pages.Pages(memory[:, : H * K * K].unflatten(1, (H, K, K)), True, first=1)
        where = torch.arange(1, 17, device="cuda") * (T // 17 // 64 * 64)
        marks = pages.Marks(torch.zeros_like(where), where, torch.arange(2, 18, device="cuda"), aligned=True)
        loose = pages.Marks(torch.zeros_like(where), where + 13, torch.arange(2, 18, device="cuda"))
        call = lambda m: lambda: pages.prefill(theirs, slot, **x, cu_seqlens=cu, marks=m, **OPTIONS)  # noqa: B023
        without, aligned, anywhere = timed(call(None), call(marks), call(loose))
        found[f"prefill T{T} H{H} {str(dtype)[6:]}"] = made = {
            "us": without, "with 16 states us": aligned, "ratio": aligned / without, "16 states anywhere us": anywhere,
            "its ratio": anywhere / without,
        }  # fmt: skip
        print(made, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found: dict = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    try:
        for rows in (32, 256):
            decoding(found, rows)
        prefilling(found)
    finally:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
