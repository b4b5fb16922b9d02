"""States of prompts that were seen before, by their tokens: the next prompt that begins alike need not be read again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any


class PrefixCache:
    """The `entries` prefixes used last. Prefixes end at multiples of `block` tokens, so that few have to be looked for."""

    def __init__(self, entries: int, block: int):
        if entries < 0 or block < 1:
            raise ValueError(f"entries must be at least 0 and block at least 1, got {entries} and {block}")
        self.entries, self.block = entries, block
        self.evicted = 0
        self._kept: OrderedDict[tuple[int, ...], Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, tokens: Sequence[int]) -> bool:
        return tuple(tokens) in self._kept

    def longest(self, prompt: Sequence[int]) -> tuple[int, Any]:
        """Length and state of the longest prefix that is kept, and leaves a token to read; (0, None) where there is none."""
        for length in range((len(prompt) - 1) // self.block * self.block, 0, -self.block):
            key = tuple(prompt[:length])
            if key in self._kept:
                self._kept.move_to_end(key)
                return length, self._kept[key]
        return 0, None

    def put(self, tokens: Sequence[int], state: Any) -> None:
        if self.entries:
            self._kept[tuple(tokens)] = state
            self._kept.move_to_end(tuple(tokens))
        while len(self._kept) > self.entries:
            self._kept.popitem(last=False)
            self.evicted += 1
