"""The pooled calls on a GPU: against float64, bits that depend on nobody else, bad slots, CUDA graphs. Skipped where there is no GPU."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from kdakit import accuracy  # noqa: E402
from kdakit.backends import triton_gpu  # noqa: E402
from kdakit.cases import FUSED, Case  # noqa: E402
from kdakit.measure import checking  # noqa: E402
from kdakit.serving.torch import StatePool, advance, commit, decode, prefill, verify  # noqa: E402

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1", reason="needs a GPU, and Triton's compiler"
)
TOKENS = ("q", "k", "v", "g", "beta")
BOUNDED = FUSED | {"lower_bound": -5.0, "safe_gate": True}
LARGE, ODD = dict(H=2, HV=4, K=128, V=128), dict(H=1, HV=1, K=20, V=37)
PLAIN = dict(H=4, HV=4, K=128, V=128)


def drawn(rows, tokens, dtype, sizes):
    """A case and its tensors on the GPU."""
    case = Case("pooled", "drawn for a pool", B=rows, T=tokens, gate="raw", beta="logits", A_log=True, dt_bias=True, initial_state=False,
                options=BOUNDED, **sizes)  # fmt: skip
    return case, checking.to_torch(case.arrays(dtype), case.dtypes(dtype), "cuda")


def part(x, span):
    return {n: getattr(x, n)[:, span] for n in TOKENS} | dict(A_log=x.A_log, dt_bias=x.dt_bias)


def assert_right(case, dtype, o, state, op):
    problem, arrays = case.problem(dtype, op=op), case.arrays(dtype)
    truth = accuracy.truths(problem, arrays)
    plain = accuracy.plain_errors(problem, arrays, truth, operand_dtype=triton_gpu.operand_dtype(problem))
    dtypes = accuracy.output_dtypes(problem)
    for name, got in (("o", o), ("final_state", state)):
        allowed = accuracy.tolerance(plain[name], dtypes[name])
        assert accuracy.error(got.double().cpu().numpy(), truth[name]) <= allowed, name


@pytest.mark.parametrize("dtype, v_first, sizes", [("bfloat16", False, LARGE), ("bfloat16", True, LARGE), ("float32", True, ODD)])
def test_decode_and_drafts_against_float64(dtype, v_first, sizes):
    """Tokens one by one, drafts of which a part is accepted, and both at once, through all of a sequence."""
    case, x = drawn(3, 24, dtype, sizes)
    pool = StatePool(5, case.HV, case.K, case.V, state_v_first=v_first, device="cuda")
    slots = torch.tensor(pool.allocate(3), device="cuda")
    parts = [decode(pool, slots, **part(x, slice(t, t + 1)), **BOUNDED) for t in range(3)]
    at, draft, accepted = 3, None, 0
    while at < case.T:
        tokens = min(6, case.T - at)
        given = part(x, slice(at, at + tokens))
        if draft is None or at % 2:
            if draft is not None:
                commit(pool, draft, torch.full((3,), accepted, device="cuda"))
            o, draft = verify(pool, slots, **given, **BOUNDED)
        else:
            o, draft = advance(pool, draft, torch.full((3,), accepted, device="cuda"), **given, **BOUNDED)
        accepted = min(tokens, max(at % 4, 1))
        parts.append(o[:, :accepted])
        at += accepted
    commit(pool, draft, [accepted] * 3)
    assert_right(case, dtype, torch.cat(parts, 1), pool.states(slots.tolist()), "recurrent")


def test_rows_do_not_depend_on_their_company():
    _, x = drawn(4, 8, "bfloat16", PLAIN)

    def run(rows):
        pool = StatePool(9, 4, 128, 128, device="cuda")
        slots = pool.allocate(len(rows))
        given = lambda span: {n: y[rows] if n in TOKENS else y for n, y in part(x, span).items()}
        first = decode(pool, slots, **given(slice(0, 1)), **BOUNDED)
        o, draft = verify(pool, slots, **given(slice(1, 7)), **BOUNDED)
        commit(pool, draft, torch.full((len(rows),), 4, device="cuda"))
        return torch.cat([first, o, decode(pool, slots, **given(slice(7, 8)), **BOUNDED)], 1), pool.states(slots)

    together = run([0, 1, 2, 3])
    for i in (2, 0, 3, 1):
        for alone, all_of_them in zip(run([i]), together, strict=True):
            assert torch.equal(alone[0], all_of_them[i])


@pytest.mark.parametrize("pending", [0, 4])
@pytest.mark.parametrize("stored", [dict(), dict(dtype=torch.int8, feedback=True)])
def test_a_decode_that_comes_again(stored, pending):
    """It repeats the launches of the first: with its bits, whatever tensors, slots, alignments and other calls come between."""
    from kdakit.serving.torch import calls

    _, x = drawn(3, 14, "bfloat16", LARGE)
    pools = [StatePool(6, 4, 128, 128, device="cuda", pending=pending, windows={"q": (3, 8)}, **stored) for _ in range(2)]
    for pool in pools:
        slots = torch.tensor(pool.allocate(5)[1:4], device="cuda")
    inputs = torch.randn(3, 14, 8, device="cuda")
    for t in range(14):
        given, found = part(x, slice(t, t + 1)), []
        if t % 5 == 4:  # elsewhere in memory
            given = {n: torch.cat([y.flatten()[:1], y.flatten()])[1:].view(y.shape) if n in TOKENS else y.clone() for n, y in given.items()}
        for pool, again in zip(pools, (True, False), strict=True):
            if not again:
                calls._plans.pop(pool, None)
            where = slots.flip(0).contiguous() if t % 3 else slots.int()
            found.append(decode(pool, where, **given, window_inputs={"q": inputs[:, t : t + 1]}, **BOUNDED))
            if t == 6:
                verify(pool, slots, **part(x, slice(0, 2)), **BOUNDED)
        assert torch.equal(*found)
    first, second = (pool.snapshot(slots.tolist()).tensors for pool in pools)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)) and len(calls._plans[pools[0]]) >= 4
    with pytest.raises(TypeError, match="did you mean 'lower_bound'"):
        decode(pools[0], slots, **given, **BOUNDED, lowerbound=-5.0)


def test_bad_slots_are_skipped():
    """They output zeros and change no byte of the pool; a draft does not reach the next owner of its slot."""
    case, x = drawn(6, 2, "bfloat16", LARGE)
    pool = StatePool(6, case.HV, case.K, case.V, device="cuda")
    a, b, c = pool.allocate(3)
    pool.storage.states.normal_()
    pool.free([c])
    slots = torch.tensor([b, -1, 77, c, b, a], device="cuda", dtype=torch.int32)
    before = pool.storage.states.clone()
    o = decode(pool, slots, **part(x, slice(0, 1)), **BOUNDED)
    changed = [i for i in range(7) if not torch.equal(before[i], pool.storage.states[i])]
    assert [i for i in range(6) if not o[i].any()] == [1, 2, 3, 4] and changed == sorted((a, b))
    _, draft = verify(pool, slots, **part(x, slice(0, 2)), **BOUNDED)
    pool.free([a])
    assert a in pool.allocate(pool.free_slots)
    slots.fill_(a)  # the draft has its own
    before = pool.states([b])
    commit(pool, draft, torch.full((6,), 1, device="cuda"))
    assert not pool.states([a]).any() and not torch.equal(before, pool.states([b]))


def test_a_graph_is_replayed_with_other_slots_tokens_and_counts():
    T = 4
    _, x = drawn(4, T, "bfloat16", PLAIN)
    pools = [StatePool(8, 4, 128, 128, device="cuda") for _ in range(2)]
    for pool in pools:
        slots = pool.allocate(8)
        pool.storage.states[:8] = torch.randn(8, 4, 128, 128, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    buffers = {n: y.clone() for n, y in part(x, slice(0, T)).items()}
    where, accepted = torch.full((4,), -1, device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")

    def turn(pool):
        o, draft = verify(pool, where, **buffers, **BOUNDED)
        commit(pool, draft, accepted)
        return o

    turn(pools[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = turn(pools[0])
    for i in range(3):
        for n in TOKENS:
            buffers[n].copy_(getattr(x, n).roll(i, 0)[:, :T])
        where.copy_(torch.tensor([slots[i], slots[7 - i], -1, slots[3]]))
        accepted.copy_(torch.tensor([i, 4, 2, 3]))
        graph.replay()
        assert torch.equal(captured, turn(pools[1])) and torch.equal(pools[0].storage.states[:8], pools[1].storage.states[:8])


def test_which_bits_of_a_prefill_depend_on_what():
    """None on cuts at chunk multiples or on other sequences in the call; cuts elsewhere stay within the rule."""
    case, x = drawn(1, 300, "bfloat16", PLAIN)

    def run(cuts, company):
        pool = StatePool(40, 4, 128, 128, device="cuda")
        slots, parts = pool.allocate(1 + len(company)), []
        for a, b in itertools.pairwise((0, *cuts, 300)):
            tokens = {n: torch.cat([getattr(x, n)[:, a:b], *(getattr(x, n)[:, :c] for c in company)], 1) for n in TOKENS}
            cu = torch.tensor(np.cumsum([0, b - a, *company])).cuda()
            o, _ = prefill(pool, slots, **tokens, cu_seqlens=cu, A_log=x.A_log, dt_bias=x.dt_bias, deterministic=True, **BOUNDED)
            parts.append(o[:, : b - a])
        return torch.cat(parts, 1), pool.states(slots[:1])

    whole = run((), ())
    for cuts, company in (((64, 256), ()), ((), (40, 7, 200)), ((), (30,) * 30)):
        for got, expected in zip(run(cuts, company), whole, strict=True):
            assert torch.equal(got, expected), (cuts, company)
    assert_right(case, "bfloat16", *run((100, 131), ()), "chunk")
