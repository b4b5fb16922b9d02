"""`kdakit bench --errors`: ours and the peers against float64 on the same inputs, easy ones and hard ones, gradients included."""

from __future__ import annotations

import math
from typing import Any

from kdakit import accuracy
from kdakit.cases import FUSED, Case
from kdakit.measure import checking, peers, records

BOUNDED = FUSED | {"lower_bound": -5.0, "safe_gate": True, "chunk_size": 64}
SOFTPLUS = FUSED | {"chunk_size": 64}
SIZES = dict(T=300, H=4, HV=4, K=128, V=128)
RAW = SIZES | dict(gate="raw", beta="logits", A_log=True, dt_bias=True)
READY = SIZES | dict(options={"chunk_size": 64})

CASES = {
    case.name: case
    for case in (
        Case("bounded", "random inputs, bounded gate", **RAW, options=BOUNDED),
        Case("softplus", "random inputs, softplus gate", **RAW, options=SOFTPLUS),
        Case("packed", "packed sequences, bounded gate", **RAW, lengths=(130, 5, 165), options=BOUNDED),
        Case("forgets_little", "bounded gate close to 0", **RAW | dict(gate="raw_slow"), options=BOUNDED),
        Case("keys_parallel", "nearly parallel keys, beta near 1, gate close to 0", **RAW | dict(gate="raw_slow", beta="logits_high"),
             keys="parallel", options=BOUNDED),
        Case("keys_identical", "identical keys, beta near 1, gate close to 0", **RAW | dict(gate="raw_slow", beta="logits_high"),
             keys="identical", options=BOUNDED),
        Case("beta_two", "nearly parallel keys, beta to 2, gate close to 0", **RAW | dict(gate="raw_slow"), keys="parallel",
             options=BOUNDED | {"allow_neg_eigval": True}),
        Case("softplus_huge", "softplus gate to -3000 a token", **RAW | dict(gate="raw_huge"), options=SOFTPLUS),
        Case("resets", "log-decays with resets of -3000 inside chunks", **READY, gate="resets"),
        Case("spikes", "log-decays with single channels of -60 and -2661", **READY, gate="spikes"),
    )
}  # fmt: skip


def sweep(args, tick=lambda text, total: None) -> dict[str, Any]:
    """Every contestant on every case; the JSON grows with each. Peers run untuned: that changes their speed, hardly their numbers."""
    from kdakit.dispatch import names
    from kdakit.measure.choices import pick

    default = ["triton_gpu", "cuda", "torch_native", *peers.PEERS]
    chosen = pick("backend", args.backend or default, [*names("torch"), *peers.PEERS])
    cases = [CASES[name] for name in pick("case", args.case, CASES)]
    measured: list[dict[str, Any]] = []
    missing: list[dict[str, Any]] = []
    truths: dict[str, list[Truth]] = {}
    with peers.untuned():
        for name in chosen:
            for case in cases:
                tick(f"{case.name} {name}", len(cases) * len(chosen))
                if case.name not in truths:
                    truths[case.name] = [Truth(case, args.dtype, seed) for seed in range(args.draws)]
                about = {"contestant": name, "case": case.name, "why": case.why, "dtype": args.dtype}
                got = mean([truth.errors(name) for truth in truths[case.name]])
                (missing if "reason" in got else measured).append(about | got)
                found = records.record("errors", {"dtype": args.dtype, "draws": args.draws}, measured, missing)
                if args.json:
                    records.save(found, args.json)
    return found


class Truth:
    """A draw of a case with its float64 results, gradients included."""

    def __init__(self, case: Case, dtype: str, seed: int = 0):
        self.case, self.dtype = case, dtype
        self.arrays, self.cotangents = case.arrays(dtype, seed), case.cotangents(dtype, seed + 1)
        self.values = accuracy.truths(case.problem(dtype, "chunk", True), self.arrays, *self.cotangents)

    def errors(self, name: str) -> dict[str, Any]:
        """{'o', 'final_state', 'gradient': the worst one, 'gradients'}; None: not finite.

        {'reason': ...} where it cannot run; 'no_gradient' is the reason where it can run forward only.
        """
        reasons = []
        for grad in (True, False):
            try:
                results = self._run(name, grad)
            except Exception as problem:
                reasons.append(str(problem) if isinstance(problem, peers.Unavailable) else f"raised {type(problem).__name__}: {problem}")
                continue
            found = {n: accuracy.error(results[n], self.values[n]) for n in self.values if n in results}
            ahead = {n: _finite(found.pop(n)) for n in ("o", "final_state")}
            if not grad:
                return ahead | {"no_gradient": reasons[0]}
            return ahead | {"gradient": _finite(max(found.values())), "gradients": {n: _finite(x) for n, x in found.items()}}
        return {"reason": reasons[-1]}

    def _run(self, name: str, grad: bool):
        if name in peers.PEERS:
            function = peers.find(name, self.case, self.dtype, "chunk", grad)
        else:
            if (why := checking.refusal(name, self.case, self.dtype, "chunk", grad)) is not None:
                raise peers.Unavailable(why)
            function = checking.call("torch", name, self.case, "chunk")
        return checking.run_torch(function, self.case, self.dtype, self.arrays, self.cotangents if grad else None)


def mean(draws: list[dict[str, Any]]) -> dict[str, Any]:
    """The root mean squares of what `Truth.errors` found: an output of a few numbers, as A_log's gradient is, has luck in a single draw."""
    first = draws[0]
    if "reason" in first or len(draws) == 1:
        return first
    if "gradients" not in first:
        return first | {n: _root([d[n] for d in draws]) for n in ("o", "final_state")}
    gradients = {n: _root([d["gradients"][n] for d in draws]) for n in first["gradients"]}
    worst = None if None in gradients.values() else max(gradients.values())
    return {n: _root([d[n] for d in draws]) for n in ("o", "final_state")} | {"gradient": worst, "gradients": gradients}


def _root(errors: list[float | None]) -> float | None:
    """The root mean square; None if one is None."""
    known = [x for x in errors if x is not None]
    return math.sqrt(sum(x * x for x in known) / len(known)) if len(known) == len(errors) else None


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
