"""The bfloat16 kernel that makes a forward's tiles again, run thread by thread on the CPU: against float64, in any order of rows.
`test_borrowed_gradient.py` has whole calls."""

import ctypes
from dataclasses import replace
from itertools import pairwise

import emulated
import numpy as np
import pytest
from hopper_records import CHUNK, Memory, floats, row_order

from kdakit import reference
from kdakit.backends.cuda import library
from kdakit.cases import CASES, Case
from kdakit.chunked import intra

pytestmark = emulated.needs_compiler
NAMES = "k_in", "q_decayed", "k_solved", "decay", "beta", "norm_q", "norm_k", "lost_k", "lost_q", "q_lost"


@pytest.fixture(scope="module")
def kernels():
    return emulated.load("rebuild")


def truth(problem, arrays):
    """What the kernel makes, by token and in float64, `lower`, and which slots hold tokens."""
    q, k, v, g, beta = reference.activate(problem, arrays, np.float64)
    l2norm = problem.options.l2norm
    raw = [np.repeat(np.asarray(x, np.float64), problem.group, axis=2) for x in arrays[:2]]
    norms = [1 / np.sqrt((x * x).sum(-1) + 1e-6) if l2norm else np.ones(x.shape[:3]) for x in raw]
    cu = [0, problem.T] if arrays.cu_seqlens is None else [int(x) for x in arrays.cu_seqlens]
    slots = problem.T // CHUNK + problem.N if problem.varlen else -(-problem.T // CHUNK)
    made = {name: np.zeros((slots, problem.HV, CHUNK, problem.K)) for name in NAMES[:3]}
    made |= {"decay": np.zeros((slots, problem.HV, problem.K))} | {name: np.zeros((slots, problem.HV, CHUNK)) for name in NAMES[4:7]}
    lower, used = np.zeros((slots, problem.HV, CHUNK, CHUNK)), np.zeros(slots, bool)
    for n, (first, last) in enumerate(pairwise(cu)):
        for i, t in enumerate(range(first, last, CHUNK)):
            slot, end = first // CHUNK + n + i if problem.varlen else i, min(t + CHUNK, last)
            used[slot] = True
            for h in range(problem.HV):
                x = intra(*(y[0, t:end, h] for y in (q, k, v, g, beta)))
                alone = intra(*(y[0, t:end, h] for y in (q, k, v, g)), np.ones(end - t)).A_kk
                lower[slot, h, : end - t, : end - t] = alone @ x.inverse
                rows = k[0, t:end, h] * np.exp(x.g_cum), x.q_decayed, x.inverse.T @ x.k_decayed
                rows += beta[0, t:end, h], norms[0][0, t:end, h], norms[1][0, t:end, h]
                for name, y in zip((*NAMES[:3], *NAMES[4:7]), rows, strict=True):
                    made[name][slot, h, : end - t] = y
                made["decay"][slot, h] = x.decay
    return made, lower, used


def rebuild(kernels, problem, arrays, lower, group=1, order=1):
    """What the kernel makes of a call, by token; NaN where nothing was written."""
    HV, N, D, slots, memory = problem.HV, problem.N, problem.K, len(lower), Memory()
    half, rows, room = problem.options.l2norm, row_order(group), memory.room
    given = np.ascontiguousarray(lower[:, :, rows][:, :, :, rows], np.float16 if half else np.float32)
    tiles, decay = room(slots, HV, 3, CHUNK, D), room(slots, HV, D, dtype=np.float32)
    factors, first = room(slots, HV, 3, CHUNK, dtype=np.float32), room(N, HV, 2, CHUNK, D)
    q_lost = room(slots, HV, CHUNK, D)
    args = library.RebuildArgs(
        memory.forward(problem, arrays), lower=given.ctypes.data, tiles=tiles.ctypes.data, decay=decay.ctypes.data,
        factors=factors.ctypes.data, first=first.ctypes.data, lower_dtype=library.FLOAT16 if half else library.FLOAT32, group=group,
        q_lost=q_lost.ctypes.data if D == 64 and not half else None,
    )  # fmt: skip
    kernels.kda_emulate_rebuild_bf16(ctypes.byref(args), order)
    memory.check_guards()
    solved = tiles[:, :, 2].view(np.float16).astype(np.float32) if half else floats(tiles[:, :, 2])
    found = dict(k_in=floats(tiles[:, :, 0]), q_decayed=floats(tiles[:, :, 1]), k_solved=solved)
    by_token = lambda x, axis: np.take(x, np.argsort(rows), axis)
    found = {name: by_token(x, 2) for name, x in found.items()} | dict(decay=decay)
    found |= {name: by_token(factors[:, :, i], 2) for i, name in enumerate(NAMES[4:7])}
    found["q_lost"] = by_token(floats(q_lost), 2)
    return found | dict(lost_k=by_token(floats(first[:, :, 0]), 2), lost_q=by_token(floats(first[:, :, 1]), 2))


def check(kernels, case, group=1):
    problem, arrays = case.problem("bfloat16"), case.arrays("bfloat16")
    true, lower, used = truth(problem, arrays)
    found = rebuild(kernels, problem, arrays, lower, group)
    assert all(np.isnan(found[name][~used].astype(np.float64)).all() for name in NAMES[:3]), "slots without tokens"
    there = true["beta"] != 0
    for name in NAMES[:7]:
        x, y = found[name][used].astype(np.float64), true[name][used]
        if name.startswith("norm"):
            x, y = x[there[used]], y[there[used]]
        error = np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30)
        rule = 2e-6 if name.startswith(("norm", "beta")) else 2e-4 if name == "decay" else 3e-3  # half of bfloat16's last place, at worst
        assert error < rule, (name, error)
    starts = [0] if arrays.cu_seqlens is None else [int(a) // CHUNK + n for n, a in enumerate(arrays.cu_seqlens[:-1])]
    for n, slot in enumerate(starts):
        if used[slot]:
            for name, lost in (("k_in", "lost_k"), ("q_decayed", "lost_q")):
                whole = found[name][slot].astype(np.float64) + found[lost][n]
                assert np.linalg.norm(whole - true[name][slot]) <= 2e-5 * np.linalg.norm(true[name][slot]) + 1e-30, name
    if problem.K == 64 and not problem.options.l2norm:
        whole, expected = (found["q_decayed"].astype(np.float64) + found["q_lost"])[used], true["q_decayed"][used]
        assert np.linalg.norm(whole - expected) <= 2e-5 * np.linalg.norm(expected) + 1e-30
    again = rebuild(kernels, problem, arrays, lower, group, order=-1)
    assert all(np.array_equal(found[name], again[name], equal_nan=True) for name in NAMES), "a race"


NORMED = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
GROUPS = {"gate_huge": 4, "beta_zero": 8, "identical_two": 4}  # as the plain Triton kernels order rows


def of_size(name, D):
    case = CASES[name]
    T = case.T if case.lengths else min(case.T, 72)
    return replace(case, H=1, HV=2 if name == "grouped" else 1, B=1, T=T, K=D, V=D)


@pytest.mark.parametrize(
    "name", ["gate_huge", "beta_zero", "identical_two", "gate_bounded", "softplus", "lower_bound", "grouped", "varlen", "varlen_fused"]
)
def test_against_float64(kernels, name):
    check(kernels, of_size(name, 128), group=GROUPS.get(name, 1))


@pytest.mark.parametrize("name", ["gate_huge", "beta_zero", "softplus", "lower_bound", "grouped", "varlen", "varlen_fused"])
def test_64_channels(kernels, name):
    check(kernels, of_size(name, 64), group=GROUPS.get(name, 1))


@pytest.mark.parametrize("gate, D", [("spikes", 128), ("mild", 128), ("mild", 64)])
def test_normalised_keys(kernels, gate, D):
    check(kernels, Case("normed", "float16 `lower`", T=72, H=1, HV=1, K=D, V=D, gate=gate, beta="logits", options=NORMED))


@pytest.mark.parametrize("D", [128, 64])
def test_what_is_forgotten_at_once(kernels, D):
    """Nothing is left of a state before a gate of -3000: rows of later tokens are 0, and so is the chunk's decay."""
    case = Case("reset", "", T=72, H=1, HV=1, K=D, V=D, beta="logits", options=NORMED)
    problem, arrays = case.problem("bfloat16"), case.arrays("bfloat16")
    arrays.g[:, 5] = -3000.0
    found = rebuild(kernels, problem, arrays, truth(problem, arrays)[1])
    assert not any(found[name][0, 0, 5:].any() for name in ("k_in", "q_decayed")) and not found["decay"][0].any()
