"""The token recurrence, for decoding and short sequences: a loop over tokens, one batched product over sequences and heads each.

    S <- Diag(e^g) S;   S <- S + beta k (v - k^T S)^T;   o = q^T S

Packed sequences are padded to the longest one first; padding changes no state.
"""

from __future__ import annotations

import torch

from kdakit.backends.torch_native.gate import Activated


def recurrence(x: Activated, state: torch.Tensor):
    """x in [N, T, HV, ..], q scaled, q and k already repeated to HV heads; state [N, HV, K, V] -> o [N, T, HV, V], state."""
    o = torch.empty_like(x.v)
    decay = x.g.exp()
    for t in range(x.v.shape[1]):
        k = x.k[:, t].unsqueeze(-2)  # [N, HV, 1, K]
        state = decay[:, t].unsqueeze(-1) * state
        write = x.beta[:, t, :, None, None] * (x.v[:, t].unsqueeze(-2) - k @ state)  # [N, HV, 1, V]
        state = state + k.mT @ write
        o[:, t] = (x.q[:, t].unsqueeze(-2) @ state).squeeze(-2)
    return o, state
