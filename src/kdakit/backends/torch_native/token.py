"""The backward of chunks of one token: that of the recurrence itself, in its order.

    d_S = dS' + q d_o^T      y = d_S^T k      d_v = beta y      d_decayed = d_S - k d_v^T      dS = Diag(decay) d_decayed

What a key of exactly 1 with a strength of 1 overwrites gets a gradient of exactly 0: k d_v^T is d_S itself. As dS' - rows^T [-d_o; d_v], of
decayed rows, a roundoff of it would be left. A head of one key channel is all such chunks.
"""

from __future__ import annotations

import torch

from kdakit.backends.torch_native.wide import summed


def token_backward(plan, first, dS, rows, beta, decay, states, errors, v_new, d_o, d_final, d_initial):
    """Chunks first, first + 1, ..: rows [M, 2, 1, K] (q scaled, and k), beta [M, 1, 1], decay [M, K], states [M, K, V] before each,
    errors and v_new [M, 1, V], d_o [n, R, 1, V], dS [R, K, V]
    -> d_rows, d_v [M, 1, V], d_g [M, 1, K], d_beta like their inputs; dS of the state before them."""
    n, R = d_o.shape[:2]
    q, k = (a.mT for a in rows.unbind(1))  # [M, K, 1]
    d_states, d_decayed, y = (states.new_empty(n, R, *size) for size in (dS.shape[1:], dS.shape[1:], d_o.shape[2:]))
    by_chunk = (a.unflatten(0, (n, R)) for a in (q, k, beta, decay.unsqueeze(-1)))
    chunks = list(zip(range(first, first + n), *by_chunk, d_o, d_states, d_decayed, y, strict=True))
    for i, q_i, k_i, beta_i, decay_i, d_o_i, d_state, d_left, y_i in reversed(chunks):
        dS = dS.clone()
        plan.enter_backward(i, dS, d_final)
        torch.baddbmm(dS, q_i, d_o_i, out=d_state)
        torch.bmm(k_i.mT, d_state, out=y_i)
        torch.baddbmm(d_state, k_i, beta_i * y_i, alpha=-1, out=d_left)
        dS = d_left * decay_i
        plan.leave_backward(i, dS, d_initial)
    d_states, d_decayed, y, d_o = (a.flatten(0, 1) for a in (d_states, d_decayed, y, d_o))
    decayed, d_v = states * decay.unsqueeze(-1), beta * y
    d_q = torch.bmm(torch.baddbmm(decayed, k, v_new), d_o.mT)
    d_k = beta * torch.bmm(d_states, errors.mT) - torch.bmm(decayed, d_v.mT)
    d_g, d_beta = summed(d_decayed * decayed).mT, summed(y * errors)
    return torch.stack([d_q.mT, d_k.mT], 1), d_v, d_g, d_beta, dS
