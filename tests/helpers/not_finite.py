"""NaN and infinity, put into one element of one input: which results they may change, and which they must not.

What is not finite stays in its own sequence and head. An element of q or k belongs to all value heads of its group, one of A_log or dt_bias
to its head in all sequences; of a cotangent only gradients know.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

import numpy as np

from kdakit.cases import FUSED, Case
from kdakit.problem import DIFFERENTIABLE, Arrays

VALUES = (np.nan, np.inf, -np.inf)
COTANGENTS = ("d_o", "d_final_state")


class Injection(NamedTuple):
    label: str
    name: str
    value: float
    arrays: Arrays
    cotangents: tuple
    sequence: int | None  # None: all
    head: int  # of values
    forward: bool  # whether outputs, not gradients alone, may change


class Sequences:
    """Which sequence each token and each state belongs to, -1: padding; the segments of all rows are numbered one after the other."""

    def __init__(self, case):
        B, T = case.B, case.T
        if case.segments:
            first = np.cumsum([0] + [len(row) for row in case.segments])
            self.of_token = np.stack([np.repeat(np.arange(len(row)), row) + n for row, n in zip(case.segments, first, strict=False)])
            self.entering, self.leaving = first[:-1], first[1:] - 1
        elif case.lengths:
            self.of_token = np.r_[np.repeat(np.arange(len(case.lengths)), case.lengths), np.full(T - sum(case.lengths), -1)][None]
            self.entering = self.leaving = np.arange(len(case.lengths))
        else:
            self.of_token = np.broadcast_to(np.arange(B)[:, None], (B, T))
            self.entering = self.leaving = np.arange(B)

    def of_chunk(self, case, chunks: int) -> np.ndarray:
        """[B, chunks] of the states before each chunk, of sequences one after the other where they are packed; -1: nobody's."""
        if not case.lengths:
            return np.broadcast_to(np.arange(case.B)[:, None], (case.B, chunks))
        counts = [-(-n // case.options["chunk_size"]) for n in case.lengths]
        return np.r_[np.repeat(np.arange(len(counts)), counts), np.full(chunks - sum(counts), -1)][None]


def injections(case, dtype: str = "float32", seed: int = 0, values=VALUES):
    """Every value into every input and cotangent, at a place of its own."""
    rng = np.random.default_rng(seed)
    arrays, cotangents, where = case.arrays(dtype), case.cotangents(dtype), Sequences(case)
    group = case.HV // case.H
    for name in (*DIFFERENTIABLE, *COTANGENTS):
        for value in values:
            source = cotangents[COTANGENTS.index(name)] if name in COTANGENTS else getattr(arrays, name)
            if source is None:
                continue
            changed = np.array(source)
            place = tuple(int(rng.integers(n)) for n in changed.shape)
            changed[place] = value
            if name in ("A_log", "dt_bias"):
                sequence, head = None, place[0] // (changed.size // case.HV)
            elif name in ("initial_state", "d_final_state"):
                sequence, head = (where.entering if name == "initial_state" else where.leaving)[place[0]], place[1]
            else:
                sequence, head = where.of_token[place[:2]], place[2] * (group if name in "qk" else 1)
            given = arrays if name in COTANGENTS else arrays._replace(**{name: changed})
            seeds = tuple(changed if name == own else x for own, x in zip(COTANGENTS, cotangents, strict=True))
            yield Injection(f"{value} at {name}{list(place)}", name, value, given, seeds, sequence, head, name not in COTANGENTS)


def injection(case, dtype: str, seed: int, i: int) -> Injection:
    """The i-th of `injections` with this seed."""
    return next(islice(injections(case, dtype, seed), i, None))


def given(case, dtype: str, injected=None) -> tuple[Arrays, tuple]:
    """Arrays and cotangents: of the case, or with what is `injected`, [seed, i]."""
    if injected is None:
        return case.arrays(dtype), case.cotangents(dtype)
    found = injection(case, dtype, *injected)
    return found.arrays, found.cotangents


def gaps(case, found: dict, injected: Injection) -> list[str]:
    """Results that must be NaN and are not: a NaN reaches the outputs after it in its sequence, one of a cotangent what is before it."""
    sources = {"k": "o", "v": "o", "initial_state": "o", "d_o": "v", "d_final_state": "v"}
    if not np.isnan(injected.value) or injected.name not in sources or injected.sequence == -1:
        return []
    all_inputs = injected.arrays._asdict() | dict(zip(COTANGENTS, injected.cotangents, strict=True))
    place = np.argwhere(np.isnan(all_inputs[injected.name]))[0]
    tokens = Sequences(case).of_token == injected.sequence  # [B, T]
    if injected.name in ("k", "v"):
        tokens[:, : place[1]] = False
    if injected.name == "d_o":
        tokens[:, place[1] + 1 :] = False
    seen = found[sources[injected.name]][tokens][:, injected.head]  # [tokens, V]
    seen = seen if injected.name == "k" else seen[:, place[-1]]
    return [] if np.isnan(seen).all() else [f"{sources[injected.name]}: {np.isnan(seen).sum()} of {seen.size} are NaN"]


def leaks(case, clean: dict, found: dict, injected: Injection, rounding: float = 0.0) -> list[str]:
    """The results in which a bit changed that belongs to another sequence or head. `rounding`: of a result's largest value, no change."""
    where, group = Sequences(case), case.HV // case.H
    grouped = injected.head // group  # the head of q and k
    together = injected.name in ("q", "k")
    bad = []
    for name, value in clean.items():
        if name in ("q", "k"):
            same_head = np.arange(case.H) == grouped
        elif together:
            same_head = np.arange(case.HV) // group == grouped
        else:
            same_head = np.arange(case.HV) == injected.head
        if name in ("A_log", "dt_bias"):
            may = np.broadcast_to(same_head.reshape(-1, 1), (case.HV, value.size // case.HV)).reshape(value.shape)
        elif name in ("final_state", "initial_state"):
            rows = where.leaving if name == "final_state" else where.entering
            own = np.ones(rows.shape, bool) if injected.sequence is None else rows == injected.sequence
            may = (own[:, None] & same_head).reshape(*value.shape[:2], 1, 1)
        elif name == "states":
            own = where.of_chunk(case, value.shape[1]) == injected.sequence if injected.sequence is not None else np.ones((1, 1), bool)
            may = (own[..., None] & same_head)[..., None, None]
        else:
            own = np.ones(where.of_token.shape, bool) if injected.sequence is None else where.of_token == injected.sequence
            may = (own[..., None] & same_head).reshape(*value.shape[:3], *[1] * (value.ndim - 3))
        if not injected.forward and name in ("o", "final_state", "states"):
            may = np.zeros_like(may)
        same = (value == found[name]) | (np.isnan(value) & np.isnan(found[name]))
        same |= np.abs(value - found[name]) < rounding * np.abs(value).max(initial=0)  # not for NaN
        wrong = ~(same | may)
        if wrong.any():
            first = tuple(int(i) for i in np.argwhere(wrong)[0])
            bad.append(f"{name}: {wrong.sum()} of {(~np.broadcast_to(may, value.shape)).sum()}, first {list(first)} "
                       f"{value[first]} -> {found[name][first]}")  # fmt: skip
    return bad


def draw(seed: int) -> tuple[Case, str]:
    """A random problem, packed or not, with given or computed gates, and a dtype."""
    rng = np.random.default_rng(seed)
    H = int(rng.integers(1, 3))
    sizes = dict(H=H, HV=H * int(rng.integers(1, 3)), K=int(rng.choice([16, 40, 64, 128])), V=int(rng.choice([16, 24, 64, 128])))
    packed = tuple(int(n) for n in rng.integers(0, 90, 5)) if seed % 2 else ()
    rows = dict(lengths=packed, T=sum(packed)) if packed else dict(B=2, T=int(rng.integers(1, 200)))
    gate = rng.choice(["mild", "huge", "spikes", "softplus", "bounded"])
    options = {"chunk_size": int(rng.choice([32, 64])), "state_v_first": bool(rng.integers(2)), "return_intermediate_states": not packed}
    computed = dict(gate="raw", beta="logits", A_log=True, dt_bias=True) if gate in ("softplus", "bounded") else dict(gate=str(gate))
    options |= FUSED if gate in ("softplus", "bounded") else {}
    options |= {"lower_bound": -5.0, "safe_gate": True} if gate == "bounded" else {}
    return Case(f"drawn_{seed}", "drawn", **sizes, **rows, **computed, options=options), str(rng.choice(["float32", "bfloat16"]))


def check(
    case, dtype: str, run, seed: int = 0, values=VALUES, gradients: bool = True, rounding: float = 0.0, names=(*DIFFERENTIABLE, *COTANGENTS)
) -> int:
    """run(arrays, cotangents) -> {name: array}, with every value in every one of `names`: nothing leaks. Returns how many were injected."""
    clean = run(case.arrays(dtype), case.cotangents(dtype) if gradients else None)
    assert all(np.isfinite(x).all() for x in clean.values())
    number, wrong = 0, []
    for injected in injections(case, dtype, seed, values):
        if not (gradients or injected.forward) or injected.name not in names:
            continue
        found = run(injected.arrays, injected.cotangents if gradients else None)
        number += 1
        wrong += [f"{injected.label}: {leak}" for leak in leaks(case, clean, found, injected, rounding)]
        if np.isnan(injected.value) and all(np.isfinite(x).all() for x in found.values()):
            wrong.append(f"{injected.label}: nothing shows it")
    assert not wrong, "\n".join(wrong)
    return number
