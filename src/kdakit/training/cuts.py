"""Whether a batch can be cut over several processes, rows over `data`, tokens over `context`."""

from __future__ import annotations


def check_team(size: int, context: int) -> None:
    if context < 1 or size % context:
        raise ValueError(f"context must divide the {size} processes, got {context}")


def check_batch(size: int, context: int, batch: int, length: int) -> None:
    """Parts must be of one size: the mean of their means is then the mean."""
    check_team(size, context)
    for name, whole, parts in (("batch", batch, size // context), ("length", length, context)):
        if whole % parts:
            raise ValueError(f"{name} must be a multiple of the {parts} parts it is cut into, got {whole}")
