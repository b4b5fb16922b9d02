"""Kimi Delta Attention for JAX.

    from kdakit.jax import chunk_kda
    o, final_state = chunk_kda(q, k, v, g, beta, output_final_state=True)

Every call works under jit, grad, vmap, jax.checkpoint and shard_map, and takes NumPy arrays too. The definition of what is computed is
`kdakit.reference`.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from functools import partial
from typing import Any

try:
    import jax
except ModuleNotFoundError as missing:
    missing.add_note("kdakit.jax needs JAX: pip install 'kdakit[jax]', or 'kdakit[tpu]' on a TPU")
    raise
import jax.numpy as jnp
import numpy as np
from jax import lax

from kdakit import dispatch, jax_mapped, jax_sharding, quarantine
from kdakit.mesh_axes import all_varying, vary, varying
from kdakit.problem import DIFFERENTIABLE, Arrays, Problem, check_cu_seqlens, checks_enabled, fold_compatibility, make_options, make_problem
from kdakit.values import check_same_cu_seqlens, check_values

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
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False, lower_bound=None, A_log=None, dt_bias=None,
    disable_recompute=False, return_intermediate_states=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_size=64,
    backend="auto", segment_ids=None, **compat,
):  # fmt: skip
    """Kimi Delta Attention, chunk by chunk: for training and prefill.

        S_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T        o_t = scale * S_t^T q_t

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V], HV a multiple of H. g: [B, T, HV, K]. beta: [B, T, HV]. q, k and v of different dtypes meet in
            the one that holds them all, and o comes back in q's.
        scale: of the output; K ** -0.5 if None.
        initial_state: [N, HV, K, V] float32, N = B or the number of sequences; zeros if None.
        output_final_state: whether to return the state after the last token.
        use_qk_l2norm_in_kernel: normalise q and k first.
        use_gate_in_kernel: g is raw, and the log-decay is -exp(A_log) * softplus(g + dt_bias), or with lower_bound
            lower_bound * sigmoid(exp(A_log) * (g + dt_bias)). Otherwise g is the log-decay, any value <= 0.
        use_beta_sigmoid_in_kernel: apply a sigmoid to beta; with allow_neg_eigval, twice that.
        safe_gate: a promise that the log-decay lies in [lower_bound, 0).
        A_log: HV elements. dt_bias: HV * K elements. Both are ignored without use_gate_in_kernel.
        disable_recompute: keep what the backward needs instead of computing it again: more memory, gradients the same but for roundings.
        return_intermediate_states: also return the state before each chunk, [B, chunks, HV, K, V]. With cu_seqlens the chunks of all
            sequences follow each other, and the unused slots of the upper bound are zero. Not differentiated.
        state_v_first: states are [.., V, K].
        cu_seqlens: [N + 1] offsets of sequences packed along T (B = 1). May be traced; its values never change a shape. Tokens past
            cu_seqlens[-1] are padding, whatever stands there: their outputs and gradients are zero.
        cu_seqlens_cpu: a copy on the host, checked if given.
        chunk_size: 16, 32, 64 or 128.
        backend: a name from `kdakit.dispatch.names("jax")`, or "auto".
        segment_ids: [B, T]; the state is forgotten where the id changes. initial_state enters the row's first segment, final_state leaves
            its last.

    Returns:
        o [B, T, HV, V] in q's dtype and final_state (None unless asked for); with return_intermediate_states also those.
    """
    state_v_first = fold_compatibility("chunk_kda", _names(chunk_kda), state_v_first, compat)
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    arrays = _arrays(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, segment_ids)
    scale = _number(scale)
    options = make_options(
        arrays, scale=scale, output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        safe_gate=safe_gate, lower_bound=lower_bound, disable_recompute=disable_recompute,
        return_intermediate_states=return_intermediate_states, state_v_first=state_v_first, chunk_size=chunk_size,
    )  # fmt: skip
    o, final_state, states = _run(make_problem("chunk", arrays, options), arrays, backend)
    o = o.astype(q.dtype)
    return (o, final_state, lax.stop_gradient(states)) if return_intermediate_states else (o, final_state)


def fused_recurrent_kda(
    q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, lower_bound=None, state_v_first=False,
    cu_seqlens=None, cu_seqlens_cpu=None, segment_ids=None, safe_gate=False, backend="auto", **compat,
):  # fmt: skip
    """The same numbers as `chunk_kda`, token by token: for decoding and short sequences. Arguments as there.

    initial_state may be half precision: arithmetic is float32, and so is the final_state that comes back. Its gradient is that of
    `chunk_kda`.
    """
    state_v_first = fold_compatibility("fused_recurrent_kda", _names(fused_recurrent_kda), state_v_first, compat)
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    if initial_state is not None and hasattr(initial_state, "dtype") and str(initial_state.dtype) in ("bfloat16", "float16"):
        initial_state = initial_state.astype(jnp.float32)
    arrays = _arrays(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, segment_ids)
    scale = _number(scale)
    options = make_options(
        arrays, scale=scale, output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        safe_gate=safe_gate, lower_bound=lower_bound, state_v_first=state_v_first,
    )  # fmt: skip
    o, final_state, _ = _run(make_problem("recurrent", arrays, options), arrays, backend)
    return o.astype(q.dtype), final_state


def naive_recurrent_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
    """The recurrence as it is written down, differentiated by JAX: to read and to compare with. g is the log-decay."""
    (q, k, v, g, beta), state = _promoted(q, k, v, g, beta, scale, initial_state)

    def token(state, x):
        q, k, v, g, beta = x  # [B, HV, K] x 2, [B, HV, V], [B, HV, K], [B, HV]
        state = jnp.exp(g)[..., None] * state
        error = v - _dot("bhk,bhkv->bhv", k, state)
        state = state + _dot("bhk,bhv->bhkv", beta[..., None] * k, error)
        return state, _dot("bhk,bhkv->bhv", q, state)

    state, o = lax.scan(token, state, tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta)))
    return jnp.moveaxis(o, 0, 1), state if output_final_state else None


def naive_chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, chunk_size=64):
    """The chunk form as `kdakit.chunked` writes it, differentiated by JAX, for any T. g is the log-decay."""
    (q, k, v, g, beta), state = _promoted(q, k, v, g, beta, scale, initial_state)
    T, C = q.shape[1], chunk_size
    i, j = np.indices((C, C))

    def chunks(x):
        """[B, T, HV, ..] -> [NT, B, HV, C, ..]."""
        x = jnp.pad(x, [(0, 0), (0, -T % C)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, C, *x.shape[2:]), (1, 3), (0, 2))

    def chunk(state, x):
        q, k, v, g, beta = x  # [B, HV, C, K] x 2, [B, HV, C, V], [B, HV, C, K], [B, HV, C]
        gates = jnp.where((i > j)[..., None], g[..., :, None, :], 0)  # at (m, j): the gates after j
        decays = jnp.exp(jnp.where((i >= j)[..., None], jnp.cumsum(gates, -3), -jnp.inf))  # [B, HV, i, j, K]
        A_qk = _dot("...ik,...jk,...ijk->...ij", q, k, decays)
        A_kk = jnp.tril(beta[..., None] * _dot("...ik,...jk,...ijk->...ij", k, k, decays), -1)
        g_cum = jnp.cumsum(g, -2)
        right = jnp.concatenate([beta[..., None] * v, beta[..., None] * k * jnp.exp(g_cum)], -1)
        u, w = jnp.split(lax.linalg.triangular_solve(A_kk, right, left_side=True, lower=True, unit_diagonal=True), [v.shape[-1]], -1)
        v_new = u - w @ state
        o = (q * jnp.exp(g_cum)) @ state + A_qk @ v_new
        state = jnp.exp(g_cum[..., -1, :])[..., None] * state + (k * decays[..., -1, :, :]).mT @ v_new
        return state, o

    state, o = lax.scan(chunk, state, tuple(map(chunks, (q, k, v, g, beta))))  # o [NT, B, HV, C, V]
    o = jnp.moveaxis(o, (0, 2), (1, 3)).reshape(*v.shape[:1], -1, *v.shape[2:])
    return o[:, :T], state if output_final_state else None


def kda_gate(g, A_log=None, dt_bias=None, lower_bound=None, output_dtype=jnp.float32):
    """Log-decay of a raw gate g [.., HV, K]; A_log has HV elements, dt_bias HV * K.

    -exp(A_log) * softplus(g + dt_bias), or with lower_bound < 0: lower_bound * sigmoid(exp(A_log) * (g + dt_bias)).
    """
    if lower_bound is None and A_log is None:
        raise ValueError("A_log is required unless lower_bound selects the bounded gate, got None")
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"lower_bound must be negative, got {lower_bound}")
    g, A_log, dt_bias = _array("g", g), _array("A_log", A_log), _array("dt_bias", dt_bias)
    HV, K = g.shape[-2:]
    dtype = jnp.promote_types(g.dtype, jnp.float32)
    x = jnp.asarray(g, dtype) + (0 if dt_bias is None else jnp.asarray(dt_bias, dtype).reshape(HV, K))
    a = jnp.ones((), dtype) if A_log is None else jnp.exp(jnp.asarray(A_log, dtype)).reshape(HV, 1)
    out = -a * jax.nn.softplus(x) if lower_bound is None else lower_bound * jax.nn.sigmoid(a * x)
    return out.astype(output_dtype)


fused_kda_gate = kda_gate


def naive_kda_gate(g, A_log, dt_bias=None, output_dtype=jnp.float32):
    """The softplus gate."""
    return kda_gate(g, A_log, dt_bias, None, output_dtype)


def naive_kda_lowerbound_gate(g, A_log=None, dt_bias=None, lower_bound=-5.0, output_dtype=jnp.float32):
    """The bounded gate."""
    return kda_gate(g, A_log, dt_bias, lower_bound, output_dtype)


def kda_gate_chunk_cumsum(g, A_log, chunk_size, scale=None, dt_bias=None, cu_seqlens=None, output_dtype=jnp.float32, lower_bound=None):
    """The gate of g [B, T, HV, K], summed up from the start of each chunk of each sequence; times scale."""
    if chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size must be a power of two, got {chunk_size}")
    if cu_seqlens is not None and g.shape[0] != 1:
        raise ValueError(f"g must have B = 1 with cu_seqlens (pack the sequences along T), got B = {g.shape[0]}")
    x = kda_gate(g, A_log, dt_bias, lower_bound, jnp.promote_types(g.dtype, jnp.float32))
    T = g.shape[1]
    t = jnp.arange(T)
    if cu_seqlens is not None:
        cu_seqlens = jnp.asarray(cu_seqlens)
        t = t - cu_seqlens[jnp.searchsorted(cu_seqlens[1:], t, side="right").clip(max=len(cu_seqlens) - 2)]
    place = (t % chunk_size)[:, None, None]
    step = 1
    while step < min(chunk_size, T):  # x_t <- x_t + x_{t - step}, within the chunk
        x = x + jnp.where(place >= step, jnp.pad(x[:, :-step], ((0, 0), (step, 0), (0, 0), (0, 0))), 0)
        step *= 2
    return (x if scale is None else x * scale).astype(g.dtype if output_dtype is None else output_dtype)


def __getattr__(name: str) -> Any:
    if name == "tokamax":  # loaded when somebody asks for it
        return importlib.import_module("kdakit.stacks.tokamax")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_dot = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def _promoted(q, k, v, g, beta, scale, initial_state):
    """The naive functions' inputs in float32 (float64 if q is), q scaled, q and k repeated to HV heads; the initial state."""
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    q, k, v, g, beta = (jnp.asarray(x, dtype) for x in (q, k, v, g, beta))
    group = v.shape[2] // q.shape[2]
    q, k = (jnp.repeat(x, group, axis=2) for x in (q * (q.shape[-1] ** -0.5 if scale is None else scale), k))
    shape = (v.shape[0], v.shape[2], q.shape[-1], v.shape[-1])
    return (q, k, v, g, beta), jnp.zeros_like(v, shape=shape) if initial_state is None else jnp.asarray(initial_state, dtype)


def _names(function) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "compat"]


def _arrays(*values) -> Arrays:
    """The call's arrays as JAX arrays, q, k and v of one dtype; what is no array is left for the checks to name."""
    arrays = Arrays(*(_array(name, value) for name, value in zip(Arrays._fields, values, strict=True)))
    three = arrays[:3]
    if not all(hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating) for x in three) or len({x.dtype for x in three}) == 1:
        return arrays
    dtype = jnp.promote_types(jnp.promote_types(three[0].dtype, three[1].dtype), three[2].dtype)
    q, k, v = (x.astype(dtype) for x in three)
    return arrays._replace(q=q, k=k, v=v)


def _number(scale: Any) -> Any:
    """An array of one element as the number in it, where that is known when a call is traced."""
    if isinstance(scale, (jax.Array, np.ndarray)) and scale.size == 1 and not isinstance(scale, jax.core.Tracer):
        return float(scale.reshape(()))
    return scale


def _array(name: str, value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype == np.float64 and jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
            raise TypeError(f"{name} is float64, which JAX would round to float32: pass float32, or set jax_enable_x64")
        return value if name == "cu_seqlens_cpu" else jnp.asarray(value)
    if value is not None and hasattr(value, "shape") and not isinstance(value, jax.Array):
        raise TypeError(f"{name} must be a JAX or NumPy array, got {type(value).__name__}")
    return value


def _run(problem: Problem, arrays: Arrays, backend: str):
    device = _device(arrays.q)
    _check_values(problem, arrays, device)
    arrays = arrays._replace(cu_seqlens_cpu=None)
    backend = _on_mesh(problem, arrays, backend, device)
    return jax_sharding.over_mesh(problem, arrays, lambda problem, arrays: _kda(problem, backend, device, _varying_together(arrays)))


def _on_mesh(problem: Problem, arrays: Arrays, backend: str, device: str) -> str:
    """`backend`, unless it has kernels that cannot run where the arrays lie: then an error, or 'xla' in the place of 'auto'."""
    reason = jax_sharding.unsplit(arrays)
    if reason is None or not dispatch.select("jax", problem, device, backend).folds:
        return backend
    if backend != "auto":
        raise ValueError(f"backend {backend!r} cannot run this call: {reason} ({problem})")
    warnings.warn(f"backend='auto' takes 'xla', because {reason}", RuntimeWarning, stacklevel=4)
    return "xla"


def _device(array: Any) -> str:
    """The platform on which the call will run: where a concrete q is, that of a traced one's mesh, else where JAX computes by default."""
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
        return next(iter(array.devices())).platform
    for mesh in (jax.sharding.get_abstract_mesh(), getattr(jax.typeof(array).sharding, "mesh", None)):
        platform = getattr(getattr(mesh, "abstract_device", None), "platform", None)
        if platform is not None:
            return platform
    return jax.default_backend()


def _check_values(problem: Problem, arrays: Arrays, device: str) -> None:
    """The values of cu_seqlens, where looking at them stops no device; when checks are on everything that is not traced."""
    every, seen = checks_enabled(), {}
    for name in ("cu_seqlens", "cu_seqlens_cpu"):
        value = getattr(arrays, name)
        if _concrete(value) and (isinstance(value, np.ndarray) or device == "cpu" or every):
            seen[name] = np.asarray(value)
            check_cu_seqlens(seen[name], problem.T, name)
    if len(seen) == 2:
        check_same_cu_seqlens(*seen.values())
    inputs = arrays[: len(DIFFERENTIABLE)]
    if every and all(x is None or _concrete(x) for x in (*inputs, arrays.cu_seqlens)):
        wide: list[Any] = [None if x is None else np.asarray(x).astype(np.float64) for x in inputs]
        check_values(problem, Arrays(*wide)._replace(cu_seqlens=seen.get("cu_seqlens")))


def _concrete(x: Any) -> bool:
    return x is not None and not isinstance(x, jax.core.Tracer)


def _varying_together(arrays: Arrays) -> Arrays:
    """Inside shard_map every array varies over the same mesh axes, so that the gradient of a replicated one is summed over them."""
    everything = all_varying(arrays)
    return Arrays(*(None if x is None else vary(x, everything) for x in arrays))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _kda(problem: Problem, backend: str, device: str, arrays: Arrays):
    return tuple(run(problem, backend, device, arrays)[0])


def run(problem, backend, device, arrays):
    """The forward of a call that is described: the backend's result and what it saved for its backward; the token recurrence saves nothing.

    What is saved comes with a flag where the backend ran on arrays that need not be finite: whether they were not, and it ran again.
    """
    module = dispatch.select("jax", problem, device, backend)
    config = module.default_config(problem, device)
    if problem.op == "recurrent":
        return jax_mapped.step(module, problem, arrays, config), (None, None)

    def apart():
        found = quarantine.isolate(problem, arrays)
        result, saved = jax_mapped.forward(module, problem, found.arrays, config)
        return quarantine.spoil_results(problem, result, found), saved

    lost = None
    if not _mixes(module, problem, config):
        result, saved = jax_mapped.forward(module, problem, arrays, config)
    elif not _looks_afterwards(module, device):
        result, saved = apart()
    else:
        first = jax_mapped.forward(module, problem, arrays, config)
        lost = quarantine.any_lost(first[0].o)  # which every token depends on that could spoil another's
        result, saved = quarantine.again_if(lost, first, apart)
    axes = varying(arrays.q)  # a custom call's results know nothing of mesh axes
    return type(result)(*(None if x is None else vary(x, axes) for x in result)), (saved, lost)


def _kda_forward(problem, backend, device, arrays):
    result, saved = run(problem.replace(needs_grad=True), backend, device, arrays)
    return tuple(result), (arrays, saved)


def _kda_backward(problem, backend, device, residuals, cotangents):
    arrays, (saved, lost) = residuals
    d_o, d_final_state, _ = cotangents
    problem = problem.replace(op="chunk", needs_grad=True)
    module = dispatch.differentiates(dispatch.select("jax", problem, device, backend))
    config = module.default_config(problem, device)
    if not _mixes(module, problem, config):
        return (jax_mapped.backward(module, problem, arrays, saved, d_o, d_final_state, config),)

    def apart():
        found, own_d_o, own_d_final = quarantine.isolate_backward(problem, quarantine.isolate(problem, arrays), d_o, d_final_state)
        gradients = jax_mapped.backward(module, problem, found.arrays, saved, own_d_o, own_d_final, config)
        return quarantine.spoil_gradients(problem, gradients, found)

    if lost is None:
        return (apart(),)
    gradients = jax_mapped.backward(module, problem, arrays, saved, d_o, d_final_state, config)
    return (quarantine.again_if(lost | quarantine.any_lost(gradients.beta), gradients, apart),)  # all of d_o goes into d_beta


def _mixes(module, problem: Problem, config) -> bool:
    """Whether something not finite could leave its sequence or head in this backend's products."""
    return problem.T > 0 and problem.B > 0 and module.mixes(problem, config)


def _looks_afterwards(module, device: str) -> bool:
    """Kernels that XLA cannot see into run first, and again if something was not finite: to look at all inputs beforehand would double what
    they move. Not in an interpreter, where a second kernel takes longer to compile than the first to run."""
    return module.folds and module.interpreted(device) is None


_kda.defvjp(_kda_forward, _kda_backward)
