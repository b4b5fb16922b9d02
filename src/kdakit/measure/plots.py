"""Charts of recorded measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kdakit.measure import speed
from kdakit.measure.choices import UsageError
from kdakit.measure.results import label

COLOURS = ("#2f6f9f", "#d98032", "#4c9a6a", "#8a5fa8", "#777777", "#b04a5a", "#5aa7b0", "#b0a03a")


def together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Records of one suite as one to draw: every entry as the last that has it."""
    last = {row.get("entry"): record for record in found for row in record["results"]}
    rows = [row for record in found for row in record["results"] if last[row.get("entry")] is record]
    dates = sorted(record["date"] for record in found)
    return found[-1] | {"results": rows, "date": " to ".join(dict.fromkeys((dates[0], dates[-1])))}


def kind(path: str) -> str | None:
    """The format that a file's name asks for, a PNG if it says nothing; None: matplotlib writes no such files."""
    from matplotlib.backend_bases import FigureCanvasBase

    suffix = Path(path).suffix.removeprefix(".").lower() or "png"
    return suffix if suffix in FigureCanvasBase.get_supported_filetypes() else None


def save(record: dict[str, Any], path: str) -> None:
    """A PNG of the record: bars for a race, lines for a scaling run."""
    try:
        import matplotlib
    except ImportError as problem:
        raise UsageError("--plot needs matplotlib: pip install 'kdakit[bench]'") from problem
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if not record["results"]:
        raise UsageError("there is nothing to plot: no contestant ran")
    if record["kind"] in ("errors", "tune"):
        raise UsageError(f"--plot draws times; of {record['kind']} there is a table")
    draw = _scaling if record["kind"] == "scaling" else _bars
    figure = draw(plt, record)
    machine, settings = record["machine"], record["settings"]
    place = f"{machine['cpu']}, {machine['cores']} cores" if machine.get("device", "cpu") == "cpu" else machine["device"]
    what = f"suite {settings['suite']}" if "suite" in settings else f"{settings['dtype']}, {settings['gate']} gate"
    note = f"{place}; {what}; {record['date']}"
    figure.text(0.01, 0.01, note, fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140, format=kind(path))
    plt.close(figure)


PANELS = 6
# Of a suite with more entries: what a reader looks for first.
FIRST = ("fwd h96", "fwd h64", "fwd h96 softplus", "fwdbwd h96", "fwdbwd h32", "decode b32")


def _bars(plt, record):
    """A panel per job, at most PANELS; shapes written out."""
    groups: dict[str, list] = {}
    for row in record["results"]:
        groups.setdefault(row.get("entry") or label(row), []).append(row)
    if len(groups) > PANELS:
        chosen = [name for name in FIRST if name in groups]
        chosen += [name for name in groups if name not in chosen]
        groups = {name: groups[name] for name in chosen[:PANELS]}
    names = list(dict.fromkeys(r["contestant"] for r in record["results"]))
    across = min(len(groups), 3)
    down = -(-len(groups) // across)
    figure, panels = plt.subplots(down, across, figsize=(max(4.4 * across, 5), 3.5 * down), squeeze=False)
    for panel in panels.flat[len(groups) :]:
        panel.set_visible(False)
    for panel, rows in zip(panels.flat, groups.values(), strict=False):
        times = [r["median_ms"] for r in rows]
        colours = [COLOURS[names.index(r["contestant"]) % len(COLOURS)] for r in rows]
        bars = panel.bar([shown(r["contestant"]) for r in rows], times, color=colours)
        panel.set_ylim(top=max(times) * 1.25)
        for bar, r in zip(bars, rows, strict=True):
            text = f"{duration(r['median_ms'])}\n{max(times) / r['median_ms']:.1f}x"
            panel.text(bar.get_x() + bar.get_width() / 2, bar.get_height(), text, ha="center", va="bottom", fontsize=8)
        panel.set_title(panel_title(rows[0]), fontsize=9)
        panel.set_ylabel("milliseconds per call", fontsize=8)
        panel.tick_params(axis="x", labelsize=8, labelrotation=20 if len(rows) > 4 else 0)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def shown(contestant: str) -> str:
    """Its name as readers know it."""
    return speed.NAMES.get(contestant, contestant).replace("`", "")


def panel_title(row: dict[str, Any]) -> str:
    """'forward, softplus gate' over '8192 tokens, 96 heads of 128'."""
    what, _, sizes = label(row).partition(", ")
    gate = {"softplus": ", softplus gate", "log_decay": ", log-decays given"}.get(row.get("gate", ""), "") if "entry" in row else ""
    return f"{what}{gate}\n{sizes}"


def duration(ms: float) -> str:
    """Three digits in a unit that people read: 37.4 us, 0.667 ms, 85.6 ms, 3.94 s."""
    if ms < 0.1:
        return f"{1000 * ms:.3g} us"
    return f"{ms:.3g} ms" if ms < 1000 else f"{ms / 1000:.3g} s"


def _scaling(plt, record):
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8))
    lines = list(dict.fromkeys((r["contestant"], r["mode"]) for r in record["results"]))
    for colour, line in zip(COLOURS * len(lines), lines, strict=False):
        rows = [r for r in record["results"] if (r["contestant"], r["mode"]) == line]
        T = [r["shape"]["T"] for r in rows]
        for panel, field in ((left, "median_ms"), (right, "extra_mib")):
            panel.plot(T, [r[field] for r in rows], "o-", color=colour, label=" ".join(line))
            panel.plot(T, [rows[0][field] * t / T[0] for t in T], ":", color=colour, linewidth=1)
    for panel, title in ((left, "median milliseconds"), (right, "peak memory above the inputs, MiB")):
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:.2g}")
        panel.set_xlabel("T (tokens); dotted: linear growth")
        panel.set_title(title, fontsize=10)
        panel.grid(alpha=0.3)
    left.legend(fontsize=8)
    return figure
