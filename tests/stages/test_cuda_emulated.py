"""The float32 CUDA kernels themselves, run thread by thread on the CPU (csrc/tests/emulate.h) and held against the float64 truth.

Shared memory starts as NaN, copies land as late as they may, and the order of the threads is reversed to find races.
"""

import ctypes
from dataclasses import replace

import emulated
import not_finite
import numpy as np
import pytest

from kdakit import chunked
from kdakit.backends.cuda import CHUNK_64_BYTES, library
from kdakit.cases import CASES, Case
from kdakit.measure import checking
from kdakit.reference import activate

pytestmark = emulated.needs_compiler
GUARD = 64  # floats of NaN around every output
HARD = [
    "plain", "one_token", "no_tokens", "gate_huge", "gate_resets", "gate_spikes", "keys_identical", "identical_two", "softplus_huge",
    "lower_bound_bare", "grouped", "v_first", "varlen", "varlen_fused", "odd_sizes",
]  # fmt: skip


@pytest.fixture(scope="module")
def kernels():
    library = emulated.load("prefill", "-O2")
    library.kda_emulate_record_bytes.restype = ctypes.c_size_t
    return library


def padded(x, D, axes=(-1,)):
    """float32, the given axes filled with zeros up to D."""
    wider = [(0, D - x.shape[i] if i - x.ndim in axes else 0) for i in range(x.ndim)]
    return np.ascontiguousarray(np.pad(x, wider).astype(np.float32))


class Guarded:
    """An output in the middle of NaN, aligned to 256 bytes."""

    def __init__(self, shape):
        size = int(np.prod(shape))
        self.pool = np.full(size + 2 * GUARD + 64, np.nan, np.float32)
        self.start = GUARD + (-(self.pool.ctypes.data // 4 + GUARD)) % 64
        self.array = self.pool[self.start : self.start + size].reshape(shape)

    def untouched(self):
        return np.isnan(self.pool[: self.start]).all() and np.isnan(self.pool[self.start + self.array.size :]).all()


def run(kernels, case, D=64, C=32, wide=0, order=1, arrays=None):
    """{o, final_state, w, u} of a case, head sizes padded to D."""
    problem, arrays = case.problem(), arrays or case.arrays()
    o = problem.options
    B, T, H, HV, N = problem.B, problem.T, problem.H, problem.HV, problem.N
    out, final = Guarded((B, T, HV, D)), Guarded((N, HV, D, D))
    slots = T // C + N if problem.varlen else -(-T // C)
    w, u = (None, None) if problem.varlen else (Guarded((B, HV, slots, C, D)), Guarded((B, HV, slots, C, D)))
    sizes = library.PrefillArgs(key_dim=D, value_dim=D, chunk_size=C)
    space = Guarded((B * HV * slots * kernels.kda_emulate_record_bytes(ctypes.byref(sizes)) // 4,))
    q, k, v, g = (padded(x, D) for x in arrays[:4])
    beta = np.ascontiguousarray(arrays.beta.astype(np.float32))
    A_log = None if arrays.A_log is None else arrays.A_log.astype(np.float32)
    dt_bias = None if arrays.dt_bias is None else padded(arrays.dt_bias.reshape(HV, -1), D)
    initial = None if arrays.initial_state is None else padded(arrays.initial_state, D, (-1, -2))

    def tensor(x):
        return library.Tensor(x.ctypes.data, 0, 0, x.strides[0] // 4, x.strides[2] // 4, x.strides[1] // 4)

    def pointer(x):
        return None if x is None else (x.array if isinstance(x, Guarded) else x).ctypes.data

    args = library.PrefillArgs(
        batch=B, tokens=T, heads=H, value_heads=HV, key_dim=D, value_dim=D, chunk_size=C, sequences=N, scale=o.scale,
        q=tensor(q), k=tensor(k), v=tensor(v), g=tensor(g), beta=tensor(beta), o=tensor(out.array), final_state=pointer(final),
        initial_state=pointer(initial), A_log=pointer(A_log), dt_bias=pointer(dt_bias), w=pointer(w), u=pointer(u),
        workspace=pointer(space), workspace_size=space.array.nbytes, gate=library.GATES[o.gate], beta_kind=library.BETAS[o.beta],
        lower_bound=o.lower_bound or 0.0, l2norm=o.l2norm, state_v_first=o.state_v_first, cu_seqlens=pointer(arrays.cu_seqlens),
        cu_seqlens_64=1,
    )  # fmt: skip
    assert kernels.kda_emulate_prefill_f32(ctypes.byref(args), wide, order) == 0
    assert all(x.untouched() for x in (out, final, w, u, space) if x is not None), "written past an end"
    rows, columns = problem.state_shape[2:]
    results = {"o": out.array[..., : problem.V], "final_state": final.array[..., :rows, :columns]}
    return results | ({} if w is None else {"w": w.array[..., : problem.K], "u": u.array[..., : problem.V]})


@pytest.mark.parametrize("name", HARD)
def test_cases(kernels, name):
    case = CASES[name]
    rows = checking.compare(case.problem(), case.arrays(), run(kernels, case))
    assert all(r.ok for r in rows), rows


@pytest.mark.parametrize("wide", [0, 1])
@pytest.mark.parametrize("D, C", [(64, 32), (64, 64), (128, 32), (128, 64)])
def test_sizes(kernels, D, C, wide):
    """Every kernel: o, the final state, w, u; the same bits whatever the order of the threads."""
    case = Case("native", "a kernel's own size", T=C + 29, H=1, HV=1, K=D, V=D, gate="spikes", keys="parallel", beta="one")
    got = run(kernels, case, D, C, wide)
    rows = checking.compare(case.problem(), case.arrays(), got)
    assert all(r.ok for r in rows), rows
    x = [np.moveaxis(a, 2, 1) for a in activate(case.problem(), case.arrays(), np.float64)]  # [B, H, T, ..], q scaled
    for n, part in enumerate((slice(0, C), slice(C, case.T))):
        want = chunked.intra(*(a[:, :, part] for a in x))
        for name in ("w", "u"):
            mine, truth = got[name][:, :, n], getattr(want, name)
            tokens = truth.shape[2]
            assert np.linalg.norm(mine[:, :, :tokens] - truth) <= 2e-6 * np.linalg.norm(truth)
            assert not mine[:, :, tokens:].any(), "rows past T are zero"
    if (D, C) != (128, 64):
        backwards = run(kernels, case, D, C, wide, order=-1)
        assert all(np.array_equal(got[n], backwards[n]) for n in got)


def test_shared_memory_is_refused_before_launch(kernels):
    """sm_80 gives a block 163 KiB, sm_89 99 KiB, sm_90 and sm_100 227 KiB; and the Python side knows which chunks fit."""
    message = kernels.kda_emulate_message
    message.restype = ctypes.c_char_p
    for limit in (163 * 1024, 99 * 1024, 227 * 1024, 64 * 1024):
        for D, C in ((64, 32), (64, 64), (128, 32), (128, 64)):
            status = kernels.kda_emulate_check_shared(D, C, limit)
            fits = limit >= 163 * 1024 or (limit == 99 * 1024 and (D, C) != (128, 64)) or (D, C) == (64, 32)
            assert status == (0 if fits else 5), (D, C, limit)
            assert C == 32 or fits == (limit >= CHUNK_64_BYTES[D]), "default_config would choose wrongly"
    assert kernels.kda_emulate_check_shared(128, 64, 99 * 1024) == 5
    assert message() == b"the intra kernel needs 109440 bytes of shared memory per block, this device has 101376; try chunk_size 32"
    assert kernels.kda_emulate_check_shared(128, 32, 48 * 1024) == 5 and b"state kernel needs 73488 bytes" in message()
    assert not message().endswith(b"chunk_size 32")


@pytest.mark.parametrize("at", [1, 17, 32, 50])
def test_prefix_causality(kernels, at):
    """Changing tokens from `at` on changes no bit before."""
    case = Case("native", "one head", T=70, H=1, HV=1, K=64, V=64, gate="spikes")
    arrays, other = case.arrays(), case.arrays(seed=1)
    mixed = {n: np.concatenate([getattr(arrays, n)[:, :at], 3 * getattr(other, n)[:, at:]], 1) for n in ("q", "k", "v", "g", "beta")}
    before = run(kernels, case)["o"]
    after = run(kernels, case, arrays=arrays._replace(**mixed))["o"]
    assert np.array_equal(before[:, :at], after[:, :at]) and not np.array_equal(before, after)


def test_long_keys_and_small_betas(kernels):
    """Only beta k^2 matters: neither alone may set the power of two."""
    case = Case("native", "one head", T=70, H=1, HV=1, K=64, V=64, gate="huge")
    arrays = case.arrays()
    arrays = arrays._replace(k=arrays.k * np.float32(2**17), beta=arrays.beta * np.float32(2**-34))
    rows = checking.compare(case.problem(), arrays, run(kernels, case, arrays=arrays))
    assert all(r.ok for r in rows), rows


@pytest.mark.parametrize("name", ["v", "q", "k", "initial_state"])
def test_magnitudes(kernels, name):
    """float16 halves have little range: a power of two per tile must make up for it, whatever the tensor's size and spread."""
    case = Case("native", "one head", T=40, H=1, HV=1, K=64, V=64)
    arrays, rng = case.arrays(), np.random.default_rng(0)
    spread = {"v": (1, 40, 1, 64), "q": (1, 40, 1, 1), "k": (1, 1, 1, 64), "initial_state": (1, 1, 64, 64)}[name]
    size = 10.0 ** (rng.uniform(-8, 0, spread) + {"v": 20, "q": -20, "k": 0, "initial_state": 8}[name])
    arrays = arrays._replace(**{name: (getattr(arrays, name) * size).astype(np.float32)})
    rows = checking.compare(case.problem(), arrays, run(kernels, case, arrays=arrays))
    assert all(r.ok for r in rows), rows


def test_what_is_not_finite_stays_where_it_is(kernels):
    """NaN in any input: no bit of another sequence or head changes. (An emulated chunk takes seconds; a GPU has more of them.)"""
    case = replace(CASES["varlen_fused"], T=14, H=1, HV=2, lengths=(5, 0, 9))

    def results(arrays, cotangents):
        return {n: np.array(x) for n, x in run(kernels, case, arrays=arrays).items() if n in ("o", "final_state")}

    not_finite.check(case, "float32", results, values=(np.nan,), gradients=False)
