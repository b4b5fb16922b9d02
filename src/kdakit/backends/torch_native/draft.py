"""Draft tokens without a state for each: run them once, keep a short log, and replay any accepted prefix of it.

verify    S <- Diag(d) S;  u = beta (v - k^T S);  S <- S + k u^T;  o = q^T S        the log keeps d = e^g, k and u of each token
replay    S <- Diag(d) S;  S <- S + k u^T                                           for the first n tokens: the same products, in order

A replayed state is therefore the state that decoding those tokens one by one leaves. The log is 2 K + V numbers a token and head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kdakit.backends.torch_native.gate import activate
from kdakit.problem import Arrays, Problem

commit = None  # the pool reads its states, calls `replay` and writes them back


class Log(NamedTuple):
    """Of each draft token, in the compute dtype."""

    k: torch.Tensor  # [N, T, HV, K] normalised
    decay: torch.Tensor  # [N, T, HV, K]
    u: torch.Tensor  # [N, T, HV, V]


def verify(problem: Problem, arrays: Arrays, state: torch.Tensor) -> tuple[torch.Tensor, Log]:
    """o [N, T, HV, V] and the log; state [N, HV, K, V] in the compute dtype is left alone."""
    x = activate(problem, arrays)
    q, k = (a.repeat_interleave(problem.group, 2) for a in (x.q * problem.options.scale, x.k))
    log = Log(k, x.g.exp(), torch.empty_like(x.v))
    o = torch.empty_like(x.v)
    for t in range(problem.T):
        row = k[:, t].unsqueeze(-2)  # [N, HV, 1, K]
        state = log.decay[:, t].unsqueeze(-1) * state
        u = x.beta[:, t, :, None, None] * (x.v[:, t].unsqueeze(-2) - row @ state)  # [N, HV, 1, V]
        state = state + row.mT @ u
        log.u[:, t] = u.squeeze(-2)
        o[:, t] = (q[:, t].unsqueeze(-2) @ state).squeeze(-2)
    return o.to(arrays.v.dtype), log


def replay(state: torch.Tensor, log: Log, accepted: torch.Tensor) -> torch.Tensor:
    """state [N, HV, K, V] after the first accepted[n] tokens of row n."""
    for t in range(log.u.shape[1]):
        after = log.decay[:, t].unsqueeze(-1) * state
        after = after + log.k[:, t].unsqueeze(-1) @ log.u[:, t].unsqueeze(-2)
        state = torch.where((accepted > t)[:, None, None, None], after, state)
    return state


def total_decay(log: Log, accepted: torch.Tensor) -> torch.Tensor:
    """[N, HV, K]: how much of the state before is left after the accepted tokens."""
    t = torch.arange(log.decay.shape[1], device=log.decay.device)
    return torch.where((t < accepted[:, None])[..., None, None], log.decay, 1).prod(1)
