"""Train a small byte-level language model on a text file, or on a little book that kdakit writes itself.

A checkpoint is written every so many steps, whole or not at all; --resume goes on from the last one as if nothing had happened.
"""

from __future__ import annotations

import hashlib
import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kdakit.cli.choices import UsageError

# Options that describe a run: given once, kept in its checkpoint.
DEFAULTS: dict[str, Any] = {
    "steps": 400, "batch": 8, "length": 256, "learning_rate": 3e-3, "layers": 4, "hidden": 128, "heads": 2, "head_dim": 32,
    "attention_every": 4, "seed": 0,
}  # fmt: skip


def add_arguments(parser) -> None:
    parser.add_argument("text", nargs="?", help="a text file; without one, the built-in book")
    parser.add_argument("--out", default="run", metavar="DIR", help="folder of the checkpoint and the curve (default: run)")
    parser.add_argument("--framework", choices=("torch", "jax"), help="what to train with (default: torch where installed)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--every", type=int, default=50, metavar="N", help="steps between checkpoints (default: 50)")
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="processes (torch) or devices (jax) that share the work")
    parser.add_argument(
        "--context", type=int, metavar="C", help="how many of them share a sequence; the others share the batch (default: all)"
    )
    for name, value in DEFAULTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), metavar="N", help=f"default: {value:g}")


def run(args) -> int:
    from kdakit.cli import console, demo, processes
    from kdakit.models.weights import WeightsError
    from kdakit.training import checkpoint

    if args.every < 1:
        raise UsageError(f"--every must be positive, got {args.every}")
    framework = args.framework or demo.default_framework()
    demo.check_installed(framework)
    try:
        run_ = resumed(args) if args.resume else fresh(args)
        processes.check(args, run_.data["batch"], run_.data["length"])
        data, held_out = _text(run_.data)
        code = processes.elsewhere(args, framework)
        if code is not None:
            return code
        cut, speaks = processes.join(args, framework)
        learner = importlib.import_module(f"kdakit.training.{framework}").Learner(run_.config, run_.optimizer, run_.data["seed"], **cut)
        if run_.state.step:
            learner.load(run_.state)
    except (WeightsError, ValueError) as problem:
        raise UsageError(str(problem)) from problem
    out = console.output() if speaks else console.silent()
    count = sum(x.size for x in run_.state.weights.values())
    out.print(f"{count:,} parameters, {len(data):,} bytes of {run_.data['text'] or 'the built-in book'}; {framework}; "
              f"steps {run_.state.step} .. {run_.optimizer.steps}", markup=False)  # fmt: skip
    if speaks:
        with _own_folder(args, run_):
            _loop(out, learner, run_, data, held_out, Path(args.out), args.every)
    else:
        _loop(out, learner, run_, data, held_out, None, args.every)
    if speaks:
        _finish(out, learner, run_, Path(args.out), checkpoint.INDEX)
    processes.leave(framework)
    return 0


def fresh(args):
    """A run at its beginning; refuses to write over another."""
    from kdakit.models.config import ModelConfig
    from kdakit.models.initial import initial_weights
    from kdakit.training import checkpoint
    from kdakit.training.optimizer import AdamW, TrainingState

    if checkpoint.exists(args.out):
        raise UsageError(f"{args.out} already holds a checkpoint: use --resume to go on, or another --out")
    given = {name: value if getattr(args, name) is None else getattr(args, name) for name, value in DEFAULTS.items()}
    for name in ("batch", "length"):
        if given[name] < 1:
            raise UsageError(f"--{name} must be positive, got {given[name]}")
    config = ModelConfig(
        vocab_size=256, hidden_size=given["hidden"], num_layers=given["layers"], num_heads=given["heads"], head_dim=given["head_dim"],
        attention_every=given["attention_every"], safe_gate=True, lower_bound=-5.0,
    )  # fmt: skip
    optimizer = AdamW(learning_rate=given["learning_rate"], steps=given["steps"], decay=0.1)
    data = {"text": None if args.text is None else str(Path(args.text).resolve()), "sha256": None, "batch": given["batch"],
            "length": given["length"], "seed": given["seed"], "options": given}  # fmt: skip
    data["sha256"] = hashlib.sha256(_read(data["text"])).hexdigest()
    return checkpoint.Checkpoint(config, optimizer, TrainingState(initial_weights(config, given["seed"])), data)


def resumed(args):
    """The run of the checkpoint in --out; options that were given must be its own."""
    from kdakit.training import checkpoint

    found = checkpoint.load(args.out)
    for name in DEFAULTS:
        wanted, had = getattr(args, name), found.data.get("options", {}).get(name)
        if wanted is not None and wanted != had:
            raise UsageError(f"--{name.replace('_', '-')} must be {had}, as in {args.out}'s checkpoint, got {wanted}")
    for name in ("text", "sha256", "batch", "length", "seed"):
        if name not in found.data:
            raise UsageError(f"{args.out} must be a checkpoint of kdakit train, and does not say the {name} of its data")
    if args.text is not None:
        found.data["text"] = str(Path(args.text).resolve())
    return found


@contextmanager
def _own_folder(args, run_) -> Iterator[None]:
    """No other run writes into --out meanwhile, and none has since its checkpoint was looked at. A disk that is full ends the run."""
    from kdakit.models.disk import only_writer
    from kdakit.training import checkpoint

    try:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        with only_writer(args.out):
            if checkpoint.exists(args.out) != args.resume or (args.resume and checkpoint.load(args.out).state.step != run_.state.step):
                raise UsageError(f"another run has written a checkpoint into {args.out} meanwhile: use --resume to go on, or another --out")
            yield
    except OSError as problem:
        left = "the checkpoint before it is whole" if checkpoint.exists(args.out) else "there is no checkpoint"
        raise UsageError(f"{args.out} must be a folder that can be written to, got: {problem}; {left}") from problem


def _read(path: str | None) -> bytes:
    from kdakit.training import text

    return text.book() if path is None else Path(path).read_bytes()


def _text(data: dict[str, Any]):
    from kdakit.training import text

    content = _read(data["text"])
    if hashlib.sha256(content).hexdigest() != data["sha256"]:
        raise UsageError(f"{data['text']} must be the text that the run began with, and has changed since")
    train, held_out = text.split(content)
    if len(held_out) <= data["length"]:
        raise UsageError(f"the text must have more than {20 * data['length']} bytes for sequences of {data['length']}, got {len(content)}")
    return train, held_out


def _loop(out, learner, run_, data, held_out, folder: Path | None, every: int) -> None:
    """Without a folder another process writes the checkpoints."""
    import numpy as np

    from kdakit.cli import console, processes
    from kdakit.training import checkpoint, text

    d, steps = run_.data, run_.optimizer.steps
    check = text.batch(held_out, np.random.default_rng(0), processes.HELD_OUT, d["length"])
    with console.progress(shown=folder is not None) as bar:
        task = bar.add_task("training", total=steps, completed=run_.state.step)
        losses, begin = [], time.perf_counter()
        for step in range(run_.state.step + 1, steps + 1):
            # Batches depend on the seed and the step alone: a resumed run draws what an uninterrupted one would.
            losses.append(learner.step(*text.batch(data, np.random.default_rng([d["seed"], step]), d["batch"], d["length"])))
            bar.update(task, advance=1, description=f"loss {losses[-1]:.3f}")
            if step % every == 0 or step == steps:
                rate = len(losses) * d["batch"] * d["length"] / (time.perf_counter() - begin)
                row = {"step": step, "loss": float(np.mean(losses)), "held_out": learner.loss(*check), "tokens_per_second": rate}
                run_.curve.append(row)
                run_.state = learner.state()
                if folder is not None:
                    checkpoint.save(folder, run_)
                out.print(f"step {step:6}  loss {row['loss']:.4f}  held out {row['held_out']:.4f}  {rate:,.0f} tokens/s", markup=False)
                losses, begin = [], time.perf_counter()


def _finish(out, learner, run_, folder: Path, index: str) -> None:
    from kdakit.cli import machine

    if machine.version("matplotlib") is not None and len(run_.curve) > 1:
        plot(run_.curve, str(folder / "loss.png"))
        out.print(f"The curve is in {folder / 'loss.png'}.", markup=False)
    out.print(f"The checkpoint is in {folder / index}. Try: kdakit generate {folder} --prompt 'Where is'", markup=False)


def plot(curve: list[dict[str, float]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), gridspec_kw={"width_ratios": [3, 2]})
    steps = [row["step"] for row in curve]
    left.plot(steps, [row["loss"] for row in curve], color="#2f6f9f", label="training")
    left.plot(steps, [row["held_out"] for row in curve], color="#d98032", label="held out")
    left.set(xlabel="step", ylabel="nats a byte")
    left.legend()
    right.plot(steps, [row["tokens_per_second"] for row in curve], color="#777777")
    right.set(xlabel="step", ylabel="tokens/s", ylim=(0, None))
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=140)
    plt.close(figure)
