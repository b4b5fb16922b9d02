"""Time backends, and peers, against each other in one run: medians of interleaved repetitions.

Ratios only mean something within one run on one machine; the JSON records which machine that was.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

WHOLE = {"model": "kdakit.measure.whole_models"}  # suites that are not made of single calls


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
    parser.add_argument("--suite", metavar="NAME", help="a named set of jobs for one run, with what it aims at: gpu, cuda")
    parser.add_argument("--model-steps", type=int, metavar="N", help="with --suite model: timed steps (default: 12)")
    parser.add_argument("--curve", type=int, metavar="N", help="with --suite model: steps of the loss curves, 0: none (default: 200)")
    parser.add_argument("--entry", nargs="+", metavar="NAME", help="only these entries of the suite")
    parser.add_argument("--accuracy", action="store_true", help="also hold o and the final state of three heads against float64")
    parser.add_argument("--errors", action="store_true", help="time nothing: errors against float64, with gradients, on hard inputs")
    parser.add_argument("--case", nargs="+", metavar="NAME", help="only these cases of --errors")
    parser.add_argument("--draws", type=int, default=1, metavar="N", help="with --errors: root mean squares over N draws of the inputs")
    parser.add_argument("--repeat", type=int, default=20, metavar="N", help="repetitions of each contestant (default: 20)")
    parser.add_argument("--seconds", type=float, default=30, metavar="S", help="stop repeating after about S seconds (default: 30)")
    parser.add_argument("--memory", action="store_true", help="also run each contestant in a process of its own and report its peak memory")
    parser.add_argument("--scaling", action="store_true", help="T from 2048 to 32768, time and peak memory, a process per point")
    parser.add_argument("--lengths", nargs="+", type=int, metavar="T", help="other lengths for --scaling and --ranks")
    parser.add_argument("--ranks", nargs="+", type=int, metavar="N", help="context parallel over N processes: time and bytes sent (torch)")
    parser.add_argument("--tune", nargs="*", metavar="KERNEL", help="find tile sizes of the Triton kernels for this GPU (default: all)")
    parser.add_argument("--tiles", metavar="FILE", help="with --tune: where the result goes (default: the chip's file inside kdakit)")
    parser.add_argument("--json", metavar="FILE", help="write machine, versions, commit and all medians to FILE")
    parser.add_argument("--plot", metavar="FILE", help="write a chart to FILE (PNG; needs matplotlib)")
    parser.add_argument("--render", nargs="+", metavar="JSON", help="time nothing: show recorded results")
    parser.add_argument("--table", metavar="FILE", help="with --render: rewrite the generated section of a Markdown file")
    parser.add_argument("--section", default="measurements", metavar="NAME", help="the section of that file (default: measurements)")


def run(args) -> int:
    from kdakit.measure import records, results
    from kdakit.measure.choices import UsageError

    if args.table and not args.render:
        raise UsageError("--table writes recorded results: name them with --render JSON ...")
    if args.repeat < 1 or args.seconds <= 0 or args.draws < 1:
        raise UsageError(f"--repeat, --seconds and --draws must be positive, got {args.repeat}, {args.seconds} and {args.draws}")
    recorded = [json.loads(Path(path).read_text()) for path in args.render or ()]
    found = recorded or [_chosen_kind(args)(args)]
    for record in found:
        show(record)
    if args.json and not args.render:
        records.save(found[0], args.json)
        print(f"wrote {args.json}")
    if args.plot:
        from kdakit.measure import plots

        plots.save(found[0], args.plot)
        print(f"wrote {args.plot}")
    if args.table:
        from kdakit.measure import generated

        generated.write(args.table, args.section, results.markdown(found))
        print(f"wrote the {args.section} of {args.table}")
    return 0 if all(record["results"] for record in found) else 1


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


def _chosen_kind(args):
    from kdakit.measure import tuning

    if args.tune is not None:
        return tuning.run
    if args.suite in WHOLE:
        return importlib.import_module(WHOLE[args.suite]).run
    kinds = {"ranks": over_ranks, "scaling": scaling, "suite": run_suite, "errors": find_errors}
    return next((run for name, run in kinds.items() if getattr(args, name)), compete)


def _chosen(args, default_modes):
    from kdakit.dispatch import names
    from kdakit.measure.choices import pick
    from kdakit.measure.contestants import MODES, OPERATORS, PEERS, reserve

    peers = pick("against", args.against, PEERS) if args.against else []
    named = [] if args.backend in (None, ["all"]) else args.backend
    known = pick("backend", [name.partition("@")[0] for name in named], [*names(), *OPERATORS, *PEERS] if named else names())
    chosen = list(dict.fromkeys(named)) or known
    reserve(chosen)
    peers += [name for name in chosen if name in PEERS]
    modes = args.mode or (("fwd",) if _forward_only([name for name in chosen if name not in PEERS]) else default_modes)
    return list(dict.fromkeys(chosen + peers)), pick("mode", modes, MODES), args.gate or _gate(peers)


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


def _shapes(args) -> list[str]:
    """Those asked for; else one that keeps this machine busy for a moment."""
    from kdakit.measure import inputs

    return args.shape or ["cpu" if inputs.gpu() is None else "h16"]


def _gate(peers) -> str:
    """FLA's references take log-decays only; its kernels, on a GPU, take everything."""
    from kdakit.measure import inputs

    return "log_decay" if peers and inputs.gpu() is None else "bounded"


def compete(args) -> dict[str, Any]:
    """All contestants on every shape and mode; the JSON grows with each of those, since a peer may tune itself for minutes at the next."""
    from kdakit.cli import console
    from kdakit.measure import contestants, race, records, worker

    names, modes, gate = _chosen(args, ("fwd", "fwdbwd"))
    measured, missing = [], []
    with console.progress() as bar:
        for text in _shapes(args):
            shape = contestants.parse_shape(text)
            for mode in modes:
                job = contestants.Job(shape, mode, args.dtype, gate, args.chunk_size)
                task = bar.add_task(f"{text} {mode}", total=len(names) * args.repeat)
                tick = lambda name, task=task: bar.update(task, advance=1)
                rows, out = race.run(names, job, args.repeat, args.seconds, tick, args.accuracy)
                bar.remove_task(task)
                for row in rows:
                    if args.memory:
                        row |= {k: v for k, v in worker.measure(row["contestant"], job, 1, 1.0).items() if k.endswith("_mib")}
                    measured.append({"shape_name": text, **row})
                missing += [{"shape_name": text, **row} for row in out]
                found = _record("bench", args, gate, measured, missing)
                if args.json:
                    records.save(found, args.json)
    return found


def run_suite(args) -> dict[str, Any]:
    """Every entry of a suite, its contestants taking turns; the JSON grows with every entry, so that a time limit loses only the rest."""
    from kdakit.cli import console
    from kdakit.measure import race, records
    from kdakit.measure.choices import pick
    from kdakit.measure.suites import SUITES

    suite = SUITES[pick("suite", [args.suite], SUITES)[0]]
    chosen = pick("entry", args.entry, suite)
    wanted = pick("backend", args.backend, dict.fromkeys(c for entry in suite.values() for c in entry.contestants))
    measured, missing = [], []
    with console.progress() as bar:
        task = bar.add_task(args.suite, total=len(chosen))
        for name in chosen:
            bar.update(task, advance=1, description=name)
            names = [n for n in suite[name].contestants if n in wanted]
            rows, out = race.run(names, suite[name].job, args.repeat, args.seconds, with_errors=args.accuracy)
            measured += [{"entry": name, **row} for row in rows]
            missing += [{"entry": name, **row} for row in out]
            found = records.record("suite", {"suite": args.suite, "repeat": args.repeat}, measured, missing)
            if args.json:
                records.save(found, args.json)
    return found


def find_errors(args) -> dict[str, Any]:
    """Errors against float64, no times."""
    from kdakit.cli import console
    from kdakit.measure import errors

    with console.progress() as bar:
        task = bar.add_task("errors", total=None)
        return errors.sweep(args, lambda text, total: bar.update(task, advance=1, total=total, description=text))


def scaling(args) -> dict[str, Any]:
    """Every contestant at growing T, a process per point, so that peak memory is its own."""
    from dataclasses import replace

    from kdakit.cli import console
    from kdakit.measure import contestants, race, worker

    names, modes, gate = _chosen(args, ("fwdbwd",))
    base = contestants.parse_shape(_shapes(args)[0])
    lengths = args.lengths or [2048, 4096, 8192, 16384, 32768]
    measured, missing = [], []
    with console.progress() as bar:
        task = bar.add_task("scaling", total=len(names) * len(modes) * len(lengths))
        for name in names:
            for mode in modes:
                for T in lengths:
                    bar.update(task, advance=1, description=f"{name} {mode} T={T}")
                    shape = replace(base, T=T, lengths=())
                    job = contestants.Job(shape, mode, args.dtype, gate)
                    got = worker.measure(name, job, min(args.repeat, 5), args.seconds)
                    about = {"contestant": name, "shape": race.sizes(shape), "mode": mode}
                    (missing if "reason" in got else measured).append(about | got)
    return _record("scaling", args, gate, measured, missing)


def over_ranks(args) -> dict[str, Any]:
    """Context parallel: the same tokens cut over growing numbers of processes."""
    from kdakit.cli import console
    from kdakit.measure import ranks
    from kdakit.measure.choices import UsageError

    if min(args.ranks) < 1 or args.backend or args.against:
        raise UsageError(f"--ranks takes numbers from 1 and neither --backend nor --against, got {args.ranks}")
    _, modes, gate = _chosen(args, ("fwd", "fwdbwd"))
    if "decode" in modes:
        raise UsageError("--ranks cuts the token axis, of which decode has one token: use --mode fwd fwdbwd")
    with console.progress() as bar:
        task = bar.add_task("ranks", total=len(modes) * len(args.ranks) * len(args.lengths or [0]))
        measured, missing = ranks.sweep(args, gate, modes, lambda text: bar.update(task, advance=1, description=text))
    return _record("ranks", args, gate, measured, missing)


def _record(kind: str, args, gate: str, measured, missing) -> dict[str, Any]:
    from kdakit.measure import records

    return records.record(kind, {"dtype": args.dtype, "gate": gate, "repeat": args.repeat}, measured, missing)
