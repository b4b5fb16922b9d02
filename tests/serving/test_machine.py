"""Any order of calls: every sequence is what the float64 recurrence makes of its own tokens, and nobody else's."""

import importlib.util
import os

import fresh
import numpy as np
import pytest
import sequences
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from sequences import Sequence, pieces, tokens

from kdakit.serving.slots import PoolFull

CAPACITY = 4
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
seeds = st.integers(0, 2**32 - 1)


class Serving(RuleBasedStateMachine):
    """Slots and the sequences in them; `pool` comes from `open_pool`."""

    open_pool = None

    def __init__(self):
        super().__init__()
        self.pool = type(self).open_pool()
        self.sequences: dict[int, Sequence] = {}
        self.shelf = None  # (snapshot, sequence)
        self.draft = None  # (draft, slots, x, o) that waits for its commit

    def still(self):
        """Slots that no draft is waiting for."""
        return [s for s in self.sequences if self.draft is None or s not in self.draft[1]]

    def choose(self, rng, on_device):
        """Some slots in any order, and among them rows to skip: the slots to give, and what they mean.

        In a list only -1 is one to skip. On the device so are slots out of range, free ones, and what an earlier row has named.
        """
        still = self.still()
        given = [int(s) for s in rng.permutation(still)[: rng.integers(1, len(still) + 1)]]
        meant = list(given)
        wrong = [-1, -5, CAPACITY, 2**31 - 1, *(s for s in range(CAPACITY) if s not in self.sequences)] if on_device else [-1]
        for _ in range(rng.integers(0, 2)):
            at = int(rng.integers(0, len(given) + 1))
            slot = int(rng.choice([*wrong, *given[:at]] if on_device else wrong))
            given.insert(at, slot)
            meant.insert(at, -1)
        return given, meant

    def settle(self, slots, x, o, counts):
        """The first counts[n] tokens of row n now belong to the sequence in slots[n]."""
        for n, slot in enumerate(slots):
            if slot < 0:
                assert not o[n].any(), "a skipped row has an output"
            elif counts[n]:
                self.sequences[slot].extend(pieces(x, n, slice(0, counts[n])), o[n, : counts[n]])

    @rule(count=st.integers(1, 3))
    def allocate(self, count):
        if count > self.pool.free_slots:
            with pytest.raises(PoolFull):
                self.pool.allocate(count)
            return
        slots = self.pool.allocate(count)
        assert not set(slots) & set(self.sequences)
        self.sequences |= {s: Sequence() for s in slots}

    @precondition(lambda self: self.sequences)
    @rule(pick=st.integers(0, 100))
    def free(self, pick):
        slot = sorted(self.sequences)[pick % len(self.sequences)]
        self.sequences.pop(slot).check(self.pool.state(slot))
        self.pool.free([slot])

    @precondition(lambda self: self.sequences and self.pool.free_slots)
    @rule(pick=st.integers(0, 100))
    def fork(self, pick):
        source = sorted(self.sequences)[pick % len(self.sequences)]
        (slot,) = self.pool.fork(source)
        self.sequences[slot] = Sequence(self.sequences[source])

    @precondition(lambda self: self.sequences)
    @rule(pick=st.integers(0, 100))
    def snapshot(self, pick):
        slot = sorted(self.sequences)[pick % len(self.sequences)]
        self.shelf = self.pool.snapshot([slot]), Sequence(self.sequences[slot])

    @precondition(lambda self: self.shelf and self.still())
    @rule(pick=st.integers(0, 100))
    def restore(self, pick):
        slot = self.still()[pick % len(self.still())]
        self.pool.restore([slot], self.shelf[0])
        self.sequences[slot] = Sequence(self.shelf[1])

    @precondition(lambda self: self.still())
    @rule(seed=seeds, on_device=st.booleans())
    def decode(self, seed, on_device):
        rng = np.random.default_rng(seed)
        given, slots = self.choose(rng, on_device)
        x = tokens(rng, len(slots), 1)
        self.settle(slots, x, self.pool.decode(given, x, on_device), [1] * len(slots))

    @precondition(lambda self: self.still())
    @rule(seed=seeds, with_checkpoints=st.booleans(), on_device=st.booleans())
    def prefill(self, seed, with_checkpoints, on_device):
        rng = np.random.default_rng(seed)
        given, slots = self.choose(rng, on_device)
        lengths = [int(n) for n in rng.choice([0, 1, 5, 16, 19], size=len(slots))]
        x = tokens(rng, 1, sum(lengths))
        wanted = [sorted(set(rng.integers(0, n + 1, 2).tolist())) for n in lengths] if with_checkpoints else None
        o, made = self.pool.prefill(given, x, lengths, wanted, on_device)
        for n, slot in enumerate(slots):
            start = sum(lengths[:n])
            span = slice(start, start + lengths[n])
            if slot < 0:
                assert not o[0, span].any()
                continue
            before = Sequence(self.sequences[slot])
            if lengths[n]:
                self.sequences[slot].extend(pieces(x, 0, span), o[0, span])
            if with_checkpoints:
                p = wanted[n][0]
                if p:
                    before.extend(pieces(x, 0, slice(start, start + p)), o[0, start : start + p])
                self.shelf = made[n][0], before

    @precondition(lambda self: self.draft is None and self.still())
    @rule(seed=seeds, count=st.sampled_from([1, 3, 4, 8]), on_device=st.booleans())
    def verify(self, seed, count, on_device):
        rng = np.random.default_rng(seed)
        given, slots = self.choose(rng, on_device)
        x = tokens(rng, len(slots), count)
        o, draft = self.pool.verify(given, x, on_device)
        self.draft = draft, slots, x, o

    @precondition(lambda self: self.draft)
    @rule(seed=seeds, on_device=st.booleans())
    def commit(self, seed, on_device):
        draft, slots, x, o = self.draft
        accepted, counts = self.accept(np.random.default_rng(seed))
        self.pool.commit(draft, accepted, on_device)
        self.draft = None
        self.settle(slots, x, o, counts)

    @precondition(lambda self: self.draft and hasattr(self.pool, "advance") and set(self.draft[1]) <= {-1, *self.sequences})
    @rule(seed=seeds, count=st.sampled_from([1, 3, 4, 8]), on_device=st.booleans())
    def advance(self, seed, count, on_device):
        draft, slots, x, o = self.draft
        rng = np.random.default_rng(seed)
        (accepted, counts), following = self.accept(rng), tokens(rng, len(slots), count)
        later, draft = self.pool.advance(draft, accepted, following, on_device)
        self.settle(slots, x, o, counts)
        self.draft = draft, slots, following, later

    def accept(self, rng):
        """How many tokens of each row to accept, and how many of them count: none where the slot has changed hands since."""
        _, slots, x, _ = self.draft
        accepted = rng.integers(0, x["q"].shape[1] + 1, len(slots)).tolist()
        owners = [s for s in slots if s in self.sequences and self.generation(s) in self.known]
        return accepted, [n if s < 0 or s in owners else 0 for s, n in zip(slots, accepted, strict=True)]

    def generation(self, slot):
        return slot, self.pool.pool.table.generation[slot]

    @property
    def known(self):
        """(slot, generation) pairs at the time of the draft."""
        draft, slots, *_ = self.draft
        return {(s, int(g)) for s, g in zip(slots, np.asarray(draft.generation), strict=False)}

    @invariant()
    def no_slot_is_lost(self):
        assert self.pool.free_slots == CAPACITY - len(self.sequences)

    def teardown(self):
        for slot, sequence in self.sequences.items():
            sequence.check(self.pool.state(slot))


def run(open_pool, examples, steps):
    machine = type("Machine", (Serving,), {"open_pool": staticmethod(open_pool)})
    limits = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(machine, settings=limits)


def keeps_to_its_slots(pool):
    """A draft moves the slot it was made for, whatever the tensor that named it holds by now (`verify` there changes it to the next)."""
    rng = np.random.default_rng(0)
    a, b = pool.allocate(2)
    x, sequence = tokens(rng, 1, 3), Sequence()
    untouched = pool.bytes_of(b)
    for on_device in (False, True):
        o, draft = pool.verify([a], x, on_device)
        pool.commit(draft, [2], on_device)
        sequence.extend(pieces(x, 0, slice(0, 2)), o[0, :2])
    o, draft = pool.verify([a], x, on_device=True)
    later, draft = pool.advance(draft, [3], x, on_device=True)
    pool.commit(draft, [1], on_device=True)
    sequence.extend(pieces(x, 0), o[0])
    sequence.extend(pieces(x, 0, slice(0, 1)), later[0, :1])
    sequence.check(pool.state(a))
    assert all((p == q).all() for p, q in zip(untouched, pool.bytes_of(b), strict=True))


@pytest.mark.skipif(INTERPRETED, reason="is the process with TRITON_INTERPRET=1")
@pytest.mark.parametrize("v_first", [False, True])
def test_torch(v_first):
    pytest.importorskip("torch")
    keeps_to_its_slots(sequences.TorchPool(CAPACITY, "torch_native", state_v_first=v_first))
    run(lambda: sequences.TorchPool(CAPACITY, "torch_native", state_v_first=v_first), examples=25, steps=20)


@pytest.mark.skipif(INTERPRETED, reason="is the process with TRITON_INTERPRET=1")
def test_jax():
    pytest.importorskip("jax")
    run(lambda: sequences.JaxPool(CAPACITY, "xla"), examples=8, steps=20)


@pytest.mark.skipif(INTERPRETED, reason="is the process with TRITON_INTERPRET=1")
def test_pallas_in_its_interpreter():
    pytest.importorskip("jax")
    run(lambda: sequences.JaxPool(CAPACITY, "pallas_tpu"), examples=2, steps=25)


@pytest.mark.skipif(INTERPRETED, reason="is the process with TRITON_INTERPRET=1")
def test_triton_in_its_interpreter():
    pytest.importorskip("torch")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    done = fresh.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "interpreted", __file__, TRITON_INTERPRET="1")
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:]


@pytest.mark.skipif(not INTERPRETED, reason="runs in the process with TRITON_INTERPRET=1")
@pytest.mark.parametrize("v_first, pending", [(False, 0), (True, 0), (False, 3), (True, 8)])
def test_interpreted(v_first, pending):
    options = dict(state_v_first=v_first, pending=pending)
    keeps_to_its_slots(sequences.TorchPool(CAPACITY, "triton_gpu", **options))
    run(lambda: sequences.TorchPool(CAPACITY, "triton_gpu", **options), examples=2 if pending else 4, steps=20)
