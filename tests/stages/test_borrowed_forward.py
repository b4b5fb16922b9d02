"""A training forward by the CUDA kernels before Triton's backward, without a GPU: the prepare kernel thread by thread, the scan in NumPy,
and Triton's stages in its interpreter. What lies between them in memory is what both must agree about.

The interpreter must be chosen before Triton is imported: one test runs this file in a process that has it."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import emulated
import fresh
import hopper_records
import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

import torch

from kdakit.backends import cuda, triton_gpu
from kdakit.backends.cuda import library, op
from kdakit.backends.triton_gpu import borrowed
from kdakit.backends.triton_gpu.config import CHIPS, choose
from kdakit.cases import FUSED, Case
from kdakit.measure import checking

pytestmark = emulated.needs_compiler
TRIALS = Path(__file__).parents[2] / "benchmarks/results/gpu/trials"
TIMED = {64: TRIALS / "2026-11-18_h200_training_forward_64.json", 128: TRIALS / "2026-11-18_h200_early_beta.json"}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# float32 `lower` in the plain kernels' order, betas of 0, packed sequences; float16 `lower` of normalised keys. Of 64 channels states are
# kept in float32 where gates are computed.
TRAINED = [
    Case("plain", "any gate, betas of 0", T=70, lengths=(66, 4), H=1, HV=1, K=128, V=128, gate="huge", beta="some_zero",
         options={"chunk_size": 64}),
    Case("normed", "normalised in the kernel", T=66, H=1, HV=1, K=128, V=128, gate="bounded", beta="logits",
         options={"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "safe_gate": True, "lower_bound": -5.0}),
    Case("plain", "64 channels", T=70, lengths=(66, 4), H=1, HV=1, K=64, V=64, gate="huge", beta="some_zero", options={"chunk_size": 64}),
    Case("normed", "64 channels, states in float32", T=66, H=1, HV=1, K=64, V=64, gate="raw", beta="logits", A_log=True, dt_bias=True,
         options=FUSED | {"safe_gate": True, "lower_bound": -5.0}),
]  # fmt: skip


@pytest.mark.skipif(INTERPRETED, reason="is what starts the others")
def test_in_the_interpreter():
    done = fresh.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__, TRITON_INTERPRET="1")
    assert done.returncode == 0 and f"{len(TRAINED)} passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.fixture
def calls(monkeypatch):
    """Calls of the library, which runs wherever it can."""
    kernels, calls = emulated.load("hopper"), []

    def prefill(args, dtype):
        calls.append((args.group, args.lower_dtype))
        hopper_records.run_call(kernels, args)

    monkeypatch.setenv(borrowed.VARIABLES["forward"], "1")
    monkeypatch.setattr(library, "prefill", prefill)
    monkeypatch.setattr(library, "workspace_size", lambda args, dtype: 0)
    monkeypatch.setattr(cuda, "supports", lambda problem, device: cuda.unsupported(problem))
    monkeypatch.setattr(borrowed, "lender", cuda)
    return calls


def difference(x, y):
    x, y = x.double(), y.double()
    return float((x - y).norm() / y.norm())


@pytest.mark.skipif(not INTERPRETED, reason="runs in a process with TRITON_INTERPRET=1")
@pytest.mark.parametrize("case", TRAINED, ids=lambda case: f"{case.name}{case.K}")
def test_what_is_kept(calls, case, monkeypatch):
    """Is what Triton's forward keeps; outputs are within the rule, and so are the gradients that Triton's backward makes of it."""
    plain = case.name == "plain"
    problem, arrays, cotangents = case.problem("bfloat16", needs_grad=True), case.arrays("bfloat16"), case.cotangents("bfloat16")
    given = checking.to_torch(arrays, case.dtypes("bfloat16"), "cpu")
    config = replace(triton_gpu.default_config(problem, "cpu"), checkpoint=1)  # so that every state is kept
    result, kept = triton_gpu.forward(problem, given, config)
    assert calls == [(4, library.FLOAT32) if plain else (1, library.FLOAT16)]
    monkeypatch.setenv(borrowed.VARIABLES["forward"], "0")
    own = triton_gpu.forward(problem, given, config)[1]
    assert len(calls) == 1 and [x.dtype for x in kept] == [x.dtype for x in own]
    used = [0, 1, 2] if plain else [0, 1]  # slots that have tokens; in both cases slot 1 is the second of a sequence
    for x, y, slots in zip(kept, own, (used, used, [1]), strict=True):
        assert difference(x[slots], y[slots]) < 2.0**-7
    made = {"o": result.o, "final_state": result.final_state}
    differentiated = plain or case.K == 64  # the other kernels of the backward are as long again in the interpreter
    if differentiated:
        d_o, d_final = (torch.from_numpy(x) for x in cotangents)
        found = triton_gpu.backward(problem, given, kept, d_o.bfloat16(), d_final.float(), config)
        made |= {name: x for name, x in found._asdict().items() if x is not None}
    made = {name: x.double().numpy() for name, x in made.items()}
    rows = checking.compare_quickly(problem, arrays, made, cotangents if differentiated else None, "bfloat16")
    assert all(row.ok for row in rows), [(row.name, row.error, row.tolerance) for row in rows]


def problem_of(T=2**14, **changes):
    case = Case("drawn", "", T=1, H=1, HV=1, K=128, V=128, options={"chunk_size": 64})
    return case.problem("bfloat16", needs_grad=True).replace(T=T, **changes)


@pytest.mark.skipif(INTERPRETED, reason="needs no interpreter")
def test_taken_where_it_is_faster(monkeypatch):
    able = SimpleNamespace(kept_forward=lambda problem, device: (print, None), library=SimpleNamespace(missing=lambda: None))
    monkeypatch.setattr(borrowed, "lender", able)
    monkeypatch.delenv(borrowed.VARIABLES["forward"], raising=False)

    def taken(problem):
        return borrowed.forward(problem, choose(problem, CHIPS["sm_90"]), "cuda") is print

    assert taken(problem_of())
    bounded = dict(safe_gate=True, lower_bound=-5.0)
    for changes in (
        dict(T=2**14 - 64),
        dict(deterministic=True),
        dict(dtype="float16"),
        dict(l2norm=True),
        bounded,
        dict(gate="softplus"),
    ):
        assert not taken(problem_of(**changes)), changes
    for gate in (dict(gate="softplus"), dict(gate="bounded") | bounded, bounded, {}):
        many = gate | dict(l2norm=True, H=24, HV=24)
        assert taken(problem_of(**many)) and not taken(problem_of(**many | dict(H=23, HV=23)))
        assert taken(problem_of(**many | dict(l2norm=False))) == (gate == {})
    monkeypatch.setenv(borrowed.VARIABLES["forward"], "1")
    assert taken(problem_of(T=64)) and taken(problem_of(l2norm=True)) and not taken(problem_of(T=0))
    monkeypatch.delenv(borrowed.VARIABLES["forward"])
    options = dict(
        bounded=bounded | dict(gate="bounded", l2norm=True),
        softplus=dict(gate="softplus", l2norm=True),
        given=dict(l2norm=True),
        safe=bounded | dict(l2norm=True),
    )
    for D, rows, alike in ((64, 36, 0.0), (128, 23, 0.01)):
        timed = [row for row in json.loads(TIMED[D].read_text())["results"] if row["part"] == "forward by heads"]
        for row in timed:  # where a GPU has timed both, the faster one, unless they are alike
            sizes, ratio = dict(T=row["T"], H=row["H"], HV=row["H"], K=D, V=D), row["cuda"] / row["triton"]
            assert taken(problem_of(**sizes, **options.get(row["gate"], {}))) == (ratio < 1) or abs(ratio - 1) < alike, row
        assert len(timed) == rows
    monkeypatch.setenv(borrowed.VARIABLES["forward"], "0")
    assert not taken(problem_of())


@pytest.mark.skipif(INTERPRETED, reason="needs no interpreter")
def test_who_lends(monkeypatch):
    """The CUDA library, of given log-decays; where it is missing, Triton's kernels run, or, where it was asked for, an error does."""
    problem = problem_of()
    config = choose(problem, CHIPS["sm_90"])
    monkeypatch.setattr(borrowed, "lender", cuda)
    monkeypatch.setattr(cuda, "_old_device", lambda device, hopper: None)
    monkeypatch.setenv(library.VARIABLE, "/nowhere/libkdakit.so")
    monkeypatch.delenv(borrowed.VARIABLES["forward"], raising=False)
    assert borrowed.forward(problem, config, "cuda") is None
    monkeypatch.setenv(borrowed.VARIABLES["forward"], "1")
    with pytest.raises(FileNotFoundError, match="kdakit build-cuda"):
        borrowed.forward(problem, config, "cuda")
    monkeypatch.setattr(library, "missing", lambda: None)
    assert borrowed.forward(problem, config, "cuda").func is op.forward_kept
    assert borrowed.forward(problem, replace(config, chunk=32), "cuda") is None
    for changes in (dict(V=64), dict(gate="softplus")):
        assert borrowed.forward(problem.replace(**changes), config, "cuda") is None
    assert borrowed.replaced(problem, config, "cuda") == tuple(name for names in borrowed.REPLACED.values() for name in names)
