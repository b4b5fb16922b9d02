"""Context parallel KDA for JAX: inside shard_map, with the token axis split over a mesh axis.

    from kdakit.parallel.jax import chunk_kda, sharded_chunk_kda
    o, final_state = chunk_kda(q, k, v, g, beta, axis_name="context")                     # inside shard_map: this device's tokens
    o, final_state = sharded_chunk_kda(mesh, context="context")(q, k, v, g, beta)         # outside: whole arrays, sharded as said
    logits, _ = model(tokens, context=Context("context"))                                 # layers and models, inside shard_map

Every device reduces its slice to a map of states, S_out = M S_in + b; a scan over the devices in 1 + ceil(log2(devices - 1)) steps gives
each the state that enters it; then the local work is a plain `kdakit.jax.chunk_kda`. What travels does not depend on T. The backward runs
the same scan in reverse on  dS_in = M^T dS_out + c.  Shapes do not depend on where sequences begin: one program for all devices.
Arrays have one shape on all devices; where the tokens do not fill it, `length` says how many of a device's slots hold one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kdakit import jax as local
from kdakit.jax_sharding import split
from kdakit.problem import MAX_HEAD_DIM

__all__ = ["Context", "chunk_kda", "previous_tokens", "sharded_chunk_kda", "split"]


def chunk_kda(
    q, k, v, g, beta, *, axis_name, initial_state=None, output_final_state=False, state_v_first=False, A_log=None, dt_bias=None,
    cu_seqlens=None, segment_ids=None, length=None, **options,
):  # fmt: skip
    """`kdakit.jax.chunk_kda` on this device's slice of the tokens, inside shard_map over the mesh axis `axis_name`.

    Args:
        q, k, v, g, beta: this device's tokens; arrays of one shape on all devices.
        initial_state: [N, HV, K, V], the same on every device; read where a sequence begins.
        cu_seqlens: [N + 1] offsets of all sequences over the tokens of all devices, the same everywhere; sequences may cross devices.
            Tokens past cu_seqlens[-1] are padding.
        segment_ids: [B, T], those of this device's tokens; a segment may go on from one device to the next.
        length: how many of the T slots hold tokens, from the first on; another number on each device, traced or not, 0 too. What lies in
            the other slots is not read, and o is zero there. All T if None.
        options: the other keyword arguments of `kdakit.jax.chunk_kda`, except return_intermediate_states and cu_seqlens_cpu.

    Returns:
        o of these tokens, and final_state [N, HV, K, V] with the rows of the sequences that end on this device and zeros elsewhere:
        lax.psum over the axis gives the whole.
    """
    if options.get("return_intermediate_states"):
        raise ValueError("return_intermediate_states=True has no meaning across devices, whose chunks begin at their own first token")
    if "transpose_state_layout" in options:
        raise TypeError("transpose_state_layout is the old name of state_v_first, which calls across devices take alone")
    if options.get("cu_seqlens_cpu") is not None:
        raise ValueError("cu_seqlens_cpu must be None across devices, whose slices have offsets of their own: pass cu_seqlens alone")
    if cu_seqlens is not None and segment_ids is not None:
        raise ValueError("segment_ids and cu_seqlens say the same thing twice: pass one of them, got both")
    inputs = (q, k, v, g, beta)
    parameters: dict[str, Any] = {"A_log": A_log, "dt_bias": dt_bias}
    if length is not None:
        inputs, parameters, options = _idle(inputs, parameters, options, length)
        q, k, v, g, beta = inputs
        segment_ids = None if segment_ids is None else _filled(segment_ids, length)
    where = _place(axis_name, q, cu_seqlens, segment_ids, length)
    options |= {"segment_ids": segment_ids, "cu_seqlens": where.cu_seqlens, "output_final_state": True}
    K, (HV, V) = q.shape[-1], v.shape[2:]
    N = where.begins.shape[0]
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    initial = jnp.zeros((N, HV, K, V), dtype)
    if initial_state is not None:
        given = initial_state.astype(jnp.promote_types(initial_state.dtype, dtype))
        initial = _rows(where.begins, given.mT if state_v_first else given, 0)
    own, o_map = _map(*lax.stop_gradient((inputs, parameters, initial)), options, where)
    entering = _scan(axis_name, _leaving(own, where), reverse=False)
    start = _rows(where.continues, entering, initial)
    o, states = local.chunk_kda(q, k, v, g, beta, initial_state=start, **parameters, **options)
    o, states = _leave(axis_name, o, states, own[0], o_map, where)
    o = o if length is None else _tokens(o, length)
    if not output_final_state:
        return o, None
    final_state = _rows(where.ends, states, 0)
    return o, final_state.mT if state_v_first else final_state


def sharded_chunk_kda(mesh: Mesh, *, context: str | None = None, batch: str | None = None, heads: str | None = None):
    """`kdakit.jax.chunk_kda` on whole arrays over a mesh: tokens split over the axis `context`, batch over `batch`, heads over `heads`.

    Batch and heads need no communication. Arguments and results as there; final_state comes back whole, split over batch and heads.
    Sequences packed with cu_seqlens have no batch to split. Any T: where the devices of `context` do not divide it, the last ones get
    fewer tokens.
    """
    for name, axes in (("context", context), ("batch", batch), ("heads", heads)):
        for axis in (axes,) if isinstance(axes, str) else axes or ():
            if axis not in mesh.axis_names:
                raise ValueError(f"{name} must be an axis of the mesh, {', '.join(mesh.axis_names)}, got {axis!r}")
    tokens = P(batch, context, heads)
    states, parameters = P(batch, heads), {"A_log": P(heads), "dt_bias": P(heads)}
    explicit = AxisType.Explicit in mesh.axis_types  # as `jax.make_mesh` makes them: there shard_map moves nothing by itself

    def placed(x, spec):
        return jax.sharding.reshard(x, NamedSharding(mesh, spec)) if explicit else x

    def call(q, k, v, g, beta, *, initial_state=None, A_log=None, dt_bias=None, cu_seqlens=None, segment_ids=None, **options):
        given = {"initial_state": initial_state, "A_log": A_log, "dt_bias": dt_bias, "cu_seqlens": cu_seqlens, "segment_ids": segment_ids}
        given = {name: jnp.ravel(x) if name in parameters and x.ndim > 1 else x for name, x in given.items() if x is not None}
        if cu_seqlens is not None and batch is not None:
            raise ValueError(f"batch must be None with cu_seqlens, whose B is 1, got {batch!r}")
        specs = {"initial_state": states, **parameters, "cu_seqlens": P(), "segment_ids": P(batch, context)}
        wants_state, wants_states = (options.get(name) for name in ("output_final_state", "return_intermediate_states"))
        T = q.shape[1]
        more = -T % (1 if context is None else mesh.shape[context])  # slots without a token
        widen = lambda x: jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2)) if more else x
        inputs = tuple(placed(widen(x), tokens) for x in (q, k, v, g, beta))
        if segment_ids is not None:
            given["segment_ids"] = widen(segment_ids)
        given = {name: placed(x, specs[name]) for name, x in given.items()}

        def run(inputs, rest):
            named = dict(zip(("q", "k", "v", "g", "beta"), inputs, strict=True)) | rest | options
            if context is None:
                return local.chunk_kda(**named)
            here = inputs[0].shape[1]
            length = jnp.clip(T - lax.axis_index(context) * here, 0, here) if more else None
            o, final_state = chunk_kda(**named, axis_name=context, length=length)
            return o, lax.psum(final_state, context) if wants_state else None

        whole = P(batch, None, heads)
        o, *rest = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=((tokens,) * 5, {name: specs[name] for name in given}),
            out_specs=(tokens, states if wants_state else None, *([whole] if wants_states else [])),
        )(inputs, given)
        return (placed(o, whole)[:, :T] if more else o), *rest

    return call


def previous_tokens(x, count: int, axis_name, length=None):
    """x [B, T, ..], this device's tokens -> the `count` tokens before them, [B, count, ..], zeros before the first.

    For the window of a causal convolution; inside shard_map. Slices may be shorter than `count`: then more than one neighbour is asked.
    With `length`, the number of slots that hold tokens, all devices are.
    """
    devices, T = lax.axis_size(axis_name), x.shape[1]
    if length is not None:
        return _previous_of_uneven(x, count, axis_name, length)
    pieces: list[Any] = []
    hop, found = 1, 0
    while found < count and T and hop < devices:
        tail = x[:, T - min(T, count - found) :]
        pieces.insert(0, lax.ppermute(tail, axis_name, [(i, i + hop) for i in range(devices - hop)]))
        found += tail.shape[1]
        hop += 1
    return jnp.concatenate([jnp.zeros_like(x, shape=(x.shape[0], count - found, *x.shape[2:])), *pieces], 1)


def _previous_of_uneven(x, count: int, axis_name, length):
    """Every device gives its last `count` tokens; a token's place among all tokens says who has it."""
    slots = length - count + jnp.arange(count)
    tail = jnp.take(x, slots, axis=1, mode="clip")
    tails = lax.all_gather(tail, axis_name, axis=1)  # [B, devices, count, ..]
    lengths = lax.all_gather(length, axis_name)  # [devices]
    stops = jnp.cumsum(lengths)
    begin = stops[lax.axis_index(axis_name)] - length
    wanted = begin - count + jnp.arange(count)
    holder = (wanted[:, None] >= stops).sum(-1)
    before = tails[:, holder, count - stops[holder] + wanted]
    return jnp.where((wanted >= 0).reshape(1, count, *[1] * (x.ndim - 2)), before, 0)


@partial(jax.tree_util.register_dataclass, data_fields=["length"], meta_fields=["axis_name"])
@dataclass(frozen=True)
class Context:
    """What a layer must know of the other slices of its tokens, which lie along a mesh axis; inside shard_map."""

    axis_name: str
    length: Any = None  # how many slots of this device's slice hold tokens, from the first on; all if None

    def chunk_kda(self, *arrays, **options):
        return chunk_kda(*arrays, axis_name=self.axis_name, length=self.length, **options)

    def all_tokens(self, x):
        """x [B, T, ..] of all devices, [B, devices * T, ..]."""
        return lax.all_gather(x, self.axis_name, axis=1, tiled=True)

    def windows(self, inputs, count: int, cu_seqlens):
        """For convolutions of inputs [B, T, D] each: cu_seqlens of this slice, and the `count` inputs before it [N, count, D] each."""
        line = jnp.concatenate(inputs, -1)
        before = previous_tokens(line, count, self.axis_name, self.length)
        if cu_seqlens is not None:
            begin, held, _ = _extent(self.axis_name, line.shape[1], self.length)
            starts, stops = cu_seqlens[:-1], cu_seqlens[1:]
            inside = begin - count + jnp.arange(count) >= starts[:, None]  # [N, count]
            goes_on = (starts < begin) & (begin < stops)
            before = jnp.where((inside & goes_on[:, None])[..., None], before, 0)
            cu_seqlens = _local_offsets(cu_seqlens, begin, held)
        edges = np.cumsum([x.shape[-1] for x in inputs])[:-1]
        return cu_seqlens, jnp.split(before, edges, -1)

    def visible(self, x, cu_seqlens):
        """[1, T, all slots]: what each of this slice's tokens sees of all of them, its own sequence up to itself."""
        T = x.shape[1]
        begin, held, _ = _extent(self.axis_name, T, self.length)
        slots = jnp.arange(T)
        gathered = lambda value: lax.all_gather(value, self.axis_name, tiled=True)
        here, everywhere, filled = begin + slots, gathered(begin + slots), gathered(slots < held)
        mask = (here[:, None] >= everywhere) & filled
        if cu_seqlens is not None:
            owner = lambda places: (places[:, None] >= cu_seqlens[1:]).sum(-1)
            mask &= owner(here)[:, None] == owner(everywhere)
        return mask[None]


def _extent(axis_name, T: int, length):
    """The place of this device's first token among all, how many it holds, and how many there are on all devices."""
    device, devices = lax.axis_index(axis_name), lax.axis_size(axis_name)
    if length is None:
        return device * T, T, devices * T
    lengths = lax.all_gather(length, axis_name)
    return jnp.where(jnp.arange(devices) < device, lengths, 0).sum(), length, lengths.sum()


def _local_offsets(cu_seqlens, begin, held):
    """Offsets of the sequences in this device's slots. What lies behind them, padding or no token at all, is nobody's."""
    return jnp.clip(cu_seqlens - begin, 0, held)


def _tokens(x, length):
    """x [B, T, ..] with zeros in the slots that hold no token."""
    return jnp.where((jnp.arange(x.shape[1]) < length).reshape(1, -1, *[1] * (x.ndim - 2)), x, 0)


def _filled(segment_ids, length):
    """The last token's id in the slots behind it."""
    last = jnp.take(segment_ids, jnp.maximum(length - 1, 0)[None], axis=1, mode="clip")
    return jnp.where(jnp.arange(segment_ids.shape[1]) < length, segment_ids, last)


def _idle(inputs, parameters: dict[str, Any], options: dict[str, Any], length):
    """The call with idle slots: k = 0 adds nothing to a state and a log-decay of 0 keeps it. No raw gate is sure to give 0, so that the
    gate is applied here."""
    q, k, v, g, beta = (_tokens(x, length) for x in inputs)
    if options.get("use_gate_in_kernel"):
        bound = options.get("lower_bound")
        g = local.kda_gate(g, **parameters, lower_bound=bound, output_dtype=jnp.promote_types(q.dtype, jnp.float32))
        options = options | {"use_gate_in_kernel": False, "safe_gate": bound is not None}
        g, parameters = _tokens(g, length), {}
    return (q, k, v, g, beta), parameters, options


class Place(NamedTuple):
    """How this device's slice cuts the sequences; traced. Rows number the sequences and so the states."""

    begins: Any  # [N] sequences whose first token, or whose only place, is here
    continues: Any  # [N] those that began on an earlier device: without cu_seqlens many, with cu_seqlens at most one
    ends: Any  # [N]
    leaving: Any  # [N] those that go on to the next device
    reached: Any  # [N] those whose state after this device hears of the one before it; with segment_ids one segment must hold all tokens
    heads: Any  # [B, T] tokens that hear of the state before this device, or None: all tokens of `continues`
    cu_seqlens: Any  # [N + 1] of this device's tokens, or None


def _place(axis_name, q, cu_seqlens, segment_ids, length) -> Place:
    device, devices = lax.axis_index(axis_name), lax.axis_size(axis_name)
    B, T = q.shape[:2]
    if cu_seqlens is None:
        first, last = (jnp.broadcast_to(device == place, (B,)) for place in (0, devices - 1))
        continues = ~first
        if segment_ids is None or not T:
            return Place(first, continues, last, ~last, continues, None, None)
        continues &= _goes_on(axis_name, segment_ids, length)
        changes = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
        heads = continues[:, None] & (jnp.cumsum(changes, 1) == 0)
        return Place(first, continues, last, ~last, heads[:, -1], heads, None)
    begin, held, total = _extent(axis_name, T, length)
    starts, stops = cu_seqlens[:-1], cu_seqlens[1:]

    def holder(position):
        position = jnp.clip(position, 0, jnp.maximum(total - 1, 0))
        return (begin <= position) & (position < begin + held) | ((total == 0) & (device == 0))

    continues, offsets = (starts < begin) & (begin < stops), _local_offsets(cu_seqlens, begin, held)
    return Place(
        begins=holder(starts),
        continues=continues,
        ends=holder(jnp.maximum(stops - 1, starts)),
        leaving=(starts < begin + held) & (begin + held < stops),
        reached=continues,
        heads=(jnp.arange(T) < jnp.where(continues, offsets[1:], 0).sum())[None],
        cu_seqlens=offsets,
    )


def _goes_on(axis_name, segment_ids, length):
    """[B]: whether the segment of the token before this device's first is that one's too; also where there is no such token."""
    device, devices = lax.axis_index(axis_name), lax.axis_size(axis_name)
    first, last = segment_ids[:, 0], segment_ids[:, -1]
    if length is None:
        return lax.ppermute(last, axis_name, [(i, i + 1) for i in range(devices - 1)]) == first
    lengths, lasts = lax.all_gather(length, axis_name), lax.all_gather(last, axis_name)  # [devices], [devices, B]
    before = jnp.where((jnp.arange(devices) < device) & (lengths > 0), jnp.arange(devices), -1).max()
    return (before < 0) | (length == 0) | (lasts[before] == first)


def _rows(which, states, otherwise):
    """states [N, HV, K, V] in the rows of `which` [N], `otherwise` in the others; states [1, ..] fit any row."""
    return jnp.where(which[:, None, None, None], states, otherwise)


def _of_heads(x, where: Place):
    """x [B, T, ..] with zeros where no token hears of the state before this device."""
    return x if where.heads is None else jnp.where(where.heads.reshape(*where.heads.shape, *[1] * (x.ndim - 2)), x, 0)


def _map(inputs, parameters: dict[str, Any], initial, options: dict[str, Any], where: Place):
    """What the slice does to the states that enter it: (M, b) of every row, and o_map [B, T, HV, K] with  o = o(state 0) + o_map S.

    The recurrence runs on the identity, where a sequence continues, beside the states that begin here, with values of zero and the given
    ones; in the compute dtype, since o_map goes into states. Where M and o_map must be zero they are, be it beside NaN.
    """
    q, k, v, g, beta = inputs
    q, k, v = (x.astype(initial.dtype) for x in (q, k, v))
    K, V = initial.shape[-2:]
    run: Any = partial(local.chunk_kda, **parameters, **options)
    identity = _rows(where.continues, jnp.broadcast_to(jnp.eye(K, dtype=initial.dtype), (*initial.shape[:-1], K)), 0)
    no_value = jnp.zeros_like(v, shape=(*v.shape[:-1], K))
    if K + V <= MAX_HEAD_DIM:
        both = jnp.concatenate([no_value, v], -1), jnp.concatenate([identity, initial], -1)
        o, S = run(q, k, both[0], g, beta, initial_state=both[1])
        o, M, b = o[..., :K], S[..., :K], S[..., K:]
    else:
        o, M = run(q, k, no_value, g, beta, initial_state=identity)
        b = run(q, k, v, g, beta, initial_state=initial)[1]
    return (_rows(where.reached, M, 0), b), _of_heads(o, where)


def _leaving(own, where: Place):
    """M and b of what goes on to the next device: of all rows, or with cu_seqlens of the one that does, as a single row."""
    return tuple(_carried(_rows(where.leaving, x, 0), where) for x in own)


def _carried(x, where: Place):
    """Rows that cross a border, the others being zero: all of a batch, or the only one of packed sequences as a single row."""
    return x if where.cu_seqlens is None else x.sum(0, keepdims=True)


_dot = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def _scan(axis_name, own, reverse: bool):
    """The state that enters each device, zero at the first: maps composed over the devices before it, in an order that never changes.

    Where M is zero nothing comes through, be it NaN: it belongs to another sequence, or to one whose gates have forgotten all.
    """
    devices = lax.axis_size(axis_name)
    places = list(reversed(range(devices))) if reverse else list(range(devices))
    shift = lambda x, by: lax.ppermute(x, axis_name, [(places[i], places[i + by]) for i in range(devices - by)])
    shut = lambda M: (M == 0).all((-2, -1), keepdims=True)  # [.., 1, 1]
    M, b = shift(own, 1)
    distance = 1
    while distance < devices - 1:
        M_before, b_before = shift((M, b), distance)
        b = jnp.where(shut(M), 0, _dot("...ij,...jv->...iv", M, b_before)) + b
        M = jnp.where(shut(M) | shut(M_before), 0, _dot("...ij,...jk->...ik", M, M_before))
        distance *= 2
    return b


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _leave(axis_name, o, states, M, o_map, where: Place):
    """The identity on o and the states after this device's tokens; on the way back it brings in the gradient of what went on."""
    return o, states


def _leave_forward(axis_name, o, states, M, o_map, where: Place):
    return (o, states), (M, o_map, where)


def _leave_backward(axis_name, residuals, cotangents):
    """c, the gradient of the entering state so far: through o, and through the final states of what ends here."""
    (M, o_map, where), (d_o, d_states) = residuals, cotangents
    c = _carried(_rows(where.ends & where.reached, _dot("...ji,...jv->...iv", M, d_states), 0), where)
    c = c + _dot("bthk,bthv->bhkv", o_map, _of_heads(d_o, where).astype(M.dtype))
    d_next = _scan(axis_name, (_carried(_rows(where.leaving, M.mT, 0), where), c), reverse=True)
    return d_o, d_states + _rows(where.leaving, d_next, 0), None, None, None


_leave.defvjp(_leave_forward, _leave_backward)
