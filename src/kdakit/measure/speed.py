"""A suite's record for readers: a row per job, a column per implementation, time and error in each cell.

`markdown` is the README's table, ours beside each peer; `overview` is that of docs/performance.md, with everything that was timed.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import Any

from kdakit.measure.choices import UsageError
from kdakit.measure.generated import markdown_table

OURS = "kdakit"
# Column: the contestants of which the fastest counts.
COLUMNS = {
    OURS: ("triton_gpu", "cuda"), "FLA": ("fla",), "FlashKDA": ("flash_kda",), "vLLM's FlashKDA": ("flash_kda_vllm",),
    "cuDNN": ("cudnn", "cudnn_g32"),
}  # fmt: skip
# Entries that are the GPU's own work: those of few heads in CUDA graphs, the others long enough to hide the host. iid: gates that forget at
# once; fla: those that models start with, which forget slowly.
ENTRIES = {
    "fwd h96": "forward, 8192 tokens, 96 heads",
    "fwd h64": "forward, 8192 tokens, 64 heads",
    "fla h96": "forward, 96 heads, gates that forget slowly",
    "iid t65536 h4": "forward, 65536 tokens, 4 heads, gates that forget at once",
    "fla t65536 h4": "forward, 65536 tokens, 4 heads, gates that forget slowly",
    "fwd varlen96": "forward, 8 sequences of 1024, 96 heads",
    "fwd h96 softplus": "forward, 96 heads, softplus gate",
    "fwdbwd h96": "forward + backward, 96 heads",
    "fwdbwd h96 given": "forward + backward, 96 heads, log-decays given in float32",
    "fwdbwd h32": "forward + backward, 32 heads",
    "fwdbwd h32 given": "forward + backward, 32 heads, log-decays given in float32",
    "decode b32": "one token for 32 sequences, 32 heads",
}
NAMES = {
    "triton_gpu": "`triton_gpu`", "cuda": "`cuda`", "cuda_prefill": "`cuda`, w and u too", "fla": "FLA", "flash_kda": "FlashKDA",
    "flash_kda_vllm": "vLLM's FlashKDA", "cudnn": "cuDNN", "cudnn_g32": "cuDNN, float32 g",
}  # fmt: skip
REGIMES = {"iid": "gates that forget at once", "normal": "gates at random", "fla": "gates that forget slowly"}
VERSIONS = {"FLA": "fla-core", "vLLM's FlashKDA": "vllm", "cuDNN": "nvidia-cudnn-frontend"}

Row = dict[str, Any]


def markdown(records: list[Row]) -> str:
    """A row per entry, from the newest gpu suite that timed us on it, whoever took part, with what it was measured on."""
    suites = _newest_first(records)
    of = {entry: next((r for r in suites if entry in _timed(r)), None) for entry in ENTRIES}
    found = {(r["entry"], r["contestant"]): r for entry, record in of.items() if record for r in record["results"] if r["entry"] == entry}
    columns, usual = _columns(found), _usual_date([record for record in of.values() if record])
    rows = []
    for entry, text in ENTRIES.items():
        best = {title: _fastest(found, entry, names) for title, names in columns.items()}
        if best[OURS] is not None:
            other = "" if of[entry]["date"] == usual else f" ({of[entry]['date']})"
            rows.append([text + other, *_cells(best, best[OURS])])
    taken = [r for r in suites if any(r is record for record in of.values())]
    newest = taken[0]
    header = ["ms per call (error of o)", *(_titled(title, newest["versions"]) for title in columns)]
    note = (
        f"One {newest['machine']['device']}, bfloat16, K = V = 128, initial and final state; gate, norms and sigmoid in the kernel unless "
        "log-decays are given. Medians of runs in which all take turns; kdakit: the faster of `triton_gpu` and `cuda`; 2x: kdakit is "
        "twice as fast; –: it did not run there. Errors are relative to the float64 recurrence, on three heads. "
        f"Of {usual} unless a row says otherwise: {'; '.join(map(_measured, taken))}."
    )
    return markdown_table(header, rows, right=tuple(range(1, len(header)))) + "\n\n" + textwrap.fill(note, 120)


def _usual_date(records: list[Row]) -> str:
    """That of most rows, of two with as many the later one."""
    dates = Counter(record["date"] for record in records)
    return max(dates, key=lambda date: (dates[date], date))


def _measured(record: Row) -> str:
    versions = ", ".join(f"{name} {record['versions'][name]}" for name in ("torch", "triton") if name in record["versions"])
    return f"{record['date']}, {versions}, commit {record['commit'][:12]}"


def _timed(record: Row) -> set[str]:
    """The entries on which it timed us."""
    return {r["entry"] for r in record["results"] if r["contestant"] in COLUMNS[OURS]}


def _newest_first(records: list[Row]) -> list[Row]:
    """The gpu suites that timed us on something of ENTRIES; of two of one day the last given."""
    suites = [r for r in records if r["settings"].get("suite") == "gpu" and _timed(r) & set(ENTRIES)]
    if not suites:
        raise UsageError("the records hold no gpu suite with a time of triton_gpu or cuda: kdakit bench --suite gpu --accuracy --json FILE")
    return sorted(suites, key=lambda r: r["date"])[::-1]


def _columns(found: dict[tuple[str, str], Row]) -> dict[str, tuple[str, ...]]:
    """Those of COLUMNS that have a time, then whoever else has."""
    ran = list(dict.fromkeys(name for entry, name in found if entry in ENTRIES))
    known = [name for names in COLUMNS.values() for name in names]
    columns = {title: names for title, names in COLUMNS.items() if title == OURS or set(names) & set(ran)}
    return columns | {NAMES.get(name, name): (name,) for name in ran if name not in known}


def _titled(title: str, versions: Row) -> str:
    version = versions.get(VERSIONS.get(title, ""), "unversioned")
    return title if version == "unversioned" else f"{title} {version}"


def _fastest(found: dict[tuple[str, str], Row], entry: str, names: tuple[str, ...]) -> Row | None:
    return min((found[entry, n] for n in names if (entry, n) in found), key=lambda r: r["median_ms"], default=None)


def _cells(best: dict[str, Row | None], ours: Row) -> list[str]:
    """Times with errors, the fastest bold; those of others with how many times as fast we are."""
    fastest = min((row for row in best.values() if row is not None), key=lambda r: r["median_ms"])
    cells = []
    for row in best.values():
        ratio = "" if row is None or row is ours else f", {row['median_ms'] / ours['median_ms']:.1f}x"
        cells.append("–" if row is None else time_and_error(row, bold=row is fastest) + ratio)
    return cells


def time_and_error(row: Row, bold: bool = False) -> str:
    time = f"{row['median_ms']:.4f}" if row["median_ms"] < 0.1 else f"{row['median_ms']:.3f}"
    error = ""
    if "error_o" in row:  # None: it was compared and is not finite
        error = " (not finite)" if row["error_o"] is None else f" ({row['error_o']:.1e})".replace("e-0", "e-")
    return f"**{time}**{error}" if bold else f"{time}{error}"


def overview(record: Row):
    """(title, header, rows) of the times of a suite, the fastest bold, and of peak memory."""
    every = record["results"]
    names = list(dict.fromkeys(r["contestant"] for r in every))
    names = [n for n in NAMES if n in names] + [n for n in names if n not in NAMES]
    times, memory = [], []
    for entry in dict.fromkeys(r["entry"] for r in every):
        rows = {r["contestant"]: r for r in every if r["entry"] == entry}
        first = next(iter(rows.values()))
        fastest = min(rows.values(), key=lambda r: r["median_ms"])
        floor = f"{first['floor_ms']:.3f}" if first.get("floor_ms") else "–"
        times.append([in_words(first), *(time_and_error(rows[n], rows[n] is fastest) if n in rows else "–" for n in names), floor])
        if first["mode"] == "fwdbwd" and any(r.get("extra_mib") for r in rows.values()):
            memory.append(
                [in_words(first), *(f"{rows[n]['extra_mib']:.0f}" if n in rows and "extra_mib" in rows[n] else "–" for n in names)]
            )
    shown = [NAMES.get(n, n) for n in names]
    if times:
        yield f"suite {record['settings']['suite']}: milliseconds per call (error of o)", ["", *shown, "floor"], times
    if memory:
        yield f"suite {record['settings']['suite']}: peak memory per call, MiB", ["", *shown], memory


def in_words(row: Row) -> str:
    """'forward, 8192 tokens, 96 heads, softplus gate'."""
    s = row["shape"]
    modes = {"fwd": "forward", "graph": "forward, graph", "fwdbwd": "forward + backward", "eager": "forward, call after call",
             "train": "step, graph"}  # fmt: skip
    if row["mode"] == "decode":
        what = f"decode, {s['B']} sequence{'s' * (s['B'] > 1)}, {s['H']} heads"
    else:
        tokens = f"{len(s['lengths'])} x {s['lengths'][0]} packed" if s["lengths"] else f"{s['T']} tokens"
        what = f"{modes.get(row['mode'], row['mode'])}, {tokens}, {s['H']} heads"
    if row["dtype"] == "float32":
        what += f" of {s['K']}, float32, chunks of {row['chunk_size']}"
    elif row["gate"] != "bounded":
        what += ", softplus gate" if row["gate"] == "softplus" else ", log-decays given"
    what += ", nothing made again" if row.get("disable_recompute") else ""
    return what + (f", {REGIMES[row['regime']]}" if row.get("regime") else "")
