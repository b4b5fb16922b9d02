"""Train a byte-level language model on a text file, or on a little book that kdakit writes itself; on the accelerator that is there.

A checkpoint is written every so many steps, whole or not at all; --resume goes on from the last one as if nothing had happened.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from kdakit.measure.choices import UsageError
from kdakit.training.sizes import SIZES, Run

# Options that describe a run: given once, kept in its checkpoint.
OPTIONS = {field.name: field.type for field in fields(Run)}


def add_arguments(parser) -> None:
    parser.add_argument("text", nargs="?", help="a text file; without one, the built-in book")
    parser.add_argument("--text", dest="text_option", metavar="FILE", help="the same, as an option")
    parser.add_argument("--out", default="run", metavar="DIR", help="folder of the checkpoint, the log and the curve (default: run)")
    parser.add_argument("--framework", choices=("torch", "jax"), help="what to train with (default: torch where installed)")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1, gpu, tpu (default: the accelerator that is there)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the products (default: bfloat16 on an accelerator)")
    parser.add_argument("--size", choices=tuple(SIZES), help="model, batch and learning rate by name (default: small)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--every", type=int, default=50, metavar="N", help="steps between checkpoints (default: 50)")
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="processes (torch) or devices (jax) that share the work")
    parser.add_argument(
        "--context", type=int, metavar="C", help="how many of them share a sequence; the others share the batch (default: all)"
    )
    small = SIZES["small"]
    for name in OPTIONS:
        value = getattr(small, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), metavar="N", help=f"default: {value:g}")


def run(args) -> int:
    from kdakit.cli import console, demo, processes
    from kdakit.models import place
    from kdakit.models.weights import WeightsError
    from kdakit.training import checkpoint

    if args.every < 1:
        raise UsageError(f"--every must be positive, got {args.every}")
    args.text = args.text if args.text_option is None else args.text_option
    framework = args.framework or demo.default_framework()
    demo.check_installed(framework)
    try:
        where = place.find(framework, args.device, args.dtype)
        run_ = resumed(args) if args.resume else fresh(args)
        processes.check(args, run_.data["batch"], run_.data["length"], run_.data["accumulate"])
        data, held_out = _text(run_.data)
        code = processes.elsewhere(args, framework)
        if code is not None:
            return code
        cut, speaks = processes.join(args, framework, where)
        learner = importlib.import_module(f"kdakit.training.{framework}").Learner(
            run_.config,
            run_.optimizer,
            run_.data["seed"],
            place=where,
            accumulate=run_.data["accumulate"],
            weights=run_.state.weights,
            **cut,
        )
        if run_.state.step:
            learner.load(run_.state)
    except (WeightsError, ValueError) as problem:
        raise UsageError(str(problem)) from problem
    out = console.output() if speaks else console.silent()
    count = sum(x.size for x in run_.state.weights.values())
    out.print(f"{count:,} parameters, {len(data):,} bytes of {run_.data['text'] or 'the built-in book'}; {framework} on {where}; "
              f"steps {run_.state.step} .. {run_.optimizer.steps}", markup=False)  # fmt: skip
    speed = Speed.of(run_, where, args.nproc)
    if speaks:
        with _own_folder(args, run_):
            _loop(out, learner, run_, data, held_out, Path(args.out), args.every, speed)
    else:
        _loop(out, learner, run_, data, held_out, None, args.every, speed)
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
    size = SIZES[args.size or "small"]
    given = {name: getattr(size, name) if getattr(args, name) is None else getattr(args, name) for name in OPTIONS}
    for name in ("batch", "length", "accumulate"):
        if given[name] < 1:
            raise UsageError(f"--{name} must be positive, got {given[name]}")
    if given["seed"] < 0:
        raise UsageError(f"--seed must not be negative, got {given['seed']}")
    if given["batch"] % given["accumulate"]:
        raise UsageError(f"--accumulate must divide the batch of {given['batch']}, got {given['accumulate']}")
    config = ModelConfig(
        vocab_size=256, hidden_size=given["hidden"], num_layers=given["layers"], num_heads=given["heads"], head_dim=given["head_dim"],
        intermediate_size=given["intermediate"] or None, attention_every=given["attention_every"], safe_gate=True, lower_bound=-5.0,
    )  # fmt: skip
    optimizer = AdamW(learning_rate=given["learning_rate"], steps=given["steps"], warmup=given["warmup"], decay=0.1)
    data = {"text": None if args.text is None else str(Path(args.text).resolve()), "sha256": None, "batch": given["batch"],
            "accumulate": given["accumulate"], "length": given["length"], "seed": given["seed"], "options": given}  # fmt: skip
    data["sha256"] = hashlib.sha256(_read(data["text"])).hexdigest()
    return checkpoint.Checkpoint(config, optimizer, TrainingState(initial_weights(config, given["seed"])), data)


def resumed(args):
    """The run of the checkpoint in --out; options that were given must be its own."""
    from kdakit.training import checkpoint

    found = checkpoint.load(args.out)
    found.data.setdefault("accumulate", 1)
    had_options = found.data.get("options", {})
    for name in OPTIONS:
        wanted, had = getattr(args, name), had_options.get(name, getattr(SIZES["small"], name))
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

    if path is None:
        return text.book()
    try:
        return Path(path).read_bytes()
    except OSError as problem:
        raise UsageError(f"the text must be a file that can be read, got: {problem}") from problem


def _text(data: dict[str, Any]):
    from kdakit.training import text

    content = _read(data["text"])
    if hashlib.sha256(content).hexdigest() != data["sha256"]:
        raise UsageError(f"{data['text']} must be the text that the run began with, and has changed since")
    train, held_out = text.split(content)
    if len(held_out) <= data["length"]:
        least = 20 * (data["length"] + 1)  # a twentieth is held out
        raise UsageError(f"the text must have at least {least} bytes for sequences of {data['length']}, got {len(content)}")
    return train, held_out


class Speed(NamedTuple):
    """What a step is: tokens, and FLOPs beside the chip's peak where that is known."""

    tokens: int
    flops: int
    peak: float | None

    @staticmethod
    def of(run_, where, devices: int) -> Speed:
        from kdakit.measure import roofline

        tokens = run_.data["batch"] * run_.data["length"]
        chip = roofline.chip(_chip_name(where.device))
        peak = None if chip is None else devices * (chip.half if where.dtype == "bfloat16" else chip.tf32)
        return Speed(tokens, 3 * tokens * run_.config.flops_per_token(run_.data["length"]), peak)

    def share(self, steps_per_second: float) -> float | None:
        return None if self.peak is None else self.flops * steps_per_second / self.peak


def _chip_name(device: Any) -> str:
    """As the driver calls it; of a CPU nothing."""
    if getattr(device, "type", "") == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    return getattr(device, "device_kind", "")


SHOW_EVERY = 10  # steps between two looks at the loss: each waits for the device


def _loop(out, learner, run_, data, held_out, folder: Path | None, every: int, speed: Speed) -> None:
    """Without a folder another process writes the checkpoints."""
    import numpy as np

    from kdakit.cli import console, processes
    from kdakit.training import checkpoint, log, text

    d, steps = run_.data, run_.optimizer.steps
    check = text.batch(held_out, np.random.default_rng(0), processes.HELD_OUT, d["length"])
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        log.forget_after(folder, run_.state.step)
    with console.progress(shown=folder is not None) as bar:
        task = bar.add_task("training", total=steps, completed=run_.state.step)
        losses, unread, begin, seen = [], [], time.perf_counter(), time.perf_counter()
        for step in range(run_.state.step + 1, steps + 1):
            # Batches depend on the seed and the step alone: a resumed run draws what an uninterrupted one would.
            unread.append(learner.advance(*text.batch(data, np.random.default_rng([d["seed"], step]), d["batch"], d["length"])))
            saves = step % every == 0 or step == steps
            bar.update(task, advance=1)
            if saves or step % SHOW_EVERY == 0:
                read = [float(value) for value in unread]
                now = time.perf_counter()
                rate, unread = len(read) / (now - seen), []
                share = speed.share(rate)
                rates = [run_.optimizer.rate(step - len(read) + i) for i in range(len(read))]
                rows = [log.Row(step - len(read) + 1 + i, x, rates[i], rate * speed.tokens, share) for i, x in enumerate(read)]
                if folder is not None:
                    log.append(folder, rows)
                _finite(step, read[-1], run_)
                of_peak = "" if share is None else f", {share:.1%} of peak"
                bar.update(task, description=f"loss {read[-1]:.3f}, {rate * speed.tokens:,.0f} tokens/s{of_peak}")
                losses, seen = losses + read, now
            if saves:
                rate = len(losses) / (time.perf_counter() - begin)
                row = {"step": step, "loss": float(np.mean(losses)), "held_out": learner.loss(*check),
                       "tokens_per_second": rate * speed.tokens, "peak_share": speed.share(rate)}  # fmt: skip
                _finite(step, row["held_out"], run_)
                run_.curve.append(row)
                run_.state = learner.state()
                if folder is not None:
                    checkpoint.save(folder, run_)
                of_peak = "" if row["peak_share"] is None else f"  {row['peak_share']:.1%} of peak"
                out.print(f"step {step:6}  loss {row['loss']:.4f}  held out {row['held_out']:.4f}  "
                          f"{row['tokens_per_second']:,.0f} tokens/s{of_peak}", markup=False)  # fmt: skip
                losses, begin, seen = [], time.perf_counter(), time.perf_counter()


def _finite(step: int, loss: float, run_) -> None:
    """A run whose loss is no number has no weights either that anybody could go on from: the checkpoint before it stays."""
    if not math.isfinite(loss):
        saved = f"the checkpoint of step {run_.state.step} stays" if run_.state.step else "there is no checkpoint"
        raise FloatingPointError(f"the loss of step {step} must be finite, got {loss}: try a smaller --learning-rate; {saved}")


def _finish(out, learner, run_, folder: Path, index: str) -> None:
    from kdakit.measure import machine

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
