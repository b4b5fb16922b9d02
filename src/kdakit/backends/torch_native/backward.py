"""The chunk-parallel backward: one reverse scan over the states, everything else batched over the chunks of a piece.

    d_A_qk = lower(d_o v_new^T)    d_q_decayed = d_o S^T    d_k_decayed = v_new dS'^T    d_decay = sum_v S * dS'
    y = (I + A_kk)^-T [d_v_new, -d_v_new S^T]        d_A_kk = -strictly_lower(y [u, w]^T)

Derivation: docs/math.md.
"""

from __future__ import annotations

import torch

from kdakit.backends.torch_native.intra import Intra, decayed_products_backward
from kdakit.backends.torch_native.output import output_backward
from kdakit.backends.torch_native.state import state_backward


def chunk_backward(plan, first, dS, rows, k, x: Intra, states, v_new, d_o, d_final, d_initial, buffer):
    """Chunks first, first + 1, ..: rows [M, C, 2, K], k [M, C, K], states [M, K, V], v_new, d_o [M, C, V], dS [R, K, V]
    -> d_rows, d_k, d_g like rows, k, k; d_v_beta [M, C, V]; dS of the state before them."""
    V = v_new.shape[-1]
    A_qk, q_decayed, w = x.A[:, :, 0], x.rows_decayed[:, :, 0], x.uw[..., V:]
    d_v_new = torch.bmm(A_qk.mT, d_o)
    by_row = (a.unflatten(0, (-1, plan.rows)) for a in (w, x.k_decayed, x.decay, q_decayed, d_o, d_v_new))
    d_states = state_backward(plan, first, dS, *by_row, d_final, d_initial, buffer)
    d_after = d_states[1:].flatten(0, 1)

    d_A = torch.empty_like(x.A)
    d_q_decayed, d_A[:, :, 0] = output_backward(states, v_new, d_o)
    d_uw = torch.cat([d_v_new, torch.bmm(d_v_new, states.mT).neg_()], -1)
    y = torch.bmm(x.inverse.mT, d_uw)  # gradients of beta v and of beta k exp(g_cum)
    d_A[:, :, 1] = torch.bmm(y, x.uw.mT).tril_(-1).neg_()

    d_k_decayed = torch.bmm(v_new, d_after.mT)
    d_prefix = (q_decayed * d_q_decayed).addcmul_(x.rows_decayed[:, :, 1], y[..., V:])
    d_prefix[:, -1] += x.decay * (states * d_after).sum(-1)
    d_suffix = x.k_decayed * d_k_decayed
    d_rows = torch.empty_like(rows)
    torch.mul(d_q_decayed, x.from_start, out=d_rows[:, :, 0])
    torch.mul(y[..., V:], x.from_start, out=d_rows[:, :, 1])
    d_k = d_k_decayed.mul_(x.to_end)
    d_g = decayed_products_backward(rows, k, x.levels, d_A, d_rows, d_k, d_prefix, d_suffix)
    return d_rows, d_k, d_g, y[..., :V], d_states[0]
