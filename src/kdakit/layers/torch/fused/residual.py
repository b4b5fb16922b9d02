"""What lies between the mixers of a model, as functions with their derivatives: norms that take the residual stream along, and the SwiGLU.

    carried        s = x + mixed, or x        y = rmsnorm(s)        both handed on: ds + drmsnorm(dy) goes back to x and mixed
    feed_forward   out = W_d (silu(W_g x) (W_u x))

Sums that stand alone read and write the stream once more each, four times a block. Calls that are watched, and modules that are not as they
were built, take plain operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kdakit.layers.torch.fused import DTYPES, fits, gated_norm, swiglu
from kdakit.layers.torch.fused.layer import is_plain
from kdakit.torch_operators import unwatched


def carried(x: Tensor, mixed: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
    """(the norm of x + mixed, x + mixed); None: not for this function."""
    given = (x, weight) if mixed is None else (x, mixed, weight)
    if not x.is_cuda or (mixed is not None and mixed.dtype != x.dtype) or not x.numel() or not unwatched(given) or not fits(*given):
        return None
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return Carried.apply(x, mixed, weight, eps)
    y, *total = gated_norm.forward(x, weight, None, None, eps, mixed)
    return y, total[0] if total else x


class Carried(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mixed, weight, eps):
        y, *total = gated_norm.forward(x, weight, None, None, eps, mixed)
        total = total[0] if total else x.view_as(x)
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.has_mixed = eps, mixed is not None
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    def backward(ctx, d_y, d_total):
        total, weight = ctx.saved_tensors
        refuse_a_graph()
        d_x, d_weight = d_total, None
        if d_y is not None:
            d_x, d_weight, _, _ = gated_norm.backward([d_y], (True, True), total, weight, None, None, ctx.eps, d_total)
        return d_x, d_x if ctx.has_mixed else None, d_weight, None


def feed_forward(mlp: Any, x: Tensor) -> Tensor | None:
    """A SwiGLU of x; None: not for this function."""
    if not x.is_cuda or x.dtype not in DTYPES or not x.numel():
        return None
    m = mlp._modules
    matrices = m["gate_proj"], m["up_proj"], m["down_proj"]
    if not all(map(is_plain, matrices)) or torch.is_autocast_enabled("cuda"):
        return None
    w = [matrix._parameters.get("weight") for matrix in matrices]
    given = (x, *w)
    if any(p is None or p.dtype != x.dtype for p in w) or not unwatched(given) or not fits(*given):
        return None
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return FeedForward.apply(x, *w) if all(p.requires_grad for p in w) else None
    return _feed(x, *w)[0]


def _feed(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
    flat = x.reshape(-1, x.shape[-1])
    a, b = torch.mm(flat, gate.t()), torch.mm(flat, up.t())
    (s,) = swiglu.forward(a, b)
    return torch.mm(s, down.t()).view(*x.shape[:-1], -1), flat, a, b, s


class FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, up, down):
        out, flat, a, b, s = _feed(x, gate, up, down)
        ctx.save_for_backward(flat, a, b, s, gate, up, down)
        return out

    @staticmethod
    def backward(ctx, d_out):
        x, a, b, s, gate, up, down = handed_over(ctx)
        refuse_a_graph()
        flat = d_out.reshape(len(x), -1)
        d_down = torch.mm(flat.t(), s)
        del s
        d_a, d_b = swiglu.backward([torch.mm(flat, down)], (True, True), a, b)
        del a, b
        d_x = torch.mm(d_a, gate).addmm_(d_b, up).view(*d_out.shape[:-1], -1) if ctx.needs_input_grad[0] else None
        return d_x, torch.mm(d_a.t(), x), torch.mm(d_b.t(), x), d_down


def handed_over(ctx) -> tuple[Tensor, ...]:
    """What a forward saved. A graph that is walked once lets go of it here, so that each tensor's memory is free when its last reader is
    done, not when the whole backward is."""
    saved = ctx.saved_tensors
    let_go = getattr(ctx, "maybe_clear_saved_tensors", None)  # PyTorch's own, not in its documents
    if let_go is not None:
        let_go()
    return saved


def refuse_a_graph() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError("the layer's kernels have no second derivative: call backward without create_graph=True")
