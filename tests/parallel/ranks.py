"""One rank of a group of processes: python ranks.py RANK SIZE STORE OUT JOBS. Runs the jobs (a JSON file), rank 0 writes all results.

A job is {"size", "case", "dtype", "cuts"}: the first `size` ranks run the case with its tokens cut at `cuts`. With "injected", [seed, i],
something in it is not finite: see not_finite.py.
"""

import json
import pickle
import sys
from datetime import timedelta
from pathlib import Path

import not_finite
import numpy as np
import torch
import torch.distributed as dist

import kdakit.parallel.torch as parallel
from kdakit.cases import CASES
from kdakit.measure.checking import to_torch
from kdakit.problem import DIFFERENTIABLE

TOKENS = ("q", "k", "v", "g", "beta")


def run(job, group, rank):
    """This rank's results as float64 arrays: o, final_state, gradients by the input's name, and what it sent."""
    case, cuts = CASES[job["case"]], [0, *job["cuts"], CASES[job["case"]].T]
    mine = slice(cuts[rank], cuts[rank + 1])
    given, cotangents = not_finite.given(case, job["dtype"], job.get("injected"))
    arrays = to_torch(given, case.dtypes(job["dtype"]), "cpu")
    arrays = arrays._replace(**{n: getattr(arrays, n)[:, mine] for n in TOKENS})
    inputs = {n: getattr(arrays, n).clone().requires_grad_() for n in DIFFERENTIABLE if getattr(arrays, n) is not None}
    given = {n: x for n, x in arrays._asdict().items() if x is not None} | inputs
    options = {n: x for n, x in case.call_options.items() if n != "return_intermediate_states"}
    with parallel.count_traffic() as sent:
        o, final_state = parallel.chunk_kda(**given, **options, group=group)
        d_o, d_final = (torch.from_numpy(x) for x in cotangents)
        outputs = [(o, d_o[:, mine])] + ([] if final_state is None else [(final_state, d_final)])
        loss = sum((x * d.to(x.dtype)).sum(dtype=torch.float64) for x, d in outputs)
        gradients = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
    results = {"o": o} | ({} if final_state is None else {"final_state": final_state}) | dict(zip(inputs, gradients, strict=True))
    results = {n: np.zeros(given[n].shape) if x is None else x.detach().double().numpy() for n, x in results.items()}
    return results | {"sent": sent.bytes}


def main(rank, size, store, out, jobs):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60))
    sizes = sorted({job["size"] for job in jobs})
    groups = {n: dist.new_group(list(range(n)), timeout=timedelta(seconds=60)) for n in sizes}
    collected = []
    for job in jobs:
        if rank < job["size"]:
            everyone = [None] * job["size"] if rank == 0 else None
            dist.gather_object(run(job, groups[job["size"]], rank), everyone, dst=0, group=groups[job["size"]])
            collected.append(everyone)
    if rank == 0:
        with open(out, "wb") as file:
            pickle.dump(collected, file)
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], json.loads(Path(sys.argv[5]).read_text()))
