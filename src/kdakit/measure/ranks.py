"""Context parallel calls timed over growing numbers of processes, with what they put on the wire. Started by `kdakit bench --ranks`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from kdakit.cases import Shape
from kdakit.measure import checking, contestants, timing
from kdakit.problem import DIFFERENTIABLE


def measure(ranks: int, job: contestants.Job, repeat: int) -> dict[str, Any]:
    """One job cut over `ranks` processes of one thread each: rank 0's times, the most that any rank sent, and what the formula says."""
    with tempfile.TemporaryDirectory() as folder:
        spec = {"shape": vars(job.shape), "mode": job.mode, "dtype": job.dtype, "gate": job.gate, "repeat": repeat, "folder": folder}
        command = [sys.executable, "-m", "kdakit.measure.ranks", json.dumps(spec), str(ranks)]
        running = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(ranks)]
        errors = [process.communicate()[1] for process in running]
        if any(process.returncode for process in running):
            last = next(e for e, p in zip(errors, running, strict=True) if p.returncode).strip().splitlines()
            return {"reason": f"a rank failed: {last[-1] if last else 'no message'}"}
        found = [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(ranks)]
    return {
        "median_ms": timing.median(found[0]["samples_ms"]), "samples_ms": found[0]["samples_ms"],
        "sent_bytes": max(f["sent_bytes"] for f in found), "formula_bytes": found[0]["formula_bytes"],
    }  # fmt: skip


def work(spec: dict[str, Any], ranks: int, rank: int) -> dict[str, Any]:
    """One rank: its slice of the job's case, timed between barriers."""
    import torch
    import torch.distributed as dist

    from kdakit.parallel import torch as parallel

    torch.set_num_threads(1)
    store = Path(spec["folder"]) / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    shape = Shape(**spec["shape"] | {"lengths": tuple(spec["shape"]["lengths"])})
    case = contestants.Job(shape, spec["mode"], spec["dtype"], spec["gate"]).case()
    mine = slice(shape.T * rank // ranks, shape.T * (rank + 1) // ranks)
    arrays = checking.to_torch(case.arrays(spec["dtype"]), case.dtypes(spec["dtype"]), "cpu")
    arrays = arrays._replace(**{n: getattr(arrays, n)[:, mine].contiguous() for n in ("q", "k", "v", "g", "beta")})
    backward = spec["mode"] == "fwdbwd"
    inputs = {n: getattr(arrays, n).requires_grad_(backward) for n in DIFFERENTIABLE if getattr(arrays, n) is not None}
    given = {n: x for n, x in arrays._asdict().items() if x is not None} | inputs

    def run():
        o, final_state = parallel.chunk_kda(**given, **case.call_options)
        if backward:
            torch.autograd.grad(o.sum() + final_state.sum(), list(inputs.values()), allow_unused=True)
        dist.barrier()

    run()
    with parallel.count_traffic() as sent:
        run()
    samples = []
    for _ in range(spec["repeat"]):
        dist.barrier()
        samples += timing.interleaved({"": run}, 1, 1e9)[""]
    itemsize = 8 if spec["dtype"] == "float64" else 4
    formula = parallel.scan_bytes(ranks, 1 if shape.lengths else shape.B, shape.H, shape.K, shape.K, itemsize)
    return {"samples_ms": samples, "sent_bytes": sent.bytes, "formula_bytes": formula * (2 if backward else 1)}


if __name__ == "__main__":
    given, size, place = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    (Path(given["folder"]) / str(place)).write_text(json.dumps(work(given, size, place)))
