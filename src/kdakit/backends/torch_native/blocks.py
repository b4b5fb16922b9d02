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

from kdakit.backends.torch_native.levels import Level, by_blocks, decayed, decays, flushed, least

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


def block_backward(level: Level, far, d_A, d_rows, d_k):
    """From the pairs i > j of d_A (the diagonal of A_qk has no decay): adds to d_rows [M, 2, C, K] and d_k [M, C, K]; returns their d_g
    [M, C, K].

    A gate's gradient is here a difference of sums over rows and over columns, and may be far smaller than either. In float64 both are sums
    of the same products, so that what cancels cancels. The difference is zero over a whole block, and none where a gate is in no pair.
    """
    M, n, _, W, K = level.left.shape
    d_product = _diagonal_blocks(d_A, W).reshape(M * n * 2, W, W).tril_(-1).view(M * n, 2 * W, W).double()
    left, right = level.left.view(M * n, 2 * W, K).double(), level.right.view(M * n, W, K).double()
    d_left, d_right = torch.bmm(d_product, right), torch.bmm(d_product.mT, left)
    by_blocks(d_rows, W).addcmul_(d_left.to(d_k.dtype).view(level.left.shape), level.row.unsqueeze(2))
    d_k.unflatten(1, (n, W)).addcmul_(d_right.to(d_k.dtype).view(level.right.shape), level.column)
    (q, k), (d_q, d_k_rows) = (x.view(M * n, 2, W, K).unbind(1) for x in (left, d_left))
    d_pairs = d_right.mul_(right).neg_().addcmul_(q, d_q).addcmul_(k, d_k_rows)
    d_g = _sums(d_pairs, from_here=True).to(d_k.dtype).view(M, n * W, K)
    return d_g if far is None else d_g.mul_(1 - far)


def gate_sums(d_prefix, d_suffix, W: int):
    """d_g [M, C, K] from the gradients of log prefix and log suffix of blocks of W tokens: a gate is in the prefixes from its token on and in
    the suffixes of the tokens before it."""
    K = d_prefix.shape[2]
    d_g = _sums(d_prefix.view(-1, W, K), from_here=True) + _sums(d_suffix.view(-1, W, K), from_here=False)
    return d_g.view(d_prefix.shape)


def _sums(x, from_here: bool):
    """x [N, W, K] -> for each token the sum over those from it on, or over those before it."""
    ones = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype, device=x.device)
    return torch.bmm((ones.triu_() if from_here else ones.tril_(-1)).expand(x.shape[0], -1, -1), x)


def _diagonal_blocks(A, W):
    """A [M, 2, C, C] -> its blocks of W tokens with themselves, [M, n, 2, W, W]; a view."""
    M, _, C, _ = A.shape
    return A.view(M, 2, C // W, W, C // W, W).diagonal(dim1=2, dim2=4).permute(0, 4, 1, 2, 3)
