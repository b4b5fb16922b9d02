"""A forward that leaves its records to its backward (`borrowed.records`), without a GPU: each CUDA kernel of it thread by thread on a CPU,
and whole calls, in which all but short launches are such kernels.

The interpreter must be chosen before Triton is imported: one test runs this file in a process that has it."""

import ctypes
import math
import os
from itertools import pairwise
from types import SimpleNamespace

import emulated
import fresh
import numpy as np
import pytest
from hopper_records import CHUNK, Memory, bits, floats, opened, prepare

from kdakit.backends.cuda import library
from kdakit.cases import FUSED, Case
from kdakit.measure import checking
from kdakit.rounding import round_to

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

pytestmark = emulated.needs_compiler
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
in_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in a process with TRITON_INTERPRET=1")
outside = pytest.mark.skipif(INTERPRETED, reason="needs no interpreter")
D, SQUARES, SQUARE = 128, 3 * 128 * 128, 512
BOUNDED = {"safe_gate": True, "lower_bound": -5.0}
KEEPING = {"disable_recompute": True, "output_final_state": False, "chunk_size": 64}
SIZES = dict(H=1, K=D, V=D, beta="logits", initial_state=False)
COMPUTED = dict(gate="raw", A_log=True, dt_bias=True)
PACKED = Case("packed", "more chunks than stages", T=395, lengths=(0, 1, 330, 0, 64), HV=2, options=FUSED | KEEPING, **COMPUTED, **SIZES)
TRAINED = [
    Case("bounded", "everything in the kernel", T=136, HV=1, options=FUSED | KEEPING | BOUNDED, **COMPUTED, **SIZES),
    Case("packed", "sequences of all lengths, grouped heads", T=70, lengths=(0, 1, 66, 3), HV=2, options=FUSED | KEEPING, **COMPUTED,
         **SIZES),
    Case("given", "log-decays and doubled strengths", T=66, HV=1, gate="huge",
         options=KEEPING | {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}, **SIZES),
    Case("stacks", "log-decays and betas given, some of these 0, keys of any norm", T=136, HV=1, gate="huge", options=KEEPING,
         **SIZES | dict(beta="some_zero")),
    Case("both", "normalised here, betas given, packed", T=70, lengths=(0, 1, 66, 3), HV=2, gate="spikes",
         options=KEEPING | {"use_qk_l2norm_in_kernel": True}, **SIZES | dict(beta="uniform")),
]  # fmt: skip


@outside
def test_in_the_interpreter():
    done = fresh.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__, TRITON_INTERPRET="1")
    assert done.returncode == 0 and f"{len(TRAINED) + 1} passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]


def bf16(x):
    return np.asarray(round_to(x, "bfloat16"), np.float64)


def rows_of(records):
    """Records as kernels that keep nothing have them: their squares by rows."""
    by_rows, at = records.copy(), {(b, c): SQUARES + SQUARE * (c * (c + 1) // 2 + b) for c in range(4) for b in range(c + 1)}
    for i, place in enumerate((b, c) for b in range(4) for c in range(b, 4)):
        by_rows[..., SQUARES + SQUARE * i : SQUARES + SQUARE * (i + 1)] = records[..., at[place] : at[place] + SQUARE]
    return by_rows


class Made:
    """What the prepare kernel leaves of a case, and a description of the call for the kernels that follow."""

    def __init__(self, case, order=1):
        self.problem, self.arrays, memory = case.problem("bfloat16", needs_grad=True), case.arrays("bfloat16"), Memory()
        T, HV, N = self.problem.T, self.problem.HV, self.problem.N
        self.slots = T // CHUNK + N if self.problem.varlen else -(-T // CHUNK)
        self.lower, self.factors = (
            memory.room(self.slots, HV, CHUNK, CHUNK, dtype=np.float16),
            memory.room(self.slots, HV, 3, CHUNK, dtype=np.float32),
        )
        self.fields = dict(lower=self.lower.ctypes.data, factors=self.factors.ctypes.data, lower_dtype=library.FLOAT16, checkpoint=1)
        kept = self.fields | dict(r=256, checkpoints=256)
        self.records = prepare(emulated.load("hopper"), self.problem, self.arrays, order, **kept).copy()
        memory.check_guards()

    def forward(self, v, o=None):
        """kda_prefill_args of the call."""
        problem, cu = self.problem, self.arrays.cu_seqlens
        self.cu = np.asarray([0, problem.T] if cu is None else cu, np.int64)
        self.space = np.zeros(self.records.nbytes + 256, np.uint8)
        start = (128 - self.space.ctypes.data) % 256  # XLA's arrays begin at multiples of 128 bytes
        self.space[start : start + self.records.nbytes] = self.records.reshape(-1)
        of = lambda x: library.Tensor(
            None if x is None else x.ctypes.data, library.BFLOAT16, 0, problem.T * problem.HV * D, D, problem.HV * D
        )
        return library.PrefillArgs(
            batch=1, tokens=problem.T, heads=problem.H, value_heads=problem.HV, key_dim=D, value_dim=D, sequences=problem.N,
            cu_seqlens=self.cu.ctypes.data, cu_seqlens_64=1, v=of(v), o=of(o), record=self.space.ctypes.data + start,
            beta_kind=library.BETAS["sigmoid"],
        )  # fmt: skip

    def sequences(self):
        """(n, first token, tokens, first slot) of each; with cu_seqlens slots are those of packed ones."""
        return [(n, a, b - a, a // CHUNK + n) for n, (a, b) in enumerate(pairwise(self.cu))]


@pytest.fixture(scope="module")
def made():
    return Made(PACKED)


@outside
def test_records_are_the_usual_ones(made):
    """But for the order of squares, to the bit, those of a forward that keeps no records for its backward; and so is `lower`."""
    from kdakit.backends.triton_gpu.host import forward as forwards

    kernels, problem, arrays = emulated.load("hopper"), made.problem, made.arrays
    used = np.isfinite(made.factors[:, 0, 0, 0])
    assert made.records.shape[-1] == forwards.RECORD
    room, solved = np.zeros_like(made.lower), np.zeros(made.lower.shape, np.uint16)
    kept = made.fields | dict(lower=room.ctypes.data, factors=None, solved=solved.ctypes.data, checkpoints=256)
    records = prepare(kernels, problem, arrays, **kept)
    assert (rows_of(made.records)[used] == records[used]).all() and (room[used] == made.lower[used]).all()
    again = Made(PACKED, order=-1)
    assert (again.records[used] == made.records[used]).all() and (again.lower[used] == made.lower[used]).all()


@outside
def test_factors(made):
    """beta, 0 past a sequence's end, and inverse norms."""
    made.forward(None)
    q, k, logits = (np.asarray(x, np.float64)[0] for x in (made.arrays.q, made.arrays.k, made.arrays.beta))
    for _, first, tokens, slot in made.sequences():
        for i, t in enumerate(range(0, tokens, CHUNK)):
            C, at = min(CHUNK, tokens - t), slice(first + t, first + t + min(CHUNK, tokens - t))
            for h in range(made.problem.HV):
                beta, of_q, of_k = made.factors[slot + i, h]
                assert np.allclose(beta[:C], 1 / (1 + np.exp(-logits[at, h])), rtol=1e-6) and not beta[C:].any()
                for x, y in ((of_q, q), (of_k, k)):
                    assert np.allclose(x[:C], (y[at, h // made.problem.group] ** 2).sum(-1) ** -0.5, rtol=1e-5)


def walked(made):
    """o, r and the states before every chunk, with the scan's roundings."""
    v = np.float64(made.arrays.v)[0]
    o, r, states = np.full(v.shape, np.nan), np.full(v.shape, np.nan), np.full((made.slots, made.problem.HV, D, D), np.nan)
    for _, first, tokens, slot in made.sequences():
        for h in range(made.problem.HV):
            S = np.zeros((D, D))
            for i, t in enumerate(range(0, tokens, CHUNK)):
                C = min(CHUNK, tokens - t)
                at = slice(first + t, first + t + C)
                k_in, q_decayed, k_solved, A, decay = opened(rows_of(made.records)[slot + i, h])
                x = np.zeros((CHUNK, D))
                x[:C] = v[at, h]
                states[slot + i, h] = bf16(S).T
                error = bf16(x - k_in @ bf16(S))
                r[at, h], o[at, h] = error[:C], bf16(q_decayed @ bf16(S) + A @ error)[:C]
                S = np.float64(decay)[:, None] * S + np.float64(k_solved).T @ error
    return dict(o=o, r=r, states=states)


def close(found, right):
    """Written where it should be, and right but for numbers that round to the next bfloat16."""
    assert (np.isnan(found) == np.isnan(right)).all()
    error = np.abs(found - right) / np.nanmax(np.abs(right))
    return np.nanmax(error) < 2.0**-7 and np.sqrt(np.nanmean(error**2)) < 2.0**-12


@outside
def test_scan(made):
    """One or two warp groups, threads in either order: the same bits, and those of the scan that keeps nothing."""
    kernels, problem, memory = emulated.load("scan"), made.problem, Memory()
    v, found = bits(made.arrays.v), []
    for groups, order in ((1, 1), (2, -1)):
        o, r = memory.room(1, problem.T, problem.HV, D), memory.room(1, problem.T, problem.HV, D)
        states, args = memory.room(made.slots, problem.HV, D, D), made.forward(v, o)
        args.r, args.checkpoints, args.checkpoint = r.ctypes.data, states.ctypes.data, 1
        kernels.kda_emulate_scan_bf16(ctypes.byref(args), groups, order)
        found.append(dict(o=floats(o)[0], r=floats(r)[0], states=floats(states)))
    memory.check_guards()
    one, two = found
    right = walked(made)
    for name, x in one.items():
        assert np.array_equal(x, two[name], equal_nan=True) and close(x, right[name]), name
    o, usual = memory.room(1, problem.T, problem.HV, D), SimpleNamespace(records=rows_of(made.records), problem=problem, arrays=made.arrays)
    args = Made.forward(usual, v, o)
    args.workspace, args.record = args.record, None
    kernels.kda_emulate_scan_bf16(ctypes.byref(args), 1, 1)
    assert np.array_equal(floats(o)[0], one["o"], equal_nan=True)


@outside
@pytest.mark.parametrize("groups", [1, 2])
def test_reverse(made, groups):
    """d_v = A_solved^T d_o + k_solved dS' itself: a record's A_solved and k_solved have been multiplied by beta."""
    kernels, problem, memory = emulated.load("reverse"), made.problem, Memory()
    rng = np.random.default_rng(0)
    d_o, d_final = bf16(rng.standard_normal((1, problem.T, problem.HV, D))), np.float32(rng.standard_normal((problem.N, problem.HV, D, D)))
    d_states, d_v = memory.room(made.slots, problem.HV, D, D), memory.room(1, problem.T, problem.HV, D)
    given, forward = bits(d_o), made.forward(None)
    args = library.ReverseArgs(
        forward, record=forward.record, d_o=given.ctypes.data, d_final=d_final.ctypes.data, d_states=d_states.ctypes.data,
        d_v=d_v.ctypes.data,
    )  # fmt: skip
    kernels.kda_emulate_reverse_bf16(ctypes.byref(args), groups, 1)
    memory.check_guards()
    right_states, right_v = np.full(d_states.shape, np.nan), np.full(d_v.shape, np.nan)[0]
    for n, first, tokens, slot in made.sequences():
        for h in range(problem.HV):
            dS = np.float64(d_final[n, h])
            for i in reversed(range(-(-tokens // CHUNK))):
                C = min(CHUNK, tokens - i * CHUNK)
                at = slice(first + i * CHUNK, first + i * CHUNK + C)
                k_in, q_decayed, k_solved, A, decay = (np.float64(x) for x in opened(rows_of(made.records)[slot + i, h]))
                x = np.zeros((CHUNK, D))
                x[:C] = d_o[0, at, h]
                y = bf16(A.T @ x + k_solved @ bf16(dS))
                right_states[slot + i, h], right_v[at, h] = bf16(dS).T, y[:C]
                dS = decay[:, None] * dS + q_decayed.T @ x - k_in.T @ y
    assert close(floats(d_states), right_states) and close(floats(d_v)[0], right_v)


@pytest.fixture
def calls(monkeypatch):
    """Names of the library's calls, which run thread by thread."""
    from kdakit.backends import cuda
    from kdakit.backends.triton_gpu import borrowed

    preparing, scanning, reversing, chunks = (emulated.load(name) for name in ("hopper", "scan", "reverse", "gradient"))
    calls, empty = [], torch.empty

    def placed(shape, **how):
        """On a CPU a tensor begins at a multiple of 64 bytes, a record has to at one of 128."""
        if how.get("dtype") != torch.uint8:
            return empty(shape, **how)
        size = math.prod(shape)
        room = empty(size + 128, **how)
        return room[(start := -room.data_ptr() % 128) : start + size].view(shape)

    def prefill(args, dtype):
        calls.append("record" if args.record else "forward")
        args.sequences = args.sequences or args.batch
        preparing.kda_emulate_prepare_bf16(ctypes.byref(args), 1)
        scanning.kda_emulate_scan_bf16(ctypes.byref(args), 1 + args.value_heads % 2, 1)  # warp groups

    def reverse(args):
        calls.append("reverse" if args.record else "from tiles")
        reversing.kda_emulate_reverse_bf16(ctypes.byref(args), 2 - args.forward.contents.value_heads % 2, 1)

    def gradient(args):
        calls.append("gradient")
        chunks.kda_emulate_gradient_bf16(ctypes.byref(args), 1, 1)

    monkeypatch.setattr(torch, "empty", placed)
    monkeypatch.setenv(borrowed.VARIABLES["forward"], "1")
    for name, run in dict(prefill=prefill, reverse=reverse, gradient=gradient, workspace_size=lambda args, dtype: 0).items():
        monkeypatch.setattr(library, name, run)
    monkeypatch.setattr(cuda, "supports", lambda problem, device: cuda.unsupported(problem))
    monkeypatch.setattr(borrowed, "lender", cuda)
    return calls


@in_interpreter
@pytest.mark.parametrize("case", TRAINED, ids=lambda case: case.name)
def test_gradients(calls, case):
    """Within the rule, with three calls of the library; what is kept is what `saved_specs` says."""
    from kdakit.backends import triton_gpu

    problem, arrays, cotangents = case.problem("bfloat16", needs_grad=True), case.arrays("bfloat16"), case.cotangents("bfloat16")
    given = checking.to_torch(arrays, case.dtypes("bfloat16"), "cpu")
    config = triton_gpu.default_config(problem, "cpu")
    result, kept = triton_gpu.forward(problem, given, config)
    specs = triton_gpu.saved_specs(problem, "cpu")
    assert [(tuple(x.shape), str(x.dtype)) for x in kept] == [(shape, f"torch.{dtype}") for shape, dtype in specs]
    d_o = torch.from_numpy(cotangents[0]).bfloat16()
    found = triton_gpu.backward(problem, given, kept, d_o, None, config)
    assert calls == ["record", "reverse", "gradient"]
    made = {"o": result.o} | {name: x for name, x in found._asdict().items() if x is not None}
    rows = checking.compare_quickly(problem, arrays, {name: x.double().numpy() for name, x in made.items()}, cotangents, "bfloat16")
    assert {row.name for row in rows} >= {"o", "q", "k", "v", "g", "beta"} and all(row.ok for row in rows), rows


@in_interpreter
def test_no_tokens(calls):
    from kdakit.backends import triton_gpu

    case = TRAINED[0]
    problem = case.problem("bfloat16", needs_grad=True).replace(T=0)
    given = checking.to_torch(case.arrays("bfloat16"), case.dtypes("bfloat16"), "cpu")
    given = given._replace(**{name: getattr(given, name)[:, :0] for name in ("q", "k", "v", "g", "beta")})
    config = triton_gpu.default_config(problem, "cpu")
    result, kept = triton_gpu.forward(problem, given, config)
    found = triton_gpu.backward(problem, given, kept, result.o, None, config)
    assert not calls and not found.A_log.any() and not found.dt_bias.any() and found.q.shape == given.q.shape


@outside
def test_where_records_are_kept(monkeypatch):
    """With 32 heads or where it is asked for, whatever the number of tokens."""
    from kdakit.backends.triton_gpu import borrowed
    from kdakit.backends.triton_gpu.config import CHIPS, choose

    able = SimpleNamespace(**{name: lambda problem, device: (print, None) for name in borrowed.LENT.values()})
    monkeypatch.setattr(borrowed, "lender", able)

    def kept(**changes):
        problem = TRAINED[0].problem("bfloat16", needs_grad=True).replace(**changes)
        return borrowed.records(problem, choose(problem, CHIPS["sm_90"]), "cuda")

    monkeypatch.delenv(borrowed.VARIABLES["forward"], raising=False)
    assert not kept() and not kept(HV=30) and kept(HV=32) and kept(HV=96, T=1) and not kept(HV=96, deterministic=True)
    assert not kept(HV=96, disable_recompute=False)
    monkeypatch.setenv(borrowed.VARIABLES["forward"], "0")
    assert not kept(HV=96)
    monkeypatch.setenv(borrowed.VARIABLES["forward"], "1")
    assert kept() and kept(T=2**20) and kept(gate="softplus") and kept(deterministic=True)
    stacks = dict(gate="log_decay", beta="given", l2norm=False, safe_gate=False, lower_bound=None)
    assert kept(**stacks) and kept(**stacks | dict(l2norm=True)) and not kept(**stacks | dict(scale=0.125, gate_dtype="float32"))
    others = dict(dtype="float16"), dict(K=64, V=64), dict(l2norm=False), dict(beta="given"), dict(output_final_state=True)
    for changes in (*others, dict(has_initial_state=True), dict(disable_recompute=False)):
        assert not kept(**changes), changes
    monkeypatch.setenv(borrowed.VARIABLES["reverse"], "0")
    assert not kept()
