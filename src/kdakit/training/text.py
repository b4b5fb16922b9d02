"""Bytes to learn from: a text file, or an endless little book that this module writes itself.

The book is made of short scenes in which people put things somewhere, move them, and are asked about them at the end. Who reads along has
to remember what was said last about each thing: the byte-level cousin of `recall`.
"""

from __future__ import annotations

import numpy as np

PEOPLE = ("Ada", "Bruno", "Clara", "Dario", "Edda", "Felix", "Greta", "Hugo", "Ines", "Jonas", "Klara", "Lorenz")
THINGS = (
    "the brass key", "the blue lamp", "the old map", "the red cup", "the small bell", "the long rope", "the green book", "the silver coin",
)  # fmt: skip
PLACES = ("the attic", "the kitchen", "the garden shed", "the boat", "the cellar", "the tower", "the mill", "the library")
OPENINGS = (
    "The rain had stopped before noon.", "It was a quiet evening by the river.", "Nobody had slept well that night.",
    "The market opened late that day.", "Snow lay on the roofs of the village.", "A warm wind came up from the coast.",
)  # fmt: skip
WORDS = ("put", "left", "hid", "stored")
MOVES = ("carried", "moved", "took", "brought")
ASIDES = (
    "The clock struck the hour.", "A dog barked twice and was still.", "Somebody laughed in the street.", "The kettle began to sing.",
    "Then there was silence again.", "A door closed far away.",
)  # fmt: skip


def scene(rng: np.random.Generator) -> str:
    """One scene: things are placed, some are moved, every one is asked for."""
    pick = lambda options: options[rng.integers(len(options))]
    things = [THINGS[i] for i in rng.permutation(len(THINGS))[: rng.integers(2, 5)]]
    where, lines = {}, [pick(OPENINGS)]
    for thing in things:
        where[thing] = pick(PLACES)
        lines.append(f"{pick(PEOPLE)} {pick(WORDS)} {thing} in {where[thing]}.")
    for _ in range(rng.integers(0, 3)):
        thing = pick(things)
        where[thing] = pick(PLACES)
        lines.append(f"Later {pick(PEOPLE)} {pick(MOVES)} {thing} to {where[thing]}.")
        if rng.random() < 0.4:
            lines.append(pick(ASIDES))
    for i in rng.permutation(len(things)):
        lines.append(f"Where is {things[i]}? In {where[things[i]]}.")
    return " ".join(lines) + "\n"


def book(size: int = 400_000, seed: int = 7) -> bytes:
    """`size` bytes of scenes; the same seed writes the same book."""
    rng = np.random.default_rng(seed)
    parts, length = [], 0
    while length < size:
        parts.append(scene(rng).encode("utf-8"))
        length += len(parts[-1])
    return b"".join(parts)[:size]


def split(text: bytes, held_out: float = 0.05) -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out bytes as uint8."""
    data = np.frombuffer(text, np.uint8)
    cut = len(data) - int(len(data) * held_out)
    return data[:cut], data[cut:]


def batch(data: np.ndarray, rng: np.random.Generator, size: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """`size` pieces of the text and the bytes that follow each of theirs: int64 [size, length] each."""
    if len(data) <= length:
        raise ValueError(f"the text must be longer than the {length} bytes of a training sequence, got {len(data)}")
    starts = rng.integers(0, len(data) - length, size)
    pieces = data[starts[:, None] + np.arange(length + 1)].astype(np.int64)
    return pieces[:, :-1], pieces[:, 1:]
