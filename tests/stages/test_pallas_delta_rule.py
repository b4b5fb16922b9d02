"""The delta rule between chunks as a Pallas kernel of its own, against the chunk form's intermediates and JAX's gradient of it."""

from __future__ import annotations

import numpy as np
import pytest

from kdakit import accuracy, chunked

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax.experimental.pallas import tpu as pltpu  # noqa: E402

from kdakit.backends.pallas_tpu.delta_rule import delta_rule  # noqa: E402
from kdakit.backends.pallas_tpu.tile import Config  # noqa: E402

NT, B, HV, C, K, V = 3, 2, 3, 16, 24, 8
RACES = Config(heads=2, interpret=True, race_seed=0, eager_dma=False)  # three heads in blocks of two


def chunks():
    """chunked.intra of random tokens, a state [B, HV, K, V], and what a loop over chunk_step finds: states, v_new, last state."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, NT, B, HV, C, K))
    v, g = rng.normal(size=(NT, B, HV, C, V)), -0.3 * np.abs(rng.normal(size=(NT, B, HV, C, K)))
    x = chunked.intra(q, k / np.linalg.norm(k, axis=-1, keepdims=True), v, g, rng.uniform(size=(NT, B, HV, C)))
    state = last = rng.normal(size=(B, HV, K, V))
    states, v_new = [], []
    for n in range(NT):
        states.append(last)
        last, new, _ = chunked.chunk_step(last, chunked.Intra(*(y[n] for y in x)))
        v_new.append(new)
    return x, state, (np.stack(states), np.stack(v_new), last)


def arguments(x, state, dtype="float32"):
    narrow = [jnp.asarray(y, dtype) for y in (x.w, x.u, x.k_decayed)]
    return *narrow, jnp.asarray(x.decay, jnp.float32), jnp.asarray(state.swapaxes(-1, -2), jnp.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_and_values_are_those_of_the_chunk_form(dtype):
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    x, state, (states, v_new, last) = chunks()
    pltpu.reset_tpu_interpret_mode_state()
    found = jax.jit(lambda *a: delta_rule(*a, RACES))(*arguments(x, state, dtype))
    assert not interpreter.races.races_found
    for got, want in zip(found, (states.swapaxes(-1, -2), v_new, last.swapaxes(-1, -2)), strict=True):
        assert accuracy.error(np.asarray(got, np.float64), want) <= accuracy.tolerance(0.0, dtype)


def scan(w, u, k_decayed, decay, state):
    def chunk(S, x):
        w, u, k, decay = x
        v_new = u - jnp.einsum("bhck,bhvk->bhcv", w, S)
        return S * decay[..., None, :] + jnp.einsum("bhcv,bhck->bhvk", v_new, k), (S, v_new)

    last, (states, v_new) = jax.lax.scan(chunk, state, (w, u, k_decayed, decay))
    return states, v_new, last


def test_gradients_are_those_of_a_scan():
    x, state, _ = chunks()
    given = arguments(x, state)
    rng = np.random.default_rng(1)
    d = tuple(jnp.asarray(rng.normal(size=y.shape), jnp.float32) for y in jax.eval_shape(scan, *given))
    found = jax.jit(lambda a, d: jax.vjp(lambda *a: delta_rule(*a, RACES), *a)[1](d))(given, d)
    with jax.default_matmul_precision("highest"):
        want = jax.vjp(scan, *given)[1](d)
    assert all(accuracy.error(got, y) <= accuracy.tolerance(0.0, "float32") for got, y in zip(found, want, strict=True))
