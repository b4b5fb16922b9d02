"""What fails half-way has changed nothing, and what makes no sense is said: weights, generation, requests, graphs that threads share."""

import threading
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from kdakit.models import captured, weights  # noqa: E402
from kdakit.models.config import ModelConfig  # noqa: E402
from kdakit.models.generation import generate  # noqa: E402
from kdakit.models.sampling import greedy, sampler  # noqa: E402
from kdakit.models.torch import KimiLinear  # noqa: E402

SMALL = ModelConfig(vocab_size=16, hidden_size=16, num_layers=1, num_heads=1, head_dim=8, attention_every=0)


def changed(before, after):
    return [name for name in before if not np.array_equal(before[name], after[name])]


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_weights_are_taken_whole_or_not_at_all(framework):
    if framework == "torch":
        model = KimiLinear(SMALL)
    else:
        pytest.importorskip("flax")
        from kdakit.models.jax import KimiLinear as JaxModel

        model = JaxModel(SMALL)

    class Broken:
        """An array until somebody wants its values."""

        def __init__(self, like):
            self.shape, self.dtype = like.shape, like.dtype

        def __array__(self, *_, **__):
            raise OSError("the disk is gone")

    before = model.weights()
    other = {name: x + 1 for name, x in before.items()}
    last = list(other)[-1]
    with pytest.raises((OSError, TypeError)):
        model.load_weights(other | {last: Broken(other[last])})
    assert changed(before, model.weights()) == []
    model.load_weights(other)
    assert len(changed(before, model.weights())) == len(before)


def test_bfloat16_weights_come_back_from_a_file_and_into_a_model(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    model = KimiLinear(SMALL)
    half = {name: x.astype(ml_dtypes.bfloat16) for name, x in model.weights().items()}
    weights.save(tmp_path / "half.safetensors", SMALL, half)
    config, found = weights.load(tmp_path / "half.safetensors")
    assert config == SMALL and changed({n: x.astype(np.float32) for n, x in half.items()}, found) == []
    for given in (found, half):
        model.load_weights(given)
        assert changed(found, model.weights()) == []


@pytest.mark.parametrize("sample", [greedy, sampler(0.7)])
def test_logits_that_are_no_numbers_are_not_text(sample):
    model = KimiLinear(SMALL)
    assert len(list(generate(model, np.array([[1, 2]]), 2, sample))) == 2
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(FloatingPointError, match="logits after 2 tokens must be finite"):
        list(generate(model, np.array([[1, 2]]), 2, sample))


@pytest.mark.parametrize(
    "prompt, kind", [([[1.5]], TypeError), ([[True]], TypeError), (np.zeros((0, 3), int), ValueError), ([[99]], ValueError)]
)
def test_prompts_that_are_none_are_refused(prompt, kind):
    with pytest.raises(kind, match="prompt must"):
        next(generate(KimiLinear(SMALL), np.array(prompt), 1, greedy))


class Sly(list):
    """A prompt that runs somebody's code while it is read."""

    meanwhile = staticmethod(lambda: None)

    def __iter__(self):
        self.meanwhile()
        return super().__iter__()


def test_a_request_that_is_submitted_while_it_is_being_submitted():
    """Two threads that submit one request to two engines: the second comes while the first reads the prompt, with locks of their own."""
    from kdakit.serving.engine import Engine, Request
    from kdakit.serving.torch.model import ServedModel

    served = ServedModel(KimiLinear(SMALL), 2)
    engines, refused = [Engine(served), Engine(served)], []
    prompt = Sly([1, 2, 3])
    request = Request(prompt, 2)

    def again():
        prompt.meanwhile = lambda: None
        for engine in engines:
            with pytest.raises(ValueError, match="submitted once"):
                engine.submit(request)
            refused.append(engine)

    prompt.meanwhile = again
    engines[0].submit(request)
    assert refused == engines and [len(e.waiting) for e in engines] == [1, 0] and request.owner is engines[0]
    bad = Request([1.5], 2)
    for engine in engines:  # what was refused has no owner
        with pytest.raises(TypeError, match="must hold integers"):
            engine.submit(bad)
    assert bad.owner is None


def test_threads_do_not_take_one_captured_step_for_two_sequences(monkeypatch):
    """As on a CUDA device, with a step that takes its time: whoever finds a free one has it before the next one looks."""

    class Step:
        def __init__(self, model, cache):
            self.latest, self.users = (lambda: None), []

        def takes(self, cache):
            free = self.latest() is cache if isinstance(cache, captured.Moved) else self.latest() is None
            time.sleep(0.01)
            return free

        def __call__(self, tokens, cache):
            after = captured.Moved(cache)
            self.latest = lambda: after
            self.users.append(tokens)
            return tokens, after

    monkeypatch.setattr(captured, "CapturedStep", Step)
    steps, together, failed = captured.CapturedSteps(), threading.Barrier(4), []

    def sequence(name):
        together.wait()
        try:
            cache = [name]
            for _ in range(3):
                _, cache = steps(None, name, cache)
        except Exception as problem:
            failed.append(problem)

    threads = [threading.Thread(target=sequence, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and sorted(step.users for step in steps.steps) == [[n] * 3 for n in range(4)]


def test_hints_of_serving_calls_and_stacks_are_near_or_not_there():
    import kdakit
    from kdakit.serving.torch import StatePool, decode

    pool = StatePool(slots=2, HV=1, K=4, V=4)
    x = torch.zeros(1, 1, 1, 4)
    call = lambda **options: decode(pool, pool.allocate(1), q=x, k=x, v=x, g=x, beta=x[..., 0], **options)
    with pytest.raises(TypeError, match="'foo'; options are scale, "):
        call(foo=1)
    with pytest.raises(TypeError, match="'safe_gat'; did you mean 'safe_gate'"):
        call(safe_gat=True)
    with pytest.raises(ValueError, match=r"got 'zzzz'$"):
        kdakit.enable("zzzz")
    with pytest.raises(ValueError, match="did you mean 'transformers'"):
        kdakit.enable("transformer")
