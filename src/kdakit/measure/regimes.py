"""Kinds of gates to time: how fast channels forget decides what some implementations take, so no time holds for one kind alone.

    iid      A_log = 0, dt_bias = 0: every channel has gates of its own and forgets at once
    normal   A_log = |N(0, 1)|, dt_bias = N(0, 1)
    fla      what models start with: A_log = log U(1, 16), dt_bias the inverse softplus of dt, log-uniform in 0.001 .. 0.1: most channels
             forget slowly

All three are parameters of a gate that is computed in the kernel, from inputs N(0, 1).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Parameters = tuple[np.ndarray, np.ndarray]  # A_log [HV], dt_bias [HV * K]


def _fla(rng: np.random.Generator, HV: int, K: int) -> Parameters:
    dt = np.exp(rng.uniform(np.log(0.001), np.log(0.1), size=HV * K))
    return np.log(rng.uniform(1, 16, size=HV)), dt + np.log(-np.expm1(-dt))


REGIMES: dict[str, Callable[[np.random.Generator, int, int], Parameters]] = {
    "iid": lambda rng, HV, K: (np.zeros(HV), np.zeros(HV * K)),
    "normal": lambda rng, HV, K: (np.abs(rng.normal(size=HV)), rng.normal(size=HV * K)),
    "fla": _fla,
}


def parameters(regime: str, HV: int, K: int, seed: int = 0) -> Parameters:
    """A_log and dt_bias of a regime, float32 values."""
    A_log, dt_bias = REGIMES[regime](np.random.default_rng([seed, *regime.encode()]), HV, K)
    return A_log.astype(np.float32), dt_bias.astype(np.float32)
