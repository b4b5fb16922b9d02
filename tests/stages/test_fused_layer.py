"""The layer's kernels in Triton's interpreter, on random problems against float64; and what the layer does with them.

The interpreter must be chosen before Triton is imported: without TRITON_INTERPRET=1 one test runs this file in a process that has it.
"""

from __future__ import annotations

import json
import os
import re
import weakref
from pathlib import Path

import fresh
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")
import fused_problems  # noqa: E402

from kdakit.layers.torch.fused import step  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RECORDS = Path(__file__).parents[2] / "benchmarks/results/gpu/trials"
FULL = os.environ.get("KDAKIT_FULL") == "1"  # make test-full
interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in a process with TRITON_INTERPRET=1")
SEEDS = {"convolution": 10, "norm": 10, "swiglu": 4, "turned": 8, "step": 6}


def test_cuts_are_the_fastest_that_were_timed():
    """32 heads of 128: of the cuts of one sequence and of 32, of one token and of several, that the record of an H200 holds."""
    rows = json.loads((RECORDS / "2026-11-16_h200_layer_step.json").read_text())["results"]
    timed: dict[tuple, dict] = {}
    for row in rows:
        N, T, *cut = map(int, re.findall(r"\d+", row["cut"]))
        timed.setdefault((N * 32 <= step.FEW, T == 1, T), {})[tuple(cut)] = row["us"]
    assert {key[:2] for key in timed} == set(step.CUTS)
    for (few, single, T), times in timed.items():
        assert min(times, key=times.get) == (*step.CUTS[few, single], 0), (few, T)


@pytest.mark.skipif(INTERPRETED, reason="is the process with TRITON_INTERPRET=1")
def test_in_the_interpreter():
    done = fresh.run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-3000:]


@interpreter
@pytest.mark.parametrize("kind", SEEDS)
def test_random_problems(kind):
    """Each of another form: seeds closer than ALIKE would be compiled alike."""
    make, count = fused_problems.KINDS[kind], SEEDS[kind] * (10 if FULL else 1)
    found = [line for i in range(count) for line in fused_problems.wrong(make(i * fused_problems.ALIKE))]
    assert not found, "\n".join(found)


@interpreter
@pytest.mark.parametrize("few, single", list(step.CUTS) if FULL else [cut for cut in step.CUTS if any(cut)])  # warps are all alike here
def test_cuts_of_heads_of_128(few, single, monkeypatch):
    """Those of the table, which are chosen for so many programs and tokens, against float64."""
    chosen, taken = step.Form.cut, set()
    monkeypatch.setattr(step, "FEW", 132 if few else 0)
    monkeypatch.setattr(step.Form, "cut", lambda form: (taken.add(chosen(form)), chosen(form))[1])
    step._launch.cache_clear()
    first = 0 if single else 12  # forms of one token, and of up to 4: a cache, a pool, a draft; all dtypes
    forms = range(first, first + 12) if FULL else [first + few + (not single)]
    problems = [fused_problems.WideStep(form * fused_problems.ALIKE) for form in forms]
    assert {(p.T == 1) for p in problems} == {single}
    found = [line for p in problems for line in fused_problems.wrong(p)]
    step._launch.cache_clear()
    assert not found, "\n".join(found)
    assert taken == {(*step.CUTS[few, single], 0)}


@interpreter
def test_a_wrong_kernel_is_found(monkeypatch):
    """The search sees a tap that is off by a thousandth."""
    from kdakit.layers.torch.fused import short_convolution

    run = short_convolution.forward
    off = lambda x, weight, *rest: run(x, weight * 1.01, *rest)
    monkeypatch.setattr(short_convolution.OPERATOR, "run", off)
    monkeypatch.setattr(short_convolution.OPERATOR.function, "forward", staticmethod(
        lambda ctx, *args: (short_convolution.OPERATOR._keep(ctx, args, None), tuple(off(*args)))[1]))  # fmt: skip
    problem = next(p for p in map(fused_problems.Convolution, range(0, 800, 8)) if p.dtype == "float32" and p.T * p.B > 4)
    assert any("y0" in line for line in fused_problems.wrong(problem))


@pytest.mark.parametrize("tokens", [3, 40])
def test_few_tokens_and_many_meet_the_matrices_alike(tokens):
    """The gradients of a product with four matrices, however it is taken apart."""
    from kdakit.layers.torch.fused.projection import project

    torch.manual_seed(0)
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((tokens, 5), (4, 5), (4, 5), (8, 5), (3, 5))]
    row, low = project(*given)
    want = torch.cat([given[0] @ w.t() for w in given[1:]], -1)
    d = torch.randn(want.shape, dtype=torch.float64)
    found = torch.autograd.grad(torch.cat([row, low], -1), given, d)
    for a, b in zip(found, torch.autograd.grad(want, given, d), strict=True):
        assert torch.allclose(a, b, 1e-12, 1e-12)


@interpreter
def test_compilers_and_checkpoints_see_operators():
    """The same gradients, bit for bit, when the calls are traced into one graph, and when they are made again for the backward."""
    from torch.utils.checkpoint import checkpoint

    from kdakit.layers.torch.fused.gated_norm import gated_norm
    from kdakit.layers.torch.fused.projection import project
    from kdakit.layers.torch.fused.short_convolution import short_convolution

    torch.manual_seed(0)
    shapes = (2, 5, 3, 8), (8,), (2, 5, 3, 8), (24,), (2, 9, 12), (12, 4), (2, 3, 12), (4, 12), (4, 12), (4, 12), (3, 12)
    given = [torch.randn(shape, requires_grad=True) for shape in shapes]

    def parts(o, weight, gate, bias, x, taps, window, *matrices):
        row, low = project(x, *matrices)
        (q, k, v), after = short_convolution(row, taps, (4, 4, 4), None, window)
        sums = [y.square().sum() for y in (q, k.sin(), v.cos(), after, low, gated_norm(o, weight, 1e-5, gate, bias))]
        return sum(sums)

    want = torch.autograd.grad(parts(*given), given)
    compiled = torch.compile(parts, backend="aot_eager", fullgraph=True)
    for out in (compiled(*given), checkpoint(parts, *given, use_reentrant=False)):
        for name, (a, b) in enumerate(zip(torch.autograd.grad(out, given), want, strict=True)):
            assert torch.equal(a, b), f"gradient of argument {name}"


def small_layer(**sizes):
    from kdakit.layers.torch import KimiDeltaAttention

    torch.manual_seed(0)
    return KimiDeltaAttention(**dict(hidden_size=12, head_dim=16, num_heads=1, num_v_heads=2, conv_size=3) | sizes)


@interpreter
@pytest.mark.parametrize("packed", [False, True])
def test_the_whole_layer_is_its_parts(packed):
    """Output and every gradient as in plain PyTorch, float32: the two differ in the last bits only. Without gradients the same bits, where
    heads have more than 16 channels: with fewer, chunks are shorter where gradients are wanted."""
    from kdakit.layers.torch import Rows
    from kdakit.layers.torch.fused import whole
    from kdakit.rounding import UNIT_ROUNDOFF

    layer = small_layer(head_dim=32, **dict(safe_gate=True, lower_bound=-5.0) if packed else dict(allow_neg_eigval=True))
    x = torch.randn((1, 11, 12) if packed else (2, 5, 12), requires_grad=True)
    cu = torch.tensor([0, 4, 4, 11]) if packed else None
    leaves, d_o = [x, *layer.parameters()], torch.randn(x.shape)
    want, _ = layer.mix(x, Rows(cu_seqlens=cu))
    w = whole.weights_of(layer)
    form = whole.Form(layer.sizes, "triton_gpu", cu)
    found = whole.run_whole(form, x, w, True)
    with torch.no_grad():
        assert torch.equal(whole.run_whole(form, x, w, False), found)
    limit = 200 * UNIT_ROUNDOFF["float32"]
    assert (found - want).norm() < limit * want.norm()
    names = ["x", *dict(layer.named_parameters())]
    pairs = zip(torch.autograd.grad(found, leaves, d_o), torch.autograd.grad(want, leaves, d_o), strict=True)
    for name, (a, b) in zip(names, pairs, strict=True):
        assert a.shape == b.shape and (a - b).norm() < limit * b.norm(), name
    out = whole.run_whole(form, x, w, True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@interpreter
def test_what_the_whole_layer_saved_is_let_go_early(monkeypatch):
    """When the matrices' gradients are made, the row of q, k and v is gone, unless the graph is to be walked again."""
    from kdakit.layers.torch.fused import whole

    layer, x, rows, alive = small_layer(), torch.randn(2, 5, 12, requires_grad=True), [], []
    convolve, project = whole.short_convolution.forward, whole.projection.backward
    monkeypatch.setattr(whole.short_convolution, "forward", lambda row, *more: (rows.append(weakref.ref(row)), convolve(row, *more))[1])
    monkeypatch.setattr(whole.projection, "backward", lambda *given: (alive.append(rows[0]() is not None), project(*given))[1])
    out = whole.run_whole(whole.Form(layer.sizes, "triton_gpu", None), x, whole.weights_of(layer), True)
    leaves = [x, *layer.parameters()]
    twice = [torch.autograd.grad(out.sum(), leaves, retain_graph=again) for again in (True, False)]
    assert alive == [True, False]
    assert all(map(torch.equal, *twice))


@interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_between_its_mixers_is_its_parts(dtype):
    """Sum, norm and SwiGLU as plain PyTorch has them, and every gradient; the sum to the bit."""
    from kdakit.layers.torch.fused import residual
    from kdakit.layers.torch.norm import RMSNorm
    from kdakit.models.torch import SwiGLU
    from kdakit.rounding import UNIT_ROUNDOFF

    torch.manual_seed(1)
    norm, mlp = RMSNorm(24), SwiGLU(24, 20).to(dtype)
    x, mixed = (torch.randn(2, 50, 24).to(dtype).requires_grad_() for _ in range(2))
    d_y = torch.randn(2, 50, 24).to(dtype)
    w = [mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight]
    leaves, limit = [x, mixed, norm.weight, *w], 20 * UNIT_ROUNDOFF[str(dtype).removeprefix("torch.")]
    for second in (mixed, None):
        total = x if second is None else x + second
        y = norm(total)
        want = y, total, total + mlp(y)
        y, total = residual.Carried.apply(x, second, norm.weight, norm.eps)
        found = y, total, total + residual.FeedForward.apply(y, *w)
        assert torch.equal(found[1], want[1])
        pairs = list(zip(found, want, strict=True))
        for outs in ((found[2], want[2]), (found[1], want[1])):  # without the second, no gradient comes through the norm
            grads = [torch.autograd.grad(out, leaves, d_y, retain_graph=True, allow_unused=True) for out in outs]
            pairs += [(a, b) for a, b in zip(*grads, strict=True) if b is not None]
            assert [a is None for a in grads[0]] == [b is None for b in grads[1]]
        for a, b in pairs:
            assert (a - b).float().norm() <= limit * b.float().norm()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(residual.FeedForward.apply(x, *w).sum(), x, create_graph=True)


def test_a_layer_that_was_changed_goes_by_its_parts():
    from kdakit.layers.torch.fused import whole

    fresh = whole.weights_of(small_layer())
    assert [p.shape for p in fresh] == [p.shape for p in whole.Weights._make(fresh)] and fresh.o.shape == (12, 32)
    named = dict(small_layer().named_parameters())
    assert len(fresh) == len(named)
    changed = [small_layer() for _ in range(4)]
    changed[0].f_proj[1].register_forward_hook(lambda *_: None)
    changed[1].o_proj = torch.nn.Sequential(changed[1].o_proj)
    changed[2].g_proj[1].bias = None
    torch.nn.utils.parametrizations.weight_norm(changed[3].q_proj)
    assert [whole.weights_of(layer) for layer in changed] == [None] * 4
    for sizes, T in ((dict(conv_bias=True), 5), (dict(delta_rule=False), 5), (dict(use_short_conv=False), 5), ({}, 1), ({}, 0)):
        assert not whole.takes(small_layer(**sizes), torch.zeros(1, T, 12))
    assert whole.takes(small_layer(), torch.zeros(1, 5, 12))


@interpreter
def test_prompts_of_a_served_model_are_read_alike_with_the_layer_kernels(monkeypatch):
    """Slices of prompts of several lengths, packed, each going on from its slot; float32, so that the two differ in the last bits only."""
    from kdakit.models.config import ModelConfig
    from kdakit.models.torch import KimiLinear
    from kdakit.rounding import UNIT_ROUNDOFF
    from kdakit.serving.torch import layer
    from kdakit.serving.torch.model import ServedModel

    config = ModelConfig(vocab_size=30, hidden_size=16, num_layers=2, num_heads=1, num_v_heads=2, head_dim=8, attention_every=0)
    model, answers, calls = KimiLinear(config), [], []
    run = layer.run_planned
    monkeypatch.setattr(layer, "run_planned", lambda *given: (calls.append(given[-1]), run(*given))[1])
    for kernels in (False, True):
        monkeypatch.setattr(layer, "fused_dtype", lambda _, x, kernels=kernels: x.dtype if kernels else None)
        served = ServedModel(model, 5)
        slots = [served.allocate() for _ in range(4)][1:]
        out = [served.prefill(slots, [[1, 2, 3, 4, 5], [6], [7, 8]], [[]] * 3)[0]]
        out += [served.prefill([slots[2], slots[0]], [[9], [2, 3, 4]], [[], []])[0], served.decode(slots, [1, 2, 3])]
        out += [torch.cat([x[slots].flatten() for pool in served.pools for x in pool.tensors()])]
        answers.append(torch.cat([x.flatten() for x in out]))
    apart = (answers[1] - answers[0]).norm() / answers[0].norm()
    assert apart < 100 * UNIT_ROUNDOFF["float32"]
    assert len(calls) == 4 and calls[0] is calls[1] and calls[2] is calls[3], "both layers go by one plan"
