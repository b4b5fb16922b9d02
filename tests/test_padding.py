"""Tokens past cu_seqlens[-1] are padding: whatever stands there, their outputs and gradients are zero and nobody else notices them."""

import os
from itertools import product

import fresh
import numpy as np
import pytest

from kdakit import reference

CLOSE = dict(rtol=1e-5, atol=1e-5)  # another T, or no gradient, may be cut otherwise: the same numbers, not the same bits
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FULL = os.environ.get("KDAKIT_FULL") == "1"  # make test-full


def padded_case(seed: int, T: int = 70, group: int = 2):
    """A packed call with garbage past its last sequence, and the same call cut there."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 30, rng.integers(1, 4))
    end, N, H, K, V = int(lengths.sum()), len(lengths), 1, 16, 8
    cu = np.concatenate([[0], lengths.cumsum()]).astype(np.int64)

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    HV = H * group
    whole = dict(q=draw(1, T, H, K), k=draw(1, T, H, K), v=draw(1, T, HV, V), g=draw(1, T, HV, K), beta=draw(1, T, HV))
    for x in whole.values():
        x[:, end:] = rng.choice([np.nan, np.inf, 1e30, -3e38])
    rest = dict(A_log=draw(HV) / 4, dt_bias=draw(HV * K), initial_state=draw(N, HV, K, V), cu_seqlens=cu)
    options = dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True, output_final_state=True)
    return whole, rest, options, end, draw(1, T, HV, V), draw(N, HV, K, V)


def test_the_reference_ignores_padding():
    from kdakit.problem import Arrays, make_options, make_problem

    whole, rest, options, end, d_o, d_final = padded_case(3)
    results = []
    for T in (d_o.shape[1], end):
        arrays = Arrays(**{n: x[:, :T] for n, x in whole.items()}, **rest)
        problem = make_problem("recurrent", arrays, make_options(arrays, **options))
        results.append((reference.forward(problem, arrays), reference.backward(problem, arrays, d_o[:, :T], d_final)))
    (padded, gradients), (cut, expected) = results
    assert not padded.o[:, end:].any() and np.array_equal(padded.o[:, :end], cut.o)
    assert np.array_equal(padded.final_state, cut.final_state)
    for name, d, want in zip(gradients._fields, gradients, expected, strict=True):
        if name in whole:
            assert not d[:, end:].any(), name
            d = d[:, :end]
        assert (d is None and want is None) or np.array_equal(d, want), name


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("backend", ["torch_native", "triton_gpu"])
def test_torch(backend, seed, op):
    import torch

    if backend == "triton_gpu" and not (INTERPRETED or torch.cuda.is_available()):
        pytest.skip("needs a GPU or TRITON_INTERPRET=1: test_in_the_interpreter runs it")
    device = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
    call = getattr(__import__("kdakit.torch", fromlist=[op]), op)
    whole, rest, options, end, d_o, d_final = padded_case(seed)

    def run(T):
        tensors = {n: torch.tensor(x[:, :T], device=device, requires_grad=True) for n, x in whole.items()}
        more = {n: torch.tensor(x, device=device, requires_grad=x.dtype == np.float32) for n, x in rest.items()}
        o, final = call(**tensors, **more, **options, backend=backend)
        with torch.no_grad():  # the path without a gradient is another one
            again, _ = call(**tensors, **more, **options, backend=backend)
        torch.testing.assert_close(again, o, **CLOSE)
        (o * torch.tensor(d_o[:, :T], device=device)).sum().add((final * torch.tensor(d_final, device=device)).sum()).backward()
        return o, final, {n: x.grad for n, x in (tensors | more).items()}

    (o, final, gradients), (o_cut, final_cut, expected) = run(d_o.shape[1]), run(end)
    assert not o[:, end:].any()
    torch.testing.assert_close(o[:, :end], o_cut, **CLOSE)
    torch.testing.assert_close(final, final_cut, **CLOSE)
    for name, d in gradients.items():
        if name in whole:
            assert not d[:, end:].any(), name
            d = d[:, :end]
        if d is not None:
            torch.testing.assert_close(d, expected[name], **CLOSE, msg=name)


CALLS = ("chunk_kda", "fused_recurrent_kda")
JAX = list(product(range(3), CALLS)) if FULL else [(0, "chunk_kda"), (1, "fused_recurrent_kda")]  # every length is a program to compile


@pytest.mark.parametrize("seed, op", JAX)
def test_jax(seed, op):
    jax = pytest.importorskip("jax")
    call = getattr(__import__("kdakit.jax", fromlist=[op]), op)
    whole, rest, options, end, d_o, d_final = padded_case(seed)
    cu = rest.pop("cu_seqlens")

    def run(T):
        def loss(given):
            o, final = call(**given, cu_seqlens=cu, **options, backend="xla")
            return (o * d_o[:, :T]).sum() + (final * d_final).sum(), (o, final)

        given = {n: x[:, :T] for n, x in whole.items()} | rest
        return jax.jit(jax.value_and_grad(loss, has_aux=True))(jax.tree.map(jax.numpy.asarray, given))

    ((_, (o, final)), gradients), ((_, (o_cut, final_cut)), expected) = run(d_o.shape[1]), run(end)
    assert not np.asarray(o[:, end:]).any()
    np.testing.assert_allclose(o[:, :end], o_cut, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(final, final_cut, rtol=1e-5, atol=1e-5)
    for name, d in gradients.items():
        if name in whole:
            assert not np.asarray(d[:, end:]).any(), name
            d = d[:, :end]
        np.testing.assert_allclose(d, expected[name], rtol=1e-4, atol=1e-4, err_msg=name)


NONSENSE = ([0, 200, 300, -5], [60, 3, 65, 7])


@pytest.mark.parametrize("states", [False, True])
def test_tables_of_frameworks(states):
    """Under jit, one program for all: padding of any length, tables with more rows than sequences, no sequence at all; and tables that
    break the rules, which mean what their offsets clipped to 0 .. T and made ascending do. The TPU interpreter stops at any index outside
    an array; with and without states, and with the gradient, kernels are others."""
    jax = pytest.importorskip("jax")
    import kernel_calls as calls

    from kdakit.jax import chunk_kda

    T = 70
    given = calls.inputs(0, T=T, lengths=(0, 0, 0))
    given = given if states else {n: x for n, x in given.items() if n != "initial_state"}
    options = calls.OPTIONS | {"output_final_state": states}
    d_o, d_final = calls.cotangents(calls.inputs(0, T=T, lengths=(0, 0, 0)))

    def loss(x, cu):
        o, final = chunk_kda(**x, cu_seqlens=cu, **options, backend="pallas_tpu", chunk_size=32)
        return (o * d_o).sum() + (0 if final is None else (final * d_final).sum()), (o, final)

    forward = jax.jit(lambda x, cu: loss(x, cu)[1])
    gradient = jax.jit(jax.grad(loss, has_aux=True))
    floats = {n: x for n, x in given.items() if n != "cu_seqlens"}
    for table in ([0, 11, 11, 40], [0, 32, 64, 64], [0, 0, 0, 0], *NONSENSE) if states else ([0, 11, 11, 40], NONSENSE[0]):
        cu = np.maximum.accumulate(np.clip([0, *table[1:]], 0, T)).astype(np.int32)
        spoiled = {n: x.copy() for n, x in floats.items()}
        for name in ("q", "k", "v", "g", "beta"):
            spoiled[name][:, cu[-1] :] = np.nan
        want = truth_of(floats | {"cu_seqlens": cu}, options, d_o, d_final)
        d, results = gradient(spoiled, np.asarray(table, np.int32))
        for o, final in (results, forward(spoiled, np.asarray(table, np.int32))):
            got = {"o": o} | ({"final_state": final} if states else {})
            calls.close(got, {n: want[n] for n in got}, table)
        calls.close(d, {n: want[n] for n in floats}, table)
        assert not np.asarray(o)[:, cu[-1] :].any() and not any(np.asarray(d[n])[:, cu[-1] :].any() for n in ("q", "k", "v", "g", "beta"))


def truth_of(given, options, d_o, d_final):
    from kdakit.problem import Arrays, make_options, make_problem

    arrays = Arrays(**{n: x if n == "cu_seqlens" else x.astype(np.float64) for n, x in given.items()})
    problem = make_problem("recurrent", arrays, make_options(arrays, **options), needs_grad=True)
    found = reference.forward(problem, arrays)
    d_final = None if found.final_state is None else d_final.astype(np.float64)
    gradients = reference.backward(problem, arrays, d_o.astype(np.float64), d_final)
    named = {"o": found.o} | ({} if found.final_state is None else {"final_state": found.final_state})
    return named | {n: getattr(gradients, n) for n in given if n != "cu_seqlens"}


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter already")
def test_in_the_interpreter():
    words = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, "-k", "test_torch and triton_gpu-1-chunk")
    run = fresh.run(*words, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert run.returncode == 0, run.stdout[-3000:]
    assert "skipped" not in run.stdout
