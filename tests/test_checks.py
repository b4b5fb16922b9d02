"""What is looked at in values: cu_seqlens always where the host can see it, everything with KDAKIT_CHECKS=1; never uninitialised memory."""

import warnings

import numpy as np
import pytest

from kdakit import dispatch
from kdakit.cases import CASES
from kdakit.measure import checking
from kdakit.problem import Arrays
from kdakit.values import check_values

BAD = [
    ("q", (0, 3, 1, 5), np.nan, r"q\[0, 3, 1, 5\] must be finite, got nan \(1 of"),
    ("v", (1, 0, 0, 0), np.inf, r"v\[1, 0, 0, 0\] must be finite, got inf"),
    ("beta", (0, 2, 1), -np.inf, r"beta\[0, 2, 1\] must be finite"),
    ("initial_state", (1, 1, 2, 3), np.nan, r"initial_state\[1, 1, 2, 3\] must be finite"),
    ("g", (0, 7, 1, 2), 0.25, r"g\[0, 7, 1, 2\] must be a log-decay, at most 0: pass use_gate_in_kernel=True for a raw gate, got 0.25"),
    ("k", (1, 9, 0, 4), 40.0, r"k\[1, 9, 0\] has beta \|k\|\^2, which must be at most 2.*use_qk_l2norm_in_kernel=True, got "),
]


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("name, place, value, message", BAD, ids=[row[0] for row in BAD])
def test_checks_name_the_first_bad_element(framework, name, place, value, message, monkeypatch):
    pytest.importorskip(framework)
    case = CASES["plain"]
    arrays = case.arrays()
    changed = getattr(arrays, name).copy()
    changed[place] = value
    arrays = arrays._replace(**{"beta": np.maximum(arrays.beta, 0.1)} | {name: changed})
    given = checking.to_torch(arrays, case.dtypes(), "cpu") if framework == "torch" else checking.to_jax(arrays, case.dtypes())
    run = checking.call(framework, "torch_native" if framework == "torch" else "xla", case, "chunk")
    monkeypatch.setenv("KDAKIT_CHECKS", "1")
    with pytest.raises(ValueError, match=message):
        run(given)


def test_checks_pass_what_is_right():
    for name in ("plain", "beta_two", "softplus", "lower_bound", "varlen", "gate_bounded"):
        for dtype in ("float32", "bfloat16"):
            check_values(CASES[name].problem(dtype), CASES[name].arrays(dtype))
    case = CASES["varlen"]
    arrays = case.arrays()
    padded = Arrays(*(np.concatenate([x, np.full_like(x[:, :3], np.nan)], 1) for x in arrays[:5]), *arrays[5:])
    check_values(case.problem().replace(T=case.T + 3), padded)  # nobody looks behind the last sequence


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_two_unlike_copies_of_cu_seqlens(framework):
    pytest.importorskip(framework)
    case = CASES["varlen_no_state"]
    arrays = case.arrays()._replace(cu_seqlens_cpu=np.array([0, 0, 44, 70]))
    given = checking.to_torch(arrays, case.dtypes(), "cpu") if framework == "torch" else checking.to_jax(arrays, case.dtypes())
    run = checking.call(framework, "torch_native" if framework == "torch" else "xla", case, "chunk")
    with pytest.raises(ValueError, match=r"cu_seqlens_cpu must equal cu_seqlens, got cu_seqlens_cpu\[2\] = 44 and cu_seqlens\[2\] = 48"):
        run(given)


@pytest.mark.parametrize("op", ["chunk", "recurrent"])
def test_unlike_copies_that_nobody_can_compare_leave_no_memory_unwritten(op, monkeypatch):
    """As on a GPU, where looking at cu_seqlens would make the host wait."""
    torch = pytest.importorskip("torch")
    from kdakit.backends import torch_native

    monkeypatch.setattr(torch, "empty", lambda *a, **k: torch.full(*a, float("nan"), **k) if _floating(torch, k) else torch.zeros(*a, **k))
    case = CASES["varlen_no_state"]
    arrays = case.arrays()._replace(cu_seqlens_cpu=np.array([0, 10, 30, 70]))
    x = checking.to_torch(arrays, case.dtypes(), "cpu")
    problem = case.problem(op=op)
    result = torch_native.step(problem, x) if op == "recurrent" else torch_native.forward(problem, x)[0]
    assert result.o.isfinite().all() and result.final_state.isfinite().all()


def _floating(torch, named):
    return named.get("dtype", torch.float32).is_floating_point


def test_a_slow_fallback_on_a_gpu_says_so_once(monkeypatch):
    """Whatever keeps a fast backend from a call on a GPU, a user of 'auto' reads why; one who names the slow backend reads nothing."""
    pytest.importorskip("torch")
    monkeypatch.setattr(dispatch, "_warned", set())
    monkeypatch.setattr(dispatch.load("triton_gpu"), "supports", lambda problem, device: "gradients on sm_80 have not been compared")
    monkeypatch.setattr(dispatch.load("cuda"), "supports", lambda problem, device: "is not built")
    problem = CASES["plain"].problem("bfloat16", needs_grad=True)
    with pytest.warns(RuntimeWarning, match=r"fell back to 'torch_native'.*slow on a GPU.*sm_80 have not been compared.*`kdakit doctor`"):
        dispatch.select("torch", problem, "cuda:0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatch.select("torch", problem, "cuda:0")
        dispatch.select("torch", problem, "cuda:0", "torch_native")
        dispatch.select("torch", problem, "cpu")
    with pytest.warns(RuntimeWarning, match="another reason"):
        monkeypatch.setattr(dispatch.load("cuda"), "supports", lambda problem, device: "another reason")
        dispatch.select("torch", problem, "cuda:0")


def test_doctor_says_what_trains_on_each_gpu(monkeypatch):
    torch = pytest.importorskip("torch")
    from kdakit.cli import doctor

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda n: f"GPU {n}")
    monkeypatch.setattr(dispatch.load("cuda"), "supports", lambda problem, device: "is not built")
    monkeypatch.setattr(dispatch.load("triton_gpu"), "supports", lambda problem, device: None if device.index else "is too new")
    assert doctor.training() == {
        "cuda:0 (GPU 0)": "torch_native, which is slow there, because triton_gpu: is too new; cuda: is not built",
        "cuda:1 (GPU 1)": "triton_gpu",
    }


@pytest.mark.parametrize("version, usable", [("2.1.0", False), ("3.2.0", False), ("3.4.0", False), ("3.6.0", True), ("3.10.1+git", True)])
def test_old_triton_is_a_reason(version, usable, monkeypatch):
    """3.2 has no triton.knobs, 3.4 no JITCallable: importing the kernels' host side fails there."""
    pytest.importorskip("triton")
    triton_gpu = dispatch.load("triton_gpu")
    monkeypatch.setattr(triton_gpu, "_triton_version", lambda: version)
    triton_gpu._unusable.cache_clear()
    try:
        reason = triton_gpu.supports(CASES["plain"].problem(), "cuda")
        assert (reason is None) == usable, reason
        if not usable:
            assert f"needs triton 3.6 or newer, found {version}" in reason
    finally:
        triton_gpu._unusable.cache_clear()


def test_an_error_beside_joins_its_stream(monkeypatch):
    """Whoever comes next finds both streams as they were, and a capture can go on."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from kdakit.backends.triton_gpu.runtime import streams

    done = []
    fork = type("Fork", (), {"fork": lambda self: done.append("fork"), "join": lambda self: done.append("join"), "second": None})()
    monkeypatch.setattr(streams, "fork_here", lambda: fork)
    on_gpu = type("OnGpu", (), {"is_cuda": True})()
    with pytest.raises(RuntimeError, match="out of memory"), streams.beside(on_gpu):
        raise RuntimeError("out of memory")
    assert done == ["fork", "join"] and torch is not None


def test_hints_are_near_or_not_there():
    torch = pytest.importorskip("torch")
    import kdakit.torch as kt

    x = [torch.zeros(1, 1, 1, 1)] * 4 + [torch.zeros(1, 1, 1)]
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'; it takes q, k, v, g, beta, scale"):
        kt.chunk_kda(*x, foo=1)
    with pytest.raises(TypeError, match="'initial_sate'; did you mean 'initial_state'"):
        kt.chunk_kda(*x, initial_sate=None)
