"""Compare every backend with the float64 truth, case by case, gradients included.

The error of each output is held against the one tolerance rule of kdakit.accuracy. The exit code is 1 if anything fails.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from kdakit.cases import Case
    from kdakit.measure.checking import Row


def add_arguments(parser) -> None:
    parser.add_argument("--backend", nargs="+", metavar="NAME", help="backends to check (default: all that need no interpreter here)")
    parser.add_argument("--case", nargs="+", metavar="NAME", help="cases of kdakit.cases to run (default: all)")
    parser.add_argument("--dtype", nargs="+", metavar="DTYPE", help="float32, bfloat16, float16, float64 (default: all)")
    parser.add_argument("--op", choices=("chunk", "recurrent"), default="chunk", help="chunk_kda or fused_recurrent_kda")
    parser.add_argument("--seed", type=int, default=0, help="draw other inputs")
    parser.add_argument("--no-grad", action="store_true", help="outputs only, no gradients")
    parser.add_argument("-v", "--verbose", action="store_true", help="every output, not just the worst of each case")
    parser.add_argument("--json", metavar="FILE", help="write every number to FILE")
    parser.add_argument("--table", metavar="FILE", help="rewrite the generated error table of a Markdown file")


class Outcome(NamedTuple):
    backend: str
    case: str
    dtype: str
    rows: list[Row]
    raised: str | None  # what the backend raised instead of returning numbers
    seconds: float

    @property
    def ok(self) -> bool:
        return self.raised is None and all(row.ok for row in self.rows)

    @property
    def worst(self) -> Row:
        return max(self.rows, key=lambda row: row.used)


class Refusal(NamedTuple):
    backend: str
    case: str
    dtype: str
    reason: str


def run(args) -> int:
    from kdakit.cases import CASES, DTYPES, SEGMENT_CASES
    from kdakit.cli import console
    from kdakit.dispatch import names
    from kdakit.measure import checking
    from kdakit.measure.choices import pick

    known = CASES | SEGMENT_CASES
    backends, dtypes = pick("backend", args.backend or checking.native_backends(), names()), pick("dtype", args.dtype, DTYPES)
    cases = [known[name] for name in pick("case", args.case, known)]
    with console.progress() as bar:
        task = bar.add_task("verify", total=len(backends) * len(dtypes) * len(cases))
        tick = lambda what: bar.update(task, advance=1, description=what)
        outcomes, refusals = verify(backends, cases, dtypes, seed=args.seed, grad=not args.no_grad, op=args.op, tick=tick)
    show(outcomes, refusals, args.verbose)
    if args.json:
        Path(args.json).write_text(json.dumps(as_json(args, outcomes, refusals), indent=1) + "\n")
    passed = bool(outcomes) and all(outcome.ok for outcome in outcomes)
    if args.table and not passed:
        print(f"left {args.table} as it is: the table is written when everything passes")
    elif args.table:
        from kdakit.measure import generated, machine, results

        generated.write(args.table, "errors", error_markdown(outcomes) + "\n\n" + results.provenance(machine.describe()))
        print(f"wrote the error table of {args.table}")
    return 0 if passed else 1


def verify(backends, cases: list[Case], dtypes, seed=0, grad=True, op="chunk", tick=lambda what: None):
    """Outcomes and refusals of all combinations. The truth of a case is computed once for all backends."""
    from kdakit import dispatch
    from kdakit.measure import checking

    outcomes, refusals = [], []
    for dtype in dtypes:
        for case in cases:
            problem, arrays = case.problem(dtype, op, grad), case.arrays(dtype, seed)
            cotangents = case.cotangents(dtype) if grad else None
            expected: dict[str, checking.Expected] = {}
            for backend in backends:
                tick(f"{backend} {case.name} {dtype}")
                reason = checking.refusal(backend, case, dtype, op, grad)
                if reason is not None:
                    refusals.append(Refusal(backend, case.name, dtype, reason))
                    continue
                start = time.perf_counter()
                try:
                    results = checking.run_case(backend, case, dtype, seed, grad, op)
                    seconds = time.perf_counter() - start
                    operand = dispatch.operand_dtype(backend, problem)
                    if operand not in expected:
                        expected[operand] = checking.expect(problem, arrays, cotangents, operand)
                    rows = checking.compare(problem, arrays, results, cotangents, operand, expected[operand])
                    outcomes.append(Outcome(backend, case.name, dtype, rows, None, seconds))
                except Exception as raised:
                    message = f"{type(raised).__name__}: {raised}"
                    outcomes.append(Outcome(backend, case.name, dtype, [], message, time.perf_counter() - start))
    return outcomes, refusals


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
    from kdakit.measure import machine

    def finite(x: float) -> float | None:
        return x if x < float("inf") else None

    def outputs(o: Outcome) -> dict[str, dict[str, float | None]]:
        return {output_name(r.name): {f: finite(getattr(r, f)) for f in ("error", "plain", "tolerance")} for r in o.rows}

    plain = ("backend", "case", "dtype", "ok", "raised", "seconds")
    results = [{name: getattr(o, name) for name in plain} | {"outputs": outputs(o)} for o in outcomes]
    settings = {"op": args.op, "seed": args.seed, "grad": not args.no_grad}
    return {"kind": "verify", **machine.describe(), "settings": settings, "results": results, "refusals": [r._asdict() for r in refusals]}


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
