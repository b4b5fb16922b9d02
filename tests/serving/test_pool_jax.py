"""The JAX pool: under jit, with wrong slots, checkpoints, bits, windows, fewer bits."""

from itertools import pairwise

import numpy as np
import pytest
from sequences import HV, OPTIONS, JaxPool, K, Sequence, TorchPool, V, pieces, tokens

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from kdakit import accuracy  # noqa: E402
from kdakit.serving.jax import StatePool, commit, decode, pages, prefill, verify  # noqa: E402
from kdakit.serving.slots import PoolFull  # noqa: E402


def rng(seed=0):
    return np.random.default_rng(seed)


def arrays(x):
    return {n: jnp.asarray(a, jnp.float32) for n, a in x.items()}


def filled():
    pool = JaxPool(5, "xla")
    held = pool.allocate(3)
    pool.prefill(held, tokens(rng(), 1, 21), [7] * 3)
    return pool, held


def test_wrong_slots():
    pool, (a, b, c) = filled()
    pool.free([c])
    before = jax.tree.map(np.array, pool.pool.contents.storage.states)
    with pytest.raises(ValueError, match="got 2, which is free"):
        pool.decode([a, c], tokens(rng(), 2, 1))
    with pytest.raises(ValueError, match="twice"):
        pool.decode([a, a], tokens(rng(), 2, 1))
    with pytest.raises(ValueError, match=r"slots must be 0 \.\. 4 or -1 \(skip\), got 5"):
        pool.decode([5], tokens(rng(), 1, 1))
    with pytest.raises(PoolFull):
        pool.allocate(9)
    o = pool.decode([b, -1, 77, c, b, a], tokens(rng(), 6, 1), on_device=True)
    assert [i for i in range(6) if o[i].any()] == [0, 5]
    after = np.array(pool.pool.contents.storage.states)
    assert [i for i in range(5) if not np.array_equal(before[i], after[i])] == [a, b]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_calls_of_nobody(dtype):
    """No rows are rows, and no tokens tokens, as in PyTorch: a server with nothing to do need not know."""
    pool = StatePool.create(3, HV, K, V, dtype=dtype)
    (a, b), pool = pool.allocate(2)
    o, pool = decode(pool, [], **arrays(tokens(rng(), 0, 1)))
    p, pool, made = prefill(pool, [], **arrays(tokens(rng(), 0, 4)))
    r, draft = verify(pool, [], **arrays(tokens(rng(), 0, 2)))
    s, pool = decode(commit(pool, draft, []), [a, b], **arrays(tokens(rng(), 2, 0)))
    assert [x.shape for x in (o, p, r, s)] == [(0, 1, HV, V), (0, 4, HV, V), (0, 2, HV, V), (2, 0, HV, V)] and made == []
    o, _ = pages.decode(jnp.zeros((5, HV, K, V)), jnp.array([[1, 2], [3, 4]]), **arrays(tokens(rng(), 2, 0)))
    assert o.shape == (2, 0, HV, V)


def test_a_draft_does_not_reach_the_next_owner():
    pool, (a, _, _) = filled()
    _, draft = pool.verify([a], tokens(rng(), 1, 4))
    pool.free([a])
    assert a in pool.allocate(pool.free_slots)
    pool.commit(draft, [4])
    assert not pool.state(a).any()


def test_a_whole_turn_under_jit():
    """Decode, verify and commit in one program; slots and accepted counts are values, not shapes."""
    pool = StatePool.create(4, HV, K, V)
    held, pool = pool.allocate(3)
    x, y = arrays(tokens(rng(1), 3, 1)), arrays(tokens(rng(2), 3, 4))

    @jax.jit
    def turn(pool, slots, accepted):
        o, pool = decode(pool, slots, **x, **OPTIONS)
        p, draft = verify(pool, slots, **y, **OPTIONS)
        return o, p, commit(pool, draft, accepted)

    sequences = {s: Sequence() for s in held}
    for slots, accepted in (([2, 0, 1], [4, 0, 2]), ([0, -1, 2], [1, 4, 3])):
        o, p, pool = turn(pool, jnp.array(slots), jnp.array(accepted))
        for n, (s, count) in enumerate(zip(slots, accepted, strict=True)):
            if s < 0:
                assert not o[n].any() and not p[n].any()
                continue
            sequences[s].extend(pieces(x, n), np.asarray(o[n]))
            if count:
                sequences[s].extend(pieces(y, n, slice(0, count)), np.asarray(p[n, :count]))
    assert turn._cache_size() == 1
    for s, sequence in sequences.items():
        sequence.check(np.asarray(pool.states([s])[0], np.float64))


@pytest.mark.parametrize("position", [0, 23])
def test_resuming_from_a_checkpoint_continues_alike(position):
    x = tokens(rng(7), 1, 40)
    pool = JaxPool(3, "xla")
    whole, again = pool.allocate(2)
    o, made = pool.prefill([whole], x, [40], [[position]])
    pool.restore([again], made[0][0])
    rest, _ = pool.prefill([again], pieces(x, span=slice(position, None)), [40 - position], [[]])
    assert np.array_equal(rest, o[:, position:]) and np.array_equal(pool.state(whole), pool.state(again))


@pytest.mark.parametrize("cuts, company", [((16,), ()), ((32,), (5, 0, 20))])
def test_deterministic_prefill(cuts, company):
    x, results = tokens(rng(9), 1, 45), []
    for own_cuts, others in (((), ()), (cuts, company)):
        pool, parts, edges = JaxPool(6, "xla"), [], [0, *own_cuts, 45]
        slots = pool.allocate(1 + len(others))
        for a, b in pairwise(edges):
            beside = tokens(rng(1), 1, sum(others))
            packed = {n: np.concatenate([x[n][:, a:b], beside[n]], 1) for n in x}
            parts.append(pool.prefill(slots, packed, [b - a, *others], deterministic=True)[0][:, : b - a])
        results.append((np.concatenate(parts, 1), pool.state(slots[0])))
    assert all(np.array_equal(p, q) for p, q in zip(*results, strict=True))


def test_windows():
    pool = StatePool.create(2, HV, K, V, windows={"x": (3, 2)})
    (a, b), pool = pool.allocate(2)
    r, seen = rng(3), np.zeros((2, 3, 2))
    line = r.normal(size=(1, 5, 2)).astype(np.float32)
    given = dict(cu_seqlens=jnp.array([0, 1, 5]), window_inputs={"x": jnp.asarray(line)})
    _, pool, _ = prefill(pool, [a, b], **arrays(tokens(r, 1, 5)), **given, **OPTIONS)
    seen = [np.concatenate([seen[0], line[0, :1]]), np.concatenate([seen[1], line[0, 1:]])]
    _, draft = verify(pool, [b], **arrays(tokens(r, 1, 3)), window_inputs={"x": jnp.asarray(line[:, :3])}, **OPTIONS)
    pool = commit(pool, draft, [2])
    _, pool = decode(pool, [a], **arrays(tokens(r, 1, 1)), window_inputs={"x": jnp.asarray(line[:, :1])}, **OPTIONS)
    seen = [np.concatenate([seen[0], line[0, :1]]), np.concatenate([seen[1], line[0, :2]])]
    for slot, want in ((a, seen[0]), (b, seen[1])):
        np.testing.assert_array_equal(pool.contents.windows["x"][slot], want[-3:].astype(np.float32))


@pytest.mark.parametrize("options", [dict(dtype="bfloat16"), dict(dtype="int8"), dict(dtype="int8", feedback=True, state_v_first=True)])
def test_fewer_bits_are_those_of_torch(options):
    """The same storage in both frameworks: after the same tokens the states agree to the storage's own step."""
    pytest.importorskip("torch")
    pools = [JaxPool(2, "xla", **options), TorchPool(2, "torch_native", **options)]
    x = tokens(rng(5), 2, 6)
    states = []
    for pool in pools:
        slots = pool.allocate(2)
        for t in range(6):
            pool.decode(slots, pieces(x, span=slice(t, t + 1)))
        states.append(np.stack([pool.state(s) for s in slots]))
    step = 1e-3 if options.get("feedback") else 0.02
    assert states[1].any() and accuracy.error(*states) < step


def test_what_is_not_finite_stays_in_its_sequence(monkeypatch):
    """Where a backend lets sequences meet in its products, here one that adds zero times everything to everything."""
    from kdakit.backends import xla

    forward = xla.forward

    def mixing(problem, arrays, config):
        found, saved = forward(problem, arrays, config)
        return type(found)(*(None if x is None else x + 0 * x.sum() for x in found)), saved

    monkeypatch.setattr(xla, "forward", mixing)
    monkeypatch.setattr(xla, "mixes", lambda problem, config: True)
    pool = JaxPool(3, "xla", sizes=(HV, K, 7))  # a size of its own: what is compiled here is nobody else's
    held, x = pool.allocate(3), tokens(rng(), 1, 9, V=7)
    x["k"][0, 4, 0, 0] = np.nan
    o, _ = pool.prefill(held, x, [3, 3, 3])
    assert np.isfinite(o[0, [0, 1, 2, 6, 7, 8]]).all() and np.isnan(o[0, 4]).all()
    assert [bool(np.isfinite(pool.state(slot)).all()) for slot in held] == [True, False, True]


def test_no_token_rounds_no_state():
    """8 bits: a sequence without tokens in a call."""
    pool = JaxPool(3, "xla", dtype="int8")
    held = pool.allocate(2)
    pool.prefill(held, tokens(rng(), 1, 12), [5, 7])
    pool.decode(held, tokens(rng(1), 2, 1))
    before = jax.tree.map(np.array, pool.snapshot(held[:1]))
    pool.prefill(held, tokens(rng(2), 1, 12), [0, 12])
    assert jax.tree.all(jax.tree.map(np.array_equal, before, jax.tree.map(np.array, pool.snapshot(held[:1]))))
