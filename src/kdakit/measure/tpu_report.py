"""The parts of `kdakit tpu-report`: what somebody with a TPU runs once, and sends back as one file.

A TPU belongs to one process at a time, and a kernel that is wrong may take its process with it. So each part is a process of its own, one
after the other, this one never touches the device, and the file is written after every part.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from kdakit.measure import machine

TAIL = 4000  # characters of what a part printed, kept where it failed
DEVICE = "device"


class Part(NamedTuple):
    name: str
    words: tuple[str, ...]  # of python -m; {json} is where its record goes
    minutes: float


def parts(backend: str = "pallas_tpu", tiny: bool = False, minutes: float = 10.0) -> list[Part]:
    """In the order in which to look: is there a chip; the smallest calls, then gradients, then pools, which write in place; then speed.

    tiny: a problem or two each, for machines without a TPU, where they run in the interpreter.
    """
    case = ("--case", "plain") if tiny else ()
    shape = ("--shape", "1x32x2x16") if tiny else ("--shape", "h32")
    decode = ("--shape", "2x1x2x16") if tiny else ("--shape", "1x1x32x128", "32x1x32x128", "256x1x32x128")
    few = ("--repeat", "1", "--seconds", "1") if tiny else ("--repeat", "20", "--seconds", "20")
    dtypes = ("float32",) if tiny else ("float32", "bfloat16")
    verify = ("kdakit.cli.main", "verify", "--backend", backend, "--json", "{json}")
    timed = ("xla",) if tiny else (backend, "xla")  # the time of an interpreter says nothing
    bench = ("kdakit.cli.main", "bench", "--backend", *timed, "--dtype", "bfloat16", "--json", "{json}", *few)
    own = "kdakit.measure.tpu_report"
    found = [Part(DEVICE, (own, "device", "{json}"), 3)]
    found += [Part(f"forward {d}", (*verify, "--no-grad", "--dtype", d, *case), minutes) for d in dtypes]
    found += [Part(f"recurrent {d}", (*verify, "--no-grad", "--op", "recurrent", "--dtype", d, *case), minutes) for d in dtypes]
    found += [Part(f"gradients {d}", (*verify, "--dtype", d, *case), minutes) for d in dtypes]
    found += [Part("pools", (own, "pools", "{json}", backend, *(("1", "20") if tiny else ("200", "256"))), minutes)]
    found += [Part("random", (*verify, "--workers", "1", "--random", "1" if tiny else "500", "--minutes", str(minutes / 2)), minutes)]
    found += [Part(f"time of {mode}", (*bench, "--mode", mode, *(decode if mode == "decode" else shape)), minutes)
              for mode in ("fwd", "fwdbwd", "decode")]  # fmt: skip
    return found


def run(part: Part) -> dict[str, Any]:
    """The part in a process of its own: its record, or the reason why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "record.json"
        words = [word.replace("{json}", str(file)) for word in part.words]
        began = time.monotonic()
        try:
            done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=60 * part.minutes)
            code: int | None = done.returncode
            said = done.stdout + done.stderr
        except subprocess.TimeoutExpired as late:
            code, said = None, "".join(x.decode(errors="replace") if isinstance(x, bytes) else x or "" for x in (late.stdout, late.stderr))
        row = {"part": part.name, "code": code, "seconds": round(time.monotonic() - began, 1), "command": " ".join(part.words)}
        record = _read(file)  # what it had by then, if it came to no end
        if record is not None:
            row["record"] = record
        if code:
            row["said"] = said[-TAIL:]
        if record is None or code is None:
            ended = f"was still running after {part.minutes:g} minutes" if code is None else f"ended with code {code} and left no record"
            row |= {"reason": f"{part.name} {ended}", "said": said[-TAIL:]}
        return row


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


def collect(chosen: list[Part], save, tell=lambda row: None) -> dict[str, Any]:
    """One record of all parts; save(record) after each."""
    report = {"kind": "tpu_report", **machine.describe(), "settings": {"parts": [p.name for p in chosen]}, "results": [], "missing": []}
    for part in chosen:
        row = run(part)
        if part.name == DEVICE and "record" in row:
            report["machine"]["device"] = row["record"]["kind"]
        report["missing" if "reason" in row else "results"].append(row)
        save(report)
        tell(row)
    return report


def verdict(row: dict[str, Any]) -> str:
    """One line about a part."""
    if "reason" in row:
        return row["reason"]
    if row["part"] == DEVICE:
        return f"{row['record']['count']} x {row['record']['kind']}"
    rows = row["record"].get("results", [])
    if any("ok" in r for r in rows):
        return f"{sum(bool(r['ok']) for r in rows)} of {len(rows)} right"
    times = [f"{r.get('contestant')} {r['median_ms']:.3f} ms" for r in rows if "median_ms" in r]
    return ", ".join(times) or f"{len(rows)} results"


def ok(report: dict[str, Any]) -> bool:
    return not report["missing"] and all(row["code"] == 0 for row in report["results"])


def _device(file: str) -> int:
    import jax

    found = jax.devices()
    stats = machine.attempt(lambda: found[0].memory_stats() or {})
    told = {"platform": found[0].platform, "kind": found[0].device_kind, "count": len(found), "memory": stats,
            "cores": machine.attempt(lambda: getattr(found[0], "num_cores", None))}  # fmt: skip
    Path(file).write_text(json.dumps(told, default=str) + "\n")
    return 0


def _pools(file: str, backend: str, count: str, largest: str) -> int:
    """Random decodes over pools; the file grows with every one."""
    from kdakit.measure import pool_trials

    rows = []
    for seed in range(int(count)):
        rows.append(pool_trials.judge(pool_trials.draw(seed, int(largest)), backend))
        Path(file).write_text(json.dumps({"results": rows}, indent=1) + "\n")
    return int(not all(row["ok"] for row in rows))


if __name__ == "__main__":
    raise SystemExit({"device": _device, "pools": _pools}[sys.argv[1]](*sys.argv[2:]))
