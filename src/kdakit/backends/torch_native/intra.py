"""Within a chunk: decayed products and the triangular inverse.

    A_qk[i, j] = scale sum_d q[i,d] k[j,d] decay[j..i,d]    j <= i          A_kk[i, j] = sum_d k[i,d] k[j,d] decay[j..i,d]    j < i
    inverse = (I + Diag(beta) A_kk)^-1

Tokens of different blocks meet in `levels`, at any gate. Inside a block, weak gates take one product (`blocks`), strong ones more levels.
M stands for all chunks of all rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kdakit.backends.torch_native import blocks
from kdakit.backends.torch_native.levels import Level, climb, climb_backward, decays, flushed, level_sizes


class Pairs(NamedTuple):
    """What the backward needs of the decayed products."""

    block: Level | None  # the pairs inside blocks, where their gates are weak
    far: torch.Tensor | None  # [M, C, K]  1 where they are strong, 0 elsewhere; None: all weak, or, without `block`, taken as strong
    inner: list[Level]  # the pairs inside blocks where far
    outer: list[Level]  # the pairs of different blocks


class Intra(NamedTuple):
    A: torch.Tensor  # [M, 2, C, C]  A_qk with its diagonal, A_kk strictly lower
    inverse: torch.Tensor  # [M, C, C]
    rows: torch.Tensor  # [M, 2, C, K]  q scaled and k, decayed from the chunk's start
    k_decayed: torch.Tensor  # [M, C, K]  k, decayed to the chunk's end
    decay: torch.Tensor  # [M, K]  over the whole chunk
    prefix: torch.Tensor  # [M, C, K]  decay from the chunk's start through each token
    suffix: torch.Tensor  # [M, C, K]  decay after each token to the chunk's end
    pairs: Pairs


def unit_lower_inverse(A_kk):
    """(I + A_kk)^-1 by substitution; only the strictly lower triangle of A_kk is read."""
    eye = torch.eye(A_kk.shape[-1], dtype=A_kk.dtype, device=A_kk.device)
    return torch.linalg.solve_triangular(A_kk, eye.expand_as(A_kk), upper=False, unitriangular=True)


def intra(rows, beta, g, look: bool, kept=None, keep=False) -> Intra:
    """Everything of a chunk that needs no state: rows [M, 2, C, K] (q scaled, and k), g [M, C, K], beta [M, C, 1].

    `look`: whether the host may look at the gates. `kept`: A and inverse of an earlier call. `keep`: a backward follows.
    """
    M, _, C, _ = rows.shape
    A, inverse = kept or (rows.new_zeros(M, 2, C, C), None)
    prefix, suffix, flush, pairs = decayed_products(None if kept else A, rows, g, look, keep)
    if kept is None:
        if flush:
            flushed(A)
        inverse = unit_lower_inverse(A[:, 1] * beta)
        if flush:
            flushed(inverse)
    return Intra(A, inverse, rows * prefix.unsqueeze(1), rows[:, 1] * suffix, prefix[:, -1], prefix, suffix, pairs)


def decayed_products(A, rows, g, look, keep):
    """Writes into A [M, 2, C, C], unless it is None. Returns prefix and suffix over the chunk; whether there are subnormal numbers to get
    rid of; and, for the backward, the pairs."""
    k, C = rows[:, 1], g.shape[1]
    W = min(blocks.BLOCK, C)
    strong, flush = blocks.reach(g, W) if look else (True, False)
    block, far, inner = None, None, []
    if look:
        block, prefix, suffix, far = blocks.block_level(rows, k, g, strong, flush, W)
    if strong:
        inner, far_prefix, far_suffix = _inside_blocks(A, rows, k, g, far, W, flush, keep)
        if look:  # by block, not by piece: what a block leaves to later tokens must not depend on them
            suffix = _select(far, W, far_suffix, suffix)
        else:
            prefix, suffix = far_prefix, far_suffix
    if block and A is not None:
        blocks.add_block_products(A, block)
    outer, prefix, suffix = climb(A, rows, k, prefix, suffix, level_sizes(W, C), flush, keep)
    return prefix, suffix, flush, Pairs(block, far, inner, outer)


def _inside_blocks(A, rows, k, g, far, W, flush, keep):
    """The pairs inside blocks of W tokens by levels, of all rows or of those that are far: the levels, prefix and suffix."""
    inner, prefix, suffix = climb(A, rows, k, decays(g, flush), torch.ones_like(g), level_sizes(1, W), flush, keep, far)
    if A is not None:
        q = rows[:, 0] if far is None else rows[:, 0] * far
        A[:, 0].diagonal(dim1=1, dim2=2).copy_((q * k).sum(-1))
    return inner, prefix, suffix


def _select(mask, W, yes, no):
    """[M, C, K]: yes in blocks whose last token has mask 1, no where it has 0."""
    mask, yes, no = (x.unflatten(1, (-1, W)) for x in (mask, yes, no))
    last = mask[:, :, -1:]
    return (no * (1 - last)).addcmul_(yes, last).flatten(1, 2)


def intra_backward(rows, x: Intra, d_A, d_rows, d_k_decayed, d_decay):
    """d_rows, that of q scaled and that of k [M, 2, C, K], and d_g [M, C, K], from the gradients of A (above its diagonals they are not
    read), of the decayed rows, of k_decayed and of decay; overwrites them. Of a factor F = exp(E) of the decays, d_E = F d_F."""
    q, k = rows.unbind(1)
    diagonal = d_A[:, 0].diagonal(dim1=1, dim2=2).unsqueeze(-1)  # [M, C, 1]; A_qk's has no decay
    d_prefix = (x.rows[:, 0] * d_rows[:, 0]).addcmul_(x.rows[:, 1], d_rows[:, 1])
    d_prefix[:, -1].addcmul_(x.decay, d_decay)
    d_suffix = x.k_decayed * d_k_decayed
    d_q, d_k = d_rows.mul_(x.prefix.unsqueeze(1)).unbind(1)
    d_q.addcmul_(diagonal, k)
    d_k.addcmul_(diagonal, q).addcmul_(d_k_decayed, x.suffix)
    block, far, inner, outer = x.pairs
    if inner:
        climb_backward([*inner, *outer], d_A, d_rows, d_k, d_prefix, d_suffix)
        d_g = d_prefix
    else:
        climb_backward(outer, d_A, d_rows, d_k, d_prefix, d_suffix)
        d_g = blocks.gate_sums(d_prefix, d_suffix, min(blocks.BLOCK, k.shape[1]))
    if block:
        d_g += blocks.block_backward(block, far, d_A, d_rows, d_k)
    return d_rows, d_g
