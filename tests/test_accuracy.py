"""The tolerance rule must reject the mistakes it exists for: a rule that accepts everything would pass every other test."""

from dataclasses import replace

import numpy as np
import pytest

from kdakit import accuracy, chunked, reference
from kdakit.cases import CASES
from kdakit.rounding import UNIT_ROUNDOFF, round_to


def short(name):
    """A case of so few tokens that dozens of plain runs are cheap."""
    return replace(CASES[name], T=12)


def allowed(name, dtype="float32", operand_dtype="float32"):
    case = CASES[name] if isinstance(name, str) else name
    problem, arrays = case.problem(dtype), case.arrays(dtype)
    d_o, d_final_state = case.cotangents(dtype)
    truth = accuracy.truths(problem, arrays, d_o, d_final_state)
    plain = accuracy.plain_errors(problem, arrays, truth, d_o, d_final_state, operand_dtype)
    dtypes = accuracy.output_dtypes(problem)
    return problem, arrays, truth, {n: accuracy.tolerance(e, dtypes[n]) for n, e in plain.items()}


@pytest.mark.parametrize("name", ["plain", "gate_resets", "gate_huge", "keys_identical", "beta_two"])
def test_accepts_the_chunk_form_in_float32(name):
    problem, arrays, truth, tolerance = allowed(name)
    out = chunked.forward(problem, arrays, dtype=np.float32)
    assert accuracy.error(out.o, truth["o"]) <= tolerance["o"]
    assert accuracy.error(out.final_state, truth["final_state"]) <= tolerance["final_state"]


@pytest.mark.parametrize("name", ["gate_resets", "gate_spikes", "gate_huge"])
def test_rejects_differences_of_cumulative_sums(name, monkeypatch):
    original = chunked.intra

    def intra(q, k, v, g, beta):
        right = original(q, k, v, g, beta)
        C, g_cum = g.shape[-2], right.g_cum
        lower = np.tril(np.ones((C, C), bool))[..., None]
        decays = np.exp(np.where(lower, g_cum[..., :, None, :] - g_cum[..., None, :, :], -np.inf))
        A_qk = np.einsum("...ik,...jk,...ijk->...ij", q, k, decays)
        return right._replace(A_qk=A_qk, k_decayed=k * np.exp(g_cum[..., -1:, :] - g_cum))

    problem, arrays, truth, tolerance = allowed(name)
    monkeypatch.setattr(chunked, "intra", intra)
    assert accuracy.error(chunked.forward(problem, arrays, dtype=np.float32).o, truth["o"]) > tolerance["o"]


@pytest.mark.parametrize("name", ["keys_identical", "keys_parallel"])
def test_rejects_a_neumann_series(name, monkeypatch):
    def neumann(A):
        eye = np.eye(A.shape[-1], dtype=A.dtype)
        total, power = eye - A, A @ A
        for _ in range(int(np.log2(A.shape[-1]))):
            total, power = total + power @ total, power @ power
        return total

    problem, arrays, truth, tolerance = allowed(name)
    monkeypatch.setattr(chunked, "unit_lower_inverse", neumann)
    assert accuracy.error(chunked.forward(problem, arrays, dtype=np.float32).o, truth["o"]) > tolerance["o"]


def test_rejects_a_bfloat16_state():
    """float32 problems and bfloat16 problems alike: the state is float32."""
    problem, arrays, truth, tolerance = allowed("gate_slow", "bfloat16")
    x = reference.activate(problem, arrays, np.float32)
    state = reference.initial_states(problem, arrays, np.float32)
    for t in range(problem.T):
        state, _ = reference.step(round_to(state, "bfloat16"), *(a[:, t] for a in x))
    assert accuracy.error(state, truth["final_state"]) > tolerance["final_state"]


def test_rejects_a_telescoping_gate_gradient():
    """d_g as the running sum of q d_q - k d_k is right on paper and drowns where gates are strong."""
    problem, arrays, truth, tolerance = allowed("gate_strong")
    d_o, d_final_state = CASES["gate_strong"].cotangents("float32")
    grads = reference.backward(problem, arrays, d_o, d_final_state, np.float32)
    q, k = (np.asarray(x, np.float32) for x in (arrays.q, arrays.k))
    local = q * grads.q - k * grads.k
    final = reference.forward(problem, arrays, np.float32).final_state
    at_end = (final * d_final_state.astype(np.float32)).sum(-1)[:, None]
    telescoped = np.cumsum(local[:, ::-1], 1, dtype=np.float32)[:, ::-1] + at_end.astype(np.float32)
    assert accuracy.error(telescoped, truth["g"]) > 1e3 * tolerance["g"]
    assert accuracy.error(grads.g, truth["g"]) <= tolerance["g"]


def test_rejects_noise_nan_and_wrong_zeros():
    _, _, truth, tolerance = allowed("plain")
    noise = np.random.default_rng(0).normal(size=truth["o"].shape) * 1e-5
    assert accuracy.error(truth["o"] * (1 + noise), truth["o"]) > tolerance["o"]
    broken = truth["o"].copy()
    broken.flat[0] = np.nan
    assert accuracy.error(broken, truth["o"]) == np.inf
    assert accuracy.error(np.ones(3), np.zeros(3)) == np.inf
    assert accuracy.error(np.zeros(3), np.zeros(3)) == 0
    with pytest.raises(ValueError, match="shape"):
        accuracy.error(np.zeros(3), np.zeros((3, 1)))


def test_matrix_unit_operands_are_judged_by_their_own_plain_version():
    _, _, _, float32 = allowed("plain", "bfloat16")
    _, _, _, matrix = allowed("plain", "bfloat16", operand_dtype="bfloat16")
    assert matrix["final_state"] > 1000 * float32["final_state"]
    assert matrix["o"] < 4 * float32["o"]


def regridded(name, operand_dtype, seed):
    """The plain recurrence's outputs and gradients, its factors rounded on a grid that the rule has not seen."""
    case = short(name)
    rng = np.random.default_rng([1, seed])
    args = case.problem(operand_dtype), case.arrays(operand_dtype), *case.cotangents(operand_dtype)
    return accuracy._named(*args, np.float32, accuracy.rounding_einsum(operand_dtype, rng))


@pytest.mark.parametrize(("name", "operand_dtype"), [("softplus", "bfloat16"), ("lower_bound", "bfloat16"), ("softplus", "float16")])
def test_one_lucky_run_does_not_set_the_rule(name, operand_dtype):
    """d_A_log has two numbers: a plain run that has them right by chance must not fail others that are as good as it."""
    _, _, truth, tolerance = allowed(short(name), operand_dtype, operand_dtype)
    for seed in range(8):
        got = regridded(name, operand_dtype, seed)
        assert {n for n in truth if accuracy.error(got[n], truth[n]) > tolerance[n]} == set()


@pytest.mark.parametrize("operand_dtype", ["bfloat16", "float32"])
def test_other_roundings_count_for_few_numbers_only(operand_dtype, monkeypatch):
    _, _, truth, with_grids = allowed(short("softplus"), operand_dtype, operand_dtype)
    few = {n for n in truth if accuracy.effective_count(truth[n]) < accuracy.NUMBERS}
    monkeypatch.setattr(accuracy, "NUMBERS", 0)
    _, _, _, without = allowed(short("softplus"), operand_dtype, operand_dtype)
    assert "A_log" in few and "o" not in few
    changed = {n for n in truth if with_grids[n] != without[n]}
    assert changed <= few and (changed or operand_dtype == "float32")
    assert all(with_grids[n] >= without[n] for n in few)


def test_effective_count():
    rng = np.random.default_rng(0)
    assert accuracy.effective_count([0.0, 3e200, 0.0, -3e200]) == 2
    assert accuracy.effective_count(np.ones((5, 4))) == 20
    assert accuracy.effective_count(np.zeros(5)) == accuracy.effective_count([]) == 0
    assert accuracy.effective_count(rng.normal(size=30000)) == pytest.approx(10000, rel=0.05)
    errors = np.abs(np.exp(rng.normal(size=200))) * rng.normal(size=(20000, 200))  # s_i of all sizes
    mean_squares = np.square(errors).mean(1)
    n = 2 * mean_squares.mean() ** 2 / mean_squares.var()  # of a mean of so many squares
    assert n == pytest.approx(accuracy.effective_count(np.sqrt(np.square(errors).mean(0))), rel=0.1)


SIGMA = 1e-3


@pytest.fixture
def one_number(monkeypatch):
    """Of a d_g nearly all is one number, which the plain arithmetic has with errors of SIGMA: a function of a seed and another arithmetic's
    error, None for one as good as it. True: within the rule."""
    case, truth = CASES["plain"], {"g": np.r_[1.0, np.full(999, 1e-5)]}

    def judged(seed, error=None, quickly=True):
        rng = np.random.default_rng(seed)

        def named(problem, arrays, d_o, d_final_state, dtype, einsum=None, disturb=None):
            return {"g": truth["g"] * (1 + SIGMA * rng.normal() * (dtype == np.float32))}

        monkeypatch.setattr(accuracy, "_named", named)
        error = abs(SIGMA * rng.normal()) if error is None else error
        within = lambda plain: bool(error <= accuracy.tolerance(plain["g"], "float32"))
        return within(accuracy.plain_errors(case.problem(), None, truth, enough=within if quickly else None))

    return judged


def test_no_more_draws_than_a_verdict_needs(one_number):
    """It is that of all of them, for errors around what is allowed."""
    sizes = np.linspace(0.5, 1.5, 120) * accuracy.SLACK * SIGMA
    quick, whole = ([one_number(seed, size, quickly) for seed, size in enumerate(sizes)] for quickly in (True, False))
    assert quick == whole and 20 < sum(whole) < 100


def test_one_number_is_judged_by_many_draws(one_number, monkeypatch):
    """What is as good as the plain arithmetic passes, twice SLACK times as wrong does not: but for a first run whose own error is twice
    SIGMA, one in twenty, with any error half of that and all of four times."""
    assert sum(not one_number(seed) for seed in range(600)) <= 1
    assert sum(one_number(seed, 2 * accuracy.SLACK * SIGMA) for seed in range(100)) <= 12
    assert not any(one_number(seed, 4.5 * accuracy.SLACK * SIGMA) for seed in range(100))
    monkeypatch.setattr(accuracy, "NUMBERS", 0)
    assert sum(not one_number(seed) for seed in range(600)) > 60, "one draw is not enough"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rounding_is_to_nearest_even(dtype):
    u = UNIT_ROUNDOFF[dtype]
    one_up = 1 + 2 * u
    values = np.array([1 + u, 1 + u * 1.001, one_up + u, -1 - u * 1.001, 0.0, np.inf, np.nan])
    assert np.array_equal(round_to(values, dtype), [1, one_up, 1 + 4 * u, -one_up, 0, np.inf, np.nan], equal_nan=True)
    rng = np.random.default_rng(0)
    x = rng.normal(size=1000)
    assert (np.abs(round_to(x, dtype) - x) <= u * np.abs(x)).all()
