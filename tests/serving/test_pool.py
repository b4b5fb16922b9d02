"""The PyTorch pool: misuse, windows, drafts, checkpoints, storage in fewer bits."""

from itertools import pairwise

import numpy as np
import pytest
from sequences import HV, OPTIONS, K, Sequence, TorchPool, V, pieces, tokens

torch = pytest.importorskip("torch")

from kdakit import accuracy  # noqa: E402
from kdakit.cases import FUSED, GATES  # noqa: E402
from kdakit.rounding import UNIT_ROUNDOFF, round_to  # noqa: E402
from kdakit.serving.torch import PoolFull, StatePool, advance, commit, decode, prefill, verify  # noqa: E402
from kdakit.torch import chunk_kda, fused_recurrent_kda  # noqa: E402


def rng(seed=0):
    return np.random.default_rng(seed)


def filled(slots=5, taken=3, **options):
    """A pool with sequences in its first slots."""
    pool = TorchPool(slots, "torch_native", **options)
    held = pool.allocate(taken)
    pool.prefill(held, tokens(rng(), 1, 7 * taken), [7] * taken)
    return pool, held


def torch_tokens(rows, count, seed=0):
    return {n: torch.from_numpy(a).float() for n, a in tokens(rng(seed), rows, count).items()}


MISUSE = {
    "freed": (lambda a, b: [a, 2], r"slots must be allocated, got 2, which is free"),
    "never allocated": (lambda a, b: [a, 4], r"slots must be allocated, got 4"),
    "negative": (lambda a, b: [a, -2], r"slots must be 0 \.\. 4 or -1 \(skip\), got -2"),
    "out of range": (lambda a, b: [a, 5], r"slots must be 0 \.\. 4 or -1 \(skip\), got 5"),
    "twice": (lambda a, b: [b, b], r"different from each other, got 1 twice"),
}


@pytest.mark.parametrize("call", ["decode", "verify", "prefill"])
@pytest.mark.parametrize("kind", MISUSE)
def test_wrong_slots_on_the_host_are_refused(kind, call):
    pool, (a, b, c) = filled()
    pool.free([c])
    slots, message = MISUSE[kind]
    before = [x.clone() for x in pool.pool.tensors()]
    x = tokens(rng(1), 2, 2) if call != "prefill" else tokens(rng(1), 1, 4)
    with pytest.raises(ValueError, match=message):
        pool.prefill(slots(a, b), x, [2, 2]) if call == "prefill" else getattr(pool, call)(slots(a, b), x)
    assert all(torch.equal(p, q) for p, q in zip(before, pool.pool.tensors(), strict=True))


@pytest.mark.parametrize("call", ["decode", "verify", "prefill"])
def test_wrong_slots_on_the_device_are_skipped(call):
    """Their output is zero, no stored byte but those of the other rows changes, and the others get what they get alone."""
    pool, (a, b, c) = filled()
    pool.free([c])
    slots = [b, -1, 77, c, b, a, -5, 4]
    good, x = [0, 5], tokens(rng(1), 8, 1)
    before = [pool.bytes_of(s) for s in range(5)]
    alone, _ = filled()
    want = alone.decode([b, a], pieces(x, good))
    if call == "decode":
        o = pool.decode(slots, x, on_device=True)
    elif call == "verify":
        o, draft = pool.verify(slots, x, on_device=True)
        pool.commit(draft, [1] * 8, on_device=True)
    else:
        o = pool.prefill(slots, {n: y.swapaxes(0, 1) for n, y in x.items()}, [1] * 8, on_device=True)[0].swapaxes(0, 1)
    np.testing.assert_allclose(o[good], want, rtol=1e-5, atol=1e-7)
    assert not np.delete(o, good, 0).any()
    for slot in (c, 3, 4):
        assert all(torch.equal(p, q) for p, q in zip(before[slot], pool.bytes_of(slot), strict=True))
    for slot in (a, b):
        np.testing.assert_allclose(pool.state(slot), alone.state(slot), rtol=1e-5, atol=1e-7)


def test_checks_can_be_switched_on_for_tensors(monkeypatch):
    pool, (a, _, _) = filled()
    monkeypatch.setenv("KDAKIT_CHECKS", "1")
    with pytest.raises(ValueError, match="twice"):
        pool.decode([a, a], tokens(rng(), 2, 1), on_device=True)


def test_other_misuse_is_named():
    pool, (a, b, c) = filled()
    with pytest.raises(PoolFull, match=r"3 slots asked for, 2 of 5 free"):
        pool.allocate(3)
    with pytest.raises(ValueError, match="which is free"):
        pool.free([3])
    pool.free([b])
    with pytest.raises(ValueError, match="which is free"):
        pool.free([b])
    with pytest.raises(ValueError, match=r"slots must be 0 \.\. 4, got -1"):
        pool.snapshot([-1])
    with pytest.raises(ValueError, match="one slot for each of the 2 sequences, got 1"):
        pool.decode([a], tokens(rng(), 2, 1))
    with pytest.raises(ValueError, match="K must be the pool's 8, got 9"):
        pool.decode([a], tokens(rng(), 1, 1, K=9))
    with pytest.raises(TypeError, match="did you mean 'lower_bound'"):
        pool.decode([a], tokens(rng(), 1, 1), lowerbound=-5.0)
    with pytest.raises(ValueError, match=r"1 \.\. 8 draft tokens a row, got 9"):
        pool.verify([a], tokens(rng(), 1, 9))
    _, draft = pool.verify([a, c], tokens(rng(), 2, 3))
    with pytest.raises(ValueError, match=r"accepted must be 0 \.\. 3, the number of drafts, got 4"):
        pool.commit(draft, [1, 4])
    with pytest.raises(ValueError, match="one number for each of the 2 rows, got 1"):
        pool.commit(draft, [1])
    with pytest.raises(ValueError, match="on the pool's device cpu, got meta"):
        commit(pool.pool, draft, torch.zeros(2, dtype=torch.int64, device="meta"))
    with pytest.raises(ValueError, match="draft must have been made of the same pool"):
        filled()[0].commit(draft, [1, 0])
    pool.commit(draft, [1, 0])
    with pytest.raises(ValueError, match="committed before"):
        pool.commit(draft, [1, 0])
    with pytest.raises(ValueError, match="snapshot must hold 2 rows"):
        pool.restore([a, c], pool.snapshot([a]))
    with pytest.raises(ValueError, match=r"checkpoints\[0\] must be positions 0 \.\. 4, got 5"):
        pool.prefill([a], tokens(rng(), 1, 4), [4], [[5]])
    with pytest.raises(TypeError, match="float64 exactly where the pool is"):
        decode(pool.pool, [a], **{n: y.double() for n, y in torch_tokens(1, 1).items()})
    with pytest.raises(TypeError, match=r"\[N\] int32 or int64"):
        decode(pool.pool, torch.zeros(1), **torch_tokens(1, 1))
    for bad, message in (
        (dict(slots=0), "slots"),
        (dict(HV=0), "HV"),
        (dict(dtype=torch.int16), "dtype"),
        (dict(feedback=True), "feedback"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            StatePool(**(dict(slots=2, HV=1, K=4, V=4) | bad))


def test_a_draft_does_not_reach_the_next_owner():
    pool, (a, _, _) = filled()
    _, draft = pool.verify([a], tokens(rng(), 1, 4))
    pool.free([a])
    assert a in pool.allocate(pool.free_slots)
    pool.commit(draft, [4])
    assert not pool.state(a).any()


@pytest.mark.parametrize("accepted", range(9))
def test_drafts_leave_what_decoding_leaves(accepted):
    """Bit for bit, outputs and states: the same products in the same order."""
    pool, held = filled()
    other, _ = filled()
    x = tokens(rng(3), 3, 8)
    o, draft = pool.verify(held, x)
    pool.commit(draft, [accepted, 8 - accepted, 0])
    for n, count in enumerate((accepted, 8 - accepted, 0)):
        for t in range(count):
            one = other.decode([held[n]], pieces(x, slice(n, n + 1), slice(t, t + 1)))
            assert np.array_equal(one[0, 0], o[n, t])
        assert np.array_equal(pool.state(held[n]), other.state(held[n]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_advance_is_commit_and_verify(dtype):
    pools = [StatePool(3, HV, K, V, dtype=dtype) for _ in range(2)]
    for pool in pools:
        slots = torch.tensor([*pool.allocate(2), -1])
    drafts = [verify(pool, slots, **torch_tokens(3, 4), **OPTIONS)[1] for pool in pools]
    for turn in range(4):
        accepted, x = torch.tensor([turn, 4 - turn, 4]), torch_tokens(3, 4, seed=turn)
        o, drafts[0] = advance(pools[0], drafts[0], accepted, **x, **OPTIONS)
        commit(pools[1], drafts[1], accepted)
        want, drafts[1] = verify(pools[1], slots, **x, **OPTIONS)
        assert torch.equal(o, want) and o[:2].any() and not o[2].any()
    assert torch.equal(pools[0].storage.states, pools[1].storage.states)
    with pytest.raises(ValueError, match="through commit and verify"):
        advance(pools[0], drafts[0], accepted, **x, window_inputs={"q": x["q"]}, **OPTIONS)


def test_everything_in_the_kernel():
    """Gates, norms and betas computed inside, grouped heads, bfloat16: prefill, decode and drafts agree with one call over all."""
    H, HV, K, V, T = 2, 4, 16, 12, 30
    r = torch.Generator().manual_seed(0)
    normal = lambda *size: torch.randn(*size, generator=r).bfloat16()
    x = dict(q=normal(2, T, H, K), k=normal(2, T, H, K), v=normal(2, T, HV, V), g=normal(2, T, HV, K), beta=normal(2, T, HV))
    parameters = dict(A_log=torch.rand(HV, generator=r), dt_bias=torch.randn(HV * K, generator=r))
    want, state = fused_recurrent_kda(**x, **parameters, output_final_state=True, **FUSED)
    pool = StatePool(2, HV, K, V)
    slots = pool.allocate(2)
    cut = lambda a, b: {n: y[:, a:b] for n, y in x.items()} | parameters
    parts = [prefill(pool, slots, **cut(0, 20), **FUSED)[0], decode(pool, slots, **cut(20, 22), **FUSED)]
    o, draft = verify(pool, slots, **cut(22, 30), **FUSED)
    commit(pool, draft, [8, 8])
    np.testing.assert_allclose(torch.cat([*parts, o], 1).float(), want.float(), atol=2e-3)
    assert accuracy.error(pool.states(slots), state) < 1e-6


def test_windows_move_with_their_sequences():
    """After any prefill, decode and commit a window holds the last inputs of its own sequence."""
    r = rng(5)
    pool = StatePool(4, HV, K, V, windows={"q": (3, 2), "v": (1, 4)})
    slots = pool.allocate(3)
    seen = {s: {"q": [np.zeros((3, 2))], "v": [np.zeros((1, 4))]} for s in slots}

    def inputs(rows, count):
        return {"q": r.normal(size=(rows, count, 2)), "v": r.normal(size=(rows, count, 4))}

    def tensors(x):
        return {n: torch.from_numpy(a).float() for n, a in x.items()}

    for turn in range(6):
        lengths = [int(n) for n in r.choice([0, 1, 2, 9], 3)]
        x = inputs(1, sum(lengths))
        given = tensors(tokens(r, 1, sum(lengths)))
        cu = torch.tensor(np.cumsum([0, *lengths]))
        wanted = [[n // 2] for n in lengths] if turn % 2 else None
        prefill(pool, slots, **given, cu_seqlens=cu, window_inputs=tensors(x), checkpoints=wanted)
        for n, s in enumerate(slots):
            for name in x:
                seen[s][name].append(x[name][0, cu[n] : cu[n + 1]])
        x = inputs(3, 1)
        decode(pool, [slots[0], -1, slots[2]], **tensors(tokens(r, 3, 1)), window_inputs=tensors(x))
        x2 = inputs(2, 5)
        _, draft = verify(pool, slots[1:], **tensors(tokens(r, 2, 5)), window_inputs=tensors(x2))
        commit(pool, draft, [turn % 6, 2])
        for name in x:
            seen[slots[0]][name].append(x[name][0])
            seen[slots[2]][name].append(x[name][2])
            seen[slots[1]][name].append(x2[name][0, : turn % 6])
            seen[slots[2]][name].append(x2[name][1, :2])
        for s in slots:
            for name, keep in (("q", 3), ("v", 1)):
                np.testing.assert_allclose(pool.windows[name][s], np.concatenate(seen[s][name])[-keep:], rtol=1e-6)


@pytest.mark.parametrize("position", [0, 1, 15, 16, 17, 32, 40])
def test_resuming_from_a_checkpoint_continues_alike(position):
    x = tokens(rng(7), 1, 40)
    pool = TorchPool(3, "torch_native")
    whole, again = pool.allocate(2)
    o, made = pool.prefill([whole], x, [40], [[position]])
    pool.restore([again], made[0][0])
    rest, _ = pool.prefill([again], pieces(x, span=slice(position, None)), [40 - position])
    assert np.array_equal(rest, o[:, position:]), "the continuation of a checkpoint is the one that was"
    assert np.array_equal(pool.state(whole), pool.state(again))
    sequence = Sequence()
    sequence.extend(pieces(x, 0), o[0])
    sequence.check(pool.state(whole))


def run_cut(x, cuts, company=(), deterministic=True):
    """Outputs and state of one sequence, prefilled in slices beside others."""
    pool = TorchPool(12, "torch_native")
    slots, parts, edges = pool.allocate(1 + len(company)), [], [0, *cuts, x["q"].shape[1]]
    for a, b in pairwise(edges):
        others = [tokens(rng(50 + i), 1, n) for i, n in enumerate(company)]
        packed = {n: np.concatenate([x[n][:, a:b], *(y[n] for y in others)], 1) for n in x}
        o, _ = pool.prefill(slots, packed, [b - a, *company], deterministic=deterministic)
        parts.append(o[:, : b - a])
    return np.concatenate(parts, 1), pool.state(slots[0])


@pytest.mark.parametrize("T", [3, 64, 77])
@pytest.mark.parametrize("cuts, company", [((16,), ()), ((32, 48), ()), ((), (1,)), ((), (200, 3, 16)), ((16,), (5, 0, 40, 1))])
def test_deterministic_prefill(T, cuts, company):
    """Cut at chunk multiples (here 16) or accompanied by others: the same bits."""
    x = tokens(rng(9), 1, T)
    o, state = run_cut(x, ())
    got, after = run_cut(x, [c for c in cuts if c < T], company)
    assert np.array_equal(o, got) and np.array_equal(state, after)


def test_cut_elsewhere_is_within_the_rule():
    x = tokens(rng(9), 1, 77)
    for cuts in ((5,), (17, 31, 33), range(1, 77, 7)):
        o, state = run_cut(x, cuts)
        sequence = Sequence()
        sequence.extend(pieces(x, 0), o[0])
        sequence.check(state)


def test_decoding_does_not_depend_on_the_batch():
    x = tokens(rng(11), 3, 4)
    pool, held = filled()
    other, _ = filled()
    together = np.concatenate([pool.decode(held, pieces(x, span=slice(t, t + 1))) for t in range(4)], 1)
    for n in (2, 0, 1):
        alone = np.concatenate([other.decode([held[n]], pieces(x, slice(n, n + 1), slice(t, t + 1))) for t in range(4)], 1)
        assert np.array_equal(alone[0], together[n])


def test_mixed_prefill_and_decode_rows():
    """Sequences of one token beside prompts, in one packed call."""
    pool, held = filled()
    lengths, x = [1, 30, 1], tokens(rng(13), 1, 32)
    want, _ = filled()
    o, _ = pool.prefill(held, x, lengths)
    for n, span in enumerate((slice(0, 1), slice(1, 31), slice(31, 32))):
        one = want.prefill([held[n]], pieces(x, span=span), [lengths[n]])[0]
        np.testing.assert_allclose(o[:, span], one, rtol=2e-5, atol=1e-6)


def stored_error(x, **options):
    """Relative error of the outputs of a pool that decodes one sequence token by token."""
    pool = StatePool(1, HV, K, V, **options)
    slots, truth = pool.allocate(1), TorchTruth(x)
    o = torch.cat([decode(pool, slots, **{n: y[:, t : t + 1] for n, y in x.items()}, **OPTIONS) for t in range(x["q"].shape[1])], 1)
    return accuracy.error(o, truth.o)


class TorchTruth:
    def __init__(self, x):
        self.o, _ = fused_recurrent_kda(**{n: y.double() for n, y in x.items()}, **OPTIONS)


@pytest.mark.parametrize("gate", ["slow", "mild"])
def test_fewer_bits(gate):
    """Each storage is as wrong as its step is coarse, and they come in the right order."""
    r = rng(15)
    x = {n: torch.from_numpy(a).float() for n, a in tokens(r, 1, 400).items()}
    x["g"] = torch.from_numpy(round_to(GATES[gate](r, x["g"].shape), "float32")).float()
    errors = {
        "float32": stored_error(x), "feedback": stored_error(x, dtype=torch.int8, feedback=True),
        "bfloat16": stored_error(x, dtype=torch.bfloat16), "int8": stored_error(x, dtype=torch.int8),
    }  # fmt: skip
    assert errors["float32"] < 20 * UNIT_ROUNDOFF["float32"] < errors["feedback"] < errors["bfloat16"] / 4 < errors["bfloat16"]
    assert errors["bfloat16"] < 8 * UNIT_ROUNDOFF["bfloat16"] and errors["feedback"] < 1e-3 and errors["int8"] < 0.08


def test_slow_decay_is_not_forgotten_in_8_bits():
    """2,000 decays of 5e-4 leave e^-1, although each is far below half a step: they go into the scales."""
    pool = StatePool(1, 1, 4, 4, dtype=torch.int8)
    slots = pool.allocate(1)
    one = {"q": torch.zeros(1, 1, 1, 4), "k": torch.eye(4)[:1].view(1, 1, 1, 4), "v": torch.ones(1, 1, 1, 4), "beta": torch.ones(1, 1, 1)}
    decode(pool, slots, **one, g=torch.zeros(1, 1, 1, 4))
    idle = one | {"beta": torch.zeros(1, 1, 1)}
    for _ in range(100):
        decode(pool, slots, **{n: y.expand(1, 20, *y.shape[2:]) for n, y in idle.items()}, g=torch.full((1, 20, 1, 4), -5e-4))
    assert abs(float(pool.states(slots)[0, 0, 0, 0]) - np.exp(-1)) < 1e-3


def test_sizes_are_what_they_say():
    for options, element in (
        (dict(), 4),
        (dict(dtype=torch.bfloat16), 2),
        (dict(dtype=torch.int8), 1),
        (dict(dtype=torch.int8, feedback=True), 2),
    ):
        pool = StatePool(2, 2, 64, 64, **options)
        scales = 2 * 64 * 2 * 4 if pool.sizes.dtype == "int8" else 0
        assert pool.bytes_per_slot() == pool.sizes.bytes() == 2 * 64 * 64 * element + scales
        assert pool.snapshot(pool.allocate(2)).bytes() == 2 * pool.bytes_per_slot()


def test_prefill_is_chunk_kda():
    x = torch_tokens(2, 50)
    pool = StatePool(2, HV, K, V, state_v_first=True)
    o, _ = prefill(pool, pool.allocate(2), **x, **OPTIONS)
    want, state = chunk_kda(**x, output_final_state=True, **OPTIONS)
    assert torch.equal(o, want) and torch.equal(pool.states([0, 1]), state)


def test_prefill_of_rows_gives_rows():
    """Whichever way they are run, packed or not, and where there are none."""
    x = torch_tokens(2, 9)
    for more in (dict(), dict(deterministic=True), dict(checkpoints=[[4], []]), dict(checkpoints=[[4], []], deterministic=True)):
        pool = StatePool(2, HV, K, V)
        o, _ = prefill(pool, pool.allocate(2), **x, chunk_size=16, **more, **OPTIONS)
        assert o.shape == x["v"].shape, more
        assert accuracy.error(o, chunk_kda(**x, **OPTIONS)[0]) <= accuracy.tolerance(1e-7, "float32"), more
    none = torch_tokens(0, 9)
    for more in (dict(), dict(deterministic=True), dict(checkpoints=[])):
        o, made = prefill(StatePool(2, HV, K, V), [], **none, **more, **OPTIONS)
        assert o.shape == none["v"].shape and made == []


def everything(**options):
    """Outputs of every call in turn, and all that the pool then holds."""
    pool = StatePool(3, HV, K, V, windows={"x": (2, 3)}, device="cpu", **options)
    slots, seen = pool.allocate(2), torch.ones(2, 4, 3, device="cpu")
    given = [torch_tokens(2, 4, seed) for seed in range(4)]
    found = [prefill(pool, slots, **given[0], window_inputs={"x": seen}, checkpoints=[[2], []], **OPTIONS)[0]]
    found.append(prefill(pool, slots, **given[1], window_inputs={"x": seen}, deterministic=True, **OPTIONS)[0])
    found.append(decode(pool, slots, **given[2], window_inputs={"x": seen}, **OPTIONS))
    o, draft = verify(pool, slots, **given[3], window_inputs={"x": seen}, **OPTIONS)
    commit(pool, draft, [1, 4])
    return [*found, o, *pool.tensors()]


@pytest.mark.parametrize("options", [dict(), dict(dtype=torch.int8, feedback=True)], ids=["float32", "int8"])
def test_the_bits_are_the_same_wherever_a_call_stands(options):
    """Under autocast, with another default dtype, with another default device, where gradients are recorded."""
    want = everything(**options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = {"autocast": everything(**options)}
    with torch.device("meta"):
        found["device"] = everything(**options)
    with torch.enable_grad():
        found["gradients"] = everything(**options)
    torch.set_default_dtype(torch.float64)
    try:
        found["dtype"] = everything(**options)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, tensors in found.items():
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(want, tensors, strict=True)), name


def fused_tokens(rows, count, K, V, seed=0):
    r = torch.Generator().manual_seed(seed)
    shapes = {"q": (1, K), "k": (1, K), "v": (2, V), "g": (2, K), "beta": (2,)}
    return {name: torch.randn(rows, count, *shape, generator=r) for name, shape in shapes.items()}


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_bits_do_not_depend_on_company_with_everything_in_the_kernel(gate, v_first):
    """Gates, norms and strengths of odd numbers of rows, alone and together, decoded and drafted."""
    K, V, rows = 37, 33, 5
    options = FUSED | dict(lower_bound=-5.0 if gate == "bounded" else None, A_log=torch.zeros(2), dt_bias=torch.linspace(-1, 1, 2 * K))
    together, alone, drafted = pools = [StatePool(rows, 2, K, V, state_v_first=v_first) for _ in range(3)]
    slots, _, _ = (pool.allocate(rows) for pool in pools)
    row = lambda x, n: {name: y[n : n + 1] for name, y in x.items()}
    x = fused_tokens(rows, 21, K, V)
    o, _ = prefill(together, slots, **x, deterministic=True, chunk_size=16, **options)
    for n in slots:
        assert torch.equal(prefill(alone, [n], **row(x, n), deterministic=True, chunk_size=16, **options)[0][0], o[n])
    drafted.restore(slots, together.snapshot(slots))
    x = fused_tokens(rows, 3, K, V, seed=1)
    cut = lambda t: {name: y[:, t : t + 1] for name, y in x.items()}
    o = torch.cat([decode(together, slots, **cut(t), **options) for t in range(3)], 1)
    for n in slots:
        assert torch.equal(torch.cat([decode(alone, [n], **row(cut(t), n), **options) for t in range(3)], 1)[0], o[n])
    p, draft = verify(drafted, slots, **x, **options)
    commit(drafted, draft, [3] * rows)
    assert torch.equal(p, o)
    for pool in (alone, drafted):
        assert torch.equal(pool.storage.states[:rows], together.storage.states[:rows])


@pytest.mark.parametrize("feedback", [False, True])
def test_no_token_rounds_no_state(feedback):
    """8 bits: a sequence without tokens in a call, and what a checkpoint at its beginning or its end cuts off."""
    pool = StatePool(2, HV, K, V, dtype=torch.int8, feedback=feedback)
    slots = pool.allocate(2)
    for seed in range(5):
        decode(pool, slots, **torch_tokens(2, 1, seed), **OPTIONS)
    before = pool.snapshot(slots)
    prefill(pool, slots, **torch_tokens(1, 7), cu_seqlens=torch.tensor([0, 0, 7]), **OPTIONS)
    _, ((again,), _) = prefill(pool, slots, **torch_tokens(1, 7), cu_seqlens=torch.tensor([0, 0, 7]), checkpoints=[[0], [7]], **OPTIONS)
    prefill(pool, slots, **torch_tokens(2, 0), **OPTIONS)
    for x, y, z in zip(before.tensors, pool.snapshot(slots).tensors, again.tensors, strict=True):
        assert torch.equal(x[0], y[0]) and torch.equal(x[0], z[0])
