"""Tensors between canaries: reads and writes that miss their tensor show.

`place` puts an input into memory that is NaN around it and in every gap of its layout. `guarded` gives whatever is allocated within,
results and workspaces alike, out of memory that is NaN before, in and after it; what is still NaN afterwards was never written, what is
not NaN around it was written by a stray store.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

MARGIN = 2048  # bytes on either side; a multiple of every alignment that anything asks for
POISON = 0xFF  # every byte: NaN in all floating dtypes


class Placed(NamedTuple):
    """An input, the bytes that it lies in, and what they were."""

    tensor: torch.Tensor
    memory: torch.Tensor
    before: torch.Tensor

    @property
    def untouched(self) -> bool:
        return bool(torch.equal(self.memory, self.before))


def place(x: torch.Tensor, layout: str = "plain") -> Placed:
    """A copy of x [.., D] in poisoned memory. Layouts, for tensors of three dimensions or more:

    plain; offset: it begins one element late; heads_first: [B, H, T, D] storage; wide: rows of D + 3 elements; strided_tokens: every second
    token of a longer tensor; strided_channels: every second channel; reversed: the first dimension is adjacent in memory.
    """
    shape = list(x.shape)
    swap = layout == "heads_first" and x.dim() >= 3
    if swap:
        shape[1], shape[2] = shape[2], shape[1]
    elif layout == "reversed":
        shape.reverse()
    elif layout == "wide":
        shape[-1] += 3
    elif layout == "strided_tokens" and x.dim() >= 2:
        shape[1] = 2 * shape[1]
    elif layout == "strided_channels":
        shape[-1] = 2 * shape[-1]
    late = x.element_size() if layout == "offset" else 0
    size = math.prod(shape) * x.element_size()
    memory = torch.full((2 * MARGIN + size + late,), POISON, dtype=torch.uint8, device=x.device)
    whole = memory[MARGIN + late : MARGIN + late + size].view(x.dtype).view(shape) if size else x.new_zeros(shape)
    if swap:
        whole = whole.transpose(1, 2)
    elif layout == "reversed":
        whole = whole.permute(*reversed(range(x.dim())))
    elif layout == "wide":
        whole = whole[..., : x.shape[-1]]
    elif layout == "strided_tokens" and x.dim() >= 2:
        whole = whole[:, ::2]
    elif layout == "strided_channels":
        whole = whole[..., ::2]
    whole.copy_(x)
    return Placed(whole.detach(), memory, memory.clone())


class Guard:
    """What was allocated within `guarded`, and whether anything was written around it."""

    def __init__(self) -> None:
        self.made: list[tuple[torch.Tensor, int, str]] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> torch.Tensor:
        item = dtype.itemsize
        size = math.prod(shape) * item
        memory = torch.full((2 * MARGIN + -(-size // 16) * 16,), POISON, dtype=torch.uint8, device=device)
        strides, step = [], 1
        for n in reversed(shape):
            strides.insert(0, step)
            step *= max(n, 1)
        caller = sys._getframe(2)
        self.made.append((memory, size, f"{caller.f_code.co_filename.rpartition('/')[2]}:{caller.f_lineno}"))
        made = torch.zeros(0, dtype=dtype, device=device)
        return made.set_(memory.untyped_storage(), MARGIN // item, tuple(shape), tuple(strides))  # type: ignore[call-overload]

    def complaint(self) -> str | None:
        """Where memory around a tensor was written; None: nowhere."""
        if not self.made:
            return None
        edges = torch.cat([torch.cat([memory[:MARGIN], memory[MARGIN + size :][:MARGIN]]) for memory, size, _ in self.made])
        if bool((edges == POISON).all()):
            return None
        for memory, size, where in self.made:
            before = memory[:MARGIN] != POISON
            after = memory[MARGIN + size :] != POISON
            if bool(before.any()) or bool(after.any()):
                side = f"{int(before.sum())} bytes before and {int(after.sum())} after"
                return f"a stray store: {side} the {size} bytes allocated at {where} were written"
        return None


@contextlib.contextmanager
def guarded() -> Iterator[Guard]:
    """Within, torch.empty, empty_like and new_empty of real tensors give poisoned memory between canaries."""
    guard, empty, empty_like, new_empty = Guard(), torch.empty, torch.empty_like, torch.Tensor.new_empty

    def real(device: Any) -> bool:
        return torch.device(device).type != "meta"

    def guarded_empty(*size, dtype=None, device=None, **rest):
        shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
        device = "cpu" if device is None else device
        if rest or not real(device):
            return empty(*size, dtype=dtype, device=device, **rest)
        return guard.empty(shape, dtype or torch.get_default_dtype(), device)

    def guarded_like(x, dtype=None, device=None, **rest):
        if rest or not x.is_contiguous() or not real(device or x.device):
            return empty_like(x, dtype=dtype, device=device, **rest)
        return guard.empty(tuple(x.shape), dtype or x.dtype, device or x.device)

    def guarded_new(x, *size, dtype=None, device=None, **rest):
        shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
        if rest or not real(device or x.device):
            return new_empty(x, *size, dtype=dtype, device=device, **rest)
        return guard.empty(shape, dtype or x.dtype, device or x.device)

    torch.empty, torch.empty_like, torch.Tensor.new_empty = guarded_empty, guarded_like, guarded_new  # type: ignore[assignment]
    try:
        yield guard
    finally:
        torch.empty, torch.empty_like, torch.Tensor.new_empty = empty, empty_like, new_empty  # type: ignore[assignment]
