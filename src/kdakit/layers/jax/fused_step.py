"""A KimiDeltaAttention's next tokens on a TPU: everything between its projections in one kernel, states and windows moved on in place.

None of it where another backend runs the layer: then `KimiDeltaAttention.mix` does the same in its own words, as its derivatives do.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

NAMES = ("q", "k", "v")


def kernel(layer: Any, x) -> Any:
    """The module with the kernel, if this layer is to take it for x [N, T, hidden_size]; None: it is not.

    It is where the layer's backend is named, in Pallas' interpreter too, and with 'auto' on TPUs that have shown it right."""
    s = layer.sizes
    if layer.backend not in ("auto", "pallas_tpu") or not (s.delta_rule and s.use_short_conv) or s.conv_size < 2:
        return None
    if layer.mode == "chunk" or not 1 <= x.shape[1] <= 8 or (layer.mode == "auto" and x.shape[1] > 1) or x.shape[0] == 0:
        return None
    device = device_of(x)
    if device not in ("tpu", "cpu") or (layer.backend == "auto" and device == "cpu"):
        return None
    from kdakit.backends.pallas_tpu import layer_step, pool

    return None if layer.backend == "auto" and pool.unshown(device) is not None else layer_step


def takes(module: Any, layer: Any, x, states) -> bool:
    """Whether the kernel can run the layer's tokens x with such states."""
    array = lambda *size: jax.ShapeDtypeStruct((*x.shape[:2], *size), x.dtype)
    s, sizes = layer.sizes, head_sizes(layer)
    inputs = {n: array(*size) for n, size in sizes.items()}
    return module.takes(states, module.Inputs(**inputs, g=array(s.value_heads, s.head_dim), beta=array(s.value_heads), gate=inputs["v"]))


def head_sizes(layer: Any) -> dict[str, tuple[int, int]]:
    s = layer.sizes
    return dict(q=(s.num_heads, s.head_dim), k=(s.num_heads, s.head_dim), v=(s.value_heads, s.head_v_dim))


def layer_step(module: Any, layer: Any, x, windows: dict, states, pages, state_v_first: bool = False):
    """o [N, T, hidden_size], windows and states of the next tokens of N rows.

    windows {q, k, v: [pages, conv_size - 1, heads, K]}, states [pages, HV, K, V]; pages [N], -1: nobody's.
    """
    from kdakit.backends.pallas_tpu import Config

    s, device = layer.sizes, device_of(x)
    heads = head_sizes(layer)
    cut = lambda y, size: y.reshape(*y.shape[:2], *size)
    made = {n: cut(getattr(layer, f"{n}_proj")(x), heads[n]) for n in NAMES}
    g = cut(layer.f_proj[1](layer.f_proj[0](x)), (s.value_heads, s.head_dim))
    gate = cut(layer.g_proj[1](layer.g_proj[0](x)), heads["v"])
    inputs = module.Inputs(**made, g=g, beta=layer.b_proj(x), gate=gate)
    filters = {n: getattr(layer, f"{n}_conv1d") for n in NAMES}
    taps = {n: f.weight[...][:, 0].astype(x.dtype).T.reshape(-1, *heads[n]) for n, f in filters.items()}
    biases = {n: f.bias[...].astype(x.dtype).reshape(heads[n]) for n, f in filters.items()} if s.conv_bias else None
    parameters = module.Parameters(layer.A_log[...], layer.dt_bias[...], taps, biases, layer.o_norm.weight[...], layer.o_norm.eps)
    options = dict(
        allow_neg_eigval=s.allow_neg_eigval, safe_gate=s.safe_gate, lower_bound=s.lower_bound, state_v_first=state_v_first
    )  # fmt: skip
    config = Config(heads=s.value_heads) if device == "tpu" else None
    y, carried = module.step(inputs, parameters, module.Carried(windows, states), pages, config, options)
    return layer.o_proj(y.reshape(*x.shape[:2], -1)), carried.windows, carried.states


def step_with_cache(layer: Any, x, cache: Any):
    """o and the next cache, whose rows are the sequences; None where the kernel is not to be taken, or does not take them."""
    if (module := kernel(layer, x)) is None or not takes(module, layer, x, cache.state):
        return None
    graph, parameters = nnx.split(layer)
    return _compiled(graph, parameters, x, cache)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_cache(graph, parameters, x, cache):
    layer, N = nnx.merge(graph, parameters), x.shape[0]
    sizes = head_sizes(layer)
    windows = {n: w.reshape(N, -1, *sizes[n]) for n, w in zip(NAMES, cache[:3], strict=True)}
    o, windows, state = layer_step(kernel(layer, x), layer, x, windows, cache.state, jnp.arange(N))
    return o, type(cache)(*(windows[n].reshape(w.shape) for n, w in zip(NAMES, cache[:3], strict=True)), state)


def _forward(graph, *given):
    return _with_cache(graph, *given), given


def _backward(graph, given, cotangents):
    """As the layer differentiates its own words."""
    return jax.vjp(lambda parameters, x, cache: nnx.merge(graph, parameters).mix_plainly(x, cache), *given)[1](cotangents)


_with_cache.defvjp(_forward, _backward)
_compiled = jax.jit(_with_cache, static_argnums=0)


def device_of(x: Any) -> str:
    concrete = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    return next(iter(x.devices())).platform if concrete else jax.default_backend()
