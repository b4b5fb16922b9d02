"""Decoding over a pool of states [pages, HV, K, V]: each row's tokens go on from the page that the row names, and leave states in pages.

grid (head blocks, rows), rows in order. The pool stays in HBM, one buffer in and out. While a row is computed the next one's state is on
its way in and the last one's on its way out: nothing is gathered or scattered around the kernel. A row without a page moves nothing, and
outputs zeros. A layer's step also carries the windows [pages, W - 1, heads, K] of its convolutions along.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdakit.backends.pallas_tpu.interpreter import varying_call
from kdakit.backends.pallas_tpu.launch import gate_rows, lanes
from kdakit.backends.pallas_tpu.pool_kernel import NAMES, Form, bound
from kdakit.backends.pallas_tpu.spread import selections
from kdakit.backends.pallas_tpu.tile import Config, make_tile, padded
from kdakit.problem import Arrays, Problem

TOKENS = 8  # a row, at most
ROOM = 10 * 2**20  # bytes of VMEM for states: two on their way in, two on their way out
LIMIT = 15 * 2**20  # of VMEM in all, which every chip has
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
    found = _call(form, inputs, specs, _pools(states, layer), rows, {"o": (tile.dtype, problem.V)}, config)
    o = found["o"].astype(problem.dtype)
    return (o, found["state"]) if layer is None else (o, found["state"], {n: found[f"{n}_window"] for n in NAMES})


def verify(problem: Problem, arrays: Arrays, states, source, config: Config, layer: Layer | None = None):
    """o [N, T, HV, V], and u = beta (v - S^T k) [N, T, HV, V] float32 of draft tokens; nothing is written.

    With `layer` also k as normalised and the decay [N, T, HV, K] float32, which with u are what `commit` asks for."""
    heads = fits(problem, states.shape[2], states.dtype.itemsize)
    tile = make_tile(problem, replace(config, heads=heads), problem.T)
    form = Form("verify", tile, problem.group, False) if layer is None else Form("layer_verify", tile, problem.group, False, layer.eps)
    inputs, specs = _inputs(form, problem, arrays, layer)
    results = {"o": (tile.dtype, problem.V), "u": ("float32", problem.V)}
    results |= {} if layer is None else dict.fromkeys(("log_k", "log_decay"), ("float32", problem.K))
    found = _call(form, inputs, specs, _pools(states, layer), Rows(source, source), results, config)
    o, u = found["o"].astype(problem.dtype), found["u"]
    return (o, u) if layer is None else (o, u, found["log_k"], found["log_decay"])


def _pools(states, layer: Layer | None) -> dict:
    """All that sequences carry."""
    return {"state": states} | ({} if layer is None else {f"{n}_window": layer.windows[n] for n in NAMES})


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
    written = {} if form.drafts else pools
    shapes = [jax.ShapeDtypeStruct((N, T, HV, width), jnp.dtype(dtype)) for dtype, width in results.values()]
    shapes += [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in written.values()]
    anywhere, scratch = pl.BlockSpec(memory_space=pl.ANY), _scratch(form, T, pools)
    out_specs = [*(_token_spec(T, heads, width) for _, width in results.values()), *(anywhere for _ in written)]
    counts = jnp.full_like(rows.source, T) if counts is None else counts
    scalars = [x.astype(jnp.int32).reshape(-1) for x in (*rows, counts)]
    make = lambda shapes, mode: pl.pallas_call(
        partial(bound, form, (list(inputs), list(pools), list(results), list(scratch))), name=f"kda_{form.kind}",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars), grid=(HV // heads, N), in_specs=[*specs.values(), *(anywhere for _ in pools)],
            out_specs=out_specs, scratch_shapes=list(scratch.values()),
        ),
        out_shape=shapes, input_output_aliases={len(scalars) + len(inputs) + n: len(results) + n for n in range(len(written))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=LIMIT),
        interpret=mode,
    )  # fmt: skip
    found = varying_call(make, shapes, [*scalars, *inputs.values(), *pools.values()], config)
    return dict(zip([*results, *written], found, strict=True))


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
