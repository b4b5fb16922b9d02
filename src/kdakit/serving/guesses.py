"""Draft tokens without a second model: what followed the last time the text read like this."""

from __future__ import annotations

from collections.abc import Sequence


def repeat_last(text: Sequence[int], count: int, longest: int = 3) -> list[int]:
    """Up to `count` tokens that followed the latest earlier occurrence of text's last 3, else 2, else 1 tokens; none if there is none."""
    for n in range(min(longest, len(text) - 1), 0, -1):
        end = list(text[-n:])
        for start in range(len(text) - n - 1, -1, -1):
            if list(text[start : start + n]) == end:
                return list(text[start + n : start + n + count])
    return []
