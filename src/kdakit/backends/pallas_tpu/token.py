"""One token of several heads, from their states to the next: the token recurrence as decoding wants it.

    S1 = Diag(e^g) S        u = beta (v - S1^T k)        S' = S1 + k u^T        o = scale (S1^T q + (q . k) u)

Norms of q and k are numbers of a head, so they multiply rows [1, V] and not states: r_k = 1 / |k|, r_q = scale / |q|. Decay, k and q reach
the states as columns (`spread`). Heads meet in that product, so what is not finite is taken out of it and comes back through r_k and r_q.

Around the recurrence, where a layer's step is asked for: y = silu(conv(x)) of q, k and v before it, the gated norm after it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from kdakit.backends.pallas_tpu.gate import activate_beta, log_decay
from kdakit.backends.pallas_tpu.heads import column, row_sums
from kdakit.backends.pallas_tpu.spread import TOGETHER, columns, transposed
from kdakit.backends.pallas_tpu.tile import Tile
from kdakit.gates import L2_EPSILON


class Token(NamedTuple):
    """Of one token, float32; rows are heads."""

    decay: Any  # [heads, K]
    k: Any  # [heads, K], finite
    q: Any  # [heads, K], finite
    v: Any  # [heads, V]
    beta: Any  # [heads, 1]
    r_k: Any  # [heads, 1], NaN where k or the decay is not finite
    r_q: Any  # [heads, 1], NaN where q is not finite
    qk: Any  # [heads, 1]: q . k


def make_token(tile: Tile, q, k, v, g, beta, gate) -> Token:
    """q, k [key heads, K], v [heads, V], g [heads, K] float32; beta [1, heads]; gate None, or a and bias [heads, K] each."""
    group = v.shape[0] // q.shape[0]
    decay = jnp.exp(log_decay(tile, g, *((None, None) if gate is None else gate)))
    r_q, r_k = (_inverse_norm(tile, x) for x in (q, k))
    bad_q, bad_k, bad_decay = (_not_finite(x) for x in (q, k, decay))
    q, k, decay = (jnp.where(jnp.isfinite(x), x, 0.0) for x in (q, k, decay))
    r_q, r_k = jnp.where(bad_q, jnp.nan, r_q * tile.scale), jnp.where(bad_k, jnp.nan, r_k)
    qk = row_sums(q * k)
    q, k, r_q, r_k, qk = (_repeated(x, group) for x in (q, k, r_q, r_k, qk))
    return Token(decay, k, q, v, column(activate_beta(tile, beta)), jnp.where(bad_decay, jnp.nan, r_k), r_q, qk)


def advance(tile: Tile, x: Token, E, read, write) -> tuple[Any, Any]:
    """o and u [heads, V] float32. read(h) -> S [K, V] float32 of head h; write(h, S) takes the next. E: `spread.selections`."""
    heads, outputs, corrections = x.v.shape[0], [], []
    for first in range(0, heads, TOGETHER):
        own = Token(*(a[first : first + TOGETHER] for a in x))
        X = transposed(own.decay, own.k, own.q, tile.dtype == "bfloat16", E.shape[1])
        for h in range(own.v.shape[0]):
            row = slice(h, h + 1)
            S = read(first + h)
            decay, k, q = columns(X, E[h], *S.shape)
            S = S * decay
            corrections.append(own.beta[row] * (own.v[row] - own.r_k[row] * jnp.sum(S * k, axis=0, keepdims=True)))
            u = own.r_k[row] * corrections[-1]  # k's norm is in neither of its columns
            outputs.append(own.r_q[row] * (jnp.sum(S * q, axis=0, keepdims=True) + own.qk[row] * u))
            write(first + h, S + k * u)
    return jnp.concatenate(outputs, axis=0), jnp.concatenate(corrections, axis=0)


def replay(decay, k, u, E, read, write) -> None:
    """S <- Diag(decay) S + k u^T;  decay, k [heads, K], u [heads, V]. What is not finite in a head's decay or k makes its state NaN."""
    bad = _not_finite(decay) | _not_finite(k)
    decay, k = (jnp.where(jnp.isfinite(x), x, 0.0) for x in (decay, k))
    u = jnp.where(bad, jnp.nan, u)
    for first in range(0, u.shape[0], TOGETHER):
        own = [x[first : first + TOGETHER] for x in (decay, k)]
        X = transposed(*own, jnp.zeros_like(own[1]), False, E.shape[1])
        for h in range(own[0].shape[0]):
            S = read(first + h)
            columns_d, columns_k, _ = columns(X, E[h], *S.shape)
            write(first + h, S * columns_d + columns_k * u[first + h : first + h + 1])


def convolved(taps, bias, line: list, dtype):
    """silu(sum_j taps[j] line[j] + bias), rounded as a layer's own convolution rounds: [heads, K] float32."""
    y = sum(tap * x for tap, x in zip(taps, line, strict=True))
    y = y if bias is None else y + bias
    return (y * _sigmoid(y)).astype(dtype).astype(jnp.float32)


def gated_norm(o, gate, weight, eps: float, dtype):
    """o / sqrt(mean(o^2) + eps) weight sigmoid(gate);  o, gate [heads, V], weight [1, V]."""
    o = o.astype(dtype).astype(jnp.float32)
    return o * lax.rsqrt(row_sums(o * o) / o.shape[1] + eps) * weight * _sigmoid(gate)


def _sigmoid(x):
    return 1.0 / (1.0 + jnp.exp(-x))


def _inverse_norm(tile: Tile, x):
    return lax.rsqrt(row_sums(x * x) + L2_EPSILON) if tile.l2norm else jnp.ones((x.shape[0], 1), jnp.float32)


def _not_finite(x):
    """[heads, 1]."""
    return jnp.max(jnp.where(jnp.isfinite(x), 0.0, 1.0), axis=1, keepdims=True) > 0


def _repeated(x, group: int):
    """[key heads, W] -> [heads, W]: each row as often as value heads share it."""
    if group == 1:
        return x
    rows = [jnp.broadcast_to(x[i : i + 1], (group, x.shape[1])) for i in range(x.shape[0])]
    return jnp.concatenate(rows, axis=0)
