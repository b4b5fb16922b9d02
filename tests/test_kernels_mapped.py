"""vmap, jax.checkpoint and gradients of and through them, of kernels that cannot be mapped themselves: the truth of each call alone."""

import os

import kernel_calls as calls
import numpy as np
import pytest

jax = pytest.importorskip("jax")
from kdakit.jax import chunk_kda, fused_recurrent_kda  # noqa: E402

KERNELS = dict(backend="pallas_tpu")
SHORT = calls.OPTIONS | dict(chunk_size=16)


@pytest.fixture(autouse=True)
def pallas_own_interpreter(monkeypatch):
    monkeypatch.delenv("KDAKIT_INTERPRETER", raising=False)


def stacked(rows):
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def chunk(**given):
    return chunk_kda(**given, **KERNELS)


def check_each(got, rows):
    for n, row in enumerate(rows):
        want = calls.truth(row)
        calls.close({name: x[n] for name, x in got.items()}, want, n)


def test_gradients_of_each_call():
    """Calls that share keys, states and gate parameters: one larger batch. A map in a map; each gradient is its call's own."""
    shared = calls.inputs(0, B=2)
    rows = [calls.inputs(seed, B=2) | {name: shared[name] for name in ("k", "initial_state", "A_log", "dt_bias")} for seed in range(1, 5)]
    axes = {name: None if name in ("k", "initial_state", "A_log", "dt_bias") else 0 for name in shared}
    given = {name: x if axes[name] == 0 else shared[name] for name, x in stacked(rows).items()}
    nested = {name: x.reshape(2, 2, *x.shape[1:]) if axes[name] == 0 else x for name, x in given.items()}
    inner = jax.vmap(jax.checkpoint(calls.all_of(chunk, SHORT)), in_axes=(axes, None, None))
    got = jax.jit(jax.vmap(inner, in_axes=(axes, None, None)))(nested, *calls.cotangents(shared))
    check_each({name: x.reshape(4, *x.shape[2:]) for name, x in got.items()}, rows)


def test_packed_calls_one_after_the_other():
    """Sequences of other lengths and padding in each call; gate parameters of its own."""
    rows = [calls.inputs(seed, T=40, lengths=lengths) for seed, lengths in enumerate(((11, 0, 22), (40, 0, 0)))]
    got = jax.jit(jax.vmap(calls.all_of(chunk, SHORT), in_axes=(0, None, None)))(stacked(rows), *calls.cotangents(rows[0]))
    check_each(got, rows)


def test_gradient_of_a_mapped_loss_that_is_computed_again():
    """jax.checkpoint around a map; the sum's gradient of a shared parameter is the sum of the calls'."""
    rows = [calls.inputs(seed) for seed in range(2)]
    shared = {name: rows[0][name] for name in ("A_log", "dt_bias")}
    rows = [row | shared for row in rows]
    d_o, d_final = calls.cotangents(rows[0])
    given = stacked(rows) | shared
    axes = {name: None if name in shared else 0 for name in given}

    def loss(given):
        o, final = jax.vmap(lambda x: chunk(**x, **SHORT), in_axes=(axes,))(given)
        return (o * d_o).sum() + (final * d_final).sum()

    policy = jax.checkpoint_policies.save_only_these_names("kda_states")
    got = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy)))(given)
    truths = [calls.truth(row) for row in rows]
    want = {name: sum(t[name] for t in truths) if name in shared else np.stack([t[name] for t in truths]) for name in given}
    calls.close(got, want)


@pytest.mark.skipif(os.environ.get("KDAKIT_FULL") != "1", reason="make test-full; the frontend is the same as of chunk_kda")
def test_recurrence():
    rows = [calls.inputs(seed, B=2, T=5) for seed in range(3)]
    run = calls.all_of(lambda **x: fused_recurrent_kda(**x, **KERNELS))
    check_each(jax.jit(jax.vmap(run, in_axes=(0, None, None)))(stacked(rows), *calls.cotangents(rows[0])), rows)


def test_mapped_decode():
    """One token of each, states shared by all."""
    rows = [calls.inputs(seed, B=2, T=1) for seed in range(3)]
    rows = [row | {name: rows[0][name] for name in ("initial_state", "A_log", "dt_bias")} for row in rows]
    step = lambda q, k, v, g, beta: fused_recurrent_kda(
        q, k, v, g, beta, **{name: rows[0][name] for name in ("initial_state", "A_log", "dt_bias")}, **calls.OPTIONS, **KERNELS
    )
    given = stacked(rows)
    o, final = jax.jit(jax.vmap(step))(*(given[name] for name in ("q", "k", "v", "g", "beta")))
    for n, row in enumerate(rows):
        want = calls.truth(row)
        calls.close({"o": o[n], "final_state": final[n]}, {name: want[name] for name in ("o", "final_state")})
