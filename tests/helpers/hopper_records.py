"""The bfloat16 prepare kernel on a CPU: its records, what they hold, and the scan over them in NumPy."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np

from kdakit.backends.cuda import library
from kdakit.rounding import round_to

CHUNK = 64


def bits(x):
    """bfloat16, as the upper halves of float32."""
    return np.ascontiguousarray((np.asarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16))


def floats(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


def record_bytes(kernels, D=128):
    kernels.kda_emulate_record_bytes_bf16.argtypes, kernels.kda_emulate_record_bytes_bf16.restype = [ctypes.c_int64], ctypes.c_size_t
    return kernels.kda_emulate_record_bytes_bf16(D)


def call_of(problem, arrays, workspace, size, **more):
    """kda_prefill_args of a call with `size` bytes at `workspace`, more: other fields of it; and the arrays it points to."""
    o, pointer = problem.options, lambda x: None if x is None else x.ctypes.data

    def tensor(x, dtype):
        return library.Tensor(x.ctypes.data, dtype, 0, *(x.strides[i] // x.itemsize for i in (0, 2, 1)))

    q, k, v = (bits(x) for x in arrays[:3])
    wide = problem.gate_dtype == "float32"
    g = np.ascontiguousarray(arrays.g, np.float32) if wide else bits(arrays.g)
    wide_beta = problem.beta_dtype == "float32"
    beta = np.ascontiguousarray(arrays.beta, np.float32) if wide_beta else bits(arrays.beta)
    A_log, dt_bias = (None if x is None else x.astype(np.float32) for x in (arrays.A_log, arrays.dt_bias))
    fields = dict(o=tensor(v, 1)) | more
    args = library.PrefillArgs(
        batch=problem.B, tokens=problem.T, heads=problem.H, value_heads=problem.HV, key_dim=problem.K, value_dim=problem.V,
        chunk_size=CHUNK, sequences=problem.N, scale=o.scale,
        q=tensor(q, 1), k=tensor(k, 1), v=tensor(v, 1), g=tensor(g, 0 if wide else 1), beta=tensor(beta, 0 if wide_beta else 1),
        A_log=pointer(A_log), dt_bias=pointer(dt_bias), workspace=workspace, workspace_size=size,
        gate=library.GATES[o.gate], beta_kind=library.BETAS[o.beta], lower_bound=o.lower_bound or 0.0, l2norm=o.l2norm,
        safe_gate=o.safe_gate and o.lower_bound is not None, cu_seqlens=pointer(arrays.cu_seqlens), cu_seqlens_64=1, **fields,
    )  # fmt: skip
    return args, (q, k, v, g, beta, A_log, dt_bias)


def slots_of(problem):
    return problem.T // CHUNK + problem.N if problem.varlen else problem.B * -(-problem.T // CHUNK)


def prepare(kernels, problem, arrays, order=1, **kept):
    """Records [slots, HV, bytes] of a call; 16 bytes of guard behind them. kept: fields of kda_prefill_args for a backward."""
    size, slots, HV = record_bytes(kernels, problem.K), slots_of(problem), problem.HV
    space = np.full(slots * HV * size + 512, 0xFF, np.uint8)
    start = (128 - space.ctypes.data) % 256  # XLA's arrays begin at multiples of 128 bytes
    args, _held = call_of(problem, arrays, space.ctypes.data + start, slots * HV * size, **kept)
    kernels.kda_emulate_prepare_bf16(ctypes.byref(args), order)
    assert (space[start + slots * HV * size :] == 0xFF).all() and (space[:start] == 0xFF).all(), "written past an end"
    return space[start : start + slots * HV * size].reshape(slots, HV, size)


def tile(record, at, D):
    """[64, D] of a swizzled tile."""
    units = floats(record[at : at + 128 * D].view(np.uint16)).reshape(D // 64, 64, 8, 8)
    rows = np.arange(64)
    out = np.empty((64, D // 64, 8, 8), np.float32)
    for u in range(8):
        out[:, :, u] = units[:, rows, u ^ (rows % 8)].transpose(1, 0, 2)
    return out.reshape(64, D)


def opened(record):
    """k_in, q_decayed, k_solved [64, D], A_solved [64, 64], decay [D]."""
    D = (len(record) - 10 * 512) // (3 * 128 + 4)
    A, at = np.zeros((64, 64), np.float32), 3 * 128 * D
    for b in range(4):
        for c in range(b, 4):
            square = floats(record[at : at + 512].view(np.uint16)).reshape(16, 2, 8)
            for r in range(16):
                A[16 * c : 16 * c + 16, 16 * b + r] = square[r, [(r // 4) % 2, 1 - (r // 4) % 2]].reshape(16)
            at += 512
    return *(tile(record, 128 * D * i, D) for i in range(3)), A, record[at : at + 4 * D].view(np.float32)


def scan(problem, arrays, records, keep=lambda slot, head, S: None):
    """o and final_state from the records, rounded where the scan kernel rounds; keep(slot, head, S) sees the state before every chunk."""
    bf16 = lambda x: round_to(x, "bfloat16")
    D = arrays.v.shape[-1]
    o, final = np.zeros((problem.B, problem.T, problem.HV, D)), np.zeros((problem.N, problem.HV, D, D))
    cu = arrays.cu_seqlens
    for n in range(problem.N):
        row, first, last = (0, cu[n], cu[n + 1]) if cu is not None else (n, 0, problem.T)
        slot = first // CHUNK + n if cu is not None else n * -(-problem.T // CHUNK)
        for head in range(problem.HV):
            S = np.zeros((D, D)) if arrays.initial_state is None else np.asarray(arrays.initial_state[n, head], np.float64)
            for i, t in enumerate(range(first, last, CHUNK)):
                k_in, q_decayed, k_solved, A_solved, decay = opened(records[slot + i, head])
                length, left = min(CHUNK, last - t), bf16(S)
                keep(slot + i, head, S)
                v = np.zeros((CHUNK, D))
                v[:length] = arrays.v[row, t : t + length, head]
                r = bf16(v - k_in @ left)
                o[row, t : t + length, head] = bf16(q_decayed @ left + A_solved @ r)[:length]
                S = decay[:, None] * S + k_solved.T.astype(np.float64) @ r
            final[n, head] = S
    return {"o": o, "final_state": final}


def row_order(group):
    """The token that each row or column of `lower` and `solved` holds."""
    t = np.arange(32)
    order = np.empty(32, int)
    order[t % group * (32 // group) + t // group] = t
    return np.concatenate([order, order + 32])


def run_call(kernels, args):
    """What the library does with kda_prefill_args in bfloat16, on the CPU: o, the final state, and what a backward begins with."""
    B, T, HV, N = args.batch, args.tokens, args.value_heads, args.sequences if args.cu_seqlens else args.batch
    slots, size = T // CHUNK + N if args.cu_seqlens else B * -(-T // CHUNK), record_bytes(kernels, D := args.key_dim)
    space = np.empty(slots * HV * size + 256, np.uint8)
    args.workspace, args.sequences = space.ctypes.data + (start := -space.ctypes.data % 256), N
    kernels.kda_emulate_prepare_bf16(ctypes.byref(args), 1)
    records = space[start : start + slots * HV * size].reshape(slots, HV, size)

    def at(address, dtype, shape, strides=None):
        """Memory at an address; strides in elements."""
        item = np.dtype(dtype).itemsize
        strides = strides or [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
        length = (sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1) * item
        whole = np.frombuffer((ctypes.c_uint8 * length).from_address(address), dtype)
        return np.lib.stride_tricks.as_strided(whole, shape, [s * item for s in strides])

    def tensor(x):
        return at(x.data, np.uint16, (B, T, HV, D), (x.batch_stride, x.token_stride, x.head_stride, 1))

    def states(address):
        found = at(address, np.float32, (N, HV, D, D))
        return found.swapaxes(2, 3) if args.state_v_first else found

    cu = at(args.cu_seqlens, np.int64 if args.cu_seqlens_64 else np.int32, (N + 1,)) if args.cu_seqlens else None
    kernels.kda_emulate_keep_state.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_int]

    def keep(slot, head, S):
        S = np.ascontiguousarray(S, np.float32)
        kernels.kda_emulate_keep_state(ctypes.byref(args), slot, head, S.ctypes.data, 1)

    problem = SimpleNamespace(B=B, T=T, HV=HV, N=N)
    initial = states(args.initial_state) if args.initial_state else None
    arrays = SimpleNamespace(v=floats(tensor(args.v)), cu_seqlens=cu, initial_state=initial)
    made = scan(problem, arrays, records, keep)
    tensor(args.o)[:] = bits(made["o"])
    if args.final_state:
        states(args.final_state)[:] = made["final_state"]


class Memory:
    """What a stage of the backward is given, kept alive, and rooms that it writes into."""

    def __init__(self):
        self.kept, self.rooms = [], []

    def address(self, x):
        """Of a contiguous array, or of a copy that is; None: of nothing."""
        self.kept.append(None if x is None else np.ascontiguousarray(x))
        return None if x is None else self.kept[-1].ctypes.data

    def tensor(self, x, dtype):
        self.kept.append(x)
        return library.Tensor(x.ctypes.data, dtype, 0, *(x.strides[i] // x.itemsize for i in (0, 2, 1)))

    def room(self, *shape, dtype=np.uint16):
        """Aligned, full of NaN, with a guard behind it."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        whole = np.full(size + 64, 0xFF, np.uint8)
        start = -whole.ctypes.data % 16
        self.rooms.append((whole, start, size))
        return whole[start : start + size].view(dtype).reshape(shape)

    def check_guards(self):
        for whole, start, size in self.rooms:
            assert (whole[start + size :] == 0xFF).all() and (whole[:start] == 0xFF).all(), "written past an end"

    def forward(self, problem, arrays):
        """The call that is differentiated, in bfloat16, without v and o."""
        o, g, beta = problem.options, *(
            np.ascontiguousarray(x, np.float32) if dtype == "float32" else bits(x)
            for x, dtype in ((arrays.g, problem.gate_dtype), (arrays.beta, problem.beta_dtype))
        )  # fmt: skip
        parameters = dict(A_log=arrays.A_log, dt_bias=arrays.dt_bias, initial_state=arrays.initial_state)
        parameters = {name: self.address(None if x is None else np.asarray(x, np.float32)) for name, x in parameters.items()}
        return library.PrefillArgs(
            batch=problem.B, tokens=problem.T, heads=problem.H, value_heads=problem.HV, key_dim=problem.K, value_dim=problem.V,
            chunk_size=CHUNK, sequences=problem.N, scale=o.scale, q=self.tensor(bits(arrays.q), 1), k=self.tensor(bits(arrays.k), 1),
            g=self.tensor(g, library.FLOAT32 if g.dtype == np.float32 else library.BFLOAT16),
            beta=self.tensor(beta, library.FLOAT32 if beta.dtype == np.float32 else library.BFLOAT16),
            cu_seqlens=self.address(arrays.cu_seqlens), gate=library.GATES[o.gate], beta_kind=library.BETAS[o.beta],
            lower_bound=o.lower_bound or 0.0, l2norm=o.l2norm, safe_gate=o.safe_gate and o.lower_bound is not None, cu_seqlens_64=1,
            state_v_first=o.state_v_first, **parameters,
        )  # fmt: skip
