"""Decayed products at any gate: levels of blocks.

The decay between two tokens is the product of the decays of the tokens between them. Products over blocks of size 2b come from those of
size b: inside each block a `prefix` (inclusive, from the block's start) and a `suffix` (exclusive, to the block's end). At level b an odd
block meets the even block before it, and both are referred to the boundary between them, so both factors are <= 1 for any gate:

    A[i, j] = sum_d rows[i,d] prefix_b[i,d] * k[j,d] suffix_b[j,d]        i in an odd block, j in the even block before it

Rows are those of q and of k. Products of decays have the rounding errors of the recurrence itself: exp of a sum of gates would be off by
the sum's rounding error, |sum| times as much. M stands for all chunks of all rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from kdakit.backends.torch_native.wide import paired

GROUP = 32  # tokens whose blocks of one level share a product: a few more flops, far fewer and larger matrices


class Level(NamedTuple):
    """n blocks of b tokens that are rows and as many that are columns."""

    row: torch.Tensor  # [M, n, b, K]
    column: torch.Tensor  # [M, n, b, K]
    left: torch.Tensor  # [M, n, 2, b, K]  q row and k row
    right: torch.Tensor  # [M, n, b, K]  k column


def level_sizes(start: int, stop: int) -> list[int]:
    """start, 2 start, 4 start, .. stop / 2."""
    return [1 << i for i in range(start.bit_length() - 1, stop.bit_length() - 1)]


def by_blocks(rows, b):
    """[M, 2, C, K] -> [M, C / b, 2, b, K]; a view."""
    M, _, C, K = rows.shape
    return rows.view(M, 2, C // b, b, K).transpose(1, 2)


def halves(x, b):
    """[M, C, K] -> even and odd blocks of b tokens, each [M, C / 2b, b, K]; views."""
    M, C, K = x.shape
    return x.view(M, C // (2 * b), 2, b, K).unbind(2)


def odd_rows(rows, b):
    """[M, 2, C, K] -> those of the odd blocks of b tokens, [M, C / 2b, 2, b, K]; a view."""
    M, _, C, K = rows.shape
    return rows.view(M, 2, C // (2 * b), 2, b, K)[:, :, :, 1].transpose(1, 2)


def decayed(rows, decay):
    """rows [M, n, 2, b, K] times decay [M, n, b, K], whatever the layout of rows."""
    return torch.mul(rows, decay.unsqueeze(2), out=rows.new_empty(rows.shape))


def least(dtype) -> float:
    """2^-100 in float32. Where there are smaller decays, they become zero: their products would soon be subnormal numbers, each of which
    costs a CPU as much as a hundred normal ones."""
    return torch.finfo(dtype).tiny * 2.0**26


def flushed(decay):
    """In place: what is smaller than `least` becomes zero."""
    return torch.hardshrink(decay, least(decay.dtype), out=decay)


def flushed_product(x):
    """The same for products of decays with something else, which may be as small as products with them can bear."""
    return torch.hardshrink(x, torch.finfo(x.dtype).tiny * 2.0**10, out=x)


def decays(g, flush: bool):
    """exp(g). The exponential of a large negative number is as slow as a subnormal one."""
    return flushed(g.clamp_min(math.log(least(g.dtype)) - 1).exp_()) if flush else g.exp()


def climb(A, rows, k, prefix, suffix, sizes, flush, keep, far=None):
    """The levels b in `sizes`: rows [M, 2, C, K], columns k [M, C, K], prefix and suffix of blocks of sizes[0]. far [M, C, K]: 1 for the
    rows and channels to be taken, 0 for the others; None for all.

    Writes their products into A [M, 2, C, C], unless it is None. Returns the levels, if they are to be kept, and prefix and suffix of
    blocks of 2 sizes[-1]."""
    levels = []
    for b in sizes:
        (_, p_odd), (s_even, _) = halves(prefix, b), halves(suffix, b)
        row = p_odd if far is None else p_odd * halves(far, b)[1]
        level = Level(row, s_even, decayed(odd_rows(rows, b), row), halves(k, b)[0] * s_even)
        if A is not None:
            left, right = _grouped(level)
            _blocks_of_A(A, b).copy_(_own(paired(left, right), k.shape[0], b).permute(0, 2, 3, 4, 1, 5).flatten(4))
        if keep:
            levels.append(level)
        prefix, suffix = _doubled(prefix, suffix, b, flush)
    return levels, prefix, suffix


def _doubled(prefix, suffix, b, flush):
    """From blocks of b to blocks of 2b."""
    (p_even, p_odd), (s_even, s_odd) = halves(prefix, b), halves(suffix, b)
    prefix, suffix = torch.empty_like(prefix), torch.empty_like(suffix)
    (p_left, p_right), (s_left, s_right) = halves(prefix, b), halves(suffix, b)
    p_left.copy_(p_even)
    torch.mul(p_odd, p_even[:, :, -1:], out=p_right)
    torch.mul(s_even, p_odd[:, :, -1:], out=s_left)
    s_right.copy_(s_odd)
    if flush:
        flushed(p_right)
        flushed(s_left)
    return prefix, suffix


def climb_backward(levels, d_A, d_rows, d_k, d_prefix, d_suffix):
    """The adjoint of `climb`, from the widest level down, in place: adds to d_rows [M, 2, C, K] and d_k [M, C, K] (which may be a part of
    it), and takes d_prefix and d_suffix [M, C, K], the gradients of the logarithms of prefix and suffix, from the widest blocks to the
    narrowest.

    A gate's gradient is a sum over the pairs of tokens that it lies between: no term is added only to be subtracted again, so a small
    gradient beside large ones survives.
    """
    M = d_A.shape[0]
    for level in reversed(levels):
        b = level.right.shape[2]
        (p_even, p_odd), (s_even, _) = halves(d_prefix, b), halves(d_suffix, b)
        p_even[:, :, -1] += p_odd.sum(2)
        p_odd[:, :, -1] += s_even.sum(2)
        left, right = _grouped(level)
        d_product = d_A.new_zeros(right.shape[0], left.shape[1], right.shape[1])
        own = _own(d_product, M, b)
        own.copy_(_blocks_of_A(d_A, b).unflatten(4, own.shape[1::4]).permute(0, 4, 1, 2, 3, 5))
        d_left = torch.bmm(d_product, right).view(level.left.shape)
        d_right = torch.bmm(d_product.mT, left).view(level.right.shape)
        odd_rows(d_rows, b).addcmul_(d_left, level.row.unsqueeze(2))
        halves(d_k, b)[0].addcmul_(d_right, level.column)
        add_products(p_odd, level.left, d_left)
        s_even.addcmul_(level.right, d_right)


def add_products(total, rows, d_rows):
    """To total [M, n, b, K]: those of q and those of k."""
    for x, d_x in zip(rows.unbind(2), d_rows.unbind(2), strict=True):
        total.addcmul_(x, d_x)


def _grouped(level: Level):
    """left [groups, 2 p b, K] and right [groups, p b, K] of p = GROUP / 2b pairs each."""
    _, n, b, K = level.right.shape
    width = max(b, min(GROUP // 2, n * b))
    return level.left.view(-1, 2 * width, K), level.right.view(-1, width, K)


def _own(P, M, b):
    """P [groups, 2 p b, p b], the product of p odd blocks with the p even ones -> of each with its own, [M, groups, 2, b, b, p]; a view."""
    p = P.shape[-1] // b
    return P.view(M, -1, p, 2, b, p, b).diagonal(dim1=2, dim2=5)


def _blocks_of_A(A, b):
    """A [M, 2, C, C] -> the blocks that level b owns, [M, 2, b, b, n]; a view."""
    M, _, C, _ = A.shape
    n = C // (2 * b)
    return A.view(M, 2, n, 2, b, n, 2, b)[:, :, :, 1, :, :, 0].diagonal(dim1=2, dim2=4)
