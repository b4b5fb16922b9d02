"""Decayed products of tokens in different blocks, and all that a block has to do with the rest of its chunk.

What a token's decay is inside its block of W tokens is in the arrays already: `entered` [M, n, 2, W, K], q and k decayed from the block's
start, and `left_over` [M, n, W, K], k decayed to the block's end. What is missing are products of the decays over whole blocks, a few
numbers. At level m, m odd blocks meet the m even ones before them, and both are referred to the boundary between them:

    A[i, j] = sum_d entered[i,d] before_m[I,d] * left_over[j,d] after_m[J,d]        i in block I, j in block J

before_m: over the blocks before I among its m, after_m: over those after J among its m. Nothing exceeds 1, for any gate.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kdakit.backends.torch_native.levels import flushed, flushed_product
from kdakit.backends.torch_native.wide import paired


class Meeting(NamedTuple):
    """g groups of m odd blocks and of the m even ones before them."""

    before: torch.Tensor  # [M, g, m, K]  of the odd ones
    after: torch.Tensor  # [M, g, m, K]  of the even ones
    left: torch.Tensor  # [M, g, m, 2, W, K]  rows of the odd ones
    right: torch.Tensor  # [M, g, m, W, K]  columns of the even ones


class Chunk(NamedTuple):
    before: torch.Tensor  # [M, n, K]  decay from the chunk's start to each block
    after: torch.Tensor  # [M, n, K]  decay after each block to the chunk's end
    whole: torch.Tensor  # [M, K]  over the chunk
    meetings: list[Meeting]


def groups(x, m):
    """[M, n, ..] -> even and odd groups of m blocks, each [M, n / 2m, m, ..]; views."""
    return x.view(x.shape[0], -1, 2, m, *x.shape[2:]).unbind(2)


def meet(A, entered, left_over, whole, flush, keep) -> Chunk:
    """Of blocks that decay by whole [M, n, K]. Writes into A [M, 2, C, C], unless it is None."""
    M, n, K = whole.shape
    before, after, total, meetings, m = torch.ones_like(whole), torch.ones_like(whole), whole, [], 1
    while m < n:
        (b_even, b_odd), (a_even, a_odd), (t_even, t_odd) = groups(before, m), groups(after, m), groups(total, 1)
        left, right = groups(entered, m)[1], groups(left_over, m)[0]
        if m > 1:
            left, right = left * b_odd[:, :, :, None, None], right * a_even[:, :, :, None]
        if m > 1 and flush:
            left, right = flushed_product(left), flushed_product(right)
        meeting = Meeting(b_odd, a_even, left, right)
        if A is not None:
            left, right = _matrices(meeting)
            _blocks_of_A(A, meeting).copy_(paired(left, right).view(*meeting.left.shape[:-1], -1).permute(0, 3, 2, 4, 5, 1))
        if keep:
            meetings.append(meeting)
        before, after = torch.stack([b_even, b_odd * t_even], 2).view(M, n, K), torch.stack([a_even * t_odd, a_odd], 2).view(M, n, K)
        total = (t_even * t_odd).squeeze(2)
        if flush:
            before, after, total = flushed(before), flushed(after), flushed(total)
        m *= 2
    return Chunk(before, after, total.view(M, K), meetings)


def meet_backward(x: Chunk, d_A, d_entered, d_left_over, d_prefix, d_suffix, d_whole):
    """Adds to d_entered and d_left_over, and to d_prefix and d_suffix [M, n, W, K], the gradients of the logarithms of the decays inside
    the blocks, whose sums are at first those of x.before and x.after. d_whole [M, K] is that of log x.whole; returns that of the logarithm
    of each block's decay [M, n, K]."""
    d_before, d_after, d_total = d_prefix.sum(2), d_suffix.sum(2), d_whole[:, None, None]
    for meeting in reversed(x.meetings):
        M, g, m, _, W, K = meeting.left.shape
        (_, b_odd), (a_even, _) = groups(d_before, m), groups(d_after, m)
        d_total = torch.stack([d_total + b_odd.sum(2, keepdim=True), d_total + a_even.sum(2, keepdim=True)], 2).view(M, -1, 1, K)
        d_product = _blocks_of_A(d_A, meeting).permute(0, 5, 2, 1, 3, 4).reshape(M * g, m * 2 * W, m * W)
        left, right = _matrices(meeting)
        d_left = torch.bmm(d_product, right).view(meeting.left.shape)
        d_right = torch.bmm(d_product.mT, left).view(meeting.right.shape)
        rows, columns, p_odd, s_even = groups(d_entered, m)[1], groups(d_left_over, m)[0], groups(d_prefix, m)[1], groups(d_suffix, m)[0]
        if m > 1:
            rows.addcmul_(d_left, meeting.before[:, :, :, None, None])
            columns.addcmul_(d_right, meeting.after[:, :, :, None])
            by_row = (meeting.left[:, :, :, 0] * d_left[:, :, :, 0]).addcmul_(meeting.left[:, :, :, 1], d_left[:, :, :, 1])
            by_column = d_right.mul_(meeting.right)
            p_odd += by_row
            s_even += by_column
            b_odd += by_row.sum(3)
            a_even += by_column.sum(3)
        else:
            rows += d_left
            columns += d_right
            p_odd.addcmul_(meeting.left[:, :, :, 0], d_left[:, :, :, 0]).addcmul_(meeting.left[:, :, :, 1], d_left[:, :, :, 1])
            s_even.addcmul_(meeting.right, d_right)
    return d_total.view(x.before.shape)


def _matrices(meeting: Meeting):
    """left [M g, 2 m W, K] and right [M g, m W, K]."""
    M, g, m, _, W, K = meeting.left.shape
    return meeting.left.reshape(M * g, m * 2 * W, K), meeting.right.reshape(M * g, m * W, K)


def _blocks_of_A(A, meeting: Meeting):
    """A [M, 2, C, C] -> what the meeting owns of it, [M, 2, m, W, m W, g]; a view."""
    M, g, m, _, W, _ = meeting.left.shape
    return A.view(M, 2, g, 2, m, W, g, 2, m * W)[:, :, :, 1, :, :, :, 0].diagonal(dim1=2, dim2=5)
