"""The CUDA kernel for the gradient of the state, thread by thread on a CPU: against its formula with its roundings, and in whole calls
whose other stages are Triton's.

The interpreter must be chosen before Triton is imported: one test runs this file in a process that has it."""

import ctypes
import os

import emulated
import fresh
import numpy as np
import pytest
from hopper_records import CHUNK, bits, floats, row_order

from kdakit.backends.cuda import library
from kdakit.cases import FUSED, Case
from kdakit.measure import checking
from kdakit.rounding import round_to

pytestmark = emulated.needs_compiler
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
in_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in a process with TRITON_INTERPRET=1")
outside = pytest.mark.skipif(INTERPRETED, reason="needs no interpreter")
HV = 2
LENGTHS = (0, 1, 130, 0, 64, 66)
TINY = 2.0**-64


@pytest.fixture(scope="module")
def kernels():
    return emulated.load("reverse")


def bf16(x):
    return np.asarray(round_to(x, "bfloat16"), np.float64)


def drawn(half, D, seed=0):
    """What the stages before it leave, rows by token: random, with gradients of very different sizes in value channels."""
    rng = np.random.default_rng(seed)
    T, N = sum(LENGTHS), len(LENGTHS)
    slots = T // CHUNK + N
    x = dict(
        tiles=bf16(rng.standard_normal((slots, HV, 3, CHUNK, D)) / 12),
        solved=bf16(np.tril(rng.standard_normal((slots, HV, CHUNK, CHUNK)) / 8)),
        decay=np.float32(rng.uniform(0.2, 1, (slots, HV, D))), factors=np.float32(rng.uniform(0, 2, (slots, HV, 3, CHUNK))),
        d_o=bf16(rng.standard_normal((1, T, HV, D)) * 2.0 ** rng.integers(-20, 20, D)),
        d_final=np.float32(rng.standard_normal((N, HV, D, D)) * 2.0 ** rng.integers(-20, 20, D)),
        cu=np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int64),
    )  # fmt: skip
    x["factors"][:, :, 0, 5] = 0
    x["tiles"][:, :, 2] = np.float16(x["tiles"][:, :, 2]) if half else x["tiles"][:, :, 2]
    for n, length in enumerate(LENGTHS):
        slot = x["cu"][n] // CHUNK + n + length // CHUNK
        if length % CHUNK:
            x["factors"][slot, :, 0, length % CHUNK :] = 0
    return x


def expected(x, half):
    """The formula, with the kernel's roundings; y_lost and d_states_lost as what they were lost from."""
    D = x["decay"].shape[-1]
    out = dict(d_states=np.full((*x["tiles"].shape[:2], D, D), np.nan), d_v=np.full(x["d_o"].shape, np.nan))
    out |= dict(alone=np.full((*x["tiles"].shape[:2], CHUNK, D), np.nan), y_lost=np.full((len(LENGTHS), HV, CHUNK, D), np.nan))
    out |= dict(d_states_lost=out["d_states"].copy())
    out |= dict(d_initial=np.zeros(x["d_final"].shape), after_first=np.full(x["d_final"].shape, np.nan))
    for n, length in enumerate(LENGTHS):
        first, slot = x["cu"][n], x["cu"][n] // CHUNK + n
        for h in range(HV):
            dS = np.float64(x["d_final"][n, h])
            for c in reversed(range(-(-length // CHUNK))):
                C = min(CHUNK, length - c * CHUNK)
                k_in, q, k_solved = x["tiles"][slot + c, h]
                q = q + x["q_lost"][slot + c, h] if "q_lost" in x else q
                d_o = np.zeros((CHUNK, D))
                d_o[:C] = x["d_o"][0, first + c * CHUNK : first + c * CHUNK + C, h]
                beta = np.float64(x["factors"][slot + c, h, 0])[:, None]
                unit = 2.0 ** np.floor(np.log2(np.abs(dS).max(0)))
                left = np.float64(np.float16(dS / unit)) * unit if half else bf16(dS)
                y = x["solved"][slot + c, h].T @ d_o + k_solved @ left
                d_v = bf16(beta * y)
                out["d_states"][slot + c, h] = bf16(dS).T
                out["d_states_lost"][slot + c, h] = dS.T
                if c == 0 and length > CHUNK:
                    out["after_first"][n, h] = dS
                out["d_v"][0, first + c * CHUNK : first + c * CHUNK + C, h] = d_v[:C]
                tiny = (np.abs(beta[:C, 0]) < TINY).nonzero()[0]
                out["alone"][slot + c, h, tiny] = bf16(y)[tiny]
                if c == (length - 1) // CHUNK:
                    taken = np.where(np.abs(beta) < TINY, 1, beta) * y
                    out["y_lost"][n, h, :C] = taken[:C]
                dS = np.float64(x["decay"][slot + c, h])[:, None] * dS + q.T @ d_o - k_in.T @ d_v
            out["d_initial"][n, h] = dS
    return out


def restored(x, found):
    """y_lost and what lacks it, of the last chunks: d_v, or alone."""
    whole = found["y_lost"].copy()
    for n, length in enumerate(LENGTHS):
        if length:
            start = (length - 1) // CHUNK * CHUNK
            first, slot = x["cu"][n] + start, x["cu"][n] // CHUNK + n + start // CHUNK
            d_v, alone = found["d_v"][0, first : x["cu"][n + 1]].swapaxes(0, 1), found["alone"][slot, :, : length - start]
            whole[n, :, : length - start] += np.where(np.isnan(alone), d_v, alone)
    return whole


def run(kernels, x, half, group=1, groups=1, order=1):
    """groups: of a block, or with 64 channels blocks of a multiprocessor."""
    rows, T, N, D = row_order(group), sum(LENGTHS), len(LENGTHS), x["decay"].shape[-1]
    tiles, solved, factors = x["tiles"][..., rows, :], x["solved"][:, :, rows][..., rows], np.ascontiguousarray(x["factors"][..., rows])
    tiles_bits = bits(tiles)
    if half:
        tiles_bits[:, :, 2] = np.float16(tiles[:, :, 2]).view(np.uint16)
    given = dict(tiles=tiles_bits, solved=bits(solved), decay=x["decay"], factors=factors, d_o=bits(x["d_o"]), d_final=x["d_final"])
    if "q_lost" in x:
        given["q_lost"] = bits(x["q_lost"][..., rows, :])
    slots = len(tiles)
    written = dict(d_states=(slots, HV, D, D), d_v=(1, T, HV, D), alone=(slots, HV, CHUNK, D), y_lost=(N, HV, CHUNK, D))
    if D == 64:
        written["d_states_lost"] = written["d_states"]
    written = {name: np.full(shape, 0xFFFF, np.uint16) for name, shape in written.items()}
    written |= {name: np.full((N, HV, D, D), np.nan, np.float32) for name in ("d_initial", "after_first")}
    keep = {name: np.ascontiguousarray(y) for name, y in (given | written).items()}
    forward = library.PrefillArgs(
        batch=1, tokens=T, heads=HV, value_heads=HV, key_dim=D, value_dim=D, sequences=N, cu_seqlens=x["cu"].ctypes.data, cu_seqlens_64=1
    )
    dtype = library.FLOAT16 if half else library.BFLOAT16
    args = library.ReverseArgs(forward, **{name: y.ctypes.data for name, y in keep.items()}, k_solved_dtype=dtype, group=group)
    kernels.kda_emulate_reverse_bf16(ctypes.byref(args), groups, order)
    return {name: floats(keep[name]) if keep[name].dtype == np.uint16 else np.float64(keep[name]) for name in written}


@outside
@pytest.mark.parametrize(
    "half, group, D, exact",
    [(False, 1, 128, 0), (False, 4, 128, 0), (True, 1, 128, 0), (False, 1, 64, 0), (False, 4, 64, 1), (True, 1, 64, 0)],
)
def test_formula(kernels, half, group, D, exact):
    """exact: with what rounding takes from q_decayed, here as much as it leaves."""
    x = drawn(half, D)
    if exact:
        x["q_lost"] = bf16(np.random.default_rng(1).standard_normal(x["tiles"][:, :, 1].shape) / 12)
    found, right = run(kernels, x, half, group), expected(x, half)
    found["y_lost"] = restored(x, found)
    if D == 64:
        found["d_states_lost"] += found["d_states"]
        after, several = found["after_first"], [n for n, length in enumerate(LENGTHS) if length > CHUNK]
        states = np.stack([found["d_states_lost"][x["cu"][n] // CHUNK + n] for n in several]).swapaxes(2, 3)
        assert (np.abs(states - after[several]) <= 2.0**-16 * np.abs(after[several])).all(), "both parts are the state"
    for name, y in found.items():
        z = right[name]
        assert (np.isnan(y) == np.isnan(z)).all(), f"{name} is written where it should be"
        scale = np.nanmax(np.abs(z), axis=tuple(range(z.ndim - 1)))  # of a value channel, or a key channel of d_states
        error = np.abs(y - z) / scale
        most = 2.0**-15 if name == "y_lost" else 2.0**-7  # in another order a sum may round to the next bfloat16
        assert np.nanmax(error) < most and np.sqrt(np.nanmean(error**2)) < 2.0**-12, (name, np.nanmax(error))


@outside
@pytest.mark.parametrize("half, D", [(False, 128), (True, 128), (True, 64)])
def test_bits_do_not_depend_on_blocks_or_threads(kernels, half, D):
    x = drawn(half, D)
    one, two = (run(kernels, x, half, groups=groups, order=order) for groups, order in ((1, 1), (2, -1)))
    assert all((one[name] == two[name])[~np.isnan(one[name])].all() for name in one)


SIZES = dict(H=1, HV=1, K=128, V=128)
OF_64 = dict(H=1, HV=1, K=64, V=64)
TRAINED = [
    Case("plain", "any gate, betas of 0", T=70, gate="huge", beta="some_zero", **SIZES),
    Case("normed", "everything in the kernel", T=70, gate="raw", beta="logits", A_log=True, dt_bias=True,
         options=FUSED | {"safe_gate": True, "lower_bound": -5.0}, **SIZES),
    Case("packed", "sequences of all lengths", T=70, lengths=(0, 1, 66, 3), gate="raw", beta="logits", A_log=True, options=FUSED,
         **SIZES),
    Case("plain_64", "64 channels, what rounding takes from q", T=70, gate="huge", beta="some_zero", **OF_64),
    Case("normed_64", "states in two parts", T=70, gate="raw", beta="logits", A_log=True, dt_bias=True,
         options=FUSED | {"safe_gate": True, "lower_bound": -5.0}, **OF_64),
]  # fmt: skip


@outside
def test_in_the_interpreter():
    done = fresh.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__, TRITON_INTERPRET="1")
    assert done.returncode == 0 and f"{len(TRAINED)} passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]


@in_interpreter
@pytest.mark.parametrize("case", TRAINED, ids=lambda case: case.name)
def test_gradients(kernels, monkeypatch, case):
    from kdakit.backends import cuda
    from kdakit.backends.triton_gpu import borrowed

    calls = []

    def reverse(args):
        calls.append((args.group, args.d_states_lost is not None, args.q_lost is not None))
        kernels.kda_emulate_reverse_bf16(ctypes.byref(args), 1, 1)

    monkeypatch.setenv(borrowed.VARIABLES["reverse"], "1")
    monkeypatch.setattr(library, "reverse", reverse)
    monkeypatch.setattr(cuda, "supports", lambda problem, device: cuda.unsupported(problem))
    problem, arrays, cotangents = case.problem("bfloat16", needs_grad=True), case.arrays("bfloat16"), case.cotangents("bfloat16")
    found = checking.run_case("triton_gpu", case, "bfloat16")
    rows = checking.compare_quickly(problem, arrays, found, cotangents, "bfloat16")
    assert calls == [(4 if "plain" in case.name else 1, case.name == "normed_64", case.name == "plain_64")]
    assert all(row.ok for row in rows), [(row.name, row.error, row.tolerance) for row in rows]
