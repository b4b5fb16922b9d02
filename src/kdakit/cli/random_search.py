"""`kdakit verify --random N`: random problems in worker processes, what failed made smaller, a summary per dtype and head size.

`kdakit verify --problem NUMBER` repeats one of them in this process.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdakit.measure.random_problems import Drawn
    from kdakit.measure.trial import Verdict

SHRUNK = 3  # failures that are made smaller
SHRINK_SECONDS = 60.0
SAVE_EVERY = 5.0  # seconds
ENOUGH = 3  # problems with a kernel, see `unshown`


def run(args) -> int:
    from kdakit.cli import console
    from kdakit.dispatch import names
    from kdakit.measure import checking
    from kdakit.measure.choices import pick

    backends = pick("backend", args.backend or checking.native_backends(), names())
    if args.device is not None and any(checking.framework_of(backend) == "torch" for backend in backends):
        asked(torch_device, args.device)
    if args.problem:
        return repeat(args, backends)
    out, failed = console.output(), False
    made = Made(time.monotonic())
    for backend in backends:
        verdicts = campaign(args, backend, made)
        show(out, backend, verdicts)
        failed |= not verdicts or any(not v.ok for v in verdicts)
    return int(failed)


@dataclass
class Made:
    """What the JSON file holds: verdicts on all backends, one after the other."""

    begun: float
    verdicts: list[Verdict] = field(default_factory=list)
    smaller: list[Verdict] = field(default_factory=list)


def repeat(args, backends: list[str]) -> int:
    """Problems by number, in this process, every output shown."""
    from kdakit.cli import console
    from kdakit.measure.trial import judge

    drawn = [asked(possible, text) for text in args.problem]
    out, failed = console.output(), False
    for backend in backends:
        for problem in drawn:
            verdict = judge(problem, backend, args.device)
            failed |= not verdict.ok
            out.print(f"{backend} {verdict.what}", markup=False)
            out.print(f"  {verdict.refused or verdict.complaint or 'within tolerance'}", markup=False)
            out.print("  " + ", ".join(f"{name} {used:.0%}" for name, used in verdict.used.items()) + " of what is allowed", markup=False)
    return int(failed)


def asked(read: Callable[..., Any], *typed: Any) -> Any:
    """What was typed, read; UsageError says what is wrong with it."""
    from kdakit.measure.choices import UsageError

    try:
        return read(*typed)
    except (ValueError, TypeError) as problem:
        raise UsageError(str(problem)) from problem


def torch_device(name: str) -> None:
    """Raises where PyTorch has no such device. It is not opened: that is for the workers."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as problem:
        raise ValueError(f"--device must be one of PyTorch's, got {name!r}: {problem}") from problem
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: PyTorch has {torch.cuda.device_count()} CUDA devices here")


def possible(text: str) -> Drawn:
    """The problem of a label; raises what is wrong with its changes."""
    from kdakit.measure.random_problems import parse

    drawn = parse(text)
    try:
        drawn.problem()
    except (ValueError, TypeError) as problem:
        raise ValueError(f"problem {text}: {problem}") from problem
    return drawn


def campaign(args, backend: str, made: Made) -> list[Verdict]:
    """All verdicts on one backend; the JSON file grows as they come."""
    from kdakit.cli import console
    from kdakit.measure.campaign import search

    drawn = asked(lambda: list(wanted(args, backend)))
    workers = args.workers or os.cpu_count() or 1
    found, saved = [], 0.0
    with console.progress() as bar:
        task = bar.add_task(backend, total=len(drawn))
        for verdict in search(drawn, backend, args.device, workers, args.minutes):
            found.append(verdict)
            made.verdicts.append(verdict)
            bad = sum(not v.ok for v in found)
            bar.update(task, advance=1, description=f"{backend}: {bad} failed" if bad else backend)
            if not verdict.ok:
                print(f"FAILED {verdict.what}\n  {verdict.complaint}\n  repeat: {command(verdict)}", flush=True)
            if args.json and time.monotonic() - saved > SAVE_EVERY:
                write(args, made)
                saved = time.monotonic()
    smaller = [shrunk(v, args.device) for v in found if not v.ok][:SHRUNK] if not args.minutes else []
    for verdict in smaller:
        print(f"smaller: {verdict.what}\n  {verdict.complaint}\n  repeat: {command(verdict)}", flush=True)
    made.smaller += smaller
    if args.json:
        write(args, made)
    if args.record:
        record(args, backend, found)
    return found


def wanted(args, backend: str) -> Iterable[str]:
    """Problems, of numbers that share compiled programs where a compiler takes seconds for each."""
    from kdakit.cases import DTYPES
    from kdakit.measure import checking
    from kdakit.measure.choices import UsageError, pick
    from kdakit.measure.random_problems import numbers, with_changes

    dtypes = pick("dtype", args.dtype, DTYPES)
    on_gpu = backend == "triton_gpu" and checking.interpreted(backend) is None
    grad = not args.no_grad
    if args.unshown and not on_gpu:
        raise UsageError(f"--unshown looks for Triton's kernels on a GPU: use --backend triton_gpu there, got {backend}")
    if args.record and not on_gpu:
        raise UsageError(f"--record notes which of Triton's kernels a GPU has shown: use --backend triton_gpu there, got {backend}")
    found = numbers(args.seed, args.random, on_gpu, lambda drawn: drawn.dtype in dtypes and (grad or not drawn.grad))
    labels = with_changes(found, args.change or [])
    if args.change:
        labels = (possible(label).label for label in labels)
    return unshown(labels, args.device) if args.unshown else labels


def unshown(labels: Iterable[str], device: Any) -> Iterator[str]:
    """Those problems that launch a Triton kernel which fewer than ENOUGH problems have been right with, or been taken here before them."""
    from kdakit.backends.triton_gpu import arithmetic, config, shown, unsupported
    from kdakit.measure.random_problems import parse

    config.UNCHECKED = True  # as in the workers: nothing waits for what is looked for
    chip = config.chip_of(device or "cuda")
    seen = Counter(shown.own(chip.name))
    for label in labels:
        problem = parse(label).problem()
        if unsupported(problem, chip) is not None:
            continue
        exact = arithmetic.as_computed(problem)
        needed = shown.forms(exact, config.choose(exact, chip))
        if any(seen[form] < ENOUGH for form in needed):
            seen.update(needed)
            yield label


def shrunk(verdict: Verdict, device: Any) -> Verdict:
    """The verdict on the smallest problem found that fails too; every try in a worker, which may not survive it."""
    from kdakit.measure.campaign import Worker, judge_label
    from kdakit.measure.random_problems import parse
    from kdakit.measure.shrink import shrink

    worker, last = Worker(judge_label, verdict.backend, device), verdict

    def fails(drawn: Drawn) -> bool:
        nonlocal worker, last
        worker.give(drawn.label)
        found = worker.wait()
        if found.deadly or not worker.process.is_alive():
            worker.stop()
            worker = Worker(judge_label, verdict.backend, device)
        if not found.ok and not found.complaint.startswith(("ValueError", "TypeError")):  # not a problem that nobody may pose
            last = found
        return not found.ok and last is found

    shrink(parse(verdict.label), fails, SHRINK_SECONDS)
    worker.stop()
    return last


def command(verdict: Verdict) -> str:
    return f"kdakit verify --backend {verdict.backend} --problem {verdict.label}"


def write(args, made: Made) -> None:
    """Everything so far, in one piece."""
    from kdakit.measure import machine, records

    verdicts, backends = made.verdicts, " ".join(dict.fromkeys(v.backend for v in made.verdicts))
    rows = [row(v) for v in verdicts]
    counts = Counter(f"{v.dtype} {v.call}" for v in verdicts if v.ok and not v.refused)
    settings = {"random": args.random, "seed": args.seed, "backend": backends, "seconds": round(time.monotonic() - made.begun, 1)}
    settings |= {"commit": os.environ.get("COMMIT", "")}
    described = machine.describe("cpu" if args.device == "cpu" else records.device())
    text = {"kind": "random", **described, "settings": settings, "failed": sum(not v.ok for v in verdicts), "right": counts,
            "smaller": [row(v) for v in made.smaller], "missing": [], "results": rows}  # fmt: skip
    records.save_text("{\n" + ",\n".join(f" {json.dumps(n)}: {_lines(x)}" for n, x in text.items()) + "\n}\n", args.json)


def _lines(x: Any) -> str:
    if isinstance(x, list) and x:
        return "[\n" + ",\n".join("  " + json.dumps(y) for y in x) + "\n ]"
    return json.dumps(x)


def row(v: Verdict) -> dict[str, Any]:
    worst = max(v.used, key=lambda name: v.used[name], default=None)
    told = {
        "backend": v.backend,
        "label": v.label,
        "dtype": v.dtype,
        "call": v.call,
        "K": v.K,
        "V": v.V,
        "ok": v.ok,
        "seconds": [v.seconds, v.judged],
    }
    told |= {"worst": [worst, v.used[worst] if v.used[worst] < float("inf") else None]} if worst else {}
    told |= {"refused": v.refused} if v.refused else {}
    return told if v.ok else told | {"what": v.what, "complaint": v.complaint}


def record(args, backend: str, verdicts: list[Verdict]) -> None:
    """Adds the forms of problems that were right to the chip's table. Those of a problem that went wrong count 0 from then on; one whose
    error is a little beyond the rule is named there."""
    from kdakit.backends.triton_gpu import shown
    from kdakit.backends.triton_gpu.config import chip_of

    chip = chip_of(args.device or "cuda").name
    here = shown.compiler()
    file = shown.file_of(chip, here, Path(args.record))
    before = shown.read(file)
    compilers = list(dict.fromkeys([*before["triton"], here]))
    counts = Counter(shown.counted(before))
    counts.update(form for v in verdicts if v.ok for form in v.forms)
    failed = [v for v in verdicts if not v.ok]
    wrong = {form for v in failed if v.beyond > shown.WRONG for form in v.forms}
    passed = sum(v.ok and not v.refused for v in verdicts)
    source = f"kdakit verify --random {args.random} --seed {args.seed} --backend {backend}: {passed} right, {len(failed)} not"
    tried = {v.label for v in verdicts}
    exceeded = {label: text for label, text in before["exceeded"].items() if label not in tried}
    exceeded |= {v.label: told(v) for v in failed if v.beyond <= shown.WRONG}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(shown.dump(chip, compilers, [*before["sources"], source], exceeded, dict(counts) | dict.fromkeys(wrong, 0)))
    print(f"{file}: {len(counts.keys() - wrong)} forms, {len(wrong)} taken out")


def told(v: Verdict) -> str:
    """What is beyond the rule, and how far."""
    return f"{v.dtype} {v.call} K{v.K} V{v.V}: " + ", ".join(f"{name} {used:.2f}" for name, used in v.used.items() if used > 1)


def show(out, backend: str, verdicts: list[Verdict]) -> None:
    from kdakit.cli import console
    from kdakit.measure.random_problems import SIZES

    sizes = [str(size) for size in SIZES]
    shown = console.table(f"{backend}: right / tried, by dtype, call and K padded", "dtype", "call", *sizes, "nearest", right=tuple(sizes))
    for dtype, call in sorted({(v.dtype, v.call) for v in verdicts if not v.refused}):
        mine = [v for v in verdicts if (v.dtype, v.call) == (dtype, call) and not v.refused]
        cells = []
        for size in SIZES:
            of_size = [v for v in mine if size // 2 < v.K <= size or v.K <= size == SIZES[0]]
            right = sum(v.ok for v in of_size)
            cells.append(f"[red]{right} / {len(of_size)}[/red]" if right < len(of_size) else f"{right} / {len(of_size)}")
        worst = max((used for v in mine if v.ok for used in v.used.values()), default=0.0)
        shown.add_row(dtype, call, *cells, f"{worst:.0%}")
    out.print(shown)
    refused = Counter(v.refused for v in verdicts if v.refused)
    for reason, count in refused.items():
        out.print(f"{count} not taken: {reason}", markup=False)
    failed = [v for v in verdicts if not v.ok]
    for v in failed:
        out.print(f"failed: {v.what}: {v.complaint}\n  {command(v)}", markup=False, style="red")
    ran = len(verdicts) - sum(refused.values())
    out.print(f"[red]{len(failed)} of {ran} failed[/red]" if failed else f"[green]All {ran} right.[/green]")
