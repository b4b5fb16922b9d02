"""A served model's steps as CUDA graphs: one launch by the host for the whole model, whichever slots take part.

A graph is captured for each number of rows, in powers of two (decode: from FEWEST on), and of tokens a row, the first time it is needed.
Slots and tokens are copied into its inputs before a replay; rows beyond those asked for have slot -1, which touches no state. So do the
calls that warm up a capture. The likeliest tokens are chosen inside the graph: a turn copies integers to the device once, and integers back
once. A decode graph leaves them where it takes its next tokens from, so that a step can follow another before the host has seen what that
one chose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kdakit.serving.arguments import check_accepted
from kdakit.serving.torch.calls import Draft, commit, decode, verify
from kdakit.serving.torch.choice import likeliest
from kdakit.serving.torch.exchange import Exchange
from kdakit.serving.torch.layer import Whole, in_one

# Rows of a decode graph at least. The matrix products of one row take another kernel, which is slower: the 340m model's 24 layers take an
# H200 1.68 ms for one row, 1.43 for eight with eight states (`kdakit bench --suite serving`, 16 November 2026).
FEWEST = 8
WARM = 2  # runs before a capture: they compile, plan and allocate what may not happen inside one


@dataclass
class Captured:
    """One graph of verify or decode, with its inputs and outputs; `drafts` and `commit` of verify only."""

    rows: int  # R
    tokens: int  # T
    given: Exchange  # [R + R T]: slots, then tokens
    logits: Tensor  # [R, T, vocabulary]
    chosen: tuple[Exchange, Exchange]  # [R, T], in turn: the likeliest token after each, -1 where a logit is not a finite number
    graph: Any
    drafts: list[Draft] = field(default_factory=list)
    accepted: Exchange | None = None  # [R]
    commit: Any = None
    calls: int = 0  # so many replays: the latest draft alone can be committed, the latest step alone followed


@dataclass
class CapturedDraft:
    """What `verify` leaves for `commit`."""

    of: Captured
    number: int  # which call of it
    rows: int
    spent: bool = False


@dataclass
class CapturedStep:
    """A decode step that is under way."""

    of: Captured
    number: int
    slots: Sequence[int]
    answer: Exchange

    def tokens(self) -> list[int]:
        """Chosen by it, as soon as they are there."""
        if self.of.calls - self.number >= len(self.of.chosen):
            raise ValueError("step must be one of the latest two of its size: earlier ones are overwritten, read their tokens first")
        return [token for (token,) in self.answer.read(len(self.slots))]


class CapturedCalls:
    """decode, verify and commit of a ServedModel. forward(tokens [R, T], slots [R], call, whole) runs the model around pool calls."""

    def __init__(
        self, forward: Callable[[Tensor, Tensor, Callable[..., Tensor], Whole], Tensor], pools: Sequence[Any], device: torch.device
    ):
        self.forward, self.pools, self.device = forward, pools, device
        self.memory = torch.cuda.graph_pool_handle()
        self.made: dict[tuple[str, int, int], Captured] = {}

    def __contains__(self, captured: Captured) -> bool:
        return any(captured is own for own in self.made.values())

    def decode(self, slots: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Logits [N, 1, vocabulary], which the next call of the same size overwrites."""
        return self._replay("decode", slots, tokens, 1).logits[: len(slots)]

    def begin(self, slots: Sequence[int], tokens: Sequence[int]) -> CapturedStep:
        """One token of each sequence; for what it chooses nobody waits yet."""
        return self._under_way(self._replay("decode", slots, tokens, 1), slots)

    def follow(self, step: CapturedStep) -> CapturedStep:
        """The next one of the same sequences, with the tokens that `step` has chosen, or will have: the device knows them."""
        if step.number != step.of.calls:
            raise ValueError("step must be the latest of its size to be followed: begin another with its tokens")
        step.of.calls += 1
        step.of.graph.replay()
        return self._under_way(step.of, step.slots)

    def _under_way(self, found: Captured, slots: Sequence[int]) -> CapturedStep:
        answer = found.chosen[found.calls % 2]
        answer.fetch()
        return CapturedStep(found, found.calls, slots, answer)

    def verify(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> tuple[Tensor, CapturedDraft]:
        found, draft = self._draft(slots, tokens)
        return found.logits[: len(slots)], draft

    def verify_tokens(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> tuple[list[list[int]], CapturedDraft]:
        found, draft = self._draft(slots, tokens)
        found.chosen[0].fetch()
        return found.chosen[0].read(len(slots)), draft

    def commit(self, draft: CapturedDraft, accepted: Sequence[int]) -> None:
        """The first accepted[n] tokens of each row, in every layer or in none."""
        found = draft.of
        counts = check_accepted(accepted, draft.rows, found.tokens)
        if draft.spent or draft.number != found.calls or found.accepted is None or found.commit is None:
            raise ValueError("draft must be the latest of its size and not have been committed before: verify again")
        draft.spent = True
        found.accepted.write(counts, 0)
        found.accepted.send()
        found.commit.replay()

    def _draft(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> tuple[Captured, CapturedDraft]:
        found = self._replay("verify", slots, list(chain.from_iterable(tokens)), len(tokens[0]))
        return found, CapturedDraft(found, found.calls, len(slots))

    def _replay(self, kind: str, slots: Sequence[int], tokens: Sequence[int], length: int) -> Captured:
        rows = max(1 << (len(slots) - 1).bit_length(), FEWEST if kind == "decode" else 1)
        key = kind, rows, length
        if key not in self.made:
            self.made[key] = self._capture(*key)
        found = self.made[key]
        found.given.write(slots, -1, 0, rows)
        found.given.write(tokens, 0, rows)
        found.given.send()
        found.calls += 1
        found.graph.replay()
        return found

    def _capture(self, kind: str, rows: int, length: int) -> Captured:
        inputs = torch.zeros(rows + rows * length, dtype=torch.int64, device=self.device)
        slots, tokens = inputs[:rows].fill_(-1), inputs[rows:].view(rows, length)
        drafts: list[Draft] = []

        def one(pool, **given):
            if kind == "decode":
                return decode(pool, slots, **given)
            o, draft = verify(pool, slots, **given)
            drafts.append(draft)
            return o

        def step() -> tuple[Tensor, Tensor]:
            drafts.clear()
            logits = self.forward(tokens, slots, one, in_one(kind, drafts))
            chosen = likeliest(logits)
            if kind == "decode":
                tokens.copy_(chosen.clamp(min=0))  # whoever has no token goes on with any: nobody will ask for it
            return logits, chosen

        graph, (logits, chosen) = self._graph(step)
        made = Captured(rows, length, Exchange(inputs), logits, (Exchange(chosen), Exchange(chosen)), graph, drafts)
        if kind == "verify":
            made.accepted = Exchange(torch.zeros(rows, dtype=torch.int64, device=self.device))
            made.commit, _ = self._graph(lambda: self._commit(made))
        return made

    def _commit(self, made: Captured) -> None:
        if made.accepted is None:
            raise RuntimeError("a captured draft has a place for what is accepted")
        for pool, draft in zip(self.pools, made.drafts, strict=True):
            draft.spent = False  # which of its replays has been committed is CapturedDraft's to know
            commit(pool, draft, made.accepted.there)

    def _graph(self, step: Callable[[], Any]) -> tuple[Any, Any]:
        """`step` warmed up on a stream of its own, captured; nobody's slots take part."""
        aside, now = torch.cuda.Stream(), torch.cuda.current_stream()
        aside.wait_stream(now)
        try:
            with torch.cuda.stream(aside):
                for _ in range(WARM):
                    step()
        finally:  # also where it failed: what is freed then may still be read over there
            now.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.memory):
            out = step()
        return graph, out
