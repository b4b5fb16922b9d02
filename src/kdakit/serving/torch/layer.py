"""A KimiDeltaAttention over a pool, on a GPU: its next tokens, moved or drafted, in one launch between the projections; prompts in few.

None where the layer's kernels do not take the call: then the pool's own calls do it, see `ServedModel`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from kdakit import dispatch
from kdakit.layers.torch import Rows as Packing
from kdakit.layers.torch.fused.layer import fused_dtype, fused_inputs, fused_output
from kdakit.layers.torch.fused.step import Carried, Slots, commit_windows, layer_step, takes_step
from kdakit.problem import Arrays
from kdakit.serving.torch.calls import Draft
from kdakit.serving.torch.pool import Rows, StatePool
from kdakit.serving.torch.prefill import Planned, plan, run_planned

WINDOWS = ("q", "k", "v")


Whole = Callable[[Any, StatePool, Tensor, Tensor], Tensor | None]


def in_one(kind: str, drafts: list[Draft]) -> Whole:
    """call(layer, pool, slots, x) -> o [N, T, hidden_size], or None. kind: 'decode', or 'verify', which adds a draft to `drafts`."""

    def verify(*given) -> Tensor | None:
        made = verify_layer(*given)
        if made is None:
            return None
        drafts.append(made[1])
        return made[0]

    return decode_layer if kind == "decode" else verify


def decode_layer(layer: Any, pool: StatePool, slots: Tensor, x: Tensor) -> Tensor | None:
    """o [N, T, hidden_size] of the next tokens x of each row; states and windows of its slot move on in place."""
    carried = _carried(pool)
    if carried is None or not takes_step(layer, x, *carried):
        return None
    return layer_step(layer, x, carried, carried, _slots(pool, slots))[0]


def verify_layer(layer: Any, pool: StatePool, slots: Tensor, x: Tensor) -> tuple[Tensor, Draft] | None:
    """o of draft tokens, and a draft for kdakit.serving.torch.commit: nothing moves before."""
    carried = _carried(pool)
    if carried is None or not takes_step(layer, x, *carried):
        return None
    o, row, log = layer_step(layer, x, carried, carried, _slots(pool, slots), draft=True)
    if log is None:
        raise RuntimeError("a draft has a log")
    kept = dispatch.load("triton_gpu").pooled().Log(log.k, log.decay, log.u)
    return o, Draft(pool, None, log.slots, log.generation, kept, {"row": row}, _BACKEND, x.shape[1])


@dataclass
class Prompts:
    """Packed tokens of some sequences on their way through a model's layers: what is the same in all of them is worked out once."""

    slots: Tensor  # [N]
    cu_seqlens: Tensor  # [N + 1]
    cu_seqlens_cpu: Tensor
    backend: str
    rows: Rows | None = None
    planned: Planned | None = None


def prefill_layer(layer: Any, pool: StatePool, prompts: Prompts, x: Tensor) -> Tensor | None:
    """o [1, T, hidden_size] of packed tokens x; states and windows of their slots move on."""
    dtype = fused_dtype(layer, x)
    if dtype is None or _carried(pool) is None:
        return None
    if prompts.rows is None:
        prompts.rows = pool.rows(prompts.slots)
    s, place = layer.sizes, prompts.rows.place
    windows = [pool.windows[name][place] for name in WINDOWS]
    made = fused_inputs(layer, x.to(dtype), Packing(cu_seqlens=prompts.cu_seqlens), windows)
    q, k, v = (y.unflatten(-1, (-1, d)) for y, d in zip(made[:3], (s.head_dim, s.head_dim, s.head_v_dim), strict=True))
    arrays = Arrays(
        q, k, v, made.g.unflatten(-1, (-1, s.head_dim)), made.beta, layer.A_log, layer.dt_bias, None, prompts.cu_seqlens,
        prompts.cu_seqlens_cpu,
    )  # fmt: skip
    if prompts.planned is None:
        prompts.planned = plan(pool, len(place), arrays, prompts.backend, operator_options(layer))
    o = run_planned(pool, prompts.rows, arrays, {}, prompts.planned)
    for name, after in zip(WINDOWS, made.windows, strict=True):
        if after is not None:
            pool.windows[name][place] = after
    if made.gate is None:
        raise RuntimeError("the layer's kernels hand on what the output gate gets")
    return layer.o_proj(fused_output(layer, o, made.gate).flatten(-2))


def operator_options(layer: Any) -> dict[str, Any]:
    s = layer.sizes
    return dict(
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=s.allow_neg_eigval,
        safe_gate=s.safe_gate, lower_bound=s.lower_bound,
    )  # fmt: skip


def _commit(pool: StatePool, draft: Draft, accepted: Tensor) -> None:
    """The states as the pool's own kernels do it, and the windows."""
    dispatch.load("triton_gpu").pooled().commit(pool, draft, accepted)
    windows = [pool.windows[name] for name in WINDOWS]
    commit_windows(draft.inputs["row"], windows, _slots(pool, draft.slots), draft.generation, accepted)


_BACKEND: Any = SimpleNamespace(commit=_commit)


def _carried(pool: StatePool) -> Carried | None:
    """None where the layer's kernels do not know how the pool keeps its states."""
    if tuple(pool.windows) != WINDOWS or pool.storage.scales is not None or pool.pending is not None:
        return None
    q, k, v = pool.windows.values()
    return Carried(q, k, v, pool.storage.states)


def _slots(pool: StatePool, slots: Tensor) -> Slots:
    return Slots(slots, pool.generation, pool.capacity, pool.sizes.state_v_first)
