"""kdakit::project: y = x [W_1; W_2; W_3]^T in one row, from matrices that stay where they are, and low = x W_low^T beside it.

dx = sum_i dy_i W_i + dlow W_low        [dW_1; dW_2; dW_3] = dy^T x, one product        dW_low = dlow^T x
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdakit.layers.torch.fused.operator import Operator


def project(x: Tensor, q: Tensor, k: Tensor, v: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """x [.., D], matrices [out, D] -> [.., the sum of the first three outs], [.., out of low]."""
    row, rest = OPERATOR(x, q, k, v, low)
    return row, rest


def forward(x, q, k, v, low):
    flat, outs = x.reshape(-1, x.shape[-1]), [len(q), len(k), len(v)]
    y = torch.empty((len(flat), sum(outs)), dtype=x.dtype, device=x.device)
    for w, part in zip((q, k, v), y.split(outs, 1), strict=True):
        torch.mm(flat, w.t(), out=part)
    return [y.view(*x.shape[:-1], -1), torch.mm(flat, low.t()).view(*x.shape[:-1], -1)]


def backward(grads, needed, x, q, k, v, low):
    flat, outs = x.reshape(-1, x.shape[-1]), [len(q), len(k), len(v)]
    d_y, d_low = (x.new_zeros(len(flat), n) if d is None else d.reshape(len(flat), n)
                  for d, n in zip(grads, (sum(outs), len(low)), strict=True))  # fmt: skip
    d_x = None
    if needed[0]:
        d_x = torch.mm(d_low, low)
        if len(flat) > 2 * sum(outs):  # copying the matrices together moves fewer bytes than adding to d_x three times
            d_x.addmm_(d_y, torch.cat([q, k, v]))
        else:
            for d, w in zip(d_y.split(outs, 1), (q, k, v), strict=True):
                d_x.addmm_(d, w)
        d_x = d_x.view(x.shape)
    d_q = d_k = d_v = None
    if any(needed[1:4]):
        d_q, d_k, d_v = (d_y.t() @ flat).split(outs)
    return [d_x, d_q, d_k, d_v, d_low.t() @ flat if needed[4] else None]


def _shapes(x, q, k, v, low):
    return [x.new_empty((*x.shape[:-1], len(q) + len(k) + len(v))), x.new_empty((*x.shape[:-1], len(low)))]


OPERATOR = Operator(
    "project", "Tensor x, Tensor q, Tensor k, Tensor v, Tensor low", tensors=5, differentiable=5, forward=forward, backward=backward,
    shapes=_shapes,
)  # fmt: skip
