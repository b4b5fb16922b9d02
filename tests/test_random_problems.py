"""Random problems: what a number is, and some hundred of them on the backends that run here.

Triton's interpreter runs its own in tests/stages/test_triton_interpreted.py, and a GPU's campaign is `make test-gpu`.
"""

import os

import numpy as np
import pytest

from kdakit import dispatch
from kdakit.measure import checking, shrink
from kdakit.measure.random_problems import FORMS, MORE, PER_FORM, SIZES, draw, form_of, numbers, parse
from kdakit.measure.trial import judge

FULL = os.environ.get("KDAKIT_FULL") == "1"  # make test-full


def quick(drawn, most=250_000):
    """Small enough for a test: elements of states times tokens, and packed sequences, each a loop of the truth."""
    return 0 < drawn.B * drawn.T * drawn.HV * drawn.K * drawn.V < most and drawn.T < 400 and len(drawn.lengths) < 30


def middle(drawn):
    """Head sizes between the powers of two that everybody tries."""
    return 33 <= drawn.K <= 127 and quick(drawn, 120_000)


def shown(verdicts):
    return "\n".join(f"{v.what}: {v.complaint}" for v in verdicts if not v.ok)


# Where torch_native may use more than the rule allows, and how much of it: d_A_log, one number in which the gates' gradients cancel, here
# of a problem in float64, beside which nothing is wider. A machine's BLAS decides on which side of the rule it is.
LIMITS = {22000102: 1.5}

# Beyond the rule once: identical keys (1.6, 1.2, 2.1), more tokens in a chunk than channels (1.7, 1.4), float16 gradients below 6e-8,
# narrow heads in float32 (2.0, 1.1).
MENDED = (154000450, 154000052, 154000504, 154000034, 154000502, 154000072, 1104005574, 1402001588)


@pytest.mark.parametrize("part", range(5))
def test_torch_native(part):
    pytest.importorskip("torch")
    drawn = list(numbers(11 + part, 20, wanted=quick)) + list(numbers(21 + part, 10, wanted=middle))
    verdicts = {number: judge(number, "torch_native") for number in drawn}
    assert not shown(v for number, v in verdicts.items() if number not in LIMITS) and not any(v.refused for v in verdicts.values())
    for number in LIMITS.keys() & verdicts.keys():
        assert max(verdicts[number].used.values()) < LIMITS[number], (number, verdicts[number].used)


@pytest.mark.parametrize("number", MENDED)
def test_mended(number):
    pytest.importorskip("torch")
    assert not shown([judge(number, "torch_native")])


def test_what_a_dtype_cannot_hold_is_its_infinity():
    """A gradient of 66809 in float16; and nothing else is."""
    pytest.importorskip("torch")
    drawn = parse("2602006396:K=1")
    assert not shown([judge(drawn, "torch_native")])
    problem, arrays, seeds = drawn.problem(), drawn.arrays(), drawn.cotangents()
    found = checking.expect(problem, arrays, seeds).truth
    for wrong in (np.inf, -65504.0):
        q = np.where(abs(found["q"]) > 65520, wrong, found["q"])
        assert not all(row.ok for row in checking.compare_quickly(problem, arrays, found | {"q": q}, seeds))


@pytest.mark.parametrize("backend, seeds", [("xla", range(31, 35 if FULL else 33)), ("pallas_tpu", range(35, 37))])
def test_jax(backend, seeds):
    """Every size is a program to compile."""
    pytest.importorskip("jax")
    count = 5 if backend == "xla" else 2
    for seed in seeds:
        drawn = list(numbers(seed, count, wanted=lambda d: middle(d) and d.dtype != "float64"))
        assert not shown([judge(number, backend) for number in drawn])


@pytest.mark.parametrize("backend, count", [("torch_native", 12), ("xla", 1), ("pallas_tpu", 1)])
def test_tokens_behind_the_last_sequence(backend, count):
    """NaN there reaches nothing; gradients of the final state lie in memory as they like."""
    pytest.importorskip("torch" if backend == "torch_native" else "jax")
    drawn = list(numbers(MORE + 5, count, wanted=lambda d: d.padding and quick(d) and d.K <= 64 and d.V <= 64 and d.dtype != "float64"))
    assert not shown(judge(number, backend) for number in drawn)


@pytest.mark.parametrize("number", (984001783, 984001413))
def test_one_channel_that_strengths_of_two_overwrite(number):
    """In chunks of 16 tokens `xla` has gradients of gates off by up to 4.7 times what is allowed."""
    pytest.importorskip("jax")
    assert not shown([judge(number, "xla")])


def test_a_number_is_a_problem():
    for number in (0, 7, 4_000_001, 123_456):
        one, two = draw(number), draw(number)
        assert one == two and all(np.array_equal(a, b) for a, b in zip(one.arrays(), two.arrays(), strict=True) if a is not None)
        assert one.problem().dtype == one.dtype and parse(one.label) == one
    assert not set(numbers(1, 100)) & set(numbers(2, 100)) and not set(numbers(1, 100)) & set(numbers(1, 100, shared=True))
    changed = draw(8).changed(T=5, lengths=(2, 3), use_qk_l2norm_in_kernel=None)
    assert parse(changed.label) == changed and changed.T == 5 and "use_qk_l2norm_in_kernel" not in changed.options
    with pytest.raises(ValueError, match="NUMBER"):
        parse("x:T=1")


def test_shared_programs():
    """What a compiler sees is one thing for a form; a round has every form, and every call of it."""
    first = [draw(n) for n in numbers(5, PER_FORM, shared=True)]
    assert len({(d.dtype, d.K, d.gate_dtype, d.beta_dtype, bool(d.lengths), d.layouts, d.initial_state) for d in first}) == 1
    assert len({d.V for d in first}) == 3 and {d.call for d in first} >= {"gradient", "forward", "step"}
    assert len({(d.T, d.lengths, d.HV) for d in first}) > 10
    forms = {form_of(str(n))[0] for n in numbers(5, PER_FORM * len(FORMS), shared=True)}
    assert len(forms) == len(FORMS)


def test_draws_reach_the_contract():
    drawn = [draw(n) for n in numbers(3, 600)]
    assert {d.dtype for d in drawn} == {"float32", "bfloat16", "float16", "float64"}
    assert {d.call for d in drawn} == {"forward", "gradient", "step", "step_gradient"}
    assert {name for d in drawn for name in d.options} >= {
        "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "safe_gate", "lower_bound",
        "disable_recompute", "return_intermediate_states", "state_v_first", "chunk_size", "scale",
    }  # fmt: skip
    assert any(0 in d.lengths for d in drawn) and any(d.T == 0 for d in drawn) and any(d.HV > d.H for d in drawn)
    assert len({d.K for d in drawn}) > 80 and all(any(size // 2 < d.K <= size for d in drawn) for size in SIZES)
    assert len({layout for d in drawn for layout in d.layouts}) == 7 and any(d.gate_dtype != d.dtype for d in drawn)
    assert not any(d.padding or d.final_layout != "plain" for d in drawn), "records name numbers of such seeds"
    drawn = [draw(n) for n in numbers(MORE, 300)]
    assert len({d.padding for d in drawn}) > 8 and len({d.final_layout for d in drawn}) == 7


def test_shrinking():
    """The smallest problem that still fails, named so that it can be repeated."""
    drawn = next(d for d in map(draw, numbers(6)) if d.lengths and d.T > 100 and d.HV > 1 and d.grad)
    tried = []

    def fails(candidate):
        tried.append(candidate)
        return candidate.T >= 17 and candidate.K > 20

    small = shrink.shrink(drawn, fails)
    assert fails(small) and small.T < 40 and small.HV == 1 and not small.lengths and small.V == 16
    assert parse(small.label) == small and len(tried) < 200
    small.problem()  # still a problem that may be posed


class TestMemory:
    """Canaries."""

    @pytest.fixture(autouse=True)
    def torch(self):
        return pytest.importorskip("torch")

    def test_a_stray_store_shows(self, torch):
        from kdakit.measure.memory import guarded

        with guarded() as guard:
            x = torch.empty(3, 5)
            y = x.new_empty((4,), dtype=torch.bfloat16)
            z = torch.empty_like(x)
            assert x.isnan().all() and y.isnan().all() and z.isnan().all() and x.is_contiguous() and x.data_ptr() % 16 == 0
            x.zero_()
        assert guard.complaint() is None and torch.empty(2) is not None
        y.as_strided((5,), (1,))[4] = 0
        assert "2 after" in guard.complaint() and "test_random_problems.py" in guard.complaint()

    @pytest.mark.parametrize("layout", ["plain", "offset", "heads_first", "wide", "strided_tokens", "strided_channels", "reversed"])
    def test_inputs_in_poisoned_memory(self, torch, layout):
        from kdakit.measure.memory import place

        x = torch.arange(2.0 * 3 * 4 * 5).reshape(2, 3, 4, 5)
        placed = place(x, layout)
        assert torch.equal(placed.tensor, x) and placed.untouched
        around = placed.memory.view(torch.int8)
        assert around[0] == -1 and around[-1] == -1
        placed.tensor[1, 2, 3, 4] = -1
        assert not placed.untouched

    def test_a_backend_that_writes_too_far(self, torch, monkeypatch):
        """It is caught by `judge`, and so is one whose second call has other bits."""
        module = dispatch.load("torch_native")
        step = module.step

        def stray(problem, arrays, config, final_state=None):
            made = torch.empty(4)
            made.as_strided((6,), (1,))[5] = 1.0
            return step(problem, arrays, config)

        drawn = next(d for d in map(draw, numbers(7)) if d.call == "step" and quick(d))
        assert judge(drawn, "torch_native").ok
        monkeypatch.setattr(module, "step", stray)
        assert "stray store" in judge(drawn, "torch_native").complaint


def test_the_quick_verdict_is_the_verdict():
    """No more of the plain recurrence is run than a pass needs; a fail has seen it all."""
    drawn = next(d for d in map(draw, numbers(8)) if d.grad and d.dtype == "float32" and quick(d))
    problem, arrays, cotangents = drawn.problem(), drawn.arrays(), drawn.cotangents()
    expected = checking.expect(problem, arrays, cotangents)
    results = expected.truth
    assert all(row.ok for row in checking.compare_quickly(problem, arrays, results, cotangents))
    results = results | {"o": results["o"] * (1 + 1e-4)}
    fast = checking.compare_quickly(problem, arrays, results, cotangents)
    slow = checking.compare(problem, arrays, results, cotangents, expected=expected)
    assert [row.name for row in fast if not row.ok] == ["o"]
    assert [(row.name, row.ok, row.tolerance) for row in fast] == [(row.name, row.ok, row.tolerance) for row in slow]
