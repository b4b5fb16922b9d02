"""Recorded measurements as tables, on the terminal and in Markdown."""

from __future__ import annotations

import importlib
import math
import textwrap
from typing import Any

from kdakit.measure import generated, gpu_results, speed, suites

# The packages that every measurement names.
UNKNOWN = "not recorded"  # what an old record does not say
WIDTH = 120  # of prose in documents
NAMED = ("python", "torch", "jax", "numpy", "fla-core", "flash_kda", "vllm", "nvidia-cudnn-frontend")


def section(name: str, records: list[dict[str, Any]]) -> str:
    """What a generated section of that name holds. `whole` has its own heading, and is empty where nothing was recorded."""
    if name == "speed":
        return speed.markdown(records)
    if name == "whole":
        return f"## Measured\n\n{markdown(records)}" if records else ""
    return markdown(current(records))


def current(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records without those jobs of suites that a newer one has timed; of two of one day the last given counts."""
    job = lambda row: (row.get("entry"), label(row))
    timed: set[tuple[str, str]] = set()
    kept = {}
    for place in sorted(range(len(records)), key=lambda place: records[place]["date"])[::-1]:
        record = records[place]
        if record["kind"] == "suite":
            mine = {job(row) for row in record["results"]}
            record = record | {part: [row for row in record[part] if job(row) not in timed] for part in ("results", "missing")}
            timed |= mine
        if record["kind"] != "suite" or record["results"]:
            kept[place] = record
    return [kept[place] for place in sorted(kept)]


def markdown(records: list[dict[str, Any]]) -> str:
    parts = []
    for record in records:
        for title, header, rows in speed.overview(record) if record["kind"] == "suite" else tables(record):
            parts += [f"**{title}**", generated.markdown_table(header, rows, right=tuple(range(1, len(header))))]
        parts += [wrap(line) for line in absences(record["missing"])]
        parts.append(wrap(provenance(record)))
    return "\n\n".join(parts)


def absences(missing: list[dict[str, Any]]) -> list[str]:
    """A sentence for each implementation and reason, however many jobs it kept it from; of a long reason its beginning."""
    groups: dict[tuple[str, str], list[str]] = {}
    for gone in missing:
        groups.setdefault((gone["contestant"], gone["reason"]), []).append(label(gone))
    jobs = lambda labels: labels[0] if len(labels) == 1 else f"{len(labels)} jobs"
    return [
        f"{contestant} did not run {jobs(labels)}: {textwrap.shorten(reason, 110, placeholder=' ..')}."
        for (contestant, reason), labels in groups.items()
    ]


def wrap(text: str) -> str:
    """A paragraph in lines that an editor shows whole."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def provenance(record: dict[str, Any]) -> str:
    """Machine, versions and commit in one line."""
    m = record["machine"]
    software = ", ".join(f"{n} {v}" for n, v in record["versions"].items() if n in NAMED and v != UNKNOWN)
    commit = (record.get("commit") or "unknown")[:12]
    about = ", ".join(str(x) for x in (f"{m['cores']} cores" if "cores" in m else None, m.get("architecture")) if x is not None)
    place = f"{m['cpu']} ({about})" if m["cpu"] != UNKNOWN else ""
    if m.get("device", "cpu") != "cpu":
        place = f"{m['device']}{', ' * bool(place)}{place}; triton {record['versions'].get('triton')}"
    command = "" if record["command"] == UNKNOWN else f"; `{record['command']}`"
    return f"{record['date']}: {place}; {software}; commit {commit}{command}"


def tables(record: dict[str, Any]):
    """(title, header, rows of strings) of what was measured, in one table or several."""
    if record["kind"] in suites.WHOLE:
        return importlib.import_module(suites.WHOLE[record["kind"]]).tables(record)
    kinds = {"scaling": _scaling_tables, "ranks": _rank_tables} | gpu_results.KINDS
    return kinds.get(record["kind"], _bench_tables)(record)


def _bench_tables(record):
    groups: dict[str, list] = {}
    for row in record["results"]:
        groups.setdefault(label(row), []).append(row)
    for title, rows in groups.items():
        if all("host_ms" in r for r in rows):
            yield gpu_results.table(f"{title}, {record['settings']['dtype']}, {record['settings']['gate']} gate", rows)
            continue
        slowest = max(rows, key=lambda r: r["median_ms"])
        header = ["implementation", "median ms", "best ms", "runs", "tokens/s", f"times as fast as {slowest['contestant']}", "o differs by"]
        memory = any("peak_mib" in r for r in rows)
        header += ["process MiB", "peak memory MiB"] if memory else []
        compared = all("error_o" in r for r in rows)
        header += ["error of o", "of state"] if compared else []
        made = []
        for r in sorted(rows, key=lambda r: r["median_ms"]):
            made.append([
                r["contestant"], f"{r['median_ms']:.2f}", f"{r['best_ms']:.2f}", str(len(r["samples_ms"])), f"{r['tokens_per_s']:,.0f}",
                f"{slowest['median_ms'] / r['median_ms']:.2f}", f"{r['difference']:.0e}",
            ] + ([f"{r[n]:.0f}" if n in r else "–" for n in ("peak_mib", "extra_mib")] if memory else [])
              + ([gpu_results.error(r[n]) for n in ("error_o", "error_state")] if compared else []))  # fmt: skip
        yield f"{title}, {record['settings']['dtype']}, {record['settings']['gate']} gate", header, made


def _scaling_tables(record):
    for name, mode in dict.fromkeys((r["contestant"], r["mode"]) for r in record["results"]):
        rows = [r for r in record["results"] if (r["contestant"], r["mode"]) == (name, mode)]
        made, before = [], None
        for r in rows:
            T = r["shape"]["T"]
            growth = f"{r['median_ms'] / before['median_ms']:.2f}" if before else ""
            more = f"{r['extra_mib'] / before['extra_mib']:.2f}" if before and before["extra_mib"] else ""
            per_token = f"{1000 * r['median_ms'] / T:.1f}"
            made.append([str(T), f"{r['median_ms']:.0f}", per_token, growth, f"{r['peak_mib']:.0f}", f"{r['extra_mib']:.0f}", more])
            before = r
        s, settings = rows[0]["shape"], record["settings"]
        title = f"{name}, {MODES[mode]}, {s['H']} heads of {s['K']}, {settings['dtype']}, {settings['gate']} gate" + _exponents(rows)
        yield title, ["tokens", "median ms", "us per token", "time vs row above", "process MiB", "peak memory MiB", "vs row above"], made


def _rank_tables(record):
    for mode in dict.fromkeys(r["mode"] for r in record["results"]):
        rows = [r for r in record["results"] if r["mode"] == mode]
        alone = {r["shape"]["T"]: r["median_ms"] for r in rows if r["ranks"] == 1}
        made = []
        for r in rows:
            T = r["shape"]["T"]
            ratio = f"{alone[T] / r['median_ms']:.2f}" if T in alone else ""
            made.append(
                [
                    f"{T} tokens, {r['ranks']} rank{'s' * (r['ranks'] > 1)}",
                    f"{r['median_ms']:.1f}",
                    ratio,
                    f"{r['sent_bytes']:,}",
                    f"{r['formula_bytes']:,}",
                ]
            )
        s, settings = rows[0]["shape"], record["settings"]
        title = (
            f"context parallel, {MODES[mode]}, {s['H']} heads of {s['K']}, {settings['dtype']}, {settings['gate']} gate, a thread per rank"
        )
        yield title, ["", "median ms", "times as fast as 1 rank", "most bytes a rank sent", "at most, by formula"], made


def _exponents(rows) -> str:
    """The p of time ~ T^p and memory ~ T^p between the first and the last row; 1 is linear."""
    first, last = rows[0], rows[-1]
    if len(rows) < 2:
        return ""
    span = math.log(last["shape"]["T"] / first["shape"]["T"])
    time = math.log(last["median_ms"] / first["median_ms"]) / span
    if not first["extra_mib"] or not last["extra_mib"]:
        return f": time grows as T^{time:.2f}"
    return f": time grows as T^{time:.2f}, memory as T^{math.log(last['extra_mib'] / first['extra_mib']) / span:.2f}"


MODES = {"fwd": "forward", "fwdbwd": "forward + backward", "decode": "decode", "eager": "forward, call after call",
         "graph": "forward, graph", "train": "step, graph"}  # fmt: skip


def label(row) -> str:
    """A job in words: 'forward, 8192 tokens, 96 heads of 128'."""
    if "case" in row:
        return f"{row['case']} in {row['dtype']}"
    if "shape" not in row:
        return row["entry"]
    s = row["shape"]
    if row["mode"] == "decode":
        tokens = f"one token of {s['B']} sequences" if s["B"] > 1 else "one token"
    else:
        tokens = f"{len(s['lengths'])} sequences in {s['T']} tokens" if s["lengths"] else f"{s['B']} x {s['T']} tokens"
        tokens = tokens.removeprefix("1 x ")
    heads = f"{s['H']} heads of {s['K']}" if s["H"] > 1 else f"1 head of {s['K']}"
    return f"{MODES.get(row['mode'], row['mode'])}, {tokens}, {heads}"
