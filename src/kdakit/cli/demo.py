"""A tour in under three minutes: what runs here, is it right, and why a memory that corrects itself is worth having.

Nothing is downloaded and no accelerator is needed; where there is one, it is used.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

CASES = ("gate_huge", "keys_identical", "varlen")


def add_arguments(parser) -> None:
    parser.add_argument("--out", default="out", metavar="DIR", help="folder for the plot, the numbers and the weights (default: out)")
    parser.add_argument("--framework", choices=("torch", "jax"), help="what to train with (default: torch where installed)")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1, gpu, tpu (default: the accelerator that is there)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the timed model (default: bfloat16 on an accelerator)")
    parser.add_argument("--seed", type=int, default=0, help="other first weights and other data")
    parser.add_argument("--quick", action="store_true", help="a smaller task and a shorter tour, for a first look or a test")


def run(args) -> int:
    from kdakit.cli import console, recall_race, serving
    from kdakit.measure.choices import UsageError
    from kdakit.models import place

    if args.seed < 0:
        raise UsageError(f"--seed must not be negative, got {args.seed}")
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
    framework = args.framework or default_framework()
    check_installed(framework)
    try:
        where = place.find(framework, args.device, args.dtype)
    except ValueError as problem:
        raise UsageError(str(problem)) from problem
    right = is_it_right(out, backends, CASES[:1] if args.quick else CASES)
    try:
        record = learn(out, framework, race_settings(args), folder, args.device)
    except recall_race.WorkerFailed as problem:
        out.print(str(problem), style="red", markup=False)
        return 1
    if not serving.accelerated(where):
        serving.use_one_thread(framework)
    right &= generate(out, framework, record, folder)
    compare_memory(out, framework, record, args.quick, where)
    keep(out, record, folder)
    out.print(f"\nDone in {time.perf_counter() - begin:.0f} s. Next: kdakit train, kdakit verify, kdakit bench --against fla.")
    return 0 if right else 1


def default_framework() -> str:
    import importlib.util

    has = lambda name: importlib.util.find_spec(name) is not None
    return "jax" if has("jax") and not has("torch") else "torch"


def check_installed(framework: str) -> None:
    import importlib.util

    from kdakit.measure.choices import UsageError

    for package in ("safetensors", *(("torch",) if framework == "torch" else ("jax", "flax", "optax"))):
        if importlib.util.find_spec(package) is None:
            raise UsageError(
                f"--framework {framework} needs {package}: pip install 'kdakit[{'torch' if framework == 'torch' else 'flax'},models]'"
            )


def race_settings(args):
    from kdakit.cli.recall_worker import Race

    race = Race(seed=args.seed)
    return replace(race, **QUICK) if args.quick else race


QUICK = dict(values=16, pairs=3, warm_pairs=2, steps=275, learning_rate=2e-2)


def what_runs(out) -> list[str]:
    """Print what is here; return the backends that can run a plain problem with gradients."""
    from kdakit.cli import doctor
    from kdakit.measure import checking, machine, records

    out.rule("1. What runs here", align="left")
    accelerator = "" if records.device() == "cpu" else f"{records.device()}; "
    out.print(
        f"{accelerator}{machine.cpu_model()}, {machine.cores()} cores; " + ", ".join(f"{n} {v}" for n, v in machine.versions().items())
    )
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


def is_it_right(out, backends, names) -> bool:
    from kdakit.cases import CASES as ALL
    from kdakit.cli import console, verify
    from kdakit.measure import verification

    out.rule("2. Is it right?", align="left")
    out.print("Every output and every gradient against the same recurrence in float64. 'plain' is the error that a plain float32 loop over")
    out.print("the tokens makes by rounding; a backend may make four times that ('tolerance').")
    cases = [ALL[name] for name in names]
    for case in cases:
        out.print(f"  {case.name:15} {case.why}", markup=False)
    with console.progress() as bar:
        task = bar.add_task("verify", total=len(cases) * len(backends))
        outcomes, refusals = verification.verify(
            backends, cases, ["float32"], tick=lambda what: bar.update(task, advance=1, description=what)
        )
    verify.show(outcomes, refusals)
    return all(o.ok for o in outcomes)


def learn(out, framework: str, race, folder: Path, device: str | None) -> dict:
    """Train both models and show how they did; the record of the demo so far."""
    from kdakit.cli import console, recall_race
    from kdakit.measure import machine, records

    out.rule("3. A memory that corrects itself", align="left")
    task, config = race.task(), race.config(True)
    size = f"{config.head_dim} x {config.layer_sizes().head_v_dim}"
    out.print(
        f"Recall with rewriting: {task.pairs} of {task.keys} keys are written {task.writes} times each, with one of {task.values} values"
    )
    out.print("drawn anew every time; then each is asked for once, and the last value counts. Two models of two layers learn it, with a")
    out.print(f"state of {size} a layer, the same first weights, data and {race.steps} steps. One has no delta rule:")
    out.print("    S <- Diag(exp(g)) S + beta k v^T     plain gated linear attention: it adds, and corrects nothing\n", markup=False)
    begin = time.perf_counter()
    curves = recall_race.run(race, framework, folder, device)
    shown = console.table("Answers right", "step", *curves, right=("step", *curves))
    count = len(next(iter(curves.values())))
    picked = sorted({*range(count - 1, -1, -max(1, count // 6))})
    for i in picked:
        rows = [rows[i] for rows in curves.values()]
        shown.add_row(str(rows[0]["step"]), *(f"{row['accuracy']:.1%}" for row in rows))
    out.print(shown)
    seconds = time.perf_counter() - begin
    tokens = race.batch * sum(
        (task.with_pairs(race.warm_pairs) if s <= race.warm_share * race.steps else task).length for s in range(1, race.steps + 1)
    )
    out.print(f"{seconds:.0f} s for both, side by side: {tokens / seconds:,.0f} tokens/s of training each.\n", markup=False)
    results = [{"entry": "recall", "contestant": name, "curve": rows} for name, rows in curves.items()]
    described = machine.describe(records.device()) | {"framework": framework, "settings": asdict(race), "seconds": seconds}
    return {"kind": "demo", **described, "results": results, "missing": []}


def generate(out, framework: str, record: dict, folder: Path) -> bool:
    """Ask the trained model token by token, and hold its answers against one pass over everything."""
    import numpy as np

    from kdakit.cli import recall_race, serving
    from kdakit.cli.recall_worker import Race
    from kdakit.models import weights

    out.rule("4. Reading one token at a time", align="left")
    race = Race(**record["settings"])
    task = race.task()
    tokens, targets = task.batch(np.random.default_rng([race.seed, 7]), 8)
    prompt = task.length - task.pairs
    off = 0.0
    for name in recall_race.MODELS:
        config, arrays = weights.load(recall_race.weights_path(folder, name))
        logits, off_here = serving.stepwise(serving.build(framework, config, arrays), tokens, prompt)
        off = max(off, off_here)
        answers = logits[0, prompt:].argmax(-1)
        marks = [f"k{k}={_value(a, task)}{'' if a == t else f' (not {_value(t, task)})'}"
                 for k, a, t in zip(tokens[0, prompt:], answers, targets[0, prompt:], strict=True)]  # fmt: skip
        out.print(f"    {name:14} {', '.join(marks)}", markup=False)
    out.print(f"The {prompt} tokens of the writes in one prefill with chunk_kda, then the questions one by one with fused_recurrent_kda.")
    out.print(f"Largest distance from the logits of one pass over everything: {off:.1e} (relative).\n", markup=False)
    record["prefill_and_step_differ_by"] = off
    return off < 1e-4


def _value(token: int, task) -> str:
    return f"v{token - task.keys}" if token >= task.keys else f"k{token}"


def compare_memory(out, framework: str, record: dict, quick: bool, where) -> None:
    from kdakit.cli import console, serving
    from kdakit.cli.recall_worker import Race

    out.rule("5. What it keeps, and how fast it goes on", align="left")
    config, batch = serving.serving_size(Race(**record["settings"]).config(True), where)
    record["place"] = str(where)
    record["prefill_rate"] = serving.prefill_rate(serving.build(framework, config, place=where))
    record["memory"] = serving.memory(framework, config, serving.LENGTHS[:2] if quick else serving.LENGTHS, batch, where)
    size = f"{config.num_layers} layers of width {config.hidden_size}, {where}"
    out.print(f"{size}. Prefill of 2048 tokens: {record['prefill_rate']:,.0f} tokens/s.", markup=False)
    out.print(f"{batch} sequences that go on together, one token each, after so many; beside them the same model with softmax attention")
    out.print("and a key-value cache in every layer:")
    numbers = ("tokens seen", "KDA keeps", "KV cache keeps", "KDA tokens/s", "attention tokens/s")
    shown = console.table("", *numbers, right=numbers)
    for row in record["memory"]:
        sizes = (f"{row[field] / 1024:,.1f} KiB" for field in ("state_bytes", "kv_bytes"))
        shown.add_row(f"{row['length']:,}", *sizes, f"{row['state_rate']:,.0f}", f"{row['kv_rate']:,.0f}")
    out.print(shown)


def keep(out, record: dict, folder: Path) -> None:
    from kdakit.cli import recall_race
    from kdakit.measure import machine

    (folder / "demo.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if machine.version("matplotlib") is None:
        out.print("No plot: matplotlib is not installed (pip install 'kdakit[bench]').", markup=False)
    else:
        recall_race.plot(record, str(folder / "demo.png"))
        out.print(f"The curves are in {folder / 'demo.png'}, the numbers in {folder / 'demo.json'}.", markup=False)
