"""What is particular to JAX: stages, transformations, sharding, tracing. Accuracy against the reference is test_contract's business."""

import os
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from kdakit import chunked, reference  # noqa: E402
from kdakit.backends import xla  # noqa: E402
from kdakit.cases import CASES, SEGMENT_CASES, Case  # noqa: E402
from kdakit.jax import (  # noqa: E402
    chunk_kda,
    fused_recurrent_kda,
    kda_gate,
    kda_gate_chunk_cumsum,
    naive_chunk_kda,
    naive_recurrent_kda,
)
from kdakit.measure import checking  # noqa: E402
from kdakit.problem import Arrays  # noqa: E402


def inputs(case: Case, dtype="float32", seed=0) -> dict:
    """Keyword arguments of the public call."""
    arrays, dtypes = case.arrays(dtype, seed), case.dtypes(dtype)
    kinds = {"int64": "int32"}
    return {n: jnp.asarray(x).astype(kinds.get(d, d)) for n, x, d in zip(arrays._fields, arrays, dtypes, strict=True) if x is not None}


def loss(function, **options):
    """A function of the arrays that both outputs enter."""

    def value(arrays):
        o, final = function(**arrays, **options)
        return (o * jnp.cos(jnp.arange(o.size).reshape(o.shape))).sum() + (0 if final is None else (final**2).sum())

    return value


def close(got, want, tolerance=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        assert np.linalg.norm(a - b) <= tolerance * max(np.linalg.norm(b), 1e-30)


def same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


SMALL = Case("small", "two chunks of 32 and a bit", B=2, T=70, H=1, HV=2, K=16, V=8)


# The stages, in float64, so that equal means equal.


@pytest.fixture
def chunk():
    """q, k, v, g, beta of one batch of chunks: mild and huge gates, a reset."""
    rng = np.random.default_rng(0)
    C, K, V = 32, 8, 6
    q, k = rng.normal(size=(2, 3, 2, C, K)) / np.sqrt(K)
    g = -np.exp(rng.uniform(np.log(1e-3), np.log(300), size=(3, 2, C, K)))
    g[0] = -rng.uniform(size=g[0].shape)
    return q, k, rng.normal(size=(3, 2, C, V)), g, rng.uniform(size=(3, 2, C))


def test_intra_is_that_of_the_chunk_form(chunk):
    for with_resets in (False, True):
        q, k, v, g, beta = chunk
        if with_resets:
            g = g.copy()
            g[:, :, [5, 16, 20]] = -np.inf
        want = chunked.intra(q, k, v, g, beta)
        with jax.enable_x64(True):
            got = jax.jit(xla.intra_forward)(*map(jnp.asarray, (q, k, v, g, beta)))
        assert got._fields == want._fields
        for name in got._fields:
            np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-12, atol=1e-13, err_msg=name)


def test_state_and_output_are_those_of_the_chunk_form(chunk):
    x = chunked.intra(*chunk)
    start = np.random.default_rng(1).normal(size=(2, 8, 6))
    with jax.enable_x64(True):
        w, u, k_decayed, decay = (jnp.asarray(a)[:, None] for a in (x.w, x.u, x.k_decayed, x.decay))
        states, v_new, _, last = jax.jit(xla.state_forward)(w, u, k_decayed, decay, jnp.asarray(start)[None])
        o = xla.output_forward(x.q_decayed[:, None], x.A_qk[:, None], states, v_new)
    state = start
    for n in range(3):
        np.testing.assert_allclose(states[n, 0], state, rtol=1e-12, atol=1e-13)
        state, v_new_n, o_n = chunked.chunk_step(state, chunked.Intra(*(a[n] for a in x)))
        np.testing.assert_allclose(v_new[n, 0], v_new_n, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(o[n, 0], o_n, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(last[0], state, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("g", ["weak", "strong", "both"])
def test_pairs_inside_a_block_near_its_start_and_far_from_it(chunk, g):
    """Quotients of running products, the levels, and both in one block: the same numbers."""
    q, k, _, _, beta = chunk
    gates = {"weak": -np.random.default_rng(1).uniform(0, 3.9, size=q.shape)}
    gates["strong"] = 10 * gates["weak"]
    gates["both"] = np.where(np.random.default_rng(2).uniform(size=q.shape) < 0.05, -70, gates["weak"])
    with jax.enable_x64(True):
        q, k, g, k_beta = map(jnp.asarray, (q, k, gates[g], beta[..., None] * k))
        found, wanted = jax.jit(xla.pair_products)(q, k_beta, k, xla.block_decays(g)), plain_pairs(q, k_beta, k, g)
        sizes = plain_pairs(*map(jnp.abs, (q, k_beta, k)), g)  # of far pairs too, whose products no fixed bound would look at
        for got, want, size in zip(found, wanted, sizes, strict=True):
            assert (jnp.abs(got - want) <= 1e-12 * size + 1e-300).all()


def test_strong_gates_change_no_earlier_bit():
    """They send a block from quotients to levels, but only the rows after them."""
    arrays = inputs(Case("weak", "", T=64, gate="slow"))
    call = jax.jit(partial(chunk_kda, chunk_size=32))
    before = call(**arrays)[0]
    for t, strength in ((41, -9.0), (41, -3000.0), (47, -np.inf), (40, -70.0)):
        after = call(**arrays | {"g": arrays["g"].at[:, t, :, ::3].set(strength)})[0]
        same(before[:, :t], after[:, :t])
        assert not np.array_equal(before[:, t:], after[:, t:])


def draws(tree, seed=2):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), tree)


def plain_pairs(q, k_beta, k, g):
    """A_qk and A_kk as they are written down."""
    i, j = np.indices((g.shape[-2],) * 2)
    gates = jnp.where((i > j)[..., None], g[..., :, None, :], 0)  # at (m, j): the gates after j
    decays = jnp.exp(jnp.where((i >= j)[..., None], jnp.cumsum(gates, -3), -jnp.inf))
    A_qk, A_kk = (jnp.einsum("...ik,...jk,...ijk->...ij", x, k, decays) for x in (q, k_beta))
    return A_qk, jnp.tril(A_kk, -1)


def plain_intra(q, k, v, g, beta):
    """`xla.intra_forward` as it is written down."""
    k_beta = beta[..., None] * k
    A_qk, A_kk = plain_pairs(q, k_beta, k, g)
    inverse, g_cum = xla.unit_lower_inverse(A_kk), jnp.cumsum(g, -2)
    w, u = xla.wy(inverse, k_beta * jnp.exp(g_cum), beta[..., None] * v)
    to_end = jnp.cumsum(jnp.concatenate([g[..., 1:, :], jnp.zeros_like(g[..., :1, :])], -2)[..., ::-1, :], -2)[..., ::-1, :]
    return xla.Intra(g_cum, A_qk, A_kk, inverse, w, u, q * jnp.exp(g_cum), k * jnp.exp(to_end), jnp.exp(g_cum[..., -1, :]))


@jax.jit
def all_backwards(q, k, v, g, beta):
    """{stage: (its backward, the transpose that JAX derives)}."""
    pairs = {}
    k_beta = beta[..., None] * k
    logarithms = lambda g: jax.tree.map(jnp.log, xla.block_decays(g))._replace(g=g)
    logs, transpose = jax.vjp(logarithms, g / 300)  # mild, so that no decay is zero
    d = draws(logs)
    pairs["block_decays"] = (xla.block_decays_backward(d),), transpose(d)

    decays = xla.block_decays(g)
    (A_qk, A_kk), transpose = jax.vjp(plain_pairs, q, k_beta, k, g)
    d_A_qk, d_A_kk = draws((A_qk, A_kk))
    d_A = jnp.tril(d_A_qk), jnp.tril(d_A_kk, -1)
    d_q, d_k_beta, d_k, d_logs = xla.pair_products_backward(q, k_beta, k, decays, *d_A)
    d_g = xla.block_decays_backward(d_logs._replace(from_start=jnp.zeros_like(g), to_end=jnp.zeros_like(g)))
    pairs["pair_products"] = (d_q, d_k_beta, d_k, d_g), transpose(d_A)

    inverse = xla.unit_lower_inverse(A_kk)
    through = lambda A_kk, a, b: xla.wy(xla.unit_lower_inverse(A_kk), a, b)
    (w, u), transpose = jax.vjp(through, A_kk, k_beta, v)
    d_w, d_u = draws((w, u))
    d_A_kk, *rest = transpose((d_w, d_u))
    pairs["wy"] = xla.wy_backward(inverse, w, u, d_w, d_u), (jnp.tril(d_A_kk, -1), *rest)

    x, transpose = jax.vjp(plain_intra, q, k, v, g, beta)
    d = jax.tree.map(jnp.zeros_like, x)._replace(**{n: y for n, y in draws(x)._asdict().items() if n not in ("g_cum", "A_kk", "inverse")})
    d = d._replace(A_qk=jnp.tril(d.A_qk))
    pairs["intra"] = xla.intra_backward(q, k, v, g, beta, x, d), transpose(d)

    w, u, k_decayed, decay, q_decayed, A_qk = (a[:, None] for a in (x.w, x.u, x.k_decayed, x.decay, x.q_decayed, x.A_qk))
    start = jnp.ones((1, g.shape[1], k.shape[-1], v.shape[-1]))
    (states, v_new, _, last), transpose = jax.vjp(xla.state_forward, w, u, k_decayed, decay, start)
    d_states, d_v_new, d_last = draws((states, v_new, last))
    *got, _, d_start = xla.state_backward(w, k_decayed, decay, states, v_new, d_states, d_v_new, d_last)
    pairs["state"] = (*got, d_start), transpose((d_states, d_v_new, None, d_last))

    system = x.inverse[:, None]
    solving = lambda w, u, k_decayed, decay, start: xla.state_forward(w, u, k_decayed, decay, start, inverse=system)
    (states, v_new, _, last), transpose = jax.vjp(solving, w, u, k_decayed, decay, start)
    *got, _, d_start = xla.state_backward(w, k_decayed, decay, states, v_new, d_states, d_v_new, d_last, inverse=system)
    pairs["state, solving"] = (*got, d_start), transpose((d_states, d_v_new, None, d_last))

    o, transpose = jax.vjp(xla.output_forward, q_decayed, A_qk, states, v_new)
    d_o = draws(o)
    d_q_decayed, d_A_qk, d_states, d_v_new = transpose(d_o)
    pairs["output"] = xla.output_backward(q_decayed, A_qk, states, v_new, d_o), (d_q_decayed, jnp.tril(d_A_qk), d_states, d_v_new)
    return pairs


def test_backward_of_each_stage_is_its_transpose(chunk):
    with jax.enable_x64(True):
        pairs = all_backwards(*map(jnp.asarray, chunk))
    for name, (got, want) in pairs.items():
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("name", ["softplus", "lower_bound_bare", "grouped"])
def test_backward_of_the_activations_is_their_transpose(name):
    case = CASES[name]
    with jax.enable_x64(True):
        arrays = Arrays(*(None if x is None else jnp.asarray(x) for x in case.arrays("float64")[:7]))
        problem = case.problem("float64")
        out, transpose = jax.vjp(lambda a: xla.activate(problem, a), arrays)
        d = draws(out)
        got, (want,) = xla.activate_backward(problem, arrays, d), transpose(d)
        for a, b in zip(got[:7], want[:7], strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                np.testing.assert_allclose(a.reshape(b.shape), b, rtol=1e-9, atol=1e-12)


def test_a_saturated_gate_keeps_its_gradient():
    """sigmoid(-88.5) is 4e-39, which XLA takes for 0; times exp(A_log), the bound and d_g it is a gradient of 5e-36."""
    case = Case(
        "saturated", "", B=1, T=1, H=1, HV=1, K=1, V=1, gate="raw", A_log=True, options={"use_gate_in_kernel": True, "lower_bound": -5.0}
    )
    one = jnp.ones((1, 1, 1, 1))
    arrays = Arrays(one, one, one, -5.9 * one, one[..., 0], jnp.log(jnp.full(1, 15.0)))
    d = xla.activate_backward(case.problem("float32"), arrays, xla.Activated(one, one, one, 17 * one, one[..., 0]))
    argument = np.exp(np.float64(arrays.A_log[0])) * np.float64(arrays.g[0, 0, 0, 0])
    want = -5 * 15 * 17 * np.exp(argument)
    assert abs(np.float64(d.g[0, 0, 0, 0]) - want) < 1e-4 * abs(want)
    assert abs(np.float64(d.A_log[0]) + 5.9 * want) < 1e-4 * abs(5.9 * want)


def test_what_a_key_of_one_overwrites_has_no_gradient():
    """A head of one channel, strengths of 1: exactly zero, for a relative error knows no small number beside it."""
    case = Case("overwritten", "", T=5, H=1, HV=2, K=1, V=7, keys="identical", beta="one")
    arrays = case.arrays("float32")
    arrays = arrays._replace(k=np.sign(arrays.k))
    found = checking.run_arrays("xla", case, "float32", arrays, case.cotangents("float32"))
    assert not found["initial_state"].any() and not found["g"].any()
    for varied in (case, replace(case, beta="uniform", T=70, B=2), replace(case, beta="up_to_two", T=30, lengths=(7, 0, 1, 22))):
        arrays, cotangents = varied.arrays("float32"), varied.cotangents("float32")
        rows = checking.compare(varied.problem(), arrays, checking.run_arrays("xla", varied, "float32", arrays, cotangents), cotangents)
        assert all(row.ok for row in rows), [row for row in rows if not row.ok]


# Transformations.


@pytest.mark.parametrize("case", [SMALL, Case("packed", "", T=90, K=16, V=8, lengths=(30, 0, 41, 19))], ids=lambda case: case.name)
def test_windows_of_one_chunk_and_of_many(case, monkeypatch):
    """Of one: states and v_new are always saved. Of many: the backward repeats the scan over states."""
    arrays = inputs(case)
    whole = {n: arrays.pop(n) for n in ("cu_seqlens",) if n in arrays}

    def gradients(window, **options):
        monkeypatch.setattr(xla, "default_config", lambda problem, device: xla.Config(window))
        return jax.jit(jax.value_and_grad(loss(partial(chunk_kda, **whole), output_final_state=True, chunk_size=16, **options)))(arrays)

    many, one = gradients(4), gradients(1)
    close(one, many)
    if case is SMALL or os.environ.get("KDAKIT_FULL") == "1":  # packed or not, the same is saved
        same(gradients(1, disable_recompute=True), one)


def test_jit_value_and_grad_and_recompute():
    """One compiled program and many give the same; the gradient comes with the same value; keeping intermediates changes no bit."""
    arrays = inputs(SMALL)
    options = dict(output_final_state=True, chunk_size=32)
    value, gradient = jax.jit(jax.value_and_grad(loss(chunk_kda, **options)))(arrays)
    close(value, loss(naive_recurrent_kda, output_final_state=True)(arrays))
    close(gradient, jax.jit(jax.grad(loss(naive_recurrent_kda, output_final_state=True)))(arrays))
    same(jax.jit(jax.grad(loss(chunk_kda, disable_recompute=True, **options)))(arrays), gradient)
    close(jax.jit(jax.grad(loss(fused_recurrent_kda, output_final_state=True)))(arrays), gradient)


def test_second_derivatives():
    """Reverse over reverse. Gates so strong that their products leave float64: what no sum takes of them must not spoil it."""
    arrays = inputs(Case("twice", "", B=1, T=16, H=1, HV=1, K=4, V=2, gate="slow", initial_state=False))
    arrays["g"] = arrays["g"] - jnp.where(jnp.arange(16) % 5 == 4, 900.0, 0)[None, :, None, None]

    def twice(function, arrays):
        value = lambda kept: (jnp.cos(function(**arrays | kept)[0]) ** 2).sum()
        return jax.grad(lambda kept: sum((x * jnp.cos(x)).sum() for x in jax.grad(value)(kept).values()))({n: arrays[n] for n in "kg"})

    close(*(jax.jit(partial(twice, function))(arrays) for function in (chunk_kda, naive_recurrent_kda)), 1e-4)


def test_naive_chunk_is_differentiable_at_any_length():
    arrays = inputs(Case("naive", "", B=1, T=21, K=8, V=4))
    options = dict(output_final_state=True)
    got = jax.jit(jax.value_and_grad(loss(naive_chunk_kda, chunk_size=8, **options)))(arrays)
    close(got, jax.jit(jax.value_and_grad(loss(naive_recurrent_kda, **options)))(arrays))


def test_checkpoint():
    arrays = inputs(SMALL)
    f = loss(chunk_kda, output_final_state=True, chunk_size=32, disable_recompute=True)
    want = jax.jit(jax.grad(f))(arrays)
    close(jax.jit(jax.grad(jax.checkpoint(f)))(arrays), want, 1e-6)
    policy = jax.checkpoint_policies.save_only_these_names("kda_A_qk", "kda_inverse")
    close(jax.jit(jax.grad(jax.checkpoint(f, policy=policy)))(arrays), want, 1e-6)


def test_vmap():
    case = Case("mapped", "", B=1, T=40, K=16, V=8, lengths=(7, 33))
    rows = [inputs(case, seed=s) for s in range(3)]
    cu = [jnp.array(x, jnp.int32) for x in ([0, 7, 40], [0, 40, 40], [0, 20, 40])]
    f = lambda arrays, cu: chunk_kda(**arrays, cu_seqlens=cu, output_final_state=True, chunk_size=16)
    g = jax.grad(lambda arrays, cu: sum((x**2).sum() for x in f(arrays, cu)))
    rows = [{n: x for n, x in r.items() if n != "cu_seqlens"} for r in rows]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *rows)
    for function in (f, g):
        want = jax.tree.map(lambda *x: jnp.stack(x), *map(jax.jit(function), rows, cu))
        close(jax.jit(jax.vmap(function))(stacked, jnp.stack(cu)), want, 2e-6)


SHARDED = """
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    from kdakit.cases import Case
    from kdakit.jax import chunk_kda, fused_recurrent_kda

    case = Case("sharded", "", B=4, T=40, H=2, HV=4, K=16, V=8, gate="raw", beta="logits", A_log=True, dt_bias=True,
                options=dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True))
    arrays = {n: jnp.asarray(x, jnp.float32) for n, x in case.arrays()._asdict().items() if x is not None}
    arrays["dt_bias"] = arrays["dt_bias"].reshape(4, 16)
    options = case.call_options | dict(chunk_size=16)
    specs = dict.fromkeys("qkvg", P("data", None, "heads")) | dict(beta=P("data", None, "heads"), A_log=P("heads"), dt_bias=P("heads"),
                                                                   initial_state=P("data", "heads"))
    mesh = jax.make_mesh((4, 2), ("data", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    loss = lambda call: lambda arrays: sum((x**2).sum() for x in call(arrays))
    plain = lambda arrays: chunk_kda(**arrays, **options)
    want = jax.jit(jax.value_and_grad(loss(plain)))(arrays)

    def close(got):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b), (a, b)

    placed = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in arrays.items()}
    compiled = jax.jit(jax.value_and_grad(loss(plain))).lower(placed).compile()
    close(compiled(placed))
    text = compiled.as_text()
    assert "all-gather" not in text and "all-to-all" not in text, "sharded batch and heads need no exchange of activations"
    out = (P("data", None, "heads"), P("data", "heads"))
    close(jax.jit(jax.value_and_grad(loss(jax.shard_map(plain, mesh=mesh, in_specs=(specs,), out_specs=out))))(arrays))
    del options["chunk_size"]
    step = lambda arrays: fused_recurrent_kda(**arrays, **options)
    close(jax.jit(jax.value_and_grad(loss(jax.shard_map(step, mesh=mesh, in_specs=(specs,), out_specs=out))))(arrays))
"""


def test_sharded_batch_and_heads():
    """On 8 host devices: with jit's own partitioning and with shard_map, gradients of replicated parameters included."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(SHARDED)], env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
                         capture_output=True, text=True)  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]


# Tracing.


def equations(jaxpr) -> int:
    """All equations, inner ones included."""
    total = 0
    for equation in jaxpr.eqns:
        total += 1
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            total += equations(inner) if hasattr(inner, "eqns") else 0
    return total


def traced_size(T, chunk_size, N=0) -> int:
    q, v, beta = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, T, 2, 16), (1, T, 2, 8), (1, T, 2)))
    cu = None if not N else jax.ShapeDtypeStruct((N + 1,), jnp.int32)

    def value(q, k, v, g, beta, cu):
        return chunk_kda(q, k, v, g, beta, chunk_size=chunk_size, cu_seqlens=cu)[0].sum()

    return equations(jax.make_jaxpr(jax.grad(value, argnums=(0, 1, 2, 3, 4)))(q, q, v, q, beta, cu).jaxpr)


def test_the_jaxpr_grows_with_nothing():
    size = traced_size(256, 64)
    assert {traced_size(T, C) for T, C in ((256, 128), (1024, 128), (4096, 64), (1 << 20, 64))} == {size}
    assert all(traced_size(256, C) <= size for C in (16, 32))  # they lack pairs of distant blocks
    assert traced_size(250, 64) == traced_size(40000 + 250, 64) < size + 100  # a ragged end costs masks and padding
    packed = traced_size(256, 64, 2)
    assert {traced_size(T, C, N) for T, C, N in ((256, 128, 3), (4096, 64, 300))} == {packed}


def test_long_sequences_compile_quickly():
    q, beta = jax.ShapeDtypeStruct((1, 8192, 4, 128), jnp.float32), jax.ShapeDtypeStruct((1, 8192, 4), jnp.float32)
    f = jax.jit(jax.value_and_grad(lambda q, k, v, g, beta: chunk_kda(q, k, v, g, beta)[0].sum(), argnums=(0, 1, 2, 3, 4)))
    start = time.process_time()  # not the wall clock: other tests share the machine
    compiled = f.lower(q, q, q, q, beta).compile()
    assert time.process_time() - start < 15
    arguments = 4 * 8192 * 4 * 128 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * arguments


# Sequences.


def test_cu_seqlens_may_be_traced_and_sequences_do_not_see_each_other():
    case = Case("packed", "", T=90, K=16, V=8, lengths=(30, 0, 41, 19))
    arrays = inputs(case)
    f = jax.jit(lambda arrays: chunk_kda(**arrays, output_final_state=True, chunk_size=16))
    o, final = f(arrays)
    poison = lambda x: x.at[:, 30:].set(jnp.nan)
    mixed = arrays | {n: poison(arrays[n]) for n in ("q", "k", "v", "g", "beta")}
    o_mixed, final_mixed = f(mixed)
    same((o[:, :30], final[:2]), (o_mixed[:, :30], final_mixed[:2]))
    assert np.isnan(o_mixed[:, 30:]).all()
    arrays["cu_seqlens"] = jnp.array([0, 90, 90, 90, 90], jnp.int32)  # the same program, other lengths
    whole = {n: arrays[n] for n in ("q", "k", "v", "g", "beta")}
    close(f(arrays)[0], naive_recurrent_kda(**whole, initial_state=arrays["initial_state"][:1])[0])
    assert f._cache_size() == 1


def test_segments_are_sequences_without_states_of_their_own():
    case = SEGMENT_CASES["segments"]
    arrays = inputs(case)
    call = jax.jit(partial(chunk_kda, chunk_size=32, output_final_state=True))
    o, final = call(**arrays)
    row = {n: arrays[n][:1] for n in ("q", "k", "v", "g", "beta")}
    cu = np.concatenate([[0], np.cumsum(case.segments[0])]).astype(np.int32)
    states = jnp.zeros((len(cu) - 1, *arrays["initial_state"].shape[1:])).at[0].set(arrays["initial_state"][0])
    o_packed, final_packed = call(**row, cu_seqlens=cu, initial_state=states)
    close((o[:1], final[0]), (o_packed, final_packed[-1]))
    d_g = jax.jit(jax.grad(lambda g: (call(**arrays | {"g": g})[0] ** 2).sum()))(arrays["g"])
    starts = reference.segment_starts(arrays["segment_ids"])
    assert np.isfinite(d_g).all() and (np.asarray(d_g)[starts] == 0).all() and (np.asarray(d_g)[~starts] != 0).any()


@pytest.mark.parametrize("name", ["plain", "v_first", "varlen"])
def test_intermediate_states(name):
    case = CASES[name]
    call = jax.jit(partial(chunk_kda, **case.call_options, return_intermediate_states=True))
    _, _, states = call(**inputs(case))
    want = reference.forward(case.problem().replace(return_intermediate_states=True), case.arrays()).states
    used = want.shape[1]
    close(states[:, :used], want)
    assert states.shape[1] == case.problem().chunks and not np.asarray(states[:, used:]).any()


def test_a_recurrent_state_may_be_half_precision():
    arrays = inputs(CASES["plain"])
    arrays["initial_state"] = arrays["initial_state"].astype(jnp.bfloat16)
    o, final = fused_recurrent_kda(**arrays, output_final_state=True)
    want = naive_recurrent_kda(**arrays, output_final_state=True)
    assert (o.dtype, final.dtype) == (jnp.float32, jnp.float32)
    close(o, want[0])
    close(final, want[1])


# Inputs.


def test_float64_needs_x64():
    arrays = {n: x for n, x in CASES["short"].arrays("float64")._asdict().items() if x is not None}
    if not jax.config.jax_enable_x64:
        with pytest.raises(TypeError, match=r"q is float64.*jax_enable_x64"):
            chunk_kda(**arrays)
    with jax.enable_x64(True):
        o, final = chunk_kda(**arrays, output_final_state=True)
        assert (o.dtype, final.dtype) == (jnp.float64, jnp.float64)
    want = reference.kda(**arrays, output_final_state=True)
    close((o, final), want[:2], 1e-13)


def test_numpy_arrays_are_taken_and_nothing_else():
    arrays = {n: np.asarray(x) for n, x in inputs(CASES["short"]).items()}
    same(chunk_kda(**arrays), chunk_kda(**inputs(CASES["short"])))
    with pytest.raises(TypeError, match="q must be an array, got list"):
        chunk_kda(**arrays | {"q": arrays["q"].tolist()}, scale=1.0)

    class Foreign:
        shape, dtype, ndim = arrays["k"].shape, "float32", 4

    with pytest.raises(TypeError, match="k must be a JAX or NumPy array, got Foreign"):
        chunk_kda(**arrays | {"k": Foreign()})


def test_cu_seqlens_values_are_checked_where_they_can_be_seen():
    arrays = inputs(CASES["varlen"])
    for wrong in ([1, 137], [0, 140, 137], [0, 138]):
        packed = arrays | {"cu_seqlens": jnp.array(wrong, jnp.int32), "initial_state": None}
        with pytest.raises(ValueError, match=r"cu_seqlens must start at 0, never decrease and end at most T = 137"):
            chunk_kda(**packed)
    with pytest.raises(ValueError, match="cu_seqlens_cpu must equal cu_seqlens"):
        chunk_kda(**arrays, cu_seqlens_cpu=np.zeros(len(arrays["cu_seqlens"]), np.int64))


def test_unknown_arguments_and_backends():
    arrays = inputs(CASES["short"])
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'use_gates_in_kernel'; did you mean 'use_gate_in_kernel'"):
        chunk_kda(**arrays, use_gates_in_kernel=True)
    with pytest.raises(ValueError, match="backend must be 'auto' or one of"):
        chunk_kda(**arrays, backend="torch_native")
    same(chunk_kda(**arrays, backend="xla"), chunk_kda(**arrays))


def test_strict_dtype_promotion():
    """Users of jax_numpy_dtype_promotion='strict' trace calls and their gradients as everybody does."""
    arrays = inputs(Case("strict", "", T=20, H=1, K=8, V=4, segments=((9, 11),)))
    ids = arrays.pop("segment_ids")
    with jax.numpy_dtype_promotion("strict"):
        found = jax.eval_shape(jax.grad(loss(partial(chunk_kda, segment_ids=ids), output_final_state=True)), arrays)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(lambda x: (x.shape, x.dtype), arrays)


def test_gates_summed_up_under_jit():
    """Offsets from NumPy are looked up by traced places."""
    g = jnp.asarray(np.random.default_rng(0).normal(size=(1, 20, 2, 3)), jnp.float32)
    found = jax.jit(lambda g: kda_gate_chunk_cumsum(g, jnp.zeros(2), 4, cu_seqlens=np.array([0, 7, 20])))(g)
    gate = np.asarray(kda_gate(g, jnp.zeros(2)))
    pieces = [gate[:, a:b].cumsum(1) for a, b in ((0, 4), (4, 7), (7, 11), (11, 15), (15, 19), (19, 20))]
    np.testing.assert_allclose(found, np.concatenate(pieces, 1), rtol=1e-6)


def test_gate():
    case = CASES["softplus"]
    arrays = case.arrays()
    for bound in (None, -5.0):
        problem = case.problem().replace(gate="softplus" if bound is None else "bounded", lower_bound=bound)
        got = kda_gate(*(x.astype(np.float32) for x in (arrays.g, arrays.A_log, arrays.dt_bias)), lower_bound=bound)
        assert got.dtype == jnp.float32
        close(got, reference.log_decay(problem, arrays, arrays.g, np.float64), 1e-6)
    with pytest.raises(ValueError, match="A_log is required"):
        kda_gate(arrays.g)
    with pytest.raises(ValueError, match=r"lower_bound must be negative"):
        kda_gate(arrays.g, lower_bound=1.0)


def test_the_default_compiler_flags_give_the_same_accuracy():
    """The suite compiles without LLVM's optimisations; users do not."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    more = ["gate_huge", "varlen_fused"] if os.environ.get("KDAKIT_FULL") == "1" else []  # ten seconds of LLVM each
    words = ["verify", "--backend", "xla", "--dtype", "float32", "--case", "softplus_huge", *more]
    run = subprocess.run([sys.executable, "-m", "kdakit.cli.main", *words], env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and "within tolerance" in run.stdout, run.stdout[-2000:] + run.stderr[-2000:]
