"""A forward that leaves its records to its backward (`borrowed.records`), on a Hopper GPU. Without one: test_records_emulated.py."""

import dataclasses
from functools import partial

import pytest

from kdakit.cases import FUSED, Case
from kdakit.measure import checking
from kdakit.measure.random_problems import draw, numbers

torch = pytest.importorskip("torch")

KEEPING = {"disable_recompute": True, "output_final_state": False, "chunk_size": 64}
BOUNDED = FUSED | KEEPING | {"lower_bound": -5.0, "safe_gate": True}
NORMED = KEEPING | {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
SIZES = dict(K=128, V=128, beta="logits", initial_state=False)
RAW = dict(gate="raw", A_log=True, dt_bias=True)
CASES = [
    Case("bounded", "several chunks, two rows, grouped heads", B=2, T=330, H=2, HV=4, options=BOUNDED, **RAW, **SIZES),
    Case("softplus", "packed: empty, one token, whole chunks and ragged ones", T=523, lengths=(0, 65, 64, 0, 1, 128, 200, 65, 0), H=2, HV=2,
         options=FUSED | KEEPING, **RAW, **SIZES),
    Case("given", "any gate, doubled strengths", T=200, H=2, HV=2, gate="huge", options=NORMED | {"allow_neg_eigval": True}, **SIZES),
    Case("stacks", "log-decays and betas given, some of these 0", T=330, H=2, HV=2, gate="huge", options=KEEPING,
         **SIZES | dict(beta="some_zero")),
    Case("alike", "identical keys, slow gates", T=330, H=2, HV=2, gate="slow", keys="identical", options=NORMED, **SIZES),
]  # fmt: skip

REASON = checking.refusal("cuda", dataclasses.replace(CASES[0], initial_state=True), "bfloat16")
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")


@pytest.fixture
def calls(monkeypatch):
    """Calls keep records; the list of those that the library gets."""
    from kdakit import torch_operators
    from kdakit.backends.cuda import library
    from kdakit.backends.triton_gpu import borrowed, config

    monkeypatch.setenv(borrowed.VARIABLES["forward"], "1")
    monkeypatch.setattr(config, "UNCHECKED", True)
    calls: list[str] = []
    for name in ("prefill", "reverse", "gradient"):
        run = getattr(library, name)

        def seen(args, *rest, name=name, run=run):
            calls.append(f"{name} of records" if name != "gradient" and args.record else name)
            return run(args, *rest)

        monkeypatch.setattr(library, name, seen)
    torch_operators._plans.clear()
    yield calls
    torch_operators._plans.clear()


STAGES = ["prefill of records", "reverse of records", "gradient"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_the_recurrence(calls, case):
    rows = checking.check("triton_gpu", case, "bfloat16")
    assert calls == STAGES and all(row.ok for row in rows), rows


def trained(drawn):
    """A call of chunks in bfloat16 with gradients, not too large for the truth."""
    problem = drawn.problem("bfloat16", needs_grad=True)
    return problem.dtype == "bfloat16" and problem.op == "chunk" and problem.needs_grad and 0 < drawn.B * drawn.T * drawn.HV < 2000


def test_random_problems(calls):
    """Of any gate, length and packing, as heads of 128 that keep records."""
    beyond, taken = [], 0
    for number in numbers(171, 120, wanted=trained):
        drawn = draw(number)
        options = {n: x for n, x in drawn.options.items() if n != "return_intermediate_states"} | NORMED
        case = dataclasses.replace(drawn, options=options, host_lengths=False, **SIZES)
        rows = checking.check("triton_gpu", case, "bfloat16")
        taken += calls == STAGES  # not gates in float16, nor chunks of 32
        beyond += [(number, row) for row in rows if not row.ok]
        calls.clear()
    assert not beyond and taken > 80, (taken, beyond)


def gradients(case, x, wrapped=lambda call: call):
    """o and the gradients of everything, on the GPU."""
    from kdakit.torch import chunk_kda

    given = {name: y.detach().requires_grad_(y.is_floating_point()) for name, y in x._asdict().items() if y is not None}
    o = wrapped(lambda given: chunk_kda(**given, **case.call_options, backend="triton_gpu")[0])(given)
    inputs = {name: y for name, y in given.items() if y.requires_grad}
    d_o = torch.randn(o.shape, device=o.device, generator=torch.Generator(o.device).manual_seed(1)).to(o.dtype)
    return {"o": o.detach()} | dict(zip(inputs, torch.autograd.grad(o, list(inputs.values()), d_o), strict=True))


@pytest.mark.parametrize("T, H", [(8192, 96), (8192, 40), (8192, 32), (8192, 24), (4096, 8), (16384, 2)])
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_beside_the_kernels_that_make_everything_again(calls, monkeypatch, T, H, gate):
    """As many heads as have a block, two blocks, two parts or many; the same bits twice."""
    from kdakit import torch_operators
    from kdakit.backends.triton_gpu import borrowed
    from kdakit.measure import inputs

    options = BOUNDED if gate == "bounded" else FUSED | KEEPING
    case = Case("timed", "", T=T, H=H, HV=H, options=options, **RAW, **SIZES)
    x = inputs.drawn(case, "bfloat16", torch.device("cuda"))
    found, again = gradients(case, x), gradients(case, x)
    assert calls[:3] == STAGES and all(torch.equal(y, again[name]) for name, y in found.items())
    monkeypatch.setenv(borrowed.VARIABLES["forward"], "0")
    torch_operators._plans.clear()
    calls.clear()
    usual = gradients(dataclasses.replace(case, options=options | {"disable_recompute": False}), x)
    assert STAGES[0] not in calls
    for name, y in found.items():
        difference = float((y.double() - usual[name].double()).norm() / usual[name].double().norm())
        assert difference < 6e-3, (name, difference)  # what two results in bfloat16 differ by


def test_compiled(calls):
    """What a compiled forward is said to keep is what it keeps."""
    case = dataclasses.replace(CASES[0], B=1, T=700, H=32, HV=32)
    x = checking.to_torch(case.arrays("bfloat16"), case.dtypes("bfloat16"), "cuda")
    want = gradients(case, x)
    assert calls == STAGES
    found = gradients(case, x, partial(torch.compile, fullgraph=True))
    assert calls == 2 * STAGES and all(torch.equal(y, want[name]) for name, y in found.items())


def test_capture(calls):
    case = dataclasses.replace(CASES[0], B=1, T=2048, H=8, HV=8)
    x = checking.to_torch(case.arrays("bfloat16"), case.dtypes("bfloat16"), "cuda")
    want = gradients(case, x)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients(case, x)
    torch.cuda.current_stream().wait_stream(stream)
    from kdakit.torch import chunk_kda

    given = {name: y.detach().requires_grad_(y.is_floating_point()) for name, y in x._asdict().items() if y is not None}
    d_o = torch.randn(want["o"].shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    leaves = {name: y for name, y in given.items() if y.requires_grad}
    with torch.cuda.graph(graph):
        o, _ = chunk_kda(**given, **case.call_options, backend="triton_gpu")
        found = torch.autograd.grad(o, list(leaves.values()), d_o)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(o, want["o"]) and all(torch.equal(y, want[name]) for name, y in zip(leaves, found, strict=True))
