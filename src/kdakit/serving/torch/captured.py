"""A served model's steps as CUDA graphs: one launch by the host for the whole model, whichever slots take part.

A graph is captured for each number of rows, in powers of two, and of tokens a row, the first time it is needed. Slots and tokens are copied
into its inputs before a replay; rows beyond those asked for have slot -1, which touches no state. So do the calls that warm up a capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kdakit.serving.arguments import check_accepted
from kdakit.serving.torch.calls import Draft, commit, decode, verify
from kdakit.serving.torch.layer import Whole, in_one

WARM = 2  # runs before a capture: they compile, plan and allocate what may not happen inside one


@dataclass
class Captured:
    """One graph of verify or decode, with its inputs and outputs; `drafts` and `commit` of verify only."""

    slots: Tensor  # [R]
    tokens: Tensor  # [R, T]
    logits: Tensor  # [R, T, vocabulary]
    graph: torch.cuda.CUDAGraph
    drafts: list[Draft] = field(default_factory=list)
    accepted: Tensor | None = None  # [R]
    commit: torch.cuda.CUDAGraph | None = None
    calls: int = 0  # so many drafts have been made here: the latest one alone can be committed


@dataclass
class CapturedDraft:
    """What `verify` leaves for `commit`."""

    of: Captured
    number: int  # which call of it
    rows: int
    spent: bool = False


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

    def decode(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Logits [N, 1, vocabulary], which the next call of the same size overwrites."""
        return self._replay("decode", slots, tokens).logits[: len(slots)]

    def verify(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> tuple[Tensor, CapturedDraft]:
        found = self._replay("verify", slots, tokens)
        found.calls += 1
        return found.logits[: len(slots)], CapturedDraft(found, found.calls, len(slots))

    def commit(self, draft: CapturedDraft, accepted: Sequence[int]) -> None:
        """The first accepted[n] tokens of each row, in every layer or in none."""
        found, tokens = draft.of, draft.of.tokens.shape[1]
        counts = check_accepted(accepted, draft.rows, tokens)
        if draft.spent or draft.number != found.calls or found.accepted is None or found.commit is None:
            raise ValueError("draft must be the latest of its size and not have been committed before: verify again")
        draft.spent = True
        found.accepted.copy_(_padded(counts, len(found.accepted), 0, self.device))
        found.commit.replay()

    def _replay(self, kind: str, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Captured:
        rows = 1 << (len(slots) - 1).bit_length()
        key = kind, rows, len(tokens[0])
        if key not in self.made:
            self.made[key] = self._capture(*key)
        found = self.made[key]
        found.slots.copy_(_padded(slots, rows, -1, self.device))
        found.tokens.copy_(_padded(tokens, rows, [0] * len(tokens[0]), self.device))
        found.graph.replay()
        return found

    def _capture(self, kind: str, rows: int, length: int) -> Captured:
        slots = torch.full((rows,), -1, device=self.device)
        tokens = torch.zeros(rows, length, dtype=torch.int64, device=self.device)
        drafts: list[Draft] = []

        def one(pool, **given):
            if kind == "decode":
                return decode(pool, slots, **given)
            o, draft = verify(pool, slots, **given)
            drafts.append(draft)
            return o

        def step() -> Tensor:
            drafts.clear()
            return self.forward(tokens, slots, one, in_one(kind, drafts))

        graph, logits = self._graph(step)
        made = Captured(slots, tokens, logits, graph, list(drafts))
        if kind == "verify":
            made.accepted = accepted = torch.zeros_like(slots)
            made.commit, _ = self._graph(lambda: self._commit(made, accepted))
        return made

    def _commit(self, made: Captured, accepted: Tensor) -> None:
        for pool, draft in zip(self.pools, made.drafts, strict=True):
            draft.spent = False  # which of its replays has been committed is CapturedDraft's to know
            commit(pool, draft, accepted)

    def _graph(self, step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """`step` warmed up on a stream of its own, captured; nobody's slots take part."""
        aside, now = torch.cuda.Stream(), torch.cuda.current_stream()
        aside.wait_stream(now)
        with torch.cuda.stream(aside):
            for _ in range(WARM):
                step()
        now.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.memory):
            out = step()
        return graph, out


def _padded(rows: Sequence[Any], count: int, filler: Any, device: torch.device) -> Tensor:
    """On the device without waiting for what it has still to do."""
    return torch.tensor([*rows, *[filler] * (count - len(rows))], dtype=torch.int64).pin_memory().to(device, non_blocking=True)
