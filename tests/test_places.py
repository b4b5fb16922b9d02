"""Where models compute and in which dtype: the device that is there, master weights, accumulated gradients, the log of a run."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from kdakit.models import place
from kdakit.models.config import ModelConfig
from kdakit.models.torch import KimiLinear, cast
from kdakit.training import log, text
from kdakit.training.optimizer import AdamW
from kdakit.training.sizes import SIZES
from kdakit.training.torch import Learner

TINY = ModelConfig(vocab_size=256, hidden_size=16, num_layers=2, attention_every=2, num_heads=1, head_dim=8)
CPU = torch.device("cpu")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def batches(count, size=4):
    return [text.batch(np.frombuffer(text.book(5000), np.uint8), np.random.default_rng([0, i]), size, 24) for i in range(count)]


def learner(dtype="float32", device=CPU, **given):
    return Learner(TINY, AdamW(steps=10, warmup=2), place=place.Place(device, dtype), **given)


def test_the_default_is_the_accelerator_that_is_there_in_bfloat16():
    found = place.find("torch")
    if torch.cuda.is_available():
        assert (found.device.type, found.dtype) == ("cuda", "bfloat16")
    else:
        assert (found.device.type, found.dtype) == ("cpu", "float32")
    assert place.find("torch", "cpu", "bfloat16") == place.Place(CPU, "bfloat16")


def test_places_that_are_not_there_are_refused_by_name():
    with pytest.raises(ValueError, match=r"device must be one that PyTorch has here \(cpu.*\), got 'tpu9'"):
        place.find("torch", "tpu9")
    with pytest.raises(ValueError, match=r"dtype must be one of float32, .*, got 'int8'"):
        place.find("torch", "cpu", "int8")
    pytest.importorskip("jax")
    with pytest.raises(ValueError, match=r"device must be one that JAX has here \(.*\), got 'nothing:3'"):
        place.find("jax", "nothing:3")
    assert place.find("jax", "cpu").dtype == "float32"


def test_gates_and_norms_stay_float32_in_a_bfloat16_model():
    model = cast(KimiLinear(TINY), torch.bfloat16)
    kinds = {name: p.dtype for name, p in model.named_parameters()}
    kept = {name for name, dtype in kinds.items() if dtype == torch.float32}
    assert kept == {n for n in kinds if place.kept_float32(n)} and any("A_log" in n for n in kept) and any("norm" in n for n in kept)
    logits, _ = model(torch.zeros(1, 5, dtype=torch.int64))
    assert logits.dtype == torch.bfloat16


def test_a_bfloat16_run_moves_float32_weights():
    """Steps smaller than a rounding to bfloat16 must add up: the masters move, and the model is their rounding."""
    one, plain = learner("bfloat16"), learner()
    losses = [(one.step(*pair), plain.step(*pair)) for pair in batches(4)]
    np.testing.assert_allclose(*np.transpose(losses), rtol=0.02)
    for name, master in one.named.items():
        assert master.dtype == torch.float32
        computing = one.computing[name]
        assert torch.equal(computing.float(), master.to(computing.dtype).float()), name
    moved = one.named["model.layers.0.mlp.up_proj.weight"]
    assert not torch.equal(moved, moved.bfloat16().float())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_in_any_dtype_goes_on_from_its_state(dtype):
    one, given = learner(dtype), batches(4)
    for pair in given[:2]:
        one.step(*pair)
    again = learner(dtype, seed=5)
    again.load(one.state())
    assert [one.step(*pair) for pair in given[2:]] == [again.step(*pair) for pair in given[2:]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pieces_of_a_batch_add_up_to_the_batch(dtype):
    whole, pieces, pair = learner(dtype), learner(dtype, accumulate=4), batches(1)[0]
    assert whole.step(*pair) == pytest.approx(pieces.step(*pair), rel=1e-2 if dtype == "bfloat16" else 1e-6)
    a, b = whole.state().first, pieces.state().first
    for name in a:
        size = np.abs(a[name]).max()
        np.testing.assert_allclose(b[name], a[name], atol=(3e-2 if dtype == "bfloat16" else 1e-5) * size, err_msg=name)


def test_a_model_can_be_copied_and_pickled_with_what_it_has_captured():
    model = KimiLinear(TINY)
    model._steps.steps.append(object())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other._steps.steps == [] and torch.equal(other.model.embeddings.weight, model.model.embeddings.weight)


def test_float16_training_is_refused_with_its_reason():
    with pytest.raises(ValueError, match=r"dtype must be float32 or bfloat16 for training, .*range of float16"):
        learner("float16")


def test_jax_computes_in_bfloat16_and_accumulates():
    pytest.importorskip("flax"), pytest.importorskip("optax")
    from kdakit.training.jax import Learner as JaxLearner

    small = dataclasses.replace(TINY, num_layers=1, attention_every=0)
    where = place.find("jax", "cpu", "bfloat16")
    one = JaxLearner(small, AdamW(steps=10, warmup=2), place=where, accumulate=2)
    plain = Learner(small, AdamW(steps=10, warmup=2))
    pair = batches(1)[0]
    assert one.step(*pair) == pytest.approx(plain.step(*pair), rel=0.02)
    assert all(w.dtype == np.float32 for w in one.weights().values())


def test_the_log_forgets_what_came_after_the_checkpoint(tmp_path):
    log.append(tmp_path, [log.Row(i, 1.0 / i, 0.1, 10.0) for i in (1, 2, 3)])
    log.append(tmp_path, [log.Row(4, 0.25, 0.1, 10.0, 0.5)])
    log.forget_after(tmp_path, 2)
    lines = (tmp_path / log.NAME).read_text().splitlines()
    assert lines[0].split(",")[:2] == ["step", "loss"] and [line.split(",")[0] for line in lines[1:]] == ["1", "2"]
    log.forget_after(tmp_path / "nowhere", 2)


def test_the_340m_size_has_that_many_parameters_and_counts_its_flops():
    from kdakit.measure.whole_models import configuration

    config = configuration("340m")
    count = sum(int(np.prod(shape)) for shape in config.parameters().values())
    assert 330e6 < count < 350e6 and SIZES["340m"].attention_every == 4
    assert config.flops_per_token(4096) == pytest.approx(2 * count, rel=0.15)
    assert config.flops_per_token(8192) > config.flops_per_token(4096)


@on_gpu
def test_a_captured_step_says_what_the_model_says():
    model = cast(KimiLinear(TINY).cuda(), torch.bfloat16)
    prompt = np.arange(10)[None] % 256
    said = []
    for graph in (False, True):
        call = model.inference(graph=graph)
        for _ in range(2):  # the second time on another cache of the same size
            logits, cache = call(prompt, model.new_cache(1, 40))
            made = []
            for _ in range(12):
                logits, cache = call(logits[:, -1].argmax(-1)[:, None], cache)
                made.append(logits.copy())
            said.append(np.concatenate(made, 1))
    for other in said[1:]:
        np.testing.assert_array_equal(other, said[0])


@on_gpu
def test_two_sequences_under_way_at_once_and_a_cache_that_is_used_up():
    model = cast(KimiLinear(TINY).cuda(), torch.bfloat16)
    call, alone = model.inference(), model.inference(graph=False)
    caches = [call(np.full((1, 5), n), model.new_cache(1, 30))[1] for n in (1, 2)]
    wanted = [alone(np.full((1, 5), n), model.new_cache(1, 30))[1] for n in (1, 2)]
    for token in range(6):
        for i in (0, 1):
            before = caches[i]
            logits, caches[i] = call(np.array([[token]]), caches[i])
            expected, wanted[i] = alone(np.array([[token]]), wanted[i])
            np.testing.assert_array_equal(logits, expected)
    with pytest.raises(ValueError, match="cache must be the latest one of its sequence"):
        call(np.array([[1]]), before)
    assert len(model._steps.steps) == 2
