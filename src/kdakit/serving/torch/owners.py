"""Who has which slot, in one pool or in several that share their slots (`beside`): a change happens in every pool, or in none.

Everything is looked at first, then the tensors change, then what the device knows of the owners, and last the table on the host, which
cannot fail. What raises on the way leaves the table as it was: rows that were written by then are nobody's yet, or their owner is told.
Changes come one after the other, whatever threads they come from: who looks and who writes are then the same.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from kdakit.serving.torch.pool import Snapshot, StatePool

_changing = threading.RLock()  # of all pools: it is held for some microseconds, and pools can be copied


def allocate(pools: Sequence[StatePool], count: int) -> list[int]:
    """Slots with states and windows of zero."""
    with _changing:
        table = pools[0].table
        slots = table.following(count)
        _clear(pools, slots)
        pools[0].publish(slots, 1)
        return table.take(count)


def free(pools: Sequence[StatePool], slots: list[int]) -> None:
    with _changing:
        pools[0].table.check(slots)  # once more: another thread may have changed them since
        pools[0].publish(slots, 1)
        pools[0].table.release(slots)


def reset(pools: Sequence[StatePool], slots: list[int]) -> None:
    """As if they were new."""
    with _changing:
        pools[0].table.check(slots)  # once more: another thread may have changed them since
        _clear(pools, slots)
        pools[0].publish(slots, 2)
        pools[0].table.renew(slots)


def fork(pools: Sequence[StatePool], source: int, count: int) -> list[int]:
    """New slots with copies of one."""
    with _changing:
        table = pools[0].table
        table.check(source)
        slots = table.following(count)
        index = pools[0].index(slots)
        for pool in pools:
            pool.settle(pool.index([source]))
            _forget(pool, index)
            for x in pool.tensors():
                x[index] = x[source].clone()
        pools[0].publish(slots, 1)
        return table.take(count)


def restore(pools: Sequence[StatePool], slots: list[int], snapshots: Sequence[Snapshot]) -> None:
    """Slots overwritten with the rows of a snapshot a pool."""
    with _changing:
        pools[0].table.check(slots)  # once more: another thread may have changed them since
        if len(snapshots) != len(pools):
            raise ValueError(f"snapshots must be one for each of the {len(pools)} layers, got {len(snapshots)}")
        for pool, snapshot in zip(pools, snapshots, strict=True):
            pool.check_snapshot(snapshot, len(slots))
        index = pools[0].index(slots)
        for pool, snapshot in zip(pools, snapshots, strict=True):
            _forget(pool, index)
            for x, rows in zip(pool.tensors(), snapshot.tensors, strict=True):
                x[index] = rows.to(x.device)
        pools[0].publish(slots, 2)
        pools[0].table.renew(slots)


def _clear(pools: Sequence[StatePool], slots: list[int]) -> None:
    index = pools[0].index(slots)
    for pool in pools:
        _forget(pool, index)
        for x in pool.tensors():
            x[index] = 0


def _forget(pool: StatePool, index: Tensor) -> None:
    """What waited for a state that is another now."""
    if pool.pending is not None:
        pool.pending.forget(index)
