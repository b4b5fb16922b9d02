"""Records of `kdakit compile` as Markdown tables."""

from __future__ import annotations

from typing import Any

from kdakit.measure import machine, records, tpu_decode_table
from kdakit.measure.choices import UsageError
from kdakit.measure.generated import markdown_table
from kdakit.measure.tpu_kernels import CHIPS, Job
from kdakit.measure.tpu_schedule import why

# openxla/tokamax pull request 1103, B1 T8192 H32 K=V=128 bfloat16, bounded gate, counted the same way with the same versions: M cycles.
TOKAMAX = {("v6e", "forward"): 4.84, ("v6e", "training"): 13.2, ("tpu7x", "forward"): 3.60, ("tpu7x", "training"): 9.83}
# The second look of November 2026 (design notes), libtpu 0.0.48.1, the same call: tokamax 0.0.17, in all and its kernels alone; and
# sglang-jax's fused forward ("Mega KDA", pull request 1554), whole chunks only, which was written anew after its description.
TOKAMAX_RELEASE = {
    ("v6e", "forward"): (4.85, 2.70), ("v6e", "training"): (13.2, 5.98),
    ("tpu7x", "forward"): (3.61, 2.40), ("tpu7x", "training"): (10.1, 5.37),
}  # fmt: skip
MEGA_LIKE = {("v6e", "forward"): 1.518, ("tpu7x", "forward"): 1.441}
CALLS = {"forward": "forward", "training": "forward + backward"}

Found = dict[tuple[str, Job], dict[str, Any]]


def render(files: list[str]) -> str:
    """All tables that the records are enough for; UsageError says which cannot be shown."""
    read = {file: _schedules(file) for file in files}
    for file, record in read.items():
        _shown(file, [record])
    return _shown(", ".join(files), list(read.values()))


def _shown(files: str, read: list[dict[str, Any]]) -> str:
    try:
        return _tables(read)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as problem:
        reason = machine.failure(problem).removeprefix(machine.FAILED)
        raise UsageError(f"{files} must hold what kdakit compile has measured, got rows that cannot be shown ({reason})") from problem


def _tables(read: list[dict[str, Any]]) -> str:
    about = lambda record: {name: record[name] for name in ("date", "commit")}
    found: Found = {(row["target"], Job(**row["job"])): row | about(r) for r in read for row in r["results"]}
    failed = {(row["target"], Job(**row["job"])): row["reason"] for record in read for row in record["missing"]}
    parts = [against_tokamax(found), peers(found), memory(found), variants(found), calls(found), heads(found), kernels(found)]
    parts += [tpu_decode_table.render(found), chips(found, failed), provenance(read)]
    return "\n\n".join(part for part in parts if part)


def _schedules(file: str) -> dict[str, Any]:
    record = records.load(file)
    if record["kind"] != "tpu_schedule":
        raise UsageError(f"{file} must be a record of kdakit compile, got one of kind {record['kind']!r}")
    return record


def against_tokamax(found: Found) -> str:
    """Millions of cycles beside tokamax's, and of the softplus gate beside the bounded."""
    rows = []
    for (chip, kernel), theirs in TOKAMAX.items():
        bounded, softplus = (cycles(found, chip, Job(kernel, gate)) for gate in ("bounded", "softplus"))
        if bounded:
            other = [f"{softplus:.2f}", f"{softplus / bounded:.2f}"] if softplus else ["–"] * 2
            rows.append([chip, CALLS[kernel], f"{theirs:.2f}", f"{bounded:.2f}", f"{bounded / theirs:.2f}", *other])
    header = ["chip", "", "tokamax", "bounded gate", "of tokamax's", "softplus gate", "of our bounded"]
    return _titled("Millions of cycles, kernels and XLA's operations around them:", header, rows)


def peers(found: Found) -> str:
    """Kernels alone beside sums, ours and the newest peers': XLA's estimates around a kernel take memory to be slower than it is."""
    rows = []
    for (chip, kernel), (theirs, alone) in TOKAMAX_RELEASE.items():
        if (row := found.get((chip, Job(kernel)))) is None:
            continue
        ours, own, mega = row["cycles"] / 1e6, kernel_cycles(row), MEGA_LIKE.get((chip, kernel))
        cells = [f"{ours:.2f}", f"{own:.2f}", f"{theirs:.2f}", f"{alone:.2f}", f"{ours / theirs:.2f}", f"{own / alone:.2f}"]
        rows.append([chip, CALLS[kernel], *cells, *([f"{mega:.2f}", f"{ours / mega:.2f}"] if mega else ["–"] * 2)])
    header = ["chip", "", "ours", "kernels alone", "tokamax 0.0.17", "kernels alone", "of tokamax's", "kernels alone", "Mega-like", "of it"]
    return _titled("Beside the newest peers, bounded gate, M cycles; Mega-like: written anew after its description:", header, rows)


def memory(found: Found) -> str:
    """The kernels alone, and what memory allows: bytes that they move, and the least time for those."""
    rows = []
    for chip, kernel in TOKAMAX:
        for gate in ("bounded", "softplus"):
            if (row := found.get((chip, Job(kernel, gate)))) is None:
                continue
            alone, size, least = kernel_cycles(row), sum(k["hbm_bytes"] for k in row["kernels"]) / 1e6, floor(row)
            cells = f"{row['cycles'] / 1e6:.2f}", f"{alone:.2f}", f"{row['milliseconds']:.2f}", f"{size:.0f}", f"{least:.2f}"
            rows.append([chip, f"{CALLS[kernel]}, {gate}", *cells, f"{least / row['milliseconds']:.0%}"])
    header = ["chip", "", "M cycles", "kernels alone", "ms at the nominal clock", "MB to and from HBM", "ms at HBM's rate", "of the time"]
    return _titled("The same beside memory's floor, which the cycles know nothing of:", header, rows)


def kernel_cycles(row: dict[str, Any]) -> float:
    """Millions, without XLA's operations around the kernels."""
    return sum(k["bundles_per_step"] * k["steps"] for k in row["kernels"]) / 1e6


def floor(row: dict[str, Any]) -> float:
    """Milliseconds that the kernels' bytes take at the memory's nominal rate."""
    return sum(k["hbm_bytes"] for k in row["kernels"]) / CHIPS[row["target"]].hbm_gbs / 1e6


def calls(found: Found) -> str:
    """By the number of heads of a call."""
    rows = []
    for (chip, job), row in found.items():
        if job.kernel in CALLS and not job.heads and job == Job(job.kernel, H=job.H):
            taken = " + ".join(str(job.T // job.chunk_size * job.H // k["steps"]) for k in row["kernels"])
            million = row["cycles"] / 1e6
            rows.append([chip, CALLS[job.kernel], str(job.H), taken, f"{million:.3f}", f"{1000 * million / job.H:.1f}"])
    rows.sort(key=lambda row: (row[0], row[1], int(row[2])))
    header = ["chip", "", "heads", "a step", "M cycles", "thousand a head"]
    return _titled("B1 T8192 K=V=128, bounded gate, by the number of heads:", header, rows)


def variants(found: Found) -> str:
    """What packing and saving more change."""
    compared = {
        "25 sequences": ({}, {"sequences": 25}),
        "25 sequences with states": ({"states": True}, {"sequences": 25, "states": True}),
        "disable_recompute": ({}, {"disable_recompute": True}),
    }
    rows = []
    for chip, kernel in TOKAMAX:
        for name, (plain, changed) in compared.items():
            one, other = (found.get((chip, Job(kernel, **options))) for options in (plain, changed))
            if one is None or other is None or one["commit"] != other["commit"]:  # the same kernels only
                continue
            cells = []
            for count in ("cycles", "weighted_cycles"):
                before, after = (cycles(found, chip, Job(kernel, **options), count) for options in (plain, changed))
                cells += [f"{before:.2f}", f"{after:.2f}", f"{after / before:.2f}"] if before and after else ["–"] * 3
            if cells[0] != "–":
                rows.append([chip, CALLS[kernel], name, *cells])
    header = ["chip", "", "", "without", "with", "of that", "as taken: without", "with", "of that"]
    title = "The same, bounded gate; *as taken* counts a branch as often as it is taken, the columns before in every step:"
    return _titled(title, header, rows, right=3)


def heads(found: Found) -> str:
    """What more heads a grid step spill, and gain."""
    rows = []
    for (chip, job), row in found.items():
        if job == Job("forward", H=job.H, heads=job.heads):
            (k,) = row["kernels"]
            taken = job.T // job.chunk_size * job.H // k["steps"]
            rows.append([chip, str(taken), f"{k['bundles_per_step'] / taken:.0f}", f"{spills(k):.2f}"])
    rows = sorted(rows, key=lambda row: (row[0], int(row[1])))
    header = ["chip", "heads a step", "bundles a head and chunk", "spills a bundle"]
    return _titled("Forward, bounded gate:", header, rows, right=1)


def kernels(found: Found) -> str:
    """Where the cycles of each kernel go."""
    slots = ("MXU", "VALU", "EUP", "XLU", "VLOAD", "VSTORE")
    rows = []
    for (chip, job), row in found.items():
        if (job.T, job.H) != (8192, 32) or job.heads:
            continue
        for k in row["kernels"]:
            used = [f"{k['slots'][n]['mean'] / k['slots'][n]['capacity']:.0%}" if n in k["slots"] else "" for n in slots]
            sizes = f"{k['bundles_per_step']}", as_taken(k), f"{k['steps']}", f"{k['vmem_bytes'] / 2**20:.1f}"
            call = str(job).replace(" B1 T8192 H32 K128, bfloat16", "")
            rows.append([chip, call, k["name"], *sizes, *used, f"{spills(k):.2f}", row["date"][5:]])
    header = ["chip", "call", "kernel", "bundles a step", "branches as taken", "steps", "VMEM MiB", *slots, "spills a bundle", "recorded"]
    return _titled("Bundles and slots:", header, rows, right=3)


def chips(found: Found, failed: dict[tuple[str, Job], str]) -> str:
    """Bundles a step of every kernel on five chips, or why libtpu refused."""
    jobs = dict.fromkeys(job for _, job in [*found, *failed] if 1 < job.T < 8192)

    def cell(chip: str, job: Job) -> str:
        if (row := found.get((chip, job))) is not None:
            return " + ".join(str(k["bundles_per_step"]) for k in row["kernels"])
        return why(failed.get((chip, job), "–"))

    rows = [[str(job), *(cell(chip, job) for chip in CHIPS)] for job in jobs]
    days = sorted({row["date"] for (_, job), row in found.items() if job in jobs})
    return _titled(f"Bundles a step of what was compiled for five chips ({', '.join(days)}):", ["", *CHIPS], rows, right=1)


def provenance(records: list[dict[str, Any]]) -> str:
    """Versions, and the commits of the records, by day."""
    versions = ", ".join(f"{n} {records[0]['versions'][n]}" for n in ("libtpu", "jax") if n in records[0]["versions"])
    days: dict[str, set[str]] = {}
    for record in records:
        days.setdefault(record["date"], set()).add(str(record["commit"])[:12])
    return f"{versions}; " + "; ".join(f"{day}: commit {', '.join(sorted(commits))}" for day, commits in sorted(days.items()))


def cycles(found: Found, chip: str, job: Job, count: str = "cycles") -> float | None:
    """Millions; `count`: or weighted_cycles."""
    row = found.get((chip, job))
    return None if row is None or row.get(count) is None else row[count] / 1e6


def as_taken(kernel: dict[str, Any]) -> str:
    """Bundles a step, each branch as often as it is taken."""
    found = kernel.get("weighted_bundles_per_step")  # records of before have none
    return "–" if found is None else f"{found:.0f}"


def spills(kernel: dict[str, Any]) -> float:
    """Spilled registers written and read again, per bundle."""
    return sum(kernel["slots"].get(n, {"mean": 0})["mean"] for n in ("VLOAD:FILL", "VSTORE:SPILL"))


def _titled(title: str, header: list[str], rows: list[list[str]], right: int = 2) -> str:
    return f"{title}\n\n{markdown_table(header, rows, tuple(range(right, len(header))))}" if rows else ""
