"""The TPU compiler's own schedule of a kernel, with no TPU: libtpu compiles for a topology and leaves its VLIW bundles as text.

A bundle is about a cycle, so bundles per grid step times grid steps, plus XLA's estimate for the operations around the kernels, predicts a
call's time. It knows nothing of memory that cannot keep up. libtpu fixes the folder for its text when it starts: a process per compilation.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kdakit.measure import tpu_branches
from kdakit.measure.tpu_kernels import CHIPS, Job

DUMPED = ".*final.*"  # of some 70 texts of each kernel, the last
MADE_WITH = {"libtpu": "0.0.48.1", "jax": "0.11.2", "python": "3.12"}  # the committed records
SLOTS = ("MXU", "XLU", "VALU", "EUP", "VPOP", "VLOAD", "VLOAD:FILL", "VSTORE", "VSTORE:SPILL", "SALU")


def missing() -> str | None:
    """Why nothing can be compiled for TPUs here; None: it can."""
    for package, hint in (("jax", "pip install 'kdakit[jax]'"), ("libtpu", "pip install 'kdakit[tpu]', x86_64 Linux only")):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed ({hint}; {how_to_repeat()})"
    return None


def how_to_repeat() -> str:
    """What to install for the committed records' schedules, to the bundle."""
    exact = " ".join(f"'{name}=={MADE_WITH[name]}'" for name in ("jax", "libtpu"))
    return f"the committed records: Python {MADE_WITH['python']}, pip install {exact}"


def differs() -> str | None:
    """How what is installed differs from what the committed records were made with; None: it does not."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": ".".join(map(str, sys.version_info[:2]))}
    for name in ("libtpu", "jax"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    other = [f"{name} {found[name]}" for name in ("libtpu", "jax") if found[name] != MADE_WITH[name]]
    return f"{' and '.join(other)} on Python {found['python']}: schedules may differ from {how_to_repeat()}" if other else None


def schedule(job: Job, target: str) -> dict[str, Any]:
    """{'kernels': [..], 'xla_cycles': n, 'cycles': n, 'milliseconds': x, 'weighted_cycles': n} of the job on a chip, or {'reason': ..}.

    cycles: as if each grid step ran all of a kernel's code. weighted_cycles: branches as often as they are taken (`tpu_branches`); None if
    that is not known.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex={DUMPED}"
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "LIBTPU_INIT_ARGS": flags}
        environment["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # else a lock file keeps a second process out; no TPU is there to be shared
        spec = json.dumps({"job": asdict(job), "target": target})
        done = subprocess.run(
            [sys.executable, "-m", "kdakit.measure.tpu_schedule", spec], env=environment, capture_output=True, text=True
        )  # fmt: skip
        if done.returncode:
            return {"reason": f"libtpu did not compile it: {why(done.stderr)}"}
        found = json.loads(done.stdout.splitlines()[-1])
        for kernel in found["kernels"]:
            kernel |= read_schedule(Path(folder), kernel["name"])
            code = _only(Path(folder), kernel["name"], "final_bundles.txt")
            kernel["weighted_bundles_per_step"] = tpu_branches.weighted(job, kernel["bundles_per_step"], code)
    return totals(found, target)


def why(message: str) -> str:
    """What libtpu has to say, without what it says around it."""
    memory = re.search(r"Ran out of memory in memory space (\w+)\. Used [\d.]+\w of [\d.]+\w", message)
    return memory[0] if memory else (message.strip() or "no message").splitlines()[-1][:300]


def totals(found: dict[str, Any], target: str) -> dict[str, Any]:
    kernels, outside = found["kernels"], found["xla_cycles"]
    cycles = outside + sum(k["bundles_per_step"] * k["steps"] for k in kernels)
    each = [k["weighted_bundles_per_step"] for k in kernels]
    weighted = None if None in each else round(outside + sum(n * k["steps"] for n, k in zip(each, kernels, strict=True)))
    return found | {"cycles": cycles, "milliseconds": round(cycles / CHIPS[target].ghz / 1e6, 4), "weighted_cycles": weighted}


def read_schedule(folder: Path, kernel: str) -> dict[str, Any]:
    """Bundles per grid step and the mean number of slots used per bundle, with the capacity of each kind."""
    analysis = _only(folder, kernel, "schedule-analysis_final_bundles.txt")
    bundles = int(re.search(r"total scheduled bundles:\s+(\d+)", analysis)[1])
    lines = _only(folder, kernel, "final_hlo-static-per-bundle-utilization.txt").splitlines()
    names, capacities = [n.strip() for n in lines[1].split(",")], [int(x) for x in lines[2].split()]
    rows = [[int(x) for x in line.split()] for line in lines[4:] if re.fullmatch(r"[\d\s]+", line) and line.strip()]
    slots = {}
    for i, (name, capacity) in enumerate(zip(names, capacities, strict=True)):
        if name in SLOTS:
            slots[name] = {"mean": round(sum(row[i] for row in rows) / max(len(rows), 1), 3), "capacity": capacity}
    return {"bundles_per_step": bundles, "slots": slots}


def _only(folder: Path, kernel: str, ending: str) -> str:
    """The one text of a kernel; in a gradient JAX puts jvp_ or the like before its name and underscores behind it."""
    name = re.compile(rf"\d+-(\w+_)?{kernel}_*\.\d+-\d+-{re.escape(ending)}")
    found = [path for path in folder.iterdir() if name.fullmatch(path.name)]
    if len(found) != 1:
        raise ValueError(f"libtpu must leave one {ending} of {kernel}, got {len(found)}")
    return found[0].read_text()


def compile_here(job: Job, target: str) -> dict[str, Any]:
    """In a process of its own: compile, and say which kernels there are and what XLA thinks of the rest."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from kdakit.measure import tpu_budget, tpu_kernels

    with tpu_kernels.on_chip(target):  # which may decide how many heads a step takes
        function, arguments = tpu_kernels.function_of(job)
    device = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[target].topology).devices[0]
    place = SingleDeviceSharding(device)
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments)
    with tpu_kernels.on_chip(target):
        traced = jax.jit(function, donate_argnums=tpu_kernels.given_away(job)).trace(*specs)
        kernels = [budget._asdict() for budget in tpu_budget.budgets(function, arguments)]
        compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    outside = [int(n) for n in re.findall(r'"?estimated_cycles"?:"?(\d+)', compiled.as_text())]
    return {"kernels": kernels, "xla_cycles": sum(outside)}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    print(json.dumps(compile_here(Job(**given["job"]), given["target"])))
