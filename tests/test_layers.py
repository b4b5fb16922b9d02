"""The KDA layer in both frameworks: against its formula in NumPy, FLA's parameters, padding, packing, caches, refusals."""

import importlib.util
from pathlib import Path

import fresh
import numpy as np
import pytest

from kdakit import gates, reference
from kdakit.layers.sizes import LayerSizes
from kdakit.problem import Arrays, make_options, make_problem

FRAMEWORKS = ("torch", "jax")
SMALL = dict(hidden_size=24, head_dim=8, num_heads=2)
# One layer that is special in every way, and one that is not.
RICH = SMALL | dict(num_v_heads=4, expand_v=1.5, conv_bias=True, conv_size=3, lower_bound=-4.0, safe_gate=True, allow_neg_eigval=True)
PLAIN = SMALL
NO_CONV = SMALL | dict(use_short_conv=False)

# flash-linear-attention 0.6.0: KimiDeltaAttention(hidden_size=24, head_dim=8, num_heads=2, num_v_heads=4, expand_v=1.5, conv_size=3,
# conv_bias=True).state_dict()
FLA_LAYOUT = {
    "A_log": (4,), "dt_bias": (32,),
    "q_proj.weight": (16, 24), "k_proj.weight": (16, 24), "v_proj.weight": (48, 24),
    "q_conv1d.weight": (16, 1, 3), "q_conv1d.bias": (16,), "k_conv1d.weight": (16, 1, 3), "k_conv1d.bias": (16,),
    "v_conv1d.weight": (48, 1, 3), "v_conv1d.bias": (48,),
    "f_proj.0.weight": (12, 24), "f_proj.1.weight": (32, 12), "b_proj.weight": (4, 24),
    "g_proj.0.weight": (12, 24), "g_proj.1.weight": (48, 12), "g_proj.1.bias": (48,),
    "o_norm.weight": (12,), "o_proj.weight": (24, 48),
}  # fmt: skip


def draw(options, seed=0):
    """Weights of a layer, all of them different from their first values."""
    rng = np.random.default_rng(seed)
    shapes = LayerSizes(**{k: v for k, v in options.items() if k != "mode"}).parameters()
    made = {name: rng.normal(size=shape) * (0.3 if len(shape) == 1 else shape[-1] ** -0.5) for name, shape in shapes.items()}
    made["o_norm.weight"] += 1
    return {name: value.astype(np.float32) for name, value in made.items()}


class TorchLayer:
    """A layer of either framework that takes and gives NumPy arrays."""

    def __init__(self, options, weights):
        self.torch = pytest.importorskip("torch")
        from kdakit.layers.torch import KimiDeltaAttention

        self.layer = KimiDeltaAttention(**options)
        self.layer.load_state_dict({name: self.torch.from_numpy(value) for name, value in weights.items()})

    def __call__(self, x, mask=None, cache=None, cu=None):
        tensor = lambda a: None if a is None else self.torch.from_numpy(np.asarray(a))
        with self.torch.no_grad():
            o, cache = self.layer(tensor(x), attention_mask=tensor(mask), cache=cache, cu_seqlens=tensor(cu))
        return o.numpy(), cache


class JaxLayer:
    """Compiled: running Flax layers eagerly compiles every operation by itself, which takes longer."""

    def __init__(self, options, weights):
        self.jax = pytest.importorskip("jax")
        nnx = pytest.importorskip("flax.nnx")
        from kdakit.layers.jax import KimiDeltaAttention

        self.layer = KimiDeltaAttention(**options, rngs=nnx.Rngs(0))
        named = {".".join(map(str, path)): value for path, value in nnx.to_flat_state(nnx.state(self.layer))}
        assert set(named) == set(weights)
        for name, value in named.items():
            assert value[...].shape == weights[name].shape
            value[...] = weights[name]
        graph, state = nnx.split(self.layer)
        call = lambda x, mask, cache, cu: nnx.merge(graph, state)(x, attention_mask=mask, cache=cache, cu_seqlens=cu)
        self.call = self.jax.jit(call)

    def __call__(self, x, mask=None, cache=None, cu=None):
        o, cache = self.call(x, mask, cache, cu)
        return np.asarray(o), cache


def make(framework, options, seed=0):
    return (TorchLayer if framework == "torch" else JaxLayer)(options, draw(options, seed))


def formula(options, w, x):
    """The layer in float64, straight from its docstring; x [T, hidden_size]."""
    s = LayerSizes(**options)
    w, x = {n: a.astype(np.float64) for n, a in w.items()}, x.astype(np.float64)
    silu = lambda a: a * gates.sigmoid(a)

    def branch(name):
        y = x @ w[f"{name}_proj.weight"].T
        if s.use_short_conv:
            taps, padded = w[f"{name}_conv1d.weight"][:, 0], np.concatenate([np.zeros((s.conv_size - 1, y.shape[1])), y])
            y = np.stack([(padded[t : t + s.conv_size] * taps.T).sum(0) for t in range(len(x))]) + w.get(f"{name}_conv1d.bias", 0)
        return silu(y)

    heads = lambda a, size: a.reshape(1, len(x), -1, size)
    q, k, v = heads(branch("q"), s.head_dim), heads(branch("k"), s.head_dim), heads(branch("v"), s.head_v_dim)
    g = heads(x @ w["f_proj.0.weight"].T @ w["f_proj.1.weight"].T, s.head_dim)
    beta = (x @ w["b_proj.weight"].T)[None]
    arrays = Arrays(q, k, v, g, beta, w["A_log"], w["dt_bias"], None, None, None)
    options = make_options(arrays, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                           lower_bound=s.lower_bound, safe_gate=s.safe_gate, allow_neg_eigval=s.allow_neg_eigval)  # fmt: skip
    o = reference.forward(make_problem("chunk", arrays, options), arrays).o[0]  # [T, HV, V]
    o = o / np.sqrt((o * o).mean(-1, keepdims=True) + s.norm_eps) * w["o_norm.weight"]
    gate = x @ w["g_proj.0.weight"].T @ w["g_proj.1.weight"].T + w["g_proj.1.bias"]
    return (o.reshape(len(x), -1) * gates.sigmoid(gate)) @ w["o_proj.weight"].T


def inputs(B, T, hidden=24, seed=1):
    return np.random.default_rng(seed).normal(size=(B, T, hidden)).astype(np.float32)


def close(got, want, tolerance=2e-5):
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(np.abs(want).max(), 1e-3))


@pytest.mark.parametrize("options", [PLAIN, RICH, NO_CONV], ids=["plain", "rich", "no_conv"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_layer_is_its_formula(framework, options):
    layer, x = make(framework, options), inputs(2, 37)
    o, cache = layer(x)
    assert cache is None
    for row in range(2):
        close(o[row], formula(options, draw(options), x[row]))


def test_parameters_are_those_of_fla():
    sizes = LayerSizes(**SMALL | dict(num_v_heads=4, expand_v=1.5, conv_size=3, conv_bias=True))
    assert sizes.parameters() == FLA_LAYOUT


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_state_dict_of_fla_layout_loads(framework):
    """TorchLayer loads strictly and JaxLayer compares names and shapes: nothing may be missing, added or transposed."""
    rng = np.random.default_rng(3)
    weights = {name: rng.normal(size=shape).astype(np.float32) * 0.2 for name, shape in FLA_LAYOUT.items()}
    options = SMALL | dict(num_v_heads=4, expand_v=1.5, conv_size=3, conv_bias=True)
    layer = (TorchLayer if framework == "torch" else JaxLayer)(options, weights)
    x = inputs(1, 9)
    close(layer(x)[0][0], formula(options, weights, x[0]))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_padding_does_not_leak(framework):
    """Left, right, in the middle, a whole row, and as a NaN: tokens and the next cache see nothing of it."""
    layer, x = make(framework, RICH), inputs(4, 12)
    mask = np.array([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0],
                     [1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1], [0] * 12])  # fmt: skip
    poisoned = np.where(mask[..., None], x, np.nan).astype(np.float32)
    o, cache = layer(poisoned, mask, layer.layer.new_cache(4))
    assert not o[mask == 0].any() and np.isfinite(np.asarray(cache.state)).all()
    following = inputs(4, 12, seed=2)
    second = np.array([[0] * 11 + [1], [0, 1] * 6, [1] * 12, [1] + [0] * 11])
    o2, _ = layer(np.where(second[..., None], following, np.nan).astype(np.float32), second, cache)
    for row in range(4):
        tokens = np.concatenate([x[row][mask[row] == 1], following[row][second[row] == 1]])
        want = formula(RICH, draw(RICH), tokens)
        close(np.concatenate([o[row][mask[row] == 1], o2[row][second[row] == 1]]), want)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_packed_sequences_do_not_meet(framework):
    """Empty and short ones among them; then more of each, from the cache; a change in one changes no bit of another."""
    layer = make(framework, RICH)
    lengths, more = [5, 0, 1, 14, 2], [1, 3, 0, 2, 16]
    parts = [inputs(1, n, seed=n + 10)[0] for n in lengths]
    later = [inputs(1, n, seed=n + 50)[0] for n in more]
    cu, cu_more = (np.concatenate([[0], np.cumsum(n)]) for n in (lengths, more))
    o, cache = layer(np.concatenate(parts)[None], cu=cu, cache=layer.layer.new_cache(5))
    o2, _ = layer(np.concatenate(later)[None], cu=cu_more, cache=cache)
    for n in range(5):
        want = formula(RICH, draw(RICH), np.concatenate([parts[n], later[n]])) if lengths[n] + more[n] else np.zeros((0, 24))
        close(np.concatenate([o[0, cu[n] : cu[n + 1]], o2[0, cu_more[n] : cu_more[n + 1]]]), want)
    changed = np.concatenate(parts)[None].copy()
    changed[0, cu[3] : cu[4]] += 1
    again, _ = layer(changed, cu=cu, cache=layer.layer.new_cache(5))
    others = np.r_[0 : cu[3], cu[4] : cu[5]]
    np.testing.assert_array_equal(again[0, others], o[0, others])
    assert np.abs(again[0, cu[3] : cu[4]] - o[0, cu[3] : cu[4]]).max() > 1e-3


def test_tokens_behind_the_last_packed_sequence():
    """Nobody's: neither outputs nor caches of the sequences know of them."""
    layer, x, cu = make("torch", RICH), inputs(1, 12), np.array([0, 5, 5, 9])
    _, before = layer(inputs(3, 2, seed=3), cache=layer.layer.new_cache(3))
    want, cache = layer(x[:, :9], cu=cu, cache=before)
    x[:, 9:] = np.nan
    got, other = layer(x, cu=cu, cache=before)
    close(got[:, :9], want, 1e-6)
    for a, b in zip(other, cache, strict=True):
        close(np.asarray(a), np.asarray(b), 1e-6)


def test_a_cache_keeps_what_it_shows():
    """Not the inputs whose last ones are its windows."""
    torch = pytest.importorskip("torch")
    from kdakit.layers.torch import KimiDeltaAttention

    layer = KimiDeltaAttention(**RICH)
    for mask in (None, torch.ones(2, 50)):
        _, cache = layer(torch.from_numpy(inputs(2, 50)), mask, layer.new_cache(2))
        assert [x.untyped_storage().nbytes() for x in cache] == [x.nbytes for x in cache]


@pytest.mark.parametrize("options", [PLAIN, NO_CONV, NO_CONV | dict(delta_rule=False)], ids=["plain", "no_conv", "no_delta_rule"])
def test_no_tokens_and_no_sequences(options):
    pytest.importorskip("torch")
    layer = make("torch", options)
    for B, T in ((2, 0), (0, 3), (0, 0)):
        o, cache = layer(inputs(B, T), cache=layer.layer.new_cache(B))
        assert o.shape == (B, T, 24) and not cache.state.any()


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("options", [RICH, NO_CONV | dict(delta_rule=False)], ids=["kda", "no_delta_rule"])
def test_pieces_and_steps_are_the_whole(framework, options):
    layer, x = make(framework, options), inputs(2, 22)
    whole, _ = layer(x)
    cache, parts = layer.layer.new_cache(2), []
    for start, stop in ((0, 9), (9, 10), (10, 11), (11, 20), (20, 21), (21, 22)):
        o, cache = layer(x[:, start:stop], cache=cache)
        parts.append(o)
    close(np.concatenate(parts, 1), whole)


def test_offsets_from_numpy_under_jit():
    """Constants of the program, in which traced places are looked up; token 9 is padding."""
    jax = pytest.importorskip("jax")
    pytest.importorskip("flax")
    from kdakit.layers.jax import Rows

    owner, place = jax.jit(lambda: Rows(cu_seqlens=np.array([0, 5, 5, 9])).places(10))()
    assert owner.tolist() == [0] * 5 + [2] * 4 + [3] and place.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_without_the_delta_rule_it_is_gated_linear_attention(framework):
    rng = np.random.default_rng(0)
    B, T, H, HV, K, V = 2, 19, 2, 4, 6, 5
    q, k = rng.normal(size=(2, B, T, H, K))
    v, g, beta, S = (
        rng.normal(size=(B, T, HV, V)),
        -rng.exponential(size=(B, T, HV, K)) * 30,
        rng.random((B, T, HV)),
        rng.normal(size=(B, HV, K, V)),
    )
    if framework == "torch":
        torch = pytest.importorskip("torch")
        from kdakit.layers.torch.gated_linear import gated_linear_attention

        o, final = (a.numpy() for a in gated_linear_attention(*(torch.from_numpy(a) for a in (q, k, v, g, beta, S))))
        tolerance = 1e-12
    else:
        jax = pytest.importorskip("jax")
        from kdakit.layers.jax.gated_linear import gated_linear_attention

        arrays = (a.astype(np.float32) for a in (q, k, v, g, beta, S))
        o, final = (np.asarray(a) for a in jax.jit(gated_linear_attention)(*arrays))
        tolerance = 2e-6
    q, k = (np.repeat(gates.l2norm(a), HV // H, 2) for a in (q, k))
    for t in range(T):
        S = np.exp(g[:, t])[..., None] * S + beta[:, t, :, None, None] * k[:, t, :, :, None] * v[:, t, :, None, :]
        close(o[:, t], np.einsum("bhk,bhkv->bhv", q[:, t], S) * K**-0.5, tolerance)
    close(final, S, tolerance)


def test_modes_agree_and_gradients_flow_to_every_parameter():
    torch = pytest.importorskip("torch")
    from kdakit.layers.torch import KimiDeltaAttention

    x, results = torch.from_numpy(inputs(2, 7)), {}
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    for mode in ("chunk", "recurrent"):
        layer = KimiDeltaAttention(**RICH, mode=mode)
        layer.load_state_dict({n: torch.from_numpy(a) for n, a in draw(RICH).items()})
        o, _ = layer(x, attention_mask=mask)
        o.square().sum().backward()
        results[mode] = o.detach(), {n: p.grad for n, p in layer.named_parameters()}
    close(results["recurrent"][0].numpy(), results["chunk"][0].numpy())
    for name, gradient in results["chunk"][1].items():
        assert gradient is not None and gradient.abs().max() > 0, name
        close(results["recurrent"][1][name].numpy(), gradient.numpy(), 1e-4)


def test_half_precision_and_autocast():
    torch = pytest.importorskip("torch")
    layer, x = make("torch", PLAIN), inputs(2, 20)
    want, _ = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, _ = layer.layer(torch.from_numpy(x))
    assert np.abs(o.detach().float().numpy() - want).max() < 0.05 * np.abs(want).max()
    half = layer.layer.to(torch.bfloat16)
    o, cache = half(torch.from_numpy(x).bfloat16(), cache=half.new_cache(2))
    assert o.dtype == torch.bfloat16 and cache.state.dtype == torch.float32 and cache.q_window.dtype == torch.bfloat16
    assert np.abs(o.detach().float().numpy() - want).max() < 0.05 * np.abs(want).max()


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(num_heads=3, num_v_heads=4), "num_v_heads must be a multiple of num_heads = 3, got 4"),
        (dict(head_dim=5, expand_v=1.5), "expand_v \\* head_dim must be a positive integer, got 1.5 \\* 5"),
        (dict(head_dim=300), "head_dim must be at most 256, got 300"),
        (dict(lower_bound=-6.0), "lower_bound must lie in \\[-5, 0\\), got -6.0"),
        (dict(safe_gate=True), "safe_gate needs lower_bound"),
        (dict(hidden_size=0), "hidden_size must be a positive integer, got 0"),
        (dict(conv_size=True), "conv_size must be a positive integer, got True"),
        (dict(norm_eps=0.0), "norm_eps must be positive, got 0.0"),
    ],
)
def test_sizes_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        LayerSizes(**options)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_inputs_are_checked(framework):
    layer = make(framework, PLAIN)
    x, cu = inputs(2, 6), np.array([0, 6])
    for given, message in (
        (dict(x=x[..., :5]), "hidden_states must be \\[B, T, hidden_size\\] with hidden_size = 24, got \\(2, 6, 5\\)"),
        (dict(x=x, mask=np.ones((2, 5), int)), "attention_mask must be \\[B, T\\] = \\(2, 6\\)"),
        (dict(x=x, cu=cu), "B = 1 with cu_seqlens, got B = 2"),
        (dict(x=x[:1], cu=cu, mask=np.ones((1, 6), int)), "exclude each other"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(**given)
    for given, wanted in ((dict(x=x), 2), (dict(x=x[:, :1]), 2), (dict(x=x[:1], cu=np.array([0, 2, 2, 6])), 3)):
        with pytest.raises(ValueError, match=f"cache must have a row for each of the {wanted} sequences of this call.*got 1"):
            layer(**given, cache=layer.layer.new_cache(1))
    with pytest.raises(ValueError, match="cu_seqlens must be None with delta_rule=False"):
        make(framework, PLAIN | dict(delta_rule=False))(x[:1], cu=cu)
    with pytest.raises(ValueError, match="mode must be one of auto, chunk, recurrent, got 'fused'"):
        make(framework, PLAIN | dict(mode="fused"))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_full_attention_cache(framework):
    """Pieces are the whole; beyond its capacity the answer is NaN, never a wrong number."""
    x = inputs(2, 9)
    if framework == "torch":
        torch = pytest.importorskip("torch")
        from kdakit.layers.torch import FullAttention, Rows

        layer = FullAttention(24, 4, 6, 2)
        run = torch.no_grad()(lambda x, cache: layer.mix(torch.from_numpy(x), Rows(), cache))
        padded = torch.no_grad()(lambda x, cache, mask: layer.mix(torch.from_numpy(x), Rows.from_mask(torch.from_numpy(mask)), cache)[0])
    else:
        jax = pytest.importorskip("jax")
        nnx = pytest.importorskip("flax.nnx")
        from kdakit.layers.jax import FullAttention, Rows

        layer = FullAttention(24, 4, 6, 2, rngs=nnx.Rngs(0))
        run = jax.jit(lambda x, cache: layer.mix(x, Rows(), cache))
        padded = jax.jit(lambda x, cache, mask: layer.mix(x, Rows.from_mask(mask), cache)[0])
    whole = np.asarray(run(x, None)[0])
    for other in (1, 3):
        with pytest.raises(ValueError, match=f"cache must have a row for each of the 2 sequences of this call.*got {other}"):
            run(x, layer.new_cache(other, 9))
    cache, parts = layer.new_cache(2, 8), []
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        o, cache = run(x[:, start:stop], cache)
        parts.append(np.asarray(o))
    got = np.concatenate(parts, 1)
    close(got[:, :8], whole[:, :8])
    assert np.isnan(got[:, 8]).all()
    got = np.asarray(padded(x, layer.new_cache(2, 8), np.array([[1] * 9, [1] * 8 + [0]])))
    assert np.isnan(got[0, 8]).all() and np.isfinite(got[1]).all()  # padding takes no place, and stays a number for the layers behind


def attention(framework):
    """run(x, cu, how, weight) -> the outputs of packed sequences, which go through a cache or a context or neither, and the gradient of
    their sum by weight."""
    if framework == "torch":
        torch = pytest.importorskip("torch")
        from kdakit.layers.torch import FullAttention, Rows

        layer = FullAttention(24, 4, 6, 2)
        context, given = OneSlice(lambda n: torch.arange(n), lambda cu, i: torch.searchsorted(cu, i, right=True)), torch.from_numpy

        def run(x, cu, how, weight):
            x, rows = given(x).requires_grad_(), Rows(cu_seqlens=given(cu), context=context if how == "context" else None)
            o, _ = layer.mix(x, rows, layer.new_cache(len(cu) - 1, 12) if how == "cache" else None)
            o.backward(given(weight))
            return o.detach().numpy(), x.grad.numpy()

        return run
    jax = pytest.importorskip("jax")
    nnx = pytest.importorskip("flax.nnx")
    from kdakit.layers.jax import FullAttention, Rows

    layer = FullAttention(24, 4, 6, 2, rngs=nnx.Rngs(0))
    context = OneSlice(jax.numpy.arange, lambda cu, i: (i[:, None] >= cu[1:]).sum(-1))

    def run(x, cu, how, weight):
        rows = lambda cu: Rows(cu_seqlens=cu, context=context if how == "context" else None)
        cache = layer.new_cache(len(cu) - 1, 12) if how == "cache" else None
        o, pullback = jax.vjp(jax.jit(lambda x: layer.mix(x, rows(cu), cache)[0]), x)
        return np.asarray(o), np.asarray(pullback(weight)[0])

    return run


class OneSlice:
    """A context of all tokens."""

    def __init__(self, count, owner):
        self.count, self.owner = count, owner

    def all_tokens(self, x):
        return x

    def visible(self, x, cu):
        i = self.count(x.shape[1])
        owner = self.owner(cu, i)
        return ((i[:, None] >= i) & (owner[:, None] == owner))[None]


@pytest.mark.parametrize("how", ["alone", "cache", "context"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_is_not_finite_stays_in_its_packed_sequence(framework, how):
    """In attention, whose masked weights are zeros: 0 * NaN. From its token on outputs are NaN; a gradient that is not finite reaches
    what its token sees."""
    run, cu, x, weight = attention(framework), np.array([0, 4, 4, 10, 13]), inputs(1, 13), inputs(1, 13, seed=2)
    o, d_x = run(x, cu, how, weight)
    for start, stop in ((0, 4), (4, 10), (10, 13)):
        alone = run(x[:, start:stop], np.array([0, stop - start]), how, weight[:, start:stop])
        close(o[:, start:stop], alone[0], 1e-6)
        close(d_x[:, start:stop], alone[1], 1e-6)
    others = np.r_[0:4, 10:13]
    for value in (np.nan, np.inf):
        for place in (x, weight):
            kept, place[0, 6, 3] = place[0, 6, 3], value
            found, gradient = run(x, cu, how, weight)
            place[0, 6, 3] = kept
            np.testing.assert_array_equal(found[:, others], o[:, others])
            np.testing.assert_array_equal(gradient[:, others], d_x[:, others])
            if place is x:
                np.testing.assert_array_equal(found[0, 4:6], o[0, 4:6])
                assert np.isnan(found[0, 6:10]).all() and np.isnan(gradient[0, [4, 5, 7, 8, 9]]).all()
            else:
                np.testing.assert_array_equal(found, o)
                assert np.isnan(gradient[0, 4:7]).all()
                np.testing.assert_array_equal(gradient[0, 7:10], d_x[0, 7:10])


def test_compiled_attention_knows_no_sizes():
    torch = pytest.importorskip("torch")
    from kdakit.layers.torch import FullAttention, Rows

    for kv_heads in (2, 4):
        layer, x = FullAttention(24, 4, 6, kv_heads), torch.from_numpy(inputs(2, 7))
        call = torch.no_grad()(lambda x, cache, layer=layer: layer.mix(x, Rows(), cache)[0])
        cache = layer.new_cache(2, 9)
        assert torch.equal(torch.compile(call, backend="eager", fullgraph=True, dynamic=True)(x, cache), call(x, cache))


PEER = Path(__file__).parent / "helpers" / "fla_layer.py"


@pytest.mark.parametrize("which", ["modules", "layer"])
def test_against_fla_on_the_cpu(which):
    """FLA's own kernels in Triton's interpreter, in a process of their own: its modules (fla-core), and its layer where it is installed."""
    pytest.importorskip("torch")
    for package in ("triton", "fla", "einops"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'kdakit[bench]'")
    places = [Path(p) / "layers" / "kda.py" for p in importlib.util.find_spec("fla").submodule_search_locations]
    if which == "layer" and not any(path.is_file() for path in places):
        pytest.skip("flash-linear-attention is not installed, only fla-core: pip install --no-deps flash-linear-attention")
    done = fresh.run(PEER, which, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-3000:]
    differences = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(differences) == 4 and max(differences) < 1e-5, done.stdout
