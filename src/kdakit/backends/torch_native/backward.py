"""The chunk-parallel backward: one reverse scan over the states, everything else batched over the chunks of a piece.

q and k read the state and earlier tokens in the same way, so their gradients come from the same products, with X = [-d_o; d_v]:

    d_rows = -X S^T    d_A = -X v_new^T    d_k_decayed = v_new dS'^T    d_decay = sum_v S * dS'    d_beta = y (v - k S - A_kk v_new)

Derivation: docs/math.md.
"""

from __future__ import annotations

import torch

from kdakit.backends.torch_native.intra import Intra, intra_backward
from kdakit.backends.torch_native.state import state_backward
from kdakit.backends.torch_native.wide import paired, summed


def chunk_backward(plan, first, dS, rows, beta, x: Intra, exact, states, errors, v_new, d_o, d_final, d_initial, buffer):
    """Chunks first, first + 1, ..: rows [M, 2, C, K], beta [M, C, 1], states [M, K, V], errors, v_new [M, C, V],
    d_o [n, R, C, V], dS [R, K, V]
    -> d_rows, d_v, d_g, d_beta like their inputs; dS of the state before them. `exact`: see blocks.block_backward."""
    d_reads = v_new.new_empty(v_new.shape[0], 2, *v_new.shape[1:])  # X; the scan writes the second half
    torch.neg(d_o, out=d_reads.unflatten(0, d_o.shape[:2])[:, :, 0])
    d_v_new = _minus(x.A[:, 0].mT, d_reads[:, 0])
    by_row = (a.unflatten(0, d_o.shape[:2]) for a in (beta, x.inverse, x.rows.flatten(1, 2), x.k_decayed, x.decay, d_v_new, d_reads))
    y, d_states = state_backward(plan, first, dS, *by_row, d_final, d_initial, buffer)
    d_after = d_states[1:].flatten(0, 1)

    flat = d_reads.flatten(1, 2)
    d_A = paired(flat, v_new).neg_().unflatten(1, (2, -1))
    d_rows = paired(flat, states).neg_().unflatten(1, (2, -1))
    d_k_decayed = paired(v_new, d_after)
    d_decay = summed(d_after.mul_(states))[..., 0]  # uses up the buffer
    d_rows, d_g = intra_backward(rows, x, exact, d_A, d_rows, d_k_decayed, d_decay)
    errors = torch.baddbmm(errors, x.A[:, 1], v_new, alpha=-1)
    d_beta = summed(y.flatten(0, 1).mul_(errors))
    return d_rows, d_reads[:, 1], d_g, d_beta, d_states[0]


def _minus(a, b):
    """-a b, for matrices in batches."""
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2]).baddbmm_(a, b, beta=0, alpha=-1)
