"""kdakit::short_convolution: the convolutions and SiLUs of q, k and v, which lie in one row, in one launch. See `convolution_kernels`."""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kdakit.layers.torch.fused import fast
from kdakit.layers.torch.fused.operator import Operator

STRIPS = 64  # about so many shares of the weights' gradients, for each of which a backward program walks


def short_convolution(
    x: Tensor, weight: Tensor, sizes: tuple[int, ...], bias: Tensor | None = None, window: Tensor | None = None,
    cu_seqlens: Tensor | None = None, lengths: Tensor | None = None,
) -> tuple[list[Tensor], Tensor | None]:  # fmt: skip
    """x [B, T, D], D = sum(sizes), weight [D, W]; window [N, W - 1, D], the inputs before. Up to three results [B, T, size], and the next
    window where one was given. lengths [B]: how many tokens of each row count for that one."""
    out = OPERATOR(x, weight, bias, window, cu_seqlens, lengths, list(sizes))
    return list(out[: len(sizes)]), None if window is None else out[len(sizes)]


def forward(x, weight, bias, window, cu_seqlens, lengths, sizes):
    x, places = _near(x), _places(x, cu_seqlens)
    made = [torch.empty((*x.shape[:2], size), dtype=x.dtype, device=x.device) for size in sizes]
    after = None if window is None else torch.empty_like(window, memory_format=torch.contiguous_format)
    N = _sequences(x, cu_seqlens)
    window = None if window is None else window.contiguous()
    kernels, on_device = _kernels()
    with on_device(x):
        if x.numel():
            run = kernels.forward(tuple(x.shape), x.stride(), tuple(sizes), weight.shape[1], N, places is not None, bias is not None,
                                  window is not None, fast(x))  # fmt: skip
            run(x=x, weight=weight.contiguous(), bias=bias, window=window, places=places, **_three("y", made))
        if after is not None and after.numel():
            run = kernels.last(tuple(x.shape), x.stride(), weight.shape[1], N, places is not None, lengths is not None)
            run(x=x, window=window, cu_seqlens=cu_seqlens, lengths=lengths, after=after)
    return made if after is None else [*made, after]


def backward(grads, needed, x, weight, bias, window, cu_seqlens, lengths, sizes):
    """Gradients of x, weight, bias and window."""
    x, places, W = _near(x), _places(x, cu_seqlens), weight.shape[1]
    d_ys = [torch.zeros((*x.shape[:2], n), dtype=x.dtype, device=x.device) if d is None else d.to(x.dtype).contiguous()
            for d, n in zip(grads, sizes, strict=False)]  # fmt: skip
    d_after = grads[len(sizes)] if window is not None else None
    N, near = _sequences(x, cu_seqlens), None if window is None else window.contiguous()
    strips, strip = _strips(x.shape[0], x.shape[1])
    d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    shares = torch.empty((x.shape[0] * strips, W + 1, x.shape[2]), dtype=torch.float32, device=x.device)
    d_window = torch.zeros_like(near) if near is not None and needed[3] else None
    make = torch.empty if x.numel() else torch.zeros
    d_weight = make(weight.shape, dtype=weight.dtype, device=x.device)
    d_bias = None if bias is None else make(bias.shape, dtype=bias.dtype, device=x.device)
    kernels, on_device = _kernels()
    with on_device(x):
        if x.numel():
            run = kernels.backward(tuple(x.shape), x.stride(), tuple(sizes), W, N, places is not None, bias is not None,
                                   window is not None, d_window is not None, strip, fast(x))  # fmt: skip
            given = dict(x=x, weight=weight.contiguous(), bias=bias, window=near, places=places)
            run(**given, **_three("d", d_ys), dx=d_x, shares=shares, d_window=d_window)
            kernels.sums(len(shares), x.shape[2], W, bias is not None)(shares=shares, d_weight=d_weight, d_bias=d_bias)
    if d_after is not None:
        _add_last(d_x, d_window, d_after, cu_seqlens, lengths)
    return [d_x, d_weight, d_bias, d_window]


def _add_last(d_x: Tensor, d_window: Tensor | None, d_after: Tensor, cu_seqlens: Tensor | None, lengths: Tensor | None) -> None:
    """What comes back through the next window: it holds inputs, and rows of the last window where a sequence is short."""
    (N, keep), device = d_after.shape[:2], d_x.device
    counts = lengths if lengths is not None else torch.full((N,), d_x.shape[1], device=device) if cu_seqlens is None else cu_seqlens.diff()
    place = counts[:, None] - keep + torch.arange(keep, device=device)  # [N, keep]
    starts = torch.arange(N, device=device) * d_x.shape[1] if cu_seqlens is None else cu_seqlens[:-1]
    row = (starts[:, None] + place).flatten().clamp(min=0)
    flat = d_x.view(-1, d_x.shape[2])
    if len(flat):
        token = (place >= 0).flatten()[:, None]
        flat.index_add_(0, row.clamp(max=len(flat) - 1), torch.where(token, d_after.flatten(0, 1).to(flat.dtype), 0))
    if d_window is not None:
        old = (place + keep).clamp(0, max(keep - 1, 0))[..., None].expand_as(d_window)
        d_window.scatter_add_(1, old, torch.where((place < 0)[..., None], d_after.to(d_window.dtype), 0))


def _shapes(x, weight, bias, window, cu_seqlens, lengths, sizes):
    made = [x.new_empty((*x.shape[:2], size)) for size in sizes]
    return made if window is None else [*made, window.new_empty(window.shape)]


OPERATOR = Operator(
    "short_convolution",
    "Tensor x, Tensor weight, Tensor? bias, Tensor? window, Tensor? cu_seqlens, Tensor? lengths, SymInt[] sizes",
    tensors=6, differentiable=4, forward=forward, backward=backward, shapes=_shapes,
)  # fmt: skip


def _near(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def _three(name: str, tensors: list[Tensor]) -> dict[str, Tensor]:
    """{name0: .., name2: ..}, the first one for sections that there are not."""
    return {f"{name}{i}": x for i, x in enumerate((tensors + tensors[:1] * 2)[:3])}


def _sequences(x: Tensor, cu_seqlens: Tensor | None) -> int:
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _strips(B: int, T: int) -> tuple[int, int]:
    """How many strips of how many tokens a row is walked in by the backward."""
    tokens = max(32, min(1024, 1 << (max(1, B * T // STRIPS) - 1).bit_length()))
    return max(1, -(-T // tokens)), tokens


def _places(x: Tensor, cu_seqlens: Tensor | None) -> Tensor | None:
    """[2, T] int32: each packed token's sequence, and its place there."""
    if cu_seqlens is None:
        return None
    places = torch.empty((2, x.shape[1]), dtype=torch.int32, device=x.device)
    if x.shape[1]:
        kernels, on_device = _kernels()
        with on_device(x):
            kernels.places(x.shape[1], cu_seqlens.shape[0] - 1)(cu_seqlens=cu_seqlens.contiguous(), places=places)
    return places


@lru_cache
def _kernels() -> tuple[ModuleType, Any]:
    from kdakit.backends.triton_gpu.runtime.launch import on_device
    from kdakit.layers.torch.fused import convolution_launch

    return convolution_launch, on_device
