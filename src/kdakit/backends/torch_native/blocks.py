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
from typing import NamedTuple

import torch

from kdakit.backends.torch_native.levels import Level, decayed, decays, flushed, least
from kdakit.backends.torch_native.wide import paired

BLOCK = 32
SPAN = 2.0**-58  # e^-40, or gates of -1.25 a token; with factors that small, gradients may still be as small as 1e-20
SPIKE = -8.0  # a gate whose gradient may be far smaller than those beside it, and matter: with its weight in d_A_log
MARGIN = 0.99  # a sum of gates above MARGIN log SPAN: no product of their decays is below SPAN


def reach(g):
    """In which chunks a row may have decayed further than SPAN inside its block, see `some`, and whether one has decayed so far that there
    are factors to flush. g [M, n, W, K]. A gate that is NaN or -inf decides for nobody else: the minimum of all would be NaN, and a decay
    of 0 leaves nothing to flush."""
    sums = g.sum(2)
    whole = sums.sum(1)
    return some(sums < MARGIN * math.log(SPAN)), bool(((whole < MARGIN * math.log(least(g.dtype))) & whole.isfinite()).any())


def spiked(g) -> torch.Tensor | bool:
    """In which chunks a gate of g [M, C, K] is below SPIKE, see `some`."""
    return some(g < SPIKE)


def some(true) -> torch.Tensor | bool:
    """[M]: where anything of true [M, ..] is; a bool where that is the same for all."""
    rows = true.flatten(1).any(1)
    number = int(rows.sum())
    return rows if 0 < number < rows.shape[0] else number > 0


class Inside(NamedTuple):
    """What blocks of W tokens are by themselves."""

    prefix: torch.Tensor  # [M, n, W, K]  decay from the block's start through each token
    suffix: torch.Tensor  # [M, n, W, K]  decay after each token to the block's end
    pairs: Level | None  # the pairs that one product serves
    far: torch.Tensor | None  # [M, n, W, K]  1 where it does not, 0 elsewhere; None: it serves all, or there is none


def inside(rows, g, strong: bool, flush: bool) -> Inside:
    """From rows [M, n, 2, W, K] and g [M, n, W, K]. suffix is right where the whole block is served."""
    prefix = decays(g, flush).cumprod(2)  # of factors in float64
    if strong:
        if flush:
            flushed(prefix)
        row = torch.hardshrink(prefix, SPAN)
        near = row.sign()
        column, far = prefix.clamp_min(SPAN).reciprocal_().mul_(near), 1 - near
    else:
        row, column, far = prefix, prefix.reciprocal(), None
    pairs = Level(row, column, decayed(rows, row), rows[:, :, 1] * column)
    return Inside(prefix, column * prefix[:, :, -1:], pairs, far)


def add_block_products(A, level: Level):
    """Into A [M, 2, C, C]: A_qk with its diagonal, A_kk without."""
    M, n, _, W, K = level.left.shape
    product = paired(level.left.view(M * n, 2 * W, K), level.right.view(M * n, W, K)).view(M * n, 2, W, W)
    product[:, 0].tril_()
    product[:, 1].tril_(-1)
    _diagonal_blocks(A, W).add_(product.view(M, n, 2, W, W))


def block_backward(level: Level, far, exact: torch.Tensor | bool, d_A, d_rows, d_k):
    """From the pairs i > j of d_A (the diagonal of A_qk has no decay): adds to d_rows [M, n, 2, W, K] and d_k [M, n, W, K]; returns their
    d_g [M, n, W, K].

    A gate's gradient is here a difference of sums over rows and over columns. Over a whole block it is zero, so the sums may be taken from
    either end: half of each, for the smaller rounding error. `exact`, for all chunks or those [M] that want it: in float64, where both
    are sums of the same products and what cancels cancels.
    """
    M, n, _, W, K = level.left.shape
    d_product = _diagonal_blocks(d_A, W).reshape(M * n * 2, W, W).tril_(-1).view(M * n, 2 * W, W)
    given = d_product, level.left.view(M * n, 2 * W, K), level.right.view(M * n, W, K)
    if isinstance(exact, bool):
        d_left, d_right, d_g = _pairs_backward(*given, exact)
    else:  # chunk by chunk, so that none knows of the others' gates
        d_left, d_right, d_g = found = _pairs_backward(*given, False)
        chosen = exact.repeat_interleave(n).nonzero()[:, 0]
        for whole, part in zip(found, _pairs_backward(*(x[chosen] for x in given), True), strict=True):
            whole.index_copy_(0, chosen, part)
    d_rows.addcmul_(d_left.view(level.left.shape), level.row.unsqueeze(2))
    d_k.addcmul_(d_right.view(level.right.shape), level.column)
    d_g = d_g.view(M, n, W, K)
    return d_g if far is None else d_g.mul_(1 - far)  # a gate that is far is in none of these pairs


def _pairs_backward(d_product, left, right, exact: bool):
    """d_left [.., 2 W, K], d_right and d_g [.., W, K] of product = left right^T."""
    narrow, dtype, W = left.dtype, torch.float64 if exact else left.dtype, right.shape[1]
    d_product, left, right = (x.to(dtype) for x in (d_product, left, right))
    d_left, d_right = torch.bmm(d_product, right), torch.bmm(d_product.mT, left)
    (q, k), (d_q, d_k) = (x.unflatten(1, (2, W)).unbind(1) for x in (left, d_left))
    d_pairs = (q * d_q).addcmul_(k, d_k).addcmul_(right, d_right, value=-1)
    ones = torch.ones(W, W, dtype=dtype, device=left.device)
    d_g = torch.bmm((0.5 * (ones.triu() - ones.tril(-1))).expand(left.shape[0], W, W), d_pairs)
    return d_left.to(narrow), d_right.to(narrow), d_g.to(narrow)


def gate_sums(d_prefix, d_suffix):
    """d_g from the gradients of log prefix and log suffix of blocks, all [M, n, W, K]: a gate is in the prefixes from its token on and in
    the suffixes of the tokens before it."""
    M, n, W, K = d_prefix.shape
    ones = torch.ones(W, W, dtype=d_prefix.dtype, device=d_prefix.device)
    from_here, before = (x.expand(M * n, W, W) for x in (ones.triu(), ones.tril(-1)))
    return torch.bmm(from_here, d_prefix.view(-1, W, K)).baddbmm_(before, d_suffix.view(-1, W, K)).view(d_prefix.shape)


def _diagonal_blocks(A, W):
    """A [M, 2, C, C] -> its blocks of W tokens with themselves, [M, n, 2, W, W]; a view."""
    M, _, C, _ = A.shape
    return A.view(M, 2, C // W, W, C // W, W).diagonal(dim1=2, dim2=4).permute(0, 4, 1, 2, 3)
