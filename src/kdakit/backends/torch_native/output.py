"""The output of a chunk from the state before it:  o = q_decayed S + A_qk v_new."""

from __future__ import annotations

import torch


def output(q_decayed, A_qk, states, v_new):
    """q_decayed [M, C, K], A_qk [M, C, C], states [M, K, V], v_new [M, C, V] -> o [M, C, V]."""
    return torch.baddbmm(torch.bmm(q_decayed, states), A_qk, v_new)
