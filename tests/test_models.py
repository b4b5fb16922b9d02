"""The language model: one set of weights in two frameworks, one pass or many, files that are whole or refused."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest

from kdakit.models import weights
from kdakit.models.config import ModelConfig
from kdakit.models.generation import generate
from kdakit.models.initial import initial_weights
from kdakit.models.sampling import greedy, sampler

# One KDA layer and one of full attention, both with grouped heads; everything that can be on is on.
CONFIG = ModelConfig(
    vocab_size=40, hidden_size=32, num_layers=2, attention_every=2, num_attention_heads=4, num_kv_heads=2, head_dim=8, num_heads=2,
    num_v_heads=4, expand_v=2.0, conv_bias=True, conv_size=3,
)  # fmt: skip
DEEP = ModelConfig(
    vocab_size=40, hidden_size=16, num_layers=3, attention_every=3, head_dim=8, num_heads=1, lower_bound=-5.0, safe_gate=True
)
ALTERNATE = replace(DEEP, num_layers=4, attention_every=2)  # KDA behind attention
RNG = np.random.default_rng(0)
TOKENS, TARGETS = RNG.integers(0, 40, (3, 29)), RNG.integers(-1, 40, (3, 29))


def moved(config, seed=1):
    """First weights with all the ones and zeros among them moved."""
    rng = np.random.default_rng(seed)
    return {name: (w + 0.1 * rng.normal(size=w.shape)).astype(np.float32) for name, w in initial_weights(config, seed).items()}


def torch_model(config=CONFIG, **options):
    pytest.importorskip("torch")
    from kdakit.models.torch import KimiLinear

    model = KimiLinear(config, **options)
    model.load_weights(moved(config))
    return model


def jax_model(config=CONFIG, **options):
    pytest.importorskip("jax")
    pytest.importorskip("flax")
    from kdakit.models.jax import KimiLinear

    model = KimiLinear(config, **options)
    model.load_weights(moved(config))
    return model


def model_of(framework, config=CONFIG):
    return torch_model(config) if framework == "torch" else jax_model(config)


def torch_results(model, tokens=TOKENS):
    """Logits, loss and gradients by name."""
    import torch

    from kdakit.models.torch import loss

    logits, _ = model(torch.from_numpy(tokens))
    value = loss(model, torch.from_numpy(tokens), torch.from_numpy(TARGETS))
    model.zero_grad()
    value.backward()
    return logits.detach().numpy(), float(value.detach()), {n: p.grad.numpy().copy() for n, p in model.named_parameters()}


def jax_results(model):
    import jax
    from flax import nnx

    from kdakit.models.jax import loss

    graph, state = nnx.split(model)

    @jax.jit
    def run(state):
        logits, _ = nnx.merge(graph, state)(TOKENS)
        value, gradients = jax.value_and_grad(lambda s: loss(nnx.merge(graph, s), TOKENS, TARGETS))(state)
        return logits, value, gradients

    logits, value, gradients = run(state)
    named = {".".join(map(str, path)): np.asarray(g[...]) for path, g in nnx.to_flat_state(gradients)}
    return np.asarray(logits), float(value), named


def same(got, want, tolerance=1e-4):
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


def test_the_same_weights_give_the_same_logits_and_gradients_in_both_frameworks():
    logits, value, gradients = torch_results(torch_model())
    logits_jax, value_jax, gradients_jax = jax_results(jax_model())
    same(logits_jax, logits)
    assert abs(value_jax - value) < 1e-4 * value
    assert set(gradients_jax) == set(gradients) == set(CONFIG.parameters())
    for name, gradient in gradients.items():
        assert np.abs(gradient).max() > 0, name
        same(gradients_jax[name], gradient)


def test_weights_travel_both_ways_through_a_file(tmp_path):
    ours, theirs, path = torch_model(), jax_model(), tmp_path / "model.safetensors"
    for source, target in ((ours, theirs), (theirs, ours)):
        changed = {name: w + 0.5 for name, w in source.weights().items()}
        source.load_weights(changed)
        weights.save(path, source.config, source.weights())
        config, loaded = weights.load(path)
        target.load_weights(loaded)
        assert config == CONFIG
        for name, array in target.weights().items():
            np.testing.assert_array_equal(array, changed[name], err_msg=name)


def test_the_same_seed_gives_the_same_model_in_both_frameworks():
    pytest.importorskip("torch")
    pytest.importorskip("flax")
    from kdakit.models import jax as in_jax
    from kdakit.models import torch as in_torch

    ours, theirs = in_torch.KimiLinear(DEEP, seed=5).weights(), in_jax.KimiLinear(DEEP, seed=5).weights()
    other = in_torch.KimiLinear(DEEP, seed=6).weights()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name])
    assert any((ours[name] != other[name]).any() for name in ours)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_prefill_and_steps_are_one_pass(framework):
    """Prefill with chunk_kda in two pieces, then single tokens with fused_recurrent_kda."""
    model = model_of(framework)
    call = model.inference()
    whole, _ = call(TOKENS, model.new_cache(3, 29))
    cache, parts = model.new_cache(3, 29), []
    for start, stop in ((0, 13), (13, 26), (26, 27), (27, 28), (28, 29)):
        logits, cache = call(TOKENS[:, start:stop], cache)
        parts.append(logits)
    same(np.concatenate(parts, 1), whole, 1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_steps_in_half_precision_in_jax(dtype):
    """Of both kinds of layer; a cache that keeps its dtypes can be carried through a scan."""
    jax, nnx = pytest.importorskip("jax"), pytest.importorskip("flax.nnx")
    model = jax_model(dtype=dtype)
    graph, state = nnx.split(model)
    call = lambda tokens, cache: nnx.merge(graph, state)(tokens, cache=cache)
    whole, _ = jax.jit(call)(TOKENS, None)

    def step(cache, token):
        logits, cache = call(token[:, None], cache)
        return cache, logits[:, 0]

    _, steps = jax.lax.scan(step, model.new_cache(3, 29), TOKENS.T)
    same(np.moveaxis(np.asarray(steps, np.float32), 0, 1), np.asarray(whole, np.float32), 0.05)


def test_without_a_cache_it_is_the_same():
    import torch

    model = torch_model()
    with torch.no_grad():
        same(model(torch.from_numpy(TOKENS))[0].numpy(), model.inference()(TOKENS, model.new_cache(3, 29))[0], 1e-5)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_left_padded_batches_and_packed_sequences(framework):
    """Prompts of different length in one batch, then steps; and the same prompts packed, without padding."""
    model, lengths = model_of(framework), [29, 11, 2]
    alone = (
        [model.inference()(TOKENS[i : i + 1, :n], model.new_cache(1, n))[0][0] for i, n in enumerate(lengths)]
        if framework == "torch"
        else None
    )
    padded, mask = np.zeros((3, 29), np.int64), np.zeros((3, 29), np.int64)
    for i, n in enumerate(lengths):
        padded[i, 29 - n :], mask[i, 29 - n :] = TOKENS[i, :n], 1
    packed = np.concatenate([TOKENS[i, :n] for i, n in enumerate(lengths)])[None]
    cu = np.concatenate([[0], np.cumsum(lengths)])
    if framework == "torch":
        import torch

        t = torch.from_numpy
        with torch.no_grad():
            batch, cache = model(t(padded), attention_mask=t(mask), cache=model.new_cache(3, 40))
            flat, cache_packed = model(t(packed), cu_seqlens=t(cu), cache=model.new_cache(3, 40))
            token = t(TOKENS[:, :1])
            one, two = model(token, cache=cache)[0].numpy(), model(token, cache=cache_packed)[0].numpy()
            batch, flat, uncached = batch.numpy(), flat.numpy(), model(t(packed), cu_seqlens=t(cu))[0].numpy()
    else:
        import jax

        run = jax.jit(lambda *a: model(a[0], attention_mask=a[1], cache=a[2], cu_seqlens=a[3]))
        batch, cache = run(padded, mask, model.new_cache(3, 40), None)
        flat, cache_packed = run(packed, None, model.new_cache(3, 40), cu)
        one, two = (np.asarray(run(TOKENS[:, :1], None, c, None)[0]) for c in (cache, cache_packed))
        batch, flat = np.asarray(batch), np.asarray(flat)
        uncached = flat
    for i, n in enumerate(lengths):
        same(flat[0, cu[i] : cu[i + 1]], batch[i, 29 - n :], 1e-5)
        same(uncached[0, cu[i] : cu[i + 1]], batch[i, 29 - n :], 1e-5)
        if alone is not None:
            same(batch[i, 29 - n :], alone[i], 1e-5)
        assert not batch[i, : 29 - n].any()
    same(one, two, 1e-5)


def test_padding_takes_no_place_in_a_cache():
    """What fits without its padding is as it is alone, behind layers of attention too."""
    import torch

    model, tokens, mask = torch_model(ALTERNATE), torch.from_numpy(TOKENS), torch.zeros(2, 6)
    mask[0, 5], mask[1, 1:] = 1, 1
    with torch.no_grad():
        _, cache = model(tokens[:2, :7], cache=model.new_cache(2, 12))
        logits, cache = model(tokens[:2, 7:13], attention_mask=mask, cache=cache)
        last, _ = model(tokens[:2, 12:13], cache=cache)
        whole, _ = model(torch.cat([tokens[:1, :7], tokens[:1, 12:13], tokens[:1, 12:13]], 1))
    same(logits[0, 5].numpy(), whole[0, 7].numpy(), 1e-5)
    same(last[0].numpy(), whole[0, 8:].numpy(), 1e-5)


def test_a_packed_sequence_that_no_longer_fits_spoils_no_other():
    import torch

    model, cu = torch_model(ALTERNATE), torch.tensor([0, 4, 11, 13])
    packed = torch.from_numpy(TOKENS[:1, :13])
    with torch.no_grad():
        logits, cache = model(packed, cu_seqlens=cu, cache=model.new_cache(3, 6))
        after, _ = model(packed[0, :3, None], cache=cache)
        for n, (start, stop) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
            whole, _ = model(torch.cat([packed[:, start:stop], packed[:, n : n + 1]], 1))
            if n == 1:
                assert logits[0, stop - 1].isnan().all() and after[n].isnan().all()
            else:
                same(logits[0, start:stop].numpy(), whole[0, :-1].numpy(), 1e-5)
                same(after[n].numpy(), whole[0, -1:].numpy(), 1e-5)


def test_several_continuations_of_one_cache():
    """A cache that was given is as it was, and so are those that came out of it, unless it was given to be overwritten."""
    import torch

    model, tokens = torch_model(ALTERNATE), torch.from_numpy(TOKENS)
    whole = torch.cat([tokens[:, :10], tokens[:, 12:14]], 1)
    with torch.no_grad():
        _, cache = model(tokens[:, :10], cache=model.new_cache(3, 20))
        _, one = model(tokens[:, 12:13], cache=cache)
        for start, stop in ((20, 21), (20, 25)):
            model(tokens[:, start:stop], cache=cache)
        same(model(tokens[:, 13:14], cache=one)[0].numpy(), model(whole)[0][:, -1:].numpy(), 1e-5)
        keys = one[1].keys
        assert model(tokens[:, 13:14], cache=one, in_place=True)[1][1].keys is keys


def test_targets_that_do_not_count():
    """Whatever number below zero marks them, and whatever integers they are."""
    import torch

    from kdakit.models.torch import loss

    model, tokens = torch_model(), torch.from_numpy(TOKENS)
    value = lambda marked: float(loss(model, tokens, torch.where(tokens % 3 == 0, marked, tokens).to(marked.dtype)).detach())
    assert value(torch.tensor(-1)) == value(torch.tensor(-100)) == value(torch.tensor(-2, dtype=torch.int32))


def test_checkpointed_activations_change_nothing():
    plain, checkpointed = (torch_results(torch_model(checkpoint_activations=flag)) for flag in (False, True))
    for name, gradient in plain[2].items():
        same(checkpointed[2][name], gradient, 1e-6)


def test_checkpointed_activations_change_nothing_in_jax():
    """Up to rounding: XLA fuses the two programs differently. The second one does compute things again."""
    from flax import nnx

    config = replace(DEEP, num_layers=1)
    plain, checkpointed = (jax_results(jax_model(config, checkpoint_activations=flag)) for flag in (False, True))
    assert abs(plain[1] - checkpointed[1]) < 1e-6
    for name, gradient in plain[2].items():
        same(checkpointed[2][name], gradient)
    graph, state = nnx.split(jax_model(config, checkpoint_activations=True))
    import jax

    assert "remat" in str(jax.make_jaxpr(jax.grad(lambda s: nnx.merge(graph, s)(TOKENS)[0].sum()))(state))


def test_compiled_model_is_the_same():
    """One graph, forward and backward, padding included."""
    import torch

    model = torch_model()
    want = torch_results(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    mask = torch.ones(3, 29, dtype=torch.int64)
    mask[1, :20] = 0
    for given in (None, mask):
        with torch.no_grad():
            expected = model(torch.from_numpy(TOKENS), attention_mask=given)[0]
        logits, _ = compiled(torch.from_numpy(TOKENS), attention_mask=given)
        same(logits.detach().numpy(), expected.numpy(), 1e-5)
    model.zero_grad()
    logits, _ = compiled(torch.from_numpy(TOKENS))
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(TARGETS).flatten(), ignore_index=-1).backward()
    for name, parameter in model.named_parameters():
        same(parameter.grad.numpy(), want[2][name], 1e-5)


def test_generation_is_alike_in_both_frameworks_and_in_pieces():
    for sample in (lambda: greedy, lambda: sampler(0.8, top_k=5, seed=3)):
        ours = np.stack(list(generate(torch_model(DEEP), TOKENS[:2, :9], 6, sample())), 1)
        theirs = np.stack(list(generate(jax_model(DEEP), TOKENS[:2, :9], 6, sample())), 1)
        pieces = np.stack(list(generate(torch_model(DEEP), TOKENS[:2, :9], 6, sample(), piece=4)), 1)
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(ours, pieces)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_generation_writes_into_the_cache_that_it_made(framework):
    """Prompt, in pieces or not, and steps: twice the cache is never there."""
    model = model_of(framework, ALTERNATE)
    place = lambda cache: [x.data_ptr() if framework == "torch" else x.unsafe_buffer_pointer() for x in cache[1][:2]]
    made, seen = model.inference, []

    def inference(**options):
        call = made(**options)

        def watched(tokens, cache):
            before = place(cache)
            logits, cache = call(tokens, cache)
            seen.append((tokens.shape[1], place(cache) == before))
            return logits, cache

        return watched

    model.inference = inference
    whole = list(generate(model, TOKENS[:2, :9], 3, greedy))
    pieces = list(generate(model, TOKENS[:2, :9], 3, greedy, piece=4))
    np.testing.assert_array_equal(whole, pieces)
    assert seen == [(n, True) for n in (9, 1, 1, 4, 4, 1, 1, 1)]


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_cache_that_inference_leaves_as_it_was(framework):
    """Several continuations, of several tokens each; and what a captured step holds is never overwritten by anybody else."""
    from kdakit.models.captured import Moved

    model = model_of(framework, ALTERNATE)
    call = model.inference(in_place=False)
    _, cache = call(TOKENS[:, :10], model.new_cache(3, 20))
    want, _ = call(TOKENS[:, 12:14], cache)
    call(TOKENS[:, 20:25], cache)
    np.testing.assert_array_equal(call(TOKENS[:, 12:14], cache)[0], want)
    if framework == "torch":
        _, after = model.inference(in_place=True)(TOKENS[:, 12:14], Moved(cache))
        assert after[1].keys is not cache[1].keys
        _, after = model.inference(in_place=True)(TOKENS[:, 12:14], cache)
        assert after[1].keys is cache[1].keys


def test_samplers():
    logits = np.tile(np.array([0.0, 1.0, 3.0, 2.0]), (4000, 1))
    assert (greedy(logits) == 2).all() and sampler(0.0) is greedy
    drawn = np.bincount(sampler(1.0)(logits), minlength=4) / 4000
    np.testing.assert_allclose(drawn, np.exp(logits[0]) / np.exp(logits[0]).sum(), atol=0.03)
    assert set(sampler(1.0, top_k=2)(logits)) == {2, 3}
    equal = np.tile(np.array([0.0, 3.0, 3.0, 3.0]), (50, 1))
    assert set(sampler(1.0, top_k=2)(equal)) == {1, 2} and set(sampler(1.0, top_k=1)(equal)) == {1}
    assert (sampler(1e-310)(logits) == 2).all(), "so cold that the others are beyond what a float can say"
    for temperature in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=f"temperature must be at least 0, got {temperature}"):
            sampler(temperature)


def test_prompts_are_checked():
    model = torch_model(DEEP)
    for prompt, message in (
        (np.zeros(3), "prompt must be \\[B, T\\]"),
        (np.full((1, 2), 40), "prompt must hold tokens 0 .. 39, got 40 .. 40"),
    ):
        with pytest.raises(ValueError, match=message):
            list(generate(model, prompt, 1, greedy))
    prompt = np.array([[3, 1, 4]])
    for name in ("count", "piece"):
        with pytest.raises(ValueError, match=f"{name} must be at least 0, got -1"):
            list(generate(model, prompt, **dict(count=1, piece=0) | {name: -1}, sample=greedy))
    want = list(generate(model, prompt, 2, greedy))
    for kind in (np.uint8, np.uint16, np.uint64, np.int16):  # as files of tokens have them
        assert list(generate(model, prompt.astype(kind), 2, greedy)) == want


def test_parameters_and_cache_sizes_are_those_of_the_model():
    model = torch_model()
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == CONFIG.parameters()
    for length in (10, 1000):
        kda, attention = model.new_cache(1, length)
        held = sum(t.numel() * t.element_size() for t in kda) + sum(2 * t[:, :-1].numel() * 4 for t in attention[:1])
        assert CONFIG.cache_bytes(length) == held
    assert replace(CONFIG, attention_every=0).cache_bytes(10) == replace(CONFIG, attention_every=0).cache_bytes(10**9)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(vocab_size=0), "vocab_size must be an integer of at least 1, got 0"),
        (dict(num_layers=1.5), "num_layers must be an integer of at least 1, got 1.5"),
        (dict(attention_every=-1), "attention_every must be an integer of at least 0, got -1"),
        (dict(num_kv_heads=3), "num_kv_heads must divide the 4 attention heads, got 3"),
        (dict(lower_bound=1.0), "lower_bound must lie in"),
    ],
)
def test_configurations_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**fields)
    with pytest.raises(ValueError, match="no field 'hiden_size'; did you mean 'hidden_size'"):
        ModelConfig.from_dict({"hiden_size": 3})


def test_tokens_are_checked():
    import torch

    model, tokens = torch_model(DEEP), torch.zeros(2, 4, dtype=torch.int64)
    for given, message in (
        (dict(tokens=tokens[0]), "tokens must be \\[B, T\\], got \\(4,\\)"),
        (dict(tokens=tokens, attention_mask=tokens[:, 1:]), "attention_mask must be \\[B, T\\] = \\(2, 4\\)"),
        (dict(tokens=tokens, cu_seqlens=torch.tensor([0, 4])), "tokens must have B = 1 with cu_seqlens, got B = 2"),
        (dict(tokens=tokens[:1], attention_mask=tokens[:1], cu_seqlens=torch.tensor([0, 4])), "exclude each other"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**given)


def spoil(kind, path):
    """Turn a good weights file into a bad one."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    if kind == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "not safetensors":
        path.write_bytes(b"PK\x03\x04" + data)
    elif kind == "no configuration":
        weights.write_whole(path, weights.to_bytes(moved(DEEP)))
    elif kind == "foreign names":
        weights.write_whole(path, weights.to_bytes({"layer.0.w": np.zeros(3, np.float32)}, header["__metadata__"]))
    elif kind == "wrong shape":
        changed = moved(DEEP) | {"model.norm.weight": np.zeros(3, np.float32)}
        weights.write_whole(path, weights.to_bytes(changed, header["__metadata__"]))
    elif kind == "unknown field":
        weights.write_whole(path, weights.to_bytes(moved(DEEP), {weights.CONFIG_KEY: '{"num_layer": 2}'}))


@pytest.mark.parametrize(
    "kind, message",
    [
        ("truncated", "must be a whole safetensors file"), ("empty", "must be a whole safetensors file, got 0 bytes"),
        ("not safetensors", "must be a whole safetensors file"), ("no configuration", "must carry 'kdakit.config' in its header"),
        ("foreign names", "missing .* and 1 unknown \\(layer.0.w\\)"), ("wrong shape", "model.norm.weight must be \\[16\\], got \\[3\\]"),
        ("unknown field", "no field 'num_layer'; did you mean 'num_layers'"),
    ],
)  # fmt: skip
def test_bad_files_are_refused_and_left_alone(tmp_path, kind, message):
    path = tmp_path / "model.safetensors"
    weights.save(path, DEEP, moved(DEEP))
    spoil(kind, path)
    before = path.read_bytes()
    with pytest.raises(weights.WeightsError, match=message):
        weights.load(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    weights.save(path, DEEP, moved(DEEP))
    before = path.read_bytes()

    def full(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        weights.save(path, DEEP, moved(DEEP, seed=9))
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1
