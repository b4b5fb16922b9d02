"""The bfloat16 forward along blocks of 16 tokens on a Hopper GPU. Without one: test_blocks_emulated.py."""

import dataclasses

import pytest
import test_hopper_gpu
from test_hopper_gpu import ALL, REASON

from kdakit.cases import FUSED, Case
from kdakit.measure import checking
from kdakit.measure.random_problems import draw, numbers

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")


@pytest.fixture
def block(cuda_config):
    """block(n): calls of the backend go from state to state by n tokens."""
    return lambda n: cuda_config(block=n)


@pytest.mark.parametrize("name", ALL)
def test_against_the_recurrence(name, block):
    block(16)
    rows = checking.check("cuda", ALL[name], "bfloat16", grad=False)
    assert all(r.ok for r in rows), rows


@pytest.mark.parametrize("name", ["long_mild", "long_fused"])
def test_causality(name, block):
    block(16)
    test_hopper_gpu.test_prefix_causality_and_determinism(name)


def test_random_problems(block):
    """Of any gate, option, length and packing, as heads of 128."""
    block(16)
    beyond, tried = [], 0
    for number in numbers(173, 160, wanted=lambda d: d.problem().op == "chunk" and 0 < d.B * d.T * d.HV < 3000):
        drawn = draw(number)
        options = {n: x for n, x in drawn.options.items() if n not in ("return_intermediate_states", "disable_recompute")}
        dtypes = dict(dtype="bfloat16", gate_dtype="float32", beta_dtype="bfloat16", state_dtype="float32")
        case = dataclasses.replace(drawn, K=128, V=128, host_lengths=False, options=options, **dtypes)
        tried += checking.refusal("cuda", case, "bfloat16") is None
        if checking.refusal("cuda", case, "bfloat16") is None:
            beyond += [(number, row) for row in checking.check("cuda", case, "bfloat16", grad=False) if not row.ok]
    assert not beyond and tried > 120, (tried, beyond)


@pytest.mark.parametrize("B, T, H", [(1, 2048, 96), (1, 2048, 48), (3, 300, 64), (16, 130, 12)])
@pytest.mark.parametrize("options", [FUSED, FUSED | {"lower_bound": -5.0, "safe_gate": True}], ids=["softplus", "bounded"])
def test_beside_chunks(B, T, H, options, block):
    """Of as many heads as have a block each, or two: which is what the library chooses there, and its results are those of chunks."""
    from kdakit.measure import inputs
    from kdakit.torch import chunk_kda

    case = Case("timed", "", B=B, T=T, H=H, HV=H, K=128, V=128, gate="raw", beta="logits", A_log=True, dt_bias=True, options=options)
    x = inputs.drawn(case, "bfloat16", torch.device("cuda"))
    given = {name: y for name, y in x._asdict().items() if y is not None}
    run = lambda: chunk_kda(**given, **case.call_options, backend="cuda")
    chosen = run()
    block(16)
    blocks = run()
    block(64)
    chunks = run()
    assert all(torch.equal(a, b) for a, b in zip(chosen, blocks, strict=True)) and not torch.equal(chunks[0], blocks[0])
    for a, b in zip(blocks, chunks, strict=True):
        assert float((a.double() - b.double()).norm() / b.double().norm()) < 8e-3  # two results in bfloat16
