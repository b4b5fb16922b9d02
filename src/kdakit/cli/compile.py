"""Compile the TPU kernels with libtpu, no TPU needed, and read their schedule: cycles, time, VMEM, what each slot of the machine does.

Nothing is run. The prediction is optimistic: it counts instruction bundles, not the memory they may have to wait for.
"""

from __future__ import annotations

import json
from pathlib import Path
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
    parser.add_argument("--json", metavar="FILE", help="write machine, versions, commit and all numbers to FILE")
    parser.add_argument("--render", nargs="+", metavar="FILE", help="compile nothing, print the tables of files that --json wrote")
    parser.add_argument("--table", metavar="FILE", help="with --render: rewrite the generated tables of a Markdown file")


def run(args) -> int:
    from kdakit.measure import generated, tpu_schedule, tpu_table
    from kdakit.measure.choices import UsageError

    if args.render:
        text = tpu_table.render(args.render)
        generated.write(args.table, "schedule", text) if args.table else print(text)
        return 0
    if args.table:
        raise UsageError("--table needs --render FILE ..")
    made = jobs(args)
    if (reason := tpu_schedule.missing()) is not None:
        raise UsageError(f"nothing can be compiled for TPUs here: {reason}")
    record = measure(args, made)
    show(record)
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n")
        print(f"wrote {args.json}")
    if not record["results"]:
        raise UsageError("nothing was compiled")
    return 1 if record["missing"] else 0


def jobs(args) -> list[tuple[str, Any]]:
    """(chip, Job) of everything asked for."""
    from kdakit.measure.choices import UsageError, pick
    from kdakit.measure.contestants import parse_shape
    from kdakit.measure.tpu_kernels import CHIPS, GATES, KERNELS, Job

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
    from dataclasses import asdict

    from kdakit.cli import console
    from kdakit.measure import machine, tpu_schedule

    results, missing = [], []
    with console.progress() as bar:
        task = bar.add_task("compile", total=len(made))
        for target, job in made:
            bar.update(task, description=f"{target} {job.kernel}")
            found = tpu_schedule.schedule(job, target)
            row = {"target": target, "job": asdict(job), "label": str(job)} | found
            (missing if "reason" in found else results).append(row)
            bar.update(task, advance=1)
    note = "static schedule by libtpu, nothing was run; cycles are instruction bundles and do not wait for memory"
    return {"kind": "tpu_schedule", **machine.describe(), "settings": {"note": note}, "results": results, "missing": missing}


def show(record: dict[str, Any]) -> None:
    from kdakit.cli import console

    out = console.output()
    columns = ("chip", "kernel", "bundles a step", "branches as taken", "steps", "Mcycles", "VMEM MiB")
    columns += ("MXU", "VALU", "EUP", "XLU", "load", "store", "spills")
    for row in record["results"]:
        title = f"{row['target']}: {row['label']}: {row['cycles'] / 1e6:.3f} M cycles, {row['milliseconds']:.3f} ms if memory keeps up"
        if row["weighted_cycles"] is not None:
            title += f"; {row['weighted_cycles'] / 1e6:.3f} M cycles with branches as often as taken"
        table = console.table(title, *columns, right=columns[2:])
        for kernel in row["kernels"]:
            table.add_row(row["target"], *_cells(kernel))
        table.add_row(row["target"], "XLA around them", "", "", "", f"{row['xla_cycles'] / 1e6:.3f}", *[""] * 8)
        out.print(table)
    for row in record["missing"]:
        out.print(f"{row['target']}: {row['label']}: {row['reason']}", markup=False)


def _cells(kernel: dict[str, Any]) -> list[str]:
    used = lambda name: f"{kernel['slots'][name]['mean'] / kernel['slots'][name]['capacity']:.0%}" if name in kernel["slots"] else ""
    from kdakit.measure.tpu_table import as_taken, spills

    return [
        kernel["name"], str(kernel["bundles_per_step"]), as_taken(kernel), str(kernel["steps"]),
        f"{kernel['bundles_per_step'] * kernel['steps'] / 1e6:.3f}", f"{kernel['vmem_bytes'] / 2**20:.1f}",
        *(used(n) for n in ("MXU", "VALU", "EUP", "XLU", "VLOAD", "VSTORE")), f"{spills(kernel):.2f}/bundle",
    ]  # fmt: skip
