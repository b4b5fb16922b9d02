"""Where torch_native changes its way: one product inside blocks whose gates are weak, levels elsewhere, float64 where it matters."""

import math
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from kdakit.backends.torch_native import blocks  # noqa: E402
from kdakit.backends.torch_native.gate import Activated, activate_backward  # noqa: E402
from kdakit.backends.torch_native.intra import intra, intra_backward  # noqa: E402
from kdakit.cases import CASES, Case  # noqa: E402
from kdakit.measure import checking  # noqa: E402
from kdakit.problem import Arrays  # noqa: E402

MIXED = Case("mixed", "weak and strong gates in one call", T=150, H=1, HV=1, K=24, V=16, options={"chunk_size": 64})
REACH = math.log(blocks.SPAN)  # over a block


def mixed_arrays():
    """Channel by channel: weak; at the bound and on either side of it; a spike, a reset and nothing at all in the middle of a block."""
    arrays = MIXED.arrays()
    g = 0.2 * arrays.g
    for channel, share in enumerate((0.98, 0.9999, 1.0, 1.0001, 1.02, 3.0)):
        g[..., 4 + channel] = share * REACH / blocks.BLOCK
    g[:, 40, :, 10], g[:, 41, :, 11], g[:, 97, :, 12] = -30.0, -3000.0, -50.0
    g[:, 5:140, :, 13] = 0.0
    return arrays._replace(g=g.astype(np.float32).astype(np.float64))


def assert_within(case, arrays, cotangents):
    rows = checking.compare(case.problem(), arrays, checking.run_arrays("torch_native", case, "float32", arrays, cotangents), cotangents)
    assert all(r.ok for r in rows), [r for r in rows if not r.ok]


def inside(scale):
    """Rows, beta and gates of three chunks, with gates of every strength times `scale`."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 2, 64, 8, generator=generator, dtype=torch.float64)
    g = -torch.rand(3, 64, 8, generator=generator, dtype=torch.float64) * scale * torch.tensor([0.1, 1.0, 30.0])[:, None, None]
    return rows, torch.full((3, 64, 1), 0.5, dtype=torch.float64), g


def test_weak_and_strong_gates_in_one_call():
    assert_within(MIXED, mixed_arrays(), MIXED.cotangents())


def test_like_keys_are_inverted_to_a_rounding():
    """Strengths of 2 take back all that was written, again and again: in float32 a substitution of 64 tokens has 1.6e-6."""
    generator = torch.Generator().manual_seed(0)
    keys = F.normalize(torch.randn(64, 1, 1, 32, generator=generator), dim=-1) * (1 + 1e-3 * torch.randn(64, 1, 64, 1, generator=generator))
    beta = 1.99 + 0.01 * torch.rand(64, 64, 1, generator=generator)
    mixed = intra(keys.expand(-1, 2, -1, -1).contiguous(), beta, torch.zeros(64, 64, 32), True)
    whole = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + mixed.A[:, 1].double() * beta)
    assert (mixed.inverse - whole).norm() < 1e-7 * whole.norm()


def test_what_a_key_of_one_overwrites_has_no_gradient():
    """A head of one channel, strengths of 1: exactly zero, for a relative error knows no small number beside it."""
    case = Case("overwritten", "", T=5, H=1, HV=2, K=1, V=7, keys="identical", beta="one")
    arrays = case.arrays("float32")
    arrays = arrays._replace(k=np.sign(arrays.k))
    found = checking.run_arrays("torch_native", case, "float32", arrays, case.cotangents("float32"))
    assert not found["initial_state"].any() and not found["g"].any()
    for varied in (case, replace(case, beta="uniform", T=70, B=2), replace(case, beta="up_to_two", T=30, lengths=(7, 0, 1, 22))):
        assert_within(varied, varied.arrays("float32"), varied.cotangents("float32"))


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_sums_of_parameters_gradients(gate):
    """Of terms that cancel but for a hundredth, half of them a token's and half the next one's: as if they were rounded once."""
    case = Case("sums", "", T=200, H=1, HV=2, K=16, V=4, gate="raw", A_log=True, dt_bias=True,
                options={"use_gate_in_kernel": True} | ({"lower_bound": -5.0} if gate == "bounded" else {}))  # fmt: skip
    problem, arrays = case.problem("float32"), checking.to_torch(case.arrays("float32"), case.dtypes("float32"), "cpu")
    arrays = arrays._replace(g=arrays.g[:, ::2].repeat_interleave(2, 1))
    d = torch.randn(arrays.g.shape, generator=torch.Generator().manual_seed(0))
    d[:, 1::2] = -d[:, ::2] * 1.01
    exact = Arrays(*(None if x is None else x.double() for x in arrays))
    made = (problem, arrays, d), (problem.replace(dtype="float64"), exact, d.double())
    found, wide = (activate_backward(p, a, Activated(*a[:3], x, a.beta)) for p, a, x in made)
    for name in ("A_log", "dt_bias"):
        assert (getattr(found, name) - getattr(wide, name)).norm() < 2e-8 * getattr(wide, name).norm()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("scale", [0.05, 1.0, 20.0])
def test_one_product_and_levels_agree(scale, exact):
    """With and without a look at the gates (on a GPU there is none), in float32 and float64, forward and backward."""
    x = inside(scale)
    generator = torch.Generator().manual_seed(1)
    sizes = (3, 2, 64, 64), (3, 2, 64, 8), (3, 64, 8), (3, 8)
    cotangents = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    found, served = [], set()
    for look, dtype in ((True, torch.float32), (False, torch.float64)):
        rows, beta, g = (a.to(dtype) for a in x)
        mixed = intra(rows, beta, g, look, keep=True)
        far = mixed.pairs.inside.far
        served.add("levels" if not look else "one product" if far is None else "both")
        d_rows, d_g = intra_backward(rows, mixed, exact, *(d.clone().to(dtype) for d in cotangents))
        found.append((mixed.A, mixed.inverse, mixed.rows, mixed.k_decayed, d_rows, d_g))
    assert served == {"levels", "one product" if scale < 1 else "both"}
    for got, want in zip(*found, strict=True):
        assert (got - want).norm() <= 2e-6 * want.norm()


@pytest.mark.parametrize("later", [-0.5, -3.0, -100.0, -math.inf])
def test_later_gates_change_no_bit(later):
    """Also where they turn a block, and the blocks and chunks beside it, from one way to the other."""
    case = replace(MIXED, initial_state=False)
    weak = case.arrays()
    before = checking.run_arrays("torch_native", case, "float32", weak)["o"]
    for at in (1, 20, 33, 50, 64, 100, 149):
        g = weak.g.copy()
        g[:, at:] = later
        after = checking.run_arrays("torch_native", case, "float32", weak._replace(g=g))["o"]
        assert np.array_equal(before[:, :at], after[:, :at]) and not np.array_equal(before[:, at:], after[:, at:])


def test_small_gradients_survive_the_reciprocals():
    """Factors inside a block go down to SPAN; cotangents of 1e-18 times that are still numbers."""
    d_o, d_final = MIXED.cotangents()
    assert_within(MIXED, mixed_arrays(), (2.0**-60 * d_o, 2.0**-60 * d_final))


def test_a_spike_keeps_its_small_gradient():
    """Weighted with its gate, as in d_A_log, the gradient of a spike must not carry the rounding errors of those beside it."""
    arrays, cotangents = MIXED.arrays(), MIXED.cotangents()
    g = 0.2 * arrays.g
    g[:, 20::32] = -30.0
    arrays = arrays._replace(g=g.astype(np.float32).astype(np.float64))
    got = checking.run_arrays("torch_native", MIXED, "float32", arrays, cotangents)["g"][:, 20::32]
    want = checking.run_arrays("torch_native", MIXED, "float64", arrays, cotangents)["g"][:, 20::32]
    assert np.abs(want).max() < 1e-10 and np.abs(got - want).max() < 1e-14


def test_the_plain_case_takes_one_product():
    """The case that the timed ones are like: no strong gates, in any block."""
    g = torch.from_numpy(CASES["plain"].arrays().g)[:, :96].flatten(0, 1).transpose(0, 1).reshape(2, 3, 32, -1)
    assert blocks.reach(g) == (False, False) and not blocks.spiked(g)
