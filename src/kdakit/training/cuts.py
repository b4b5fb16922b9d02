"""Whether a batch can be cut over several processes, rows over `data`, tokens over `context`."""

from __future__ import annotations


def check_team(size: int, context: int) -> None:
    if context < 1 or size % context:
        raise ValueError(f"context must divide the {size} processes, got {context}")


def check_batch(size: int, context: int, batch: int, length: int, accumulate: int = 1) -> None:
    """Parts must be of one size. accumulate: the batch comes in so many pieces, one after the other, each of which is cut."""
    check_team(size, context)
    rows = "batch" if accumulate == 1 else f"each of the {accumulate} pieces of the batch"
    for name, whole, parts in ((rows, batch // accumulate, size // context), ("length", length, context)):
        if whole % parts:
            raise ValueError(f"{name} must be a multiple of the {parts} parts it is cut into, got {whole}")
