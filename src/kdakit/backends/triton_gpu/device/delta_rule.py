"""One token of the recurrence, as a device function."""

from __future__ import annotations

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.device.gate import inverse_norm


@triton.jit
def delta_rule(b_S, b_q, b_k, b_v, b_beta, b_decay, scale, L2NORM: tl.constexpr):
    """S <- Diag(e^g) S;  u = beta (v - S^T k);  o = scale (S^T q + u k^T q);  S <- S + k u^T:  o [BV] and S^T [BV, KP] after one token.

    Both reads come before the write and wait for nothing between them. Norms and scale are numbers, not vectors: q and k stay as they came,
    and u carries the norm of k.
    """
    scale_q, norm_k = scale, 1.0
    if L2NORM:
        scale_q = scale * inverse_norm(tl.sum(b_q * b_q, 0))
        norm_k = inverse_norm(tl.sum(b_k * b_k, 0))
    b_S = b_S * b_decay[None, :]
    b_read_k = tl.sum(b_S * b_k[None, :], 1) * norm_k  # [BV]
    b_read_q = tl.sum(b_S * b_q[None, :], 1)  # [BV]
    b_u = (b_beta * norm_k) * (b_v - b_read_k)  # [BV]
    b_o = (b_read_q + b_u * tl.sum(b_k * b_q, 0)) * scale_q  # [BV]
    return b_o, tl.fma(b_u[:, None], b_k[None, :], b_S)
