"""Time backends, and peers, against each other in one run: medians of interleaved repetitions.

Ratios only mean something within one run on one machine; the JSON records which machine that was.
"""

from __future__ import annotations

import importlib.util
from typing import Any


def add_arguments(parser) -> None:
    parser.add_argument(
        "--backend", nargs="+", metavar="NAME", help="backends or peers to time, xla@2: over 2 devices (default: all backends)"
    )
    parser.add_argument("--shape", nargs="+", metavar="SHAPE", help="names of cases.SHAPES or BxTxHxK (default: cpu, on a GPU h16)")
    parser.add_argument("--mode", nargs="+", metavar="MODE", help="fwd, fwdbwd, decode, eager (default: fwd and, if they have one, fwdbwd)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16", "float64"))
    parser.add_argument("--gate", choices=("bounded", "softplus", "log_decay"), help="default: bounded; on a CPU log_decay with --against")
    parser.add_argument("--chunk-size", type=int, default=64, choices=(16, 32, 64, 128), help="default: 64")
    parser.add_argument("--against", nargs="+", metavar="PEER", help="fla (on a CPU its references, on a GPU its kernels), flash_kda")
    parser.add_argument("--suite", metavar="NAME", help="a named set of jobs for one run, with what it aims at: see docs/cli.md")
    parser.add_argument("--model-steps", type=int, metavar="N", help="with --suite model: timed steps (default: 12)")
    parser.add_argument("--curve", type=int, metavar="N", help="with --suite model: steps of the loss curves, 0: none (default: 200)")
    parser.add_argument("--entry", nargs="+", metavar="NAME", help="only these entries of the suite")
    parser.add_argument("--accuracy", action="store_true", help="also hold o and the final state of three heads against float64")
    parser.add_argument("--errors", action="store_true", help="time nothing: errors against float64, with gradients, on hard inputs")
    parser.add_argument("--case", nargs="+", metavar="NAME", help="only these cases of --errors")
    parser.add_argument("--draws", type=int, default=1, metavar="N", help="with --errors: root mean squares over N draws of the inputs")
    parser.add_argument("--repeat", type=int, default=20, metavar="N", help="repetitions of each implementation (default: 20)")
    parser.add_argument("--seconds", type=float, default=30, metavar="S", help="stop repeating after about S seconds (default: 30)")
    parser.add_argument("--memory", action="store_true", help="also run each in a process of its own and report its peak memory")
    parser.add_argument("--scaling", action="store_true", help="T from 2048 to 32768, time and peak memory, a process per point")
    parser.add_argument("--lengths", nargs="+", type=int, metavar="T", help="other lengths for --scaling and --ranks")
    parser.add_argument("--ranks", nargs="+", type=int, metavar="N", help="context parallel over N processes: time and bytes sent (torch)")
    parser.add_argument(
        "--tune",
        nargs="*",
        metavar="KERNEL",
        help="find tile sizes of the Triton kernels for this GPU (default: all); times: the constants by which auto compares backends",
    )
    parser.add_argument("--tiles", metavar="FILE", help="with --tune: where the result goes, a folder for times (default: inside kdakit)")
    parser.add_argument("--json", metavar="FILE", help="write machine, versions, commit and all medians to FILE")
    parser.add_argument("--plot", metavar="FILE", help="write a chart to FILE (PNG; needs matplotlib)")
    parser.add_argument("--render", nargs="+", metavar="JSON", help="time nothing: show recorded results; with --json join them")
    parser.add_argument("--table", metavar="FILE", help="with --render: rewrite the generated section of a Markdown file")
    parser.add_argument("--section", default="measurements", metavar="NAME", help="the section of that file (default: measurements)")


def run(args) -> int:
    """The exit code is 1 where nothing ran, or where a peer that was asked for is not installed."""
    from kdakit.measure import records, results

    check(args)
    found = [recorded(path) for path in args.render or ()] or [_chosen(args)(args)]
    if args.render and args.json:
        found = [records.joined(found)]
    for record in found:
        show(record)
    if args.json:
        records.save(found[0], args.json)
        print(f"wrote {args.json}")
    if args.plot:
        from kdakit.measure import plots

        plots.save(plots.together(found), args.plot)
        print(f"wrote {args.plot}")
    if args.table:
        from kdakit.measure import generated

        generated.write(args.table, args.section, results.section(args.section, found))
        print(f"wrote the {args.section} of {args.table}")
    complete = all(record["results"] and not any(row.get("absent") for row in record["missing"]) for record in found)
    return 0 if complete or args.render else 1


def check(args) -> None:
    """Everything that can be wrong with the options, before anything is timed."""
    from kdakit.measure import generated, plots, suites
    from kdakit.measure.choices import UsageError, pick_one, writable

    numbers = {"repeat": args.repeat, "seconds": args.seconds, "draws": args.draws, "model-steps": args.model_steps}
    for option, value in numbers.items():
        if value is not None and not value > 0:
            raise UsageError(f"--{option} must be positive, got {value}")
    for option, values in (("lengths", args.lengths), ("ranks", args.ranks)):
        if values and min(values) < 1:
            raise UsageError(f"--{option} takes numbers from 1, got {min(values)}")
    if args.curve is not None and args.curve < 0:
        raise UsageError(f"--curve must not be negative, got {args.curve}")
    kinds = [name for name in ("render", "errors", "suite", "scaling", "ranks") if getattr(args, name)] + ["tune"] * (args.tune is not None)
    if len(kinds) > 1:
        raise UsageError(f"--{kinds[0]} and --{kinds[1]} are two kinds of runs: choose one")
    kind = kinds[0] if kinds else ""
    goes_with = {
        "table": ["render"], "entry": ["suite"], "model_steps": ["suite"], "curve": ["suite"], "case": ["errors"], "tiles": ["tune"],
        "lengths": ["scaling", "ranks"],
    }  # fmt: skip
    for option, wanted in goes_with.items():
        if getattr(args, option) is not None and kind not in wanted:
            raise UsageError(f"--{option.replace('_', '-')} goes with --{' or --'.join(wanted)}")
    if kind == "suite":
        for option in ("shape", "mode", "against", "gate", "memory"):
            if getattr(args, option):
                raise UsageError(f"--{option} is the suite's own: leave it out, or leave out --suite")
        pick_one("suite", args.suite, [*suites.SUITES, *suites.WHOLE])
        if args.suite in suites.WHOLE:
            can_run(args.suite)
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'kdakit[bench]'")
    if args.plot and kind in ("errors", "tune"):
        raise UsageError(f"--plot draws times; of --{kind} there is a table")
    if args.plot and plots.kind(args.plot) is None:
        raise UsageError(f"--plot must name a PNG, or what else matplotlib writes, got {args.plot}")
    writable(args.json, args.plot, args.table, args.tiles if args.tune != ["times"] else None)  # which are a folder's
    if args.table:
        generated.read(args.table, args.section)


def recorded(path: str) -> dict[str, Any]:
    """A record that can be shown; UsageError says which cannot."""
    from kdakit.measure import machine, records, results
    from kdakit.measure.choices import UsageError

    record = records.load(path)
    try:
        list(results.tables(record)), results.absences(record["missing"]), results.provenance(record)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as problem:
        kind, reason = record["kind"], machine.failure(problem).removeprefix(machine.FAILED)
        raise UsageError(f"{path} must hold what kdakit bench has measured, got a record of kind {kind!r} ({reason})") from problem
    return record


def show(record: dict[str, Any]) -> None:
    from kdakit.cli import console
    from kdakit.measure import results

    out = console.output()
    for title, header, rows in results.tables(record):
        shown = console.table(title, *header, right=tuple(header[1:]))
        for row in rows:
            shown.add_row(*row)
        out.print(shown)
    for gone in record["missing"]:
        out.print(f"{gone['contestant']} did not run {results.label(gone)}: {gone['reason']}", markup=False)
    out.print(results.provenance(record), markup=False)


def _chosen(args):
    from kdakit.measure import suites, tuning

    if args.tune is not None:
        return tuning.run
    if args.suite in suites.WHOLE:
        return importlib.import_module(suites.WHOLE[args.suite]).run
    kinds = {"ranks": over_ranks, "scaling": scaling, "suite": run_suite, "errors": find_errors}
    return next((run for name, run in kinds.items() if getattr(args, name)), compete)


def plan_of(args, default_modes=("fwd", "fwdbwd"), **more):
    """The Plan that the options name."""
    from kdakit.dispatch import names
    from kdakit.measure import inputs, records
    from kdakit.measure.choices import pick
    from kdakit.measure.contestants import MODES, OPERATORS, PEERS, parse_shape, reserve
    from kdakit.measure.sweeps import Plan

    peers = pick("against", args.against, PEERS) if args.against else []
    named = [] if args.backend in (None, ["all"]) else args.backend
    known = pick("backend", [name.partition("@")[0] for name in named], [*names(), *OPERATORS, *PEERS] if named else names())
    chosen = list(dict.fromkeys(named)) or known
    reserve(chosen)
    peers += [name for name in chosen if name in PEERS]
    modes = args.mode or (("fwd",) if _forward_only([name for name in chosen if name not in PEERS]) else default_modes)
    shapes = args.shape or ["cpu" if inputs.gpu() is None else "h16"]  # one that keeps this machine busy for a moment
    # FLA's references, which is what runs on a CPU, take log-decays only.
    gate = args.gate or ("log_decay" if peers and inputs.gpu() is None else "bounded")
    return Plan(
        tuple(dict.fromkeys(chosen + peers)), tuple(pick("mode", modes, MODES)), {text: parse_shape(text) for text in shapes},
        args.dtype, gate, args.chunk_size, args.repeat, args.seconds, args.accuracy, args.memory, tuple(dict.fromkeys(args.lengths or ())),
        tuple(dict.fromkeys(args.ranks or ())), keep=lambda record: args.json and records.save(record, args.json), **more,
    )  # fmt: skip


def _forward_only(backends) -> bool:
    """Whether none of them has a backward of its own: their gradients are another backend's, and so is the time of those."""
    from kdakit.dispatch import load
    from kdakit.measure.contestants import OPERATORS, split

    def has_none(name):
        try:
            return name in OPERATORS or load(split(name)[0]).backward is None
        except ImportError:  # of its framework; it is listed with that reason
            return False

    return bool(backends) and all(map(has_none, backends))


def _watched(kind: str, plan, sweep) -> dict[str, Any]:
    """`sweep(plan)` with a bar."""
    from dataclasses import replace

    from kdakit.cli import console
    from kdakit.measure import sweeps

    with console.progress() as bar:
        task = bar.add_task(kind, total=sweeps.jobs(plan, kind))
        return sweep(replace(plan, tick=lambda text: bar.update(task, advance=1, description=text)))


def compete(args) -> dict[str, Any]:
    from kdakit.measure import sweeps

    return _watched("compete", plan_of(args), sweeps.compete)


def scaling(args) -> dict[str, Any]:
    from kdakit.measure import sweeps

    return _watched("scaling", plan_of(args, ("fwdbwd",)), sweeps.scaling)


def over_ranks(args) -> dict[str, Any]:
    from kdakit.measure import sweeps
    from kdakit.measure.choices import UsageError

    if args.backend or args.against:
        raise UsageError("--ranks takes neither --backend nor --against: it cuts this library's own calls")
    plan = plan_of(args)
    if "decode" in plan.modes:
        raise UsageError("--ranks cuts the token axis, of which decode has one token: use --mode fwd fwdbwd")
    return _watched("ranks", plan, sweeps.over_ranks)


def run_suite(args) -> dict[str, Any]:
    from kdakit.cli import console
    from kdakit.measure import records, suites, sweeps
    from kdakit.measure.choices import pick

    name = args.suite
    entries = pick("entry", args.entry, suites.SUITES[name])
    wanted = pick("backend", args.backend, dict.fromkeys(c for entry in suites.SUITES[name].values() for c in entry.contestants))
    can_run(name)
    keep = lambda record: args.json and records.save(record, args.json)
    with console.progress() as bar:
        task = bar.add_task(name, total=len(entries))
        tick = lambda text: bar.update(task, advance=1, description=text)
        plan = sweeps.Plan(tuple(wanted), (), {}, repeat=args.repeat, seconds=args.seconds, with_errors=args.accuracy, keep=keep, tick=tick)
        return sweeps.suite(name, entries, plan)


def can_run(suite: str) -> None:
    from kdakit.measure import suites
    from kdakit.measure.choices import UsageError

    if (reason := suites.cannot_run()) is not None:
        raise UsageError(f"--suite {suite} cannot run here: {reason}")


def find_errors(args) -> dict[str, Any]:
    """Errors against float64, no times."""
    from kdakit.cli import console
    from kdakit.measure import errors

    with console.progress() as bar:
        task = bar.add_task("errors", total=None)
        return errors.sweep(args, lambda text, total: bar.update(task, advance=1, total=total, description=text))
