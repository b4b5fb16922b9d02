"""One request on its way through an engine, and what an engine has counted."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kdakit.serving.guesses import Repeats
from kdakit.serving.slots import all_plain


@dataclass(eq=False)
class Request:
    """A prompt and how many tokens are to follow it. Everything below `count` is the engine's to write and anybody's to read."""

    prompt: Sequence[int]
    count: int  # tokens to make
    text: list[int] = field(default_factory=list, init=False)  # the prompt as it was submitted, and what was made
    asked: int = field(default=0, init=False)  # tokens of the prompt in it
    read: int | None = field(default=None, init=False)  # tokens of the text that are in the slot; None: nobody knows, begin again
    slot: int | None = field(default=None, init=False)
    suspect: int | None = field(default=None, init=False)  # after a fault: goes alone until so many tokens are in its slot
    cancelled: bool = field(default=False, init=False)
    error: Exception | None = field(default=None, init=False)  # what ended it, if something did
    owner: Any = field(default=None, init=False, repr=False)  # the engine it was submitted to
    repeats: Repeats = field(default_factory=Repeats, init=False, repr=False)  # what of the text has been seen before

    @property
    def made(self) -> list[int]:
        return self.text[self.asked :]

    @property
    def left(self) -> int:
        """Tokens that are still to be made."""
        return self.count - (len(self.text) - self.asked)

    @property
    def done(self) -> bool:
        return self.cancelled or self.error is not None or (self.owner is not None and self.left <= 0)

    @property
    def goal(self) -> int:
        """How much of the text is to be read before tokens are made one after the other: all but the last token made, which comes next."""
        return max(self.asked, len(self.text) - 1)

    @property
    def reading(self) -> bool:
        return self.read is None or self.read < self.goal


@dataclass
class Counts:
    turns: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0  # requests that ended with an error
    faults: int = 0  # steps that raised; most are tried again
    made: int = 0  # tokens
    read: int = 0  # prompt tokens that were computed; after a fault also what is read again
    remembered: int = 0  # prompt tokens that came from the prefix cache
    guessed: int = 0
    accepted: int = 0

    @property
    def acceptance(self) -> float:
        """Of the guesses, how many were right."""
        return self.accepted / self.guessed if self.guessed else 0.0

    @property
    def hits(self) -> float:
        """Of the prompt tokens, how many need not have been read."""
        return self.remembered / max(1, self.read + self.remembered)


def checked_prompt(request: Request, vocabulary: int) -> list[int]:
    """The prompt as a list of the engine's own; TypeError or ValueError for what cannot be served."""
    prompt, count = request.prompt, request.count
    if isinstance(count, bool) or not isinstance(count, numbers.Integral):
        raise TypeError(f"count must be an integer, the number of tokens to make, got {count!r}")
    if isinstance(prompt, (str, bytes, Mapping)) or not (hasattr(prompt, "__len__") and hasattr(prompt, "__getitem__")):
        raise TypeError(f"a prompt must be a sequence of tokens, got {type(prompt).__name__}")
    tokens = list(prompt)
    if not tokens or count < 1:
        raise ValueError(f"a request must have a prompt and count at least 1, got {len(tokens)} tokens and {count}")
    check_tokens(tokens, vocabulary, "a prompt")
    return [int(token) for token in tokens]


def are_tokens(tokens: Sequence[Any], vocabulary: int) -> bool:
    """Whether all are Python's own integers below the vocabulary, without looking at them one by one."""
    return all_plain(tokens) and (len(tokens) == 0 or (min(tokens) >= 0 and max(tokens) < vocabulary))


def check_tokens(tokens: Sequence[Any], vocabulary: int, whose: str) -> None:
    if are_tokens(tokens, vocabulary):
        return
    for place, token in enumerate(tokens):
        if isinstance(token, bool) or not isinstance(token, numbers.Integral):
            raise TypeError(f"{whose} must hold integers, got {token!r} at position {place}")
        if not 0 <= int(token) < vocabulary:
            raise ValueError(f"{whose} must hold tokens 0 .. {vocabulary - 1}, got {token} at position {place}")
