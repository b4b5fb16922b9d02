"""tokamax's call against the readable recurrence, segment by segment, and against tokamax's own where that is installed."""

import inspect

import numpy as np
import pytest

jax = pytest.importorskip("jax")

H, B, T, K, V, N = 2, 2, 9, 8, 4, 3
NEXT = np.array([[1, 1, 1, 2, 2, 2, 2, 0, 0], [0, 2, 2, 0, 1, 1, 3, 3, 3]], np.int32)  # gaps, and an id that nobody has
AGAIN = np.array([[1, 2, 1, 2, 0, 1, 4, 2, 2], [3, 1, 0, 0, 1, 3, 2, 2, 0]], np.int32)  # ids that come back, and one above N


def inputs(raw=False):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    q, k, v, g = draw(H, B, T, K), draw(H, B, T, K), draw(H, B, T, V), draw(H, B, T, K)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    return [q, k, v, g if raw else -np.abs(g), rng.random((H, B, T)).astype(np.float32)], draw(B, N, H, K, V)


def expected(x, state, ids):
    """Each segment by itself: its tokens in their order, from its own state; nothing where a token is nobody's."""
    from kdakit.jax import naive_recurrent_kda

    x, state = [np.moveaxis(a, 0, 2) for a in x], state.copy()
    o = np.zeros((B, T, H, V), np.float32)
    for b in range(B):
        for n in range(N):
            at = np.flatnonzero(ids[b] == n + 1)
            if len(at):
                part = [a[b : b + 1, at] for a in x]
                o[b, at], state[b, n] = (
                    y[0] for y in naive_recurrent_kda(*part, initial_state=state[b : b + 1, n], output_final_state=True)
                )
    return np.moveaxis(o, 2, 0), state


def near(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def call(*x, **named):
    from kdakit.jax import tokamax

    return tokamax.kimi_delta_attention(*x, **named)


@pytest.mark.parametrize("count", [1, N])
def test_rows_of_one_segment(count):
    x, state = inputs()
    want, want_state = expected(x, state, np.ones((B, T), int))
    o, final = call(*x, initial_state=state[:, :count], output_final_state=True)
    near(o, want), near(final, want_state[:, :count])
    o, final = call(*x, initial_state=state[:, :count])
    near(o, want)
    assert final is None


@pytest.mark.parametrize("ids", [NEXT, AGAIN])
def test_segments_with_states(ids):
    x, state = inputs()
    want, want_state = expected(x, state, ids)
    o, final = jax.jit(lambda *x: call(*x, segment_ids=ids, initial_state=state, output_final_state=True))(*x)
    near(o, want), near(final, want_state)
    want, want_state = expected(x, 0 * state, ids)
    o, final = jax.jit(lambda *x: call(*x, segment_ids=ids, max_num_segments=N, output_final_state=True))(*x)
    near(o, want), near(final, want_state)


def test_segments_without_states():
    x, state = inputs()
    near(call(*x, segment_ids=NEXT, max_num_segments=N)[0], expected(x, 0 * state, NEXT)[0])
    o, final = call(*x, segment_ids=NEXT, max_num_segments=2)
    assert final is None and not np.asarray(o)[:, 1, 6:].any()


def test_gradients_of_segments():
    x, state = inputs()
    loss = jax.jit(lambda x, state: (call(*x, segment_ids=NEXT, initial_state=state)[0] ** 2).sum())
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, state)
    eps = 1e-2
    for a, found in zip([*x, state], [*gradients[0], gradients[1]], strict=True):
        direction = np.asarray(found) / np.linalg.norm(found)
        moved = lambda step, a=a, direction=direction: [y + step * direction if y is a else y for y in [*x, state]]
        up, down = (float(loss(y[:-1], y[-1])) for y in (moved(eps), moved(-eps)))
        np.testing.assert_allclose((up - down) / (2 * eps), np.linalg.norm(found), rtol=1e-2)
    assert not any(np.asarray(g)[:, NEXT == 0].any() for g in gradients[0])


def test_padding_may_hold_anything():
    """Gradients of the gate's parameters, which all tokens share, too."""
    x, _ = inputs(raw=True)
    x = [np.where((NEXT > 0).reshape(1, B, T, *[1] * (a.ndim - 3)), a, np.float32(np.nan)) for a in x]
    named = dict(use_gate_in_kernel=True, segment_ids=NEXT, max_num_segments=N)
    parameters = np.zeros(H, np.float32), np.zeros(H * K, np.float32)
    loss = lambda x, a_log, bias: (call(*x, a_log=a_log, delta_time_bias=bias, **named)[0] ** 2).sum()
    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, *parameters)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(found)) and np.asarray(found[1]).all()


def test_implementations(monkeypatch):
    """Every backend of ours by its name; tokamax's own names let kdakit choose."""
    from kdakit import dispatch
    from kdakit.jax import tokamax

    asked = []
    monkeypatch.setattr(tokamax.ours, "chunk_kda", lambda *x, backend, **named: (asked.append(backend) or x[2], None))
    wanted = [*dispatch.names("jax"), ("xla", "mosaic"), None, "mosaic", "xla_chunked", ()]
    for implementation in wanted:
        call(*inputs()[0], implementation=implementation)
    assert asked == [*dispatch.names("jax"), "xla", "auto", "auto", "auto", "auto"]


def test_refusals():
    x, state = inputs()
    with pytest.raises(ValueError, match="need max_num_segments or initial_state"):
        call(*x, segment_ids=NEXT)
    with pytest.raises(ValueError, match="max_num_segments must be initial_state's 3, got 2"):
        call(*x, segment_ids=NEXT, initial_state=state, max_num_segments=2)
    with pytest.raises(NotImplementedError, match=r"kdakit\.parallel\.jax"):
        call(*x, context_parallel_metadata=object())


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("ids", [None, NEXT, AGAIN])
def test_like_tokamax(ids, lower_bound):
    ops = pytest.importorskip("tokamax.ops", reason="needs tokamax 0.0.17")
    from kdakit.jax import tokamax

    theirs = ops.kimi_delta_attention
    names = lambda function: [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
    assert names(tokamax.kimi_delta_attention) == names(inspect.unwrap(theirs))
    x, state = inputs(raw=True)
    rng = np.random.default_rng(1)
    named = dict(
        a_log=rng.standard_normal(H).astype(np.float32), delta_time_bias=rng.standard_normal(H * K).astype(np.float32), scale=0.3,
        use_qk_l2norm=True, use_gate_in_kernel=True, lower_bound=lower_bound, segment_ids=ids, initial_state=state,
        output_final_state=True,
    )  # fmt: skip
    x, named = jax.tree.map(lambda a: jax.numpy.asarray(a) if isinstance(a, np.ndarray) else a, (x, named))
    for wanted, found in zip(theirs(*x, implementation="xla", **named), call(*x, **named), strict=True):
        assert found.shape == wanted.shape and found.dtype == wanted.dtype
        near(found, wanted)
