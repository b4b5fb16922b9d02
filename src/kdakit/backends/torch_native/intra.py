"""Within a chunk: decayed products and the triangular inverse.

    A_qk[i, j] = scale sum_d q[i,d] k[j,d] decay[j..i,d]    j <= i          A_kk[i, j] = sum_d k[i,d] k[j,d] decay[j..i,d]    j < i
    inverse = (I + Diag(beta) A_kk)^-1

A chunk is n blocks of W tokens. Tokens of different blocks meet in `between`, at any gate. Inside a block, weak gates take one product
(`blocks`), strong ones `levels`. M stands for all chunks of all rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kdakit.backends.torch_native import blocks
from kdakit.backends.torch_native.between import Chunk, meet, meet_backward
from kdakit.backends.torch_native.levels import Level, by_blocks, climb, climb_backward, decayed, decays, flushed_product, level_sizes
from kdakit.backends.torch_native.wide import widened


class Pairs(NamedTuple):
    """What the backward needs of the decayed products."""

    inside: blocks.Inside
    levels: list[Level]  # the pairs inside blocks that `inside` does not serve
    entered: torch.Tensor  # [M, n, 2, W, K]  q and k decayed from their block's start
    left_over: torch.Tensor  # [M, n, W, K]  k decayed to its block's end
    chunk: Chunk
    weak: torch.Tensor | None  # [m]  chunks that need no levels beside some that do


class Intra(NamedTuple):
    A: torch.Tensor  # [M, 2, C, C]  A_qk with its diagonal, A_kk strictly lower
    inverse: torch.Tensor  # [M, C, C]
    rows: torch.Tensor  # [M, 2, C, K]  q scaled and k, decayed from the chunk's start
    k_decayed: torch.Tensor  # [M, C, K]  k, decayed to the chunk's end
    decay: torch.Tensor  # [M, K]  over the whole chunk
    pairs: Pairs


def unit_lower_inverse(A_kk):
    """(I + A_kk)^-1 by substitution; only the strictly lower triangle of A_kk is read."""
    eye = torch.eye(A_kk.shape[-1], dtype=A_kk.dtype, device=A_kk.device)
    return torch.linalg.solve_triangular(A_kk, eye.expand_as(A_kk), upper=False, unitriangular=True)


def intra(rows, beta, g, look: bool, kept=None, keep=False) -> Intra:
    """Everything of a chunk that needs no state: rows [M, 2, C, K] (q scaled, and k), g [M, C, K], beta [M, C, 1].

    `look`: whether the host may look at the gates. `kept`: A and inverse of an earlier call. `keep`: a backward follows.
    """
    M, _, C, K = rows.shape
    A, inverse = kept or (rows.new_zeros(M, 2, C, C), None)
    pairs, flush = decayed_products(None if kept else A, rows, g, look, keep)
    if kept is None:
        if flush:
            flushed_product(A)
        # Of like keys with strengths near 2 its entries change signs from token to token, and their errors do not.
        inverse = unit_lower_inverse(widened(A[:, 1]) * beta).to(A.dtype)
        if flush:
            flushed_product(inverse)
    from_start = torch.empty_like(rows)
    W, chunk = pairs.entered.shape[3], pairs.chunk
    torch.mul(pairs.entered, chunk.before[:, :, None, None], out=by_blocks(from_start, W))
    to_end = (pairs.left_over * chunk.after.unsqueeze(2)).view(M, C, K)
    if flush:
        flushed_product(from_start)
        flushed_product(to_end)
    return Intra(A, inverse, from_start, to_end, chunk.whole, pairs)


def decayed_products(A, rows, g, look, keep):
    """Writes into A [M, 2, C, C], unless it is None: the pairs, and whether there are subnormal numbers to get rid of."""
    M, C, K = g.shape
    W = min(blocks.BLOCK, C)
    g, by_block = g.view(M, -1, W, K), by_blocks(rows, W)
    which, flush = blocks.reach(g) if look else (True, False)
    strong, weak = (which, None) if isinstance(which, bool) else (True, (~which).nonzero()[:, 0])
    inside, levels = blocks.inside(by_block, g, strong, flush) if look else None, []
    if strong:
        levels, inside = _levels_inside(A, rows, g, inside, flush, keep)
    if inside.pairs and A is not None:
        blocks.add_block_products(A, inside.pairs)
    entered = decayed(by_block, inside.prefix) if strong else inside.pairs.left
    left_over = by_block[:, :, 1] * inside.suffix
    chunk = meet(A, entered, left_over, inside.prefix[:, :, -1], flush, keep)
    return Pairs(inside, levels, entered, left_over, chunk, weak), flush


def _levels_inside(A, rows, g, inside, flush, keep):
    """The pairs inside blocks of W tokens by levels, all or those that are far: the levels, and what the blocks are now."""
    M, _, C, K = rows.shape
    W, k = g.shape[2], rows[:, 1]
    far = inside and inside.far.view(M, C, K)
    levels, prefix, suffix = climb(A, rows, k, decays(g, flush).view(M, C, K), rows.new_ones(M, C, K), level_sizes(1, W), flush, keep, far)
    if A is not None:
        q = rows[:, 0] if far is None else rows[:, 0] * far
        A[:, 0].diagonal(dim1=1, dim2=2).copy_((q * k).sum(-1))
    prefix, suffix = prefix.view(g.shape), suffix.view(g.shape)
    if inside is None:
        return levels, blocks.Inside(prefix, suffix, None, None)
    # By block, not by piece: what a block leaves to later tokens must not depend on them.
    last = inside.far[:, :, -1:]
    return levels, inside._replace(suffix=(inside.suffix * (1 - last)).addcmul_(suffix, last))


def intra_backward(rows, x: Intra, exact: torch.Tensor | bool, d_A, d_from_start, d_to_end, d_decay):
    """d_rows, that of q scaled and that of k [M, 2, C, K], and d_g [M, C, K], from the gradients of A (above its diagonals they are not
    read), of x.rows, of x.k_decayed and of x.decay; overwrites them. Of a factor F = exp(E) of the decays, d_E = F d_F.
    `exact`: see `block_backward`."""
    (prefix, suffix, pairs, far), levels, entered, left_over, chunk, weak = x.pairs
    M, n, _, W, K = entered.shape
    d_entered = torch.mul(by_blocks(d_from_start, W), chunk.before[:, :, None, None], out=torch.empty_like(entered))
    d_left_over = d_to_end.view(M, n, W, K).mul_(chunk.after.unsqueeze(2))
    d_prefix = (entered[:, :, 0] * d_entered[:, :, 0]).addcmul_(entered[:, :, 1], d_entered[:, :, 1])
    d_suffix = left_over * d_left_over
    d_prefix[:, :, -1] += meet_backward(chunk, d_A, d_entered, d_left_over, d_prefix, d_suffix, x.decay * d_decay)

    d_rows = d_from_start
    d_by_block = by_blocks(d_rows, W)
    d_k = d_by_block[:, :, 1]
    torch.mul(d_entered, prefix.unsqueeze(2), out=d_by_block)
    d_k.addcmul_(d_left_over, suffix)
    diagonal = d_A[:, 0].diagonal(dim1=1, dim2=2).unsqueeze(-1)  # [M, C, 1]; A_qk's has no decay
    d_rows[:, 0].addcmul_(diagonal, rows[:, 1])
    d_rows[:, 1].addcmul_(diagonal, rows[:, 0])
    if levels:
        d_g = d_prefix
        alone = None if weak is None else blocks.gate_sums(d_prefix[weak], d_suffix[weak])
        climb_backward(levels, d_A, d_rows, d_rows[:, 1], d_prefix.view(M, -1, K), d_suffix.view(M, -1, K))
        if weak is not None:  # what they are by themselves, to the bit, whatever the gates of the others
            d_g.index_copy_(0, weak, alone)
    else:
        d_g = blocks.gate_sums(d_prefix, d_suffix)
    if pairs:
        d_g += blocks.block_backward(pairs, far, exact, d_A, d_by_block, d_k)
    return d_rows, d_g.view(M, -1, K)
