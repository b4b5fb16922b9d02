"""Continuous batching: requests come and go, and every turn moves all of them that have a slot.

A turn admits who is waiting while slots are free, reads the next slice of every unread prompt in one packed call, and makes tokens for all
that have read theirs: one each, or several where guesses turn out right. Prompts that begin like an earlier one start from its state.

Whatever raises inside a turn, a request's step happens whole or not at all. States are changed in place, layer by layer, so a step that
broke off may have moved some of them. Nothing is copied against that: a request's text says everything that its states hold. Before a step
moves states its requests forget how far they are (`read = None`), and learn it again when all is done; who does not, reads its text again
from the longest prefix that is kept. A step that goes well pays one assignment a request, a fault the reading of the texts it took part in.

Without drafts a step is begun before anybody has looked at the tokens of the one before it, which the device has already: the host's
bookkeeping then takes no time of the device's. Such a step is under way between two turns. Its requests have forgotten how far they are
until its tokens have been read, at the beginning of the next turn; one that has left by then is passed over.

After a fault nobody knows whose it was. All who took part go on, but each alone until it is past the place; who fails there again ends
with the error, and the others have not noticed.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from kdakit.serving.prefixes import PrefixCache
from kdakit.serving.requests import Counts, Request, checked_prompt

__all__ = ["Counts", "Engine", "Request"]

REMEMBERED_FAULTS = 16
_claiming = threading.Lock()


class UnderWay(NamedTuple):
    """A step whose tokens nobody has seen, and whose they are."""

    step: Any  # of the served model
    requests: list[Request]


class Engine:
    """Greedy generation for many requests. submit, cancel and turn may come from different threads; a turn makes the others wait.

    served: a ServedModel. piece: prompt tokens a turn and request. guesses: draft tokens a turn and request, at most 7.
    entries, block: the prefix cache's size and the multiples at which prefixes end.
    faults: the latest exceptions inside turns, whether or not they ended a request.
    """

    def __init__(self, served: Any, piece: int = 64, guesses: int = 3, entries: int = 64, block: int = 16):
        if piece < 1 or not 0 <= guesses <= 7:
            raise ValueError(f"piece must be at least 1 and guesses 0 .. 7, got {piece} and {guesses}")
        self.served, self.piece, self.guesses = served, piece, guesses
        self.prefixes = PrefixCache(entries, block)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.counts = Counts()
        self.faults: deque[Exception] = deque(maxlen=REMEMBERED_FAULTS)
        self._under_way: UnderWay | None = None
        self._leaving: list[int] = []  # slots whose requests have ended and that are not free yet
        self._lock = threading.RLock()

    def submit(self, request: Request) -> None:
        with self._lock:
            with _claiming:  # two engines have two locks
                if request.owner is not None:
                    raise ValueError("a request must be submitted once, got one that was before: make another with the same prompt")
                request.owner = self
            try:
                prompt = checked_prompt(request, self.served.vocabulary)
            except BaseException:
                request.owner = None
                raise
            request.text, request.asked = prompt, len(prompt)
            self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Its slot is free at once, and it makes no more tokens."""
        with self._lock:
            if request.owner is not self:
                raise ValueError("a request must have been submitted to this engine to be cancelled, got one that was not")
            if request.done:
                return
            request.cancelled = True
            self.counts.cancelled += 1
            self._leave(request)
            self._give_back()

    def turn(self) -> bool:
        """One step for everybody; False when nothing is left to do.

        Raises only if it can do nothing at all: nobody runs, and slots of requests that have ended cannot be freed.
        """
        with self._lock:
            self._dismiss()  # whom an interrupted turn has left
            stuck = self._give_back()
            self._admit()
            moved = self._settle()
            reading, writing = self._left_to_move(moved)
            for step, members in ((self._read, reading), (self._write, writing)):
                for group in ([r for r in members if r.suspect is None], *([r] for r in members if r.suspect is not None)):
                    if group:
                        self._attempt(step, group, [self._reach(r) for r in group])
            self._dismiss()
            self.counts.turns += bool(moved or reading or writing)
            again = self._give_back()
            if stuck and again and not self.running and not (self.waiting and self.served.free_slots):
                raise RuntimeError(f"slots {self._leaving} of requests that have ended cannot be freed: {again!r}") from again
            return bool(self.running or self.waiting or self._leaving)

    def _left_to_move(self, moved: list[Request]) -> tuple[list[Request], list[Request]]:
        """Of those that have not had their step in this turn, who is reading and who is writing; who knows nothing begins again first."""
        left = self.running[:]
        if moved:
            known = set(map(id, moved))
            left = [r for r in left if id(r) not in known]
        for request in left:
            if not request.read:
                self._attempt(self._begin, [request], [1])
        reading: list[Request] = []
        writing: list[Request] = []
        for request in left:
            if request.read is not None and not request.done:
                (reading if request.reading else writing).append(request)
        return reading, writing

    # Faults

    def _attempt(self, step: Callable[[list[Request]], None], requests: list[Request], reach: list[int]) -> None:
        """A step of some requests. Those that it did not carry past `reach` are under suspicion, or end if they were before."""
        try:
            step(requests)
        except Exception as error:  # of whatever kind: it is kept, and it ends who raises it alone
            self._note(error)
            for request, place in zip(requests, reach, strict=True):
                if request.done or (request.read is not None and request.read >= place):
                    continue
                if request.suspect is None:
                    request.suspect = place
                else:
                    self._end(request, error)
        for request in requests:
            if request.suspect is not None and request.read is not None and request.read >= request.suspect:
                request.suspect = None

    def _reach(self, request: Request) -> int:
        """How much of its text will be in a request's slot after its next step."""
        read = request.read or 0
        return min(read + self.piece, request.goal) if request.reading else read + 1

    def _note(self, error: Exception) -> None:
        traceback.clear_frames(error.__traceback__)  # else it would hold the tensors of the step
        self.faults.append(error)
        self.counts.faults += 1

    def _end(self, request: Request, error: Exception) -> None:
        request.error = error
        self.counts.failed += 1
        self._leave(request)

    # Slots

    def _admit(self) -> None:
        while self.waiting:
            request, expected = self.waiting[0], None
            try:
                if not self.served.free_slots:
                    return
                expected = self.served.next_slot
                request.slot = self.served.allocate()
            except Exception as error:  # whoever is first in the line gets another chance, then it is the next one's turn
                self._note(error)
                if expected is not None and self.served.taken(expected):
                    self._leaving.append(expected)
                if request.suspect is None:
                    request.suspect = 1
                    return
                self._end(request, error)
                continue
            request.read = 0
            self.running.append(request)
            self.waiting.popleft()

    def _dismiss(self) -> None:
        """Those that have all their tokens."""
        for request in [r for r in self.running if r.done]:
            self._leave(request)
            self.counts.finished += 1

    def _leave(self, request: Request) -> None:
        if request.slot is None:
            self.waiting.remove(request)
            return
        self._leaving.append(request.slot)
        self.running.remove(request)
        request.slot = None

    def _give_back(self) -> Exception | None:
        """Free the slots of those that have left. One that cannot be freed now is tried again next turn."""
        failed = None
        for slot in self._leaving[:]:
            try:
                if self.served.taken(slot):
                    self.served.free(slot)
                self._leaving.remove(slot)
            except Exception as error:  # nobody's who is still here
                self._note(error)
                failed = error
        return failed

    # Steps: each sets `read` of its requests to None before the first state moves, and to where they are after the last one has

    def _begin(self, requests: list[Request]) -> None:
        """An empty slot, or the longest prefix of its text that is kept."""
        for request in requests:
            length, state = self.prefixes.longest(request.text[: request.goal])
            if state is not None:
                request.read = None
                self.served.restore(request.slot, state)
                self.counts.remembered += length
            elif request.read is None:
                self.served.reset(request.slot)
            request.read = length

    def _read(self, requests: list[Request]) -> None:
        """The next slice of every text; states at the ends of new blocks go into the cache."""
        starts = [r.read or 0 for r in requests]
        slices = [r.text[a : min(a + self.piece, r.goal)] for a, r in zip(starts, requests, strict=True)]
        places = [self._new_blocks(r, a, len(s)) for r, a, s in zip(requests, starts, slices, strict=True)]
        for request in requests:
            request.read = None
        logits, states = self.served.prefill([r.slot for r in requests], slices, places)
        chosen = self.served.choose(logits)
        for request, start, piece, place, kept, token in zip(requests, starts, slices, places, states, chosen, strict=True):
            if token < 0:
                self._end(request, _not_finite(request))
                continue
            for p, state in zip(place, kept, strict=True):
                self.prefixes.put(request.text[: start + p], state)
            self.counts.read += len(piece)
            end = start + len(piece)
            self._say(request, [token] if end == request.asked == len(request.text) else [], end)

    def _new_blocks(self, request: Request, start: int, count: int) -> list[int]:
        """Positions in the next `count` tokens that end a block not yet kept."""
        block = self.prefixes.block
        ends = range(-(-(start + 1) // block) * block, start + count + 1, block)
        return [e - start for e in ends if self.prefixes.entries and request.text[:e] not in self.prefixes]

    def _write(self, requests: list[Request]) -> None:
        """One token each, and as many more as were guessed right."""
        slots, starts = [r.slot for r in requests], [r.read or 0 for r in requests]
        drafts = [r.repeats.draft(r.text, min(self.guesses, r.left - 1)) for r in requests] if self.guesses else [[]] * len(requests)
        longest = max(map(len, drafts))
        if longest == 0:
            return self._write_one(requests, slots)
        given = [[r.text[-1], *d, *[0] * (longest - len(d))] for r, d in zip(requests, drafts, strict=True)]
        rows, log = self.served.verify_tokens(slots, given)  # moves nothing
        accepted = [_right(draft, row) + 1 for draft, row in zip(drafts, rows, strict=True)]
        for request in requests:
            request.read = None
        self.served.commit(log, accepted)
        for request, start, draft, row, count in zip(requests, starts, drafts, rows, accepted, strict=True):
            self.counts.guessed += len(draft)
            self.counts.accepted += count - 1
            if min(row[:count]) < 0:
                self._end(request, _not_finite(request))
                continue
            self._say(request, row[:count], start + count)

    def _write_one(self, requests: list[Request], slots: list[Any]) -> None:
        for request in requests:
            request.read = None
        step = self.served.begin(slots, [r.text[-1] for r in requests])
        self._take(UnderWay(step, requests), requests)

    def _settle(self) -> list[Request]:
        """The step that was under way, if one was: who has had a token of it, or has failed to."""
        past, self._under_way = self._under_way, None
        if past is None:
            return []
        members = [r for r in past.requests if r.slot is not None]  # nobody has had another since
        self._attempt(partial(self._take, past), members, [len(r.text) for r in members])
        return [r for r in members if r.read is not None or self._under_way is not None]

    def _take(self, past: UnderWay, members: list[Request]) -> None:
        """The tokens of a step, for those of its requests that are still here. The next one is under way before they are looked at, where
        the same requests want another token."""
        following = self.served.follow(past.step) if self._go_on(past, members) else None
        chosen = past.step.tokens()
        tokens = chosen if len(members) == len(chosen) else [t for t, r in zip(chosen, past.requests, strict=True) if r.slot is not None]
        for request, token in zip(members, tokens, strict=True):
            if token < 0:
                self._end(request, _not_finite(request))
            else:
                self._say(request, [token], None if following else len(request.text))
        if following is not None:
            self._under_way = UnderWay(following, past.requests)

    def _go_on(self, past: UnderWay, members: list[Request]) -> bool:
        """Whether a step's requests are all here and some want another token, and nobody else does who could join them. Those that have
        all their tokens with this one take part in the next without being asked for it."""
        if self.guesses or len(members) < len(past.requests) or not any(r.left > 1 for r in members):
            return False
        alone = any(r.suspect is not None for r in members)
        return not alone and not any(r.read is not None and not r.reading for r in self.running)

    def _say(self, request: Request, tokens: list[int], read: int | None) -> None:
        """The end of a step for one request: as much of its text is in its slot (None: a step is under way), and it has grown by these
        tokens."""
        request.text += tokens
        self.counts.made += len(tokens)
        request.read = read


def _right(draft: list[int], chosen: list[int]) -> int:
    """How many guesses were right."""
    return next((i for i, (a, b) in enumerate(zip(draft, chosen, strict=False)) if a != b), len(draft))


def _not_finite(request: Request) -> FloatingPointError:
    return FloatingPointError(f"the logits after {len(request.text)} tokens must be finite, and are not: look at the weights")
