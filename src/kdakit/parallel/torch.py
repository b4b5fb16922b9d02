"""Context parallel KDA for PyTorch: the token axis is cut into one slice per rank of a torch.distributed group.

    from kdakit.parallel.torch import chunk_kda
    o, final_state = chunk_kda(q, k, v, g, beta, group=group)       # q .. beta: this rank's tokens
    logits, _ = model(tokens, context=Context(group))               # layers and models likewise

Every rank reduces the part of its slice that continues an earlier rank's sequence to a map of states, S_out = M S_in + b; a scan over the
ranks gives each the state that enters it; then the local work is a plain `kdakit.torch.chunk_kda`. What travels does not depend on T.
The backward runs the same scan in reverse on  dS_in = M^T dS_out + c,  where c = sum_t (M_t^T q_t) d_o_t^T  needs no second pass either.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kdakit import torch as local
from kdakit.parallel.exchange import Affine, Scan, Traffic, agree, collective_device, count_traffic, fingerprint, scan_bytes
from kdakit.parallel.halo import all_tokens, previous_tokens, token_counts
from kdakit.parallel.slices import Slice, dense_slice, packed_slice
from kdakit.problem import MAX_HEAD_DIM, Arrays, check_backend_name, check_cu_seqlens, check_devices, make_options, make_problem
from kdakit.torch_operators import no_view

__all__ = ["Context", "Traffic", "all_tokens", "chunk_kda", "count_traffic", "previous_tokens", "scan_bytes"]


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, group: Any = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None, backend: str = "auto", **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`kdakit.torch.chunk_kda` on this rank's slice of the tokens. Every rank of the group must make the call, and its backward.

    Args:
        q, k, v, g, beta: this rank's tokens, in the order of the ranks. Slices may differ in length, and be empty.
        group: a torch.distributed process group; the default one if None.
        initial_state: [N, HV, K, V], the same on every rank. The rank where a sequence begins reads its row and gets its gradient.
        cu_seqlens: [N + 1] offsets of all sequences over the tokens of all ranks, the same on every rank; sequences may cross ranks.
        cu_seqlens_cpu: the same on the host; without it the host asks the device for cu_seqlens.
        A_log, dt_bias: the same on every rank; their gradients are this rank's part and want to be summed, as those of any parameter.
        options: the other keyword arguments of `kdakit.torch.chunk_kda`, except return_intermediate_states.

    Returns:
        o of this rank's tokens, and final_state [N, HV, K, V] with the rows of the sequences that end on this rank and zeros elsewhere:
        the sum over the ranks is the whole.
    """
    group = dist.group.WORLD if group is None else group
    arrays = local.of_one_dtype(Arrays(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu))
    part, needs_grad = _meet(arrays, group, output_final_state, state_v_first, backend, options)
    how = dict(options, A_log=A_log, dt_bias=dt_bias, backend=backend)
    if initial_state is not None and state_v_first:
        arrays = arrays._replace(initial_state=initial_state.transpose(-1, -2))
    o, final_state = _run(arrays, how, part, group, needs_grad)
    if not output_final_state:
        return o, None
    return o, final_state.transpose(-1, -2).clone(memory_format=torch.contiguous_format) if state_v_first else final_state


class Context:
    """What a layer must know of the other slices of its tokens. Slices follow each other in the order of the group's ranks."""

    def __init__(self, group: Any = None):
        self.group = dist.group.WORLD if group is None else group

    def chunk_kda(self, *tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        return chunk_kda(*tensors, group=self.group, **options)

    def all_tokens(self, x: Tensor) -> Tensor:
        return all_tokens(x, self.group)

    def windows(self, inputs: tuple[Tensor, ...], count: int, cu_seqlens: Tensor | None) -> tuple[Tensor | None, list[Tensor]]:
        """For convolutions of inputs [B, T, D] each: cu_seqlens of this slice, and the `count` inputs before it [N, count, D] each."""
        line = torch.cat(inputs, -1)
        tokens = token_counts(line, self.group)
        before = previous_tokens(line, count, self.group, tokens)
        if cu_seqlens is not None:
            begin, starts, stops = sum(tokens[: dist.get_rank(self.group)]), cu_seqlens[:-1], cu_seqlens[1:]
            inside = begin - count + torch.arange(count, device=line.device) >= starts[:, None]  # [N, count]
            goes_on = (starts < begin) & (begin < stops)
            before = torch.where((inside & goes_on[:, None])[..., None], before, 0)
            cu_seqlens = (cu_seqlens - begin).clamp(0, line.shape[1])
        return cu_seqlens, list(before.split([x.shape[-1] for x in inputs], -1))

    def visible(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """[1, T, all tokens]: what each of this slice's tokens sees of all of them, its own sequence up to itself."""
        tokens = token_counts(x, self.group)
        everywhere = torch.arange(sum(tokens), device=x.device)
        here = sum(tokens[: dist.get_rank(self.group)]) + torch.arange(x.shape[1], device=x.device)
        mask = here[:, None] >= everywhere
        if cu_seqlens is not None:
            owner = lambda places: torch.searchsorted(cu_seqlens, places, right=True)
            mask &= owner(here)[:, None] == owner(everywhere)
        return mask[None]


def _meet(
    arrays: Arrays, group: Any, output_final_state: bool, state_v_first: bool, backend: str, options: dict[str, Any]
) -> tuple[Slice, bool]:
    """Check the call here and with the other ranks; this rank's slice of it, and whether gradients will be asked for."""
    facts = dict.fromkeys(("B", "H", "HV", "K", "V", "N", "dtypes", "options", "cu_seqlens", "needs_grad"), 0)
    cu: list[int] | None = None
    refusal: Exception | None = None
    tokens, needs_grad = 0, False
    try:
        if options.get("return_intermediate_states"):
            raise ValueError("return_intermediate_states=True has no meaning across ranks, whose chunks begin at their own first token")
        check_backend_name(backend)
        for name, x in arrays._asdict().items():
            if not isinstance(x, Tensor) and (x is not None or name in ("q", "k", "v", "g", "beta")):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        check_devices(arrays)
        named = dict(options, output_final_state=output_final_state, state_v_first=state_v_first)
        needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arrays[:8])
        problem = make_problem("chunk", arrays, make_options(arrays, **named), needs_grad)
        tokens = problem.T
        cu = None if arrays.cu_seqlens is None else (arrays.cu_seqlens if arrays.cu_seqlens_cpu is None else arrays.cu_seqlens_cpu).tolist()
        dtypes = (problem.dtype, problem.gate_dtype, problem.beta_dtype, problem.state_dtype)
        said = (problem.B, problem.H, problem.HV, problem.K, problem.V, problem.N, fingerprint(dtypes),
                fingerprint((problem.options, backend, problem.has_A_log, problem.has_dt_bias, problem.has_initial_state)), fingerprint(cu),
                int(needs_grad))  # fmt: skip
        facts = dict(zip(facts, said, strict=True))
    except Exception as error:  # of whatever kind: a rank that does not come to the meeting leaves the others waiting
        refusal = error
    device = collective_device(group, getattr(arrays.q, "device", torch.device("cpu")))
    everyone = agree(group, device, tokens, facts, refusal)
    rank = dist.get_rank(group)
    if cu is None:
        return dense_slice(rank, everyone, arrays.q.shape[0]), needs_grad
    check_cu_seqlens(torch.tensor(cu, device="cpu").numpy(), sum(everyone), padding=False)
    return packed_slice(rank, everyone, cu), needs_grad


def _run(arrays: Arrays, how: dict[str, Any], part: Slice, group: Any, needs_grad: bool) -> tuple[Tensor, Tensor]:
    """Tail, head's map, middle, head: the states travel while the middle is computed."""
    tokens = [slice(0, part.head), slice(part.head, part.head + part.middle), slice(part.head + part.middle, None)]
    initial, packed = arrays.initial_state, arrays.cu_seqlens is not None
    o_head = o_middle = o_tail = S_head = S_middle = S_tail = o_map = None
    if part.tail:
        rows = slice(part.last, part.last + 1) if packed else slice(None)
        o_tail, S_tail = _local(arrays, how, tokens[2], None if initial is None else initial[rows])
    nothing = own = _zero_map(arrays)
    if part.carried and (part.through or needs_grad):
        own, o_map = _head_map(arrays, how, tokens[0])
    scan = Scan(group)
    scan.start(own if part.through else nothing if S_tail is None else Affine(nothing.M, S_tail.detach()))
    if part.first < part.last:
        cu = torch.tensor(part.offsets, dtype=torch.int32, device="cpu") if packed else None
        o_middle, S_middle = _local(arrays, how, tokens[1], None if initial is None else initial[part.first : part.last], cu)
    entering = scan.finish()
    if part.carried:
        o_head, S_head = _local(arrays, how, tokens[0], entering)
    if o_head is o_middle is o_tail is None:  # a rank without work still belongs to the graph, for its part in the backward's scan
        o_middle = _local(arrays, how, slice(0, 0), None)[0]
    o = torch.cat([x for x in (o_head, o_middle, o_tail) if x is not None], 1)
    o, S_head, S_tail = _Leave.apply(o, S_head, S_tail, own.M, o_map, part, group)
    return o, _final_states(nothing.b, part, packed, arrays, S_head, S_middle)


def _local(arrays: Arrays, how: dict[str, Any], tokens: slice, state: Tensor | None, cu_seqlens: Tensor | None = None):
    """The plain call on some of this rank's tokens: o and the states [.., K, V] after them."""
    q, k, v, g, beta = (x[:, tokens] for x in arrays[:5])
    cu = None if cu_seqlens is None else cu_seqlens.to(q.device)
    return local.chunk_kda(
        q, k, v, g, beta, initial_state=state, output_final_state=True, cu_seqlens=cu, cu_seqlens_cpu=cu_seqlens, **how
    )  # fmt: skip


def _zero_map(arrays: Arrays) -> Affine:
    """The map of all states to zero: [B, HV, K, K] and [B, HV, K, V] in the compute dtype."""
    B, _, HV, V = arrays.v.shape
    K, dtype = arrays.q.shape[-1], torch.promote_types(arrays.q.dtype, torch.float32)
    return Affine(arrays.q.new_zeros(B, HV, K, K, dtype=dtype), arrays.q.new_zeros(B, HV, K, V, dtype=dtype))


@torch.no_grad()
def _head_map(arrays: Arrays, how: dict[str, Any], tokens: slice) -> tuple[Affine, Tensor]:
    """What the head does to any state: its map, and o_map [B, T, HV, K] with  o = o(state 0) + o_map S  and so  c = o_map^T d_o.

    The recurrence runs on the identity beside the zero state, with values of zero; in the compute dtype, since o_map goes into states.
    """
    zero = _zero_map(arrays)
    K, V = zero.b.shape[-2:]
    q, k, v = (x.to(zero.b.dtype) for x in arrays[:3])
    identity = torch.eye(K, dtype=q.dtype, device=q.device).expand_as(zero.M)
    no_value = torch.zeros_like(v[..., :1]).expand(*v.shape[:-1], K)
    if K + V <= MAX_HEAD_DIM:
        x = arrays._replace(q=q, k=k, v=torch.cat([no_value, v], -1))
        o, S = _local(x, how, tokens, torch.cat([identity, zero.b], -1))
        return Affine(*S.split([K, V], -1)), o[..., :K]
    o, M = _local(arrays._replace(q=q, k=k, v=no_value), how, tokens, identity)
    _, b = _local(arrays._replace(q=q, k=k, v=v), how, tokens, zero.b)
    return Affine(M, b), o


class _Leave(torch.autograd.Function):
    """The identity on what leaves a rank; on the way back it brings in the gradient of the state that went on to the next rank."""

    @staticmethod
    def forward(ctx, o, S_head, S_tail, M, o_map, part, group):
        ctx.save_for_backward(M, o_map)
        ctx.part, ctx.group = part, group
        ctx.shape = (*M.shape[:-1], o.shape[-1])
        return tuple(None if x is None else no_view(x.view_as(x)) for x in (o, S_head, S_tail))

    @staticmethod
    def backward(ctx, d_o, d_head, d_tail):
        (M, o_map), part = ctx.saved_tensors, ctx.part
        c = M.new_zeros(ctx.shape)  # [B, HV, K, V], the gradient of the entering state so far
        if part.carried:
            c = torch.einsum("bthk,bthv->bhkv", o_map, d_o[:, : part.head].to(M.dtype))
            if not part.through:
                c = c + M.mT @ d_head
        scan = Scan(ctx.group, reverse=True)
        scan.start(Affine(M.mT if part.through else torch.zeros_like(M), c))
        d_next = scan.finish()
        d_head = d_head + d_next if part.through else d_head
        d_tail = d_tail + d_next if part.tail else d_tail
        return d_o, d_head, d_tail, None, None, None, None


def _final_states(none: Tensor, part: Slice, packed: bool, arrays: Arrays, S_head, S_middle) -> Tensor:
    """[N, HV, K, V]: the states of the sequences that end here in their rows, zeros in the others."""
    ended = S_head if part.carried and not part.through else None
    if not packed:
        own = S_middle if ended is None else ended
        return none if own is None else own
    N = arrays.cu_seqlens.shape[0] - 1
    before = part.first - (ended is not None)
    pieces = [none.new_zeros(before, *none.shape[1:]), ended, S_middle, none.new_zeros(N - part.last, *none.shape[1:])]
    return torch.cat([x for x in pieces if x is not None])
