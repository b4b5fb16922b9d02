"""PyTorch tensors to the native library: the backend's forward, and two operators for callers who have [B, H, T, K] tensors.

    torch.ops.kdakit.prefill(q, k, v, g, beta, chunk_size, scale, initial_state) -> (o, w, u, final_state)
    torch.ops.kda_prefill.forward(q, k, v, g, beta, chunk_size) -> (o, w, u)

They exist once this module is imported. The library is opened by the first call.
"""

from __future__ import annotations

import contextlib
from functools import lru_cache

import torch
import torch.nn.functional as F

from kdakit.backends.cuda import library
from kdakit.backends.cuda.calls import FORWARD, GIVEN, TENSORS, Call, current_stream
from kdakit.backends.cuda.library import BETAS, BFLOAT16, FLOAT16, FLOAT32, GATES, PrefillArgs
from kdakit.problem import Arrays, Problem
from kdakit.reference import Result

DTYPES = {"float32": FLOAT32, "bfloat16": BFLOAT16}
LOWER_DTYPES = {torch.float32: FLOAT32, torch.float16: FLOAT16}
SOMEWHERE = 256  # an address that nothing looks behind


def forward(problem: Problem, arrays: Arrays, config) -> Result:
    """A whole call: [B, T, H, D] tensors of any strides, head sizes padded to the kernel's with zeros."""
    D = config.head_dim
    if problem.K == problem.V == D:
        return _forward(problem, arrays, config)
    o, final, _ = _forward(problem, _widened(problem, arrays, D), config)
    if final is not None:
        rows, columns = problem.state_shape[2:]
        final = final[..., :rows, :columns].contiguous()
    return Result(o[..., : problem.V].contiguous(), final)


def _forward(problem: Problem, arrays: Arrays, config) -> Result:
    """`forward` of tensors with the kernel's head size."""
    D = config.head_dim
    q, k, v, g, cu, initial, A_log, dt_bias = taken(arrays, config)
    beta = arrays.beta
    o = v.new_empty(problem.B, problem.T, problem.HV, D)  # the library writes zeros for tokens past the last sequence
    final = v.new_empty((problem.N, problem.HV, D, D), dtype=torch.float32) if problem.options.output_final_state else None
    wide = cu is not None and cu.dtype == torch.int64
    args = PrefillArgs.from_buffer_copy(call_arguments(problem, config, wide, *[x.stride() for x in (q, k, v, g, beta, o)]))
    args.q.data, args.k.data, args.v.data = q.data_ptr(), k.data_ptr(), v.data_ptr()
    args.g.data, args.beta.data, args.o.data = g.data_ptr(), beta.data_ptr(), o.data_ptr()
    args.initial_state, args.final_state, args.cu_seqlens = _pointer(initial), _pointer(final), _pointer(cu)
    args.A_log, args.dt_bias = _pointer(A_log), _pointer(dt_bias)
    _enqueue(args, v, config.dtype)
    return Result(o, final)


def taken(arrays: Arrays, config) -> tuple[torch.Tensor | None, ...]:
    """q, k, v, g, cu_seqlens, initial_state, A_log and dt_bias as the library takes them: themselves, where they are so already."""
    q, k, g = (_aligned(x) if config.dtype == "bf16" else _adjacent(x) for x in (arrays.q, arrays.k, arrays.g))
    return q, k, _aligned(arrays.v), g, *_parameters(arrays)


def _parameters(arrays: Arrays) -> tuple[torch.Tensor | None, ...]:
    """cu_seqlens, initial_state, A_log and dt_bias as the library takes them: themselves, where they are so already."""
    cu = None if arrays.cu_seqlens is None else arrays.cu_seqlens.contiguous()
    initial = None if arrays.initial_state is None else _at_16_bytes(arrays.initial_state)
    A_log, dt_bias = (None if x is None else _at_16_bytes(x.float()) for x in (arrays.A_log, arrays.dt_bias))
    return cu, initial, A_log, dt_bias


@lru_cache(maxsize=1024)
def call_arguments(problem: Problem, config, wide: bool, *strides: tuple[int, ...], recorded: bool = False) -> PrefillArgs:
    """All of a call's arguments but its addresses: writing them takes the host twice as long as the rest. `wide`: int64 cu_seqlens;
    `recorded`: records have a place outside the workspace."""
    o, D = problem.options, config.head_dim
    dtypes = dict.fromkeys("qkv", problem.dtype) | dict(g=problem.gate_dtype, beta=problem.beta_dtype, o=problem.dtype)
    args = PrefillArgs(
        batch=problem.B, tokens=problem.T, heads=problem.H, value_heads=problem.HV, key_dim=D, value_dim=D, chunk_size=config.chunk,
        **{
            name: library.Tensor(None, DTYPES[dtype], 0, batch, head, token)
            for (name, dtype), (batch, token, head, *_) in zip(dtypes.items(), strides, strict=True)
        },
        scale=o.scale, gate=GATES[o.gate], lower_bound=o.lower_bound or 0.0, beta_kind=BETAS[o.beta],
        safe_gate=o.safe_gate and o.lower_bound is not None, l2norm=o.l2norm, state_v_first=o.state_v_first,
        A_log=SOMEWHERE if problem.has_A_log else None, cu_seqlens=SOMEWHERE if problem.varlen else None, sequences=problem.N,
        cu_seqlens_64=wide, parts=config.parts, block=config.block, record=SOMEWHERE if recorded else None,
    )  # fmt: skip
    args.workspace_size = library.workspace_size(args, config.dtype)
    return args


# A call; its tensors; which of them go to it as float32 copies.
Repeat = tuple[Call, tuple, tuple[int, ...]]


def forward_kept(
    problem: Problem, arrays: Arrays, *, config, lower, checkpoints, checkpoint: int, group: int,
    solved=None, record=None, r=None, factors=None,
) -> tuple[Result, Repeat | None]:  # fmt: skip
    """A whole call in bfloat16 that also writes what a backward in chunks of 64 begins with (kda_prefill_args in kdakit.h): `lower` and
    `solved` [slots, HV, 64, 64], whose rows and columns `group` orders, and the state before every `checkpoint`-th slot; or, in place of
    `solved`, the records, r and factors. Rows of o past the last packed sequence are left as they are. Also how to repeat it; None:
    something had to be copied."""
    given = arrays.q, arrays.k, arrays.v, arrays.g
    q, k, v, g = (_aligned(x) for x in given)
    o = v.new_empty(problem.B, problem.T, problem.HV, config.head_dim)
    final = v.new_empty(problem.state_shape, dtype=torch.float32) if problem.options.output_final_state else None
    cu, initial, A_log, dt_bias = _parameters(arrays)
    wide, tensors = cu is not None and cu.dtype == torch.int64, (q, k, v, g, arrays.beta, o)
    strides = [x.stride() for x in tensors]
    args = PrefillArgs.from_buffer_copy(call_arguments(problem, config, wide, *strides, recorded=record is not None))
    args.lower_dtype, args.group, args.checkpoint = LOWER_DTYPES[lower.dtype], group, checkpoint
    args.checkpoint_float32 = checkpoints.dtype == torch.float32
    space = v.new_empty(args.workspace_size, dtype=torch.uint8)
    written = lower, solved, checkpoints, record, r, factors, space
    tensors += initial, final, cu, A_log, dt_bias, *written
    call = Call("prefill", config.dtype, args, FORWARD, v.device.index)
    mine = (*given, arrays.beta, o, arrays.initial_state, final, arrays.cu_seqlens, arrays.A_log, arrays.dt_bias, *written)
    return Result(o, final), _made(call, tensors, mine)


def _made(call: Call, tensors: tuple, given: tuple) -> Repeat | None:
    """Made, unless the tensors have no memory. How to repeat it on `tensors`, which are `given`, or copies of these: None, unless they are
    copies in another dtype."""
    if not any(x.is_meta for x in tensors if x is not None):
        call([_pointer(x) for x in tensors])
    copies = tuple(i for i, (x, y) in enumerate(zip(tensors, given, strict=True)) if x is not y)
    return None if any(tensors[i].dtype == given[i].dtype for i in copies) else (call, given, copies)


def chunk_gradient(
    problem: Problem, arrays: Arrays, *, lower, factors, states, d_states, r, d_o, d_v, alone, d_final, d_beta, group: int,
    d_q, d_k, d_g, d_A_log, d_dt_bias, before_last=None, after_first=None, states_lost=None, d_states_lost=None,
) -> Repeat | None:  # fmt: skip
    """The backward over chunks of 64 tokens, bfloat16, from what the stages before it leave (kda_gradient_args in kdakit.h): writes d_beta,
    d_q, d_k and d_g, and in d_A_log and d_dt_bias [slots, HV, K], where there are such, what every chunk adds to them. Returns how to
    repeat it; None: something had to be copied."""
    q, k, g = (_aligned(x) for x in (arrays.q, arrays.k, arrays.g))
    mine = d_o, d_final
    d_o, d_final = _aligned(d_o), None if d_final is None else _at_16_bytes(d_final)  # the caller's, which may begin anywhere
    tensors: dict[str, torch.Tensor | None] = dict(q=q, k=k, v=d_v, g=g, beta=arrays.beta, o=d_v)
    given = dict(zip(GIVEN, _given(arrays), strict=True))
    forward_args = _differentiated(problem, given["cu_seqlens"], tensors)
    pointers = dict(
        lower=lower, factors=factors, states=states, d_states=d_states, r=r, d_o=d_o, d_v=d_v, alone=alone, d_final=d_final,
        d_q=d_q, d_k=d_k, d_g=d_g, d_beta=d_beta, A_shares=d_A_log, bias_shares=d_dt_bias,
        before_last=before_last, after_first=after_first, states_lost=states_lost, d_states_lost=d_states_lost,
    )  # fmt: skip
    args = library.GradientArgs(
        forward_args,
        lower_dtype=LOWER_DTYPES[lower.dtype],
        d_q_dtype=library.FLOAT32 if d_q.dtype == torch.float32 else library.BFLOAT16,
        group=group,
    )
    every = (*tensors.values(), *given.values(), *pointers.values())
    call = Call("gradient", "bf16", forward_args, GIVEN, d_v.device.index, args, tuple(pointers))
    pointers |= dict(zip(("d_o", "d_final"), mine, strict=True))
    own = arrays.q, arrays.k, d_v, arrays.g, arrays.beta, d_v, *(getattr(arrays, name) for name in GIVEN), *pointers.values()
    return _made(call, every, own)


def chunk_rebuild(problem: Problem, arrays: Arrays, *, lower, tiles, decay, factors, first, group: int, q_lost=None) -> Repeat | None:
    """Of every chunk of 64 tokens, bfloat16, from its inputs and `lower`, what a backward needs of its forward (kda_rebuild_args in
    kdakit.h): writes tiles, decay, factors and, if they are not None, first and q_lost. Returns how to repeat it; None: something had to be
    copied."""
    q, k, g = (_aligned(x) for x in (arrays.q, arrays.k, arrays.g))
    tensors: dict[str, torch.Tensor | None] = dict(q=q, k=k, v=None, g=g, beta=arrays.beta, o=None)
    given = dict(zip(GIVEN, _given(arrays), strict=True))
    forward_args = _differentiated(problem, given["cu_seqlens"], tensors)
    pointers = dict(lower=lower, tiles=tiles, decay=decay, factors=factors, first=first, q_lost=q_lost)
    args = library.RebuildArgs(forward_args, lower_dtype=LOWER_DTYPES[lower.dtype], group=group)
    every = (*tensors.values(), *given.values(), *pointers.values())
    call = Call("rebuild", "bf16", forward_args, GIVEN, lower.device.index, args, tuple(pointers))
    own = arrays.q, arrays.k, None, arrays.g, arrays.beta, None, *(getattr(arrays, name) for name in GIVEN), *pointers.values()
    return _made(call, every, own)


def _given(arrays: Arrays) -> tuple[torch.Tensor | None, ...]:
    """GIVEN of a call, as the library takes them."""
    cu, initial, A_log, dt_bias = _parameters(arrays)
    return initial, cu, A_log, dt_bias


def _differentiated(problem: Problem, cu_seqlens: torch.Tensor | None, tensors: dict[str, torch.Tensor | None]) -> PrefillArgs:
    """The forward that a stage of the backward belongs to, but for its addresses. None: a tensor that the stage does not look at."""
    o = problem.options
    strides = {name: (0, 0, 0) if x is None else (x.stride(0), x.stride(2), x.stride(1)) for name, x in tensors.items()}
    dtypes = dict(q=problem.dtype, k=problem.dtype, v=problem.dtype, g=problem.gate_dtype, beta=problem.beta_dtype, o=problem.dtype)
    return PrefillArgs(
        batch=problem.B, tokens=problem.T, heads=problem.H, value_heads=problem.HV, key_dim=problem.K, value_dim=problem.V, chunk_size=64,
        **{name: library.Tensor(None, DTYPES[dtypes[name]], 0, *of) for name, of in strides.items()},
        scale=o.scale, gate=GATES[o.gate], lower_bound=o.lower_bound or 0.0, beta_kind=BETAS[o.beta],
        safe_gate=o.safe_gate and o.lower_bound is not None, l2norm=o.l2norm, state_v_first=o.state_v_first, sequences=problem.N,
        cu_seqlens_64=cu_seqlens is not None and cu_seqlens.dtype == torch.int64,
    )  # fmt: skip


def reverse(
    problem: Problem, arrays: Arrays, *, d_o, d_final, d_states, d_v, y_lost, alone, d_initial, group: int,
    tiles=None, k_solved=None, solved=None, decay=None, factors=None, record=None, after_first=None, d_states_lost=None, q_lost=None,
) -> Repeat | None:  # fmt: skip
    """The gradient of the state in chunks of 64 tokens, bfloat16, from the end of each sequence (kda_reverse_args in kdakit.h): writes
    d_states, d_v, y_lost, alone, d_initial, after_first and d_states_lost, those that are not None. From tiles, solved, decay and factors,
    or from the forward's records. Returns how to repeat it; None: something had to be copied."""
    mine = d_o, d_final
    d_o, d_final = _aligned(d_o), None if d_final is None else _at_16_bytes(d_final)
    unseen: dict[str, torch.Tensor | None] = dict.fromkeys(TENSORS)
    given: dict[str, torch.Tensor | None] = dict.fromkeys(GIVEN)
    mine_given = given | {"cu_seqlens": arrays.cu_seqlens}
    given["cu_seqlens"] = None if arrays.cu_seqlens is None else arrays.cu_seqlens.contiguous()
    forward_args = _differentiated(problem, given["cu_seqlens"], unseen)
    forward_args.gate = GATES["log_decay"]  # it looks at no gate, so that nothing of one is missing
    args = library.ReverseArgs(forward_args, k_solved_dtype=_dtype_of(k_solved), group=group)
    pointers = dict(
        tiles=tiles, solved=solved, decay=decay, factors=factors, d_o=d_o, d_final=d_final, d_states=d_states, d_v=d_v, alone=alone,
        y_lost=y_lost, d_initial=d_initial, after_first=after_first, d_states_lost=d_states_lost, q_lost=q_lost, record=record,
    )  # fmt: skip
    call = Call("reverse", "bf16", forward_args, GIVEN, d_v.device.index, args, tuple(pointers))
    every = (*unseen.values(), *given.values(), *pointers.values())
    pointers |= dict(zip(("d_o", "d_final"), mine, strict=True))
    return _made(call, every, (*unseen.values(), *mine_given.values(), *pointers.values()))


def _dtype_of(k_solved: torch.Tensor | None) -> int:
    """Of a record's, None here, bfloat16."""
    return FLOAT16 if k_solved is not None and k_solved.dtype == torch.float16 else BFLOAT16


def _enqueue(args: PrefillArgs, like: torch.Tensor, dtype: str = "f32") -> None:
    """On the current stream of the tensors' device, with a workspace of torch's allocator."""
    space = like.new_empty(args.workspace_size, dtype=torch.uint8)
    index = like.device.index
    args.workspace, args.stream = space.data_ptr(), current_stream(index)
    with on_device(index):
        library.prefill(args, dtype)


def on_device(index: int):
    """Launches go to the current device: make it the tensors' own."""
    return _HERE if index == torch._C._cuda_getDevice() else torch.cuda.device(index)


_HERE = contextlib.nullcontext()


def _pointer(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _widened(problem: Problem, arrays: Arrays, D: int) -> Arrays:
    """Head sizes of D, zeros added."""

    def wide(x, *axes):
        return x if x is None else F.pad(x, [n for axis in axes for n in (0, D - x.shape[axis])])

    q, k, v, g = (wide(x, -1) for x in arrays[:4])
    bias = None if arrays.dt_bias is None else wide(arrays.dt_bias.reshape(problem.HV, problem.K), -1)
    return arrays._replace(q=q, k=k, v=v, g=g, dt_bias=bias, initial_state=wide(arrays.initial_state, -1, -2))


def _adjacent(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _at_16_bytes(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, from a multiple of 16 bytes on."""
    return x if x.is_contiguous() and not x.data_ptr() % 16 else x.clone(memory_format=torch.contiguous_format)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """[B, T, H, D] with adjacent elements of D and every row at a multiple of 16 bytes."""
    batch, token, head, channel = x.stride()
    fits = channel == 1 and not ((batch | token | head) * x.element_size() | x.data_ptr()) % 16
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _check(q, k, v, g, beta, chunk_size, initial_state) -> tuple[int, int, int, int]:
    """The shape rules of the two operators; returns B, H, T, K."""
    if q.dim() != 4:
        raise ValueError(f"q must be [B, H, T, K], got {tuple(q.shape)}")
    B, H, T, K = q.shape
    if chunk_size not in (32, 64):
        raise ValueError(f"chunk_size must be 32 or 64, got {chunk_size}")
    if K not in (64, 128):
        raise ValueError(f"q must have K = 64 or 128, got {K}")
    dims = {"k": (k, (B, H, T, K)), "v": (v, (B, H, T, K)), "g": (g, (B, H, T, K)), "beta": (beta, (B, H, T))}
    if initial_state is not None:
        dims["initial_state"] = (initial_state, (B, H, K, K))
    for name, (x, want) in dims.items():
        if tuple(x.shape) != want:
            raise ValueError(f"{name} must be {want}, got {tuple(x.shape)}")
    for name, x in [("q", q), *((name, x) for name, (x, _) in dims.items())]:
        if x.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
    return B, H, T, K


def _outputs(q, chunk_size):
    """o, w, u and final_state, not yet written."""
    B, H, T, K = q.shape
    chunks = (B, H, (T + chunk_size - 1) // chunk_size, chunk_size, K)
    return q.new_empty(B, H, T, K), q.new_empty(chunks), q.new_empty(chunks), q.new_empty(B, H, K, K)


@torch.library.custom_op("kdakit::prefill", mutates_args=(), device_types="cuda")
def prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, chunk_size: int = 64,
    scale: float | None = None, initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """o [B,H,T,V], w [B,H,Nc,C,K], u [B,H,Nc,C,V], final_state [B,H,K,V] of q, k, g [B,H,T,K], v [B,H,T,V], beta [B,H,T]; g: log-decay."""
    B, H, T, K = _check(q, k, v, g, beta, chunk_size, initial_state)
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    v = _aligned(v)
    initial = None if initial_state is None else initial_state.contiguous()
    o, w, u, final = _outputs(q, chunk_size)
    args = PrefillArgs(
        batch=B, tokens=T, heads=H, value_heads=H, key_dim=K, value_dim=K, chunk_size=chunk_size,
        **{name: library.Tensor(x.data_ptr()) for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta), ("o", o))},
        initial_state=_pointer(initial), final_state=_pointer(final), w=_pointer(w), u=_pointer(u),
        scale=K**-0.5 if scale is None else scale,
    )  # fmt: skip
    if args.scale == 0:
        raise ValueError("scale must not be 0")
    args.workspace_size = library.workspace_size(args)
    _enqueue(args, q)
    return o, w, u, final


@prefill.register_fake
def _(q, k, v, g, beta, chunk_size=64, scale=None, initial_state=None):
    _check(q, k, v, g, beta, chunk_size, initial_state)
    return _outputs(q, chunk_size)


@torch.library.custom_op("kda_prefill::forward", mutates_args=(), device_types="cuda")
def kda_prefill_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, chunk_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`prefill` without states: o, w, u."""
    return prefill(q, k, v, g, beta, chunk_size)[:3]


@kda_prefill_forward.register_fake
def _(q, k, v, g, beta, chunk_size):
    _check(q, k, v, g, beta, chunk_size, None)
    return _outputs(q, chunk_size)[:3]
