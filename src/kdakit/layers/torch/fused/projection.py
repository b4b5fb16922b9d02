"""kdakit::project: y = x [W_1; W_2; ..]^T in one row, from matrices that stay where they are.

dx = sum_i dy_i W_i        [dW_1; dW_2; ..] = dy^T x, one product
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kdakit.layers.torch.fused.operator import Operator


def project(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """x [.., D], matrices [out, D] -> [.., the sum of their outs]."""
    return OPERATOR(x, q, k, v)[0]


def _forward(x, *weights):
    flat, outs = x.reshape(-1, x.shape[-1]), [len(w) for w in weights]
    y = torch.empty((len(flat), sum(outs)), dtype=x.dtype, device=x.device)
    for w, part in zip(weights, y.split(outs, 1), strict=True):
        torch.mm(flat, w.t(), out=part)
    return [y.view(*x.shape[:-1], -1)]


def _backward(grads, needed, x, *weights):
    flat, outs = x.reshape(-1, x.shape[-1]), [len(w) for w in weights]
    d_y = grads[0].reshape(len(flat), -1)
    d_x = None
    if needed[0]:
        parts = list(zip(d_y.split(outs, 1), weights, strict=True))
        d_x = torch.mm(*parts[0])
        for d, w in parts[1:]:
            d_x.addmm_(d, w)
        d_x = d_x.view(x.shape)
    d_weights: Sequence[Tensor | None] = [None] * len(weights)
    if any(needed[1:]):
        d_weights = (d_y.t() @ flat).split(outs)
    return [d_x, *d_weights]


def _shapes(x, *weights):
    return [x.new_empty((*x.shape[:-1], sum(len(w) for w in weights)))]


OPERATOR = Operator(
    "project", "Tensor x, Tensor q, Tensor k, Tensor v", tensors=4, differentiable=4, forward=_forward, backward=_backward, shapes=_shapes
)
