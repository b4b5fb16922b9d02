"""The Triton backward with the CUDA kernel in place of its last two launches over chunks, without a GPU: Triton's stages in its
interpreter, the kernel thread by thread. What lies between them in memory is what both must agree about.

The interpreter must be chosen before Triton is imported: one test runs this file in a process that has it."""

import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace

import emulated
import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from kdakit.backends.cuda import library, op
from kdakit.cases import FUSED, Case
from kdakit.measure import checking, native_gradient

pytestmark = emulated.needs_compiler
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SIZES = dict(T=40, H=1, HV=1, K=128, V=128)
# float32 `lower` in the plain kernels' order, and betas of 0; float16 `lower` of normalised keys.
TRAINED = [
    Case("plain", "any gate, betas of 0", gate="huge", beta="some_zero", **SIZES),
    Case("normed", "everything in the kernel", gate="raw", beta="logits", A_log=True, dt_bias=True,
         options=FUSED | {"safe_gate": True, "lower_bound": -5.0}, **SIZES),
]  # fmt: skip


@pytest.mark.skipif(INTERPRETED, reason="is what starts the others")
def test_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"}, timeout=600)
    assert done.returncode == 0 and f"{len(TRAINED)} passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.fixture
def calls(monkeypatch):
    """Calls of the kernel, which goes where a measurement would put it."""
    from kdakit.backends.triton_gpu.host import backward

    kernels, calls = emulated.load("gradient"), []

    def run(args):
        calls.append(args.group)
        kernels.kda_emulate_gradient_bf16(ctypes.byref(args), 1, 1)

    monkeypatch.setattr(library, "gradient", run)
    monkeypatch.setattr(backward, "native", SimpleNamespace(supports=op.gradient_refusal, run=op.chunk_gradient))
    return calls


@pytest.mark.skipif(not INTERPRETED, reason="runs in a process with TRITON_INTERPRET=1")
@pytest.mark.parametrize("case", TRAINED, ids=lambda case: case.name)
def test_gradients(calls, case):
    problem, arrays, cotangents = case.problem("bfloat16", needs_grad=True), case.arrays("bfloat16"), case.cotangents("bfloat16")
    found = checking.run_case("triton_gpu", case, "bfloat16")
    rows = checking.compare_quickly(problem, arrays, found, cotangents, "bfloat16")
    assert calls == [4 if case.name == "plain" else 1]
    assert all(row.ok for row in rows), [(row.name, row.error, row.tolerance) for row in rows]


@pytest.mark.skipif(INTERPRETED, reason="needs no interpreter")
def test_only_a_variable_asks_for_it(monkeypatch):
    """And where the library is missing, it says so."""
    from kdakit.backends.triton_gpu.host import backward

    monkeypatch.delenv(native_gradient.VARIABLE, raising=False)
    assert not native_gradient.install_if_asked() and backward.native is None
    monkeypatch.setenv(native_gradient.VARIABLE, "1")
    monkeypatch.setenv(library.VARIABLE, "/nowhere/libkdakit.so")
    with pytest.raises(FileNotFoundError, match="kdakit build-cuda"):
        native_gradient.install_if_asked()
    assert backward.native is None
