"""sglang-jax's two functions against the readable recurrence."""

import sys
import types

import numpy as np
import pytest

import kdakit

jax = pytest.importorskip("jax")


def inputs(B=2, T=9, H=2, K=8, V=4):
    rng = np.random.default_rng(0)
    q, k, g = (rng.standard_normal((B, T, H, K)).astype(np.float32) for _ in range(3))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, beta = rng.standard_normal((B, T, H, V)).astype(np.float32), rng.random((B, T, H)).astype(np.float32)
    return q, k, v, -np.abs(g), beta, rng.standard_normal((B, H, K, V)).astype(np.float32)


def test_sglang_jax(monkeypatch):
    from kdakit.jax import naive_recurrent_kda

    parts = "sgl_jax", "sgl_jax.srt", "sgl_jax.srt.kernels", "sgl_jax.srt.kernels.kda"
    modules = [types.ModuleType(name) for name in parts]
    for name, module in zip(parts, modules, strict=True):
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    module = modules[-1]
    module.chunk_kda = module.naive_recurrent_kda = theirs = lambda *a, **k: pytest.fail("sglang-jax's own")
    kdakit.enable("sglang_jax")
    try:
        *x, state = inputs()
        want, want_final = naive_recurrent_kda(*x, initial_state=state, output_final_state=True)
        o, final = module.naive_recurrent_kda(*x, None, state, True)
        np.testing.assert_allclose(o, want, rtol=1e-5, atol=1e-5)
        row = [np.concatenate([a.reshape(1, -1, *a.shape[2:]), np.full((1, 5, *a.shape[2:]), np.nan, np.float32)], 1) for a in x]
        o, final, *_, initial = module.chunk_kda(*row, 8**-0.5, state, True, np.array([0, 9, 18]))
        np.testing.assert_allclose(np.asarray(o)[0, :18].reshape(want.shape), want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(final, want_final, rtol=1e-4, atol=1e-5)
        assert not np.asarray(o)[0, 18:].any() and initial is state
    finally:
        kdakit.disable("sglang_jax")
    assert module.chunk_kda is theirs
