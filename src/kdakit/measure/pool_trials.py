"""Random decodes over pools, held against the float64 recurrence: rows and pages in any order, rows of nobody, drafts with a page a token.

judge(draw(seed), "pallas_tpu")     # {"ok": .., "what": .., "complaint": .., "used": {"o": .., "states": ..}}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kdakit import accuracy
from kdakit.problem import Arrays, make_options, make_problem
from kdakit.rounding import round_to

OPTIONS = {
    "log_decay": {},
    "softplus": {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True},
    "bounded": {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "lower_bound": -5.0, "safe_gate": True},
}


@dataclass(frozen=True)
class Trial:
    rows: int = 4
    tokens: int = 1
    H: int = 2
    HV: int = 2
    K: int = 16
    V: int = 16
    dtype: str = "float32"
    state_dtype: str = "float32"
    gate: str = "log_decay"
    state_v_first: bool = False
    drafted: bool = False  # a page for each token, and the state comes from one of them
    seed: int = 0


def draw(seed: int, largest: int = 256) -> Trial:
    """`largest`: of K and V."""
    rng = np.random.default_rng(seed)
    pick = lambda *of: of[rng.integers(len(of))]
    H, sizes = pick(1, 2, 4, 8), [n for n in (8, 20, 64, 100, 128, 136, 256) if n <= largest]
    return Trial(
        rows=int(rng.integers(1, 9)), tokens=pick(1, 1, 2, 8), H=H, HV=H * pick(1, 1, 2), K=pick(*sizes), V=pick(*sizes),
        dtype=pick("float32", "bfloat16"), state_dtype=pick("float32", "bfloat16"), gate=pick(*OPTIONS), state_v_first=bool(pick(0, 0, 1)),
        drafted=bool(pick(0, 1)), seed=seed,
    )  # fmt: skip


def judge(trial: Trial, backend: str) -> dict[str, Any]:
    """What came of it: within tolerance, or what was wrong. Never raises."""
    try:
        return {"what": str(trial), **_judge(trial, backend)}
    except Exception as raised:  # a failure of any kind is what this looks for
        return {"what": str(trial), "ok": False, "used": {}, "complaint": f"{type(raised).__name__}: {raised}"[:2000]}


def _judge(trial: Trial, backend: str) -> dict[str, Any]:
    import jax.numpy as jnp

    from kdakit.serving.jax import pages

    t, rng = trial, np.random.default_rng(trial.seed)
    N, T = t.rows, t.tokens
    normal = lambda *shape, dtype=t.dtype: round_to(rng.normal(size=shape), dtype)
    g = normal(N, T, t.HV, t.K) if t.gate != "log_decay" else round_to(-np.exp(rng.uniform(-7, 1, (N, T, t.HV, t.K))), "float32")
    beta = normal(N, T, t.HV) if t.gate != "log_decay" else round_to(rng.uniform(size=(N, T, t.HV)), t.dtype)
    fused = t.gate != "log_decay"
    arrays = Arrays(
        normal(N, T, t.H, t.K), normal(N, T, t.H, t.K), normal(N, T, t.HV, t.V), g, beta,
        normal(t.HV, dtype="float32") if fused else None, normal(t.HV * t.K, dtype="float32") if fused else None,
    )  # fmt: skip
    slots, accepted, source, target = _slots(t, rng)
    count = 3 + N * T
    states = normal(count, t.HV, *((t.V, t.K) if t.state_v_first else (t.K, t.V)), dtype=t.state_dtype)
    dtypes = {"g": "float32"} if t.gate == "log_decay" else {}
    tokens = {n: jnp.asarray(getattr(arrays, n), dtypes.get(n, t.dtype)) for n in ("q", "k", "v", "g", "beta")}
    more = {n: None if x is None else jnp.asarray(x, jnp.float32) for n, x in (("A_log", arrays.A_log), ("dt_bias", arrays.dt_bias))}
    more["accepted"] = None if accepted is None else jnp.asarray(accepted)
    o, after = pages.decode(
        jnp.asarray(states, t.state_dtype), jnp.asarray(slots), **tokens, **more,
        state_v_first=t.state_v_first, use_qk_l2norm_in_kernel=True, backend=backend, **OPTIONS[t.gate],
    )  # fmt: skip
    o, after = np.asarray(o.astype(jnp.float32), np.float64), np.asarray(after.astype(jnp.float32), np.float64)
    rows = _compare(t, arrays, states, source, target, o, after)
    used = {name: max(e / allowed for n, e, allowed in rows if n == name) for name in {n for n, _, _ in rows}}
    wrong = [f"{name}: error {e:.2e}, allowed {allowed:.2e}" for name, e, allowed in rows if not e <= allowed]
    if o[source < 0].any():
        wrong.append("rows of nobody must output zeros")
    untouched = np.setdiff1d(np.arange(count), target[source >= 0])
    if not np.array_equal(after[untouched], states[untouched]):
        wrong.append("pages that nobody wrote must stay as they are")
    return {"ok": not wrong, "used": {n: round(float(x), 4) for n, x in used.items()}, "complaint": "; ".join(wrong)}


def _slots(t: Trial, rng):
    """slots and accepted as the call gets them; and by row, where its state comes from and where states go, -1: nobody's."""
    pages = rng.permutation(3 + t.rows * t.tokens)
    if not t.drafted:
        slots = pages[: t.rows].copy()
        slots[rng.uniform(size=t.rows) < 0.3] = rng.choice([-1, 10**6])
        slots = slots.astype(np.int32)
        owned = np.where(slots < len(pages), slots, -1)
        return slots, None, owned, owned[:, None]
    slots = pages[: t.rows * t.tokens].reshape(t.rows, t.tokens).astype(np.int32)
    slots[rng.uniform(size=slots.shape) < 0.2] = -1
    accepted = rng.integers(1, t.tokens + 1, size=t.rows).astype(np.int32)
    return slots, accepted, slots[np.arange(t.rows), accepted - 1], slots


def _compare(t: Trial, arrays: Arrays, states, source, target, o, after) -> list[tuple[str, float, float]]:
    """(name, error, allowed) of outputs, and of the states that each row left."""
    live = np.flatnonzero(source >= 0)
    if not len(live):
        return [("o", float(np.abs(o).max()), 0.0)]
    layout = lambda x: x.swapaxes(-1, -2) if t.state_v_first else x
    found = []
    for n in [t.tokens] if not t.drafted else range(1, t.tokens + 1):  # the state after n tokens
        own = Arrays(*(x[live][:, :n] for x in arrays[:5]), *arrays[5:7], initial_state=layout(states[source[live]]))
        options = make_options(own, output_final_state=True, use_qk_l2norm_in_kernel=True, **OPTIONS[t.gate])
        gate_dtype = "float32" if t.gate == "log_decay" else t.dtype
        problem = make_problem("recurrent", own, options).replace(
            dtype=t.dtype, gate_dtype=gate_dtype, beta_dtype=t.dtype, state_dtype=t.state_dtype
        )
        truth = accuracy.truths(problem, own)
        plain = accuracy.plain_errors(problem, own, truth)
        if n == t.tokens:
            found.append(("o", accuracy.error(o[live], truth["o"]), accuracy.tolerance(plain["o"], t.dtype)))
        place = target[live, n - 1 if t.drafted else 0]
        kept = place >= 0
        if kept.any():
            error = accuracy.error(layout(after[place[kept]]), truth["final_state"][kept])
            found.append(("states", error, accuracy.tolerance(plain["final_state"], t.state_dtype)))
    return found
