"""KDA for PyTorch. Signatures and meaning are those of flash-linear-attention's `fla.ops.kda`: change the import line, keep the code.

    from kdakit.torch import chunk_kda, fused_recurrent_kda

Checks of shapes and the choice of a backend happen in the operators of `kdakit.torch_operators`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

try:
    import torch
except ModuleNotFoundError as missing:
    missing.add_note("kdakit.torch needs PyTorch: pip install 'kdakit[torch]', or 'kdakit[gpu]' on an NVIDIA GPU")
    raise
from torch import Tensor

from kdakit.problem import DIFFERENTIABLE, Arrays, Options, check_backend_name, fold_compatibility, make_options
from kdakit.torch_gates import fused_kda_gate, kda_gate, kda_gate_chunk_cumsum, naive_kda_gate, naive_kda_lowerbound_gate
from kdakit.torch_operators import Differentiated, no_view, run, run_in_place, unwatched
from kdakit.torch_transforms import Transformed, check_no_tangents, transforms_active

__all__ = [
    "chunk_kda",
    "fused_kda_gate",
    "fused_recurrent_kda",
    "kda_gate",
    "kda_gate_chunk_cumsum",
    "naive_chunk_kda",
    "naive_kda_gate",
    "naive_kda_lowerbound_gate",
    "naive_recurrent_kda",
]


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
        q, k: [B, T, H, K]; v: [B, T, HV, V], HV a multiple of H. K and V up to 256. Of different dtypes they meet in the one that holds
            them all (under autocast in autocast's), and o comes back in q's.
        g: [B, T, HV, K], the log-decay (<= 0), or with use_gate_in_kernel the raw gate input.
        beta: [B, T, HV], the write strength, or with use_beta_sigmoid_in_kernel its logits.
        scale: factor of o; K ** -0.5 by default. A tensor of one element is read, for which the host waits.
        initial_state: [N, HV, K, V] float32 ([N, HV, V, K] with state_v_first); N = B, or the number of packed sequences.
        output_final_state: return the state after the last token, else None.
        use_qk_l2norm_in_kernel: divide q and k by their norms first.
        use_gate_in_kernel: g -> -exp(A_log) * softplus(g + dt_bias), or with lower_bound
            g -> lower_bound * sigmoid(exp(A_log) * (g + dt_bias)). A_log: HV elements, optional with lower_bound; dt_bias: HV * K. Without
            it both are ignored, as fla.ops.kda does.
        use_beta_sigmoid_in_kernel: beta -> sigmoid(beta); with allow_neg_eigval, 2 * sigmoid(beta).
        safe_gate: promises log-decays in [lower_bound, 0), so that a backend may take a shorter path. Never needed for correctness.
        disable_recompute: keep intermediates of the forward for the backward instead of computing them again: more memory, the same result,
            gradients that differ by roundings at most.
        return_intermediate_states: return (o, final_state, h) with h [B, NT, HV, K, V] in q's dtype, the state before each chunk; not
            differentiated. NT counts the chunks of all packed sequences.
        cu_seqlens: [N + 1] int32 or int64, for B = 1 with N sequences packed along T; some may be empty. Tokens past cu_seqlens[-1] are
            padding, whatever stands there: their outputs and gradients are zero.
        cu_seqlens_cpu: the same on the host, which spares a device from being asked.
        chunk_size: 16, 32, 64 or 128.
        backend: 'auto' or a name that `kdakit doctor` lists.
    """
    if compatibility or not isinstance(state_v_first, bool):
        state_v_first = fold_compatibility("chunk_kda", _CHUNK_ARGUMENTS, state_v_first, compatibility)
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    given, arrays = q, of_one_dtype(Arrays(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu))
    options = _options(
        arrays, scale=scale, output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        safe_gate=safe_gate, lower_bound=lower_bound, disable_recompute=disable_recompute,
        return_intermediate_states=return_intermediate_states, state_v_first=state_v_first, chunk_size=chunk_size,
    )  # fmt: skip
    return _as(given, _call("chunk", arrays, options, backend))


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

    initial_state may also be bfloat16 or float16: arithmetic is float32, and so is the final_state that comes back. Gradients are those of
    `chunk_kda`.

    inplace_final_state: the final state is written over initial_state, in its dtype, and is what comes back as final_state. Not for calls
    that are differentiated: their backward would need what has been overwritten.
    """
    if compatibility or not isinstance(state_v_first, bool):
        state_v_first = fold_compatibility("fused_recurrent_kda", _RECURRENT_ARGUMENTS, state_v_first, compatibility)
    if not isinstance(inplace_final_state, bool):
        raise TypeError(f"inplace_final_state must be True or False, got {inplace_final_state!r}")
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    if isinstance(initial_state, Tensor) and initial_state.dtype in (torch.bfloat16, torch.float16) and not inplace_final_state:
        initial_state = initial_state.float()
    given, arrays = q, of_one_dtype(Arrays(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu))
    options = _options(
        arrays, scale=scale, output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        safe_gate=safe_gate, lower_bound=lower_bound, state_v_first=state_v_first,
    )  # fmt: skip
    found = _call_in_place(arrays, options, backend) if inplace_final_state else _call("recurrent", arrays, options, backend)
    return _as(given, found)


def _arguments(function: Callable[..., Any]) -> list[str]:
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]


_CHUNK_ARGUMENTS = _arguments(chunk_kda)
_RECURRENT_ARGUMENTS = _arguments(fused_recurrent_kda)


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


def of_one_dtype(arrays: Arrays) -> Arrays:
    """q, k and v may come from layers of different dtypes: they meet in autocast's dtype, or in the one that holds all three."""
    q, k, v = arrays[:3]
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)) or q.dtype == k.dtype == v.dtype:
        return arrays
    if not all(x.is_floating_point() and x.element_size() > 1 for x in (q, k, v)):
        return arrays  # the checks say which
    if _autocasts(q):
        dtype = torch.get_autocast_dtype(q.device.type)
    else:
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    return arrays._replace(q=q.to(dtype), k=k.to(dtype), v=v.to(dtype))


def _as(q: Tensor, found: tuple) -> Any:
    """Outputs in q's dtype, unless autocast has chosen another."""
    o = found[0]
    return found if o.dtype == q.dtype or _autocasts(q) else (o.to(q.dtype), *found[1:])


def _autocasts(q: Tensor) -> bool:
    return q.device.type != "meta" and torch.is_autocast_enabled(q.device.type)


def _options(arrays: Arrays, **flags: Any) -> Options:
    """`make_options`, which answers the same flags once."""
    if isinstance(flags["scale"], Tensor) and flags["scale"].numel() == 1:
        if flags["scale"].requires_grad and torch.is_grad_enabled():
            raise ValueError("scale must not require a gradient, which a call does not return: multiply q by it, and pass scale=1.0")
        flags["scale"] = float(flags["scale"])
    if torch.compiler.is_compiling():
        return make_options(arrays, **flags)
    try:
        return _answered(arrays.A_log is None, arrays.dt_bias is None, **flags)
    except TypeError:  # a flag of a wrong type, perhaps one that cannot be looked up: it says which
        return make_options(arrays, **flags)


@lru_cache(maxsize=1024, typed=True)
def _answered(no_A_log: bool, no_dt_bias: bool, **flags: Any) -> Options:
    A_log, dt_bias = None if no_A_log else True, None if no_dt_bias else True  # only whether they are there counts
    return make_options(Arrays(None, None, None, None, None, A_log, dt_bias), **flags)


def _check_tensors(arrays: Arrays, backend: str, plain: bool) -> bool:
    """Whether the call will be differentiated, if these are tensors at all. plain: `unwatched` has found tensors and None alone."""
    check_backend_name(backend)
    q, k, v, g, beta = arrays[:5]
    if not plain or q is None or k is None or v is None or g is None or beta is None:
        for i, array in enumerate(arrays):
            if not isinstance(array, Tensor) and (array is not None or i < 5):
                raise TypeError(f"{Arrays._fields[i]} must be a torch.Tensor, got {'None' if array is None else type(array).__name__}")
    if plain or not torch.compiler.is_compiling():
        check_no_tangents(arrays[: len(DIFFERENTIABLE)])
    return torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in arrays[: len(DIFFERENTIABLE)])


def _call_in_place(arrays: Arrays, options: Options, backend: str) -> tuple[Tensor, Tensor]:
    plain = unwatched(arrays)
    if _check_tensors(arrays, backend, plain):
        raise ValueError("inplace_final_state=True overwrites initial_state, which a backward would need: call it under torch.no_grad(), "
                         "got tensors that require gradients")  # fmt: skip
    if arrays.initial_state is None:
        raise ValueError("inplace_final_state=True requires initial_state, which it overwrites, got None")
    if transforms_active() and not torch.compiler.is_compiling():
        raise NotImplementedError("inplace_final_state=True overwrites initial_state, which torch.func's transforms do not allow: "
                                  "call it without")  # fmt: skip
    if plain:
        return no_view(run_in_place(arrays, options, backend)), arrays.initial_state
    return torch.ops.kdakit.step_(*arrays[:10], options.encode(), backend), arrays.initial_state


def _call(op: str, arrays: Arrays, options: Options, backend: str):
    if torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        from kdakit.torch_uncompiled import not_compiled_under_a_transform  # which imports the compiler: seconds

        return not_compiled_under_a_transform(_call, op, arrays, options, backend)
    plain = unwatched(arrays)
    differentiated = _check_tensors(arrays, backend, plain)
    if plain and differentiated:
        o, final_state, states = Differentiated.apply(*arrays[:10], op, options.encode(), backend)
    elif plain:
        o, final_state, states = map(no_view, run(arrays, op, options, backend, False)[0])
    elif transforms_active():
        o, final_state, states = Transformed.apply(*arrays[:10], op, options.encode(), backend)
    elif differentiated:
        o, final_state, states, _ = torch.ops.kdakit.forward(*arrays[:10], op, options.encode(), backend, True)
    else:
        o, *rest = torch.ops.kdakit.inference(*arrays[:10], op, options.encode(), backend)
        final_state, states = rest[0] if options.output_final_state else None, rest[-1] if rest else None
    final = final_state if options.output_final_state else None
    if states is not None:
        states = states.detach()  # nobody differentiates them, and they do not say that anybody could
    return (o, final, states) if options.return_intermediate_states else (o, final)
