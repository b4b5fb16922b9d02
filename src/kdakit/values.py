"""Rules about the values of a call, for whoever can see them: NumPy arrays in, an error for the first element that breaks one.

Rules about shapes, dtypes and options are in `kdakit.problem`.
"""

from __future__ import annotations

import numpy as np

from kdakit.problem import DIFFERENTIABLE, Arrays, Problem


def check_same_cu_seqlens(values: np.ndarray, host: np.ndarray) -> None:
    """Both copies, for whoever can see them: a plan made of one and kernels that read the other would not fit."""
    different = np.flatnonzero(values != host)
    if different.size:
        n = different[0]
        raise ValueError(f"cu_seqlens_cpu must equal cu_seqlens, got cu_seqlens_cpu[{n}] = {host[n]} and cu_seqlens[{n}] = {values[n]}")


def check_values(problem: Problem, values: Arrays) -> None:
    """KDAKIT_CHECKS=1: the values of a call, as NumPy arrays; raises for the first element, in C order, that breaks a rule.

    All inputs are finite. A log-decay is at most 0. Keys that nobody normalises have beta |k|^2 <= 2: else I - beta k k^T has an eigenvalue
    below -1, and every such token makes the state larger. Tokens behind the last packed sequence are padding.
    """
    o = problem.options
    if values.cu_seqlens is not None:
        end = int(values.cu_seqlens[-1])
        values = values._replace(**{n: getattr(values, n)[:, :end] for n in ("q", "k", "v", "g", "beta")})
    for name, x in zip(DIFFERENTIABLE, values, strict=False):
        if x is not None:
            _check_each(name, x, ~np.isfinite(x), "must be finite")
    if o.gate == "log_decay":
        _check_each("g", values.g, values.g > 0, "must be a log-decay, at most 0: pass use_gate_in_kernel=True for a raw gate")
    if o.gate == "log_decay" and o.safe_gate and o.lower_bound is not None:
        low = values.g < o.lower_bound
        _check_each("g", values.g, low, f"must lie in [lower_bound, 0) = [{o.lower_bound}, 0), as safe_gate=True promises")
    if not o.l2norm:
        beta = values.beta if o.beta == "given" else (2 if o.beta == "double_sigmoid" else 1) / (1 + np.exp(-values.beta))
        growth = np.repeat((values.k**2).sum(-1), problem.group, 2) * beta  # [B, T, HV]
        rounding = 1 + {"bfloat16": 2**-5, "float16": 2**-8}.get(problem.dtype, 2**-16)
        rule = "has beta |k|^2, which must be at most 2, else the state grows without bound: pass use_qk_l2norm_in_kernel=True"
        _check_each("k", growth, ~(growth <= 2 * rounding), rule)


def _check_each(name: str, x: np.ndarray, bad: np.ndarray, rule: str) -> None:
    if bad.any():
        first = np.unravel_index(np.argmax(bad), bad.shape)
        place = ", ".join(map(str, first))
        raise ValueError(f"{name}[{place}] {rule}, got {x[first]} ({int(bad.sum())} of {bad.size} elements; KDAKIT_CHECKS=1 looked)")
