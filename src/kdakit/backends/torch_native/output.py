"""The output of a chunk:  o = q_decayed S + A_qk v_new."""

from __future__ import annotations

import torch


def output(q_reads, A_qk, v_new):
    """q_reads = q_decayed S [M, C, V], A_qk [M, C, C], v_new [M, C, V] -> o [M, C, V]."""
    return torch.baddbmm(q_reads, A_qk, v_new)
