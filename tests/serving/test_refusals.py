"""A serving call that is refused has changed nothing: every call with every wrong argument, every tensor and every slot as it was."""

import threading
import time

import numpy as np
import pytest
from sequences import HV, OPTIONS, K, V, tokens

from kdakit.serving.slots import GENERATIONS, PoolFull, SlotTable

CALLS = ("decode", "verify", "prefill", "advance")
WINDOW = (3, 2)


def wrong_arguments(array, integers):
    """{what: a change of the arguments of a good call}. array(x) makes a tensor, integers(x) one of integers."""

    def other(name, change):
        return lambda given: given | {name: change(given[name])}

    changes = {f"{n} of another {what}": other(n, change) for n in ("q", "k", "v", "g", "beta") for what, change in {
        "length": lambda x: x[:, :-1], "number of rows": lambda x: x[:-1], "width": lambda x: x[..., :-1], "kind": lambda x: x > 0,
        "rank": lambda x: x[0], "type": lambda x: None,
    }.items()}  # fmt: skip
    changes |= {
        "free slot": lambda given: given | {"slots": [0, 3]}, "slot twice": lambda given: given | {"slots": [0, 0]},
        "slot out of range": lambda given: given | {"slots": [0, 99]}, "slot of a wrong type": lambda given: given | {"slots": [0, 1.5]},
        "too few slots": lambda given: given | {"slots": [0]}, "too many slots": lambda given: given | {"slots": [0, 1, 2]},
        "slots of floats": lambda given: given | {"slots": array(np.zeros(2))},
        "unknown option": lambda given: given | {"lowerbound": -1.0}, "scale that is no number": lambda given: given | {"scale": "x"},
        "unknown backend": lambda given: given | {"backend": "nobody"},
        "A_log too long": lambda given: given | {"A_log": array(np.zeros(99))},
        "dt_bias of integers": lambda given: given | {"dt_bias": integers(np.zeros(HV * K))},
    }  # fmt: skip
    return changes


def wrong_windows(array, integers):
    def other(change):
        return lambda given: given | {"window_inputs": {"x": change(given["window_inputs"]["x"])}}

    return {
        "window of another name": lambda given: given | {"window_inputs": {"y": given["window_inputs"]["x"]}},
        "window inputs of another length": other(lambda x: x[:, :-1]),
        "window inputs with a token more": other(lambda x: array(np.ones((2, 4, 2)))),
        "window inputs of another width": other(lambda x: x[..., :1]), "window inputs of fewer rows": other(lambda x: x[:-1]),
        "window inputs of integers": other(integers), "window inputs of another rank": other(lambda x: x[0]),
        "window inputs that are no mapping": lambda given: given | {"window_inputs": 3},
        "window inputs that are nothing": other(lambda x: None),
    }  # fmt: skip


def wrong_prefills(array, integers):
    return {
        "checkpoints beyond the end": lambda given: given | {"checkpoints": [[1], [9]]},
        "checkpoints of one sequence": lambda given: given | {"checkpoints": [[1]]},
        "checkpoints in no order": lambda given: given | {"checkpoints": [[2, 1], []]},
        "checkpoints that are no numbers": lambda given: given | {"checkpoints": [["x"], []]},
        "checkpoints and a window of another length": lambda given: given | {
            "checkpoints": [[1], [2]], "window_inputs": {"x": given["window_inputs"]["x"][:, :-1]}},
        "checkpoints and an unknown backend": lambda given: given | {"checkpoints": [[1], [2]], "backend": "nobody"},
        "edges of floats": lambda given: given | {"cu_seqlens": array(np.array([0.0, 2, 4]))},
        "rows and edges": lambda given: given | {"cu_seqlens": integers(np.array([0, 1, 3]))},
        "chunk size": lambda given: given | {"chunk_size": 17},
    }  # fmt: skip


def good(array, count, windows):
    x = {n: array(a) for n, a in tokens(np.random.default_rng(1), 2, count).items()}
    return dict(slots=[0, 1]) | x | ({"window_inputs": {"x": array(np.ones((2, count, WINDOW[1])))}} if windows else {}) | OPTIONS


class Torch:
    def __init__(self, windows):
        torch = pytest.importorskip("torch")
        from kdakit.serving import torch as serving

        self.serving, self.array = serving, lambda a: torch.from_numpy(np.asarray(a)).float()
        self.integers = lambda a: torch.as_tensor(np.asarray(a)).to(torch.int32)
        self.pool = serving.StatePool(4, HV, K, V, windows={"x": WINDOW} if windows else None)
        self.pool.allocate(3)
        serving.prefill(self.pool, [0, 1], **{n: x for n, x in good(self.array, 3, windows).items() if n != "slots"})

    def kept(self):
        table = self.pool.table
        return [x.clone().numpy() for x in (*self.pool.tensors(), self.pool.generation)] + [list(table.generation), list(table._free)]

    def call(self, name, given):
        if name == "advance":
            given = dict(given)
            given.pop("slots")
            return self.serving.advance(self.pool, self.draft, [1, 1], **given)
        return getattr(self.serving, name)(self.pool, **given)


class Jax(Torch):
    def __init__(self, windows):
        jnp = pytest.importorskip("jax.numpy")
        from kdakit.serving import jax as serving

        self.serving, self.array = serving, lambda a: jnp.asarray(np.asarray(a), jnp.float32)
        self.integers = lambda a: jnp.asarray(np.asarray(a)).astype(jnp.int32)
        pool = serving.StatePool.create(4, HV, K, V, windows={"x": WINDOW} if windows else None)
        _, pool = pool.allocate(3)
        given = good(self.array, 1, windows)
        _, self.pool = serving.decode(pool, **given)

    def kept(self):
        import jax

        table = self.pool.table
        return [np.array(x) for x in jax.tree.leaves(self.pool.contents)] + [list(table.generation), list(table._free)]


def same(before, after):
    return all(np.array_equal(p, q) for p, q in zip(before, after, strict=True))


def refuses(side, name, given, what):
    before = side.kept()
    with pytest.raises((TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError)) as refusal:
        side.call(name, given)
    assert same(before, side.kept()), f"{name}, {what}: refused ({refusal.value}), and changed"


@pytest.mark.parametrize("framework, name", [(Torch, name) for name in CALLS] + [(Jax, name) for name in CALLS if name != "advance"])
def test_a_refused_call_changes_nothing(framework, name):
    side = framework(windows=name != "advance")
    array, integers = side.array, side.integers
    changes = wrong_arguments(array, integers) | (wrong_windows(array, integers) if name != "advance" else {})
    changes |= wrong_prefills(array, integers) if name == "prefill" else {}
    if name == "advance":
        _, side.draft = side.serving.verify(side.pool, **good(array, 3, False))
        changes = {what: change for what, change in changes.items() if "slot" not in what}
    given = good(array, 3, name != "advance")
    for what, change in changes.items():
        refuses(side, name, change(given), what)
    if name in ("verify", "advance"):
        refuses(side, name, good(array, 9, name == "verify"), "nine drafts")
    before = side.kept()
    side_after = side.call(name, given)  # as given it is taken, the draft too
    if framework is Torch:
        assert same(before, side.kept()) == (name == "verify")
    assert side_after is not None


@pytest.mark.parametrize("framework", [Torch, Jax])
def test_refused_commits_and_slots_change_nothing(framework):
    side = framework(windows=True)
    pool, commit = side.pool, side.serving.commit
    _, draft = side.serving.verify(pool, **good(side.array, 3, True))
    other = framework(windows=False).pool
    snapshot, foreign = pool.snapshot([0]), other.snapshot([0])
    refused = {
        "too many accepted": lambda: commit(pool, draft, [1, 4]), "fewer than none": lambda: commit(pool, draft, [1, -1]),
        "one row": lambda: commit(pool, draft, [1]), "halves": lambda: commit(pool, draft, [1, 0.5]),
        "floats": lambda: commit(pool, draft, side.array(np.ones(2))), "no draft": lambda: commit(pool, "draft", [1, 1]),
        "allocate too many": lambda: pool.allocate(2), "allocate a part": lambda: pool.allocate(0.5),
        "allocate fewer than none": lambda: pool.allocate(-1), "free twice": lambda: pool.free([0, 0]),
        "free a free one": lambda: pool.free([0, 3]),
        "free nobody": lambda: pool.free([0, 4]), "fork a free one": lambda: pool.fork(3), "fork too often": lambda: pool.fork(0, 2),
        "reset a free one": lambda: pool.reset([0, 3]), "restore a free one": lambda: pool.restore([3], snapshot),
        "restore two from one": lambda: pool.restore([0, 1], snapshot), "restore another pool's": lambda: pool.restore([0], foreign),
        "restore nothing": lambda: pool.restore([0], None), "states of a free one": lambda: pool.states([3]),
    }  # fmt: skip
    for what, call in refused.items():
        before = side.kept()
        with pytest.raises((TypeError, ValueError, PoolFull)):
            call()
        assert same(before, side.kept()), what
    side.serving.commit(pool, draft, [1, 2])


def test_a_pool_that_is_used_up_takes_no_slot():
    """In JAX the pool of before a call is gone: what is asked of it fails, and the table that all pools share is as it was."""
    side = Jax(windows=False)
    old, given = side.pool, good(side.array, 1, False)
    _, pool = side.serving.decode(side.pool, **given)
    old.contents.storage.states.delete()  # as the donation does where the device can
    table = (list(pool.table.generation), list(pool.table._free))
    for call in (lambda: old.allocate(1), lambda: old.fork(0), lambda: old.reset([0]),
                 lambda: old.restore([0], pool.snapshot([1]))):  # fmt: skip
        with pytest.raises((RuntimeError, ValueError), match="deleted"):
            call()
        assert (list(pool.table.generation), list(pool.table._free)) == table


def test_served_models_refuse_before_anything_moves():
    torch = pytest.importorskip("torch")
    from faults import small_model

    from kdakit.serving.torch.model import ServedModel

    served = ServedModel(small_model(), 3)
    a, b = served.allocate(), served.allocate()
    _, (kept, _) = served.prefill([a, b], [[1, 2, 3], [4]], [[2], []])
    _, drafts = served.verify([a, b], [[1, 2], [3, 4]])
    assert served.pools[1].table is served.pools[0].table and served.pools[1].generation is served.pools[0].generation
    calls = {
        "a float": lambda: served.decode([a, b], [1.0, 2]), "negative": lambda: served.decode([a, b], [1, -1]),
        "too large": lambda: served.decode([a, b], [1, 40]), "too few": lambda: served.decode([a, b], [1]),
        "too many": lambda: served.decode([a, b], [1, 2, 3]), "free": lambda: served.decode([a, 2], [1, 2]),
        "nothing to read": lambda: served.prefill([a, b], [[1], []], [[], []]), "one list": lambda: served.prefill([a, b], [[1]], [[]]),
        "one checkpoint": lambda: served.prefill([a, b], [[1], [2]], [[1]]), "far": lambda: served.prefill([a, b], [[1], [2]], [[1], [2]]),
        "ragged": lambda: served.verify([a, b], [[1], [2, 3]]), "nine": lambda: served.verify([a, b], [[1] * 9, [2] * 9]),
        "a layer less": lambda: served.commit(drafts[:1], [1, 1]), "layers in a wrong order": lambda: served.commit(drafts[::-1], [1, 1]),
        "the second not its own": lambda: served.commit([drafts[0], drafts[0]], [1, 1]), "three": lambda: served.commit(drafts, [1, 3]),
        "nobody": lambda: served.prefill([], [], []), "drafts of nobody": lambda: served.verify([], []),
        "half a snapshot": lambda: served.restore(a, kept[0][:1]), "none": lambda: served.restore(a, [kept[0][0], None]),
        "not taken": lambda: served.reset(2), "nor freed": lambda: served.free(2),
    }  # fmt: skip

    def state():
        return [x.clone() for pool in served.pools for x in (*pool.tensors(), pool.generation)]

    for what, call in calls.items():
        before = state()
        with pytest.raises((TypeError, ValueError)):
            call()
        assert all(torch.equal(p, q) for p, q in zip(before, state(), strict=True)), what
    served.commit(drafts, [1, 2])
    served.restore(b, kept[0])
    assert served.free_slots == 1 and served.next_slot == 2
    assert served.next_tokens([], []) == []


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint64])
def test_tokens_may_be_any_integers(kind):
    """As files of tokens have them."""
    pytest.importorskip("torch")
    from faults import small_model

    from kdakit.serving.torch.model import ServedModel

    def answers(kind):
        served = ServedModel(small_model(), 1)
        slot, tokens = served.allocate(), np.array([3, 1, 4], kind)
        found = [served.prefill([slot], [tokens], [[]])[0], served.decode([slot], tokens[:1]), served.verify([slot], [tokens])[0]]
        return [x.tolist() for x in found]

    assert answers(kind) == answers(np.int64)


def test_slots_are_reused_first_in_first_out():
    table = SlotTable(4)
    assert table.take(3) == [0, 1, 2]
    table.release([1])
    table.release([0, 2])
    assert table.following(2) == table.take(2) == [3, 1] and table.take(2) == [0, 2]


@pytest.mark.parametrize("framework", [Torch, Jax])
def test_a_slot_lives_on_after_two_thousand_million_owners(framework):
    """Generations begin again at the end of 32 bits: taken stays taken, an old draft still does not count."""
    side = framework(windows=False)
    side.pool.table.generation[:] = [GENERATIONS - 1] * 3 + [GENERATIONS - 2]
    for call, *given in (("restore", [0], side.pool.snapshot([0])), ("free", [1]), ("reset", [2])):
        made = getattr(side.pool, call)(*given)
        side.pool = made if made is not None else side.pool
    made = side.pool.allocate(2)
    slots, side.pool = (made, side.pool) if framework is Torch else made
    assert slots == [3, 1] and side.pool.table.generation == [1, 1, 1, GENERATIONS - 1]
    on_device = side.pool.generation if framework is Torch else side.pool.contents.generation
    assert on_device.tolist()[:4] == side.pool.table.generation
    _, draft = side.serving.verify(side.pool, **good(side.array, 3, False))
    made = side.serving.commit(side.pool, draft, [3, 3])
    states = (side.pool if made is None else made).states([0, 1])
    assert states[0].any() and states[1].any()


def test_slots_change_one_after_the_other_whatever_threads_ask(monkeypatch):
    """Between looking for a free slot and taking it, and between looking whether one is taken and freeing it, nobody else does."""
    pytest.importorskip("torch")
    from kdakit.serving.torch import StatePool

    pool, publish = StatePool(slots=4, HV=1, K=2, V=2), StatePool.publish
    monkeypatch.setattr(StatePool, "publish", lambda *args: (time.sleep(0.02), publish(*args))[1])

    def together(call):
        found, meeting = [], threading.Barrier(3)

        def work():
            meeting.wait()
            try:
                found.append(call())
            except ValueError as problem:
                found.append(problem)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pool.generation[:4].tolist() == pool.table.generation, "the device knows other owners than the host"
        return found

    assert sorted(together(lambda: pool.allocate(1)[0])) == [0, 1, 2]
    refused = [x for x in together(lambda: pool.free([1])) if x is not None]
    assert len(refused) == 2 and all("which is free" in str(x) for x in refused) and pool.table.free == 2
