"""The native library on a GPU, beyond the contract test: `make test-cuda`. Skipped, with the reason, where it cannot run."""

import c_programs
import not_finite
import numpy as np
import pytest

from kdakit import chunked
from kdakit.backends.cuda import library
from kdakit.cases import CASES, FUSED, Case
from kdakit.measure import checking

torch = pytest.importorskip("torch")

REASON = "needs an NVIDIA GPU" if not torch.cuda.is_available() else library.missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")
SIZES = [(64, 32), (64, 64), (128, 32), (128, 64)]  # K = V, C


def inputs(case):
    """[B, H, T, K] tensors for the operators."""
    x = checking.to_torch(case.arrays(), case.dtypes(), "cuda")
    return [a.transpose(1, 2).contiguous() for a in (x.q, x.k, x.v, x.g)] + [x.beta.transpose(1, 2).contiguous(), x.initial_state]


@pytest.mark.parametrize("gate", ["mild", "huge", "resets", "zero"])
@pytest.mark.parametrize("K, C", SIZES)
def test_w_and_u(K, C, gate):
    """The intermediates against the NumPy chunk form, ragged last chunk included."""
    import kdakit.backends.cuda.op  # noqa: F401

    case = Case("native", "sizes of the kernels", B=2, T=2 * C + 13, H=2, HV=2, K=K, V=K, gate=gate, keys="parallel")
    q, k, v, g, beta, state = inputs(case)
    o, w, u, _ = torch.ops.kdakit.prefill(q, k, v, g, beta, C, None, state)
    assert torch.equal(o, torch.ops.kda_prefill.forward(q, k, v, g, beta, C)[0]) is False, "the initial state matters"
    for n in range(3):
        part = slice(n * C, min((n + 1) * C, case.T))
        x = [np.asarray(a[:, :, part].double().cpu()) for a in (q, k, v, g, beta)]
        want = chunked.intra(*x)
        rows = part.stop - part.start
        for got, truth in ((w, want.w), (u, want.u)):
            mine = got[:, :, n].double().cpu().numpy()
            assert np.linalg.norm(mine[:, :, :rows] - truth) <= 2e-6 * np.linalg.norm(truth)
            assert not mine[:, :, rows:].any(), "rows past T are zero"


@pytest.mark.parametrize("K, C", SIZES)
def test_operator_and_public_call_agree(K, C):
    import kdakit.backends.cuda.op
    import kdakit.torch

    case = Case("native", "sizes of the kernels", B=2, T=150, H=2, HV=2, K=K, V=K)
    x = checking.to_torch(case.arrays(), case.dtypes(), "cuda")
    o, final = kdakit.torch.chunk_kda(*x[:5], initial_state=x.initial_state, output_final_state=True, chunk_size=C, backend="cuda")
    q, k, v, g, beta, state = inputs(case)
    theirs = torch.ops.kdakit.prefill(q, k, v, g, beta, C, None, state)
    assert torch.equal(o.transpose(1, 2), theirs[0]) and torch.equal(final, theirs[3])


def test_compile_and_capture():
    import kdakit.backends.cuda.op  # noqa: F401

    q, k, v, g, beta, state = inputs(Case("native", "sizes of the kernels", T=150, K=64, V=64))

    def call(q):
        return torch.ops.kdakit.prefill(q * 2, k, v, g, beta, 64, None, state)[0] + 1

    want = call(q)
    assert torch.equal(torch.compile(call, fullgraph=True)(q), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(q)
    out.zero_()
    graph.replay()
    assert torch.equal(out, want)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return c_programs.link("prefill_test", tmp_path_factory.mktemp("native"))


def test_c_program(program):
    """Errors, unwritten outputs, and the memory around every tensor."""
    done = c_programs.run(program)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("tool", c_programs.TOOLS)
def test_sanitizer(program, tool):
    done = c_programs.run(program, tool=tool)
    assert done.returncode == 0, done.stdout[-3000:]


def test_jax_call_and_gradient():
    """The same library under jit, and xla's gradients behind it."""
    jax = pytest.importorskip("jax")
    reason = checking.refusal("cuda_ffi", CASES["plain"], "float32", "chunk", True)
    if reason:
        pytest.skip(reason)
    assert jax.default_backend() == "gpu"
    for name in ("plain", "softplus", "varlen_fused", "v_first"):
        rows = checking.check("cuda_ffi", CASES[name])
        assert all(r.ok for r in rows), (name, rows)


WRONG = {
    "k": (1, 40, 2, 32), "g": (1, 20, 2, 64), "beta": (1, 40, 1), "initial_state": (1, 2, 64, 32), "o": (1, 20, 2, 64),
    "final_state": (1, 1, 64, 64), "A_log": (1,), "dt_bias": (64,),
}  # fmt: skip


@pytest.mark.parametrize("name, shape", WRONG.items())
def test_jax_call_checks_shapes(name, shape):
    """A program that gets past the frontend with a wrong buffer is told so, and nothing is read or written."""
    jax = pytest.importorskip("jax")
    reason = checking.refusal("cuda_ffi", CASES["plain"], "float32")
    if reason:
        pytest.skip(reason)
    from kdakit.backends.cuda import ffi

    right = dict.fromkeys(("q", "k", "v", "g", "o"), (1, 40, 2, 64)) | dict(beta=(1, 40, 2), A_log=(0,), dt_bias=(0,), cu_seqlens=(0,))
    right |= dict(initial_state=(1, 2, 64, 64), final_state=(1, 2, 64, 64)) | {name: shape}
    results = [jax.ShapeDtypeStruct(right[n], "float32") for n in ("o", "final_state")]
    given = [jax.numpy.zeros(right[n], "int32" if n == "cu_seqlens" else "float32") for n in
             ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")]  # fmt: skip
    numbers = {n: np.int32(0) for n in ("gate", "safe_gate", "beta_kind", "l2norm", "state_v_first")}
    numbers |= dict(chunk_size=np.int64(32), scale=np.float32(1), lower_bound=np.float32(0))
    with pytest.raises(Exception, match=f"kdakit: {name} must"):
        jax.block_until_ready(jax.ffi.ffi_call(ffi.TARGET, results)(*given, **numbers))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_not_finite_stays_where_it_is(dtype, packed):
    """NaN and infinity in any input: no bit of another sequence or head changes."""
    rows = dict(T=150, lengths=(60, 0, 90)) if packed else dict(T=100, B=2)
    case = Case("not_finite", "heads of the kernels", H=2, HV=4, K=128, V=128, gate="raw", beta="logits", A_log=True, dt_bias=True,
                options=FUSED | {"chunk_size": 64, "lower_bound": -5.0, "safe_gate": True}, **rows)  # fmt: skip
    reason = checking.refusal("cuda", case, dtype)
    if reason:
        pytest.skip(reason)
    not_finite.check(case, dtype, lambda arrays, _: checking.run_arrays("cuda", case, dtype, arrays), gradients=False)
