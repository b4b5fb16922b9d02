"""Whatever the order of a backward's launches, and in however many parts they are, gradients are the same bits. Without a GPU: Triton's
stages in its interpreter, CUDA's thread by thread.

The interpreter must be chosen before Triton is imported: one test runs this file in a process that has it."""

import contextlib
import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace

import emulated
import numpy as np
import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

import torch

from kdakit.backends import cuda
from kdakit.backends.cuda import library
from kdakit.backends.triton_gpu import borrowed
from kdakit.backends.triton_gpu.host import ahead
from kdakit.backends.triton_gpu.runtime import launch, repeat, streams
from kdakit.cases import FUSED, Case
from kdakit.measure import checking

pytestmark = emulated.needs_compiler
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SIZES = dict(T=150, H=1, HV=1, K=128, V=128)  # three chunks, the last of 22 tokens
TRAINED = [
    Case("given", "log-decays and betas", gate="mild", beta="some_zero", wide_beta=True, **SIZES),
    Case("fused", "everything in the kernel", gate="raw", beta="logits", A_log=True, dt_bias=True,
         options=FUSED | {"safe_gate": True, "lower_bound": -5.0}, **SIZES),
]  # fmt: skip


@pytest.mark.skipif(INTERPRETED, reason="is what starts the others")
def test_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"}, timeout=900)
    assert done.returncode == 0 and f"{len(TRAINED)} passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.fixture
def calls(monkeypatch):
    """Tokens of each launch of the CUDA kernels, which run wherever they can."""
    called = []
    for stage, numbers in (("gradient", (1, 1)), ("rebuild", (1,)), ("reverse", (1, 1))):
        kernel = getattr(emulated.load(stage), f"kda_emulate_{stage}_bf16")

        def run(args, stage=stage, kernel=kernel, numbers=numbers):
            called.append((stage, args.forward.contents.tokens))
            kernel(ctypes.byref(args), *numbers)

        monkeypatch.setenv(borrowed.VARIABLES[stage], "1")
        monkeypatch.setattr(library, stage, run)
    monkeypatch.setattr(cuda, "supports", lambda problem, device: cuda.unsupported(problem))
    return called


@pytest.mark.skipif(not INTERPRETED, reason="runs in a process with TRITON_INTERPRET=1")
@pytest.mark.parametrize("case", TRAINED, ids=lambda case: case.name)
def test_same_bits(calls, monkeypatch, case):
    monkeypatch.delenv("KDAKIT_SCHEDULE", raising=False)
    usual = checking.run_case("triton_gpu", case, "bfloat16")
    assert calls == [("rebuild", 150), ("reverse", 150), ("gradient", 150)]
    monkeypatch.setenv("KDAKIT_SCHEDULE", "late,first,restore,sums,ahead")
    for late in (1, 2):
        calls.clear()
        monkeypatch.setenv("KDAKIT_AHEAD", str(late))
        found = checking.run_case("triton_gpu", case, "bfloat16")
        last, others = 150 - 64 * (3 - late), 64 * (3 - late)
        assert calls == [("rebuild", 150), ("reverse", last), ("reverse", others), ("gradient", last), ("gradient", others)]
        assert found.keys() == usual.keys()
        assert all(np.array_equal(found[name], usual[name]) for name in usual), [n for n in usual if not np.array_equal(found[n], usual[n])]


@pytest.mark.skipif(INTERPRETED, reason="needs no interpreter")
def test_how_many_chunks():
    """Few heads leave multiprocessors to others; many do not."""
    for heads in (4, 8, 16):
        late = ahead.best(128, heads, 132)
        assert 0 < late < 128
    assert ahead.best(128, 64, 132) == ahead.best(128, 96, 132) == 0


@pytest.mark.skipif(INTERPRETED, reason="needs no interpreter")
def test_a_plan_repeats_launches_beside_each_other(monkeypatch):
    """Where they were, and memory of theirs is nobody else's until the two streams meet for good."""
    events = []

    def lent(name, aside, *tensors):
        return launch.Lent(lambda addresses: events.append((name, *addresses)), tensors, (), aside)

    second = SimpleNamespace(cuda_stream=1)
    fork = SimpleNamespace(second=second, fork=lambda: events.append("fork"), join=lambda: events.append("join"))
    monkeypatch.setattr(streams, "fork_here", lambda first=False: events.append(first) or fork)

    @contextlib.contextmanager
    def on(stream):
        events.append("second" if stream is second else stream)
        yield
        events.append("main")

    monkeypatch.setattr(torch.cuda, "stream", on)
    given, made = torch.zeros(4), torch.zeros(2**20)
    large, small = torch.zeros(2**20), torch.zeros(4)
    seen = [streams.FORK_FIRST, lent("a", True, given, large), lent("b", False, given, small), streams.MEET, lent("c", True, large),
            lent("d", False, small, made), streams.JOIN, lent("e", False, made)]  # fmt: skip
    plan = repeat.plan_of([given], [made], seen, lambda made: made)
    assert plan.begins.keys() == {0} and list(plan.ends) == [seen.index(streams.JOIN)]
    (result,) = plan([given])
    names = [x[0] if isinstance(x, tuple) else x for x in events]
    assert names == [True, "fork", "second", "a", "main", "b", "join", "second", "c", "main", "d", "join", "e"]
    at = {x[0]: x[1:] for x in events if isinstance(x, tuple)}
    assert at["a"][1] == at["c"][0] and at["b"][1] == at["d"][0] and at["d"][1] == at["e"][0] == result.data_ptr()
