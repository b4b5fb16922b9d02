"""Between chunks: the state before each chunk and v_new, and the reverse scan of the backward.

    v_new = inverse Diag(beta) (v - k_prefixed S)        S <- Diag(decay) S + k_decayed^T v_new

The loop runs over chunks only; rows (batch and heads) go through one batched product, for which a chunk's rows must lie together.
"""

from __future__ import annotations

import torch

LONG = 64  # terms of a sum that d_beta is a small difference of, and d_A_log


def state(plan, first, S, v, solve, k_prefixed, k_decayed, decay, initial, final, buffer):
    """Chunks first, first + 1, .. of every row:  v [n, R, C, V], solve = inverse Diag(beta) [n, R, C, C], k_prefixed, k_decayed
    [n, R, C, K], decay [n, R, K], S [R, K, V] the state before
    -> states [n + 1, R, K, V] before each chunk and after the last, errors = v - k_prefixed S and v_new [n, R, C, V].
    Sequences start from `initial` and end in `final` [N, HV, K, V]. `buffer` holds the states: fresh memory for every piece costs more than
    the products do."""
    n = v.shape[0]
    states, errors, v_new = buffer[: n + 1], v.new_empty(v.shape), v.new_empty(v.shape)
    states[0] = S
    before, *rest = states.unbind(0)
    chunks = zip(rest, *(x.unbind(0) for x in (v, solve, k_prefixed, k_decayed.mT, decay.unsqueeze(-1), errors, v_new)), strict=True)
    for i, (after, v_i, solve_i, k_in, k_out, decay_i, error, new) in enumerate(chunks, first):
        plan.enter(i, before, initial)
        torch.baddbmm(v_i, k_in, before, alpha=-1, out=error)
        torch.bmm(solve_i, error, out=new)
        torch.mul(before, decay_i, out=after)
        after.baddbmm_(k_out, new)
        plan.leave(i, after, final)
        before = after
    return states, errors, v_new


def state_backward(plan, first, dS, beta, inverse, rows, k_decayed, decay, d_v_new, d_reads, d_final, d_initial, buffer):
    """The same chunks in reverse, with q's rows before k's in `rows` and d_reads = [-d_o; d_v] [n, R, 2, C, V], of which -d_o is there:

        d_v_new += k_decayed dS'     y = inverse^T d_v_new     d_v = beta y     dS = Diag(decay) dS' - rows^T [-d_o; d_v]

    d_v_new [n, R, C, V] comes in as A_qk^T d_o. Returns y and d_states [n + 1, R, K, V], the gradients of `state`'s states.
    """
    n, K = d_v_new.shape[0], dS.shape[1]
    parts = [slice(k, k + LONG) for k in range(0, K, LONG)]
    d_states, y = buffer[: n + 1], torch.empty_like(d_v_new)
    d_states[n] = dS
    *rest, d_after = d_states.unbind(0)
    by_chunk = (beta, inverse.mT, rows.mT, k_decayed, decay.unsqueeze(-1), d_v_new, y, d_reads[:, :, 1], d_reads.flatten(2, 3))
    chunks = list(zip(range(first, first + n), rest, *(x.unbind(0) for x in by_chunk), strict=True))
    for i, d_before, beta_i, inverse_t, rows_t, k_out, decay_i, d_new, y_i, d_read, d_both in reversed(chunks):
        plan.enter_backward(i, d_after, d_final)
        for keys in parts:  # a BLAS may add them up one after the other
            d_new.baddbmm_(k_out[..., keys], d_after[:, keys])
        torch.bmm(inverse_t, d_new, out=y_i)
        torch.mul(y_i, beta_i, out=d_read)
        torch.mul(d_after, decay_i, out=d_before)
        d_before.baddbmm_(rows_t, d_both, alpha=-1)
        plan.leave_backward(i, d_before, d_initial)
        d_after = d_before
    return y, d_states
