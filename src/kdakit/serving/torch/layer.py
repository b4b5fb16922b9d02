"""A KimiDeltaAttention over a pool, on a GPU: its next tokens, moved or drafted, in one launch between the projections.

None where the layer's kernels do not take the call: then the pool's own calls do it, see `ServedModel`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from kdakit import dispatch
from kdakit.layers.torch.fused.step import Carried, Slots, commit_windows, layer_step, takes_step
from kdakit.serving.torch.calls import Draft
from kdakit.serving.torch.pool import StatePool

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


def _commit(pool: StatePool, draft: Draft, accepted: Tensor) -> None:
    """The states as the pool's own kernels do it, and the windows."""
    dispatch.load("triton_gpu").pooled().commit(pool, draft, accepted)
    windows = [pool.windows[name] for name in WINDOWS]
    commit_windows(draft.inputs["row"], windows, _slots(pool, draft.slots), draft.generation, accepted)


_BACKEND: Any = SimpleNamespace(commit=_commit)


def _carried(pool: StatePool) -> Carried | None:
    if tuple(pool.windows) != WINDOWS or pool.storage.scales is not None:
        return None
    q, k, v = pool.windows.values()
    return Carried(q, k, v, pool.storage.states)


def _slots(pool: StatePool, slots: Tensor) -> Slots:
    return Slots(slots, pool.generation, pool.capacity, pool.sizes.state_v_first)
