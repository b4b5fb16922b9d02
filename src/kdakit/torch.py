"""KDA for PyTorch. Signatures and meaning are those of flash-linear-attention's `fla.ops.kda`: change the import line, keep the code.

    from kdakit.torch import chunk_kda, fused_recurrent_kda

Checks and choice of backend happen in the operators `kdakit::forward` and `kdakit::backward`, which torch.compile, torch.export, autocast
and activation checkpointing see as single calls.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kdakit import dispatch
from kdakit.problem import (
    DIFFERENTIABLE,
    Arrays,
    Options,
    Problem,
    check_backend_name,
    check_cu_seqlens,
    check_devices,
    checks_enabled,
    fold_compatibility,
    make_options,
    make_problem,
)

__all__ = ["chunk_kda", "fused_recurrent_kda", "kda_gate", "naive_chunk_kda", "naive_recurrent_kda"]


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_size: int = 64,
    backend: str = "auto",
    **compatibility: Any,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Kimi Delta Attention over whole sequences, in parallel over chunks. Returns (o, final_state).

    S_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T,   o_t = scale * S_t^T q_t

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V], HV a multiple of H; all of one floating dtype. K and V up to 256.
        g: [B, T, HV, K], the log-decay (<= 0), or with use_gate_in_kernel the raw gate input.
        beta: [B, T, HV], the write strength, or with use_beta_sigmoid_in_kernel its logits.
        scale: factor of o; K ** -0.5 by default.
        initial_state: [N, HV, K, V] float32 ([N, HV, V, K] with state_v_first); N = B, or the number of packed sequences.
        output_final_state: return the state after the last token, else None.
        use_qk_l2norm_in_kernel: divide q and k by their norms first.
        use_gate_in_kernel: g -> -exp(A_log) * softplus(g + dt_bias), or with lower_bound
            g -> lower_bound * sigmoid(exp(A_log) * (g + dt_bias)). A_log: HV elements, optional with lower_bound; dt_bias: HV * K.
        use_beta_sigmoid_in_kernel: beta -> sigmoid(beta); with allow_neg_eigval, 2 * sigmoid(beta).
        safe_gate: promises log-decays in [lower_bound, 0), so that a backend may take a shorter path. Never needed for correctness.
        disable_recompute: keep the forward's intermediates for the backward instead of computing them again: same numbers, more memory.
        return_intermediate_states: return (o, final_state, h) with h [B, NT, HV, K, V] in q's dtype, the state before each chunk; not
            differentiated. NT counts the chunks of all packed sequences.
        cu_seqlens: [N + 1] int32 or int64, for B = 1 with N sequences packed along T; some may be empty.
        cu_seqlens_cpu: the same on the host, which spares a device from being asked.
        chunk_size: 16, 32, 64 or 128.
        backend: 'auto' or a name that `kdakit doctor` lists.
    """
    if compatibility or not isinstance(state_v_first, bool):
        state_v_first = fold_compatibility("chunk_kda", _CHUNK_ARGUMENTS, state_v_first, compatibility)
    arrays = autocast(Arrays(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu))
    options = make_options(
        arrays, scale=scale, output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        safe_gate=safe_gate, lower_bound=lower_bound, disable_recompute=disable_recompute,
        return_intermediate_states=return_intermediate_states, state_v_first=state_v_first, chunk_size=chunk_size,
    )  # fmt: skip
    return _call("chunk", arrays, options, backend)


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    backend: str = "auto",
    inplace_final_state: bool = False,
    **compatibility: Any,
) -> tuple[Tensor, Tensor | None]:
    """KDA token by token, for decoding and short sequences. Arguments and results as in `chunk_kda`, positions as in fla.ops.kda.

    initial_state may also be bfloat16 or float16: arithmetic is float32, and final_state comes back in the same dtype. Gradients are those
    of `chunk_kda`.

    inplace_final_state: the final state is written over initial_state, which is also what comes back as final_state. Not for calls that
    are differentiated: their backward would need what has been overwritten.
    """
    if compatibility or not isinstance(state_v_first, bool):
        state_v_first = fold_compatibility("fused_recurrent_kda", _RECURRENT_ARGUMENTS, state_v_first, compatibility)
    arrays = autocast(Arrays(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu))
    options = make_options(
        arrays, scale=scale, output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        safe_gate=safe_gate, lower_bound=lower_bound, state_v_first=state_v_first,
    )  # fmt: skip
    if not isinstance(inplace_final_state, bool):
        raise TypeError(f"inplace_final_state must be True or False, got {inplace_final_state!r}")
    return _call_in_place(arrays, options, backend) if inplace_final_state else _call("recurrent", arrays, options, backend)


def _arguments(function: Callable[..., Any]) -> list[str]:
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]


_CHUNK_ARGUMENTS = _arguments(chunk_kda)
_RECURRENT_ARGUMENTS = _arguments(fused_recurrent_kda)


def kda_gate(
    g: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """The log-decay of a raw gate input g [.., HV, K]: the softplus gate, or with lower_bound the bounded one.

    -exp(A_log) * softplus(g + dt_bias)         lower_bound * sigmoid(exp(A_log) * (g + dt_bias))
    """
    if lower_bound is None and A_log is None:
        raise ValueError("A_log is required unless lower_bound selects the bounded gate, got None")
    if lower_bound is not None and not -5 <= lower_bound < 0:
        raise ValueError(f"lower_bound must lie in [-5, 0), got {lower_bound}")
    heads, channels = g.shape[-2:]
    x = g.to(torch.promote_types(g.dtype, torch.float32))
    for name, parameter, size in (("A_log", A_log, heads), ("dt_bias", dt_bias, heads * channels)):
        if parameter is not None and parameter.numel() != size:
            raise ValueError(f"{name} must hold {size} elements for g {tuple(g.shape)}, got {tuple(parameter.shape)}")
    if dt_bias is not None:
        x = x + dt_bias.to(x.dtype).reshape(heads, channels)
    a = 1.0 if A_log is None else A_log.to(x.dtype).reshape(heads, 1).exp()
    out = -a * F.softplus(x, threshold=40.0) if lower_bound is None else lower_bound * torch.sigmoid(a * x)
    return out.to(output_dtype)


def naive_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The recurrence as written, one token at a time, differentiated by autograd. For reading and testing; g is the log-decay."""
    dtype, (q, k, v, g, beta), S = _naive_inputs(q, k, v, g, beta, scale, initial_state)
    o = []
    for t in range(q.shape[1]):
        S = g[:, t].exp()[..., None] * S  # [B, HV, K, V]
        error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S)
        S = S + torch.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], error)
        o.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    out = torch.stack(o, 1) if o else torch.zeros_like(v)
    return out.to(dtype), S if output_final_state else None


def naive_chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The chunk form in its plainest shape, differentiated by autograd, any T. Decays of all pairs at once: memory grows with C^2 K."""
    dtype, x, S = _naive_inputs(q, k, v, g, beta, scale, initial_state)
    o = []
    for start in range(0, q.shape[1], chunk_size):
        q, k, v, g, beta = (a[:, start : start + chunk_size].transpose(1, 2) for a in x)  # [B, HV, C, ..]
        C = q.shape[2]
        lower = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
        after = torch.where(lower.tril(-1)[..., None], g[:, :, :, None], 0)  # [B, HV, m, j, K]: gates after j
        decays = torch.where(lower[..., None], after.cumsum(2), -torch.inf).exp()  # [B, HV, i, j, K]
        A_qk = torch.einsum("bhik,bhjk,bhijk->bhij", q, k, decays)
        A_kk = torch.einsum("bhi,bhik,bhjk,bhijk->bhij", beta, k, k, decays).tril(-1)
        from_start = g.cumsum(2).exp()
        rhs = torch.cat([v, k * from_start], -1) * beta[..., None]
        u, w = torch.linalg.solve_triangular(A_kk, rhs, upper=False, unitriangular=True).split([v.shape[-1], k.shape[-1]], -1)
        v_new = u - w @ S
        o.append((q * from_start) @ S + A_qk @ v_new)
        S = from_start[:, :, -1, :, None] * S + (k * decays[:, :, -1]).mT @ v_new
    out = torch.cat(o, 2).transpose(1, 2) if o else torch.zeros_like(x[2])
    return out.to(dtype), S if output_final_state else None


def _naive_inputs(q, k, v, g, beta, scale, initial_state):
    dtype = v.dtype
    wide = torch.promote_types(dtype, torch.float32)
    group = v.shape[2] // q.shape[2]
    q, k, v, g, beta = (a.to(wide) for a in (q, k, v, g, beta))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    q, k = (a.repeat_interleave(group, 2) for a in (q, k))
    S = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
    return dtype, (q, k, v, g, beta), S if initial_state is None else S + initial_state


def autocast(arrays: Arrays) -> Arrays:
    """Under autocast q, k and v may come from layers of different dtypes: they meet in the autocast dtype."""
    q, k, v = arrays[:3]
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)) or q.dtype == k.dtype == v.dtype:
        return arrays
    kind = q.device.type
    if not torch.is_autocast_enabled(kind):
        return arrays
    dtype = torch.get_autocast_dtype(kind)
    return arrays._replace(q=q.to(dtype), k=k.to(dtype), v=v.to(dtype))


def _check_tensors(arrays: Arrays, backend: str) -> bool:
    """Whether the call will be differentiated, if these are tensors at all."""
    check_backend_name(backend)
    for name, array in zip(Arrays._fields, arrays, strict=True):
        if array is not None and not isinstance(array, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(array).__name__}")
        if array is None and name in ("q", "k", "v", "g", "beta"):
            raise TypeError(f"{name} must be a torch.Tensor, got None")
    return torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in arrays[: len(DIFFERENTIABLE)])


def _call_in_place(arrays: Arrays, options: Options, backend: str) -> tuple[Tensor, Tensor]:
    if _check_tensors(arrays, backend):
        raise ValueError("inplace_final_state=True overwrites initial_state, which a backward would need: call it under torch.no_grad(), "
                         "got tensors that require gradients")  # fmt: skip
    if arrays.initial_state is None:
        raise ValueError("inplace_final_state=True requires initial_state, which it overwrites, got None")
    o = torch.ops.kdakit.step_(*arrays[:10], options.encode(), backend)
    return o, arrays.initial_state


def _call(op: str, arrays: Arrays, options: Options, backend: str):
    if _check_tensors(arrays, backend):
        o, final_state, states, _ = torch.ops.kdakit.forward(*arrays[:10], op, options.encode(), backend, True)
    else:
        o, *rest = torch.ops.kdakit.inference(*arrays[:10], op, options.encode(), backend)
        final_state, states = rest[0] if options.output_final_state else None, rest[-1] if rest else None
    final = final_state if options.output_final_state else None
    return (o, final, states) if options.return_intermediate_states else (o, final)


_SCHEMA_ARRAYS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, "
    "Tensor? cu_seqlens, Tensor? cu_seqlens_cpu"
)
_LIBRARY = torch.library.Library("kdakit", "DEF")
_LIBRARY.define(
    f"forward({_SCHEMA_ARRAYS}, str op, str options, str backend, bool needs_grad) -> (Tensor, Tensor, Tensor, Tensor[])",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(f"inference({_SCHEMA_ARRAYS}, str op, str options, str backend) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define(
    f"backward({_SCHEMA_ARRAYS}, Tensor[] saved, Tensor d_o, Tensor? d_final_state, str op, str options, str backend) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    f"step_({_SCHEMA_ARRAYS.replace('Tensor? initial_state', 'Tensor(a!) initial_state')}, str options, str backend) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class _Spec(NamedTuple):
    """As much of a tensor as `make_problem` looks at."""

    shape: torch.Size
    dtype: torch.dtype


def _describe(arrays: Arrays, op: str, options: str, needs_grad: bool) -> Problem:
    check_devices(arrays)
    return make_problem(op, arrays, Options.decode(options), needs_grad)


def _describe_real(arrays: Arrays, op: str, options: str, needs_grad: bool) -> Problem:
    """`_describe` for tensors whose sizes are plain numbers: a call like an earlier one is not described, nor checked, anew."""
    check_devices(arrays)
    return _described(op, options, needs_grad, *[None if x is None else (x.shape, x.dtype) for x in arrays])


@lru_cache(maxsize=1024)
def _described(op: str, options: str, needs_grad: bool, *specs: tuple[torch.Size, torch.dtype] | None) -> Problem:
    arrays = Arrays(*(None if x is None else _Spec(*x) for x in specs))
    return make_problem(op, arrays, Options.decode(options), needs_grad)


def _without_autocast(kind: str):
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


def _check_values(problem: Problem, arrays: Arrays) -> None:
    """cu_seqlens where the host can see it, or everywhere when checks are on."""
    for name in ("cu_seqlens", "cu_seqlens_cpu"):
        cu = getattr(arrays, name)
        if cu is not None and (cu.device.type == "cpu" or checks_enabled()):
            check_cu_seqlens(cu.cpu().numpy(), problem.T, name)


def _empty(like: Tensor) -> Tensor:
    return like.new_empty(0)


@torch.library.impl(_LIBRARY, "forward", "CompositeExplicitAutograd")
def _forward(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, op, options, backend, needs_grad):
    arrays = Arrays(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu)
    result, saved = _run(arrays, op, options, backend, needs_grad)
    return result.o, *(_empty(q) if x is None else x for x in result[1:]), saved


@torch.library.impl(_LIBRARY, "inference", "CompositeExplicitAutograd")
def _inference(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, op, options, backend):
    """`forward` for calls that are not differentiated: what PyTorch does around an operator with a derivative takes as long as a short
    sequence. Returns o, and the final state and the states before each chunk where they are asked for."""
    arrays = Arrays(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu)
    return [x for x in _run(arrays, op, options, backend, False)[0] if x is not None]


def _run(arrays: Arrays, op: str, options: str, backend: str, needs_grad: bool):
    problem = _describe_real(arrays, op, options, needs_grad)
    device = arrays.q.device
    module = dispatch.select("torch", problem, device, backend)
    _check_values(problem, arrays)
    config = module.default_config(problem, device)
    with _without_autocast(device.type):
        if op == "recurrent":
            return module.step(problem, arrays, config), []
        return module.forward(problem, arrays, config)


@torch.library.register_fake("kdakit::forward", lib=_LIBRARY)
def _forward_fake(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, op, options, backend, needs_grad):
    arrays = Arrays(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu)
    problem = _describe(arrays, op, options, needs_grad)
    module = dispatch.select("torch", problem, q.device, backend)
    o = q.new_empty(v.shape, dtype=v.dtype)
    final, states, saved = _empty(q), _empty(q), []
    if problem.options.output_final_state:
        final = q.new_empty(problem.state_shape, dtype=getattr(torch, problem.state_dtype))
    if problem.options.return_intermediate_states:
        chunks = torch.library.get_ctx().new_dynamic_size() if problem.varlen else problem.chunks
        states = q.new_empty(problem.B, chunks, *problem.state_shape[1:])
    if needs_grad and op == "chunk":
        saved = [q.new_empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in module.saved_specs(problem, q.device)]
    return o, final, states, saved


@torch.library.register_fake("kdakit::inference", lib=_LIBRARY)
def _inference_fake(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, op, options, backend):
    arrays = q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu
    o, final_state, states, _ = _forward_fake(*arrays, op, options, backend, False)
    wanted = Options.decode(options)
    return [o] + [final_state] * wanted.output_final_state + [states] * wanted.return_intermediate_states


@torch.library.impl(_LIBRARY, "step_", "CompositeExplicitAutograd")
def _step_(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, options, backend):
    arrays = Arrays(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu)
    problem = _describe_real(arrays, "recurrent", options, False)
    module = dispatch.select("torch", problem, q.device, backend)
    _check_values(problem, arrays)
    torch.autograd.graph.increment_version(initial_state)
    with _without_autocast(q.device.type):
        return module.step(problem, arrays, module.default_config(problem, q.device), final_state=initial_state).o


@torch.library.register_fake("kdakit::step_", lib=_LIBRARY)
def _step_fake(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, options, backend):
    arrays = Arrays(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu)
    dispatch.select("torch", _describe(arrays, "recurrent", options, False), q.device, backend)
    return q.new_empty(v.shape, dtype=v.dtype)


@torch.library.impl(_LIBRARY, "backward", "CompositeExplicitAutograd")
def _backward(
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, saved, d_o, d_final_state, op, options, backend
):  # fmt: skip
    arrays = Arrays(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu)
    problem = _describe_real(arrays, op, options, needs_grad=True)
    module = dispatch.differentiates(dispatch.select("torch", problem, q.device, backend))
    with _without_autocast(q.device.type):
        grads = module.backward(problem, arrays, saved, d_o, d_final_state, module.default_config(problem, q.device))
    return [_empty(q) if x is None else x.contiguous() for x in grads[: len(DIFFERENTIABLE)]]


@torch.library.register_fake("kdakit::backward", lib=_LIBRARY)
def _backward_fake(
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, saved, d_o, d_final_state, op, options, backend
):  # fmt: skip
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    return [_empty(q) if x is None else x.new_empty(x.shape) for x in inputs]


def _setup_context(ctx, inputs, output):
    arrays, (ctx.op, ctx.options, ctx.backend, _) = inputs[:10], inputs[10:]
    ctx.has_final_state = Options.decode(ctx.options).output_final_state
    ctx.save_for_backward(*arrays, *output[3])
    ctx.set_materialize_grads(False)  # what is saved counts as output: its gradients would be written out as zeros


def _autograd_backward(ctx, d_o, d_final_state, _d_states, _d_saved):
    kept = ctx.saved_tensors  # once: activation checkpointing unpacks them on access
    arrays, saved = kept[:10], list(kept[10:])
    if d_o is None:
        d_o = torch.zeros_like(arrays[2])
    d_final = d_final_state if ctx.has_final_state else None
    grads = torch.ops.kdakit.backward(*arrays, saved, d_o, d_final, ctx.op, ctx.options, ctx.backend)
    grads = [grad if x is not None and needed else None for x, grad, needed in zip(arrays, grads, ctx.needs_input_grad, strict=False)]
    return *grads, None, None, None, None, None, None


torch.library.register_autograd("kdakit::forward", _autograd_backward, setup_context=_setup_context, lib=_LIBRARY)


def _no_second_derivative(ctx, *grads):
    raise RuntimeError("KDA has no second derivative: call backward without create_graph=True")


torch.library.register_autograd("kdakit::backward", _no_second_derivative, lib=_LIBRARY)
