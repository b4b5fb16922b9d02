"""The bfloat16 prepare kernel itself, run thread by thread on the CPU (csrc/tests/emulate_hopper.h); NumPy walks along its records.

Gates are what is hard here: the kernel refers decays to whole numbers, and no gate may overflow, cancel or lose a pair that counts.
"""

import ctypes
from dataclasses import replace

import emulated
import not_finite
import numpy as np
import pytest
from hopper_records import opened, prepare, scan

from kdakit.cases import CASES, FUSED, Case
from kdakit.measure import checking
from kdakit.rounding import round_to

pytestmark = emulated.needs_compiler


@pytest.fixture(scope="module")
def kernels():
    return emulated.load("hopper")


def check(kernels, case, arrays=None):
    problem, arrays = case.problem("bfloat16"), arrays or case.arrays("bfloat16")
    rows = checking.compare(problem, arrays, scan(problem, arrays, prepare(kernels, problem, arrays)), operand_dtype="bfloat16")
    assert all(row.ok for row in rows), [(row.name, row.error, row.tolerance) for row in rows]
    return {row.name: row.error for row in rows}


HARD = [
    "gate_zero", "gate_slow", "gate_bounded", "gate_strong", "gate_huge", "gate_resets", "gate_spikes", "keys_identical", "identical_two",
    "softplus", "softplus_huge", "lower_bound", "grouped", "varlen",
]  # fmt: skip


@pytest.mark.parametrize("name", HARD)
def test_cases(kernels, name):
    check(kernels, replace(CASES[name], H=1, HV=2 if name == "grouped" else 1, B=1, K=128, V=128))


@pytest.mark.parametrize("name", ["gate_slow", "gate_huge", "identical_two", "softplus", "lower_bound", "grouped", "varlen"])
def test_64_channels(kernels, name):
    check(kernels, replace(CASES[name], H=1, HV=2 if name == "grouped" else 1, B=1, K=64, V=64))


NOT_FINITE = (
    Case("given", "any log-decay", T=6, H=1, HV=2, K=128, V=128, lengths=(2, 4), options={"chunk_size": 64}),
    Case("softplus", "a raw gate", T=6, H=1, HV=2, K=128, V=128, lengths=(2, 4), gate="raw", A_log=True,
         options={"chunk_size": 64, "use_gate_in_kernel": True}),
)  # fmt: skip


@pytest.mark.parametrize("case", NOT_FINITE, ids=lambda case: case.name)
def test_a_gate_that_is_nan_shows_and_stays_where_it_is(kernels, case):
    """It is no gate that forgets: it is not raised to the floor, its head's outputs are NaN from there on, and no bit of others changes."""
    problem = case.problem("bfloat16")
    run = lambda arrays: scan(problem, arrays, prepare(kernels, problem, arrays))
    (injected,) = (x for x in not_finite.injections(case, "bfloat16", values=(np.nan,)) if x.name == "g")
    clean, found = run(case.arrays("bfloat16")), run(injected.arrays)
    assert all(np.isfinite(x).all() for x in clean.values()) and not_finite.leaks(case, clean, found, injected) == []
    last = sum(case.lengths[: injected.sequence + 1]) - 1
    assert np.isnan(found["o"][0, last, injected.head]).all() and np.isnan(found["final_state"][injected.sequence, injected.head]).any()


def _three_resets(rng, shape):
    """Three tokens forget everything, then slow ones: within a group, across its middle, and across the boundary of two."""
    g = np.full(shape, -1e-3)
    for first in (1, 6, 18, 27, 45):
        g[:, first : first + 3] = -3000.0
    return g


def _turning(rng, shape, first, then):
    """Every block of 16 tokens begins with one gate and goes on with another, each channel from a token of its own on."""
    return np.where(np.arange(shape[1])[None, :, None, None] % 16 < rng.integers(1, 16, size=shape[3]), first, then)


FAMILIES = {
    "all_minus_5": lambda rng, shape: np.full(shape, -5.0),
    "all_minus_20": lambda rng, shape: np.full(shape, -20.0),  # kFloor, nearly: the largest growth
    "all_minus_100": lambda rng, shape: np.full(shape, -100.0),
    "steep_then_slow": lambda rng, shape: _turning(rng, shape, -20.0, -1e-4),
    "slow_then_steep": lambda rng, shape: _turning(rng, shape, -1e-4, -20.0),
    "half_the_channels": lambda rng, shape: np.where(np.arange(shape[3]) % 2, -2661.0, -0.01 * rng.uniform(size=shape)),
    "spikes_of_30_percent": lambda rng, shape: np.where(rng.uniform(size=shape) < 0.3, -60.0, -0.1 * rng.uniform(size=shape)),
    "moderate": lambda rng, shape: -10 * rng.uniform(size=shape),
    "three_resets": _three_resets,
    "minus_infinity": lambda rng, shape: np.where(rng.uniform(size=shape) < 0.05, -np.inf, -0.1),
}


NARROW = "all_minus_20", "steep_then_slow", "half_the_channels", "minus_infinity"  # with 64 channels too


@pytest.mark.parametrize("family, D", [*((family, 128) for family in FAMILIES), *((family, 64) for family in NARROW)])
def test_no_gate_is_too_strong(kernels, family, D):
    case = Case(family, "adversarial gates", T=72, H=1, HV=1, K=D, V=D, options={"chunk_size": 64})
    arrays = case.arrays("bfloat16")
    g = round_to(FAMILIES[family](np.random.default_rng(7), arrays.g.shape), "float32")
    errors = check(kernels, case, arrays._replace(g=g))
    assert max(errors.values()) < 6e-3, errors  # that of slow gates


@pytest.mark.parametrize("scale, D", [(1e-3, 128), (1.0, 128), (300.0, 128), (300.0, 64)])
def test_keys_keep_their_norms(kernels, scale, D):
    """Without l2norm in the kernel keys are divided by powers of two and multiplied again, whatever their size."""
    case = Case("norms", "keys of any size", T=70, H=1, HV=1, K=D, V=D, options={"chunk_size": 64})
    arrays = case.arrays("bfloat16")
    k = round_to(arrays.k * scale, "bfloat16")
    check(kernels, case, arrays._replace(k=k, beta=round_to(arrays.beta / scale**2, "bfloat16") if scale > 1 else arrays.beta))


@pytest.mark.parametrize("D", [64, 128])
def test_order_of_threads_does_not_matter(kernels, D):
    case = Case("order", "races", T=64, H=1, HV=1, K=D, V=D, gate="raw", beta="logits", A_log=True, options=FUSED)
    problem, arrays = case.problem("bfloat16"), case.arrays("bfloat16")
    assert (prepare(kernels, problem, arrays) == prepare(kernels, problem, arrays, order=-1)).all()


def test_records_are_causal(kernels):
    """A chunk's earlier rows do not change a bit with its later tokens: what the scan reads of the first block."""
    case = Case("causal", "causality", T=64, H=1, HV=1, K=128, V=128, options={"chunk_size": 64})
    problem, arrays = case.problem("bfloat16"), case.arrays("bfloat16")
    g = arrays.g.copy()
    g[:, 40:] = -3000.0
    before, after = (opened(prepare(kernels, problem, arrays._replace(g=x))[0, 0]) for x in (arrays.g, g))
    for x, y in zip(before[:2], after[:2], strict=True):  # k_in, q_decayed
        assert (x[:40] == y[:40]).all() and not (x == y).all()
    assert (before[3][:40, :40] == after[3][:40, :40]).all()


def _attack(kind):
    """Keys, write strengths and gates at which a heuristic about decays alone would be wrong."""
    case = Case(kind, "what forgets", T=192, H=1, HV=1, K=128, V=128, options={"chunk_size": 64})
    arrays, rng = case.arrays("bfloat16"), np.random.default_rng(3)
    g, k, beta = arrays.g.copy(), arrays.k.copy(), arrays.beta.copy()
    if kind == "strong":  # every channel forgets at once
        g[:] = -5 * rng.uniform(0.2, 1, size=g.shape)
    elif kind == "slow_channel":  # one channel keeps what the others pass to it
        g[:] = -5.0
        g[..., 17] = -1e-4
    elif kind == "reflections":  # beta 2 and identical keys: the state is reflected, not damped
        g[:], k[:], beta[:] = -0.01, k[:, :1], 2.0
    elif kind == "grows":  # write strengths beyond the contract: the state grows
        g[:], beta[:] = -0.05, 9.0
    elif kind == "late":  # the last chunk is slow, those before it strong
        g[:, :128], g[:, 128:] = -5.0, -1e-3
    return case, arrays._replace(g=round_to(g, "float32"), k=round_to(k, "bfloat16"), beta=round_to(beta, "bfloat16"))


@pytest.mark.parametrize("kind, few", [("strong", 1), ("slow_channel", 0), ("reflections", 0), ("grows", 0), ("late", 0)])
def test_only_what_is_forgotten_is_dropped(kernels, kind, few):
    """The number of last chunks that decide about the state, and that the product of their matrices is indeed below the limit."""
    case, arrays = _attack(kind)
    problem = case.problem("bfloat16")
    records = prepare(kernels, problem, arrays)
    kernels.kda_emulate_deciding.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int]
    last = records[-1, 0].ctypes.data
    found = {kernels.kda_emulate_deciding(last, records.strides[0], len(records), order) for order in (1, -1)}
    assert found == {few}
    product = np.eye(128)
    for record in records[len(records) - few :, 0] if few else []:
        k_in, _, k_solved, _, decay = (x.astype(np.float64) for x in opened(record))
        product = (np.diag(decay) - k_solved.T @ k_in) @ product
    assert not few or np.linalg.norm(product, 2) < 2.0**-40


def test_no_matrix_exceeds_its_bound(kernels):
    """max decay + sum |k_solved| |k_in| over random gates, keys and write strengths."""
    for seed, scale in enumerate((0.01, 0.3, 2.0, 30.0)):
        case = Case("bound", "bounds", T=64, H=1, HV=1, K=128, V=128, keys=("random", "parallel", "identical", "random")[seed])
        arrays = case.arrays("bfloat16", seed)
        g = round_to(arrays.g * scale, "float32")
        k_in, _, k_solved, _, decay = (
            x.astype(np.float64) for x in opened(prepare(kernels, case.problem("bfloat16"), arrays._replace(g=g))[0, 0])
        )
        bound = decay.max() + (np.linalg.norm(k_solved, axis=1) * np.linalg.norm(k_in, axis=1)).sum()
        assert np.linalg.norm(np.diag(decay) - k_solved.T @ k_in, 2) <= bound
