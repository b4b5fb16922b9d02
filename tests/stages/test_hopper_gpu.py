"""The bfloat16 kernels on a Hopper GPU: the contract test's cases have other head sizes, so here they are with K = V = 128."""

import dataclasses

import c_programs
import numpy as np
import pytest

from kdakit.cases import CASES, FUSED, SHAPES, Case
from kdakit.measure import checking
from kdakit.rounding import round_to

torch = pytest.importorskip("torch")

L2NORM = {"use_qk_l2norm_in_kernel": True}
BOUNDED = FUSED | {"lower_bound": -5.0, "safe_gate": True}
MANY = tuple(i * i % 11 for i in range(75))
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
    Case("long_many", "more packed sequences than a warp looks at together", T=sum(MANY), lengths=MANY, options=L2NORM),
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


@pytest.fixture
def in_parts(cuda_config):
    """in_parts(n): calls of the backend scan sequences in n parts."""
    return lambda n: cuda_config(parts=n)


@pytest.mark.parametrize("parts", [2, 3, 5, 9])
@pytest.mark.parametrize("name", [*(c.name for c in LONG), "no_state", "v_first", "no_tokens", "gate_bounded", "softplus_huge"])
def test_parts_against_the_recurrence(name, parts, in_parts):
    """Parts of one chunk and of several, empty ones too; states that are forgotten, kept and reflected."""
    in_parts(parts)
    rows = checking.check("cuda", ALL[name], "bfloat16", grad=False)
    assert all(r.ok for r in rows), rows


@pytest.mark.parametrize("parts", [2, 3, 4, 8])
def test_parts_forget_only_what_is_forgotten(parts, in_parts):
    """Heads of one call forget at once, slowly, not at all, only up to a part's end, or but for one channel; and beta reaches 2."""
    case = Case("mixed", "regimes", T=1100, H=6, HV=6, K=128, V=128, beta="up_to_two", options=L2NORM)
    arrays = case.arrays("bfloat16")
    g = arrays.g.copy()
    g[:, :, 0], g[:, :, 1], g[:, :, 2] = -3.0, -1e-3, 0.0
    g[:, :, 3], g[:, 512:, 3] = -1e-3, -3.0
    g[:, :, 4], g[:, 512:, 4] = -3.0, -1e-3
    g[:, :, 5], g[:, :, 5, 17] = -3.0, -1e-4
    arrays = arrays._replace(g=round_to(g, "float32"))
    in_parts(parts)
    got = checking.run_arrays("cuda", case, "bfloat16", arrays)
    rows = checking.compare(case.problem("bfloat16"), arrays, got, operand_dtype="bfloat16")
    assert all(r.ok for r in rows), rows
    in_parts(1)
    whole = checking.run_arrays("cuda", case, "bfloat16", arrays)
    truth = checking.expect(case.problem("bfloat16"), arrays).truth
    for head in range(6):
        for name in ("o", "final_state"):
            x, y, z = (r[name][:, :, head] if name == "o" else r[name][:, head] for r in (got, whole, truth))
            assert np.linalg.norm(x - z) < 1.5 * np.linalg.norm(y - z) + 1e-6 * np.linalg.norm(z), (head, name)


def test_parts_are_causal_and_repeatable(in_parts):
    in_parts(2)
    test_prefix_causality_and_determinism("long_huge")
    in_parts(4)
    test_prefix_causality_and_determinism("long_mild")
    test_prefix_causality_and_determinism("long_fused")


def tensors(case):
    return checking.to_torch(case.arrays("bfloat16"), case.dtypes("bfloat16"), "cuda")


def call(case, x):
    """The public call."""
    from kdakit.torch import chunk_kda

    given = {name: y for name, y in x._asdict().items() if y is not None}
    return chunk_kda(**given, **case.call_options, backend="cuda")


def equal(got, want):
    return all(a is None or torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_strides_are_honoured():
    """q and k as slices of one tensor, as a fused projection leaves them."""
    case = ALL["long_fused"]
    x = tensors(case)
    keys = torch.cat([x.q, x.k], -1)
    assert equal(call(case, x._replace(q=keys[..., :128], k=keys[..., 128:])), call(case, x))


@pytest.mark.parametrize("name", ["long_fused", "long_varlen", "long_huge", "varlen_many", "one_token", "v_first", "softplus"])
def test_memory_around_the_tensors_is_left_alone(name):
    """NaN before and after every input, and in the memory that outputs and workspace will get."""
    case = ALL[name]
    x = tensors(case)
    want = call(case, x)

    def pool_of(y):
        return None if y is None or not y.is_floating_point() else y.new_full((y.numel() + 512,), float("nan"))

    pools = [pool_of(y) for y in x]
    inside = [y if pool is None else pool[256:-256].view(y.shape).copy_(y) for y, pool in zip(x, pools, strict=True)]
    torch.cuda.empty_cache()
    dirty = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 12, 1 << 18, 1 << 22, 1 << 24)]
    del dirty
    assert equal(call(case, type(x)(*inside)), want)
    for y, z, pool in zip(x, inside, pools, strict=True):
        if pool is not None:
            assert pool[:256].isnan().all() and pool[-256:].isnan().all() and torch.equal(y, z)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_padding_is_zero(dtype):
    """Tokens past the last sequence: NaN goes in, zeros come out, in memory that held NaN, and the others do not notice."""
    case = ALL["long_varlen"]
    x = checking.to_torch(case.arrays(dtype), case.dtypes(dtype), "cuda")
    end, N = int(x.cu_seqlens[5]), 5
    short = x._replace(initial_state=x.initial_state[:N], cu_seqlens=x.cu_seqlens[: N + 1])
    cut = short._replace(**{n: getattr(x, n)[:, :end] for n in ("q", "k", "v", "g", "beta")})
    padded = short._replace(**{n: getattr(x, n).clone() for n in ("q", "k", "v", "g", "beta")})
    for y in padded[:5]:
        y[:, end:] = float("nan")
    want, dirty = call(case, cut), torch.full((1 << 22,), float("nan"), device="cuda")
    del dirty
    o, final = call(case, padded)
    assert not o[:, end:].any() and torch.equal(o[:, :end], want[0]) and torch.equal(final, want[1])


def test_two_streams():
    """Calls that run at the same time have nothing in common."""
    cases = [dataclasses.replace(SHAPES["h16"], T=2048 + 64 * i, H=24).case(bounded=i % 2 == 0) for i in range(2)]
    inputs = [tensors(c) for c in cases]
    want = [call(c, x) for c, x in zip(cases, inputs, strict=True)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    results = [[], []]
    for _ in range(10):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[i].append(call(cases[i], inputs[i]))
    torch.cuda.synchronize()
    assert all(equal(got, want[i]) for i in range(2) for got in results[i])


@pytest.mark.parametrize("name", ["long_varlen", "long_fused", "long_mild"])
def test_capture(name):
    case = ALL[name]
    x = tensors(case)
    want = call(case, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(case, x)
    for _ in range(3):
        for y in out:
            y.zero_()
        graph.replay()
        assert equal(out, want)


@pytest.mark.parametrize("name", ["long_fused", "long_mild"])
def test_compile(name):
    from kdakit.torch import chunk_kda

    case = ALL[name]
    x = tensors(case)
    options = case.call_options | dict(A_log=x.A_log, dt_bias=x.dt_bias, initial_state=x.initial_state, backend="cuda")

    def double(q, k, v, g, beta):
        o, final = chunk_kda(q, k, v * 2, g, beta, **options)
        return o + 1, final

    assert equal(torch.compile(double, fullgraph=True)(*x[:5]), double(*x[:5]))


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return c_programs.link("prefill_bf16_test", tmp_path_factory.mktemp("native"))


def test_c_program(program):
    done = c_programs.run(program)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("tool", c_programs.TOOLS)
def test_sanitizer(program, tool):
    done = c_programs.run(program, *(["unset"] if tool == "initcheck" else []), tool=tool)
    assert done.returncode == 0 and "SUMMARY" in done.stdout, done.stdout[-3000:] + done.stderr


def test_jax_gives_the_same_bits():
    pytest.importorskip("jax")
    for name in ("long_fused", "long_varlen", "long_huge", "v_first"):
        reason = checking.refusal("cuda_ffi", ALL[name], "bfloat16")
        if reason:
            pytest.skip(reason)
        ours, theirs = (checking.run_case(backend, ALL[name], "bfloat16", grad=False) for backend in ("cuda", "cuda_ffi"))
        assert all(np.array_equal(ours[n], theirs[n]) for n in ours), name
    rows = checking.check("cuda_ffi", ALL["long_fused"], "bfloat16")
    assert all(r.ok for r in rows), rows
