"""The CUDA scan, thread by thread on a CPU: against its formula with its roundings, from records of random numbers."""

import ctypes

import emulated
import numpy as np
import pytest
from hopper_records import CHUNK, bits, floats

from kdakit.backends.cuda import library
from kdakit.rounding import round_to

pytestmark = emulated.needs_compiler
HV, LENGTHS, EVERY = 2, (0, 1, 330, 0, 64, 66), 2  # more chunks than stages
CU = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int64)
T, N = sum(LENGTHS), len(LENGTHS)
SLOTS = T // CHUNK + N


@pytest.fixture(scope="module")
def kernels():
    return emulated.load("scan")


def bf16(x):
    return np.asarray(round_to(x, "bfloat16"), np.float64)


def drawn(D):
    """What the prepare kernel leaves of every chunk, and the rest of a call; values of very different sizes in value channels."""
    rng = np.random.default_rng(D)
    sizes = 2.0 ** rng.integers(-20, 20, D)
    return dict(
        tiles=bf16(rng.standard_normal((SLOTS, HV, 3, CHUNK, D)) / 12),
        A=bf16(np.tril(rng.standard_normal((SLOTS, HV, CHUNK, CHUNK)) / 8)),
        decay=np.float32(rng.uniform(0.2, 1, (SLOTS, HV, D))),
        v=bf16(rng.standard_normal((1, T, HV, D)) * sizes),
        initial=np.float32(rng.standard_normal((N, HV, D, D)) * sizes),
    )


def record(tiles, A, decay):
    """Bytes of hopper_record.h: swizzled tiles by halves of 64 channels, the blocks of A^T on and above its diagonal, the decay."""
    units, u = np.arange(CHUNK)[:, None], np.arange(8)
    halves = bits(tiles).reshape(3, CHUNK, -1, 8, 8).swapaxes(1, 2)  # [3, D / 64, token, unit, 8]
    parts = [halves[:, :, units, u ^ units % 8].tobytes()]
    rows, half = np.arange(16)[:, None], np.arange(2)
    for b in range(4):
        for c in range(b, 4):
            square = bits(A[16 * c : 16 * c + 16, 16 * b : 16 * b + 16].T).reshape(16, 2, 8)
            parts.append(square[rows, half ^ rows // 4 % 2].tobytes())
    return np.frombuffer(b"".join(parts) + decay.tobytes(), np.uint8)


def expected(x, D, exact=False):
    """The formula, with the kernel's roundings. exact: states are kept in float32."""
    out = dict(o=np.full((1, T, HV, D), np.nan), final=np.zeros((N, HV, D, D)), kept=np.full((-(-SLOTS // EVERY), HV, D, D), np.nan))
    for n, length in enumerate(LENGTHS):
        slot = CU[n] // CHUNK + n
        for h in range(HV):
            S = np.float64(x["initial"][n, h])
            for c in range(-(-length // CHUNK)):
                k_in, q_decayed, k_solved = x["tiles"][slot + c, h]
                C, first, left = min(CHUNK, length - c * CHUNK), CU[n] + c * CHUNK, bf16(S)
                if (slot + c) % EVERY == 0:
                    out["kept"][(slot + c) // EVERY, h] = (S if exact else left).T
                v = np.zeros((CHUNK, D))
                v[:C] = x["v"][0, first : first + C, h]
                r = bf16(v - k_in @ left)
                out["o"][0, first : first + C, h] = bf16(q_decayed @ left + x["A"][slot + c, h] @ r)[:C]
                S = np.float64(x["decay"][slot + c, h])[:, None] * S + k_solved.T @ r
            out["final"][n, h] = S
    return out


def run(kernels, x, D, groups=1, order=1, v_first=False, keep=True, exact=False):
    """groups: of a block, or with 64 channels blocks of a multiprocessor."""
    records = np.stack([[record(x["tiles"][s, h], x["A"][s, h], x["decay"][s, h]) for h in range(HV)] for s in range(SLOTS)])
    space = np.zeros(records.nbytes + 256, np.uint8)
    start = -space.ctypes.data % 256
    space[start : start + records.nbytes] = records.reshape(-1)
    v, o, points = bits(x["v"]), np.full((1, T, HV, D), 0xFFFF, np.uint16), (-(-SLOTS // EVERY), HV, D, D)
    kept = np.full(points, np.nan, np.float32) if exact else np.full(points, 0xFFFF, np.uint16)
    initial = np.ascontiguousarray(x["initial"].swapaxes(2, 3) if v_first else x["initial"])
    final = np.full(initial.shape, np.nan, np.float32)
    of = lambda y: library.Tensor(y.ctypes.data, library.BFLOAT16, 0, T * HV * D, D, HV * D)
    args = library.PrefillArgs(
        batch=1, tokens=T, heads=HV, value_heads=HV, key_dim=D, value_dim=D, sequences=N, cu_seqlens=CU.ctypes.data, cu_seqlens_64=1,
        v=of(v), o=of(o), workspace=space.ctypes.data + start, initial_state=initial.ctypes.data, final_state=final.ctypes.data,
        state_v_first=v_first, checkpoints=kept.ctypes.data if keep else None, checkpoint=EVERY,
        checkpoint_float32=exact,
    )  # fmt: skip
    kernels.kda_emulate_scan_bf16(ctypes.byref(args), groups, order)
    kept = kept if exact else floats(kept)
    return dict(o=np.float64(floats(o)), final=np.float64(final.swapaxes(2, 3) if v_first else final), kept=np.float64(kept))


@pytest.mark.parametrize(
    "D, groups, v_first, exact", [(64, 1, False, False), (64, 1, True, True), (64, 2, True, True), (128, 1, False, False)]
)
def test_formula(kernels, D, groups, v_first, exact):
    x = drawn(D)
    found, right = run(kernels, x, D, groups, v_first=v_first, exact=exact), expected(x, D, exact)
    for name, y in found.items():
        z = right[name]
        assert (np.isnan(y) == np.isnan(z)).all(), f"{name} is written where it should be"
        scale = np.nanmax(np.abs(z), axis=tuple(range(z.ndim - 1)))  # of a value channel, or a key channel of what is kept
        error = np.abs(y - z) / scale
        assert np.nanmax(error) < 2.0**-7 and np.sqrt(np.nanmean(error**2)) < 2.0**-12, (name, np.nanmax(error))
    begins = {int(CU[n]) // CHUNK + n: n for n, length in enumerate(LENGTHS) if length}  # slots of first chunks
    for slot, n in begins.items():
        if exact and slot % EVERY == 0:
            assert (found["kept"][slot // EVERY] == x["initial"][n].swapaxes(1, 2)).all(), "the caller's state, to the bit"


def test_bits_do_not_depend_on_blocks_or_threads(kernels, D=64):
    x = drawn(D)
    one, two = run(kernels, x, D, keep=False), run(kernels, x, D, groups=2, order=-1)
    assert all((one[name] == two[name])[~np.isnan(one[name])].all() for name in ("o", "final"))
