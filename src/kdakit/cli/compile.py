"""Compile the TPU kernels with libtpu, no TPU needed, and read their schedule: cycles, time, VMEM, what each slot of the machine does.

Nothing is run. The prediction is optimistic: it counts instruction bundles, not the memory they may have to wait for.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from typing import Any


def add_arguments(parser) -> None:
    parser.add_argument("--target", nargs="+", metavar="CHIP", help="v4, v5e, v5p, v6e, tpu7x (default: v6e)")
    parser.add_argument(
        "--kernel", nargs="+", metavar="NAME", help="forward, training (forward and backward), step, delta_rule (default: all)"
    )
    parser.add_argument("--gate", nargs="+", metavar="GATE", help="bounded, softplus, log_decay (default: bounded)")
    parser.add_argument("--shape", nargs="+", metavar="SHAPE", help="names of cases.SHAPES or BxTxHxK (default: h32 = 1x8192x32x128)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--sequences", type=int, default=0, metavar="N", help="pack N sequences into T")
    parser.add_argument("--states", action="store_true", help="with initial and final states")
    parser.add_argument("--chunk-size", type=int, default=64, choices=(16, 32, 64, 128))
    parser.add_argument("--heads", type=int, default=0, metavar="N", help="heads a grid step (default: the backend's choice)")
    parser.add_argument("--disable-recompute", action="store_true", help="training: save more, compute less again")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="compilations at a time, a process each (default: 1)")
    parser.add_argument("--json", metavar="FILE", help="write machine, versions, commit and all numbers to FILE, after each compilation")
    parser.add_argument("--render", nargs="+", metavar="FILE", help="compile nothing, print the tables of files that --json wrote")
    parser.add_argument("--table", metavar="FILE", help="with --render: rewrite the generated tables of a Markdown file")


def run(args) -> int:
    from kdakit.measure import generated, tpu_schedule, tpu_table
    from kdakit.measure.choices import UsageError, writable

    writable(args.json)
    if args.render:
        text = tpu_table.render(args.render)
        generated.write(args.table, "schedule", text) if args.table else print(text)
        return 0
    if args.table:
        raise UsageError("--table needs --render FILE ..")
    made = jobs(args)
    if (reason := tpu_schedule.missing()) is not None:
        raise UsageError(f"nothing can be compiled for TPUs here: {reason}")
    if (reason := tpu_schedule.differs()) is not None:
        print(f"note: {reason}", file=sys.stderr)
    record = measure(args, made)
    show(record)
    if args.json:
        print(f"wrote {args.json}")
    if not record["results"]:
        raise UsageError("nothing was compiled")
    return 1 if record["missing"] else 0


def jobs(args) -> list[tuple[str, Any]]:
    """(chip, Job) of everything asked for."""
    from kdakit.measure.choices import UsageError, pick
    from kdakit.measure.contestants import parse_shape
    from kdakit.measure.tpu_kernels import CHIPS, GATES, KERNELS, Job

    if args.workers < 1:
        raise UsageError(f"--workers must be positive, got {args.workers}")
    for name in ("sequences", "heads"):
        if getattr(args, name) < 0:
            raise UsageError(f"--{name} must not be negative, got {getattr(args, name)}")
    more = {
        "dtype": args.dtype,
        "states": args.states,
        "disable_recompute": args.disable_recompute,
        "heads": args.heads,
        "chunk_size": args.chunk_size,
    }
    found = []
    for target in pick("target", args.target or ["v6e"], CHIPS):
        for shape in map(parse_shape, args.shape or ["h32"]):
            for kernel in pick("kernel", args.kernel, KERNELS):
                packed = {"sequences": args.sequences} if args.sequences and kernel != "step" else {}
                for gate in pick("gate", args.gate or ["bounded"], GATES):
                    sizes = {"B": shape.B, "T": shape.T, "H": shape.H, "K": shape.K, "sequences": len(shape.lengths)} | packed
                    found.append((target, Job(kernel, gate, **sizes, **more)))
    return found


def measure(args, made: list) -> dict[str, Any]:
    """Compile all, some at a time; one line on stderr and, with --json, one rewritten file for each that is done."""
    from kdakit.measure import machine, records

    note = "static schedule by libtpu, nothing was run; cycles are instruction bundles and do not wait for memory"
    record = {"kind": "tpu_schedule", **machine.describe(), "settings": {"note": note}, "results": [], "missing": []}
    rows: list[dict[str, Any] | None] = [None] * len(made)
    print(f"{len(made)} compilations, {args.workers} at a time; one takes from seconds to minutes", file=sys.stderr)
    with ThreadPoolExecutor(args.workers) as pool:
        futures = {pool.submit(_compile, *each): n for n, each in enumerate(made)}
        try:
            for done, future in enumerate(as_completed(futures), 1):
                row, seconds = future.result()
                rows[futures[future]] = row
                print(f"[{done}/{len(made)}] {seconds:.0f} s  {row['target']}: {row['label']}: {_brief(row)}", file=sys.stderr, flush=True)
                found = [row for row in rows if row is not None]  # in the order asked for, not the one done in
                record["results"] = [row for row in found if "reason" not in row]
                record["missing"] = [row for row in found if "reason" in row]
                records.keep(record, args.json)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return record


def _compile(target: str, job) -> tuple[dict[str, Any], float]:
    from kdakit.measure import tpu_schedule

    began = time.perf_counter()
    found = tpu_schedule.schedule(job, target)
    return {"target": target, "job": asdict(job), "label": str(job)} | found, time.perf_counter() - began


def _brief(row: dict[str, Any]) -> str:
    return row["reason"] if "reason" in row else f"{row['cycles'] / 1e6:.3f} M cycles"


def show(record: dict[str, Any]) -> None:
    from kdakit.cli import console

    out = console.output()
    columns = ("chip", "kernel", "bundles a step", "branches as taken", "steps", "Mcycles", "VMEM MiB")
    columns += ("MXU", "VALU", "EUP", "XLU", "load", "store", "spills")
    for row in record["results"]:
        title = f"{row['target']}: {row['label']}: {row['cycles'] / 1e6:.3f} M cycles, {row['milliseconds']:.3f} ms if memory keeps up"
        if row["weighted_cycles"] is not None:
            title += f"; {row['weighted_cycles'] / 1e6:.3f} M cycles with branches as often as taken"
        title += f"; {_kernels_alone(row)}"
        table = console.table(title, *columns, right=columns[2:])
        for kernel in row["kernels"]:
            table.add_row(row["target"], *_cells(kernel))
        table.add_row(row["target"], "XLA around them", "", "", "", f"{row['xla_cycles'] / 1e6:.3f}", *[""] * 8)
        out.print(table)
    for row in record["missing"]:
        out.print(f"{row['target']}: {row['label']}: {row['reason']}", markup=False)


def _kernels_alone(row: dict[str, Any]) -> str:
    from kdakit.measure.tpu_table import floor, kernel_cycles

    megabytes = sum(k["hbm_bytes"] for k in row["kernels"]) / 1e6
    return f"kernels alone {kernel_cycles(row):.3f} M; {megabytes:.0f} MB, {floor(row):.3f} ms at the memory's rate"


def _cells(kernel: dict[str, Any]) -> list[str]:
    used = lambda name: f"{kernel['slots'][name]['mean'] / kernel['slots'][name]['capacity']:.0%}" if name in kernel["slots"] else ""
    from kdakit.measure.tpu_table import as_taken, spills

    return [
        kernel["name"], str(kernel["bundles_per_step"]), as_taken(kernel), str(kernel["steps"]),
        f"{kernel['bundles_per_step'] * kernel['steps'] / 1e6:.3f}", f"{kernel['vmem_bytes'] / 2**20:.1f}",
        *(used(n) for n in ("MXU", "VALU", "EUP", "XLU", "VLOAD", "VSTORE")), f"{spills(kernel):.2f}/bundle",
    ]  # fmt: skip
