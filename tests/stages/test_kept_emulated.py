"""What the bfloat16 forward keeps for a backward, its prepare kernel run thread by thread on the CPU: against float64, in any order of
rows. `test_borrowed_forward.py` has whole calls, states and outputs."""

from dataclasses import replace
from itertools import pairwise

import emulated
import numpy as np
import pytest
from hopper_records import CHUNK, floats, prepare, row_order

from kdakit import reference
from kdakit.backends.cuda import library
from kdakit.cases import CASES, FUSED, Case
from kdakit.chunked import intra
from kdakit.rounding import round_to

pytestmark = emulated.needs_compiler


@pytest.fixture(scope="module")
def kernels():
    return emulated.load("hopper")


def truth(problem, arrays):
    """`lower` and `solved` [slots, HV, 64, 64] in float64, and which slots hold tokens."""
    q, k, v, g, beta = reference.activate(problem, arrays, np.float64)
    cu = [0, problem.T] if arrays.cu_seqlens is None else [int(x) for x in arrays.cu_seqlens]
    slots = problem.T // CHUNK + problem.N if problem.varlen else -(-problem.T // CHUNK)
    lower, solved, used = np.zeros((slots, problem.HV, CHUNK, CHUNK)), np.zeros((slots, problem.HV, CHUNK, CHUNK)), np.zeros(slots, bool)
    for n, (first, last) in enumerate(pairwise(cu)):
        for i, t in enumerate(range(first, last, CHUNK)):
            slot, end = first // CHUNK + n + i if problem.varlen else i, min(t + CHUNK, last)
            used[slot] = True
            for h in range(problem.HV):
                x = intra(*(y[0, t:end, h] for y in (q, k, v, g, beta)))
                alone = intra(*(y[0, t:end, h] for y in (q, k, v, g)), np.ones(end - t)).A_kk
                lower[slot, h, : end - t, : end - t] = alone @ x.inverse
                solved[slot, h, : end - t, : end - t] = x.A_qk @ x.inverse
    return lower, solved, used


def kept(kernels, problem, arrays, group=1, order=1):
    """`lower` and `solved` of a call, in the order of tokens; NaN where nothing was written."""
    slots = problem.T // CHUNK + problem.N if problem.varlen else -(-problem.T // CHUNK)
    shape, half = (slots, problem.HV, CHUNK, CHUNK), problem.options.l2norm
    lower, solved = np.full(shape, np.nan, np.float16 if half else np.float32), np.full(shape, 0x7FFF, np.uint16)
    prepare(
        kernels, problem, arrays, order, lower=lower.ctypes.data, solved=solved.ctypes.data, checkpoints=256, checkpoint=8,
        lower_dtype=library.FLOAT16 if half else library.FLOAT32, group=group,
    )  # fmt: skip
    found = np.empty((2, *shape))
    rows = row_order(group)
    found[:, :, :, rows[:, None], rows] = lower, floats(solved)
    return found


def error(x, true):
    return np.linalg.norm(x - true) / np.linalg.norm(true)


def check(kernels, case, arrays=None, group=1):
    problem, arrays = case.problem("bfloat16"), arrays or case.arrays("bfloat16")
    lower, solved = kept(kernels, problem, arrays, group)
    *true, used = truth(problem, arrays)
    assert np.isnan(lower[~used]).all() and np.isnan(solved[~used]).all()
    for name, x, y in zip(("lower", "solved"), (lower, solved), true, strict=True):
        assert error(x[used], y[used]) < 2.0**-8, (name, error(x[used], y[used]))  # half of bfloat16's last place, at worst
    assert not np.triu(lower[used]).any() and not np.triu(solved[used], 1).any()


NORMED = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
GROUPS = {"gate_huge": 4, "beta_zero": 8}  # as the plain Triton kernels order rows


HARD = ["gate_huge", "beta_zero", "identical_two", "gate_bounded", "grouped", "varlen"]


@pytest.mark.parametrize("name", HARD)
def test_against_float64(kernels, name):
    case = CASES[name]
    T = case.T if case.lengths else min(case.T, 72)
    check(kernels, replace(case, H=1, HV=2 if name == "grouped" else 1, B=1, T=T, K=128, V=128), group=GROUPS.get(name, 1))


@pytest.mark.parametrize("name", HARD)
def test_64_channels(kernels, name):
    case = CASES[name]
    T = case.T if case.lengths else min(case.T, 136)
    check(kernels, replace(case, H=1, HV=2 if name == "grouped" else 1, B=1, T=T, K=64, V=64), group=GROUPS.get(name, 1))


@pytest.mark.parametrize("D", [64, 128])
def test_normalised_keys(kernels, D):
    check(kernels, Case("normed", "float16 `lower`", T=72, H=1, HV=1, K=D, V=D, gate="spikes", beta="logits", options=NORMED))


@pytest.mark.parametrize("D, bounded", [(64, False), (64, True), (128, False), (128, True)])
def test_gates_that_are_computed_here(kernels, D, bounded):
    gate = {"safe_gate": True, "lower_bound": -5.0} if bounded else {}
    sizes = dict(T=72, H=1, HV=1, K=D, V=D)
    check(kernels, Case("fused", "", gate="raw", beta="logits", A_log=True, dt_bias=True, options=FUSED | gate, **sizes))


@pytest.mark.parametrize("D, scale", [(64, 300.0), (128, 1e-3), (128, 300.0)])
def test_keys_of_any_size(kernels, D, scale):
    """Norms that stay outside the kernel's products go back into `lower` and `solved`."""
    case = Case("norms", "keys of any size", T=64, H=1, HV=1, K=D, V=D, options={"chunk_size": 64})
    arrays = case.arrays("bfloat16")
    q, k = (round_to(x * np.exp2(np.arange(64) % 3)[None, :, None, None] * scale, "bfloat16") for x in arrays[:2])
    beta = round_to(arrays.beta / (16 * scale**2), "bfloat16") if scale > 1 else arrays.beta / 16
    check(kernels, case, arrays._replace(q=q, k=k, beta=round_to(beta, "bfloat16")))


@pytest.mark.parametrize("D, group", [(64, 4), (128, 1)])
def test_order_of_threads_does_not_matter(kernels, D, group):
    case = Case("order", "races", T=64, H=1, HV=1, K=D, V=D, beta="logits", options=NORMED)
    problem, arrays = case.problem("bfloat16"), case.arrays("bfloat16")
    for x, y in zip(kept(kernels, problem, arrays, group), kept(kernels, problem, arrays, group, order=-1), strict=True):
        assert (x == y).all()
