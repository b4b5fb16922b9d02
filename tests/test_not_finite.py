"""What is not finite stays in its own sequence and head: NaN and infinity into every input of every backend that runs here.

Triton's kernels do it in stages/test_triton_interpreted.py and in stages/test_triton_gpu.py; those of CUDA in
stages/test_cuda_emulated.py and stages/test_hopper_emulated.py.
"""

import os
from dataclasses import replace

import not_finite
import numpy as np
import pytest

from kdakit import reference
from kdakit.cases import CASES, FUSED, SEGMENT_CASES, Case
from kdakit.measure import checking

FULL = os.environ.get("KDAKIT_FULL") == "1"
ROWS = Case(
    "nf_rows", "two rows, grouped heads", B=2, T=40, H=2, HV=4, K=16, V=8, options={"chunk_size": 64, "return_intermediate_states": True}
)
PACKED = Case("nf_packed", "packed, an empty sequence", T=40, H=1, HV=2, K=16, V=8, lengths=(9, 0, 17, 14))
PACKED_STATES = replace(PACKED, name="nf_packed_states", options={"chunk_size": 16, "return_intermediate_states": True})
SEGMENTS = Case("nf_segments", "three segments in a chunk", T=40, H=1, HV=2, K=16, V=8, segments=((9, 17, 14),))
FUSED_PACKED = Case("nf_fused", "packed, everything in the kernel", T=40, H=2, HV=2, K=16, V=8, lengths=(19, 0, 21), gate="raw",
                    beta="logits", A_log=True, dt_bias=True, options=FUSED)  # fmt: skip


def runs(backend, case, dtype="float32", op="chunk"):
    return lambda arrays, cotangents: checking.run_arrays(backend, case, dtype, arrays, cotangents, op)


NAMES = ("plain", "grouped", "varlen", "varlen_fused", "gate_strong", "gate_spikes", "softplus_huge", "keep")


HALF = NAMES if FULL else ("grouped", "varlen")


@pytest.mark.parametrize("name, dtype", [(name, "float32") for name in NAMES] + [(name, "bfloat16") for name in HALF])
def test_torch_native(name, dtype):
    pytest.importorskip("torch")
    assert not_finite.check(CASES[name], dtype, runs("torch_native", CASES[name], dtype)) >= 21


def test_torch_native_states_of_packed_sequences():
    """As many as there are chunks, with and without gradients: room for more is not handed out, which nobody has written to."""
    pytest.importorskip("torch")
    case, run = PACKED_STATES, runs("torch_native", PACKED_STATES)
    arrays, truth = case.arrays("float32"), reference.forward(case.problem("float32"), case.arrays("float32")).states
    for cotangents in (None, case.cotangents("float32")):
        found = run(arrays, cotangents)["states"]
        assert found.shape == truth.shape and np.abs(found - truth).max() < 1e-5
    not_finite.check(case, "float32", run, values=(np.nan,))


@pytest.mark.parametrize("seed", range(12 if FULL else 6))
def test_torch_native_drawn(seed):
    pytest.importorskip("torch")
    case, dtype = not_finite.draw(seed)
    not_finite.check(case, dtype, runs("torch_native", case, dtype), seed)


# A case is a program to compile: `make test-full` has them all.
@pytest.mark.parametrize("case", [FUSED_PACKED, SEGMENTS] + [ROWS, PACKED, SEGMENT_CASES["segments"]] * FULL, ids=lambda c: c.name)
def test_xla(case):
    pytest.importorskip("jax")
    not_finite.check(case, "float32", runs("xla", case))


# The interpreter of TPU kernels takes seconds a call: gradients, infinity and packed sequences are `make test-full`'s.
@pytest.mark.parametrize("case", [ROWS, SEGMENTS] + [PACKED, FUSED_PACKED] * FULL, ids=lambda c: c.name)
def test_pallas_tpu(case):
    pytest.importorskip("jax")
    not_finite.check(case, "float32", runs("pallas_tpu", case), values=(np.nan, -np.inf) if FULL else (np.nan,), gradients=FULL)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_reset_is_nothing_to_take_out(dtype):
    """A log-decay of -inf becomes one that is finite in the gate's own dtype and forgets all the same."""
    jnp = pytest.importorskip("jax.numpy")
    from kdakit import quarantine

    arrays = checking.to_jax(SEGMENTS.arrays(dtype), SEGMENTS.dtypes(dtype))
    found = quarantine.isolate(SEGMENTS.problem(dtype), arrays._replace(g=arrays.g.at[:, 5].set(-jnp.inf).astype(dtype)))
    assert found.arrays.g.dtype == dtype and jnp.isfinite(found.arrays.g).all() and not found.bad.any()
    assert not jnp.exp(found.arrays.g[:, 5].astype(jnp.float32)).any()


@pytest.mark.parametrize("case", [SEGMENTS] + [ROWS, FUSED_PACKED] * FULL, ids=lambda c: c.name)
def test_pallas_tpu_that_looks_afterwards(case, monkeypatch):
    """As on a TPU: the kernels run on what they get, and again where something was not finite; gradients too. The second run is another
    program to the interpreter's compiler, which may round a * b + c once in one of them."""
    pytest.importorskip("jax")
    from kdakit.backends import pallas_tpu

    monkeypatch.delenv("KDAKIT_INTERPRETER", raising=False)
    monkeypatch.setattr(pallas_tpu, "interpreted", lambda device: None)
    values = (np.nan, -np.inf) if FULL else (np.nan,)
    not_finite.check(case, "float32", runs("pallas_tpu", case), values=values, gradients=True, rounding=2.0**-20)


@pytest.mark.parametrize("backend", ["torch_native", "xla", "pallas_tpu"])
@pytest.mark.parametrize("case", [PACKED, SEGMENTS], ids=lambda c: c.name)
def test_token_recurrence(backend, case):
    pytest.importorskip("torch" if backend == "torch_native" else "jax")
    if case.segments and backend == "torch_native":
        pytest.skip("kdakit.torch takes no segment_ids")
    case = replace(case, T=20, lengths=(4, 0, 9, 7) if case.lengths else (), segments=((4, 9, 7),) if case.segments else ())
    values = (np.nan,) if backend == "pallas_tpu" and not FULL else not_finite.VALUES
    not_finite.check(case, "float32", runs(backend, case, op="recurrent"), values=values, gradients=False)
