"""From a problem that fails to a small one that still does.

Each step tries a simpler problem: fewer tokens, sequences, heads and channels, an option less, a plain layout, a mild gate. One that still
fails takes the place of the last; when none does, that is the answer. Changes are named in `Drawn.label`, so that it can be repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from kdakit.measure.random_problems import SIZES, Drawn

OPTIONS = ("return_intermediate_states", "disable_recompute", "scale", "chunk_size", "state_v_first", "allow_neg_eigval", "safe_gate",
           "use_beta_sigmoid_in_kernel", "use_qk_l2norm_in_kernel")  # fmt: skip


def shrink(drawn: Drawn, fails: Callable[[Drawn], bool], seconds: float = 60.0) -> Drawn:
    """The smallest problem found in that time; `fails` is asked of each."""
    end, tried = time.monotonic() + seconds, {drawn.label}
    smaller = True
    while smaller:
        smaller = False
        for candidate in simpler(drawn):
            if candidate.label in tried:
                continue
            if time.monotonic() > end:
                return drawn
            tried.add(candidate.label)
            if fails(candidate):
                drawn, smaller = candidate, True
                break
    return drawn


def simpler(drawn: Drawn) -> Iterator[Drawn]:
    """Problems that have less of something, the boldest first."""
    yield from _shorter(drawn)
    if drawn.call == "step_gradient":
        yield drawn.changed(call="gradient")
    if drawn.HV > drawn.H:
        yield drawn.changed(HV=drawn.H)
    for H in dict.fromkeys((1, drawn.H // 2)):
        if 0 < H < drawn.H:
            yield drawn.changed(H=H, HV=H * (drawn.HV // drawn.H))
    if any(layout != "plain" for layout in drawn.layouts):
        yield drawn.changed(layouts=("plain",) * 7)
    if drawn.final_layout != "plain":
        yield drawn.changed(final_layout="plain")
    if drawn.padding:
        yield drawn.changed(T=sum(drawn.lengths))
    for flag in ("initial_state", "dt_bias", "host_lengths"):
        if getattr(drawn, flag):
            yield drawn.changed(**{flag: False})
    yield from _without_options(drawn)
    for name, plain in (("gate", "raw" if drawn.options.get("use_gate_in_kernel") else "mild"), ("keys", "random")):
        if getattr(drawn, name) != plain and not (name == "gate" and "safe_gate" in drawn.options):
            yield drawn.changed(**{name: plain})
    wide = "float64" if drawn.dtype == "float64" else "float32"
    for name in ("gate_dtype", "beta_dtype", "state_dtype"):
        if getattr(drawn, name) != wide:
            yield drawn.changed(**{name: wide})
    for name in ("K", "V"):
        for size in SIZES:
            if size < getattr(drawn, name):
                yield drawn.changed(**{name: size})


def _shorter(drawn: Drawn) -> Iterator[Drawn]:
    if drawn.lengths:
        if len(drawn.lengths) == 1:
            yield drawn.changed(lengths=(), host_lengths=False, T=sum(drawn.lengths))
        for half in (drawn.lengths[: len(drawn.lengths) // 2], drawn.lengths[len(drawn.lengths) // 2 :], drawn.lengths[1:]):
            if half and len(half) < len(drawn.lengths):
                yield drawn.changed(lengths=half, T=sum(half) + drawn.padding)
        for by in (2, 4 / 3):
            cut = tuple(int(n / by) for n in drawn.lengths)
            if cut != drawn.lengths:
                yield drawn.changed(lengths=cut, T=sum(cut) + drawn.padding)
        return
    if drawn.B > 1:
        yield drawn.changed(B=1)
    for T in dict.fromkeys((drawn.T // 2, drawn.T * 3 // 4, drawn.T - 1)):
        if 0 < T < drawn.T:
            yield drawn.changed(T=T)


def _without_options(drawn: Drawn) -> Iterator[Drawn]:
    for name in OPTIONS:
        if name not in drawn.options:
            continue
        if name == "use_beta_sigmoid_in_kernel":
            yield drawn.changed(use_beta_sigmoid_in_kernel=None, allow_neg_eigval=None, beta="uniform")
        elif name == "safe_gate":
            yield drawn.changed(safe_gate=None, **({} if "use_gate_in_kernel" in drawn.options else {"lower_bound": None}))
        else:
            yield drawn.changed(**{name: None})
