"""Pools that write states seldom: whatever asks for a state gets the one that decoding has left, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

import fresh
import numpy as np
import pytest
import sequences
from sequences import OPTIONS, Sequence, TorchPool, pieces, tokens

torch = pytest.importorskip("torch")

from kdakit import accuracy  # noqa: E402
from kdakit.serving.torch import StatePool, commit, decode, verify  # noqa: E402
from kdakit.torch import fused_recurrent_kda  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"
kernels = pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="needs a GPU, or Triton's interpreter")
SEEDS = range(300, 340) if ON_GPU else range(300, 304)


def torch_tokens(rows, count, seed=0, **sizes):
    return {n: torch.from_numpy(a).float().to(DEVICE) for n, a in tokens(np.random.default_rng(seed), rows, count, **sizes).items()}


@pytest.mark.skipif(INTERPRETED or ON_GPU, reason="the kernels run in this process")
def test_in_its_interpreter():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    done = fresh.run("-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, TRITON_INTERPRET="1")
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:]


@dataclass
class Drawn:
    """A pool."""

    H: int
    HV: int
    K: int
    V: int
    pending: int
    state_v_first: bool

    @classmethod
    def by(cls, rng):
        largest = (32, 128, 256) if ON_GPU else (40,)
        size = lambda: int(rng.integers(1, rng.choice(largest) + 1))
        H = int(rng.integers(1, 3))
        return cls(H, H * int(rng.integers(1, 3)), size(), size(), int(rng.integers(2, 9)), bool(rng.integers(2)))


@kernels
@pytest.mark.parametrize("seed", SEEDS)
def test_any_order_of_calls(seed):
    """Decodes of some rows, with some to skip, and now and then something that asks for states."""
    rng = np.random.default_rng(seed)
    d = Drawn.by(rng)
    pool = TorchPool(5, "triton_gpu", (d.HV, d.K, d.V), pending=d.pending, state_v_first=d.state_v_first, device=DEVICE)
    draw = lambda rows, count: tokens(rng, rows, count, d.H, d.HV, d.K, d.V)
    known = {slot: Sequence() for slot in pool.allocate(3)}
    for _ in range(4 * d.pending):
        given = [int(s) for s in rng.permutation([*known, -1])[: rng.integers(1, len(known) + 2)]]
        x = draw(len(given), 1)
        o = pool.decode(given, x, on_device=True)
        for n, slot in enumerate(given):
            if slot >= 0:
                known[slot].extend(pieces(x, n), o[n])
            else:
                assert not o[n].any()
        slot, what = int(rng.choice(list(known))), rng.integers(12)
        if what == 0 and pool.free_slots:
            known[pool.fork(slot)[0]] = Sequence(known[slot])
        elif what == 1:
            shelf, was = pool.snapshot([slot]), Sequence(known[slot])
            pool.decode([slot], draw(1, 1))
            pool.restore([slot], shelf)
            known[slot] = was
        elif what == 2:
            x = draw(1, 3)
            o, draft = pool.verify([slot], x)
            pool.commit(draft, [2])
            known[slot].extend(pieces(x, 0, slice(0, 2)), o[0, :2])
        elif what == 3:
            x = draw(1, 2)
            known[slot].extend(pieces(x, 0), pool.decode([slot], x)[0])
        elif what == 4:
            x = draw(1, 5)
            known[slot].extend(pieces(x, 0), pool.prefill([slot], x, [5])[0][0])
        elif what == 5 and len(known) > 1:
            known.pop(slot).check(pool.state(slot))
            pool.free([slot])
    for slot, sequence in known.items():
        sequence.check(pool.state(slot))


@kernels
def test_nobody_else_is_touched():
    """A slot whose tokens wait keeps its bits while others come and go; a new owner sees nothing of what waited for the old one."""
    pool = TorchPool(4, "triton_gpu", pending=8, device=DEVICE)
    a, b = pool.allocate(2)
    x = tokens(np.random.default_rng(0), 2, 5)
    for t in range(5):
        pool.decode([a, b], pieces(x, span=slice(t, t + 1)))
    alone = TorchPool(4, "triton_gpu", pending=8, device=DEVICE)
    (c,) = alone.allocate(1)
    for t in range(5):
        alone.decode([c], pieces(x, slice(1, 2), slice(t, t + 1)))
    pool.free([a])
    assert a in (fresh_slots := pool.allocate(3)) and not any(pool.state(slot).any() for slot in fresh_slots)
    assert np.array_equal(pool.state(b), alone.state(c))


@kernels
@pytest.mark.parametrize("change", ["restore", "reset", "free"])
def test_a_draft_of_slots_that_have_changed_since(change):
    """A draft does not count for a slot with another state by now, whose tokens wait: `advance` drafts from them, commits come after."""
    rng, found = np.random.default_rng(1), []
    x = [tokens(rng, 2, n) for n in (1, 1, 3, 3, 1)]
    for pending in (0, 4):
        pool = TorchPool(2, "triton_gpu", pending=pending, device=DEVICE)
        a, b = pool.allocate(2)
        shelf = pool.snapshot([a])
        o = [pool.decode([a, b], x[0])]
        _, draft = pool.verify([a, b], x[2])
        if change == "free":
            pool.free([a])
            assert pool.allocate(1) == [a]
        else:
            pool.restore([a], shelf) if change == "restore" else pool.pool.reset([a])
        o.append(pool.decode([a], pieces(x[1], slice(0, 1))))
        later, draft = pool.advance(draft, [3, 2], x[3])
        pool.commit(draft, [1, 3])
        o += [later, pool.decode([b, a], x[4])]
        found.append([*o, pool.state(a), pool.state(b)])
    for plain, waited in zip(*found, strict=True):
        np.testing.assert_allclose(waited, plain, rtol=1e-4, atol=1e-6)


@kernels
@pytest.mark.parametrize("stored", [dict(dtype=torch.bfloat16), dict(dtype=torch.int8), dict(dtype=torch.int8, feedback=True)])
def test_fewer_bits_round_as_seldom(stored):
    """Outputs are no further from the truth than where states are rounded at every token."""
    x = torch_tokens(1, 40, seed=5, K=32, V=32)
    truth, _ = fused_recurrent_kda(**{n: y.double().cpu() for n, y in x.items()}, **OPTIONS)
    errors = []
    for pending in (0, 8):
        pool = StatePool(1, sequences.HV, 32, 32, pending=pending, device=DEVICE, **stored)
        slots = torch.tensor(pool.allocate(1), device=DEVICE)
        each = [{n: y[:, t : t + 1] for n, y in x.items()} for t in range(40)]
        errors.append(accuracy.error(torch.cat([decode(pool, slots, **y, backend="triton_gpu", **OPTIONS) for y in each], 1).cpu(), truth))
    assert 0 < errors[1] < errors[0]


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_graphs_that_were_captured_before_anything_waited():
    """A graph of drafts settles what waits when it is replayed, not what waited when it was captured; a graph of a decode counts."""
    pools = [StatePool(4, sequences.HV, 32, 32, pending=p, device="cuda") for p in (0, 4)]
    slots, _ = (torch.tensor(pool.allocate(3), device="cuda") for pool in pools)
    given, many = torch_tokens(3, 1, seed=7, K=32, V=32), torch_tokens(3, 3, seed=8, K=32, V=32)
    accepted, found = torch.tensor([1, 3, 0], device="cuda"), []

    def drafted(pool):
        o, draft = verify(pool, slots, **many, **OPTIONS)
        commit(pool, draft, accepted)
        return o

    for pool in pools:
        graphs = []
        for call in (drafted, lambda pool: decode(pool, slots, **given, **OPTIONS)):
            call(pool)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = call(pool)
            graphs.append((graph, out))
        pool.reset(slots.tolist())
        for turn in range(11):
            graph, out = graphs[0 if turn % 5 == 3 else 1]
            graph.replay()
            found.append(out.clone())
        found.append(pool.states(slots.tolist()))
    half = len(found) // 2
    for plain, waited in zip(found[:half], found[half:], strict=True):
        assert plain.any() and accuracy.error(waited.cpu(), plain.cpu()) < 1e-5


@pytest.mark.skipif(INTERPRETED, reason="is the process with TRITON_INTERPRET=1")
def test_elsewhere_states_are_written_at_once():
    """With any other backend a pool is what it is without."""
    x = torch_tokens(2, 9, seed=3)
    found = []
    for pending in (0, 8):
        pool = StatePool(3, sequences.HV, sequences.K, sequences.V, pending=pending)
        slots = pool.allocate(2)
        o = [decode(pool, slots, **{n: y[:, t : t + 1].cpu() for n, y in x.items()}, **OPTIONS) for t in range(9)]
        found.append([torch.cat(o, 1), pool.states(slots), pool.storage.states])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_misuse_is_named():
    for pending in (1, 9, -1, 2.5, True):
        with pytest.raises(ValueError, match="pending must be 0"):
            StatePool(2, 1, 4, 4, pending=pending)
    with pytest.raises(TypeError, match="kept in float32, got a pool of float64"):
        StatePool(2, 1, 4, 4, dtype=torch.float64, pending=8)
    plain, waits = (StatePool(2, 2, 8, 4, pending=p).bytes_per_slot() for p in (0, 8))
    assert waits - plain == 2 * 7 * (2 * 8 + 4) * 4 + 2 * 4
