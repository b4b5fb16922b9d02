"""Where a training step's time goes: by part of the model, by kernel, and whether the GPU waits for the host.

Parts are told apart by marks, which autograd passes on its way forward and again, in the other order, on its way back: what lies between
two marks on the GPU's clock belongs to the part that the first one opens.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

BETWEEN = "norms and residuals"
OPTIMIZER = {"_collect": "gradients to float32", "_clip": "clipping", "_move": "AdamW", "_refresh": "weights to bfloat16"}


class Marks:
    """[(part that begins, when)] of one step. clock() -> a moment, apart(a, b) -> milliseconds between two."""

    def __init__(self, clock: Callable[[], Any], apart: Callable[[Any, Any], float]):
        self.clock, self.apart = clock, apart
        self.made: list[tuple[str, Any]] = []

    def begin(self, part: str) -> None:
        self.made.append((part, self.clock()))

    def milliseconds(self) -> dict[str, float]:
        """Of every part, its pieces added up; the last mark only ends what came before it."""
        found: dict[str, float] = defaultdict(float)
        for (part, start), (_, end) in zip(self.made, self.made[1:], strict=False):
            found[part] += self.apart(start, end)
        return dict(found)


class _Passed(torch.autograd.Function):
    """x itself; `forward` begins on the way there, `backward` on the way back."""

    @staticmethod
    def forward(ctx, x, marks, forward, backward):
        ctx.marks, ctx.part = marks, backward
        marks.begin(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, d_x):
        ctx.marks.begin(ctx.part)
        return d_x, None, None, None


def marked(learner: Any, marks: Marks) -> Any:
    """The Learner, whose steps leave marks from now on."""
    model = learner.model
    for i, block in enumerate(model.blocks()):
        part = "attention" if model.config.is_attention(i) else "KDA"
        block.attn.mix = _first_marked(block.attn.mix, marks, part)
        block.mlp.forward = _marked(block.mlp.forward, marks, "MLP")
    model.model.embeddings.forward = _after(model.model.embeddings.forward, marks, BETWEEN, "embedding, backward")
    model.model.norm.carried = _before(model.model.norm.carried, marks, "head and loss", _back(BETWEEN))
    for name, part in OPTIMIZER.items():
        setattr(learner, name, _begun(getattr(learner, name), marks, part))
    learner._summed = _ended(learner._summed, marks, "head and loss, backward")
    return learner


def _back(part: str) -> str:
    return part + ", backward"


def _before(call, marks, part, after_backward):
    return lambda x, *args: call(_Passed.apply(x, marks, part, after_backward), *args)


def _after(call, marks, following, backward):
    return lambda *args: _Passed.apply(call(*args), marks, following, backward)


def _marked(call, marks, part):
    return _after(_before(call, marks, part, _back(BETWEEN)), marks, BETWEEN, _back(part))


def _first_marked(call, marks, part):
    """`_marked` of a call with two results, of which the first counts."""

    def run(x, *args):
        y, rest = call(_Passed.apply(x, marks, part, _back(BETWEEN)), *args)
        return _Passed.apply(y, marks, BETWEEN, _back(part)), rest

    return run


def _begun(call, marks, part):
    def run(*args):
        marks.begin(part)
        return call(*args)

    return run


def _ended(call, marks, following):
    def run(*args):
        found = call(*args)
        marks.begin(following)
        return found

    return run


def by_part(learner: Any, batches: list, clock: Callable, apart: Callable, wait: Callable[[], None]) -> dict[str, float]:
    """{part: milliseconds}, the median over a step for each batch. The Learner is used up."""
    marks = Marks(clock, apart)
    marked(learner, marks)
    found: list[dict[str, float]] = []
    for given in batches:
        marks.made = []
        wait()
        marks.begin("embedding")
        learner.advance(*given)
        marks.begin("")
        wait()
        found.append(marks.milliseconds())
    return {part: statistics.median(one[part] for one in found) for part in found[0]}


def on_gpu(learner: Any, batches: list) -> dict[str, Any]:
    """The profile of a warm Learner, one step for each batch."""

    def mark():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    whole, host = [], []
    for given in batches:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        learner.advance(*given)
        host.append(1000 * (time.perf_counter() - begin))
        torch.cuda.synchronize()
        whole.append(1000 * (time.perf_counter() - begin))
    found = {"step_ms": statistics.median(whole), "host_ms": statistics.median(host), **kernels(learner, batches)}
    return found | {"parts_ms": by_part(learner, batches, mark, lambda a, b: a.elapsed_time(b), torch.cuda.synchronize)}


def kernels(learner: Any, batches: list) -> dict[str, Any]:
    """Milliseconds of a step in which some kernel runs, in which none does between the first and the last, and {kernel: ms, launches}."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for given in batches:
            learner.advance(*given)
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return tabulated([(e.name, e.time_range.start, e.time_range.end) for e in events], len(batches))


def tabulated(spans: list[tuple[str, float, float]], steps: int) -> dict[str, Any]:
    """spans: (kernel, start, end) in microseconds, of so many steps."""
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    spans = sorted(spans, key=lambda span: span[1])
    busy, reached = 0.0, spans[0][1] if spans else 0.0
    for name, start, end in spans:
        times[name] += end - start
        counts[name] += 1
        busy += max(0.0, end - max(start, reached))
        reached = max(end, reached)
    whole = reached - spans[0][1] if spans else 0.0
    scale = 1000 * steps
    rows = [{"kernel": n[:160], "ms": t / scale, "launches": counts[n] / steps} for n, t in sorted(times.items(), key=lambda x: -x[1])]
    return {"busy_ms": busy / scale, "idle_ms": (whole - busy) / scale, "launches": len(spans) / steps, "kernels": rows}
