"""Faults at any call inside a turn of the engine, and what must be true afterwards."""

from __future__ import annotations

import random
import sys

import numpy as np

from kdakit.models.config import ModelConfig
from kdakit.models.generation import generate
from kdakit.models.sampling import greedy
from kdakit.models.torch import KimiLinear
from kdakit.serving.engine import Engine, Request
from kdakit.serving.torch.model import ServedModel

VOCABULARY = 40
CONFIG = dict(vocab_size=VOCABULARY, hidden_size=16, num_layers=2, attention_every=0, head_dim=8, num_heads=1, num_v_heads=2, conv_size=3)
# What a turn stands on; the engine's own bookkeeping is what is tested.
UNDERNEATH = ("kdakit/serving/torch/", "kdakit/serving/prefixes", "kdakit/serving/guesses", "kdakit/serving/slots",
              "kdakit/serving/arguments", "kdakit/backends/", "kdakit/layers/", "kdakit/dispatch",
              "kdakit/problem", "torch/nn/functional")  # fmt: skip


class Injected(Exception):
    """A fault that a test has made."""


def small_model(seed=0, **changes) -> KimiLinear:
    return KimiLinear(ModelConfig(**(CONFIG | changes)), seed).double()


class Alone:
    """What a request gets with nobody beside it, computed once for each prompt: the first tokens of a longer answer are a shorter one."""

    def __init__(self, model: KimiLinear, longest: int):
        self.model, self.longest, self.answers = model, longest, {}

    def __call__(self, request: Request) -> list[int]:
        key = tuple(int(t) for t in request.prompt)
        if key not in self.answers:
            self.answers[key] = [int(t[0]) for t in generate(self.model, np.array([key]), self.longest, greedy)]
        return self.answers[key][: request.count]


class Calls:
    """Counts the Python calls and returns underneath a turn, and raises at one of them: before it has done anything, or after all."""

    def __init__(self, at: int | None = None, error: type[BaseException] = Injected):
        self.at, self.error, self.seen, self.where = at, error, 0, []

    def __enter__(self):
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _event(self, frame, event, _):
        code = frame.f_code
        if event not in ("call", "return") or not any(part in code.co_filename for part in UNDERNEATH):
            return
        self.seen += 1
        if self.at is None:
            self.where.append((code.co_filename.rpartition("kdakit/")[2], code.co_name, event))
        elif self.seen == self.at:
            sys.setprofile(None)
            raise self.error(f"at {code.co_name}, {event}")


def scenario() -> list[Request]:
    """Everything at once: shared openings, prompts of several pieces, phrases that make drafts, more requests than slots."""
    rng = random.Random(39)
    opening = [rng.randrange(VOCABULARY) for _ in range(9)]
    phrase = opening[-2:]
    return [Request(opening + phrase, 4), Request(phrase * 2, 4), Request([*opening, 7], 1)]


def open_engine(model: KimiLinear, slots: int = 2, guesses: int = 3) -> Engine:
    return Engine(ServedModel(model, slots), piece=8, guesses=guesses, entries=4, block=8)


def run(engine: Engine, turns: int = 500) -> None:
    for _ in range(turns):
        if not engine.turn():
            return
    raise AssertionError("does not end")


def check(engine: Engine, requests: list[Request], alone: Alone, slots: int) -> None:
    """Every answer as alone or, as far as it came, with the request's own error; no slot lost; nobody forgotten; counts that add up."""
    for request in requests:
        whole = alone(request)
        assert request.done, "forgotten"
        assert request.made == whole[: len(request.made)], (request.made, whole)
        assert len(request.made) == len(whole) or request.error is not None or request.cancelled
    served, counts = engine.served, engine.counts
    assert served.free_slots == slots and not any(served.taken(s) for s in range(slots))
    assert not (served.pools[0].generation[:slots] % 2).any(), "the device thinks that a slot is taken"
    assert not engine.running and not engine.waiting
    assert counts.finished + counts.failed + counts.cancelled == len(requests)
    assert counts.failed == sum(r.error is not None for r in requests)
