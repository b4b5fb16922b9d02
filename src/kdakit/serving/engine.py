"""Continuous batching: requests come and go, and every turn moves all of them that have a slot.

A turn admits who is waiting while slots are free, reads the next slice of every unread prompt in one packed call, and makes tokens for all
that have read theirs: one each, or several where guesses turn out right. Prompts that begin like an earlier one start from its state.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from kdakit.serving.guesses import repeat_last
from kdakit.serving.prefixes import PrefixCache


@dataclass(eq=False)
class Request:
    prompt: list[int]
    count: int  # tokens to make
    made: list[int] = field(default_factory=list)
    read: int = 0  # prompt tokens that are in the state
    slot: int | None = None
    cancelled: bool = False

    @property
    def done(self) -> bool:
        return self.cancelled or len(self.made) >= self.count

    @property
    def text(self) -> list[int]:
        return self.prompt + self.made


@dataclass
class Counts:
    turns: int = 0
    finished: int = 0
    cancelled: int = 0
    made: int = 0  # tokens
    read: int = 0  # prompt tokens that were computed
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


class Engine:
    """Greedy generation for many requests.

    served: a ServedModel. piece: prompt tokens a turn and request. guesses: draft tokens a turn and request, at most 7.
    entries, block: the prefix cache's size and the multiples at which prefixes end.
    """

    def __init__(self, served: Any, piece: int = 64, guesses: int = 3, entries: int = 64, block: int = 16):
        if piece < 1 or not 0 <= guesses <= 7:
            raise ValueError(f"piece must be at least 1 and guesses 0 .. 7, got {piece} and {guesses}")
        self.served, self.piece, self.guesses = served, piece, guesses
        self.prefixes = PrefixCache(entries, block)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.counts = Counts()

    def submit(self, request: Request) -> None:
        if not request.prompt or request.count < 1:
            raise ValueError(f"a request must have a prompt and count at least 1, got {len(request.prompt)} tokens and {request.count}")
        if min(request.prompt) < 0 or max(request.prompt) >= self.served.vocabulary:
            raise ValueError(
                f"a prompt must hold tokens 0 .. {self.served.vocabulary - 1}, got {min(request.prompt)} .. {max(request.prompt)}"
            )
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Its slot is free at once, and it makes no more tokens."""
        if request.done:
            return
        request.cancelled = True
        self.counts.cancelled += 1
        if request.slot is None:
            self.waiting.remove(request)
        else:
            self._leave(request)

    def turn(self) -> bool:
        """One step for everybody; False when nothing is left to do."""
        self._admit()
        reading = [r for r in self.running if r.read < len(r.prompt)]
        writing = [r for r in self.running if r.read == len(r.prompt)]
        if reading:
            self._read(reading)
        if writing:
            self._write(writing)
        for request in [r for r in self.running if r.done]:
            self.counts.finished += 1
            self._leave(request)
        self.counts.turns += bool(reading or writing)
        return bool(self.running or self.waiting)

    def _admit(self) -> None:
        while self.waiting and self.served.free_slots:
            request = self.waiting.popleft()
            request.slot = self.served.allocate()
            request.read, state = self.prefixes.longest(request.prompt)
            if state is not None:
                self.served.restore(request.slot, state)
                self.counts.remembered += request.read
            self.running.append(request)

    def _read(self, requests: list[Request]) -> None:
        """The next slice of every prompt; states at the ends of new blocks go into the cache."""
        slices = [r.prompt[r.read : r.read + self.piece] for r in requests]
        places = [self._new_blocks(r, len(s)) for r, s in zip(requests, slices, strict=True)]
        logits, states = self.served.prefill([r.slot for r in requests], slices, places)
        chosen = logits.argmax(-1).tolist()
        for request, piece, place, kept, token in zip(requests, slices, places, states, chosen, strict=True):
            for p, state in zip(place, kept, strict=True):
                self.prefixes.put(request.prompt[: request.read + p], state)
            request.read += len(piece)
            self.counts.read += len(piece)
            if request.read == len(request.prompt):
                self._say(request, [token])

    def _new_blocks(self, request: Request, count: int) -> list[int]:
        """Positions in the next `count` tokens that end a block not yet kept."""
        block, start = self.prefixes.block, request.read
        ends = range(-(-(start + 1) // block) * block, start + count + 1, block)
        return [e - start for e in ends if self.prefixes.entries and request.prompt[:e] not in self.prefixes]

    def _write(self, requests: list[Request]) -> None:
        """One token each, and as many more as were guessed right."""
        slots = [r.slot for r in requests]
        drafts = [repeat_last(r.text, min(self.guesses, r.count - len(r.made) - 1)) for r in requests]
        longest = max(map(len, drafts))
        if longest == 0:
            for request, token in zip(requests, self.served.decode(slots, [r.made[-1] for r in requests]).argmax(-1).tolist(), strict=True):
                self._say(request, [token])
            return
        rows = [[r.made[-1], *d, *[0] * (longest - len(d))] for r, d in zip(requests, drafts, strict=True)]
        logits, log = self.served.verify(slots, rows)
        accepted = []
        for request, draft, chosen in zip(requests, drafts, logits.argmax(-1).tolist(), strict=True):
            right = next((i for i, (a, b) in enumerate(zip(draft, chosen, strict=False)) if a != b), len(draft))
            self.counts.guessed += len(draft)
            self.counts.accepted += right
            accepted.append(right + 1)
            self._say(request, chosen[: right + 1])
        self.served.commit(log, accepted)

    def _say(self, request: Request, tokens: list[int]) -> None:
        request.made += tokens
        self.counts.made += len(tokens)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.served.free(request.slot)
        request.slot = None
