"""Between chunks: the state before each chunk and v_new, and the reverse scan of the backward.

    v_new = inverse Diag(beta) (v - k_prefixed S)        S <- Diag(decay) S + k_decayed^T v_new

The loop runs over chunks only; rows (batch and heads) go through one batched product, for which a chunk's rows must lie together.
"""

from __future__ import annotations

import torch


def state(plan, first, S, v, solve, rows, k_decayed, decay, initial, final, buffer):
    """Chunks first, first + 1, .. of every row:  v [n, R, C, V], solve = inverse Diag(beta) [n, R, C, C], k_decayed [n, R, C, K],
    decay [n, R, K], S [R, K, V] the state before; rows [n, R, p C, K]: what reads the state, the last C of them k from the chunk's start
    -> states [n + 1, R, K, V] before each chunk and after the last, reads = rows S [n, R, p C, V], errors = v - k S and v_new [n, R, C, V].
    Sequences start from `initial` and end in `final` [N, HV, K, V]. `buffer` holds the states: fresh memory for every piece costs more than
    the products do."""
    n, C = v.shape[0], v.shape[2]
    states, reads = buffer[: n + 1], v.new_empty(*rows.shape[:3], v.shape[3])
    errors, v_new = v.new_empty(v.shape), v.new_empty(v.shape)
    states[0] = S
    for i in range(n):
        before, after = states[i], states[i + 1]
        plan.enter(first + i, before, initial)
        torch.bmm(rows[i], before, out=reads[i])
        torch.sub(v[i], reads[i, :, -C:], out=errors[i])
        torch.bmm(solve[i], errors[i], out=v_new[i])
        torch.mul(before, decay[i, :, :, None], out=after)
        after.baddbmm_(k_decayed[i].mT, v_new[i])
        plan.leave(first + i, after, final)
    return states, reads, errors, v_new


def state_backward(plan, first, dS, beta, inverse, rows, k_decayed, decay, d_v_new, d_reads, d_final, d_initial, buffer):
    """The same chunks in reverse, with q's rows before k's in `rows` and d_reads = [d_o; -d_v] [n, R, 2, C, V], of which d_o is there:

        d_v_new += k_decayed dS'     y = inverse^T d_v_new     d_v = beta y     dS = Diag(decay) dS' + rows^T [d_o; -d_v]

    d_v_new [n, R, C, V] comes in as A_qk^T d_o. Returns y and d_states [n + 1, R, K, V], the gradients of `state`'s states.
    """
    n = d_v_new.shape[0]
    d_states, y, minus_beta = buffer[: n + 1], torch.empty_like(d_v_new), -beta
    d_states[n] = dS
    for i in reversed(range(n)):
        d_before, d_after = d_states[i], d_states[i + 1]
        plan.enter_backward(first + i, d_after, d_final)
        d_v_new[i].baddbmm_(k_decayed[i], d_after)
        torch.bmm(inverse[i].mT, d_v_new[i], out=y[i])
        torch.mul(y[i], minus_beta[i], out=d_reads[i, :, 1])
        torch.mul(d_after, decay[i, :, :, None], out=d_before)
        d_before.baddbmm_(rows[i].mT, d_reads[i].flatten(1, 2))
        plan.leave_backward(first + i, d_before, d_initial)
    return y, d_states
