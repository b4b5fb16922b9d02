"""Compare every backend with the float64 truth, case by case, gradients included.

The error of each output is held against the one tolerance rule of kdakit.accuracy. The exit code is 1 if anything fails.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdakit.measure.checking import Row
    from kdakit.measure.verification import Outcome, Refusal


def add_arguments(parser) -> None:
    parser.add_argument("--backend", nargs="+", metavar="NAME", help="backends to check (default: all that need no interpreter here)")
    parser.add_argument("--case", nargs="+", metavar="NAME", help="cases of kdakit.cases to run (default: all)")
    parser.add_argument("--dtype", nargs="+", metavar="DTYPE", help="float32, bfloat16, float16, float64 (default: all)")
    parser.add_argument("--op", choices=("chunk", "recurrent"), default="chunk", help="chunk_kda or fused_recurrent_kda")
    parser.add_argument("--seed", type=int, help="draw other inputs (default: 0, with --random 1000)")
    parser.add_argument("--no-grad", action="store_true", help="outputs only, no gradients")
    parser.add_argument("-v", "--verbose", action="store_true", help="every output, not just the worst of each case")
    parser.add_argument("--json", metavar="FILE", help="write every number to FILE")
    parser.add_argument("--large", action="store_true", help="also cases with heads as models have them: minutes on a CPU")
    parser.add_argument("--workers", type=int, metavar="W", help="processes (default: this one; with --random one per core)")
    parser.add_argument(
        "--random", type=int, metavar="N", help="N random problems instead of cases, in worker processes; --seed draws others"
    )
    parser.add_argument("--problem", nargs="+", metavar="NUMBER", help="repeat these random problems, here and now")
    parser.add_argument(
        "--with", nargs="+", dest="change", metavar="NAME=VALUE", help="with --random: so in every problem, as K=200; K=136/256: in turn"
    )
    parser.add_argument("--minutes", type=float, metavar="M", help="with --random: stop after so many")
    parser.add_argument("--device", metavar="DEVICE", help="with --random: cpu, cuda, cuda:1 .. (default: the first accelerator)")
    parser.add_argument("--record", metavar="FOLDER", help="with --random: add what was right to the chip's table of shown forms in FOLDER")
    parser.add_argument("--unshown", action="store_true", help="with --random: of the N those with kernels new to the chip's table")
    parser.add_argument("--table", metavar="FILE", help="rewrite the generated error table of a Markdown file")


def run(args) -> int:
    check(args)
    if args.random is not None or args.problem:
        from kdakit.cli import random_search
        from kdakit.measure.random_problems import MORE

        args.seed = MORE if args.seed is None else args.seed
        return random_search.run(args)
    args.seed = args.seed or 0
    from kdakit.cases import CASES, DTYPES, MODEL_CASES, SEGMENT_CASES
    from kdakit.cli import console
    from kdakit.dispatch import names
    from kdakit.measure import checking, records, verification
    from kdakit.measure.choices import pick

    known = CASES | SEGMENT_CASES | (MODEL_CASES if args.large else {})
    backends, dtypes = pick("backend", args.backend or checking.native_backends(), names()), pick("dtype", args.dtype, DTYPES)
    cases = [known[name] for name in pick("case", args.case, known)]
    with console.progress() as bar:
        task = bar.add_task("verify", total=len(backends) * len(dtypes) * len(cases))
        tick = lambda what: bar.update(task, advance=1, description=what)
        verify = verification.verify if (args.workers or 1) == 1 else partial(verification.in_processes, args.workers)
        outcomes, refusals = verify(backends, cases, dtypes, seed=args.seed, grad=not args.no_grad, op=args.op, tick=tick)
    show(outcomes, refusals, args.verbose)
    if args.json:
        records.save(as_json(args, outcomes, refusals), args.json)
    passed = bool(outcomes) and all(outcome.ok for outcome in outcomes)
    if args.table and not passed:
        print(f"left {args.table} as it is: the table is written when everything passes")
    elif args.table:
        from kdakit.measure import generated, machine, records, results

        text, made = error_markdown(outcomes), results.wrap(results.provenance(machine.describe(records.device())))
        if args.case:  # the rows of other cases, and where they come from, stay
            old = generated.read(args.table, "errors")
            sources = [part for part in old.split("\n\n") if not part.startswith(("#", "|"))]
            text, made = generated.merged(old, text), "\n\n".join([*sources, f"{', '.join(f'`{name}`' for name in args.case)}: {made}"])
        generated.write(args.table, "errors", f"{text}\n\n{made}")
        print(f"wrote the error table of {args.table}")
    return 0 if passed else 1


def check(args) -> None:
    """Everything that can be wrong with the options, before anything runs."""
    from kdakit.measure import generated
    from kdakit.measure.choices import UsageError, writable

    for option, value in (("workers", args.workers), ("random", args.random), ("minutes", args.minutes)):
        if value is not None and not value > 0:
            raise UsageError(f"--{option} must be positive, got {value}")
    if args.seed is not None and args.seed < 0:
        raise UsageError(f"--seed must not be negative, got {args.seed}")
    if args.random is not None and args.problem:
        raise UsageError("--random and --problem are two kinds of runs: choose one")
    kind = "--random" if args.random is not None else "--problem" if args.problem else "named cases"
    goes_with = {
        "change": ["--random"], "minutes": ["--random"], "record": ["--random"], "unshown": ["--random"],
        "device": ["--random", "--problem"], "workers": ["named cases", "--random"], "json": ["named cases", "--random"],
        "case": ["named cases"], "large": ["named cases"], "table": ["named cases"],
    }  # fmt: skip
    for option, wanted in goes_with.items():
        if getattr(args, option) and kind not in wanted:
            raise UsageError(f"--{'with' if option == 'change' else option} goes with {' or '.join(wanted)}, not with {kind}")
    writable(args.json, args.table, args.record and f"{args.record}/table.json")
    if args.table:
        generated.read(args.table, "errors")


def output_name(name: str) -> str:
    """Gradients are stored under their input's name and shown as d_<name>."""
    return name if name in ("o", "final_state") else f"d_{name}"


def show(outcomes: list[Outcome], refusals: list[Refusal], verbose: bool = False) -> None:
    from rich.markup import escape

    from kdakit.cli import console

    out = console.output()
    for backend, dtype in dict.fromkeys((o.backend, o.dtype) for o in outcomes):
        of_each = "every output" if verbose else "the worst output of each case"
        title = f"{backend}, {dtype}: {of_each}"
        numeric = ("error", "plain", "tolerance", "used")
        shown = console.table(title, "case", "output", *numeric, "", right=numeric)
        for o in outcomes:
            if (o.backend, o.dtype) != (backend, dtype):
                continue
            if o.raised is not None:
                shown.add_row(o.case, "raised", "", "", "", "", "[red]FAIL[/red]")
                continue
            for row in o.rows if verbose else [o.worst]:
                mark = "[green]ok[/green]" if row.ok else "[red]FAIL[/red]"
                numbers = (f"{row.error:.1e}", f"{row.plain:.1e}", f"{row.tolerance:.1e}", f"{row.used:.0%}")
                shown.add_row(o.case, output_name(row.name), *numbers, mark)
        out.print(shown)
    if refusals:
        shown = console.table("Not run", "backend", "dtypes", "cases", "reason")
        for backend, reason in dict.fromkeys((r.backend, r.reason) for r in refusals):
            same = [r for r in refusals if (r.backend, r.reason) == (backend, reason)]
            listed = (", ".join(dict.fromkeys(getattr(r, field) for r in same)) for field in ("dtype", "case"))
            shown.add_row(backend, *listed, escape(reason))
        out.print(shown)
    for o in outcomes:
        if o.raised is not None:
            out.print(f"{o.backend} {o.case} {o.dtype} raised {o.raised}", markup=False, style="red")
    out.print(summary(outcomes, refusals))


def summary(outcomes: list[Outcome], refusals: list[Refusal]) -> str:
    if not outcomes:
        return "[red]Nothing was verified: no backend can run any of these cases here.[/red]"
    failed = sum(not o.ok for o in outcomes)
    ran = f"{len(outcomes)} runs, {sum(len(o.rows) for o in outcomes)} outputs compared, {len(refusals)} combinations not supported"
    return f"[red]{failed} of {ran}: FAILED[/red]" if failed else f"[green]All {ran}: within tolerance.[/green]"


def as_json(args, outcomes: list[Outcome], refusals: list[Refusal]) -> dict[str, Any]:
    from kdakit.measure import machine, records

    def finite(x: float) -> float | None:
        return x if x < float("inf") else None

    def outputs(o: Outcome) -> dict[str, dict[str, float | None]]:
        return {output_name(r.name): {f: finite(getattr(r, f)) for f in ("error", "plain", "tolerance")} for r in o.rows}

    plain = ("backend", "case", "dtype", "ok", "raised", "seconds")
    results = [{name: getattr(o, name) for name in plain} | {"outputs": outputs(o)} for o in outcomes]
    settings = {"op": args.op, "seed": args.seed, "grad": not args.no_grad}
    described = machine.describe(records.device())
    return {"kind": "verify", **described, "settings": settings, "results": results, "missing": [r._asdict() for r in refusals]}


def error_markdown(outcomes: list[Outcome]) -> str:
    """A table per dtype: the plain recurrence's error of o, then for each backend o's error and the output nearest to its tolerance."""
    from kdakit.measure import generated

    parts = []
    for dtype in dict.fromkeys(o.dtype for o in outcomes):
        of_dtype = {(o.case, o.backend): o for o in outcomes if o.dtype == dtype and o.rows}
        backends = list(dict.fromkeys(backend for _, backend in of_dtype))
        header = ["case", "plain: o"] + [column for b in backends for column in (f"{b}: o", f"{b}: nearest to its tolerance")]
        rows = []
        for case in dict.fromkeys(case for case, _ in of_dtype):
            found = [of_dtype.get((case, b)) for b in backends]
            plain = next(row.plain for o in found if o for row in o.rows if row.name == "o")
            cells = [f"`{case}`", f"{plain:.1e}"]
            for o in found:
                cells += ["–", "–"] if o is None else [f"{o.rows[0].error:.1e}", _nearest(o.worst)]
            rows.append(cells)
        parts.append(f"### {dtype}\n\n" + generated.markdown_table(header, rows, right=(1, *range(2, len(header), 2))))
    return "\n\n".join(parts)


def _nearest(row: Row) -> str:
    return f"{output_name(row.name)} {row.error:.1e}, allowed {row.tolerance:.1e} ({row.used:.0%})"
