"""Activations of the inputs in the compute dtype, and their backward: l2norm, gate, beta. Formulas as in kdakit.gates."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kdakit.backends.torch_native.wide import widened
from kdakit.gates import L2_EPSILON
from kdakit.problem import Arrays, Problem


class Activated(NamedTuple):
    q: torch.Tensor  # [B, T, H, K]
    k: torch.Tensor  # [B, T, H, K]
    v: torch.Tensor  # [B, T, HV, V]
    g: torch.Tensor  # [B, T, HV, K], log-decay
    beta: torch.Tensor  # [B, T, HV]


def compute_dtype(problem: Problem) -> torch.dtype:
    return getattr(torch, problem.compute_dtype)


def activate(problem: Problem, arrays: Arrays) -> Activated:
    o, dtype = problem.options, compute_dtype(problem)
    q, k, v, g, beta = (x.to(dtype) for x in arrays[:5])
    if o.l2norm:
        q, k = q * _inverse_norm(q), k * _inverse_norm(k)
    if o.gate != "log_decay":
        x, a = _gate_input(problem, arrays, widened(g))
        g = -a * _softplus(x) if o.gate == "softplus" else o.lower_bound * _sigmoid(a * x)
        g = g.to(dtype)
    if o.beta != "given":
        beta = _sigmoid(beta) * (2 if o.beta == "double_sigmoid" else 1)
    return Activated(q, k, v, g, beta)


def activate_backward(problem: Problem, arrays: Arrays, d: Activated) -> Arrays:
    """Gradients of the inputs from those of the activated ones, in the compute dtype; d_A_log [HV], d_dt_bias [HV, K], widened, or None."""
    o, dtype = problem.options, compute_dtype(problem)
    q, k, _, g, beta = (x.to(dtype) for x in arrays[:5])
    d_q, d_k, d_g, d_beta, d_A_log, d_dt_bias = d.q, d.k, d.g, d.beta, None, None
    if o.l2norm:
        d_q, d_k = _l2norm_backward(q, d_q), _l2norm_backward(k, d_k)
    if o.gate != "log_decay":
        x, a = _gate_input(problem, arrays, widened(g))
        d_g = widened(d_g)  # a few gates may hold all of d_A_log, and its terms cancel
        if o.gate == "softplus":
            d_A_log = d_g * -a * _softplus(x)
            d_g = d_g * -a * _sigmoid(x)
        else:
            d_argument = d_g * (o.lower_bound * _sigmoid_slope(a * x))
            d_A_log = d_argument * a * x
            d_g = d_argument * a
        d_A_log = d_A_log.sum((0, 1, 3)) if problem.has_A_log else None
        d_dt_bias = d_g.sum((0, 1)) if problem.has_dt_bias else None
        d_g = d_g.to(dtype)
    if o.beta != "given":
        d_beta = d_beta * (_sigmoid_slope(beta) * (2 if o.beta == "double_sigmoid" else 1))
    return Arrays(d_q, d_k, d.v, d_g, d_beta, d_A_log, d_dt_bias)


# torch.sigmoid and F.softplus round otherwise in the last places of a tensor, which a CPU takes one by one: a sequence would depend on how
# many lie beside it. What they are made of here gives the same bits anywhere.


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def _softplus(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def _sigmoid_slope(x: torch.Tensor) -> torch.Tensor:
    return _sigmoid(x) * _sigmoid(-x)


def _inverse_norm(x):
    return torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPSILON)


def _l2norm_backward(x, d_out):
    """With r = 1/sqrt(sum x^2 + eps) and y = r x:  d_x = r (d_y - y (y . d_y))."""
    r = _inverse_norm(x)
    y = r * x
    return r * (d_out - y * (y * d_out).sum(-1, keepdim=True))


def _gate_input(problem, arrays, g):
    """g + dt_bias [B, T, HV, K] and exp(A_log) [HV, 1], or 1."""
    if arrays.dt_bias is not None:
        g = g + arrays.dt_bias.to(g.dtype).reshape(problem.HV, problem.K)
    a = 1.0 if arrays.A_log is None else arrays.A_log.to(g.dtype).reshape(problem.HV, 1).exp()
    return g, a
