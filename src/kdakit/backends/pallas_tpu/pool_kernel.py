"""The kernel of a pool: one row of one block of heads, its states on their way in and out while others are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdakit.backends.pallas_tpu.tile import Tile
from kdakit.backends.pallas_tpu.token import advance, convolved, gated_norm, make_token, replay

NAMES = ("q", "k", "v")


@dataclass(frozen=True)
class Form:
    """All that is static in the kernel."""

    kind: str  # decode, verify, commit; layer_decode, layer_verify
    tile: Tile
    group: int  # value heads that share a key head
    every: bool  # the state after each token has a page of its own
    eps: float = 0.0  # of a layer's norm

    @property
    def layered(self) -> bool:
        return self.kind.startswith("layer_")

    @property
    def drafts(self) -> bool:
        """Whether nothing moves."""
        return self.kind.endswith("verify")

    def heads(self, name: str) -> int:
        """Of q and k, or of v, in a grid step."""
        return self.tile.heads if name == "v" else self.tile.heads // self.group


def bound(form: Form, names, source, target, counts, *refs):
    """The kernel, its refs by name. Pools that are written are also read through the outputs, which are the inputs' own memory."""
    inputs, pools, results, scratch = names
    written = [] if form.drafts else pools
    order = [*inputs, *(f"{n} before" for n in pools), *results, *written, *scratch]
    found = dict(zip(order, refs, strict=True))
    take = lambda names: {n: found[n] for n in names}
    held = take(written) or {n: found[f"{n} before"] for n in pools}
    _kernel(Step(form, pl.program_id(0), source, target, counts, take(inputs), held, take(results), take(scratch)))


class Step(NamedTuple):
    """One row of one block of heads. Buffers 0 and 1 hold what arrives, rows in turns; 2 and 3 what leaves, states in turns."""

    form: Form
    block: Any
    source: Any
    target: Any
    counts: Any
    inputs: dict
    pools: dict  # in HBM
    out: dict
    kept: dict

    def copies(self, page, buffer, inwards: bool) -> list:
        """Of all that a sequence carries, between its page and a buffer."""
        found, block = [], self.block
        for i, (name, pool) in enumerate(self.pools.items()):
            local = self.kept[f"{name}s"].at[buffer]
            if name == "state":
                heads = self.form.tile.heads
                there = pool.at[page, pl.ds(block * heads, heads)]
            else:
                heads = self.form.heads(name[0])
                whole = pool.shape[2] == heads
                there = pool.at[page] if whole else pool.at[page, :, pl.ds(pl.multiple_of(block * heads, 8), heads)]
            semaphore = self.kept["arrived" if inwards else "left"].at[i, lax.rem(buffer, 2)]
            found.append(pltpu.make_async_copy(*((there, local) if inwards else (local, there)), semaphore))
        return found

    def call(self, row) -> None:
        """Begin to copy what a row carries in."""
        for copy in self.copies(self.source[row], lax.rem(row, 2), True):
            copy.start()

    def leave(self, buffer) -> None:
        """Wait until a buffer has left."""
        leaving = self.kept["leaving"]

        @pl.when(leaving[buffer - 2] == 1)
        def _():
            for copy in self.copies(0, buffer, False):
                copy.wait()
            leaving[buffer - 2] = 0

    def send(self, page, buffer) -> None:
        """Begin to copy a buffer out, if the page is somebody's."""

        @pl.when(page >= 0)
        def _():
            for copy in self.copies(page, buffer, False):
                copy.start()
            self.kept["leaving"][buffer - 2] = 1


def _kernel(step: Step) -> None:
    row, rows = pl.program_id(1), pl.num_programs(1)
    following = jnp.minimum(row + 1, rows - 1)

    @pl.when(row == 0)
    def _():
        step.kept["count"][0] = 0
        for n in range(2):
            step.kept["leaving"][n] = 0
        pl.when(step.source[0] >= 0)(lambda: step.call(0))

    pl.when((row + 1 < rows) & (step.source[following] >= 0))(lambda: step.call(following))

    @pl.when(step.source[row] >= 0)
    def _():
        for copy in step.copies(step.source[row], lax.rem(row, 2), True):
            copy.wait()
        _row(step, row)

    @pl.when(step.source[row] < 0)
    def _():
        for ref in step.out.values():
            ref[...] = jnp.zeros(ref.shape, ref.dtype)

    @pl.when(row == rows - 1)
    def _():
        step.leave(2)
        step.leave(3)


def _row(step: Step, row) -> None:
    """The tokens of one row."""
    form, kept, T = step.form, step.kept, step.form.tile.C
    states, count, arrived = kept["states"], kept["count"][0], lax.rem(row, 2)
    if form.layered:
        _lay_lines(step, arrived, T)

    def token(t) -> None:
        turn = count + t if form.every else count
        buffer = 2 + lax.rem(turn, 2)
        if form.every or T == 1:
            step.leave(buffer)
        else:
            pl.when(t == 0)(lambda: step.leave(buffer))
        if "work" in kept:
            _token(step, t, kept["work"], kept["work"])
            if form.every:
                _store(kept["work"], states.at[buffer])
        else:
            before = 2 + lax.rem(turn + 1, 2) if form.every else buffer
            from_buffer = arrived if T == 1 else jnp.where(t == 0, arrived, before)
            _token(step, t, states.at[from_buffer], states.at[buffer])
        if form.every:
            step.send(step.target[row * T + t], buffer)

    if "work" in kept:
        _store(states.at[arrived], kept["work"])
    token(0) if T == 1 else lax.fori_loop(0, step.counts[row] if form.kind == "commit" else T, lambda t, _: token(t), None)
    if form.every:
        kept["count"][0] = count + T
    if form.every or form.drafts:
        return
    buffer = 2 + lax.rem(count, 2)
    if "work" in kept:
        _store(kept["work"], states.at[buffer])
    if form.layered:
        _move_windows(step, buffer, T)
    step.send(step.target[row], buffer)
    kept["count"][0] = count + 1


def _token(step: Step, t, before, after) -> None:
    """Token t, from the states `before` to those `after`, [heads, ..] refs, perhaps the same."""
    tile, x = step.form.tile, step.inputs

    def read(h):
        S = before[h].astype(jnp.float32)
        return S.T if tile.state_v_first else S

    def write(h, S):
        after[h] = (S.T if tile.state_v_first else S).astype(after.dtype)

    if step.form.kind == "commit":
        replay(*(x[n][0, t].astype(jnp.float32) for n in ("decay", "k", "u")), x["selections"], read, write)
        return
    if step.form.layered:
        q, k, v = (_convolved(step, name, t) for name in NAMES)
    else:
        q, k, v = (x[name][0, t].astype(jnp.float32) for name in NAMES)
    gate = (x["gate"][0], x["gate"][1]) if "gate" in x else None
    made = make_token(tile, q, k, v, x["g"][0, t].astype(jnp.float32), x["beta"][0, 0, pl.ds(t, 1), :], gate)
    o, u = advance(tile, made, x["selections"], read, write)
    ref = step.out["o"]
    if step.form.layered:
        o = gated_norm(o, x["out_gate"][0, t].astype(jnp.float32), x["weight"][...], step.form.eps, ref.dtype)
    ref[0, t] = o.astype(ref.dtype)
    if step.form.drafts:
        step.out["u"][0, t] = u
    if step.form.kind == "layer_verify":  # nobody outside knows what the convolutions made
        ref = step.out["log_k"]
        ref[0, t] = (made.k * made.r_k)[:, : ref.shape[3]]
        step.out["log_decay"][0, t] = made.decay[:, : ref.shape[3]]


def _lay_lines(step: Step, arrived, T: int) -> None:
    """What the convolutions saw before, and the row's own tokens behind it."""
    for name in NAMES:
        window, line, x = step.kept[f"{name}_windows"], step.kept[f"{name}_line"], step.inputs[name]
        before, width = window.shape[1], line.shape[2]
        for j in range(before):
            line[j] = window[arrived, j].astype(jnp.float32)
        for t in range(T):
            line[before + t] = x[0, t, :, :width].astype(jnp.float32)


def _move_windows(step: Step, buffer, T: int) -> None:
    for name in NAMES:
        window, line = step.kept[f"{name}_windows"], step.kept[f"{name}_line"]
        for j in range(window.shape[1]):
            window[buffer, j] = line[T + j].astype(window.dtype)


def _convolved(step: Step, name: str, t):
    """[heads, K] of token t, with K as the recurrence wants it."""
    line, taps = step.kept[f"{name}_line"], step.inputs[f"{name}_taps"]
    seen, width = [line[t + j] for j in range(taps.shape[0])], line.shape[2]
    bias = step.inputs[f"{name}_bias"][0, :, :width] if f"{name}_bias" in step.inputs else None
    y = convolved([taps[j, :, :width] for j in range(taps.shape[0])], bias, seen, step.out["o"].dtype)
    missing = taps.shape[2] - width
    return y if missing == 0 else jnp.concatenate([y, jnp.zeros((y.shape[0], missing), jnp.float32)], axis=1)


def _store(source, target) -> None:
    """All heads of a ref to another, in its dtype."""
    for h in range(source.shape[0]):
        target[h] = source[h].astype(target.dtype)
