"""Decoding over pools on the TPU kernel, in its interpreter, against float64: pages in place, rows of nobody, drafts, a layer's step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sequences import JaxPool, tokens

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter  # noqa: E402
from jax.experimental.pallas import tpu as pltpu  # noqa: E402

from kdakit.backends.pallas_tpu import pool, spread  # noqa: E402
from kdakit.backends.pallas_tpu.tile import Config  # noqa: E402
from kdakit.layers.jax import KimiDeltaAttention  # noqa: E402
from kdakit.measure.pool_trials import Trial, draw, judge  # noqa: E402
from kdakit.problem import Arrays, make_options, make_problem  # noqa: E402
from kdakit.serving.jax import StatePool, calls, commit, decode  # noqa: E402
from kdakit.serving.jax.layer import decode_layer, layer_pool, verify_layer  # noqa: E402

TRIALS = [
    Trial(rows=5, dtype="bfloat16", gate="bounded", K=128, V=128, HV=4, seed=4),
    Trial(rows=3, tokens=3, drafted=True, state_dtype="bfloat16", gate="softplus", seed=1),
    Trial(rows=3, tokens=2, state_v_first=True, K=20, V=136, H=1, HV=3, seed=2),
]


@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_right_by_the_accuracy_rule(trial):
    found = judge(trial, "pallas_tpu")
    assert found["ok"], found["complaint"]


def test_a_trial_notices_what_is_wrong(monkeypatch):
    """A decode that writes somebody else's page, or is off by a hundredth, or lets a row of nobody speak."""
    from kdakit.serving.jax import pages

    right, trial = pages.decode, Trial(seed=3)
    assert judge(trial, "xla")["ok"] and not judge(replace(trial, K=999), "xla")["ok"]
    for wrong in (lambda o, s: (o * 1.01, s), lambda o, s: (o, s + 1), lambda o, s: (o.at[:].add(0.5), s)):
        monkeypatch.setattr(pages, "decode", lambda *a, wrong=wrong, **b: wrong(*right(*a, **b)))
        assert not judge(trial, "xla")["ok"]


def test_drawn_trials_are_of_all_kinds():
    drawn = [draw(seed) for seed in range(60)]
    for name in ("dtype", "state_dtype", "gate", "state_v_first", "drafted", "tokens", "K"):
        assert len({getattr(t, name) for t in drawn}) > 1, name
    assert all(draw(seed, 20).K <= 20 for seed in range(60)) and draw(7) == draw(7)


def test_columns_are_exact():
    """What the matrix unit spreads is what went in, every bit of it, and other heads' numbers are not in it."""
    rng = np.random.default_rng(0)
    decay, k, q = (rng.normal(size=(5, 24)).astype(np.float32) * 10.0 ** rng.integers(-6, 6, (5, 24)).astype(np.float32) for _ in range(3))
    E = jnp.asarray(spread.selections(False), jnp.bfloat16)
    X = spread.transposed(*map(jnp.asarray, (decay, k, q)), False, E.shape[1])
    for h in range(5):
        for got, want in zip(spread.columns(X, E[h], 24, 130), (decay, k, q), strict=True):
            np.testing.assert_array_equal(got, np.broadcast_to(want[h][:, None], (24, 130)))


def problem_of(dtype="float32", N=4, T=1, H=2, K=8, V=8, seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    gates = -jnp.abs(normal(N, T, H, K)).astype(jnp.float32)
    arrays = Arrays(normal(N, T, H, K), normal(N, T, H, K), normal(N, T, H, V), gates, jax.nn.sigmoid(normal(N, T, H)))
    made = make_options(arrays, use_qk_l2norm_in_kernel=True, output_final_state=True)
    return make_problem("recurrent", arrays, made).replace(has_initial_state=True), arrays


@pytest.mark.parametrize("seed, eager", [(0, True), (1, False)])
def test_no_races(seed, eager):
    """Copies in and out of pages while others are computed; memory that nobody wrote is NaN. Two head blocks run in any order."""
    problem, arrays = problem_of(N=3, T=2, H=2)
    states = jnp.asarray(np.random.default_rng(1).normal(size=(7, 2, 8, 8)), jnp.float32)
    rows = pool.Rows(jnp.array([5, -1, 2]), jnp.array([[1, 5], [3, 4], [-1, 2]]))
    pltpu.reset_tpu_interpret_mode_state()
    config = Config(heads=1, interpret=True, race_seed=seed, eager_dma=eager)
    o, after = pool.decode(problem, arrays, states, rows, config)
    assert interpreter.races is not None and not interpreter.races.races_found
    plain = pool.decode(problem, arrays, states, rows, Config(heads=1, interpret=True))
    assert np.array_equal(o, plain[0]) and np.array_equal(after, plain[1]) and np.isfinite(o).all()
    assert not o[1].any() and [i for i in range(7) if not np.array_equal(after[i], states[i])] == [1, 2, 5]


def test_what_is_not_finite_stays_in_its_row_and_head():
    problem, arrays = problem_of()
    states = jnp.asarray(np.random.default_rng(1).normal(size=(4, 2, 8, 8)), jnp.float32)
    row = jnp.arange(4)
    run = jax.jit(lambda arrays, states: pool.decode(problem, arrays, states, pool.Rows(row, row), Config(heads=1, interpret=True)))
    right = run(arrays, states)
    spoiled = arrays._replace(
        k=arrays.k.at[0, 0, 0, 3].set(jnp.nan), g=arrays.g.at[1, 0, 1, 2].set(jnp.nan), q=arrays.q.at[2, 0, 0, 1].set(jnp.inf)
    )
    found = run(spoiled, states.at[3, 1, 2, 2].set(jnp.nan))
    touched = {(0, 0), (1, 1), (3, 1)}
    for n in range(4):
        for h in range(2):
            o, S = np.asarray(found[0][n, 0, h]), np.asarray(found[1][n, h])
            if (n, h) in touched:
                assert np.isnan(o).any() and np.isnan(S).any()
            else:
                assert np.array_equal(S, right[1][n, h])
                assert np.isnan(o).all() if (n, h) == (2, 0) else np.array_equal(o, right[0][n, 0, h])


def test_the_pool_takes_the_kernel_where_it_is_named_and_auto_waits(monkeypatch):
    """No TPU has shown it: 'auto' gathers around the step. Duplicates and slots of nobody are skipped."""
    problem, arrays = problem_of(N=5)
    asked = []
    monkeypatch.setattr(pool, "decode", lambda *a, real=pool.decode: asked.append(1) or real(*a))
    made = StatePool.create(3, 2, 8, 8)
    (a, b), made = made.allocate(2)
    tokens = dict(zip(("q", "k", "v", "g", "beta"), arrays[:5], strict=True))
    slots = jnp.array([b, -1, 77, b, a])
    o, after = decode(made, slots, **tokens, backend="pallas_tpu", use_qk_l2norm_in_kernel=True)
    made, want = StatePool.create(3, 2, 8, 8).allocate(2)[1], None
    want, plain = decode(made, slots, **tokens, backend="xla", use_qk_l2norm_in_kernel=True)
    assert len(asked) == 1 and [i for i in range(5) if o[i].any()] == [0, 4]
    np.testing.assert_allclose(o, want, atol=1e-6)
    np.testing.assert_allclose(after.contents.storage.states[:3], plain.contents.storage.states[:3], atol=1e-6)
    assert not pool.SHOWN and pool.unshown("cpu") is not None
    module = type("Module", (), {"pooled": staticmethod(lambda: pool)})
    states = after.contents.storage.states
    assert calls.pooled_kernels(module, problem, states, "auto", "cpu") is None
    assert calls.pooled_kernels(module, problem, states, "pallas_tpu", "cpu") is pool
    assert calls.pooled_kernels(module, problem, states.astype(jnp.float16), "pallas_tpu", "cpu") is None


def test_drafts_are_verified_and_committed_in_the_pool():
    """What `xla` gathers around: outputs, and the states after any number of accepted tokens; nothing moves before."""
    found = {}
    for backend in ("xla", "pallas_tpu"):
        held, rng = JaxPool(4, "xla", state_v_first=True, dtype="bfloat16"), np.random.default_rng(0)
        a, b, c = held.allocate(3)
        held.prefill([a, b, c], tokens(rng, 1, 21), [7] * 3)
        held.backend = backend
        before = held.state(a)
        o, draft = held.verify([b, -1, a, c], tokens(rng, 4, 3), on_device=True)
        assert np.array_equal(before, held.state(a)) and before.any()
        held.commit(draft, [2, 3, 3, 0])
        found[backend] = [o, *map(held.state, (a, b, c))]
    assert not found["pallas_tpu"][0][1].any()
    np.testing.assert_allclose(found["pallas_tpu"][0], found["xla"][0], atol=1e-6)
    for got, want in zip(found["pallas_tpu"][1:], found["xla"][1:], strict=True):
        np.testing.assert_allclose(got, want, atol=1e-2 * np.abs(want).max())


def test_a_layer_over_a_pool():
    """Convolutions, gates, recurrence and norm in one kernel, windows in the pool: what the layer says in its own words."""
    sizes = dict(hidden_size=24, head_dim=16, num_heads=1, num_v_heads=2, conv_bias=True, lower_bound=-5.0, allow_neg_eigval=True)
    found = {}
    for backend in ("xla", "pallas_tpu"):
        layer = KimiDeltaAttention(**sizes, mode="recurrent", backend=backend, rngs=nnx.Rngs(0))
        held, rng = layer_pool(layer, 3), np.random.default_rng(0)
        _, held = held.allocate(2)
        run = jax.jit(lambda pool, slots, x, layer=layer: decode_layer(layer, pool, slots, x), donate_argnums=0)
        outputs = []
        for slots in ([1, -1, 0], [0, 0, 1]):
            o, held = run(held, jnp.array(slots), jnp.asarray(rng.normal(size=(3, 2, 24)), jnp.float32))
            outputs.append(o)
        kept = [held.contents.windows[n][:2] for n in ("q", "k", "v")]
        found[backend] = [*outputs, *kept, held.states([0, 1])]
    assert not found["pallas_tpu"][0][1].any() and not found["pallas_tpu"][1][1].any()
    for got, want in zip(found["pallas_tpu"], found["xla"], strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6)


def test_a_layers_drafts():
    """Verified in one kernel, committed in part: as the layer's own words, and nothing moves before."""
    sizes = dict(hidden_size=24, head_dim=16, num_heads=1, num_v_heads=2, lower_bound=-5.0)
    found = {}
    for backend in ("xla", "pallas_tpu"):
        layer = KimiDeltaAttention(**sizes, backend=backend, rngs=nnx.Rngs(0))
        held, rng = layer_pool(layer, 3), np.random.default_rng(0)
        _, held = held.allocate(2)
        draw = lambda T, rng=rng: jnp.asarray(rng.normal(size=(3, T, 24)), jnp.float32)
        run = jax.jit(lambda pool, slots, x, layer=layer: verify_layer(layer, pool, slots, x))
        outputs = []
        for accepted in ([3, 2, 0], [1, 3, 1]):
            before = jax.tree.map(np.asarray, held.contents)
            o, draft = run(held, jnp.array([1, -1, 0]), draw(3))
            assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(held.contents), strict=True))
            held = commit(held, draft, accepted)
            outputs.append(o)
        found[backend] = [*outputs, *(held.contents.windows[n][:2] for n in ("q", "k", "v")), held.states([0, 1])]
    assert not found["pallas_tpu"][0][1].any() and found["pallas_tpu"][-1].any()
    for got, want in zip(found["pallas_tpu"], found["xla"], strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6)


def test_a_layer_with_its_cache_and_its_gradient():
    """Single tokens of a cached layer take the kernel; derivatives are those of the layer's own words."""
    found = {}
    for backend in ("xla", "pallas_tpu"):
        layer = KimiDeltaAttention(hidden_size=16, head_dim=8, num_heads=1, backend=backend, rngs=nnx.Rngs(0))
        cache, x = layer.new_cache(2), jnp.asarray(np.random.default_rng(0).normal(size=(2, 1, 16)), jnp.float32)
        call = lambda x, layer=layer, cache=cache: (lambda o, after: (o.sum(), (o, after)))(*layer(x, cache=cache))
        (_, rest), gradient = jax.jit(jax.value_and_grad(call, has_aux=True))(x)
        found[backend] = [*jax.tree.leaves(rest), gradient]
    for got, want in zip(found["pallas_tpu"], found["xla"], strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)
