"""The README's table: the newest record of the gpu suite, ours beside each peer, time and error per call."""

from __future__ import annotations

import textwrap
from typing import Any

from kdakit.measure.generated import markdown_table

OURS = "kdakit"
# Column: the contestants of which the fastest counts.
COLUMNS = {
    OURS: ("triton_gpu", "cuda"), "FLA": ("fla",), "FlashKDA": ("flash_kda",), "FlashKDA in vLLM": ("flash_kda_vllm",), "cuDNN": ("cudnn",),
}  # fmt: skip
# Entries that are the GPU's own work: those of few heads depend on the host.
ENTRIES = {
    "fwd h96": "forward, 8192 tokens, 96 heads",
    "fwd h64": "forward, 8192 tokens, 64 heads",
    "fwd h96 fla": "forward, 96 heads, gates that forget slowly",
    "fwd varlen96": "forward, 8 sequences of 1024, 96 heads",
    "fwd h96 softplus": "forward, 96 heads, softplus gate",
    "fwdbwd h96": "forward + backward, 96 heads",
    "decode b32": "one token for 32 sequences, 32 heads",
}
VERSIONS = {"FLA": "fla-core", "cuDNN": "nvidia-cudnn-frontend"}


def markdown(records: list[dict[str, Any]]) -> str:
    """The table of the newest suite among the records, with what it was measured on."""
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
        "recurrence, on three heads. "
        f"{record['date']}, {versions}, commit {record['commit'][:12]}."
    )
    return markdown_table(header, rows, right=tuple(range(1, len(header)))) + "\n\n" + textwrap.fill(note, 120)


def _fastest(found: dict, entry: str, names: tuple[str, ...]) -> dict[str, Any] | None:
    return min((found[entry, n] for n in names if (entry, n) in found), key=lambda r: r["median_ms"], default=None)


def _cell(title: str, row: dict[str, Any] | None, ours: dict[str, Any]) -> str:
    if row is None:
        return "–"
    time = f"{row['median_ms']:.3f}"
    error = "" if row.get("error_o") is None else f" ({row['error_o']:.1e})"
    return f"**{time}**{error}" if title == OURS else f"{time}{error}, {row['median_ms'] / ours['median_ms']:.1f}x"
