"""The layer's kernels on a GPU: random problems, the layer with and without them, graphs, pools. Skipped, with the reason, without one."""

from __future__ import annotations

import copy
import os

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import fused_problems  # noqa: E402

from kdakit.accuracy import SLACK  # noqa: E402
from kdakit.layers.torch import KimiDeltaAttention, convolution, delta, norm  # noqa: E402
from kdakit.models import torch as models  # noqa: E402
from kdakit.models.config import ModelConfig  # noqa: E402
from kdakit.models.torch import KimiLinear, cast, loss  # noqa: E402
from kdakit.rounding import UNIT_ROUNDOFF  # noqa: E402
from kdakit.serving.torch import layer as pooled  # noqa: E402
from kdakit.serving.torch.model import ServedModel  # noqa: E402

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1", reason="needs a GPU, and Triton's compiler"
)
RICH = dict(num_v_heads=4, expand_v=1.5, conv_bias=True, conv_size=3, lower_bound=-4.0, safe_gate=True, allow_neg_eigval=True)
FORMS = {"plain": {}, "rich": RICH}
HIDDEN, T = 96, 130


@pytest.mark.parametrize("first", (0, 8, 16, 24))
@pytest.mark.parametrize("kind", fused_problems.KINDS)
def test_random_problems(kind, first):
    found = [line for i in range(4) for line in fused_problems.wrong(fused_problems.KINDS[kind](first + i, first % 16 == 8), "cuda")]
    assert not found, "\n".join(found)


@pytest.fixture
def plain(monkeypatch):
    """A function that turns the kernels off, or on again."""

    def use(on: bool):
        monkeypatch.undo()
        if not on:
            monkeypatch.setattr(delta, "whole_layer", lambda *_: None)
            monkeypatch.setattr(norm, "carried", lambda *_: None)
            monkeypatch.setattr(models, "feed_forward", lambda *_: None)
            monkeypatch.setattr(delta, "fused_dtype", lambda *_: None)
            monkeypatch.setattr(delta, "takes_step", lambda *_: False)
            monkeypatch.setattr(norm, "fits", lambda *_: False)
            monkeypatch.setattr(convolution, "fits", lambda *_: False)
            monkeypatch.setattr(pooled, "takes_step", lambda *_: False)

    return use


def made(form: str, dtype):
    torch.manual_seed(0)
    layer = KimiDeltaAttention(hidden_size=HIDDEN, head_dim=32, num_heads=2, **FORMS[form])
    return layer.to("cuda", dtype)


def call(layer, x, d_o, how):
    """Outputs and the gradients of everything."""
    given = x.clone().requires_grad_()
    rows = {}
    if how == "packed":
        rows["cu_seqlens"] = torch.tensor([0, 50, 50, 51, x.shape[1]], device=x.device)
    if how == "mask":
        rows["attention_mask"] = (torch.arange(x.shape[0] * x.shape[1], device=x.device) % 7 > 1).int().view(x.shape[:2])
    if how == "cache":
        fresh = layer.new_cache(x.shape[0])
        torch.manual_seed(1)
        rows["cache"] = type(fresh)(*((torch.randn(a.shape) * 0.1).to(a) for a in fresh))
    layer.zero_grad()
    o, cache = layer(given, **rows)
    o.backward(d_o)
    out = {"o": o, "x": given.grad} | {name: p.grad for name, p in layer.named_parameters()}
    return out | ({} if cache is None else {f"cache {i}": a for i, a in enumerate(cache)})


def error(got, want) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize("how", ("rows", "packed", "mask", "cache"))
@pytest.mark.parametrize("form", FORMS)
def test_the_layer_is_as_right_as_its_plain_form(form, how, plain):
    """Against float64: no further off than SLACK times the plain form in the same dtype, or one rounding."""
    plain(False)
    torch.manual_seed(2)
    x = torch.randn(1 if how == "packed" else 2, T, HIDDEN, device="cuda").bfloat16()
    d_o = torch.randn_like(x)
    truth = call(made(form, torch.bfloat16).double(), x.double(), d_o.double(), how)
    usual = call(made(form, torch.bfloat16), x, d_o, how)
    plain(True)
    got = call(made(form, torch.bfloat16), x, d_o, how)
    for name, want in truth.items():
        allowed = SLACK * max(error(usual[name], want), UNIT_ROUNDOFF["bfloat16"])
        assert error(got[name], want) <= allowed, f"{name} is off by {error(got[name], want):.1e}, allowed {allowed:.1e}"


@pytest.mark.parametrize("form", ("parts", "whole"))
def test_a_models_gradients_are_as_right_as_in_its_plain_form(form, plain, monkeypatch):
    """Loss and gradients of a bfloat16 model against float64, whose layers go by their parts, or as one."""
    tokens = torch.randint(0, 30, (2, T), device="cuda")
    config = ModelConfig(vocab_size=30, hidden_size=HIDDEN, num_layers=3, attention_every=3, head_dim=32, num_heads=2)

    def learned(dtype):
        model = cast(KimiLinear(config).cuda(), dtype)
        value = loss(model, tokens, tokens.roll(-1, 1))
        value.backward()
        return {"loss": value.detach()} | {name: p.grad for name, p in model.named_parameters()}

    plain(False)
    truth, usual = learned(torch.float64), learned(torch.bfloat16)
    plain(True)
    whole, used = delta.whole_layer, []
    if form == "parts":
        monkeypatch.setattr(delta, "whole_layer", lambda *_: None)
    else:
        monkeypatch.setattr(delta, "whole_layer", lambda *given: (made := whole(*given), used.append(made is not None))[0])
    got = learned(torch.bfloat16)
    assert used == [True] * (2 if form == "whole" else 0)
    for name, want in truth.items():
        allowed = SLACK * max(error(usual[name], want), UNIT_ROUNDOFF["bfloat16"])
        assert error(got[name], want) <= allowed, f"{name} is off by {error(got[name], want):.1e}, allowed {allowed:.1e}"


def test_autocast_and_compiled():
    layer, x = made("plain", torch.float32), torch.randn(2, T, HIDDEN, device="cuda")
    want = layer(x)[0]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        o = layer(x)[0]
    o.float().square().sum().backward()
    assert o.dtype == torch.bfloat16 and error(o, want) < SLACK * UNIT_ROUNDOFF["bfloat16"] * 8
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
    half, x = made("plain", torch.bfloat16), x.bfloat16()
    compiled = torch.compile(half, fullgraph=True)
    for run in (half, compiled):
        half.zero_grad()
        run(x)[0].float().square().sum().backward()
        gradients = [p.grad.clone() for p in half.parameters()]
        if run is half:
            usual = gradients
    assert error(compiled(x)[0], half(x)[0]) < SLACK * UNIT_ROUNDOFF["bfloat16"]
    assert all(error(a, b) < SLACK * UNIT_ROUNDOFF["bfloat16"] for a, b in zip(gradients, usual, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_steps_are_the_whole_in_place_and_in_a_graph(form, plain):
    plain(True)
    layer, x = made(form, torch.bfloat16), torch.randn(3, 24, HIDDEN, device="cuda").bfloat16()
    whole = layer(x)[0]
    cache, parts = layer.new_cache(3), []
    for start, stop in ((0, 9), (9, 10), (10, 14), (14, 22)):
        old = [a.clone() for a in cache]
        o, after = layer(x[:, start:stop], cache=cache)
        assert all(torch.equal(a, b) for a, b in zip(old, cache, strict=True)), "the old cache has moved"
        cache = after
        parts.append(o)
    where = [a.data_ptr() for a in cache]
    token, graph = x[:, 22:23].clone(), torch.cuda.CUDAGraph()
    kept = copy.deepcopy(cache)
    layer(token, cache=kept, in_place=True)  # compiles
    with torch.cuda.graph(graph):
        o, after = layer(token, cache=cache, in_place=True)
    assert [a.data_ptr() for a in after] == where
    for t in (22, 23):
        token.copy_(x[:, t : t + 1])
        graph.replay()
        parts.append(o.clone())
    allowed = SLACK * 4 * UNIT_ROUNDOFF["bfloat16"]  # four roundings on the way: q, k, v, o
    assert error(torch.cat(parts, 1), whole) < allowed


@torch.no_grad()
def test_a_served_model_says_the_same_with_and_without(plain):
    """Decode, drafts of 2 to 8, parts of them accepted, in slots in any order; float32, so that the two differ in the last bits only."""
    answers = []
    for on in (False, True):
        plain(on)
        config = ModelConfig(vocab_size=50, hidden_size=64, num_layers=2, num_heads=2, head_dim=32, attention_every=0)
        served = ServedModel(KimiLinear(config).cuda(), 6, graphs=False)
        slots = [served.allocate() for _ in range(4)]
        out = [served.prefill(slots, [[1, 2, 3], [4], [5, 6, 7, 8, 9], [1]], [[]] * 4)[0]]
        for count in (2, 3, 5, 8):
            rows = [slots[i] for i in (2, 0, 3)]
            logits, drafts = served.verify(rows, [[(7 * count + i) % 50 for i in range(count)]] * 3)
            served.commit(drafts, [count, 1, 0])
            out += [logits, served.decode([slots[1], slots[2]], [count, count + 1])]
        answers.append(torch.cat([a.flatten() for a in out]))
    assert error(answers[1], answers[0]) < 1000 * UNIT_ROUNDOFF["float32"]


@torch.no_grad()
def test_captured_steps_follow_unseen_and_say_the_same():
    """Tokens chosen in the graph, steps begun before the last one's tokens were read, drafts, prompts between them; float32."""
    config = ModelConfig(vocab_size=50, hidden_size=64, num_layers=2, num_heads=2, head_dim=32, attention_every=0)
    model, answers = KimiLinear(config).cuda(), []
    for graphs in (False, True):
        served = ServedModel(model, 8, graphs=graphs)
        assert (served.captured is not None) == graphs
        slots = [served.allocate() for _ in range(5)]
        tokens = served.choose(served.prefill(slots, [[1, 2, 3], [4], [5, 6, 7, 8, 9], [1], [2, 2]], [[]] * 5)[0])
        said, step = [tokens], served.begin(slots, tokens)
        for _ in range(6):
            after = served.follow(step)
            said.append(step.tokens())
            step = after
        said.append(step.tokens())
        chosen, draft = served.verify_tokens(slots[1:4], [[1, 2, 3], [4, 5, 6], [7, 8, 9]])
        served.commit(draft, [0, 1, 3])
        said += [chosen, served.next_tokens(slots[:3], [1, 2, 3]), served.next_tokens(slots, [5, 4, 3, 2, 1])]
        answers.append(said)
    assert answers[0] == answers[1]
