"""Draft tokens without a state for each: run them once, keep a short log, and replay any accepted prefix of it.

verify    S <- Diag(d) S;  u = beta (v - k^T S);  S <- S + k u^T;  o = q^T S        the log keeps d = e^g, k and u of each token
replay    S <- Diag(d) S;  S <- S + k u^T                                           for the first n tokens
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from kdakit.backends.xla.gate import activate
from kdakit.backends.xla.products import product
from kdakit.problem import Arrays, Problem


class Log(NamedTuple):
    """Of each draft token, in the compute dtype."""

    k: Any  # [N, T, HV, K] normalised
    decay: Any  # [N, T, HV, K]
    u: Any  # [N, T, HV, V]


def verify(problem: Problem, arrays: Arrays, state):
    """o [N, T, HV, V] and the log; state [N, HV, K, V] in the compute dtype."""
    x = activate(problem, arrays)
    decay, written, read = jnp.exp(x.g), [], []
    for t in range(problem.T):
        state = decay[:, t, ..., None] * state
        u = x.beta[:, t, :, None] * (x.v[:, t] - product("...k,...kv->...v", x.k[:, t], state))  # [N, HV, V]
        state = state + x.k[:, t, ..., None] * u[..., None, :]
        written.append(u)
        read.append(product("...k,...kv->...v", x.q[:, t], state))
    u, o = (jnp.stack(a, 1) if a else jnp.zeros_like(x.v) for a in (written, read))
    return o.astype(problem.dtype), Log(x.k, decay, u)


def log_of(problem: Problem, arrays: Arrays, u) -> Log:
    """The log of tokens whose u somebody else has found."""
    x = activate(problem, arrays)
    return Log(x.k, jnp.exp(x.g), u)


def replay(state, log: Log, accepted):
    """state [N, HV, K, V] after the first accepted[n] tokens of row n."""
    for t in range(log.u.shape[1]):
        after = log.decay[:, t, ..., None] * state + log.k[:, t, ..., None] * log.u[:, t, :, None]
        state = jnp.where((accepted > t)[:, None, None, None], after, state)
    return state


def total_decay(log: Log, accepted):
    """[N, HV, K]: how much of the state before is left after the accepted tokens."""
    t = jnp.arange(log.decay.shape[1])
    return jnp.where((t < accepted[:, None])[..., None, None], log.decay, 1).prod(1)
