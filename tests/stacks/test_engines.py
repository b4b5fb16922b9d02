"""The plugins against the engines' own kernels: same inputs, same pools, padded pages, every accepted count, rows of nobody.

vLLM's kernel modules come from its wheel, in a folder that KDAKIT_TEST_WHEELS names, with the rest of vLLM stubbed; on a CPU they run in
Triton's interpreter.
"""

import logging
import os

import engine_modules
import fresh
import numpy as np
import pytest
import torch

from kdakit import stacks
from kdakit.stacks import counts

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
H, K, V = (4, 128, 128) if DEVICE == "cuda" else (2, 16, 16)
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
needs_kernels = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs a GPU or TRITON_INTERPRET=1, as in the last test")


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    folder = engine_modules.find_vllm(tmp_path_factory.mktemp("vllm"))
    if folder is None:
        pytest.skip("needs vLLM's wheel in a folder of KDAKIT_TEST_WHEELS (pip download --no-deps vllm==0.33.0)")
    return engine_modules.load_vllm(folder)


@pytest.fixture
def plugged(vllm):
    """vLLM's module for Kimi-K3 with our calls in it, and its own beside them."""
    from kdakit.stacks import vllm as plugin

    names = ("chunk_kda_with_fused_gate", "fused_recurrent_kda", "fused_recurrent_kda_packed_decode")
    yield from replaced(vllm[0], names, plugin.replace)


@pytest.fixture
def plugged_glm(vllm):
    """The same for GLM-5-Next."""
    from kdakit.stacks import vllm as plugin
    from kdakit.stacks import vllm_glm5next as glm

    yield from replaced(vllm[1], glm.NAMES, lambda module: glm.replace(module, plugin._replaced))


def replaced(module, names, replace):
    from kdakit.stacks import vllm as plugin

    theirs = {name: getattr(module, name) for name in names}
    replace(module)
    counts.reset()
    yield module, theirs
    plugin.disable()
    assert {name: getattr(module, name) for name in names} == theirs


def draw(rng, *shape, dtype=DTYPE):
    return torch.tensor(rng.standard_normal(shape), dtype=dtype, device=DEVICE)


def padded_pool(rng, count, dtype):
    memory = draw(rng, count, H * V * K + 64, dtype=dtype)
    return memory, lambda m: m[:, : H * V * K].unflatten(1, (H, V, K))


def drafted_slots(N, T):
    """A slot for each of T tokens of N rows, the last of one row nobody's and one row as a whole, and where rows start."""
    slots = torch.arange(1, N * T + 1, device=DEVICE, dtype=torch.int32).view(N, T)
    slots[2, T - 1], slots[4] = 0, -1
    return slots, torch.arange(N + 1, device=DEVICE, dtype=torch.int32) * T


def same(found, want, dtype):
    bound = {torch.float32: 2e-5 if DEVICE == "cpu" else 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    error = (found.double() - want.double()).abs().max()
    assert error <= bound * want.double().abs().max().clamp(min=1e-3), float(error)


@needs_kernels
@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vllm_packed_decode(plugged, dtype, lower_bound):
    module, theirs = plugged
    rng, N = np.random.default_rng(0), 5
    wide = draw(rng, N, 2 * H * K + H * V + 7)[:, : 2 * H * K + H * V]
    raw_g, raw_beta = draw(rng, 1, N, H, K), draw(rng, 1, N, H + 3)[..., :H]
    A_log, dt_bias = draw(rng, H, dtype=torch.float32), draw(rng, H * K, dtype=torch.float32)
    memory, states = padded_pool(rng, 9, dtype)
    slots = torch.tensor([3, 0, 8, -1, 1], dtype=torch.int32, device=DEVICE)
    results = []
    for call in (theirs["fused_recurrent_kda_packed_decode"], module.fused_recurrent_kda_packed_decode):
        pool = memory.clone()
        out, _ = call(wide, raw_g, raw_beta, A_log, dt_bias, lower_bound, states(pool), slots)
        results.append((out, pool))
    (want, pool), (out, ours) = results
    assert stacks.report()["vllm"]["taken"] == {"fused_recurrent_kda_packed_decode": 1}
    assert out.shape == want.shape and not out[0, [1, 3]].any()
    same(out, want, DTYPE)
    same(ours, pool, dtype)
    untouched = [0, 2, 4, 5, 6, 7]
    assert torch.equal(ours[untouched], memory[untouched]) and torch.equal(ours[:, H * V * K :], memory[:, H * V * K :])


@needs_kernels
@pytest.mark.parametrize("drafts", [1, 3])
def test_vllm_speculative(plugged, drafts):
    module, theirs = plugged
    rng, N, T = np.random.default_rng(drafts), 5, drafts + 1
    total = N * T
    wide = draw(rng, 1, total, 3 * H * K)
    q, k, v = (x.unflatten(-1, (H, K)) for x in wide.split(H * K, -1))
    raw_g, raw_beta = draw(rng, 1, total, H, K), draw(rng, 1, total, H)
    A_log, dt_bias = draw(rng, H, dtype=torch.float32), draw(rng, H * K, dtype=torch.float32)
    memory, states = padded_pool(rng, total + 2, torch.float32)
    slots, cu = drafted_slots(N, T)
    for accepted in range(1, T + 1):
        count = torch.full((N,), accepted, device=DEVICE, dtype=torch.int32)
        results = []
        for call in (theirs["fused_recurrent_kda"], module.fused_recurrent_kda):
            pool = memory.clone()
            out = torch.zeros(1, total, H, V, dtype=DTYPE, device=DEVICE)
            call(q, k, v, raw_g, raw_beta, A_log, dt_bias, None, states(pool), cu, slots, count, out)
            results.append((out, pool))
        (want, pool), (out, ours) = results
        same(out, want, DTYPE)
        same(ours, pool, torch.float32)
    assert stacks.report()["vllm"]["taken"] == {"fused_recurrent_kda": T}


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: vLLM's chunked kernels tune themselves")
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_vllm_prefill(plugged, lower_bound):
    module, theirs = plugged
    rng = np.random.default_rng(7)
    cu = torch.tensor([0, 70, 71, 300, 512], device=DEVICE, dtype=torch.int32)
    q, k, v, raw_g = (draw(rng, 1, 512, H, K) for _ in range(4))
    raw_beta, A_log, bias = draw(rng, 1, 512, H), draw(rng, H, dtype=torch.float32), draw(rng, H * K, dtype=torch.float32)
    state = draw(rng, 4, H, V, K, dtype=torch.float32)
    named = dict(initial_state=state, output_final_state=True, lower_bound=lower_bound, use_qk_l2norm_in_kernel=True, cu_seqlens=cu)
    want, want_final = theirs["chunk_kda_with_fused_gate"](q, k, v.clone(), raw_g, raw_beta, A_log, bias, **named)
    out, final = module.chunk_kda_with_fused_gate(q, k, v, raw_g, raw_beta, A_log, bias, **named)
    same(out, want, torch.bfloat16)
    same(final, want_final, torch.bfloat16)


@needs_kernels
@pytest.mark.parametrize("drafts", [0, 2])
def test_vllm_glm5next(plugged_glm, drafts):
    """One token a row with slots [N], and drafts with slots [N, T]; parts of wider rows, and vLLM's shape of A_log."""
    module, theirs = plugged_glm
    rng, N, T = np.random.default_rng(drafts), 5, drafts + 1
    total = N * T
    q, k, v = (x.unflatten(-1, (H, K)) for x in draw(rng, 1, total, 3 * H * K).split(H * K, -1))
    named = dict(
        g=draw(rng, 1, total, H, K), beta=draw(rng, 1, total, H), sigmoid_beta=True, compute_gate=True, lower_bound=-4.0,
        a_log=draw(rng, 1, 1, H, 1, dtype=torch.float32), g_bias=draw(rng, H * K, dtype=torch.float32),
    )  # fmt: skip
    memory, states = padded_pool(rng, total + 2, torch.float32)
    slots, cu = drafted_slots(N, T)
    named |= dict(cu_seqlens=cu)
    for accepted in range(1, T + 1) if drafts else (None,):
        count = None if accepted is None else torch.full((N,), accepted, device=DEVICE, dtype=torch.int32)
        results = []
        for call in (theirs["fused_recurrent_kda"], module.fused_recurrent_kda):
            pool, out = memory.clone(), torch.zeros(1, total, H, V, dtype=DTYPE, device=DEVICE)
            more = dict(ssm_state_indices=slots if drafts else slots[:, 0], num_accepted_tokens=count, out=out)
            found, _ = call(q, k, v, initial_state=states(pool), **named, **more)
            assert found is out
            results.append((out, pool))
        (want, pool), (out, ours) = results
        same(out, want, DTYPE)
        same(ours, pool, torch.float32)
    assert stacks.report()["vllm"]["taken"] == {"glm5next.fused_recurrent_kda": T if drafts else 1}


def test_vllm_glm5next_functions(monkeypatch):
    """Against our own calls; what is not as the layer calls it is vLLM's, and a layer that was imported earlier has what its functions'
    module has."""
    import sys
    import types

    from kdakit.serving.torch import pages
    from kdakit.stacks import vllm as plugin
    from kdakit.stacks import vllm_glm5next as glm
    from kdakit.torch import chunk_kda

    made = {name: lambda *args, **named: "vllm" for name in glm.NAMES}
    module, layer = types.SimpleNamespace(**made), types.SimpleNamespace(**made)
    monkeypatch.setitem(sys.modules, glm.MODULE, module)
    monkeypatch.setitem(sys.modules, glm.LAYER, layer)
    counts.reset()
    rng, N = np.random.default_rng(3), 3
    A_log, bias = draw(rng, 1, 1, H, 1, dtype=torch.float32), draw(rng, H * K, dtype=torch.float32)
    cu = torch.tensor([0, 40, 40, 90], device=DEVICE, dtype=torch.int32)
    x = {name: draw(rng, 1, 90, H, K) for name in "qkvg"}
    beta, state = draw(rng, 1, 90, H, dtype=torch.float32).sigmoid(), draw(rng, N, H, V, K, dtype=torch.float32)
    glm.enable(plugin._replaced)
    try:
        for safe_gate, lower_bound in ((True, -5.0), (False, None)):
            named = dict(initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=cu)
            o, final = layer.chunk_kda_with_fused_gate(
                x["q"], x["k"], x["v"], raw_g=x["g"], beta=beta, A_log=A_log, g_bias=bias, safe_gate=safe_gate, **named
            )
            want = chunk_kda(**x, beta=beta, A_log=A_log.flatten(), dt_bias=bias, use_gate_in_kernel=True, lower_bound=lower_bound,
                             state_v_first=True, **named)  # fmt: skip
            assert torch.equal(o, want[0]) and torch.equal(final, want[1])
        memory, states = padded_pool(rng, 6, torch.float32)
        slots, before = torch.tensor([4, 0, 1], device=DEVICE, dtype=torch.int32), memory.clone()
        gates = dict(beta=draw(rng, 1, N, H), sigmoid_beta=True, a_log=A_log, g_bias=bias, compute_gate=True)
        token, starts = {name: t[:, :N] for name, t in x.items()}, torch.arange(N + 1, device=DEVICE, dtype=torch.int32)
        where = dict(initial_state=states(memory), ssm_state_indices=slots, cu_seqlens=starts)
        o, pool = layer.fused_recurrent_kda(**token, **gates, **where)
        assert pool is where["initial_state"] and o.shape == (1, N, H, V) and not o[0, 1].any()
        want = before.clone()
        flags = dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True, lower_bound=-5.0)
        again = pages.decode(pages.Pages(states(want), True, 1), slots, **token, beta=gates["beta"], A_log=A_log.flatten(), dt_bias=bias,
                             cu_seqlens=starts, **flags)  # fmt: skip
        assert torch.equal(o, again) and torch.equal(memory, want) and not torch.equal(memory, before)
        assert layer.fused_recurrent_kda(**token, **gates, **where | {"ssm_state_indices": None}) == "vllm"
        assert layer.fused_recurrent_kda(**token, **gates, **where, inplace_final_state=False) == "vllm"
        found = stacks.report()["vllm"]
        assert found["taken"] == {"glm5next.chunk_kda_with_fused_gate": 2, "glm5next.fused_recurrent_kda": 1} and found["passed on"]
    finally:
        plugin.disable()
    assert module.fused_recurrent_kda() == layer.fused_recurrent_kda() == layer.chunk_kda_with_fused_gate() == "vllm"


class FakeKernel:
    """The part of SGLang's TritonKDAKernel that a plugin sees."""

    def packed_decode(self, *args, **named):
        return "sglang"

    def decode(self, *args, **named):
        return "sglang"

    def extend(self, *args, **named):
        return "sglang"


def test_sglang_methods():
    """Against our own calls: SGLang's kernels need its compiled parts."""
    from kdakit.serving.torch import pages
    from kdakit.stacks import sglang as plugin
    from kdakit.torch import chunk_kda

    counts.reset()
    rng, N = np.random.default_rng(3), 3
    kernel = type("Kernel", (FakeKernel,), {})
    plugin.replace(kernel)
    try:
        made = kernel()
        A_log, bias = draw(rng, 1, 1, H, 1, dtype=torch.float32), draw(rng, H * K, dtype=torch.float32)
        memory, states = padded_pool(rng, 6, torch.float32)
        slots = torch.tensor([4, -1, 0], device=DEVICE, dtype=torch.int32)
        mixed, a, b = draw(rng, N, 2 * H * K + H * V), draw(rng, N, H * K), draw(rng, N, H)
        one = dict(A_log=A_log, dt_bias=bias, ssm_states=states(memory), cache_indices=slots)
        before = memory.clone()
        out = made.packed_decode(mixed, a, b, scale=K**-0.5, num_v_heads=H, head_v_dim=V, **one)
        assert out.shape == (1, N, H, V) and not out[0, 1].any()
        assert torch.equal(memory[[1, 2, 3, 5]], before[[1, 2, 3, 5]]) and not torch.equal(memory[[0, 4]], before[[0, 4]])
        assert made.packed_decode(mixed, a, b, scale=1.0, num_v_heads=H, head_v_dim=V, **one, replayssm_d=memory) == "sglang"
        q, k, v = (x.unflatten(-1, (H, K))[None] for x in mixed.split([H * K, H * K, H * V], -1))
        memory.copy_(before)
        starts = torch.arange(N + 1, device=DEVICE, dtype=torch.int32)
        again = made.decode(q, k, v, a[None], b[None], query_start_loc=starts, **one)
        torch.testing.assert_close(again, out)
        memory.copy_(before)
        cu = torch.tensor([0, 40, 40, 90], device=DEVICE, dtype=torch.int32)
        x = {name: draw(rng, 1, 90, H, K) for name in "qkvg"} | dict(beta=draw(rng, 1, 90, H))
        initial = pages.Pages(states(memory), True).read(slots)
        where = dict(ssm_states=states(memory), cache_indices=slots, query_start_loc=cu)
        out = made.extend(**x, **where, A_log=A_log, dt_bias=bias, beta_is_raw=True)
        want, final = chunk_kda(**x, A_log=A_log, dt_bias=bias, initial_state=initial, cu_seqlens=cu, output_final_state=True,
                                use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True)  # fmt: skip
        same(out, want, DTYPE)
        same(states(memory)[4], final[0].mT, torch.float32)
        assert made.extend(**x, **where, track_state=memory) == made.extend(**x, **where, is_spec_decode=True) == "sglang"
        found = stacks.report()["sglang"]
        assert found["taken"] == {"packed_decode": 1, "decode": 1, "extend": 1} and len(found["passed on"]) == 3
    finally:
        plugin.disable()
    assert kernel().decode() == "sglang"


def test_unknown_versions_are_left_alone(monkeypatch, caplog):
    import importlib.metadata

    from kdakit.stacks import vllm as plugin

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.99.0")
    monkeypatch.setattr(plugin._replaced, "warned", False)
    monkeypatch.setenv("KDAKIT_VLLM", "1")
    with caplog.at_level(logging.WARNING, "kdakit.stacks"):
        plugin.plugin()
        plugin.plugin()
    assert [r.getMessage() for r in caplog.records] == ["vllm 0.99.0 is not known to kdakit, which knows 0.32.*, 0.33.*: it is left alone"]
    assert not plugin.enabled()


def test_plugins_wait_to_be_asked(monkeypatch):
    """An engine loads every plugin that is installed: without KDAKIT_VLLM=1 nothing happens, not even a look at the engine."""
    from kdakit.stacks import sglang, vllm

    for plugin in (vllm, sglang):
        monkeypatch.setattr(plugin._replaced, "known", lambda: pytest.fail("looked"))
        plugin.plugin()
    monkeypatch.setenv("KDAKIT_VLLM", "0")
    vllm.plugin()
    vllm.enable()


@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="the kernels run in this process")
def test_in_the_interpreter(vllm):
    words = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, "-k", "vllm_packed or vllm_speculative or vllm_glm5next")
    run = fresh.run(*words, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert run.returncode == 0, run.stdout[-3000:]
    assert "passed" in run.stdout and "skipped" not in run.stdout
