"""KDA without its delta rule, to compare with: the state adds what is written and corrects nothing.

    S_t = Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T        o_t = scale * S_t^T q_t

In chunks, in plain PyTorch, differentiated by autograd. Decays are sums of the gates between two tokens: exact under any gate.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kdakit.gates import L2_EPSILON

CHUNK = 8


def gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """q, k [B, T, H, K], normalised here; v [B, T, HV, V]; g [B, T, HV, K] log-decay; beta [B, T, HV]. -> o, state [B, HV, K, V]."""
    dtype, T, C = v.dtype, v.shape[1], max(1, min(CHUNK, v.shape[1]))
    q, k, v, g, beta = _chunks(q, k, v, g, beta, C)  # [B, HV, NT, C, ..] in float32 at least
    S = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1]) if initial_state is None else initial_state.to(v.dtype)
    lower = torch.ones(C, C, dtype=torch.bool, device=v.device).tril()
    after = torch.where(lower.tril(-1)[..., None], g[..., :, None, :], 0)  # at (m, j): the gates after j
    decays = torch.where(lower[..., None], after.cumsum(-3), -torch.inf).exp()  # [B, HV, NT, i, j, K]
    A_qk = torch.einsum("...ik,...jk,...ijk->...ij", q, k, decays)
    v = v * beta[..., None]
    from_start = g.cumsum(-2).exp()
    written = (k * decays[..., -1, :, :]).mT @ v  # [B, HV, NT, K, V]
    states = []
    for n in range(v.shape[2]):
        states.append(S)
        S = from_start[:, :, n, -1, :, None] * S + written[:, :, n]
    o = A_qk @ v + (q * from_start) @ torch.stack(states, 2)
    return o.flatten(2, 3)[:, :, :T].transpose(1, 2).to(dtype), S


def _chunks(q, k, v, g, beta, C):
    wide = torch.promote_types(v.dtype, torch.float32)
    q, k, v, g, beta = (x.to(wide) for x in (q, k, v, g, beta))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPSILON) for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q * q.shape[-1] ** -0.5, k))
    missing = max(-v.shape[1] % C, C - v.shape[1])  # of the last chunk, or of the only one
    padded = (F.pad(x, (0, 0, 0, 0, 0, missing)) for x in (q, k, v, g, beta[..., None]))
    q, k, v, g, beta = (x.transpose(1, 2).unflatten(2, (-1, C)) for x in padded)
    return q, k, v, g, beta[..., 0]
