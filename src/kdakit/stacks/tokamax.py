"""The call of tokamax, `tokamax.ops.kimi_delta_attention` of 0.0.14 to 0.0.17, on kdakit's JAX backends: also as `kdakit.jax.tokamax`.

    from tokamax.ops import kimi_delta_attention        becomes        from kdakit.stacks.tokamax import kimi_delta_attention

Heads come first: query, key, gate [H, B, T, K], value [H, B, T, V], beta [H, B, T]. States are [B, N, H, K, V], one for each of a row's
segments. segment_ids [B, T] count from 1, and 0 is padding.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from kdakit import dispatch
from kdakit import jax as ours


def kimi_delta_attention(
    query, key, value, gate, beta, *, a_log=None, delta_time_bias=None, scale: float | None = None, initial_state=None,
    output_final_state: bool = False, use_qk_l2norm: bool = False, use_gate_in_kernel: bool = False, segment_ids=None,
    lower_bound: float | None = None, context_parallel_metadata: Any = None, max_num_segments: int | None = None,
    implementation: Any = None,
):  # fmt: skip
    """(o [H, B, T, V], final_state [B, N, H, K, V] or None).

    A token whose id is 0 or above N is padding: its output is 0 and no state sees it. N is max_num_segments, or initial_state's. Without
    states all tokens of an id follow each other; with states they need not.
    implementation: a backend of kdakit or several, of which the first is taken; None, and tokamax's own names, let kdakit choose.
    """
    if getattr(context_parallel_metadata, "is_cp_enabled", context_parallel_metadata is not None):
        raise NotImplementedError("context_parallel_metadata is not taken: call kdakit.parallel.jax.chunk_kda inside shard_map instead")
    named = implementation[0] if isinstance(implementation, (list, tuple)) and implementation else implementation
    flags = dict(
        scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm, output_final_state=output_final_state,
        backend=named if named in dispatch.names("jax") else "auto",
    )  # fmt: skip
    if use_gate_in_kernel:
        flags |= dict(use_gate_in_kernel=True, A_log=a_log, dt_bias=delta_time_bias, lower_bound=lower_bound)
    tokens = [jnp.moveaxis(jnp.asarray(x), 0, 2) for x in (query, key, value, gate, beta)]  # [B, T, H, ..]
    state = None if initial_state is None else jnp.asarray(initial_state, jnp.float32)
    if segment_ids is None:
        o, final = _whole(tokens, state, flags)
    else:
        o, final = _segments(tokens, state, jnp.asarray(segment_ids), _count(state, max_num_segments), flags)
    return jnp.moveaxis(o, 2, 0), final


def _count(state, max_num_segments: int | None) -> int:
    if state is None and max_num_segments is None:
        raise ValueError("segment_ids need max_num_segments or initial_state, got neither")
    if state is not None and max_num_segments not in (None, state.shape[1]):
        raise ValueError(f"max_num_segments must be initial_state's {state.shape[1]}, got {max_num_segments}")
    return max_num_segments if state is None else state.shape[1]


def _whole(tokens, state, flags):
    """Rows of one segment each: theirs is the first state, and others come out as they came in."""
    o, final = ours.chunk_kda(*tokens, initial_state=None if state is None else state[:, 0], **flags)
    if final is None:
        return o, None
    return o, final[:, None] if state is None else state.at[:, 0].set(final)


def _segments(tokens, state, segment_ids, N: int, flags):
    known = (segment_ids > 0) & (segment_ids <= N)
    if state is None and not flags["output_final_state"]:
        cleared = lambda x: jnp.where(known.reshape(*known.shape, *[1] * (x.ndim - 2)), x, 0)  # gradients of parameters see all tokens
        o, _ = ours.chunk_kda(*map(cleared, tokens), segment_ids=jnp.where(known, segment_ids, 0), **flags)
        return cleared(o), None
    # One packed row: the segments of all rows by row and id, then what is padding, which cu_seqlens leaves out.
    B, T = segment_ids.shape
    place = jnp.where(known, jnp.arange(B)[:, None] * N + segment_ids - 1, B * N).reshape(-1)
    order = jnp.argsort(place, stable=True)
    cu_seqlens = jnp.searchsorted(place[order], jnp.arange(B * N + 1)).astype(jnp.int32)
    packed = (x.reshape(1, B * T, *x.shape[2:])[:, order] for x in tokens)
    states = None if state is None else state.reshape(B * N, *state.shape[2:])
    o, final = ours.chunk_kda(*packed, initial_state=states, cu_seqlens=cu_seqlens, **flags)
    o = o[0, jnp.argsort(order)].reshape(B, T, *o.shape[2:])
    return o, None if final is None else final.reshape(B, N, *final.shape[1:])
