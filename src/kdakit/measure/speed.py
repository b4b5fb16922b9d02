"""A suite's record for readers: a row per job, a column per implementation, time and error in each cell.

`markdown` is the README's table, ours beside each peer; `overview` is that of docs/performance.md, with everything that was timed.
"""

from __future__ import annotations

import textwrap
from typing import Any

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
    "decode b32": "one token for 32 sequences, 32 heads",
}
NAMES = {
    "triton_gpu": "`triton_gpu`", "cuda": "`cuda`", "cuda_prefill": "`cuda`, w and u too", "fla": "FLA", "flash_kda": "FlashKDA",
    "flash_kda_vllm": "vLLM's FlashKDA", "cudnn": "cuDNN", "cudnn_g32": "cuDNN, float32 g",
}  # fmt: skip
REGIMES = {"iid": "gates that forget at once", "normal": "gates at random", "fla": "gates that forget slowly"}
VERSIONS = {"FLA": "fla-core", "cuDNN": "nvidia-cudnn-frontend"}

Row = dict[str, Any]


def markdown(records: list[Row]) -> str:
    """The table of the newest gpu suite among the records, with what it was measured on."""
    record = max((r for r in records if r["settings"].get("suite") == "gpu"), key=lambda r: r["date"])
    found = {(r["entry"], r["contestant"]): r for r in record["results"]}
    columns = {title: names for title, names in COLUMNS.items() if any((entry, n) in found for entry in ENTRIES for n in names)}
    rows = []
    for entry, text in ENTRIES.items():
        best = {title: _fastest(found, entry, names) for title, names in columns.items()}
        if best[OURS] is not None:
            rows.append([text, *(_cell(title, row, best[OURS]) for title, row in best.items())])
    header = ["ms per call (error of o)", *(f"{title} {record['versions'].get(VERSIONS.get(title, ''), '')}".strip() for title in columns)]
    versions = ", ".join(f"{name} {record['versions'][name]}" for name in ("torch", "triton"))
    note = (
        f"One {record['machine']['device']}, bfloat16, K = V = 128; gate, norms and sigmoid in the kernel, initial and final state. "
        "Medians of one run in which all take turns; 2x: kdakit is twice as fast. Errors are relative to the float64 "
        f"recurrence, on three heads. {record['date']}, {versions}, commit {record['commit'][:12]}."
    )
    return markdown_table(header, rows, right=tuple(range(1, len(header)))) + "\n\n" + textwrap.fill(note, 120)


def _fastest(found: dict[tuple[str, str], Row], entry: str, names: tuple[str, ...]) -> Row | None:
    return min((found[entry, n] for n in names if (entry, n) in found), key=lambda r: r["median_ms"], default=None)


def _cell(title: str, row: Row | None, ours: Row) -> str:
    if row is None:
        return "–"
    shown = time_and_error(row, bold=title == OURS)
    return shown if title == OURS else f"{shown}, {row['median_ms'] / ours['median_ms']:.1f}x"


def time_and_error(row: Row, bold: bool = False) -> str:
    time = f"{row['median_ms']:.4f}" if row["median_ms"] < 0.1 else f"{row['median_ms']:.3f}"
    error = "" if row.get("error_o") is None else f" ({row['error_o']:.1e})".replace("e-0", "e-")
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
        if first["mode"] in ("fwd", "fwdbwd") and any(r.get("extra_mib") for r in rows.values()):
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
    modes = {"fwd": "forward", "graph": "forward, graph", "fwdbwd": "forward + backward", "eager": "forward, call after call"}
    if row["mode"] == "decode":
        what = f"decode, {s['B']} sequence{'s' * (s['B'] > 1)}, {s['H']} heads"
    else:
        tokens = f"{len(s['lengths'])} x {s['lengths'][0]} packed" if s["lengths"] else f"{s['T']} tokens"
        what = f"{modes[row['mode']]}, {tokens}, {s['H']} heads"
    if row["dtype"] == "float32":
        what += f" of {s['K']}, float32, chunks of {row['chunk_size']}"
    elif row["gate"] != "bounded":
        what += ", softplus gate" if row["gate"] == "softplus" else ", log-decays given"
    return what + (f", {REGIMES[row['regime']]}" if row.get("regime") else "")
