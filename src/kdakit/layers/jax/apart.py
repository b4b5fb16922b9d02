"""Attention over sequences that share an array: what is not finite in one of them reaches no other, neither forward nor backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def attend_apart(attend: Callable[..., Any], q, k, v, mask):
    """attend(q, k, v, mask) of q [B, T, H, D], k and v [B, M, HKV, D], mask [B, T, M].

    0 * NaN, a weight that is masked times a value, would be a NaN for everybody: so zeros take the place of what is not finite, and NaN
    comes out for those who see it. The gradient likewise: one of o that is not finite reaches what its token sees.
    """
    good = [_finite(a) for a in (q, k, v)]  # [B, T], [B, M] twice
    q, k, v = (_where(own, a, 0) for own, a in zip(good, (q, k, v), strict=True))
    q, k, v, mark = _enter(q, k, v, mask)
    spoiled = (mask & ~(good[1] & good[2])[:, None]).any(-1) | ~good[0]
    return _leave(attend(q, k, v, mask), mark, spoiled)


def _finite(x):
    """[B, T] of x [B, T, H, D]."""
    return jnp.isfinite(x).all((-2, -1))


def _where(which, x, y):
    """which [B, T], one of x and y [B, T, H, D]."""
    return jnp.where(which[..., None, None], x, y)


@jax.custom_vjp
def _enter(q, k, v, mask):
    """q, k and v as they are, and a mark [B, T] whose gradient says which tokens' gradients were not finite."""
    return q, k, v, jnp.zeros_like(q[..., 0, 0])


def _enter_forward(q, k, v, mask):
    return _enter(q, k, v, mask), mask


def _enter_backward(mask, cotangents):
    d_q, d_k, d_v, d_mark = cotangents
    bad = d_mark != 0
    seen = (mask & bad[..., None]).any(-2)  # [B, M]
    return _where(bad, jnp.nan, d_q), _where(seen, jnp.nan, d_k), _where(seen, jnp.nan, d_v), None


_enter.defvjp(_enter_forward, _enter_backward)


@jax.custom_vjp
def _leave(o, mark, spoiled):
    """o, NaN where `spoiled` [B, T]; of its gradient what is finite elsewhere, the rest goes to the mark."""
    return _where(spoiled, jnp.nan, o)


def _leave_forward(o, mark, spoiled):
    return _leave(o, mark, spoiled), spoiled


def _leave_backward(spoiled, d_o):
    good = _finite(d_o) & ~spoiled
    return _where(good, d_o, 0), (~good).astype(d_o.dtype), None


_leave.defvjp(_leave_forward, _leave_backward)
