"""A served model's captured calls, with graphs that run their step again in place of CUDA's: inputs, choices, steps that follow, drafts."""

import pytest

pytest.importorskip("torch")
import torch
from faults import VOCABULARY, Alone, check, run, scenario, small_model

from kdakit.serving.engine import Engine
from kdakit.serving.torch import captured
from kdakit.serving.torch.choice import likeliest
from kdakit.serving.torch.model import Packing, ServedModel


class Again:
    """Replays by running the step again, and leaving its results where those of the capture are."""

    def __init__(self, step):
        self.step, self.out, self.replays = step, step(), 0

    def replay(self):
        self.replays += 1
        for place, value in zip(self.out or (), self.step() or (), strict=True):
            place.copy_(value)


@pytest.fixture
def served(monkeypatch):
    """A function: a served model and how its calls are captured."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(captured.CapturedCalls, "_graph", lambda self, step: (made := Again(step), made.out))

    def make(model, slots):
        one = ServedModel(model, slots)
        one.captured = captured.CapturedCalls(
            lambda tokens, given, *calls: one._forward(tokens, given, Packing(), *calls), one.pools, one.device
        )
        return one

    return make


def opened(make, model, prompts):
    one = make(model, 6)
    slots = [one.allocate() for _ in range(5)][: len(prompts)]
    return one, slots, one.choose(one.prefill(slots, prompts, [[] for _ in slots])[0])


PROMPTS = [[1, 2, 3], [4], [5, 6]]


def test_steps_that_follow_say_what_single_steps_say(served):
    model = small_model()
    plain, slots, tokens = opened(ServedModel, model, PROMPTS)
    want = [tokens]
    for _ in range(4):
        want.append(plain.choose(plain.decode(slots, want[-1])))
    one, slots, tokens = opened(served, model, PROMPTS)
    got, step = [tokens], one.begin(slots, tokens)
    for _ in range(3):
        following = one.follow(step)  # before anybody has seen what the step chose
        got.append(step.tokens())
        step = following
    assert [*got, step.tokens()] == want
    (graph,) = one.captured.made.values()
    assert graph.graph.replays == 4 and graph.rows == captured.FEWEST
    with pytest.raises(ValueError, match="latest of its size"):
        one.captured.follow(one.begin(slots, tokens) and step)


@pytest.mark.parametrize("captured_calls", [False, True])
def test_a_step_keeps_its_own(served, captured_calls):
    """Its sequences, whatever the caller's list holds by then; and tokens that later steps have overwritten are not read."""
    one, slots, tokens = opened(served if captured_calls else ServedModel, small_model(), PROMPTS)
    given = list(slots)
    first = one.begin(given, tokens)
    del given[0]
    second = one.follow(first)
    chosen = first.tokens()
    assert len(chosen) == len(second.tokens()) == 3
    one.begin(slots[:1], second.tokens()[:1])
    if captured_calls:
        with pytest.raises(ValueError, match="one of the latest two of its size"):
            first.tokens()
    else:
        assert first.tokens() == chosen


def test_rows_of_nobody_fill_a_graph(served, monkeypatch):
    """One sequence decodes in a graph of FEWEST rows, nine in one of 16; drafts have no such least."""
    model = small_model()
    plain, slots, tokens = opened(ServedModel, model, PROMPTS)
    one, _, _ = opened(served, model, PROMPTS)
    assert one.next_tokens(slots[:1], tokens[:1]) == plain.next_tokens(slots[:1], tokens[:1])
    monkeypatch.setattr(captured, "FEWEST", 2)
    assert one.next_tokens(slots[1:2], tokens[1:2]) == plain.next_tokens(slots[1:2], tokens[1:2])
    one.verify_tokens(slots[:1], [[1, 2]])
    plain.next_tokens(slots, tokens)
    one.next_tokens(slots, tokens)
    assert list(one.captured.made) == [("decode", 8, 1), ("decode", 2, 1), ("verify", 1, 2), ("decode", 4, 1)]
    for a, b in zip(one.pools, plain.pools, strict=True):
        assert torch.allclose(a.storage.states[:6], b.storage.states[:6], 1e-12, 1e-14), "rows of nobody move no state"


def test_nothing_is_captured_that_could_be_differentiated(served):
    """The layer's kernels leave such calls to others: a graph would hold a step several times as long."""
    one, slots, tokens = opened(served, small_model(), PROMPTS)
    seen, forward = [], one.captured.forward
    one.captured.forward = lambda *given: seen.append(torch.is_grad_enabled()) or forward(*given)
    one.follow(one.begin(slots, tokens))
    one.next_tokens(slots[:1], tokens[:1])
    one.verify_tokens(slots, [[1, 2], [3, 4], [5, 6]])
    assert seen and not any(seen)


def test_drafts_are_chosen_and_committed(served):
    model, tokens = small_model(), [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    answers = []
    for make in (ServedModel, served):
        one, slots, _ = opened(make, model, PROMPTS)
        chosen, draft = one.verify_tokens(slots, tokens)
        one.commit(draft, [0, 1, 3])
        answers.append((chosen, one.next_tokens(slots, [1, 2, 3])))
        with pytest.raises(ValueError, match="verify again"):
            one.commit(draft, [0, 1, 3])
    assert answers[0] == answers[1]


def test_an_engine_with_captured_calls(served):
    model, requests = small_model(), scenario()
    for guesses in (0, 3):
        requests = scenario()
        engine = Engine(served(model, 2), piece=8, guesses=guesses, entries=4, block=8)
        for request in requests:
            engine.submit(request)
        run(engine)
        check(engine, requests, Alone(model, 4), 2)
        assert {kind for kind, *_ in engine.served.captured.made} == ({"decode"} if guesses == 0 else {"decode", "verify"})


def test_likeliest():
    logits = torch.zeros(6, VOCABULARY)
    logits[range(6), [3, 1, 4, 1, 5, 9]] = 1
    logits[1, 7], logits[2, 0], logits[3, 0] = torch.nan, torch.inf, -torch.inf
    assert likeliest(logits).tolist() == [3, -1, -1, -1, 5, 9]
    assert likeliest(logits.view(2, 3, -1)).tolist() == [[3, -1, -1], [-1, 5, 9]]
