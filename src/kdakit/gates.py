"""NumPy activations that KDA can apply to its inputs, each with its derivative: gates, l2 normalisation, write strength."""

from __future__ import annotations

import numpy as np

L2_EPSILON = 1e-6


def sigmoid(x):
    """1 / (1 + e^-x) without overflow on either side."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def sigmoid_slope(x):
    """s (1 - s) with s = sigmoid(x). 1 - s is sigmoid(-x), of which subtracting from 1 leaves nothing where s is near 1."""
    return sigmoid(x) * sigmoid(-x)


def softplus(x):
    """log(1 + e^x) without overflow."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _shifted(g, dt_bias):
    """g [.., HV, K] plus dt_bias of HV*K elements."""
    return g if dt_bias is None else g + dt_bias.reshape(g.shape[-2:])


def softplus_gate(g, A_log, dt_bias=None):
    """log-decay = -exp(A_log) * softplus(g + dt_bias)     g [.., HV, K], A_log [HV], dt_bias [HV*K]."""
    return -np.exp(A_log).reshape(-1, 1) * softplus(_shifted(g, dt_bias))


def softplus_gate_backward(g, A_log, dt_bias, d_out):
    """d_g, d_A_log [HV], d_dt_bias [HV, K]."""
    x, a = _shifted(g, dt_bias), np.exp(A_log).reshape(-1, 1)
    d_g = -a * sigmoid(x) * d_out
    d_A_log = _sum_to_heads(-a * softplus(x) * d_out).sum(-1)
    return d_g, d_A_log, _sum_to_heads(d_g)


def bounded_gate(g, A_log, dt_bias, lower_bound):
    """log-decay = lower_bound * sigmoid(exp(A_log) * (g + dt_bias)); exp(A_log) = 1 where A_log is None."""
    a = 1 if A_log is None else np.exp(A_log).reshape(-1, 1)
    return lower_bound * sigmoid(a * _shifted(g, dt_bias))


def bounded_gate_backward(g, A_log, dt_bias, lower_bound, d_out):
    """d_g, d_A_log [HV] or None, d_dt_bias [HV, K]."""
    a = 1 if A_log is None else np.exp(A_log).reshape(-1, 1)
    x = _shifted(g, dt_bias)
    d_argument = lower_bound * sigmoid_slope(a * x) * d_out
    d_A_log = None if A_log is None else _sum_to_heads(d_argument * a * x).sum(-1)
    return d_argument * a, d_A_log, _sum_to_heads(d_argument * a)


def _sum_to_heads(x):
    """[.., HV, K] -> [HV, K]."""
    return x.reshape(-1, *x.shape[-2:]).sum(0)


def l2norm(x):
    """x / sqrt(sum x^2 + 1e-6) over the last axis."""
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + x.dtype.type(L2_EPSILON))


def l2norm_backward(x, d_out):
    """With r = 1/sqrt(sum x^2 + eps) and y = r x:  d_x = r (d_y - y (y . d_y))."""
    r = 1 / np.sqrt((x * x).sum(-1, keepdims=True) + x.dtype.type(L2_EPSILON))
    y = r * x
    return r * (d_out - y * (y * d_out).sum(-1, keepdims=True))


def beta_activation(beta, kind):
    """'given': beta; 'sigmoid': sigmoid(beta); 'double_sigmoid': 2 sigmoid(beta), which allows negative eigenvalues."""
    return beta if kind == "given" else (2 if kind == "double_sigmoid" else 1) * sigmoid(beta)


def beta_activation_backward(beta, kind, d_out):
    if kind == "given":
        return d_out
    return (2 if kind == "double_sigmoid" else 1) * sigmoid_slope(beta) * d_out
