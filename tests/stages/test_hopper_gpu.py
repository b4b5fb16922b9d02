"""The bfloat16 kernels on a Hopper GPU: the contract test's cases have other head sizes, so here they are with K = V = 128."""

import dataclasses

import numpy as np
import pytest

from kdakit.cases import CASES, FUSED, Case
from kdakit.cli import checking

torch = pytest.importorskip("torch")

L2NORM = {"use_qk_l2norm_in_kernel": True}
BOUNDED = FUSED | {"lower_bound": -5.0, "safe_gate": True}
# Whole chunks and several of them, which the shared cases are too short for.
LONG = [
    Case("long_" + gate, "several chunks", T=330, gate=gate, keys=keys, beta=beta, options=L2NORM)
    for gate, keys, beta in (
        ("mild", "random", "uniform"),
        ("huge", "random", "uniform"),
        ("resets", "random", "uniform"),
        ("spikes", "random", "one"),
        ("zero", "identical", "one"),
        ("slow", "parallel", "up_to_two"),
        ("strong", "random", "uniform"),
    )
] + [
    Case("long_fused", "grouped heads, two rows", T=515, B=2, HV=4, gate="raw", beta="logits", A_log=True, dt_bias=True, options=BOUNDED),
    Case("long_varlen", "packed: empty, one token, whole chunks and ragged ones", T=523, lengths=(0, 65, 64, 0, 1, 128, 200, 65, 0),
         gate="raw", beta="logits", A_log=True, dt_bias=True, options=BOUNDED),
]  # fmt: skip
ALL = {c.name: dataclasses.replace(c, K=128, V=128) for c in [*CASES.values(), *LONG]}

REASON = checking.refusal("cuda", ALL["plain"], "bfloat16")
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")


@pytest.mark.parametrize("name", ALL)
def test_against_the_recurrence(name):
    rows = checking.check("cuda", ALL[name], "bfloat16", grad=False)
    assert all(r.ok for r in rows), rows


@pytest.mark.parametrize("name", ["long_mild", "long_huge", "long_fused", "gate_bounded"])
def test_prefix_causality_and_determinism(name):
    case = ALL[name]
    arrays = case.arrays("bfloat16")
    want = checking.run_arrays("cuda", case, "bfloat16", arrays)["o"]
    assert np.array_equal(checking.run_arrays("cuda", case, "bfloat16", arrays)["o"], want)
    for t in (17, case.T // 2, case.T - 3):
        changed = [None if x is None else x.copy() for x in arrays]
        for x in changed[:5]:
            x[:, t:] *= 0.5
        got = checking.run_arrays("cuda", case, "bfloat16", type(arrays)(*changed))["o"]
        assert np.array_equal(got[:, :t], want[:, :t]) and not np.array_equal(got, want)


def test_strides_are_honoured():
    """q, k and v as slices of one tensor, as a fused projection leaves them."""
    from kdakit.torch import chunk_kda

    case = ALL["long_fused"]
    x = checking.to_torch(case.arrays("bfloat16"), case.dtypes("bfloat16"), "cuda")
    keys = torch.cat([x.q, x.k], -1)
    options = case.call_options | {"backend": "cuda"}
    parameters = dict(A_log=x.A_log, dt_bias=x.dt_bias, initial_state=x.initial_state)
    want = chunk_kda(*x[:5], **parameters, **options)
    got = chunk_kda(keys[..., :128], keys[..., 128:], *x[2:5], **parameters, **options)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_capture():
    from kdakit.torch import chunk_kda

    case = ALL["long_varlen"]
    x = checking.to_torch(case.arrays("bfloat16"), case.dtypes("bfloat16"), "cuda")
    given = {name: y for name, y in x._asdict().items() if y is not None}

    def call():
        return chunk_kda(**given, **case.call_options, backend="cuda")[0]

    want = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    out.zero_()
    graph.replay()
    assert torch.equal(out, want)
