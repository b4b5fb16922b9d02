"""The delta rule between chunks as a stage of its own, forward and backward: for every gated delta rule that can say its chunks so.

v_new = u - w S^T            S' = S Diag(decay) + v_new^T k_decayed            S [V, K], chunks one after the other

w and u are effective keys and values, k_decayed are keys decayed to the chunk's end, decay is that of the whole chunk, per channel: a gate
per head is one that is the same in all of them. grid (B, head blocks, chunks), the last axis in order, S stays in VMEM. The fused kernels
do the same inside; this is for callers who have the rest elsewhere.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdakit.backends.pallas_tpu.heads import dot
from kdakit.backends.pallas_tpu.launch import Operand, lanes, run, shape_of
from kdakit.backends.pallas_tpu.state import next_state, read_state
from kdakit.backends.pallas_tpu.tile import Config


class Stage(NamedTuple):
    """As much of a `Tile` as products and states ask for."""

    C: int
    operand: str


class Walk(NamedTuple):
    """As much of a `Launch` as `run` asks for."""

    config: Config
    grid: tuple[int, int, int]
    table: Any = None


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def delta_rule(w, u, k_decayed, decay, state, config: Config):
    """States before each chunk [NT, B, HV, V, K] float32, v_new [NT, B, HV, C, V] in u's dtype, and the last state [B, HV, V, K] float32.

    w, k_decayed [NT, B, HV, C, K] and u [NT, B, HV, C, V], all bfloat16 or all float32; decay [NT, B, HV, K], state [B, HV, V, K] float32.
    """
    return _forward(w, u, k_decayed, decay, state, config)[0]


def _forward(w, u, k_decayed, decay, state, config: Config):
    V, K = state.shape[-2:]
    w, u, k_decayed = (lanes(x) for x in (w, u, k_decayed))
    decay, state = lanes(decay), _whole(state)
    walk, stage = _plan(w, u, config)
    inputs = {"w": w, "u": u, "k_decayed": k_decayed, "decay": decay, "state": state}
    outputs = {"states": shape_of((w.shape[0], *state.shape), "float32"), "v_new": shape_of(u.shape, u.dtype), "last": state}
    out = _call(walk, partial(_forward_kernel, stage), "delta_rule", inputs, outputs)
    results = out["states"][..., :V, :K], out["v_new"][..., :V], out["last"][..., :V, :K]
    return results, (w, k_decayed, decay, out["states"], out["v_new"])


def _backward(config: Config, saved, cotangents):
    w, k_decayed, decay, states, v_new = saved
    d_states, d_v_new, d_last = cotangents
    V, K = d_last.shape[-2:]
    walk, stage = _plan(w, v_new, config)
    inputs = {"w": w, "k_decayed": k_decayed, "decay": decay, "states": states, "v_new": v_new}
    inputs |= {"d_states": _whole(d_states), "d_v_new": lanes(d_v_new), "d_last": _whole(d_last)}
    outputs = {"d_w": w, "d_u": v_new, "d_k_decayed": w, "d_decay": decay, "d_state": inputs["d_last"]}
    out = _call(walk, partial(_backward_kernel, stage), "delta_rule_backward", inputs, outputs, reverse=True)
    return (
        out["d_w"][..., :K], out["d_u"][..., :V], out["d_k_decayed"][..., :K], out["d_decay"][..., :K], out["d_state"][..., :V, :K]
    )  # fmt: skip


delta_rule.defvjp(_forward, _backward)


def _plan(w, u, config: Config) -> tuple[Walk, Stage]:
    NT, B, HV, C, _ = w.shape
    return Walk(config, (B, -(-HV // config.heads), NT)), Stage(C, "bfloat16" if u.dtype == jnp.bfloat16 else "float32")


def _whole(state):
    """[.., V, K], both made up to whole lanes."""
    return lanes(lanes(state).swapaxes(-1, -2)).swapaxes(-1, -2)


def _call(walk: Walk, kernel, name: str, inputs: dict, outputs: dict, reverse: bool = False) -> dict:
    """Arrays of chunks have 4 or 5 axes, those of sequences names that say so."""
    heads = walk.config.heads

    def operand(name: str, x, value) -> Operand:
        if name in ("state", "last", "d_last", "d_state"):
            return Operand(value, (1, heads, *x.shape[2:]), lambda b, h, s, *_: (b, h, 0, 0))
        rest = x.shape[3:]
        return Operand(value, (1, 1, heads, *rest), lambda b, h, s, *_: (s, b, h, *(0 for _ in rest)))

    given = {n: operand(n, x, x) for n, x in inputs.items()}
    wanted = {n: operand(n, x, shape_of(x.shape, x.dtype)) for n, x in outputs.items()}
    V, K = inputs["state" if "state" in inputs else "d_last"].shape[2:]
    return run(walk, kernel, name, given, wanted, [pltpu.VMEM((heads, V, K), jnp.float32)], reverse=reverse)


def _forward_kernel(stage: Stage, table, inputs: dict, outputs: dict, scratch):
    (state,) = scratch
    step, steps = pl.program_id(2), pl.num_programs(2)

    @pl.when(step == 0)
    def _():
        state[...] = inputs["state"][0]

    heads = range(state.shape[0])  # a stage for all of them, then the next: alone, one would wait for the matrix unit
    S = [state[h] for h in heads]  # [V, K]
    v_new = [inputs["u"][0, 0, h].astype(jnp.float32) - read_state(stage, S[h], inputs["w"][0, 0, h])[0] for h in heads]
    for h in heads:
        outputs["states"][0, 0, h] = S[h]
        outputs["v_new"][0, 0, h] = v_new[h].astype(outputs["v_new"].dtype)
        state[h] = next_state(stage, S[h], inputs["decay"][0, 0, h : h + 1, :], inputs["k_decayed"][0, 0, h], v_new[h])

    @pl.when(step == steps - 1)
    def _():
        outputs["last"][0] = state[...]


def _backward_kernel(stage: Stage, table, inputs: dict, outputs: dict, scratch):
    """With dS' the gradient of the state after the chunk:

    d_u = d_v_new + k_decayed dS'^T      d_w = -d_u S      d_k_decayed = v_new dS'      d_decay = sum_v S dS'
    dS = dS' Diag(decay) + d_states - d_u^T w
    """
    (d_state,) = scratch
    done, steps = pl.program_id(2), pl.num_programs(2)

    @pl.when(done == 0)
    def _():
        d_state[...] = inputs["d_last"][0]

    heads = range(d_state.shape[0])
    w, k, v_new, S = ([inputs[n][0, 0, h] for h in heads] for n in ("w", "k_decayed", "v_new", "states"))
    d_after = [d_state[h] for h in heads]  # dS'
    d_u = [inputs["d_v_new"][0, 0, h].astype(jnp.float32) + dot(stage, k[h], d_after[h], (1, 1)) for h in heads]
    d_k_decayed = [dot(stage, v_new[h], d_after[h]) for h in heads]
    d_w = [-dot(stage, d_u[h], S[h]) for h in heads]
    for h in heads:
        decay = inputs["decay"][0, 0, h : h + 1, :]
        outputs["d_decay"][0, 0, h : h + 1, :] = jnp.sum(S[h] * d_after[h], axis=0, keepdims=True)
        d_state[h] = d_after[h] * decay + inputs["d_states"][0, 0, h] - dot(stage, d_u[h], w[h], (0, 0))
        for name, x in (("d_w", d_w), ("d_u", d_u), ("d_k_decayed", d_k_decayed)):
            outputs[name][0, 0, h] = x[h].astype(outputs[name].dtype)

    @pl.when(done == steps - 1)
    def _():
        outputs["d_state"][0] = d_state[...]
