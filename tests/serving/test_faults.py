"""An exception anywhere inside a turn, requests that cannot be served, and what becomes of the others: nothing lost, nothing silent."""

import os
import random
import threading

import pytest

torch = pytest.importorskip("torch")

import soak  # noqa: E402
from faults import Alone, Calls, Injected, check, open_engine, run, scenario, small_model  # noqa: E402

from kdakit.serving.engine import Engine, Request  # noqa: E402
from kdakit.serving.torch.model import ServedModel  # noqa: E402

SLOTS = 2
FULL = os.environ.get("KDAKIT_FULL") == "1"  # make test-full
SAMPLED = {3: 1000, 0: 1000} if FULL else {3: 8, 0: 4}  # functions underneath a turn, with drafts and without
BOUNDARY = ("allocate", "free", "reset", "restore", "prefill", "begin", "follow", "decode", "verify", "verify_tokens", "commit", "choose",
            "longest", "put")  # fmt: skip
# What a scenario does not call: reset; and with drafts steps that follow unseen, without them drafts.
UNUSED = {3: {"reset", "follow"}, 0: {"reset", "verify", "verify_tokens", "commit"}}


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture(scope="module")
def alone(model):
    return Alone(model, 12)


def served(engine, requests):
    for request in requests:
        engine.submit(request)
    run(engine)


class Boundary:
    """Everything that the engine asks of its model and its cache: counted, and at one call an exception, before or after the call."""

    def __init__(self, engine, at=None, after=False, times=1):
        self.at, self.after, self.times, self.seen = at, after, times, []
        for target in (engine.served, engine.prefixes):
            for name in BOUNDARY:
                if hasattr(target, name):
                    setattr(target, name, self.wrap(name, getattr(target, name)))

    def wrap(self, name, call):
        def wrapped(*args):
            self.seen.append(name)
            now = self.at is not None and self.at <= len(self.seen) < self.at + self.times
            if now and not self.after:
                raise Injected(f"before {name}")
            result = call(*args)
            if now:
                raise Injected(f"after {name}")
            return result

        return wrapped


def boundary_calls(model, guesses):
    engine = open_engine(model, guesses=guesses)
    boundary = Boundary(engine)
    served(engine, scenario())
    return boundary.seen


@pytest.mark.parametrize("guesses", UNUSED)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_fault_at_every_call_of_a_turn_is_not_noticed(model, alone, after, guesses):
    """One fault somewhere in the run: every answer is as alone."""
    calls = boundary_calls(model, guesses)
    assert set(calls) == set(BOUNDARY) - UNUSED[guesses], "the scenario leaves something out"
    for at in range(1, len(calls) + 1, 1 if FULL or guesses else 4):
        engine, requests = open_engine(model, guesses=guesses), scenario()
        Boundary(engine, at, after)
        served(engine, requests)
        check(engine, requests, alone, SLOTS)
        assert engine.counts.faults == 1 and engine.counts.failed == 0, calls[at - 1]
        assert isinstance(engine.faults[0], Injected)


def test_faults_that_come_in_rows(model, alone):
    """Two to five calls in a row raise, those that mend the first fault among them: some requests end with that error, no other does."""
    rng, failed, calls = random.Random(1), 0, {guesses: len(boundary_calls(model, guesses)) for guesses in UNUSED}
    for i in range(16):
        guesses = 0 if i % 2 else 3
        engine, requests = open_engine(model, guesses=guesses), scenario()
        Boundary(engine, rng.randrange(1, calls[guesses]), rng.random() < 0.5, rng.randrange(2, 6))
        try:
            served(engine, requests)
        except RuntimeError as stuck:
            assert "cannot be freed" in str(stuck)
            run(engine)
        check(engine, requests, alone, SLOTS)
        assert all(r.error is None or isinstance(r.error, Injected) for r in requests)
        failed += engine.counts.failed
    assert failed


@pytest.mark.parametrize("error, guesses", [(Injected, 3), (KeyboardInterrupt, 3), (Injected, 0), (KeyboardInterrupt, 0)])
def test_a_fault_at_any_call_however_deep(model, alone, error, guesses):
    """Every function underneath a turn in turn, at one of its calls or returns; who interrupts from outside may go on too."""
    engine, requests = open_engine(model, guesses=guesses), scenario()
    with Calls() as calls:
        served(engine, requests)
    rng, kinds = random.Random(2), {}
    for at, where in enumerate(calls.where, 1):
        kinds.setdefault(where, []).append(at)
    assert len(kinds) > (300 if guesses else 250)
    for where in rng.sample(sorted(kinds), min(SAMPLED[guesses], len(kinds))):
        engine, requests = open_engine(model, guesses=guesses), scenario()
        for request in requests:
            engine.submit(request)
        with Calls(rng.choice(kinds[where]), error):
            try:
                run(engine)
            except KeyboardInterrupt:
                assert error is KeyboardInterrupt
        run(engine)
        check(engine, requests, alone, SLOTS)
        assert engine.counts.failed == 0, where


def test_a_turn_interrupted_when_all_tokens_are_made(model, alone):
    """Those that have theirs make no more in the next turn."""
    engine, (request, *_) = open_engine(model), scenario()
    leave, calls = engine._leave, []

    def interrupted(leaving):
        calls.append(leaving)
        if len(calls) == 1:
            raise KeyboardInterrupt
        leave(leaving)

    engine._leave = interrupted
    engine.submit(request)
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    assert len(request.made) == request.count
    run(engine)
    check(engine, [request], alone, SLOTS)


class Unwell(ServedModel):
    """Raises whenever a token is seen in a step of a kind."""

    def __init__(self, model, slots, token, kind):
        super().__init__(model, slots)
        self.token, self.kind = token, kind

    def _check(self, slots, tokens):
        super()._check(slots, tokens)
        if self.kind == "decode" and self.token in tokens:
            raise Injected(self.kind)

    def _check_rows(self, slots, tokens):
        super()._check_rows(slots, tokens)
        if self.kind == "prefill" and any(self.token in own for own in tokens):
            raise Injected(self.kind)


def test_a_request_that_cannot_be_served_ends_alone(model, alone):
    """Its every step raises, in whatever company; the others get their answers, and their texts are not read again and again."""
    asked = [Request([1, 2, 3, 4, 5, 6, 7], 4), Request([8, 9, 10, 39, 11, 12, 13, 14], 4), Request([15, 16], 6), Request([17, 18, 19], 3)]
    engine = Engine(Unwell(model, 4, 39, "prefill"), piece=5, guesses=0, entries=0)
    served(engine, asked)
    check(engine, asked, alone, 4)
    assert [r.error is not None for r in asked] == [False, True, False, False] and asked[1].made == []
    assert engine.counts.faults == 2 and engine.counts.read <= 2 * sum(len(r.prompt) for r in asked)


def test_a_token_that_cannot_be_decoded_ends_its_request_alone(model, alone):
    asked = [Request([1, 2, 3], 6), Request([4, 5], 6), Request([6, 7], 6)]
    answers = [alone(r) for r in asked]
    place, fatal = next((i, t) for i, t in enumerate(answers[1][:-1]) if t not in answers[0] + answers[2] and i)
    engine = Engine(Unwell(model, 3, fatal, "decode"), piece=4, guesses=0)
    served(engine, asked)
    check(engine, asked, alone, 3)
    assert [len(r.made) for r in asked] == [6, answers[1].index(fatal) + 1, 6] and place
    # The first fault is of the step that was begun before the token was seen, the second of all together, the third of the one alone.
    assert isinstance(asked[1].error, Injected) and engine.counts.faults == 3


def test_when_nothing_works_every_request_ends_with_its_error(model):
    engine, requests = open_engine(model), scenario()
    engine.served.prefill = engine.served.allocate.__func__  # any call: its argument is missing
    served(engine, requests)
    assert all(isinstance(r.error, (TypeError, AttributeError)) for r in requests) and engine.served.free_slots == SLOTS
    requests, engine.served.allocate = scenario(), lambda: 1 / 0
    served(engine, requests)
    assert all(isinstance(r.error, ZeroDivisionError) for r in requests) and engine.served.free_slots == SLOTS


def test_slots_that_cannot_be_freed_are_told(model):
    engine, (request, *_) = open_engine(model), scenario()
    free, engine.served.free = engine.served.free, lambda slot: 1 / 0
    engine.submit(request)
    with pytest.raises(RuntimeError, match=r"slots \[0\] .* cannot be freed: ZeroDivisionError"):
        run(engine)
    engine.served.free = free
    assert not engine.turn() and engine.served.free_slots == SLOTS and request.error is None


def test_a_fault_does_not_keep_the_tensors_of_its_step(model):
    """Its traceback would, and on a GPU that is memory."""
    import gc
    import weakref

    engine, (request, *_) = open_engine(model), scenario()
    kept = []

    def broken(slots, tokens, checkpoints):
        large = torch.zeros(1000)
        kept.append(weakref.ref(large))
        raise Injected

    engine.served.prefill = broken
    served(engine, [request])
    gc.collect()
    assert len(engine.faults) == 2 and len(kept) == 2 and all(ref() is None for ref in kept)


@pytest.mark.parametrize("guesses", [0, 7])
def test_logits_that_are_no_numbers_end_their_request(model, alone, guesses):
    """One sequence's state is NaN: it ends, its states are not remembered, the others have their answers."""
    asked = [Request([1, 2, 3, 1, 2, 3], 8), Request([4, 5, 4, 5], 8), Request([6, 7], 8)]
    engine = Engine(ServedModel(model, 3), piece=100, guesses=guesses, entries=8, block=4)
    for request in asked:
        engine.submit(request)
    engine.turn()
    for pool in engine.served.pools:
        pool.storage.states[asked[1].slot] = torch.nan
    run(engine)
    check(engine, asked, alone, 3)
    assert isinstance(asked[1].error, FloatingPointError) and len(asked[1].made) == 1
    assert [r.error for r in (asked[0], asked[2])] == [None, None]
    again = Request(list(asked[1].prompt), 8)
    served(engine, [again])
    assert again.made == alone(again)


def test_weights_that_are_no_numbers():
    broken = small_model()
    with torch.no_grad():
        broken.model.norm.weight[3] = torch.nan
    engine, requests = open_engine(broken), scenario()
    served(engine, requests)
    assert all(isinstance(r.error, FloatingPointError) and not r.made for r in requests)
    assert len(engine.prefixes) == 0 and engine.served.free_slots == SLOTS


BAD = {
    "float": ([1.0, 2], 3), "float with no fraction": ([1, 2.0], 3), "bool": ([True], 3), "none": ([None], 3), "text": ("text", 3),
    "bytes": (b"text", 3), "number": (3, 3), "mapping": ({0: 1}, 3), "set": ({0, 1}, 3), "empty": ([], 3), "negative": ([-1], 3),
    "too large": ([40], 3), "far too large": ([2**70], 3), "no count": ([1], 0), "negative count": ([1], -1), "half a count": ([1], 1.5),
    "count that is none": ([1], None), "count that is a bool": ([1], True), "nested": ([[1, 2]], 3),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_bad_requests_are_refused_at_submit(model, alone, kind):
    engine, good, bad = open_engine(model), Request([1, 2], 2), Request(*BAD[kind])
    engine.submit(good)
    with pytest.raises((TypeError, ValueError), match=r"must (be|have|hold)"):
        engine.submit(bad)
    with pytest.raises(ValueError, match="must have been submitted to this engine"):
        engine.cancel(bad)
    run(engine)
    check(engine, [good], alone, SLOTS)


def test_a_request_is_served_once_and_by_one_engine(model, alone):
    engine, other, request = open_engine(model), open_engine(model), Request([1, 2], 4)
    engine.submit(request)
    for place in (engine, other):
        with pytest.raises(ValueError, match="submitted once"):
            place.submit(request)
    with pytest.raises(ValueError, match="submitted to this engine"):
        other.cancel(request)
    assert not request.cancelled and other.counts.cancelled == 0
    engine.turn()
    request.prompt.append("nonsense")  # what was submitted is the engine's own
    run(engine)
    with pytest.raises(ValueError, match="submitted once"):
        engine.submit(request)
    request.prompt.pop()
    engine.cancel(request)
    check(engine, [request], alone, SLOTS)


def test_submitting_and_cancelling_from_other_threads(model, alone):
    engine, asked, stop = open_engine(model), [], threading.Event()

    def client(seed):
        rng = random.Random(seed)
        for _ in range(4):
            request = Request([rng.randrange(40) for _ in range(rng.randrange(1, 9))], rng.randrange(1, 6))
            asked.append(request)
            engine.submit(request)
            if rng.random() < 0.3:
                engine.cancel(request)

    def server():
        while engine.turn() or not stop.is_set():
            pass

    clients, serving = [threading.Thread(target=client, args=(seed,)) for seed in range(4)], threading.Thread(target=server)
    for thread in (serving, *clients):
        thread.start()
    for thread in clients:
        thread.join(60)
    stop.set()
    serving.join(60)
    assert not serving.is_alive() and len(asked) == 16
    check(engine, asked, alone, SLOTS)


@pytest.mark.parametrize("guesses, requests", [("3", "60"), ("0", "40")])
def test_soak(capsys, guesses, requests):
    """Faults in every fifth turn; without drafts steps are under way between turns."""
    done = soak.main(["--requests", requests, "--slots", "5", "--every", "4", "--seed", "5", "--guesses", guesses])
    assert done.raised >= 5 and done.refused and done.engine.counts.cancelled and done.engine.counts.failed
    assert "no slot lost" in capsys.readouterr().out
