"""One random problem on one backend, judged: the numbers by the accuracy rule, the memory around them, and the same bits twice."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from kdakit import dispatch
from kdakit.measure import checking
from kdakit.measure.random_problems import Drawn, draw
from kdakit.problem import DIFFERENTIABLE, Arrays

DEADLY = ("CUDA error", "illegal memory", "unspecified launch failure", "misaligned address", "Triton Error [CUDA]")


@dataclass(frozen=True)
class Verdict:
    """ok, or not: `complaint` says why. `refused`: the backend does not take such problems, and says so."""

    label: str
    what: str
    backend: str
    dtype: str
    call: str
    K: int
    V: int
    ok: bool
    complaint: str = ""
    refused: str = ""
    seconds: float = 0.0
    judged: float = 0.0  # seconds for the truth
    used: dict[str, float] = field(default_factory=dict)  # share of the tolerance, by output
    forms: tuple[str, ...] = ()  # what ran, as the backend's `forms` names it
    inexact: bool = False  # numbers beyond the rule, and nothing else, are what is wrong

    @property
    def beyond(self) -> float:
        """How many times what is allowed the worst error is; infinite where something else is wrong too."""
        return max(self.used.values(), default=0.0) if self.ok or self.inexact else float("inf")

    @property
    def deadly(self) -> bool:
        """The device has to be opened anew, by another process."""
        return any(word in self.complaint for word in DEADLY)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def judge(drawn: Drawn | int, backend: str, device: Any = None) -> Verdict:
    """Runs the problem twice and holds it against the truth; whatever goes wrong is a complaint, nothing is raised."""
    drawn = draw(drawn) if isinstance(drawn, int) else drawn
    about = dict(label=drawn.label, what=str(drawn), backend=backend, dtype=drawn.dtype, call=drawn.call, K=drawn.K, V=drawn.V)
    problem, framework = drawn.problem(), checking.framework_of(backend)
    device = checking.default_device(framework) if device is None else device
    if framework == "torch":
        import torch

        device = torch.device(device)
    try:
        refused = dispatch.supports(backend, problem, device)
        if refused is not None:
            return Verdict(ok=True, refused=refused, **about)
        arrays, cotangents = drawn.arrays(), drawn.cotangents() if drawn.grad else None
        start = time.perf_counter()
        run = _torch_runs if framework == "torch" else _jax_runs
        runs, complaints = run(drawn, backend, device, *_with_garbage(drawn, arrays, cotangents))
        about |= dict(seconds=round(time.perf_counter() - start, 3), forms=forms_of(backend, problem, device))
        complaints += _other_bits(*runs)
        rows = checking.compare_quickly(problem, arrays, runs[0], cotangents, dispatch.operand_dtype(backend, problem))
    except Exception as raised:  # a failure of any kind is what this looks for
        return Verdict(ok=False, complaint=f"{type(raised).__name__}: {raised}"[:600], **about)
    about |= dict(inexact=not complaints and not all(row.ok for row in rows))
    complaints += [f"{row.name}: error {row.error:.2e}, allowed {row.tolerance:.2e}" for row in rows if not row.ok]
    about |= dict(judged=round(time.perf_counter() - start - about["seconds"], 3))
    used = {row.name: round(row.used, 4) for row in rows}
    return Verdict(ok=not complaints, complaint="; ".join(complaints), used=used, **about)


def forms_of(backend: str, problem, device) -> tuple[str, ...]:
    """What the backend runs for such a problem, as its table of what a chip has shown names it."""
    module = dispatch.load(backend)
    return tuple(module.forms(problem, device))


def _with_garbage(drawn: Drawn, arrays: Arrays, cotangents: tuple | None) -> tuple[Arrays, tuple | None]:
    """NaN in tokens behind the last sequence, which nothing may read."""
    if not drawn.padding:
        return arrays, cotangents

    def spoiled(x):
        return None if x is None else np.concatenate([x[:, : -drawn.padding], np.full_like(x[:, -drawn.padding :], np.nan)], 1)

    arrays = arrays._replace(**{name: spoiled(getattr(arrays, name)) for name in ("q", "k", "v", "g", "beta")})
    return arrays, cotangents and (spoiled(cotangents[0]), *cotangents[1:])


def _other_bits(first: dict, second: dict) -> list[str]:
    if first.keys() != second.keys():
        return [f"a second call returned {sorted(second)}, the first {sorted(first)}"]
    return [f"{n}: other bits in a second call" for n in first if not np.array_equal(first[n], second[n], equal_nan=True)]


def _jax_runs(drawn: Drawn, backend: str, device: Any, arrays: Arrays, cotangents):
    runs = [checking.run_arrays(backend, drawn, drawn.dtype, arrays, cotangents, drawn.op) for _ in range(2)]
    return [_trimmed(drawn, run) for run in runs], []


def _torch_runs(drawn: Drawn, backend: str, device: Any, arrays: Arrays, cotangents):
    """Two runs on inputs in poisoned memory, into poisoned memory."""
    from kdakit.measure import memory

    function = checking.call("torch", backend, drawn, drawn.op)
    tensors = checking.to_torch(arrays, drawn.dtypes(), device)
    if tensors.cu_seqlens_cpu is not None:
        tensors = tensors._replace(cu_seqlens_cpu=tensors.cu_seqlens_cpu.cpu())
    layouts = dict(zip(("q", "k", "v", "g", "beta", "initial_state", "o"), drawn.layouts, strict=True))
    layouts["final_state"] = drawn.final_layout
    placed = {n: memory.place(x, layouts.get(n, "plain")) for n, x in tensors._asdict().items() if x is not None}
    runs, complaints = [], []
    for _ in range(2):
        with memory.guarded() as guard:
            runs.append(_run(function, drawn, {n: p.tensor for n, p in placed.items()}, cotangents, layouts))
            if device.type == "cuda":
                import torch

                torch.cuda.synchronize(device)
        complaint = guard.complaint()
        complaints += [complaint] if complaint else []
    complaints += [f"{name} or the memory around it was changed" for name, p in placed.items() if not p.untouched]
    return [_trimmed(drawn, run) for run in runs], complaints


def _run(function, drawn: Drawn, given: dict[str, Any], cotangents, layouts: dict[str, str]) -> dict[str, np.ndarray]:
    import torch

    from kdakit.measure import memory

    given = {n: x.detach().requires_grad_(drawn.grad) if n in DIFFERENTIABLE else x for n, x in given.items()}
    inputs = {n: x for n, x in given.items() if n in DIFFERENTIABLE}
    out = dict(zip(checking.OUTPUTS, function(Arrays(**dict.fromkeys(Arrays._fields) | given)), strict=False))
    out = {n: x for n, x in out.items() if x is not None}
    results = {n: x.detach().to("cpu", torch.float64).numpy() for n, x in out.items()}
    if cotangents is not None:
        seeds = dict(zip(("o", "final_state"), cotangents, strict=True))
        reached = [n for n in out if out[n].requires_grad]
        weights = [memory.place(torch.from_numpy(seeds[n]).to(out[n]), layouts[n]).tensor for n in reached]
        gradients = torch.autograd.grad([out[n] for n in reached], list(inputs.values()), weights, allow_unused=True)
        for (name, x), d in zip(inputs.items(), gradients, strict=True):
            results[name] = np.zeros(x.shape) if d is None else d.to("cpu", torch.float64).numpy()
    return results


def _trimmed(drawn: Drawn, results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """States before chunks without the places of chunks that packed sequences may have and these do not."""
    if "states" in results and drawn.lengths:
        chunks = sum(-(-n // drawn.problem().options.chunk_size) for n in drawn.lengths)
        results["states"] = results["states"][:, :chunks]
    return results
