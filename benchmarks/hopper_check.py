"""On a Hopper GPU: the bfloat16 kernels of the CUDA library beside Triton's, FlashKDA's and FLA's in one run, as JSON in $OUT (or here).

    PYTHONPATH=src python benchmarks/hopper_check.py [shape ..]      FLA where it can be imported and $FLA_SHAPES names the shape
                                                                     FlashKDA where it can be imported
    PYTHONPATH=src python benchmarks/hopper_check.py errors          of both against float64: every case of tests/stages/test_hopper_gpu.py,
                                                                     and the timed model's options

Every contestant goes through its public call and all take turns. `o differs by` is against Triton's.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import multiprocessing
import os
import sys
from pathlib import Path

import gpu_check
import numpy as np
import torch

from kdakit import accuracy
from kdakit.cases import SHAPES
from kdakit.measure import checking
from kdakit.torch import chunk_kda

OURS = ("cuda", "triton_gpu")


def options(bounded: bool) -> dict:
    flags = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "output_final_state")
    return dict.fromkeys(flags, True) | (dict(safe_gate=True, lower_bound=-5.0) if bounded else {})


def contestants(name: str, arrays, bounded: bool) -> dict:
    given = {n: x for n, x in arrays._asdict().items() if x is not None}
    calls = {backend: lambda b=backend: chunk_kda(**given, **options(bounded), backend=b) for backend in OURS}
    if bounded and importlib.util.find_spec("flash_kda") is not None:
        calls["flash_kda"] = flash_kda_call(arrays)
    if name in os.environ.get("FLA_SHAPES", "").split(",") and bounded:
        try:
            from fla.ops.kda import chunk_kda as fla
        except ImportError:
            return calls
        calls["fla"] = lambda: fla(**given, **options(bounded))
    return calls


def flash_kda_call(x):
    """FlashKDA's own call, [V, K] states, outputs allocated before; it returns what `chunk_kda` does."""
    import flash_kda

    o, first = torch.empty_like(x.v), x.initial_state.mT.contiguous()
    last, bias = torch.empty_like(first), x.dt_bias.view(-1, x.q.shape[-1])

    def call():
        flash_kda.fwd(x.q, x.k, x.v, x.g, x.beta, x.q.shape[-1] ** -0.5, o, x.A_log, bias, -5.0, initial_state=first, final_state=last,
                      cu_seqlens=x.cu_seqlens)  # fmt: skip
        return o, last.mT

    return call


def taking_turns(calls: dict, repeat: int = 20) -> dict[str, float]:
    """Median milliseconds of each, one after the other in every round."""
    times = {name: [] for name in calls}
    for i in range(repeat + 3):
        for name, call in calls.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            if i >= 3:
                times[name].append((start, end))
    torch.cuda.synchronize()
    return {name: float(np.median([s.elapsed_time(e) for s, e in events])) for name, events in times.items()}


def time_shape(name: str, bounded: bool) -> dict:
    _, arrays = gpu_check.problem_of(name, bounded)
    calls = contestants(name, arrays, bounded)
    with torch.no_grad():
        outputs = {n: call()[0].double() for n, call in calls.items()}
        want = outputs["triton_gpu"]
        differs = {n: float((o - want).norm() / want.norm()) for n, o in outputs.items()}
        return dict(shape=name, bounded=bounded, ms=taking_turns(calls), o_differs_by=differs)


def cases() -> dict:
    """With K = V = 128; the longest first."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "stages"))
    import test_hopper_gpu

    model = {}
    for T in (4096, 512):
        for gate, bounded in (("bounded", True), ("softplus", False)):
            model[f"model T={T} {gate}"] = dataclasses.replace(SHAPES["h16"], T=T, H=2).case(bounded=bounded)
    return model | test_hopper_gpu.ALL


def errors_of(item) -> dict:
    """{backend: {output: error}}, or why one of them does not take the case."""
    name, case = item
    reason = next((r for r in (checking.refusal(backend, case, "bfloat16") for backend in OURS) if r), None)
    if reason:
        return dict(case=name, refused=reason)
    truth = accuracy.truths(case.problem("bfloat16"), case.arrays("bfloat16"))
    results = {backend: checking.run_case(backend, case, "bfloat16", grad=False) for backend in OURS}
    return dict(case=name) | {backend: {n: accuracy.error(got[n], truth[n]) for n in truth} for backend, got in results.items()}


def errors() -> None:
    """A row per case; then how they compare."""
    rows = []
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        for row in pool.imap_unordered(errors_of, cases().items()):
            rows.append(row)
            print(row, flush=True)
            Path(os.environ.get("OUT", "."), "hopper_errors.json").write_text(json.dumps(rows, indent=1))
    pairs = [[row[backend] for backend in OURS] for row in rows if "refused" not in row]
    for n in ("o", "final_state"):
        ratios = [mine[n] / theirs[n] for mine, theirs in pairs if theirs.get(n)]
        mean = np.exp(np.mean(np.log(ratios)))
        print(f"{n}: {min(ratios):.3f} to {max(ratios):.3f} times Triton's error, {mean:.3f} in the geometric mean of {len(ratios)} cases")


def main() -> None:
    if sys.argv[1:] == ["errors"]:
        return errors()
    names = sys.argv[1:] or ["h96", "h64", "h32", "h16", "varlen96"]
    report = dict(gpu=torch.cuda.get_device_name(), torch=torch.__version__, rows=[])
    for bounded in (True, False):
        for name in names:
            report["rows"].append(time_shape(name, bounded))
            print(report["rows"][-1], flush=True)
            torch.cuda.empty_cache()
            Path(os.environ.get("OUT", "."), "hopper.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
