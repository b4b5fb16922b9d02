"""Between chunks: the state before each chunk and v_new, and the reverse scan of the backward.

    v_new = u - w S        S <- Diag(decay) S + k_decayed^T v_new

The loop runs over chunks only; rows (batch and heads) go through one batched product, for which a chunk's rows must lie together.
"""

from __future__ import annotations

import torch


def state(plan, first, S, u, w, k_decayed, decay, initial, final, buffer):
    """Chunks first, first + 1, .. of every row:  u [n, R, C, V], w, k_decayed [n, R, C, K], decay [n, R, K], S [R, K, V] the state before
    -> states [n + 1, R, K, V] before each chunk and after the last, v_new [n, R, C, V].
    Sequences start from `initial` and end in `final` [N, HV, K, V]. `buffer` holds the states: fresh memory for every piece costs more than
    the products do."""
    n = u.shape[0]
    states, v_new = buffer[: n + 1], torch.empty_like(u)
    states[0] = S
    for i in range(n):
        before, after = states[i], states[i + 1]
        plan.enter(first + i, before, initial)
        torch.baddbmm(u[i], w[i], before, alpha=-1, out=v_new[i])
        torch.mul(before, decay[i, :, :, None], out=after)
        after.baddbmm_(k_decayed[i].mT, v_new[i])
        plan.leave(first + i, after, final)
    return states, v_new


def state_backward(plan, first, dS, w, k_decayed, decay, q_decayed, d_o, d_v_new, d_final, d_initial, buffer):
    """The same chunks in reverse:  d_v_new += k_decayed dS';   dS = Diag(decay) dS' + q_decayed^T d_o - w^T d_v_new.

    d_v_new comes in as A_qk^T d_o and is completed in place. Returns d_states [n + 1, R, K, V], the gradients of `state`'s states.
    """
    n = d_o.shape[0]
    d_states = buffer[: n + 1]
    d_states[n] = dS
    for i in reversed(range(n)):
        d_before, d_after = d_states[i], d_states[i + 1]
        plan.enter_backward(first + i, d_after, d_final)
        d_v_new[i].baddbmm_(k_decayed[i], d_after)
        torch.mul(d_after, decay[i, :, :, None], out=d_before)
        d_before.baddbmm_(q_decayed[i].mT, d_o[i])
        d_before.baddbmm_(w[i].mT, d_v_new[i], alpha=-1)
        plan.leave_backward(first + i, d_before, d_initial)
    return d_states
