"""kdakit inside Hugging Face Transformers: Kimi-Linear and the other models whose layers call the same two functions.

A model's module holds

    chunk_kimi_delta_attention(query, key, value, g=, beta=, initial_state=, output_final_state=, use_qk_l2norm_in_kernel=, **kwargs)
    recurrent_kimi_delta_attention(..)        the same, for a single token with a state

which are flash-linear-attention's where that is installed and plain PyTorch elsewhere. g is the log-decay in float32, states are [K, V].
`enable` puts ours in their places, and theirs behind ours for what we do not take. So it serves models made before it and after it, needs
no other package, and no `use_kernels=True`, which would fetch kernels for every other layer as well.

Packed rows: pass `cu_seqlens` (or the collator's `cu_seq_lens_q`, or `seq_idx`) to the model. Their convolution needs the causal_conv1d
package, or ours, which `causal_conv1d_fn` calls where that is not installed: packed or not in one kernel on a GPU, where the plain one
would also leave q, k and v in an order in which nobody reads them.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kdakit import torch as ours
from kdakit.layers.torch.fused import fits
from kdakit.layers.torch.fused.adjacent import adjacent
from kdakit.layers.torch.fused.short_convolution import short_convolution
from kdakit.problem import Arrays
from kdakit.stacks import counts, wanted
from kdakit.stacks.verdict import why_not

MODELS = ("kimi_linear", "glm5_next", "bailing_hybrid")
SILU = ("silu", "swish")
_replaced: list[tuple[Any, str, Callable]] = []  # module, name, what was there


def enabled() -> bool:
    return bool(_replaced)


def enable() -> None:
    if _replaced or not wanted("transformers"):
        return
    if importlib.util.find_spec("transformers") is None:
        raise ImportError("kdakit.enable('transformers') needs Hugging Face Transformers (pip install transformers)")
    found = []
    for name in MODELS:
        path = f"transformers.models.{name}.modeling_{name}"
        if importlib.util.find_spec(f"transformers.models.{name}") is not None:
            found.append(importlib.import_module(path))
    places = (
        ("chunk_kimi_delta_attention", _chunk), ("recurrent_kimi_delta_attention", _recurrent), ("causal_conv1d_fn", _convolution),
    )  # fmt: skip
    for module in found:
        for name, make in places:
            if hasattr(module, name):
                _replaced.append((module, name, getattr(module, name)))
                setattr(module, name, make(getattr(module, name)))
    if not _replaced:
        version = importlib.import_module("transformers").__version__
        raise ImportError(f"transformers {version} has none of the models that call KDA ({', '.join(MODELS)}): install 5.17 or newer")


def disable() -> None:
    while _replaced:
        setattr(*_replaced.pop())


def _chunk(theirs: Callable) -> Callable:
    def chunk_kimi_delta_attention(query, key, value, g, beta, chunk_size=64, **named):
        return _call("chunk", theirs, query, key, value, g, beta, dict(chunk_size=chunk_size), named)

    return chunk_kimi_delta_attention


def _recurrent(theirs: Callable) -> Callable:
    def recurrent_kimi_delta_attention(query, key, value, g, beta, **named):
        return _call("recurrent", theirs, query, key, value, g, beta, {}, named)

    return recurrent_kimi_delta_attention


CALLS = {"chunk": ours.chunk_kda, "recurrent": ours.fused_recurrent_kda}
NAMES = {"chunk": "chunk_kda", "recurrent": "fused_recurrent_kda"}


def _call(op: str, theirs: Callable, query, key, value, g, beta, more: dict, named: dict):
    known = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
    flags = more | {name: named[name] for name in known[1:] if name in named}
    state, cu_seqlens = named.get("initial_state"), packed(query, named)
    if not torch.compiler.is_compiling():  # a compiled call asks nobody: kdakit.torch chooses its backend
        arrays = Arrays(query, key, value, g, beta, initial_state=state, cu_seqlens=cu_seqlens)
        reason = why_not(op, arrays, **flags)
        if reason is not None:
            counts.pass_on("transformers", NAMES[op], reason)
            return theirs(query, key, value, g=g, beta=beta, **more, **named)
        counts.take("transformers", NAMES[op])
    return CALLS[op](*map(adjacent, (query, key, value)), g, beta, initial_state=state, cu_seqlens=cu_seqlens, **flags)


def packed(query: Tensor, named: dict) -> Tensor | None:
    """Where the sequences of a packed row begin, as far as the model was told; seq_idx makes the host wait."""
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        if named.get(name) is not None:
            return named[name].to(query.device)
    seq_idx = named.get("seq_idx")
    if seq_idx is None or query.shape[0] != 1:
        return None
    edges = (seq_idx.reshape(-1).diff() != 0).nonzero().flatten() + 1
    return F.pad(F.pad(edges, (1, 0)), (0, 1), value=query.shape[1])


def _convolution(theirs: Callable) -> Callable:
    """`causal_conv1d_fn` in one kernel, with the sequences of a packed row kept apart, where the package that can do so is missing."""
    if importlib.util.find_spec("causal_conv1d") is not None:
        return theirs

    def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **named):
        tokens = hidden_states.transpose(1, 2)  # [B, T, D]
        cu_seqlens = packed(tokens, named)
        if activation in SILU and tokens.is_cuda and fits(tokens, weight, bias) and tokens.dtype == weight.dtype:
            (out,), _ = short_convolution(tokens, weight, tokens.shape[2:], bias, cu_seqlens=cu_seqlens)
            return out.transpose(1, 2)
        if cu_seqlens is None:
            return theirs(hidden_states, weight=weight, bias=bias, activation=activation, **named)
        out = apart(tokens.to(weight.dtype), weight, bias, cu_seqlens).transpose(1, 2)
        if activation is not None:
            out = importlib.import_module("transformers.activations").ACT2FN[activation](out)
        return out.to(hidden_states.dtype)

    return causal_conv1d_fn


def apart(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """y_t = sum_j weight[:, W - 1 - j] x_{t - j} + bias over the tokens of t's own sequence; x [1, T, D], weight [D, W]."""
    W, t = weight.shape[1], torch.arange(x.shape[1], device=x.device)
    owner = torch.searchsorted(cu_seqlens[1:].contiguous(), t, right=True).clamp(max=len(cu_seqlens) - 2)
    place = (t - cu_seqlens[owner])[:, None]
    y = x * weight[:, W - 1]
    for j in range(1, min(W, x.shape[1])):
        y = y + torch.where(place >= j, F.pad(x[:, :-j], (0, 0, j, 0)), 0) * weight[:, W - 1 - j]
    return y if bias is None else y + bias
