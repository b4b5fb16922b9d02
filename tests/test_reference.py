"""The definition: its backward against finite differences, the chunk form against it, and what must hold for every KDA."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdakit import chunked, reference
from kdakit.accuracy import error
from kdakit.cases import CASES, SEGMENT_CASES, Case
from kdakit.problem import DIFFERENTIABLE, Arrays

ALL = CASES | SEGMENT_CASES
# Steps much smaller than the gates themselves: finite differences of a decay of e^-3000 are zero, and so is its gradient.
SMOOTH = [name for name in ALL if name not in ("gate_huge", "gate_resets", "gate_spikes", "softplus_huge", "wide")]


def loss(problem, arrays, d_o, d_final_state):
    out = reference.forward(problem, arrays)
    return (out.o * d_o).sum() + (0 if out.final_state is None else (out.final_state * d_final_state).sum())


@pytest.mark.parametrize("name", SMOOTH)
def test_backward_against_finite_differences(name):
    case = ALL[name]
    problem, arrays = case.problem("float64"), case.arrays("float64")
    d_o, d_final_state = case.cotangents("float64")
    grads = reference.backward(problem, arrays, d_o, d_final_state if problem.options.output_final_state else None)
    rng = np.random.default_rng(0)
    for field in DIFFERENTIABLE:
        x = getattr(arrays, field)
        if x is None or x.size == 0:
            continue
        step = rng.normal(size=x.shape) * 1e-5
        rise = loss(problem, arrays._replace(**{field: x + step}), d_o, d_final_state)
        fall = loss(problem, arrays._replace(**{field: x - step}), d_o, d_final_state)
        along = (getattr(grads, field) * step).sum() * 2
        scale = np.linalg.norm(getattr(grads, field)) * np.linalg.norm(step) / np.sqrt(x.size)
        rounding = 1e-14 * max(abs(rise), 1)
        assert abs(rise - fall - along) <= 1e-6 * abs(along) + 1e-6 * scale + rounding, field


@pytest.mark.parametrize("name", ["gate_huge", "gate_resets", "gate_spikes"])
def test_gradients_stay_finite_under_any_gate(name):
    case = CASES[name]
    grads = reference.backward(case.problem("float64"), case.arrays("float64"), *case.cotangents("float64"))
    assert all(np.isfinite(x).all() for x in grads if x is not None)


@pytest.mark.parametrize("chunk_size", [1, 7, 16, 64])
@pytest.mark.parametrize("name", ALL)
def test_chunk_form_equals_recurrence(name, chunk_size):
    case = ALL[name]
    problem, arrays = case.problem("float64"), case.arrays("float64")
    truth, chunk = reference.forward(problem, arrays), chunked.forward(problem, arrays, chunk_size)
    assert error(chunk.o, truth.o) <= 1e-11
    if truth.final_state is not None:
        assert error(chunk.final_state, truth.final_state) <= 1e-11


@pytest.mark.parametrize("name", ["plain", "v_first", "varlen", "grouped"])
def test_states_before_each_chunk(name):
    case = CASES[name]
    problem, arrays = case.problem("float64").replace(return_intermediate_states=True), case.arrays("float64")
    truth, chunk = reference.forward(problem, arrays), chunked.forward(problem, arrays)
    assert chunk.states.shape == truth.states.shape
    assert error(chunk.states, truth.states) <= 1e-11


def test_chunk_intermediates_keep_their_promises():
    rng = np.random.default_rng(3)
    q, k, g = rng.normal(size=(3, 2, 24, 8))
    v, beta = rng.normal(size=(2, 24, 5)), rng.uniform(size=(2, 24))
    x = chunked.intra(q, k / 3, v, -np.abs(g), beta)
    eye = np.eye(24)
    assert np.abs(x.inverse @ (eye + x.A_kk) - eye).max() < 1e-13
    assert (np.triu(x.A_kk) == 0).all() and (np.triu(x.A_qk, 1) == 0).all()
    assert np.allclose(x.decay, np.exp(x.g_cum[:, -1]))
    assert x.w.shape == x.k_decayed.shape == (2, 24, 8) and x.u.shape == (2, 24, 5)


def test_one_token_by_hand():
    """S = beta k v^T from nothing; o = scale (q.k) beta v."""
    q, k, v = np.array([1.0, 2.0]), np.array([3.0, -1.0]), np.array([5.0, 7.0, 11.0])
    out = reference.kda(*(x.reshape(1, 1, 1, -1) for x in (q, k, v, np.array([-0.5, -9.0]))), np.full((1, 1, 1), 0.25), scale=2.0,
                        output_final_state=True)  # fmt: skip
    assert np.allclose(out.final_state[0, 0], 0.25 * np.outer(k, v))
    assert np.allclose(out.o[0, 0, 0], 2.0 * (q @ k) * 0.25 * v)


def test_delta_rule_replaces_what_a_key_stored():
    """With beta = 1, no decay and a unit key, the last value written under it is the one read."""
    rng = np.random.default_rng(1)
    key = rng.normal(size=4)
    key /= np.linalg.norm(key)
    k = np.broadcast_to(key, (1, 6, 1, 4)).copy()
    v = rng.normal(size=(1, 6, 1, 3))
    out = reference.kda(k, k, v, np.zeros((1, 6, 1, 4)), np.ones((1, 6, 1)), scale=1.0)
    assert np.allclose(out.o, v)


def draw_case(seed, T, B=1, H=1, HV=2, K=4, V=3, lengths=()):
    gate = ("mild", "huge", "resets", "zero")[seed % 4]
    return Case(f"drawn{seed}", "drawn", B=B, T=T, H=H, HV=HV, K=K, V=V, gate=gate, lengths=tuple(lengths))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), T=st.integers(0, 40), cut=st.floats(0, 1))
def test_split_anywhere(seed, T, cut):
    case = draw_case(seed, T)
    arrays, at = case.arrays("float64"), int(cut * T)
    whole = reference.forward(case.problem("float64"), arrays)
    state, parts = arrays.initial_state, []
    for part in (slice(0, at), slice(at, T)):
        tokens = Arrays(*(x[:, part] for x in arrays[:5]), initial_state=state)
        out = chunked.forward(draw_case(seed, part.stop - part.start).problem("float64"), tokens, chunk_size=1 + seed % 9)
        state = out.final_state
        parts.append(out.o)
    assert error(np.concatenate(parts, 1), whole.o) <= 1e-11
    assert error(state, whole.final_state) <= 1e-11


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), lengths=st.lists(st.integers(0, 12), min_size=1, max_size=6), order=st.randoms())
def test_packed_sequences_are_independent(seed, lengths, order):
    """Permuting the sequences of a packed batch permutes its results; an empty one returns its initial state."""
    case = draw_case(seed, sum(lengths), lengths=lengths)
    arrays = case.arrays("float64")
    out = reference.forward(case.problem("float64"), arrays)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    permutation = list(range(len(lengths)))
    order.shuffle(permutation)
    tokens = np.concatenate([np.arange(starts[n], starts[n + 1]) for n in permutation]).astype(int)
    shuffled = draw_case(seed, sum(lengths), lengths=[lengths[n] for n in permutation])
    moved = Arrays(*(x[:, tokens] for x in arrays[:5]), initial_state=arrays.initial_state[permutation],
                   cu_seqlens=shuffled.arrays("float64").cu_seqlens)  # fmt: skip
    again = chunked.forward(shuffled.problem("float64"), moved, chunk_size=5)
    assert error(again.o, out.o[:, tokens]) <= 1e-11
    assert error(again.final_state, out.final_state[permutation]) <= 1e-11
    for n, length in enumerate(lengths):
        if length == 0:
            assert (out.final_state[n] == arrays.initial_state[n]).all()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), T=st.integers(1, 30), cut=st.floats(0, 1))
def test_prefix_causality(seed, T, cut):
    """Changing tokens from t on changes no bit of the output before t."""
    case, at = draw_case(seed, T), int(cut * T)
    arrays = case.arrays("float64")
    other = case.arrays("float64", seed=1)
    mixed = Arrays(*(np.concatenate([a[:, :at], b[:, at:]], 1) for a, b in zip(arrays[:5], other[:5], strict=True)),
                   initial_state=arrays.initial_state)  # fmt: skip
    problem = case.problem("float64")
    for forward in (reference.forward, chunked.forward):
        assert (forward(problem, arrays).o[:, :at] == forward(problem, mixed).o[:, :at]).all()


def test_first_intermediate_state_is_the_initial_one():
    case = CASES["plain"]
    problem, arrays = case.problem("float64").replace(return_intermediate_states=True), case.arrays("float64")
    for forward in (reference.forward, chunked.forward):
        assert np.array_equal(forward(problem, arrays).states[:, 0], arrays.initial_state)
