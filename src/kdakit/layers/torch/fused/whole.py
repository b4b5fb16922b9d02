"""A KimiDeltaAttention on whole sequences, nothing carried, as two functions with their derivatives: `Mixed`, x to the operator's o, and
`Returned`, o to the layer's output.

What PyTorch does around each of the layer's thirty operations takes the host longer than the GPU takes for short sequences: here nobody
watches them one by one. Calls that are watched, and layers that are not as they were built, take the way of `layer`.

    row = x [W_q; W_k; W_v]^T        low_f, low_g, beta = x [W_f0; W_g0; W_b]^T        q, k, v = silu(conv(row))        g = low_f W_f1^T
    o = kda(q, k, v, g, beta)        gate = low_g W_g1^T        y = rmsnorm(o) weight sigmoid(gate + bias)        out = y W_o^T
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kdakit.layers.sizes import LayerSizes
from kdakit.layers.torch.fused import DTYPES, gated_norm, projection, short_convolution, shown
from kdakit.layers.torch.fused.layer import hooked
from kdakit.layers.torch.fused.residual import handed_over, refuse_a_graph
from kdakit.torch_operators import Arrays, Options, all_in_kernel, run, run_backward, unwatched


class Weights(NamedTuple):
    """Of a layer without convolution biases. Matrices [out, in]."""

    q: Tensor
    k: Tensor
    v: Tensor
    low_f: Tensor
    low_g: Tensor
    beta: Tensor
    q_taps: Tensor  # [channels, 1, W]
    k_taps: Tensor
    v_taps: Tensor
    f: Tensor
    A_log: Tensor
    dt_bias: Tensor
    g: Tensor
    g_bias: Tensor
    norm: Tensor
    o: Tensor


MATRICES = 6  # the first ones, which x meets
MIXED = 12  # the first ones, which `Mixed` needs


class Form(NamedTuple):
    """What is not a number of the layer."""

    sizes: LayerSizes
    backend: str
    cu_seqlens: Tensor | None


def whole_layer(layer: Any, x: Tensor, cu_seqlens: Tensor | None) -> Tensor | None:
    """The layer's output [B, T, hidden_size]; None: this is not for these functions."""
    if not x.is_cuda or not takes(layer, x):
        return None
    w = weights_of(layer)
    if w is None or not _fit(x, w) or not unwatched((x, *w, cu_seqlens)) or torch.is_autocast_enabled("cuda"):
        return None
    differentiated = torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in w))
    if differentiated and not all(p.requires_grad for p in w):  # gradients that nobody asks for would cost as much as the others
        return None
    return run_whole(Form(layer.sizes, layer.backend, cu_seqlens), x, w, differentiated)


def run_whole(form: Form, x: Tensor, w: Weights, differentiated: bool) -> Tensor:
    if differentiated:
        return Returned.apply(form, *Mixed.apply(form, x, *w[:MIXED]), *w[MIXED:])
    o, low_g, _ = mixed(form, x, w, False)
    return returned(form, o, low_g, w)[0]


def takes(layer: Any, x: Tensor) -> bool:
    s = layer.sizes
    chunked = layer.mode == "chunk" or (layer.mode == "auto" and x.shape[1] > 1)
    return s.use_short_conv and s.delta_rule and not s.conv_bias and chunked and x.numel() > 0


def weights_of(layer: Any) -> Weights | None:
    """Its parameters, each where it was; None where a part has been wrapped, replaced or hooked."""
    m = layer._modules  # attributes of modules are looked up in three places
    q, k, v, b, f, g, o = (m[name] for name in ("q_proj", "k_proj", "v_proj", "b_proj", "f_proj", "g_proj", "o_proj"))
    if type(f) is not nn.Sequential or type(g) is not nn.Sequential or len(f._modules) != 2 or len(g._modules) != 2:
        return None
    (f0, f1), (g0, g1) = f._modules.values(), g._modules.values()
    linear, others = (q, k, v, f0, g0, b, f1, g1, o), (m["q_conv1d"], m["k_conv1d"], m["v_conv1d"], m["o_norm"], f, g)
    if any(type(part) is not nn.Linear for part in linear) or any(map(hooked, linear + others)):
        return None
    of = [part._parameters.get("weight") for part in (q, k, v, f0, g0, b, *others[:3], f1)]
    own = layer._parameters
    of += [own.get("A_log"), own.get("dt_bias"), *(g1._parameters.get(name) for name in ("weight", "bias"))]
    of += [others[3]._parameters.get("weight"), o._parameters.get("weight")]
    return None if any(p is None for p in of) else Weights._make(of)  # type: ignore[arg-type]


def _fit(x: Tensor, w: Weights) -> bool:
    """On one GPU, the matrices in x's dtype and the others in one that the kernels take."""
    dtype, device = x.dtype, x.get_device()
    return (
        dtype in DTYPES
        and all(p.dtype == dtype for p in (*w[:MATRICES], w.f, w.g, w.o))
        and w.q_taps.dtype == w.k_taps.dtype == w.v_taps.dtype in DTYPES
        and all(p.dtype in DTYPES for p in (w.A_log, w.dt_bias, w.g_bias, w.norm))
        and all(p.get_device() == device for p in w)
        and shown(device)
    )


def _options(s: LayerSizes) -> Options:
    return all_in_kernel(s.allow_neg_eigval, s.safe_gate, s.lower_bound)


def mixed(form: Form, x: Tensor, w: Any, differentiated: bool) -> tuple[Tensor, Tensor, tuple]:
    """o [B, T, HV, V], low_g [B * T, rank], and what a derivative needs."""
    s = form.sizes
    B, T, rank, HV = x.shape[0], x.shape[1], s.head_v_dim, s.value_heads
    low, taps = torch.cat(w[3:6]), torch.cat(w[6:9]).flatten(1)
    row, rest = projection.forward(x, w[0], w[1], w[2], low)
    low_f, low_g, beta = torch.split_with_sizes(rest.view(B * T, -1), (rank, rank, HV), 1)
    q, k, v = short_convolution.forward(row, taps, None, None, form.cu_seqlens, None, (s.key_dim, s.key_dim, s.value_dim))
    g = torch.mm(low_f, w[9].t())
    keys, values = (B, T, s.num_heads, s.head_dim), (B, T, HV, s.head_v_dim)
    of_heads = q.view(keys), k.view(keys), v.view(values), g.view(B, T, HV, s.head_dim), beta.view(B, T, HV)
    arrays = Arrays(*of_heads, w[10], w[11], None, form.cu_seqlens)
    result, kept = run(arrays, "chunk", _options(s), form.backend, differentiated)
    return result.o, low_g, (x, low, taps, row, rest, arrays, kept)


def returned(form: Form, o: Tensor, low_g: Tensor, w: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The layer's output, and of the way there the gate and y [B, T, HV, V]."""
    g, g_bias, norm, o_matrix = w[-4:]
    gate = torch.mm(low_g, g.t()).view(o.shape)
    (y,) = gated_norm.forward(o, norm, gate, g_bias, form.sizes.norm_eps)
    return torch.mm(y.view(len(low_g), -1), o_matrix.t()).view(*o.shape[:2], -1), gate, y


class Mixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, form, x, *w):
        o, low_g, (x, low, taps, row, rest, arrays, kept) = mixed(form, x, w, True)
        ctx.save_for_backward(x, *w[:3], low, taps, w[9], row, rest, *arrays[:9], *kept)
        ctx.form = form
        ctx.set_materialize_grads(False)
        return o, low_g

    @staticmethod
    def backward(ctx, d_o, d_low_g):
        x, q, k, v, low, taps, f, row, rest, *more = handed_over(ctx)
        refuse_a_graph()
        arrays, s, rank = Arrays(*more[:9]), ctx.form.sizes, ctx.form.sizes.head_v_dim
        if d_o is None:
            d_o = torch.zeros_like(arrays.v)
        *d_qkv, d_g, d_beta, d_A_log, d_dt_bias, _ = run_backward(arrays, more[9:], d_o, None, "chunk", _options(s), ctx.form.backend)
        cu_seqlens = arrays.cu_seqlens
        del arrays, more  # here and below: gradients of matrices take this memory, not more
        tokens, widths = rest.shape[0] * rest.shape[1], (s.key_dim, s.key_dim, s.value_dim)
        d_g, low_f = d_g.view(tokens, -1), rest.view(tokens, -1)[:, :rank]
        d_low_g = low_f.new_zeros(low_f.shape) if d_low_g is None else d_low_g
        d_rest = torch.cat([torch.mm(d_g, f), d_low_g, d_beta.view(tokens, -1)], 1)
        d_f = torch.mm(d_g.t(), low_f)
        del d_g, low_f, rest
        d_qkv = [y.view(*row.shape[:2], -1) for y in d_qkv]
        d_row, d_taps, _, _ = short_convolution.backward(d_qkv, (True, True, False, False), row, taps, None, None, cu_seqlens, None, widths)
        del d_qkv, row
        needed = (ctx.needs_input_grad[1], True, True, True, True)
        d_x, d_q, d_k, d_v, d_low = projection.backward([d_row, d_rest], needed, x, q, k, v, low)
        d_low = torch.split_with_sizes(d_low, (rank, rank, s.value_heads))
        d_taps = torch.split_with_sizes(d_taps[:, None], widths)
        return None, d_x, d_q, d_k, d_v, *d_low, *d_taps, d_f, d_A_log, d_dt_bias


class Returned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, form, o, low_g, *w):
        out, gate, y = returned(form, o, low_g, w)
        ctx.save_for_backward(o, low_g, gate, y, *w)
        ctx.eps = form.sizes.norm_eps
        return out

    @staticmethod
    def backward(ctx, d_out):
        o, low_g, gate, y, g, g_bias, norm, o_matrix = handed_over(ctx)
        refuse_a_graph()
        tokens = len(low_g)
        d_out = d_out.reshape(tokens, -1)
        d_y, d_matrix = torch.mm(d_out, o_matrix).view(o.shape), torch.mm(d_out.t(), y.view(tokens, -1))
        del y
        d_o, d_norm, d_gate, d_bias = gated_norm.backward([d_y], (True,) * 4, o, norm, gate, g_bias, ctx.eps)
        del o, gate, d_y
        d_gate = d_gate.view(tokens, -1)
        return None, d_o, torch.mm(d_gate, g), torch.mm(d_gate.t(), low_g), d_bias, d_norm, d_matrix
