"""A guided tour in under two minutes: what runs here, is it right, gradients, hand-off, speed.

Nothing is downloaded and no accelerator is needed.
"""

from __future__ import annotations

import time
from pathlib import Path

CASES = ("plain", "gate_huge", "gate_resets", "keys_identical", "lower_bound", "varlen")


def add_arguments(parser) -> None:
    parser.add_argument("--out", default="out", metavar="DIR", help="folder for the plot and the numbers (default: out)")


def run(args) -> int:
    from kdakit.cli import console

    begin = time.perf_counter()
    out = console.output()
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    out.print("[bold]Kimi Delta Attention[/bold]: a fixed-size memory S that forgets by channel and corrects itself at every token.\n")
    out.print("    S <- Diag(exp(g)) S               forget", markup=False)
    out.print("    S <- S + beta k (v - S^T k)^T     correct what S says about key k", markup=False)
    out.print("    o  = scale S^T q                  read\n", markup=False)
    backends = what_runs(out)
    if not backends:
        out.print("No backend can run here: pip install 'kdakit[torch]' or 'kdakit[jax]'.", style="red", markup=False)
        return 1
    right = is_it_right(out, backends)
    for backend in backends:
        right &= gradient_and_handoff(out, backend)
    how_fast(out, backends, folder)
    out.print(f"\nDone in {time.perf_counter() - begin:.0f} s. Next: kdakit doctor, kdakit verify, kdakit bench --against fla.")
    return 0 if right else 1


def what_runs(out) -> list[str]:
    """Print what is here; return the backends that can run a plain problem."""
    from kdakit.cli import checking, doctor, machine

    out.rule("1. What runs here", align="left")
    out.print(f"{machine.cpu_model()}, {machine.cores()} cores; " + ", ".join(f"{n} {v}" for n, v in machine.versions().items()))
    table = doctor.support()
    for name, answers in table.items():
        refused = [f"{label}: {answer}" for label, answer in answers.items() if answer != doctor.OK]
        out.print(f"  [bold]{name}[/bold] runs {len(answers) - len(refused)} of {len(answers)} kinds of problem")
        for line in refused if len(refused) < 3 else [f"{refused[0]} ..."]:
            out.print(f"      not {line}", markup=False)
    native = checking.native_backends()
    for name in (name for name in table if name not in native):
        out.print(f"  [bold]{name}[/bold] {checking.interpreted(name)}: not part of what follows; kdakit verify --backend {name}")
    return [name for name, answers in table.items() if name in native and answers["forward + backward"] == doctor.OK]


def is_it_right(out, backends) -> bool:
    from kdakit.cases import CASES as ALL
    from kdakit.cli import console, verify

    out.rule("2. Is it right?", align="left")
    out.print("Every output and every gradient against the same recurrence in float64. 'plain' is the error that a plain float32 loop over")
    out.print("the tokens makes by rounding; a backend may make four times that ('tolerance').")
    cases = [ALL[name] for name in CASES]
    for case in cases:
        out.print(f"  {case.name:15} {case.why}", markup=False)
    with console.progress() as bar:
        task = bar.add_task("verify", total=len(cases) * len(backends))
        outcomes, refusals = verify.verify(backends, cases, ["float32"], tick=lambda what: bar.update(task, advance=1, description=what))
    verify.show(outcomes, refusals)
    return all(o.ok for o in outcomes)


def gradient_and_handoff(out, backend: str) -> bool:
    """One gradient against a finite difference, and one sequence against its two halves."""
    import numpy as np

    from kdakit import accuracy, reference
    from kdakit.cases import CASES as ALL
    from kdakit.cli import checking

    out.rule(f"3. {backend}: a gradient and a hand-off", align="left")
    case = ALL["plain"]
    arrays, (d_o, d_final_state) = case.arrays(), case.cotangents()
    whole = checking.run_case(backend, case)
    index, h = (0, 10, 1, 3), 1e-4
    sides = []
    for sign in (+1, -1):
        k = arrays.k.copy()
        k[index] += sign * h
        result = reference.forward(case.problem(), arrays._replace(k=k))
        sides.append((result.o * d_o).sum() + (result.final_state * d_final_state).sum())
    slope = (sides[0] - sides[1]) / (2 * h)
    out.print("Nudge channel 3 of the key of token 10 (head 1) and see how a weighted sum of all outputs changes:")
    out.print(f"    nudging, in float64: {slope:+.7f}      the backward pass, in float32: {whole['k'][index]:+.7f}", markup=False)

    parts, state = [], arrays.initial_state
    for tokens in (slice(0, case.T // 2), slice(case.T // 2, None)):
        given = {name: getattr(arrays, name)[:, tokens] for name in ("q", "k", "v", "g", "beta")}
        got = checking.run_arrays(backend, case, "float32", arrays._replace(initial_state=state, **given))
        parts.append(got["o"])
        state = got["final_state"]
    o_off, state_off = accuracy.error(np.concatenate(parts, 1), whole["o"]), accuracy.error(state, whole["final_state"])
    out.print(f"Run {case.T} tokens at once, or the first {case.T // 2}, keep the state, and later the rest from that state:")
    out.print(f"    the outputs differ by {o_off:.1e}, the final states by {state_off:.1e} (relative)\n", markup=False)
    return bool(np.isclose(slope, whole["k"][index], rtol=1e-3, atol=1e-5)) and max(o_off, state_off) < 1e-5


def how_fast(out, backends, folder: Path) -> None:
    from kdakit.cases import Shape
    from kdakit.cli import bench, contestants, machine, plots, results

    out.rule("4. How fast?", align="left")
    names = [*backends]
    try:
        contestants.load_fla()
        names.append("fla")
    except contestants.Unavailable as problem:
        out.print(f"Not compared with flash-linear-attention's reference: {problem}.", markup=False)
    measured, missing = [], []
    for mode in ("fwd", "fwdbwd"):
        rows, gone = bench.race(names, contestants.Job(Shape(1, 512, 2, 64), mode, "float32", "log_decay"), repeat=7, seconds=4)
        measured, missing = measured + rows, missing + gone
    record = {"kind": "bench", **machine.describe(), "settings": {"dtype": "float32", "gate": "log_decay", "repeat": 7},
              "results": measured, "missing": missing}  # fmt: skip
    results.show(record)
    if machine.version("matplotlib") is None:
        out.print("No plot: matplotlib is not installed (pip install 'kdakit[bench]').", markup=False)
    else:
        plots.save(record, str(folder / "demo.png"))
        out.print(f"The chart is in {folder / 'demo.png'}.", markup=False)
