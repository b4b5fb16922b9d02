"""Continuous batching: the same answers in any company, slots and cache entries accounted for."""

import random

import numpy as np
import pytest

pytest.importorskip("torch")

from kdakit.models.config import ModelConfig
from kdakit.models.generation import generate
from kdakit.models.sampling import greedy
from kdakit.models.torch import KimiLinear
from kdakit.serving import guesses
from kdakit.serving.engine import Engine, Request
from kdakit.serving.guesses import Repeats
from kdakit.serving.prefixes import PrefixCache
from kdakit.serving.torch.model import ServedModel

CONFIG = dict(vocab_size=40, hidden_size=16, num_layers=2, attention_every=0, head_dim=8, num_heads=1, num_v_heads=2, conv_size=3)


@pytest.fixture(
    scope="module", params=[dict(), dict(use_short_conv=False, lower_bound=-5.0, safe_gate=True, tie_embeddings=False)], ids=str
)
def model(request):
    return KimiLinear(ModelConfig(**(CONFIG | request.param))).double()


def alone(model, request):
    return [int(t[0]) for t in generate(model, np.array([request.prompt]), request.count, greedy)]


def requests(count, seed=0):
    rng = random.Random(seed)
    opening = [rng.randrange(40) for _ in range(20)]
    return [Request((opening if i % 2 else []) + [rng.randrange(40) for _ in range(rng.randrange(1, 9))] * 2, rng.randrange(1, 9))
            for i in range(count)]  # fmt: skip


def run(engine):
    for turn in range(500):
        if not engine.turn():
            return turn
    raise AssertionError("does not end")


@pytest.mark.parametrize("guesses, entries", [(0, 0), (7, 4)])
def test_answers_are_those_given_alone(model, guesses, entries):
    asked = requests(9)
    engine = Engine(ServedModel(model, 3), piece=6, guesses=guesses, entries=entries, block=4)
    for request in asked:
        engine.submit(request)
    run(engine)
    assert [r.made for r in asked] == [alone(model, r) for r in asked]
    assert engine.served.free_slots == 3 and engine.counts.finished == 9
    assert (engine.counts.guessed > 0) == bool(guesses) and (engine.counts.remembered > 0) == bool(entries)
    assert len(engine.prefixes) <= entries


def test_a_prompt_that_was_read_before_is_not_read_again(model):
    first, second = Request(list(range(21)), 3), Request([*range(17), 39, 38], 3)
    engine = Engine(ServedModel(model, 1), piece=10, block=8)
    engine.submit(first)
    run(engine)
    assert engine.counts.read == 21
    engine.submit(second)
    run(engine)
    assert engine.counts.read == 21 + 3 and engine.counts.remembered == 16
    assert second.made == alone(model, second)


def test_cancelling_frees_the_slot_for_the_next(model):
    asked = requests(4)
    asked[0].count = asked[3].count = 30
    engine = Engine(ServedModel(model, 1), piece=100)
    for request in asked:
        engine.submit(request)
    engine.turn()
    engine.turn()
    engine.cancel(asked[3])  # waiting
    engine.cancel(asked[0])  # running
    engine.cancel(asked[0])
    made = list(asked[0].made)
    run(engine)
    assert made and asked[0].made == made == alone(model, asked[0])[: len(made)] and not asked[3].made
    assert [r.made for r in asked[1:3]] == [alone(model, r) for r in asked[1:3]]
    assert engine.counts.cancelled == 2 and engine.counts.finished == 2 and engine.served.free_slots == 1


def test_what_cannot_be_served_is_refused(model):
    engine = Engine(ServedModel(model, 1))
    for bad in (Request([], 1), Request([1], 0), Request([40], 1), Request([-1], 1)):
        with pytest.raises(ValueError, match=r"must have a prompt|must hold tokens 0 \.\. 39"):
            engine.submit(bad)
    with pytest.raises(ValueError, match="attention_every=0"):
        ServedModel(KimiLinear(ModelConfig(**(CONFIG | dict(attention_every=2)))), 1)
    with pytest.raises(ValueError, match=r"guesses 0 \.\. 7"):
        Engine(ServedModel(model, 1), guesses=8)


def test_prefix_cache_keeps_what_was_used_last():
    cache = PrefixCache(entries=2, block=2)
    cache.put([1, 2], "a")
    cache.put([1, 2, 3, 4], "b")
    assert cache.longest([1, 2, 3, 4]) == (2, "a"), "a token must be left to read"
    assert cache.longest([1, 2, 3, 4, 5]) == (4, "b")
    assert cache.longest([1, 2, 9]) == (2, "a")
    cache.put([7, 7], "c")
    assert cache.longest([1, 2, 3, 4, 5]) == (2, "a") and len(cache) == 2 and cache.evicted == 1
    assert cache.longest([9, 9, 9]) == (0, None)


def repeat_last(text, count):
    """What followed the latest earlier occurrence of the last 3, else 2, else 1 tokens."""
    for n in range(min(3, len(text) - 1), 0, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                return text[start + n : start + n + count]
    return []


def test_guesses():
    assert Repeats().draft([1, 2, 3, 9, 1, 2, 3], 2) == [9, 1]
    assert Repeats().draft([5, 1, 6, 1], 3) == [6, 1]
    assert Repeats().draft([1, 2, 3], 3) == [] and Repeats().draft([1], 3) == [] and Repeats().draft([1, 1], 0) == []


def test_guesses_of_a_growing_text():
    """Whatever it grows by between two looks."""
    rng, text, repeats = random.Random(0), [], Repeats()
    for _ in range(400):
        text += [rng.randrange(4) for _ in range(rng.randrange(1, 4))]
        count = rng.randrange(5)
        assert repeats.draft(text, count) == (repeat_last(text, count) if count else [])


def test_guesses_of_a_long_text_take_bounded_memory(monkeypatch):
    monkeypatch.setattr(guesses, "REMEMBERED", 50)
    repeats, text = Repeats(), list(range(5000))
    repeats.draft(text, 1)
    assert len(repeats._followed) + len(repeats._older) <= 2 * (3 * 50 + 3)
    assert repeats.draft([*text, 4990], 2) == [4991, 4992]
