"""The bfloat16 forward along blocks of 16 tokens, both of its kernels thread by thread on a CPU (csrc/tests/emulate_wgmma.h)."""

from dataclasses import replace

import emulated
import not_finite
import numpy as np
import pytest
from hopper_blocks import forward, records
from test_hopper_emulated import FAMILIES, NOT_FINITE

from kdakit.cases import CASES, FUSED, Case
from kdakit.measure import checking
from kdakit.rounding import round_to

pytestmark = emulated.needs_compiler
LONG = Case("long", "more blocks than stages, empty sequences, states", T=266, lengths=(0, 1, 201, 0, 64), H=1, HV=1, K=128, V=128,
            gate="raw", beta="logits", A_log=True, dt_bias=True, options=FUSED)  # fmt: skip


def check(case, arrays=None, groups=1):
    problem, arrays = case.problem("bfloat16"), arrays or case.arrays("bfloat16")
    rows = checking.compare(problem, arrays, forward(problem, arrays, groups), operand_dtype="bfloat16")
    assert all(row.ok for row in rows), [(row.name, row.error, row.tolerance) for row in rows]
    return {row.name: row.error for row in rows}


HARD = ["gate_zero", "gate_strong", "gate_huge", "gate_resets", "keys_identical", "identical_two", "softplus_huge", "grouped"]


@pytest.mark.parametrize("name", HARD)
def test_cases(name):
    check(replace(CASES[name], H=1, HV=2 if name == "grouped" else 1, B=1, K=128, V=128), groups=1 + HARD.index(name) % 2)


def test_long_ones():
    """The same bits whichever thread comes first, and whether one thread block has all value channels or two share them."""
    problem, arrays = LONG.problem("bfloat16"), LONG.arrays("bfloat16")
    found = [forward(problem, arrays, groups, order) for groups, order in ((1, 1), (2, -1))]
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])
    rows = checking.compare(problem, arrays, found[0], operand_dtype="bfloat16")
    assert all(row.ok for row in rows), rows


@pytest.mark.parametrize("family", FAMILIES)
def test_no_gate_is_too_strong(family):
    case = Case(family, "adversarial gates", T=40, H=1, HV=1, K=128, V=128, options={"chunk_size": 64})
    arrays = case.arrays("bfloat16")
    g = round_to(FAMILIES[family](np.random.default_rng(7), arrays.g.shape), "float32")
    errors = check(case, arrays._replace(g=g))
    assert max(errors.values()) < 6e-3, errors  # that of slow gates


@pytest.mark.parametrize("keys, scale", [(1e-3, None), (300.0, 7e-4), (1.0, 3000.0), (1.0, -0.3), (1.0, 0.0)])
def test_norms_and_scales(keys, scale):
    """Powers of two of either go around the products of a block, whatever their size."""
    case = Case("norms", "", T=40, H=1, HV=1, K=128, V=128, options={"chunk_size": 64} | ({} if scale is None else {"scale": scale}))
    arrays = case.arrays("bfloat16")
    k = round_to(arrays.k * keys, "bfloat16")
    check(case, arrays._replace(k=k, beta=round_to(arrays.beta / keys**2, "bfloat16") if keys > 1 else arrays.beta))


@pytest.mark.parametrize("case", NOT_FINITE, ids=lambda case: case.name)
def test_a_gate_that_is_nan_shows_and_stays_where_it_is(case):
    problem = case.problem("bfloat16")
    (injected,) = (x for x in not_finite.injections(case, "bfloat16", values=(np.nan,)) if x.name == "g")
    clean, found = (forward(problem, arrays) for arrays in (case.arrays("bfloat16"), injected.arrays))
    assert all(np.isfinite(x).all() for x in clean.values()) and not_finite.leaks(case, clean, found, injected) == []
    last = sum(case.lengths[: injected.sequence + 1]) - 1
    assert np.isnan(found["o"][0, last, injected.head]).all()


def test_records_are_causal():
    """A block's record does not change a bit with later blocks, nor its first rows with its later tokens."""
    case = Case("causal", "", T=64, H=1, HV=1, K=128, V=128, options={"chunk_size": 64})
    problem, arrays = case.problem("bfloat16"), case.arrays("bfloat16")
    g = arrays.g.copy()
    g[:, 24:] = -3000.0
    before, after = (forward(problem, arrays._replace(g=x))["o"] for x in (arrays.g, g))
    assert np.array_equal(before[:, :24], after[:, :24]) and not np.array_equal(before, after)
    before, after = (records(problem, arrays._replace(g=x))[0, 0] for x in (arrays.g, g))
    assert np.array_equal(before[0], after[0]) and not np.array_equal(before[1], after[1])
