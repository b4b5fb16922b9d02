"""Which slots of a pool are taken. Knows no tensors, so both frameworks share it."""

from __future__ import annotations

import numbers
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

SKIP = -1  # a row with this slot reads and writes nothing, and its output is zero
GENERATIONS = 2**31  # they are kept in 32 bits with a sign; the number is even, so that odd stays odd across the end


class PoolFull(RuntimeError):
    """More slots were asked for than are free."""


class SlotTable:
    """Slot numbers and their generations: even while a slot is free, odd while it is taken, another with every change of owner.

    Slots are taken in the order in which they became free: one that was given back rests as long as it can. A pool asks what would
    change (`following`, `after`), changes its tensors, and only then the table (`take`, `release`, `renew`): where a tensor cannot be
    changed the table is as it was.
    """

    def __init__(self, capacity: int):
        if isinstance(capacity, bool) or not isinstance(capacity, numbers.Integral) or capacity < 1:
            raise ValueError(f"slots must be an integer of at least 1, got {capacity!r}")
        self.capacity: int = int(capacity)
        self.generation: list[int] = [0] * self.capacity
        self._free: deque[int] = deque(range(self.capacity))

    @property
    def free(self) -> int:
        """How many slots are free."""
        return len(self._free)

    def taken(self, slot: int) -> bool:
        return self.generation[slot] % 2 == 1

    def following(self, count: int) -> list[int]:
        """The slots that are taken next."""
        if isinstance(count, bool) or not isinstance(count, numbers.Integral) or count < 0:
            raise ValueError(f"count must be an integer of at least 0, got {count!r}")
        if count > self.free:
            raise PoolFull(f"{count} slots asked for, {self.free} of {self.capacity} free")
        return list(islice(self._free, count))

    def after(self, slots: list[int], changes: int) -> list[int]:
        """The slots' generations after so many changes: 1 when they are taken or released, 2 when they are renewed."""
        return [(self.generation[slot] + changes) % GENERATIONS for slot in slots]

    def take(self, count: int) -> list[int]:
        slots = self.following(count)
        for _ in slots:
            self._free.popleft()
        self._change(slots, 1)
        return slots

    def release(self, slots: list[int]) -> None:
        self._change(slots, 1)
        self._free.extend(slots)

    def renew(self, slots: list[int]) -> None:
        """Taken as before, but what was drafted for their old contents no longer counts."""
        self._change(slots, 2)

    def _change(self, slots: list[int], changes: int) -> None:
        for slot, generation in zip(slots, self.after(slots, changes), strict=True):
            self.generation[slot] = generation

    def check(self, slots: Any, skip: bool = False) -> list[int]:
        """The slots as a list, every one taken and none twice; with `skip`, -1 stands for no slot, any number of times."""
        listed: list[Any] = [slots] if isinstance(slots, numbers.Integral) else list(slots)
        if self._are_right(listed):
            return listed
        seen: set[int] = set()
        for slot in listed:
            if isinstance(slot, bool) or not isinstance(slot, numbers.Integral):
                raise TypeError(f"slots must be integers, got {slot!r}")
            if slot == SKIP and skip:
                continue
            if not 0 <= int(slot) < self.capacity:
                also = f" or {SKIP} (skip)" if skip else ""
                raise ValueError(f"slots must be 0 .. {self.capacity - 1}{also}, got {slot}")
            if not self.taken(int(slot)):
                raise ValueError(f"slots must be allocated, got {slot}, which is free")
            if slot in seen:
                raise ValueError(f"slots must be different from each other, got {slot} twice")
            seen.add(int(slot))
        return [int(slot) for slot in listed]

    def _are_right(self, slots: list[Any]) -> bool:
        """Without looking at them one by one, which tells what is wrong; those with -1 are left to that."""
        if not slots or not all_plain(slots) or len(set(slots)) < len(slots) or min(slots) < 0 or max(slots) >= self.capacity:
            return False
        generation = self.generation
        return 0 not in [generation[slot] & 1 for slot in slots]


def all_plain(numbers_given: Sequence[Any]) -> bool:
    """Whether all are Python's own integers, which need no further look."""
    return set(map(type, numbers_given)) <= {int}
