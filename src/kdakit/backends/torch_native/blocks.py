"""Decayed products inside short blocks of tokens, where the gates are weak enough for one product of matrices.

Both tokens of a pair are referred to the start of their block of W tokens,

    A[i, j] = sum_d rows[i,d] prefix[i,d] * k[j,d] / prefix[j,d]        prefix: product of the decays from the block's start through a token

which needs prefix[i,d] > SPAN. That is checked, for every row and channel; those that have decayed further go through `levels`. A product
of at most W decays is off by a rounding error each, however small it is, and so is its reciprocal: nothing cancels, unlike in a difference
of sums. Which of the two ways serves a row depends on the gates up to it alone, and the other adds an exact zero: later tokens change no
bit of it.
"""

from __future__ import annotations

import math

import torch

from kdakit.backends.torch_native.levels import Level, add_products, by_blocks, decayed, decays, flushed, least

BLOCK = 32
SPAN = 2.0**-58  # e^-40, or gates of -1.25 a token; with factors that small, gradients may still be as small as 1e-20
MARGIN = 0.99  # a sum of gates above MARGIN log SPAN: no product of their decays is below SPAN


def reach(g, W: int):
    """Whether a row may have decayed further than SPAN inside its block of W tokens, and whether a chunk has decayed so far that there are
    factors to flush. g [M, C, K]."""
    sums = g.unflatten(1, (-1, W)).sum(2)  # [M, n, K]
    strong = bool(sums.amin() < MARGIN * math.log(SPAN))
    return strong, bool(sums.sum(1).amin() < MARGIN * math.log(least(g.dtype)))


def block_level(rows, k, g, strong: bool, flush: bool, W: int):
    """From rows [M, 2, C, K], k, g [M, C, K]: the level; prefix and, where this way serves, suffix of the blocks [M, C, K]; and 1 where it
    does not serve [M, C, K], 0 elsewhere; None for nowhere."""
    prefix = decays(g, flush).unflatten(1, (-1, W)).cumprod(2)  # [M, n, W, K], of factors in float64
    if strong:
        if flush:
            flushed(prefix)
        row = torch.hardshrink(prefix, SPAN)
        near = row.sign()
        column = prefix.clamp_min(SPAN).reciprocal_().mul_(near)
        far = (1 - near).flatten(1, 2)
    else:
        row, column, far = prefix, prefix.reciprocal(), None
    suffix = column * prefix[:, :, -1:]
    level = Level(row, column, decayed(by_blocks(rows, W), row), k.unflatten(1, (-1, W)) * column)
    return level, prefix.flatten(1, 2), suffix.flatten(1, 2), far


def add_block_products(A, level: Level):
    """Into A [M, 2, C, C]: A_qk with its diagonal, A_kk without."""
    M, n, _, W, K = level.left.shape
    product = torch.bmm(level.left.view(M * n, 2 * W, K), level.right.view(M * n, W, K).mT).view(M * n, 2, W, W)
    product[:, 0].tril_()
    product[:, 1].tril_(-1)
    _diagonal_blocks(A, W).add_(product.view(M, n, 2, W, W))


def block_backward(level: Level, d_A, d_rows, d_k):
    """From the pairs i > j of d_A (the diagonal of A_qk has no decay): adds to d_rows [M, 2, C, K] and d_k [M, C, K]; returns the gradient
    of log row - log column [M, n, W, K]."""
    M, n, _, W, K = level.left.shape
    d_product = _diagonal_blocks(d_A, W).reshape(M * n * 2, W, W).tril_(-1).view(M * n, 2 * W, W)
    d_left = torch.bmm(d_product, level.right.view(M * n, W, K)).view(level.left.shape)
    d_right = torch.bmm(d_product.mT, level.left.view(M * n, 2 * W, K)).view(level.right.shape)
    by_blocks(d_rows, W).addcmul_(d_left, level.row.unsqueeze(2))
    d_k.unflatten(1, (n, W)).addcmul_(d_right, level.column)
    d_pairs = torch.mul(level.right, d_right).neg_()
    add_products(d_pairs, level.left, d_left)
    return d_pairs


def gate_sums(d_prefix, d_suffix, W: int):
    """d_g [M, C, K] from the gradients of log prefix and log suffix of blocks of W tokens: a gate is in the prefixes from its token on and in
    the suffixes of the tokens before it."""
    M, C, K = d_prefix.shape
    ones = torch.ones(W, W, dtype=d_prefix.dtype, device=d_prefix.device)
    from_here, before = (x.expand(M * C // W, W, W) for x in (ones.triu(), ones.tril(-1)))
    return torch.bmm(from_here, d_prefix.view(-1, W, K)).baddbmm_(before, d_suffix.view(-1, W, K)).view(M, C, K)


def add_pair_sums(d_g, d_pairs, far):
    """To d_g [M, C, K], from `block_backward`'s result. It sums to zero over a block, so its sums may be taken from either end: half of
    each, for the smaller rounding error, and none where a gate is in no pair."""
    M, n, W, K = d_pairs.shape
    ones = torch.ones(W, W, dtype=d_g.dtype, device=d_g.device)
    halves_of_sums = (0.5 * (ones.triu() - ones.tril(-1))).expand(M * n, W, W)
    if far is None:
        d_g.view(M * n, W, K).baddbmm_(halves_of_sums, d_pairs.view(M * n, W, K))
    else:
        d_g.addcmul_(torch.bmm(halves_of_sums, d_pairs.view(M * n, W, K)).view(d_g.shape), 1 - far)


def _diagonal_blocks(A, W):
    """A [M, 2, C, C] -> its blocks of W tokens with themselves, [M, n, 2, W, W]; a view."""
    M, _, C, _ = A.shape
    return A.view(M, 2, C // W, W, C // W, W).diagonal(dim1=2, dim2=4).permute(0, 4, 1, 2, 3)
