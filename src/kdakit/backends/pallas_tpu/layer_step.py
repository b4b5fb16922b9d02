"""A layer's next tokens between its projections, in one kernel: convolutions, SiLU, gates, norms, the recurrence, the gated norm.

q, k, v = silu(conv(.))        beta = sigmoid(.)        the token recurrence        y = o / sqrt(mean(o^2) + eps) weight sigmoid(gate)

States and windows stay in the pages of a pool, or in a cache's rows, and move on in place. Of drafted tokens nothing moves; a log says how
the states would (`pool.commit`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from kdakit.backends.pallas_tpu import pool
from kdakit.backends.pallas_tpu.tile import Config
from kdakit.problem import Arrays, make_options, make_problem


class Inputs(NamedTuple):
    """What the projections make of N rows of T tokens."""

    q: Any  # [N, T, H, K], before the convolution
    k: Any
    v: Any  # [N, T, HV, V]
    g: Any  # [N, T, HV, K]
    beta: Any  # [N, T, HV]
    gate: Any  # [N, T, HV, V]


class Parameters(NamedTuple):
    A_log: Any  # [HV]
    dt_bias: Any  # [HV * K]
    taps: dict[str, Any]  # {q, k, v: [W, heads, K]}
    biases: dict[str, Any] | None  # {q, k, v: [heads, K]}
    norm: Any  # [V]
    eps: float


class Carried(NamedTuple):
    """What sequences carry, by pages."""

    windows: dict[str, Any]  # {q, k, v: [pages, W - 1, heads, K]}
    states: Any  # [pages, HV, K, V], or [pages, HV, V, K] with state_v_first


class Log(NamedTuple):
    """Of drafted tokens, float32."""

    k: Any  # [N, T, HV, K] normalised
    decay: Any  # [N, T, HV, K]
    u: Any  # [N, T, HV, V]


def takes(states, x: Inputs) -> bool:
    """Whether `step` can run these."""
    problem = _problem(x, None, states, {})
    return x.q.dtype in (jnp.float32, jnp.bfloat16) and x.v.dtype == x.q.dtype and pool.takes(problem, states)


def step(x: Inputs, parameters: Parameters, carried: Carried, pages, config: Config | None, options: dict) -> tuple[Any, Carried]:
    """y [N, T, HV, V], and what the sequences carry on. pages [N], -1: the row outputs zeros. config None: the interpreter's.

    options: allow_neg_eigval, lower_bound, safe_gate, state_v_first.
    """
    problem, arrays, around, config = _call(x, parameters, carried, config, options)
    y, states, windows = pool.decode(problem, arrays, carried.states, pool.Rows(pages, pages), config, around)
    return y, Carried(windows, states)


def draft(x: Inputs, parameters: Parameters, carried: Carried, pages, config: Config | None, options: dict) -> tuple[Any, Log, Any]:
    """y [N, T, HV, V] as `step` has it, the log of its tokens and their Problem; nothing moves."""
    problem, arrays, around, config = _call(x, parameters, carried, config, options)
    y, u, k, decay = pool.verify(problem, arrays, carried.states, pages, config, around)
    return y, Log(k, decay, u), problem


def _call(x: Inputs, p: Parameters, carried: Carried, config: Config | None, options: dict):
    problem = _problem(x, p, carried.states, options)
    arrays = Arrays(x.q, x.k, x.v, x.g, x.beta, p.A_log, p.dt_bias)
    around = pool.Layer(carried.windows, p.taps, p.biases, x.gate, p.norm, p.eps)
    return problem, arrays, around, Config(heads=problem.HV, interpret=True) if config is None else config


def _problem(x: Inputs, p: Parameters | None, states, options: dict):
    rest = dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, output_final_state=True)
    options = dict(options)
    v_first = options.pop("state_v_first", False)
    arrays = Arrays(x.q, x.k, x.v, x.g, x.beta, *((None, None) if p is None else (p.A_log, p.dt_bias)))
    made = make_options(arrays, **rest, use_gate_in_kernel=p is not None, **options)
    return make_problem("recurrent", arrays, made).replace(has_initial_state=True, state_v_first=v_first, state_dtype=states.dtype.name)
