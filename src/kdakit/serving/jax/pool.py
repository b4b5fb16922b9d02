"""The pool as a value: calls take one and return the next, in the same memory where its buffers are donated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kdakit.problem import checks_enabled
from kdakit.serving.arguments import PoolSizes
from kdakit.serving.jax import storage as storages
from kdakit.serving.jax.storage import Storage
from kdakit.serving.slots import SlotTable


class Contents(NamedTuple):
    """All that is kept by slot, and the slots' generations."""

    storage: Storage
    windows: dict[str, Any]  # {name: [rows, width - 1, D]}, or [rows, width - 1, heads, K]
    generation: Any  # [rows] int32, odd while a slot is taken


class Rows(NamedTuple):
    """Slots as a call uses them."""

    place: Any  # [N]; a row that is skipped has the pool's last place, which belongs to nobody
    valid: Any  # [N] bool
    generation: Any  # [N] int32


class Snapshot(NamedTuple):
    """The contents of some slots as they are stored."""

    storage: Storage
    windows: dict[str, Any]

    def bytes(self) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(self))


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, eq=False)
class StatePool:
    """States [slots, HV, K, V] and convolution windows; make one with `StatePool.create`.

    A pool is a pytree: calls can be jitted around it. Arrays are functional, and a pool that a call has taken is used up, its memory being
    that of the next one. Which slots are taken is written in one table on the host, which all pools of a chain share: allocate, free, fork
    and restore belong outside jit. Slots as a list are checked on the host; as an array they are looked at on the device, where a row
    whose slot is -1, out of range, free, or named by an earlier row is skipped: its output is zero and no state is touched.
    """

    contents: Contents
    sizes: PoolSizes
    table: Any  # SlotTable; None inside the calls' own programs, which are the same for all pools of one size

    @staticmethod
    def create(
        slots: int, HV: int, K: int, V: int, dtype: Any = "float32", state_v_first: bool = False,
        windows: Mapping[str, tuple[int, ...]] | None = None, feedback: bool = False,
    ) -> StatePool:  # fmt: skip
        """Arguments as in kdakit.serving.torch.StatePool; windows may also be (width - 1, heads, K), as a layer's kernel wants them."""
        sizes, table = PoolSizes(HV, K, V, jnp.dtype(dtype).name, state_v_first, feedback), SlotTable(slots)
        rows = table.capacity + 1
        made = {name: jnp.zeros((rows, *shape), sizes.compute_dtype) for name, shape in (windows or {}).items()}
        return StatePool(Contents(storages.empty(rows, sizes), made, jnp.zeros(rows, jnp.int32)), sizes, table)

    def tree_flatten(self):
        return (self.contents,), (self.sizes, self.table)

    @classmethod
    def tree_unflatten(cls, fixed, children):
        return cls(children[0], *fixed)

    @property
    def capacity(self) -> int:
        return self.contents.generation.shape[0] - 1

    @property
    def free_slots(self) -> int:
        return self.table.free

    def bare(self) -> StatePool:
        """Without the table."""
        return StatePool(self.contents, self.sizes, None)

    def of(self, other: StatePool) -> StatePool:
        """These contents under another pool's table."""
        return StatePool(self.contents, self.sizes, other.table)

    def replace(self, **changes) -> StatePool:
        """The same slots with other contents."""
        return StatePool(self.contents._replace(**changes), self.sizes, self.table)

    def allocate(self, count: int = 1) -> tuple[list[int], StatePool]:
        """Slots of `count` new sequences, their states and windows zero, and the pool in which they are."""
        slots = self.table.following(count)
        zero = lambda x: x.at[np.array(slots, np.int32)].set(0)
        pool = self._with(jax.tree.map(zero, self._kept()), slots, 1)
        return self.table.take(count), pool  # last, as it cannot fail: a pool that is used up takes no slot

    def free(self, slots: Iterable[int] | int) -> StatePool:
        listed = self.table.check(slots)
        pool = self._with(self._kept(), listed, 1)
        self.table.release(listed)
        return pool

    def reset(self, slots: Iterable[int] | int) -> StatePool:
        """States and windows of slots are zero again; their owners stay."""
        listed = self.table.check(slots)
        zero = lambda x: x.at[np.array(listed, np.int32)].set(0)
        pool = self._with(jax.tree.map(zero, self._kept()), listed, 2)
        self.table.renew(listed)
        return pool

    def fork(self, slot: int, count: int = 1) -> tuple[list[int], StatePool]:
        """`count` new slots with copies of one."""
        (source,) = self.table.check(slot)
        slots = self.table.following(count)
        copy = lambda x: x.at[np.array(slots, np.int32)].set(x[source])
        pool = self._with(jax.tree.map(copy, self._kept()), slots, 1)
        return self.table.take(count), pool

    def snapshot(self, slots: Iterable[int] | int) -> Snapshot:
        index = np.array(self.table.check(slots), np.int32)
        return jax.tree.map(lambda x: x[index], self._kept())

    def restore(self, slots: Iterable[int] | int, snapshot: Snapshot) -> StatePool:
        """Slots overwritten with a snapshot's rows, in order."""
        listed = self.table.check(slots)
        if not isinstance(snapshot, Snapshot):
            raise TypeError(f"snapshot must be a Snapshot of a pool, got {type(snapshot).__name__}")
        describe = lambda tree: jax.tree.map(lambda x: (x.shape[1:], x.dtype.name), tree)
        if describe(snapshot) != describe(self._kept()):
            raise ValueError(f"snapshot must be of a pool of the same sizes and dtypes {describe(self._kept())}, got {describe(snapshot)}")
        for rows in {x.shape[0] for x in jax.tree.leaves(snapshot)} - {len(listed)}:
            raise ValueError(f"snapshot must hold {len(listed)} rows, one for each slot, got {rows}")
        put = lambda x, rows: x.at[np.array(listed, np.int32)].set(rows)
        pool = self._with(jax.tree.map(put, self._kept(), snapshot), listed, 2)
        self.table.renew(listed)
        return pool

    def states(self, slots: Iterable[int] | int):
        """The states [n, HV, K, V] of some slots, in the compute dtype."""
        return storages.read(self.sizes, self.contents.storage, np.array(self.table.check(slots), np.int32))

    def device_slots(self, slots: Any):
        """Slots as an integer array; what the host can see is checked."""
        if not isinstance(slots, jax.Array):
            return jnp.asarray(self.table.check(slots, skip=True), jnp.int32)
        if slots.ndim != 1 or not jnp.issubdtype(slots.dtype, jnp.integer):
            raise TypeError(f"slots must be [N] integers, got {slots.shape} {slots.dtype}")
        if checks_enabled() and not isinstance(slots, jax.core.Tracer):
            self.table.check(np.asarray(slots).tolist(), skip=True)
        return slots

    def rows(self, slots) -> Rows:
        """Who is skipped, decided on the device."""
        inside = (slots >= 0) & (slots < self.capacity)
        place = jnp.where(inside, slots, self.capacity)
        generation = self.contents.generation[place]
        repeated = jnp.tril(slots[:, None] == slots, -1).any(1)
        valid = inside & (generation % 2 == 1) & ~repeated
        return Rows(jnp.where(valid, place, self.capacity), valid, jnp.where(valid, generation, -1))

    def shifted(self, rows: Rows, inputs: Mapping[str, Any], accepted) -> dict[str, Any]:
        """Windows moved on by the first accepted[n] of inputs [N, T, ..]."""
        windows = dict(self.contents.windows)
        for name, x in inputs.items():
            window = windows[name]
            keep = window.shape[1]
            line = jnp.concatenate([window[rows.place], x.astype(window.dtype)], 1)  # [N, keep + T, ..]
            place = accepted[:, None] + jnp.arange(keep)  # [N, keep]
            windows[name] = window.at[rows.place].set(jnp.take_along_axis(line, alongside(place, line), 1))
        return windows

    def check_inputs(self, inputs: Mapping[str, Any] | None, rows: int, tokens: int) -> dict[str, Any]:
        """Inputs of the convolutions: [rows, tokens, ..] as q has them, for windows that the pool has."""
        if inputs is not None and not isinstance(inputs, Mapping):
            raise TypeError(f"window_inputs must be a mapping of names to arrays, got {type(inputs).__name__}")
        windows = self.contents.windows
        made = {name: jnp.asarray(x) for name, x in (inputs or {}).items()}
        for name, x in made.items():
            if name not in windows:
                raise ValueError(f"window inputs must be of {', '.join(windows) or 'none: the pool has no windows'}, got {name!r}")
            if not jnp.issubdtype(x.dtype, jnp.floating):
                raise TypeError(f"the inputs of window {name!r} must be floats, got {x.dtype}")
            want = (rows, tokens, *windows[name].shape[2:])
            if x.shape != want:
                sizes = "D" if len(want) == 3 else "heads, K"
                raise ValueError(f"the inputs of window {name!r} must be [B, T, {sizes}] = {want}, got {x.shape}")
        return made

    def _kept(self) -> Snapshot:
        return Snapshot(self.contents.storage, self.contents.windows)

    def _with(self, kept: Snapshot, slots: list[int], changes: int) -> StatePool:
        """The next pool, the slots' generations as they will be after so many changes of the table."""
        new = np.array(self.table.after(slots, changes), np.int32)
        generation = self.contents.generation.at[np.array(slots, np.int32)].set(new)
        return StatePool(Contents(kept.storage, kept.windows, generation), self.sizes, self.table)


def alongside(place, x):
    """Indices [N, n] for take_along_axis of x [N, T, ..]."""
    return place.reshape(*place.shape, *[1] * (x.ndim - 2))
