"""The bfloat16 gradient kernel itself, run thread by thread on the CPU (csrc/tests/emulate_hopper.h); NumPy makes what the stages before it
leave, rounded as they round, and the gradients are held against the float64 recurrence."""

import ctypes
import os
from dataclasses import replace

import emulated
import numpy as np
import pytest
from hopper_records import Memory, bits, floats, row_order

from kdakit import accuracy, reference
from kdakit.backends.cuda import library
from kdakit.cases import CASES, FUSED, Case
from kdakit.chunked import intra
from kdakit.measure import checking
from kdakit.rounding import round_to

pytestmark = emulated.needs_compiler
CHUNK, D = 64, 128
FULL = os.environ.get("KDAKIT_FULL") == "1"  # make test-full
TINY = 2.0**-64  # a smaller given beta divides nothing


KINDS = {"float32": np.float32, "bfloat16": np.uint16}


@pytest.fixture(scope="module")
def kernels():
    return emulated.load("gradient")


def bf16(x):
    return round_to(x, "bfloat16")


def chunks_of(problem, arrays):
    """(sequence, batch row, its slots, [(first token, last + 1)]) of every sequence."""
    per_row = -(-problem.T // CHUNK)
    for n in range(problem.N):
        cu = arrays.cu_seqlens
        row, first, last = (0, int(cu[n]), int(cu[n + 1])) if cu is not None else (n, 0, problem.T)
        slot = first // CHUNK + n if cu is not None else n * per_row
        yield n, row, slot, [(t, min(t + CHUNK, last)) for t in range(first, last, CHUNK)]


def stages(problem, arrays, d_o, d_final, lower_dtype):
    """What rebuild, replay and reverse leave: states between them are float32's, what they store is bfloat16."""
    HV, N, D = problem.HV, problem.N, problem.K
    slots = problem.T // CHUNK + N if problem.varlen else problem.B * -(-problem.T // CHUNK)
    q, k, v, g, beta = reference.activate(problem, arrays, np.float64)
    initial = reference.initial_states(problem, arrays, np.float64)
    made = dict(
        lower=np.zeros((slots, HV, CHUNK, CHUNK), lower_dtype), factors=np.zeros((slots, HV, 3, CHUNK), np.float32),
        states=np.full((slots, HV, D, D), np.nan), d_states=np.full((slots, HV, D, D), np.nan),
        r=np.full((problem.B, problem.T, HV, D), np.nan), d_v=np.full((problem.B, problem.T, HV, D), np.nan),
        alone=np.full((slots, HV, CHUNK, D), np.nan), before_last=np.full(initial.shape, np.nan, np.float32),
        after_first=np.full(initial.shape, np.nan, np.float32),
    )  # fmt: skip
    made |= {name: np.full((slots, HV, D, D), np.nan) for name in ("states_lost", "d_states_lost")}
    l2norm = problem.options.l2norm
    raw = [np.repeat(np.asarray(x, np.float64), problem.group, axis=2) for x in arrays[:2]]
    norms = [1 / np.sqrt((x * x).sum(-1) + 1e-6) if l2norm else np.ones(x.shape[:3]) for x in raw]
    for n, row, slot, spans in chunks_of(problem, arrays):
        for h in range(HV):
            S, kept = initial[n, h], []
            for i, (a, b) in enumerate(spans):
                C = b - a
                x = intra(*(y[row, a:b, h] for y in (q, k, v, g, beta)))
                beta_c = beta[row, a:b, h]
                unscaled = intra(*(y[row, a:b, h] for y in (q, k, v, g)), np.ones(C)).A_kk
                made["lower"][slot + i, h, :C, :C] = unscaled @ x.inverse
                for j, y in enumerate((beta_c, norms[0][row, a:b, h], norms[1][row, a:b, h])):
                    made["factors"][slot + i, h, j, :C] = y
                made["states"][slot + i, h], made["states_lost"][slot + i, h] = bf16(S).T, bf16(S - bf16(S)).T
                if 0 < i == len(spans) - 1:
                    made["before_last"][n, h] = S
                r = bf16(v[row, a:b, h] - bf16(k[row, a:b, h] * np.exp(x.g_cum)) @ bf16(S))
                made["r"][row, a:b, h] = r
                kept.append(x)
                S = x.decay[:, None] * S + x.k_decayed.T @ (x.inverse @ (beta_c[:, None] * r))
            dS = np.zeros((D, D)) if d_final is None else np.array(d_final[n, h].T if problem.options.state_v_first else d_final[n, h])
            for i, (a, b) in reversed(list(enumerate(spans))):
                x, beta_c = kept[i], beta[row, a:b, h][:, None]
                made["d_states"][slot + i, h], made["d_states_lost"][slot + i, h] = bf16(dS).T, bf16(dS - bf16(dS)).T
                if 0 == i < len(spans) - 1:
                    made["after_first"][n, h] = dS
                d = d_o[row, a:b, h]
                y = (x.A_qk @ x.inverse).T @ d + x.inverse.T @ x.k_decayed @ bf16(dS)
                made["d_v"][row, a:b, h] = bf16(beta_c * y)
                small = np.abs(beta_c[:, 0]) < TINY
                made["alone"][slot + i, h, : b - a][small] = bf16(y)[small]
                k_in = bf16(k[row, a:b, h] * np.exp(x.g_cum))
                dS = x.decay[:, None] * dS + bf16(x.q_decayed).T @ d - k_in.T @ bf16(beta_c * y)
    return made


def gradient(kernels, problem, arrays, cotangents, group=1, blocks=2, order=1, ends=False, lost=False):
    """Gradients by the name of their input, of all but v and the initial state. ends: from ends of sequences in float32; lost: from states
    in two parts."""
    o, B, T, H, HV, D = problem.options, problem.B, problem.T, problem.H, problem.HV, problem.K
    d_o, d_final = cotangents
    d_final = d_final if o.output_final_state else None
    made = stages(problem, arrays, d_o, d_final, np.float16 if o.l2norm else np.float32)
    slots, rows = len(made["lower"]), row_order(group)
    lower = np.ascontiguousarray(made["lower"][:, :, rows][:, :, :, rows])
    factors = np.ascontiguousarray(made["factors"][..., rows])
    memory = Memory()
    by_state = lambda x: np.ascontiguousarray(x.swapaxes(2, 3)) if o.state_v_first else x
    address, room = memory.address, memory.room
    kind = np.float32 if problem.group > 1 else np.uint16
    out = dict(d_q=room(B, T, HV, D, dtype=kind), d_k=room(B, T, HV, D, dtype=kind), d_g=room(B, T, HV, D, dtype=KINDS[problem.gate_dtype]))
    out |= dict(d_beta=room(B, T, HV, dtype=KINDS[problem.beta_dtype]))
    if arrays.A_log is not None:
        out["A_shares"] = room(slots, HV, D, dtype=np.float32)
    if arrays.dt_bias is not None:
        out["bias_shares"] = room(slots, HV, D, dtype=np.float32)
    args = library.GradientArgs(
        memory.forward(problem, arrays), lower=address(lower), factors=address(factors),
        alone=address(bits(made["alone"])) if o.beta == "given" else None,
        **{name: address(by_state(made[name])) for name in ("before_last", "after_first") if ends},
        **{name: address(bits(made[name])) for name in ("states_lost", "d_states_lost") if lost},
        d_final=address(None if d_final is None else np.asarray(d_final, np.float32)), d_o=address(bits(d_o)),
        **{name: address(bits(made[name])) for name in ("states", "d_states", "r", "d_v")},
        **{name: x.ctypes.data for name, x in out.items()},
        lower_dtype=library.FLOAT16 if o.l2norm else library.FLOAT32, d_q_dtype=library.FLOAT32 if problem.group > 1 else library.BFLOAT16,
        group=group,
    )  # fmt: skip
    kernels.kda_emulate_gradient_bf16(ctypes.byref(args), blocks, order)
    memory.check_guards()
    found = {name[2:]: floats(x) if x.dtype == np.uint16 else x.astype(np.float64) for name, x in out.items() if name.startswith("d_")}
    for name in "qk":
        found[name] = found[name].reshape(B, T, H, problem.group, D).sum(3)
        found[name] = bf16(found[name]) if problem.group > 1 else found[name]
    if "A_shares" in out:
        found["A_log"] = out["A_shares"].astype(np.float64).sum((0, 2))
    if "bias_shares" in out:
        found["dt_bias"] = out["bias_shares"].astype(np.float64).sum(0).reshape(arrays.dt_bias.shape)
    return found


def check(kernels, case, arrays=None, group=1):
    problem, cotangents = case.problem("bfloat16", needs_grad=True), case.cotangents("bfloat16")
    arrays = arrays or case.arrays("bfloat16")
    found = gradient(kernels, problem, arrays, cotangents, group, lost=problem.K == 64 and problem.options.gate != "log_decay")
    rest = accuracy.truths(problem, arrays, cotangents[0], cotangents[1] if problem.options.output_final_state else None)
    rows = checking.compare_quickly(problem, arrays, rest | found, cotangents, "bfloat16")
    assert all(row.ok for row in rows), [(row.name, row.error, row.tolerance) for row in rows]
    return {row.name: row.error for row in rows}


HARD = [
    "gate_slow", "gate_bounded", "gate_strong", "gate_huge", "gate_resets", "gate_spikes", "identical_two", "beta_zero", "softplus",
    "softplus_huge", "lower_bound", "lower_bound_saturated", "grouped", "varlen", "v_first", "no_final",
]  # fmt: skip
QUICK = ["gate_strong", "gate_huge", "beta_zero", "softplus_huge", "lower_bound", "grouped"]
QUICK_64 = ["gate_slow", "gate_huge", "gate_bounded", "softplus_huge", "lower_bound", "grouped", "varlen_fused"]


@pytest.mark.parametrize("K, name", [(K, name) for K, quick in ((128, QUICK), (64, QUICK_64)) for name in (HARD if FULL else quick)])
def test_cases(kernels, K, name):
    case = CASES[name]
    T = case.T if case.lengths else min(case.T, 72)
    group = {"gate_huge": 4, "gate_bounded": 8}.get(name, 1)  # as the plain Triton kernels order rows
    check(kernels, replace(case, H=1, HV=2 if name == "grouped" else 1, B=1, T=T, K=K, V=K), group=group)


@pytest.mark.parametrize("K", [128, 64])
def test_packed_sequences_and_blocks_that_walk(kernels, K):
    """Empty slots, sequences of one token and of more than a chunk; several chunks for one block."""
    how = dict(gate="raw", beta="logits", A_log=True, dt_bias=True) if K == 64 else {}
    options = (FUSED if K == 64 else {}) | {"chunk_size": 64}
    case = Case("packed", "packed", T=74, H=1, HV=1, K=K, V=K, lengths=(0, 1, 66, 0, 7), options=options, **how)
    check(kernels, case)
    problem, arrays, cotangents = case.problem("bfloat16", needs_grad=True), case.arrays("bfloat16"), case.cotangents("bfloat16")
    one, several = (gradient(kernels, problem, arrays, cotangents, blocks=n, order=order, lost=K == 64) for n, order in ((1, 1), (3, -2)))
    assert all((one[name] == several[name]).all() for name in one), "bits depend on the number of blocks or the order of threads"


@pytest.mark.parametrize("K", [128, 64])
@pytest.mark.parametrize("lengths", [(1, 1, 1, 1), (0, 2, 1, 3)])
def test_a_gate_with_no_state_before_it_has_no_gradient(kernels, K, lengths):
    """Whatever float32 sums leave of the pairs after it."""
    case = Case("alone", "", T=sum(lengths), H=1, HV=1, K=K, V=K, lengths=lengths, keys="identical", gate="raw", beta="logits_high",
                A_log=True, dt_bias=True, initial_state=False, options=FUSED | {"chunk_size": 64})  # fmt: skip
    arrays = case.arrays("bfloat16")
    found = gradient(kernels, case.problem("bfloat16", needs_grad=True), arrays, case.cotangents("bfloat16"), lost=K == 64)
    first = np.isin(np.arange(case.T), arrays.cu_seqlens[:-1])
    assert not found["g"][:, first].any() and found["g"][:, ~first].any() == found["dt_bias"].any() == (max(lengths) > 1)


@pytest.mark.parametrize("v_first", [False, True] if FULL else [False])
def test_ends_of_sequences_in_float32(kernels, v_first):
    """Two chunks that forget nothing: states in bfloat16 are what d_g has its error from, but for the caller's own. In the other layout
    they are the same, see test_states_of_either_layout."""
    options = {"chunk_size": 64, "state_v_first": v_first}
    case = Case("ends", "ends", T=140, H=1, HV=1, K=D, V=D, gate="slow", keys="parallel", lengths=(70, 40, 0, 30), options=options)
    problem, arrays, cotangents = case.problem("bfloat16", needs_grad=True), case.arrays("bfloat16"), case.cotangents("bfloat16")
    without, found = (gradient(kernels, problem, arrays, cotangents, ends=ends)["g"] for ends in (False, True))
    truth = accuracy.truths(problem, arrays, *cotangents)["g"]
    assert (without[:, 70:] == found[:, 70:]).all(), "sequences of one chunk have both of the caller"
    assert accuracy.error(found[:, :70], truth[:, :70]) < 0.75 * accuracy.error(without[:, :70], truth[:, :70])


def test_states_in_two_parts(kernels):
    """64 channels, gates that forget little: most of their gradients is sum_v S dS', and what bfloat16 leaves of it most of the error."""
    case = Case("parts", "", T=140, H=1, HV=1, K=64, V=64, gate="slow", keys="parallel", options={"chunk_size": 64})
    problem, arrays, cotangents = case.problem("bfloat16", needs_grad=True), case.arrays("bfloat16"), case.cotangents("bfloat16")
    without, found = (gradient(kernels, problem, arrays, cotangents, lost=lost)["g"] for lost in (False, True))
    truth = accuracy.truths(problem, arrays, *cotangents)["g"]
    assert accuracy.error(found, truth) < 0.75 * accuracy.error(without, truth)


@pytest.mark.parametrize("K", [128, 64])
def test_what_waits_keeps_three_bytes(kernels, K):
    """Identical keys and strengths of 1: what dS' gives to columns cancels in d_g. In bfloat16 it leaves 1.4 and 1.5 of the rule."""
    case = CASES["keys_identical"]
    check(kernels, replace(case, B=1, T=64, H=1, HV=1, K=K, V=K, options=case.options | {"chunk_size": 64}))


@pytest.mark.parametrize("given, D", [("initial", 128), ("final", 128), ("both", 128), ("both", 64)])
def test_states_of_either_layout(kernels, given, D):
    """[K, V] and [V, K]: rows that lie in memory are of key channels and of value channels, beside tiles where only one state is given."""
    options = {"chunk_size": 64, "output_final_state": given != "initial"}
    case = Case("either", "", T=70, H=1, HV=1, K=D, V=D, gate="slow", initial_state=given != "final", lengths=(66, 4), options=options)
    problem, arrays, (d_o, d_final) = case.problem("bfloat16", needs_grad=True), case.arrays("bfloat16"), case.cotangents("bfloat16")
    d_final = d_final if given != "initial" else None
    other = lambda x: None if x is None else np.ascontiguousarray(x.swapaxes(2, 3))
    keys = gradient(kernels, problem, arrays, (d_o, d_final), ends=True)
    by_values = problem.replace(state_v_first=True), arrays._replace(initial_state=other(arrays.initial_state))
    values = gradient(kernels, *by_values, (d_o, other(d_final)), ends=True)
    truth = accuracy.truths(problem, arrays, d_o, d_final)
    for name in keys:
        apart, error = accuracy.error(keys[name], values[name]), accuracy.error(keys[name], truth[name])
        assert apart < 1e-3 * error, name


@pytest.mark.parametrize("K", [128, 64])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("rounded, v_first", [(x, y) for x in ("initial", "final") for y in (False, True) if FULL or y == (x == "final")])
def test_what_rounding_takes_from_the_callers_states(kernels, K, alone, rounded, v_first):
    """It is multiplied too: states that the caller has rounded give worse gradients. alone: no other end is the caller's."""
    gate = "huge" if rounded == "final" else "slow"
    options = {"chunk_size": 64, "state_v_first": v_first, "output_final_state": rounded == "final" or not alone}
    given = rounded == "initial" or not alone
    case = Case("callers", "", T=12, H=1, HV=1, K=K, V=K, gate=gate, initial_state=given, lengths=(8, 1, 3), options=options)
    problem, arrays, (d_o, d_final) = case.problem("bfloat16", needs_grad=True), case.arrays("bfloat16"), case.cotangents("bfloat16")
    truth = accuracy.truths(problem, arrays, d_o, d_final if problem.options.output_final_state else None)
    found = gradient(kernels, problem, arrays, (d_o, d_final))
    if rounded == "final":
        worse = gradient(kernels, problem, arrays, (d_o, bf16(d_final)))
    else:
        worse = gradient(kernels, problem, arrays._replace(initial_state=bf16(arrays.initial_state).astype(np.float32)), (d_o, d_final))
    for name in ("q", "g") if rounded == "initial" else ("k", "g"):
        error, larger = (accuracy.error(x[name], truth[name]) for x in (found, worse))
        assert error < (0.5 if name == "g" and not alone else 0.95) * larger, name


def test_gradients_of_any_scale(kernels):
    """Pairs are divided by a power of two of their own: gradients of 2^-40 and 2^40 differ in nothing but that."""
    case = Case("scale", "scales", T=40, H=1, HV=1, K=D, V=D, gate="strong", initial_state=False, options={"output_final_state": False})
    problem, arrays = case.problem("bfloat16", needs_grad=True), case.arrays("bfloat16")
    d_o, _ = case.cotangents("bfloat16")
    small, large = (gradient(kernels, problem, arrays, (d_o * 2.0**e, None)) for e in (-40, 40))
    for name in small:
        assert (small[name] * 2.0**80 == large[name]).all(), name
