"""Tables of what was measured on a GPU."""

from __future__ import annotations

from typing import Any

from kdakit.measure import suites

SHOWN = {"cuda_prefill": "cuda_prefill (gives out w and u)"}
COLUMNS = ("ms per call", "host ms", "of floor", "peak memory MiB", "error of o", "of state")


def table(title: str, rows: list[dict[str, Any]]):
    """One job: a row per contestant, fastest first."""
    names = [r["contestant"] for r in rows]
    header = ["implementation", *COLUMNS, *(f"x {name}" for name in _peers(names)), "o differs by"]
    ordered = sorted(rows, key=lambda r: r["median_ms"])
    return title, header, [[_name(r), *_cells(r), *_ratios(r, rows, _peers(names)), f"{r['difference']:.0e}"] for r in ordered]


def suite_tables(record: dict[str, Any]):
    """Everything in one table, then the aims."""
    every = record["results"]
    peers = _peers([r["contestant"] for r in every])
    made, last = [], None
    for r in every:
        rows = [x for x in every if x["entry"] == r["entry"]]
        made.append([r["entry"] if r["entry"] != last else "", _name(r), *_cells(r), *_ratios(r, rows, peers)])
        last = r["entry"]
    if made:
        yield f"suite {record['settings']['suite']}", ["", "implementation", *COLUMNS, *(f"x {name}" for name in peers)], made
    aims = []
    for text, kind, limit, value, met in suites.judge(record):
        if value is not None:
            aims.append([text, f"{kind} {limit:g}", f"{value:.3g}", "yes" if met else "no"])
    if aims:
        yield "aims", ["", "aim", "measured", "met"], aims


def error_tables(record: dict[str, Any]):
    """Relative errors: a row per case and result, a column per contestant."""
    every = record["results"]
    names = list(dict.fromkeys(r["contestant"] for r in every))
    made = []
    for case in dict.fromkeys(r["case"] for r in every):  # in the order of the first contestant
        rows = {r["contestant"]: r for r in every if r["case"] == case}
        for field, text in (("o", "o"), ("final_state", "state"), ("gradient", "worst gradient")):
            cells = [error(rows[name][field]) if name in rows and field in rows[name] else "–" for name in names]
            if any(c != "–" for c in cells):
                made.append([f"{case}: {text}", *cells])
    if made:
        yield f"errors against float64, {record['settings']['dtype']}", ["", *names], made


def tune_tables(record: dict[str, Any]):
    """What was tried, kernel by kernel."""
    made, last = [], None
    for r in record["results"]:
        place = f"{r['kernel']} ({', '.join(f'{n} {x}' for n, x in r['when'].items())})"
        use = ", ".join(f"{n} {x}" for n, x in r["use"].items())
        made.append([place if place != last else "", use, "–" if r["ms"] is None else f"{r['ms']:.4f}", r["verdict"]])
        last = place
    if made:
        yield f"tile sizes of {record['settings']['chip']}", ["", "candidate", "ms", "verdict"], made


KINDS = {"suite": suite_tables, "errors": error_tables, "tune": tune_tables}


def _name(row: dict[str, Any]) -> str:
    return SHOWN.get(row["contestant"], row["contestant"])


def _peers(names: list[str]) -> list[str]:
    from kdakit.measure.peers import PEERS

    return [p for p in PEERS if p in names and len(set(names)) > 1]


def _ratios(row, rows, peers) -> list[str]:
    """How many times as fast as each peer on the same job."""
    times = {r["contestant"]: r["median_ms"] for r in rows}
    return [f"{times[p] / row['median_ms']:.2f}" if p in times else "–" for p in peers]


def _cells(r) -> list[str]:
    def shown(field: str, form: str = "{:.3f}") -> str:
        return form.format(r[field]) if r.get(field) is not None else "–"

    return [
        shown("median_ms", "{:.4f}" if r["median_ms"] < 0.1 else "{:.3f}"), shown("host_ms"), shown("floor_share", "{:.0%}"),
        shown("extra_mib", "{:.0f}"), shown("error_o", "{:.1e}"), shown("error_state", "{:.1e}"),
    ]  # fmt: skip


def error(x: float | None) -> str:
    return "not finite" if x is None else f"{x:.1e}"
