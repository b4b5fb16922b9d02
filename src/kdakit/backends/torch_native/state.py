"""Between chunks: the state before each chunk and v_new, and the reverse scan of the backward.

    v_new = u - w S        S <- Diag(decay) S + k_decayed^T v_new

The loop runs over chunks only; rows (batch and heads) go through one batched product.
"""

from __future__ import annotations

import torch


def state(plan, first, S, u, w, k_decayed, decay, initial, final):
    """Chunks first, first + 1, .. of every row:  u [R, n, C, V], w, k_decayed [R, n, C, K], decay [R, n, K], S [R, K, V] the state before
    -> states [R, n + 1, K, V] before each chunk and after the last, v_new [R, n, C, V].
    Sequences start from `initial` and end in `final` [N, HV, K, V]."""
    R, n, _, V = u.shape
    states, v_new = u.new_empty(R, n + 1, w.shape[-1], V), torch.empty_like(u)
    states[:, 0] = S
    for i in range(n):
        before, after = states[:, i], states[:, i + 1]
        plan.enter(first + i, before, initial)
        torch.baddbmm(u[:, i], w[:, i], before, alpha=-1, out=v_new[:, i])
        torch.mul(before, decay[:, i, :, None], out=after)
        after.baddbmm_(k_decayed[:, i].mT, v_new[:, i])
        plan.leave(first + i, after, final)
    return states, v_new


def state_backward(plan, first, dS, w, k_decayed, decay, q_decayed, d_o, d_v_new, d_final, d_initial):
    """The same chunks in reverse:  d_v_new += k_decayed dS';   dS = Diag(decay) dS' + q_decayed^T d_o - w^T d_v_new.

    d_v_new comes in as A_qk^T d_o and is completed in place. Returns d_states [R, n + 1, K, V], the gradients of `state`'s states.
    """
    R, n, _, V = d_o.shape
    d_states = d_o.new_empty(R, n + 1, w.shape[-1], V)
    d_states[:, n] = dS
    for i in reversed(range(n)):
        d_before, d_after = d_states[:, i], d_states[:, i + 1]
        plan.enter_backward(first + i, d_after, d_final)
        d_v_new[:, i].baddbmm_(k_decayed[:, i], d_after)
        torch.mul(d_after, decay[:, i, :, None], out=d_before)
        d_before.baddbmm_(q_decayed[:, i].mT, d_o[:, i])
        d_before.baddbmm_(w[:, i].mT, d_v_new[:, i], alpha=-1)
        plan.leave_backward(first + i, d_before, d_initial)
    return d_states
