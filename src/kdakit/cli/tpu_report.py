"""What a TPU says to all of it, in one file: is it right, is it fast. About an hour; run it once and send the file back.

Each part is a process of its own: one that crashes or hangs costs itself alone, and the file has everything up to then.
"""

from __future__ import annotations


def add_arguments(parser) -> None:
    parser.add_argument("--json", default="tpu_report.json", metavar="FILE", help="where the report goes (default: tpu_report.json)")
    parser.add_argument("--part", nargs="+", metavar="NAME", help="only these parts; their names: --list")
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="the most that a part may take (default: 10)")
    parser.add_argument("--tiny", action="store_true", help="a problem or two each: without a TPU, in Pallas' interpreter")
    parser.add_argument("--list", action="store_true", help="say what the parts are, and run none")


def run(args) -> int:
    """The exit code is 1 where a part failed."""
    from kdakit.measure import records, tpu_report
    from kdakit.measure.choices import UsageError, pick, writable

    if not args.minutes > 0:
        raise UsageError(f"--minutes must be positive, got {args.minutes:g}")
    parts = {part.name: part for part in tpu_report.parts(tiny=args.tiny, minutes=args.minutes)}
    chosen = [parts[name] for name in pick("part", args.part, parts)]
    if args.list:
        for part in chosen:
            print(f"{part.name}: python -m {' '.join(part.words)}")
        return 0
    writable(args.json)

    tell = lambda row: print(f"{row['part']}: {tpu_report.verdict(row)} ({row['seconds']:.0f} s)", flush=True)
    report = tpu_report.collect(chosen, lambda report: records.save(report, args.json), tell)
    fine = tpu_report.ok(report)
    print(f"{'All parts went well' if fine else 'Not all parts went well'}. Please send {args.json}", flush=True)
    return 0 if fine else 1
