"""Decode and prefill on memory that somebody else owns, against float64: random pools, strides, slots, drafts and accepted counts."""

import os
from dataclasses import replace

import fresh
import numpy as np
import pytest
import torch

from kdakit import reference
from kdakit.accuracy import error
from kdakit.problem import Arrays, make_options, make_problem
from kdakit.rounding import UNIT_ROUNDOFF
from kdakit.serving.torch import pages as engine

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
BACKENDS = ["torch_native", *(["triton_gpu"] if INTERPRETED or DEVICE == "cuda" else [])]
OPTIONS = dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of a state as it is stored


def make_pages(rng, count, HV, K, V):
    """An engine's pool: pages with a gap behind each, filled with numbers; and what lies in the gaps."""
    dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16])
    v_first, first, gap = bool(rng.integers(2)), int(rng.integers(2)), int(rng.choice([0, 16, 5]))
    memory = torch.tensor(rng.standard_normal((count, HV * K * V + gap)), dtype=dtype, device=DEVICE)
    shape = (HV, V, K) if v_first else (HV, K, V)
    states = memory[:, : HV * K * V].unflatten(1, shape)
    return engine.Pages(states, v_first, first), memory


def truth(x, initial):
    """o, and the state after every token, of one row: float64."""
    arrays = Arrays(*(x[n].double().cpu().numpy() for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")), initial_state=initial)
    problem = make_problem("recurrent", arrays, make_options(arrays, **OPTIONS, output_final_state=True))
    q, k, v, g, beta = reference.activate(problem, arrays, np.float64)
    S, o, after = initial, [], []
    for t in range(q.shape[1]):
        S, out = reference.step(S, *(a[:, t] for a in (q, k, v, g, beta)))
        o.append(out[0])
        after.append(S[0])
    return o, after


def packed_rows(rng, rows, T, H, HV, K, V, dtype=torch.float32):
    """q, k and v as parts of one row of a projection."""
    wide = torch.tensor(rng.standard_normal((rows, T, 2 * H * K + HV * V + 3)), dtype=dtype, device=DEVICE)
    q, k, v, _ = wide.split([H * K, H * K, HV * V, 3], -1)
    rest = {"g": (rows, T, HV, K), "beta": (rows, T, HV)}
    made = {n: torch.tensor(rng.standard_normal(shape), dtype=torch.float32, device=DEVICE) for n, shape in rest.items()}
    made |= {"A_log": torch.tensor(rng.standard_normal(HV), device=DEVICE).float(), "dt_bias": torch.zeros(HV * K, device=DEVICE)}
    return {"q": q.unflatten(-1, (H, K)), "k": k.unflatten(-1, (H, K)), "v": v.unflatten(-1, (HV, V))} | made


def one_row(x, n, start=None, end=None):
    cut = lambda a: a[n : n + 1] if start is None else a[:, start:end]
    return {name: a if name in ("A_log", "dt_bias") else cut(a) for name, a in x.items()}


def close(found, want, dtype, what):
    scale = max(np.abs(want).max(), 1e-3)
    assert np.abs(found.double().cpu().numpy() - want).max() <= TOLERANCE[dtype] * 4 * scale, what


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("backend", BACKENDS)
def test_decode(backend, seed):
    rng = np.random.default_rng(seed)
    H, group, K, V = 1, int(rng.integers(1, 3)), int(rng.choice([16, 20])), int(rng.choice([16, 12]))
    HV, N, T = H * group, int(rng.integers(1, 4)), int(rng.integers(1, 4))
    drafted, packed = bool(rng.integers(2)), bool(rng.integers(2))
    pages, memory = make_pages(rng, N * T + 3, HV, K, V)
    lengths = rng.integers(0, T + 1, N) if packed else np.full(N, T)
    total = int(lengths.sum()) + int(rng.integers(0, 3)) if packed else T
    x = packed_rows(rng, 1 if packed else N, total, H, HV, K, V)
    cu = torch.tensor(np.concatenate([[0], lengths.cumsum()]), device=DEVICE, dtype=torch.int32) if packed else None
    names = rng.permutation(np.arange(pages.first, N * T + 3))[: N * T].reshape(N, T)
    names[rng.random((N, T)) < 0.2] = rng.choice([-1, pages.first - 1, N * T + 3])  # nobody's
    slots = torch.tensor(names if drafted else names[:, 0], device=DEVICE, dtype=rng.choice([torch.int32, torch.int64]))
    accepted = torch.tensor(rng.integers(1, T + 1, N), device=DEVICE, dtype=torch.int32) if drafted and rng.integers(2) else None
    out = torch.full((*x["v"].shape[:2], HV + 1, V), 7.0, device=DEVICE)[:, :, :HV] if rng.integers(2) else None
    before, kept = pages.states.double().cpu().numpy(), memory.clone()
    o = engine.decode(pages, slots, **x, accepted=accepted, cu_seqlens=cu, out=out, backend=backend, **OPTIONS)
    assert out is None or o is out
    touched = set()
    for n in range(N):
        column = 0 if accepted is None else int(accepted[n]) - 1
        read = int(slots[n, column] if drafted else slots[n])
        start, end = (int(cu[n]), int(cu[n + 1])) if packed else (0, T)
        mine = o[0, start:end] if packed else o[n]
        if not pages.first <= read < len(before):
            assert not mine.any(), "nobody's row"
            continue
        initial = before[read].swapaxes(-1, -2) if pages.state_v_first else before[read]
        want, after = truth(one_row(x, n, *((start, end) if packed else ())), initial[None])
        for t, (a, S) in enumerate(zip(want, after, strict=True)):
            close(mine[t], a, torch.float32, f"o of row {n}, token {t}")
            to = int(slots[n, t]) if drafted else read if t == len(after) - 1 else -1
            if pages.first <= to < len(before):
                touched.add(to)
                S = S.swapaxes(-1, -2) if pages.state_v_first else S
                close(pages.states[to], S, pages.states.dtype, f"state of row {n} after token {t}")
    others = [i for i in range(len(before)) if i not in touched]
    assert torch.equal(memory[others], kept[others]), "pages of others"
    inside = HV * K * V
    assert torch.equal(memory[:, inside:], kept[:, inside:]), "what lies between pages"


def test_refusals():
    states = torch.zeros(4, 2, 16, 8)
    with pytest.raises(ValueError, match="a page of states must be contiguous"):
        engine.Pages(states.mT)
    with pytest.raises(TypeError, match=r"states must be \[pages, HV, K, V\]"):
        engine.Pages(states.double())
    pages = engine.Pages(states)
    x = packed_rows(np.random.default_rng(0), 2, 1, 1, 2, 16, 8)
    if DEVICE == "cpu":
        with pytest.raises(TypeError, match="slots must be int32 or int64"):
            engine.decode(pages, torch.zeros(2), **x, **OPTIONS)
        with pytest.raises(ValueError, match="accepted needs slots"):
            engine.decode(pages, torch.zeros(2, dtype=torch.int32), **x, accepted=torch.ones(2, dtype=torch.int32), **OPTIONS)
        with pytest.raises(ValueError, match="V must be the pool's 16"):
            engine.decode(engine.Pages(torch.zeros(4, 2, 16, 16)), torch.zeros(2, dtype=torch.int32), **x, **OPTIONS)


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter already")
def test_in_the_interpreter():
    words = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, "-k", "triton_gpu")
    run = fresh.run(*words, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert run.returncode == 0, run.stdout[-3000:]
    assert "passed" in run.stdout and "skipped" not in run.stdout


@pytest.mark.skipif(not INTERPRETED, reason="the size is one for the interpreter")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name == "triton_gpu"])
def test_prefill_in_halves_of_channels(backend, seed, monkeypatch):
    """By the scan for more than 128 key channels, at a size that the interpreter can do."""
    from kdakit.backends import triton_gpu
    from kdakit.backends.triton_gpu.kernels import scan_wide

    usual, launch, used = triton_gpu.default_config, scan_wide.launch, []
    whole = dict(split=False, staged=False, in_halves=True)
    monkeypatch.setattr(triton_gpu, "default_config", lambda problem, device: replace(usual(problem, device), **whole))
    monkeypatch.setattr(scan_wide, "launch", lambda *given: (used.append(given), launch(*given))[1])
    test_prefill(backend, seed)
    assert used


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("backend", BACKENDS)
def test_prefill(backend, seed):
    """From slots into slots, with states left on the way, against the recurrence in float64."""
    rng = np.random.default_rng(100 + seed)
    H, group, K, V = 1, int(rng.integers(1, 3)), 16, int(rng.choice([16, 12]))
    HV, N, packed = H * group, int(rng.integers(1, 3)), bool(rng.integers(2))
    pages, memory = make_pages(rng, N + 8, HV, K, V)
    lengths = rng.integers(0, 150, N) if packed else np.full(N, int(rng.integers(64, 140)))
    total = int(lengths.sum()) + int(rng.integers(0, 9)) if packed else int(lengths[0])
    x = packed_rows(rng, 1 if packed else N, total, H, HV, K, V)
    cu = torch.tensor(np.concatenate([[0], lengths.cumsum()]), device=DEVICE, dtype=torch.int32) if packed else None
    names = rng.permutation(np.arange(pages.first, N + 8)).tolist()
    own = [names.pop() for _ in range(N)]
    if rng.integers(2):
        own[0] = pages.first - 1  # nobody's
    slots = torch.tensor(own, device=DEVICE, dtype=torch.int64)
    known = torch.tensor(rng.integers(0, 2, N), device=DEVICE, dtype=torch.bool) if rng.integers(2) else None
    wanted = [(n, int(p)) for n in range(N) for c in range(0, lengths[n], 64) for p in [rng.integers(c + 1, min(c + 64, lengths[n]) + 1)]]
    wanted = [(n, p - p % 64 if p % 3 == 0 and p >= 64 else p) for n, p in wanted]
    wanted = list({(n, -(-p // 64)): (n, p) for n, p in wanted}.values())[:5]  # at most one for each chunk
    marks = None
    if wanted:
        places = [names.pop() for _ in wanted]
        marks = engine.Marks(*(torch.tensor(column, device=DEVICE) for column in (*zip(*wanted, strict=True), places)))
    before, kept = pages.states.double().cpu().numpy(), memory.clone()
    o = engine.prefill(pages, slots, **x, cu_seqlens=cu, known=known, marks=marks, backend=backend, **OPTIONS)
    touched = set()
    for n in range(N):
        start, end = (int(cu[n]), int(cu[n + 1])) if packed else (0, total)
        mine = o[0, start:end] if packed else o[n]
        real = own[n] >= pages.first
        if not real:
            assert not mine.any()
        initial = before[own[n]].swapaxes(-1, -2) if pages.state_v_first else before[own[n]]
        initial = np.zeros_like(initial) if known is not None and not known[n] else initial
        outputs, after = truth(one_row(x, n, *((start, end) if packed else ())), initial[None])
        ends = {int(slots[n]): len(after)} if real else {}
        ends |= {place: p for (m, p), place in zip(wanted, places if wanted else [], strict=True) if m == n and real}
        for t in range(len(outputs) if real else 0):
            close(mine[t], outputs[t], torch.bfloat16 if backend == "triton_gpu" and DEVICE == "cuda" else torch.float32, f"o {n} {t}")
        for place, p in ends.items():
            touched.add(place)
            S = after[p - 1] if p else initial
            close(pages.states[place], S.swapaxes(-1, -2) if pages.state_v_first else S, pages.states.dtype, f"state {n} after {p}")
    if packed:
        assert not o[0, int(lengths.sum()) :].any(), "padding"
    others = [i for i in range(len(before)) if i not in touched]
    assert torch.equal(memory[others], kept[others]), "pages of others, and of marks of nobody's sequence"


@pytest.mark.parametrize("backend", BACKENDS)
def test_nobodys_sequence_leaves_no_state(backend):
    """At the end of a chunk, within one, and at the sequence's end; another sequence beside it leaves its own."""
    rng = np.random.default_rng(7)
    pages, memory = make_pages(rng, 9, 1, 16, 16)
    x, names = packed_rows(rng, 2, 100, 1, 1, 16, 16), range(pages.first, pages.first + 5)
    slots = torch.tensor([pages.first - 1, names[4]], device=DEVICE)
    columns = (0, 0, 1), (64, 100, 30), names[:3]
    kept = memory.clone()
    engine.prefill(pages, slots, **x, marks=engine.Marks(*(torch.tensor(c, device=DEVICE) for c in columns)), backend=backend, **OPTIONS)
    assert [i for i in range(9) if not torch.equal(memory[i], kept[i])] == [names[2], names[4]]


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: real head sizes")
@pytest.mark.parametrize("heads", [4, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_sizes(dtype, heads):
    """K = V = 128 in bfloat16, where other kernels serve: pages against our own calls on states of their own."""
    from kdakit.torch import chunk_kda, fused_recurrent_kda

    rng = np.random.default_rng(5)
    lengths, K = [1024, 100, 0, 700], 128
    total, N = sum(lengths), len(lengths)
    x = packed_rows(rng, 1, total, heads, heads, K, K, torch.bfloat16)
    cu = torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), device=DEVICE)
    memory = torch.tensor(rng.standard_normal((12, heads * K * K + 32)), dtype=dtype, device=DEVICE)
    pages = engine.Pages(memory[:, : heads * K * K].unflatten(1, (heads, K, K)), state_v_first=True, first=1)
    slots = torch.tensor([3, 1, 2, 7], device=DEVICE, dtype=torch.int32)
    wanted = [(0, 64), (0, 512), (0, 1000), (1, 100), (3, 130)]
    marks = engine.Marks(*(torch.tensor(c, device=DEVICE) for c in (*zip(*wanted, strict=True), [4, 5, 6, 8, 9])))
    initial = pages.states[slots.long()].float()
    o = engine.prefill(pages, slots, **x, cu_seqlens=cu, marks=marks, **OPTIONS)
    common = dict(**x, **OPTIONS, output_final_state=True, state_v_first=True, backend="triton_gpu")
    want, final = chunk_kda(initial_state=initial, cu_seqlens=cu, **common)
    bound = 8e-3 if dtype == torch.bfloat16 else 1e-6
    assert torch.equal(o, want)
    assert (pages.states[slots.long()].float() - final).abs().max() <= bound * final.abs().max()
    for (n, p), place in zip(wanted, [4, 5, 6, 8, 9], strict=True):
        row = {
            name: a if name in ("A_log", "dt_bias") else a[:, cu[n] : cu[n] + p]
            for name, a in common.items()
            if isinstance(a, torch.Tensor)
        }
        flags = {name: a for name, a in common.items() if not isinstance(a, torch.Tensor)}
        _, S = chunk_kda(**row, **flags, initial_state=initial[n : n + 1])
        assert (pages.states[place].float() - S[0]).abs().max() <= 1e-2 * S.abs().max(), (n, p)
    one = packed_rows(rng, N, 1, heads, heads, K, K, torch.bfloat16)
    before = pages.states[slots.long()].float()
    o = engine.decode(pages, slots, **one, **OPTIONS)
    want, final = fused_recurrent_kda(
        **one, **OPTIONS, initial_state=before, output_final_state=True, state_v_first=True, backend="triton_gpu"
    )
    assert error(o.float().cpu(), want.float().cpu()) <= UNIT_ROUNDOFF["bfloat16"], "cut otherwise, they add in another order"
    assert (pages.states[slots.long()].float() - final).abs().max() <= bound * final.abs().max()
