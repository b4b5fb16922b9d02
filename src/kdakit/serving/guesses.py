"""Draft tokens without a second model: what followed the last time the text read like this."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 3  # tokens that must read alike, where so many do
REMEMBERED = 1 << 14  # ends of a text, at least, by their last tokens; what was read before may be forgotten


class Repeats:
    """Of one growing text: where its last 3, 2 and 1 tokens were read before. A token costs the same however long the text is."""

    def __init__(self) -> None:
        self._seen = 0  # of the text's places, all but the last one
        self._followed: dict[tuple[int, ...], int] = {}  # by 1 to 3 tokens: the place after the latest time
        self._older: dict[tuple[int, ...], int] = {}

    def draft(self, text: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that followed the latest earlier occurrence of text's last 3, else 2, else 1 tokens; none if there is none.
        `text` must be the one of the last call, and may have become longer."""
        if count <= 0:
            return []
        for place in range(self._seen + 1, len(text)):
            if len(self._followed) > LONGEST * REMEMBERED:
                self._followed, self._older = {}, self._followed
            for n in range(1, min(LONGEST, place) + 1):
                self._followed[tuple(text[place - n : place])] = place
            self._seen = place
        for n in range(min(LONGEST, len(text) - 1), 0, -1):
            end = tuple(text[-n:])
            place = self._followed.get(end) or self._older.get(end, 0)
            if place:
                return list(text[place : place + count])
        return []
