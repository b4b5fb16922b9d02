"""Within a chunk: decayed products, the triangular inverse, w and u. Every stage has its backward beside it.

The decay between two tokens is the product of the decays of the tokens between them, never a quotient of running products (and never the
exponential of a difference of running sums). Products over blocks of size 2b come from those of size b: inside each block a `prefix`
(inclusive, from the block's start) and a `suffix` (exclusive, to the block's end). At level b an odd block meets the even block before it,
and both are referred to the boundary between them, so both factors are <= 1 for any gate:

    A[i, j] = sum_d rows[i,d] prefix_b[i,d] * k[j,d] suffix_b[j,d]        i in an odd block, j in the even block before it

One exponential per token and channel, and the rounding errors of the recurrence itself: exp of a sum of gates would be off by the sum's
rounding error, |sum| times as much. M stands for all chunks of all rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

GROUP = 32  # tokens whose blocks of one level share a product: a few more flops, far fewer and larger matrices


class Level(NamedTuple):
    """Level b, for n = C / 2b pairs of blocks."""

    row: torch.Tensor  # [M, n, b, K]     prefix of the odd blocks
    column: torch.Tensor  # [M, n, b, K]     suffix of the even blocks
    left: torch.Tensor  # [M, n, b, 2, K]  decayed rows of the odd blocks
    right: torch.Tensor  # [M, n, b, K]     decayed k of the even blocks


class Intra(NamedTuple):
    A: torch.Tensor  # [M, C, 2, C]  A_qk with its diagonal, A_kk strictly lower
    inverse: torch.Tensor  # [M, C, C]  (I + A_kk)^-1
    uw: torch.Tensor  # [M, C, V + K]
    rows_decayed: torch.Tensor  # [M, C, 2, K]  q_decayed and beta k exp(g_cum)
    k_decayed: torch.Tensor  # [M, C, K]
    decay: torch.Tensor  # [M, K]
    from_start: torch.Tensor  # [M, C, K]  decay from the chunk's start through each token
    to_end: torch.Tensor  # [M, C, K]  decay after each token to the chunk's end
    levels: list[Level]


def level_sizes(C: int) -> list[int]:
    """1, 2, 4, .. C / 2."""
    return [1 << i for i in range(C.bit_length() - 1)]


def _blocks(x, b):
    """[M, C, ..] -> even and odd blocks of b tokens, each [M, C / 2b, b, ..]; views."""
    pairs = x.view(x.shape[0], x.shape[1] // (2 * b), 2, b, *x.shape[2:])
    return pairs[:, :, 0], pairs[:, :, 1]


def _blocks_of_A(A, b):
    """A [M, C, 2, C] -> the blocks that level b owns, [M, b, 2, b, n]; a view."""
    M, C = A.shape[0], A.shape[1]
    n = C // (2 * b)
    return A.view(M, n, 2, b, 2, n, 2, b)[:, :, 1, :, :, :, 0].diagonal(dim1=1, dim2=4)


def _blocks_of_product(P, M, b):
    """P [groups, 2 p b, p b], the product of p odd blocks (two rows a token) with the p even ones -> [M, b, 2, b, n]; a view or a copy."""
    p = P.shape[-1] // b
    own = P.view(M, -1, p, b, 2, p, b).diagonal(dim1=2, dim2=5)  # [M, groups, b, 2, b, p]
    return own.permute(0, 2, 3, 4, 1, 5).flatten(4)


def _grouped(level, b):
    """left [groups, 2 p b, K] and right [groups, p b, K] of p = GROUP / 2b pairs each."""
    K = level.right.shape[-1]
    width = max(b, min(GROUP // 2, level.right.shape[1] * b))
    return level.left.reshape(-1, 2 * width, K), level.right.reshape(-1, width, K)


def meets_subnormals(g):
    """Whether a CPU would run into subnormal numbers, each of which costs it as much as a hundred normal ones. g [M, C, K]."""
    return g.device.type == "cpu" and g.numel() > 0 and bool(g.sum(1).min() < math.log(torch.finfo(g.dtype).tiny))


def _flush(x, margin=1.0):
    """In place: what is smaller than the smallest normal number, times a margin that keeps products with x normal, becomes zero."""
    return torch.hardshrink(x, margin * torch.finfo(x.dtype).tiny, out=x)


PRODUCT_MARGIN = 2.0**10


def decayed_products(rows, k, g, A=None, keep=False, flush=False):
    """A [M, C, 2, C] from rows [M, C, 2, K] (q scaled, k beta), columns k and log-decays g [M, C, K]; prefix and suffix over the chunk;
    and, to keep for the backward, the levels. A that is given is not computed."""
    M, C, _, _ = rows.shape
    prefix, suffix = g.exp(), torch.ones_like(g)
    if flush:
        _flush(prefix)
    product = rows.new_zeros(M, C, 2, C) if A is None else A
    levels = []
    for b in level_sizes(C):
        (p_even, p_odd), (s_even, _) = _blocks(prefix, b), _blocks(suffix, b)
        if A is None or keep:
            level = Level(p_odd, s_even, _blocks(rows, b)[1] * p_odd.unsqueeze(-2), _blocks(k, b)[0] * s_even)
            if flush:
                _flush(level.left, PRODUCT_MARGIN)
                _flush(level.right, PRODUCT_MARGIN)
        if A is None:
            left, right = _grouped(level, b)
            _blocks_of_A(product, b).copy_(_blocks_of_product(torch.bmm(left, right.mT), M, b))
        if keep:
            levels.append(level._replace(row=p_odd.clone(), column=s_even.clone()))
        s_even *= p_odd[:, :, -1:]
        p_odd *= p_even[:, :, -1:]
        if flush:
            _flush(s_even)
            _flush(p_odd)
    if A is None:
        product[:, :, 0].diagonal(dim1=1, dim2=2).copy_((rows[:, :, 0] * k).sum(-1))
    return product, prefix, suffix, levels


def decayed_products_backward(rows, k, levels, d_A, d_rows, d_k, d_prefix, d_suffix):
    """The adjoint of `decayed_products`, from the widest level down. Adds to d_rows and d_k, returns d_g.

    d_prefix and d_suffix [M, C, K] come in as the gradients of the logarithms of prefix and suffix over the whole chunk and are used up.
    d_g is a sum over the pairs of tokens that a gate lies between: no term is added only to be subtracted again, so a small gradient beside
    large ones survives.
    """
    M, C, _, _ = rows.shape
    diagonal = d_A[:, :, 0].diagonal(dim1=1, dim2=2).unsqueeze(-1)  # [M, C, 1]
    d_rows[:, :, 0].addcmul_(diagonal, k)
    d_k.addcmul_(diagonal, rows[:, :, 0])
    for b, level in zip(reversed(level_sizes(C)), reversed(levels), strict=True):
        (p_even, p_odd), (s_even, _) = _blocks(d_prefix, b), _blocks(d_suffix, b)
        p_even[:, :, -1] += p_odd.sum(2)
        p_odd[:, :, -1] += s_even.sum(2)
        left, right = _grouped(level, b)
        width = right.shape[1]
        d_product = d_A.new_zeros(right.shape[0], 2 * width, width)
        own = d_product.view(M, -1, width // b, b, 2, width // b, b).diagonal(dim1=2, dim2=5)  # [M, groups, b, 2, b, p]
        own.copy_(_blocks_of_A(d_A, b).unflatten(4, own.shape[1::4]).permute(0, 4, 1, 2, 3, 5))
        d_left = torch.bmm(d_product, right).view(level.left.shape).mul_(level.row.unsqueeze(-2))
        d_right = torch.bmm(d_product.mT, left).view(level.right.shape).mul_(level.column)
        (_, rows_odd), (k_even, _) = _blocks(rows, b), _blocks(k, b)
        _blocks(d_rows, b)[1].add_(d_left)
        _blocks(d_k, b)[0].add_(d_right)
        for row in (0, 1):
            p_odd.addcmul_(d_left[..., row, :], rows_odd[..., row, :])
        s_even.addcmul_(d_right, k_even)
    return d_prefix


def unit_lower_inverse(A_kk):
    """(I + A_kk)^-1 by substitution; only the strictly lower triangle of A_kk is read."""
    eye = torch.eye(A_kk.shape[-1], dtype=A_kk.dtype, device=A_kk.device)
    return torch.linalg.solve_triangular(A_kk, eye.expand_as(A_kk), upper=False, unitriangular=True)


def intra(rows, k, v, beta, g, kept=None, keep_levels=False) -> Intra:
    """Everything of a chunk that needs no state: rows [M, C, 2, K], k, g [M, C, K], v [M, C, V], beta [M, C, 1].

    `kept`: A, inverse and uw of an earlier call. `keep_levels`: a backward follows.
    """
    A, inverse, uw = kept or (None, None, None)
    V = v.shape[-1]
    flush = meets_subnormals(g)
    A, from_start, to_end, levels = decayed_products(rows, k, g, A, keep_levels, flush)
    rows_decayed, k_decayed = rows * from_start.unsqueeze(-2), k * to_end
    if flush:
        for x in (rows_decayed, k_decayed):
            _flush(x, PRODUCT_MARGIN)
    if kept is None:
        if flush:
            _flush(A, PRODUCT_MARGIN)
        inverse = unit_lower_inverse(A[:, :, 1])
        if flush:
            _flush(inverse, PRODUCT_MARGIN)
        right_side = rows.new_empty(*k.shape[:2], V + k.shape[-1])
        torch.mul(v, beta, out=right_side[..., :V])
        right_side[..., V:] = rows_decayed[:, :, 1]
        uw = torch.bmm(inverse, right_side)
        if flush:
            _flush(uw, PRODUCT_MARGIN)
    return Intra(A, inverse, uw, rows_decayed, k_decayed, from_start[:, -1], from_start, to_end, levels)
