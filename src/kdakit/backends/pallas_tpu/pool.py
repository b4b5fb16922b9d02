"""Decoding over a pool of states [pages, HV, K, V]: each row's tokens go on from the page that the row names, and leave states in pages.

grid (head blocks, rows), rows in order. The pool stays in HBM, one buffer in and out. While a row is computed the next one's state is on
its way in and the last one's on its way out: nothing is gathered or scattered around the kernel. A row without a page moves nothing, and
outputs zeros. A layer's step also carries the windows [pages, W - 1, heads, K] of its convolutions along.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdakit.backends.pallas_tpu.launch import gate_rows, interpret_mode, lanes
from kdakit.backends.pallas_tpu.spread import selections
from kdakit.backends.pallas_tpu.tile import Config, Tile, make_tile, padded
from kdakit.backends.pallas_tpu.token import advance, convolved, gated_norm, make_token, replay
from kdakit.problem import Arrays, Problem

TOKENS = 8  # a row, at most
ROOM = 10 * 2**20  # bytes of VMEM for states: two on their way in, two on their way out
LIMIT = 15 * 2**20  # of VMEM in all, which every chip has
NAMES = ("q", "k", "v")
SHOWN: frozenset[str] = frozenset()  # device kinds on which random problems were right: `kdakit tpu-report` says so


class Rows(NamedTuple):
    """Pages of N rows, int32. No page may be named by two rows; -1 is nobody's."""

    source: Any  # [N]: where a row's state comes from; nobody's: the row outputs zeros and writes nothing
    target: Any  # [N]: where its last state goes; or [N, T], that after each token. Nobody's: it goes nowhere


class Layer(NamedTuple):
    """What a layer has around the recurrence; its q, k and v are inputs of convolutions."""

    windows: dict[str, Any]  # {name: [pages, W - 1, heads, K]}: what the convolutions saw last; moves along with the states
    taps: dict[str, Any]  # {name: [W, heads, K]}
    biases: dict[str, Any] | None  # {name: [heads, K]}
    gate: Any  # [N, T, HV, V]
    weight: Any  # [V], of the norm
    eps: float


def fits(problem: Problem, rows_of_state: int, itemsize: int) -> int | None:
    """Heads a grid step: as many as there is room for. None: a call that this kernel does not take."""
    if problem.varlen or not 1 <= problem.T <= TOKENS or problem.B == 0:
        return None
    each = 4 * itemsize * -(-rows_of_state // 8) * 8 * padded(problem.V if not problem.options.state_v_first else problem.K)
    group = problem.group
    for heads in sorted((h for h in range(1, problem.HV + 1) if problem.HV % h == 0), reverse=True):
        whole = heads == problem.HV or (heads % 8 == 0 and heads % group == 0 and heads // group % 8 == 0)
        if whole and heads * each <= ROOM:
            return heads
    return None


def takes(problem: Problem, states) -> bool:
    """Whether `decode` can run such a call over such states."""
    return states.dtype in (jnp.float32, jnp.bfloat16) and fits(problem, states.shape[2], states.dtype.itemsize) is not None


def unshown(device: str) -> str | None:
    """Why nobody has seen this kernel right there yet, which 'auto' waits for."""
    if device != "tpu":
        return "runs in the TPU interpreter here"
    kind = jax.devices("tpu")[0].device_kind
    return None if kind in SHOWN else f"no {kind} has shown the kernels over pools to be right yet; name backend='pallas_tpu' to use them"


def decode(problem: Problem, arrays: Arrays, states, rows: Rows, config: Config, layer: Layer | None = None):
    """o [N, T, HV, V], the states and, with `layer`, its windows; both are in the memory of those given, where the caller gives it away."""
    heads = fits(problem, states.shape[2], states.dtype.itemsize)
    if heads is None:
        raise ValueError(f"a pool's decode takes 1 .. {TOKENS} tokens a row without cu_seqlens, got {problem}")
    tile = make_tile(problem, replace(config, heads=heads), problem.T)
    kind, eps = ("decode", 0.0) if layer is None else ("layer_decode", layer.eps)
    form = Form(kind, tile, problem.group, rows.target.ndim == 2, eps)
    inputs, specs = _inputs(form, problem, arrays, layer)
    pools = {"state": states} | ({} if layer is None else {f"{n}_window": layer.windows[n] for n in NAMES})
    found = _call(form, inputs, specs, pools, rows, {"o": (tile.dtype, problem.V)}, config)
    o = found["o"].astype(problem.dtype)
    return (o, found["state"]) if layer is None else (o, found["state"], {n: found[f"{n}_window"] for n in NAMES})


def verify(problem: Problem, arrays: Arrays, states, source, config: Config):
    """o [N, T, HV, V], and u = beta (v - S^T k) [N, T, HV, V] float32 of draft tokens; nothing is written."""
    heads = fits(problem, states.shape[2], states.dtype.itemsize)
    tile = make_tile(problem, replace(config, heads=heads), problem.T)
    form = Form("verify", tile, problem.group, False)
    inputs, specs = _inputs(form, problem, arrays, None)
    results = {"o": (tile.dtype, problem.V), "u": ("float32", problem.V)}
    found = _call(form, inputs, specs, {"state": states}, Rows(source, source), results, config)
    return found["o"].astype(problem.dtype), found["u"]


def commit(problem: Problem, k, decay, u, states, source, accepted, config: Config):
    """The states after the first accepted[n] tokens of drafts: S <- Diag(decay) S + k u^T;  k, decay [N, T, HV, K], u [N, T, HV, V]."""
    problem = problem.replace(dtype="float32", H=problem.HV)
    heads = fits(problem, states.shape[2], states.dtype.itemsize)
    form = Form("commit", make_tile(problem, replace(config, heads=heads), problem.T), 1, False)
    inputs = {"k": lanes(k), "decay": lanes(decay), "u": u}
    specs = {n: _token_spec(problem.T, heads, x.shape[-1]) for n, x in inputs.items()}
    inputs["selections"], specs["selections"] = _selections(False)
    source = jnp.where(accepted > 0, source, -1)
    return _call(form, inputs, specs, {"state": states}, Rows(source, source), {}, config, accepted)["state"]


def _call(form: Form, inputs: dict, specs: dict, pools: dict, rows: Rows, results: dict, config: Config, counts=None) -> dict:
    """Results [N, T, HV, width] by name, and the pools where they are written. `counts` [N]: tokens of each row, all if None."""
    N, T, heads, HV = rows.source.shape[0], form.tile.C, form.tile.heads, pools["state"].shape[1]
    written = {} if form.kind == "verify" else pools
    shapes = [jax.ShapeDtypeStruct((N, T, HV, width), jnp.dtype(dtype)) for dtype, width in results.values()]
    shapes += [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in written.values()]
    anywhere, scratch = pl.BlockSpec(memory_space=pl.ANY), _scratch(form, T, pools)
    out_specs = [*(_token_spec(T, heads, width) for _, width in results.values()), *(anywhere for _ in written)]
    counts = jnp.full_like(rows.source, T) if counts is None else counts
    scalars = [x.astype(jnp.int32).reshape(-1) for x in (*rows, counts)]
    call = pl.pallas_call(
        partial(_bound, form, (list(inputs), list(pools), list(results), list(scratch))), name=f"kda_{form.kind}",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars), grid=(HV // heads, N), in_specs=[*specs.values(), *(anywhere for _ in pools)],
            out_specs=out_specs, scratch_shapes=list(scratch.values()),
        ),
        out_shape=shapes, input_output_aliases={len(scalars) + len(inputs) + n: len(results) + n for n in range(len(written))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=LIMIT),
        interpret=interpret_mode(config),
    )  # fmt: skip
    return dict(zip([*results, *written], call(*scalars, *inputs.values(), *pools.values()), strict=True))


@dataclass(frozen=True)
class Form:
    """All that is static in the kernel."""

    kind: str  # decode, layer_decode, verify or commit
    tile: Tile
    group: int  # value heads that share a key head
    every: bool  # the state after each token has a page of its own
    eps: float = 0.0  # of a layer's norm

    @property
    def layered(self) -> bool:
        return self.kind == "layer_decode"

    def heads(self, name: str) -> int:
        """Of q and k, or of v, in a grid step."""
        return self.tile.heads if name == "v" else self.tile.heads // self.group


def _inputs(form: Form, problem: Problem, arrays: Arrays, layer: Layer | None) -> tuple[dict, dict]:
    """Arrays and their blocks, by name."""
    t, T = form.tile, problem.T
    found = {"q": lanes(arrays.q), "k": lanes(arrays.k), "v": _widened(arrays.v), "g": lanes(arrays.g)}
    specs = {n: _token_spec(T, form.heads("v" if n == "g" else n), x.shape[-1]) for n, x in found.items()}
    beta = arrays.beta.astype(jnp.float32).reshape(problem.B, T, -1, t.heads)
    found["beta"] = beta.swapaxes(1, 2)  # [N, blocks, T, heads]
    specs["beta"] = pl.BlockSpec((1, 1, T, t.heads), lambda h, n, *_: (n, h, 0, 0))
    found["selections"], specs["selections"] = _selections(t.dtype == "bfloat16")
    if t.gate != "log_decay":
        found["gate"] = gate_rows(problem, t, arrays).swapaxes(0, 1)  # [2, HV, K]
    if layer is not None:
        wide = {n: lanes if n != "v" else _widened for n in NAMES}
        found |= {f"{n}_taps": wide[n](layer.taps[n].astype(jnp.float32)) for n in NAMES}
        found |= {} if layer.biases is None else {f"{n}_bias": wide[n](layer.biases[n].astype(jnp.float32))[None] for n in NAMES}
        found["out_gate"], specs["out_gate"] = _widened(layer.gate), _token_spec(T, t.heads, problem.V)
        found["weight"] = layer.weight.astype(jnp.float32)[None]
        specs["weight"] = pl.BlockSpec(found["weight"].shape, lambda h, n, *_: (0, 0))
    for name, x in found.items():  # [.., heads, K]: parameters of heads
        if name not in specs:
            heads = form.heads("q" if name[:2] in ("q_", "k_") else "v")
            specs[name] = pl.BlockSpec((x.shape[0], heads, x.shape[-1]), lambda h, n, *_: (0, h, 0))
    return found, {name: specs[name] for name in found}


def _scratch(form: Form, T: int, pools: dict) -> dict:
    state, t = pools["state"], form.tile
    own = (t.heads, *state.shape[2:])
    found = {"states": pltpu.VMEM((4, *own), state.dtype)}
    if T > 1 and state.dtype != jnp.float32:
        found["work"] = pltpu.VMEM(own, jnp.float32)
    for n in NAMES if form.layered else ():
        _, before, _, width = pools[f"{n}_window"].shape
        found[f"{n}_windows"] = pltpu.VMEM((4, before, form.heads(n), width), pools[f"{n}_window"].dtype)
        found[f"{n}_line"] = pltpu.VMEM((before + T, form.heads(n), width), jnp.float32)
    return found | {"arrived": pltpu.SemaphoreType.DMA((len(pools), 2)), "left": pltpu.SemaphoreType.DMA((len(pools), 2)),
                    "leaving": pltpu.SMEM((2,), jnp.int32), "count": pltpu.SMEM((1,), jnp.int32)}  # fmt: skip


def _selections(exact: bool) -> tuple:
    found = jnp.asarray(selections(exact), jnp.bfloat16)
    return found, pl.BlockSpec(found.shape, lambda h, n, *_: (0, 0, 0))


def _token_spec(T: int, heads: int, width: int):
    """[N, T, HV, width]."""
    return pl.BlockSpec((1, T, heads, width), lambda h, n, *_: (n, 0, h, 0))


def _widened(x):
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x


def _bound(form: Form, names, source, target, counts, *refs):
    """The kernel, its refs by name. Pools that are written are also read through the outputs, which are the inputs' own memory."""
    inputs, pools, results, scratch = names
    written = [] if form.kind == "verify" else pools
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
    if form.every or form.kind == "verify":
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
    if step.form.kind == "verify":
        step.out["u"][0, t] = u


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
