"""The pool: states and convolution windows of many sequences, by slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kdakit.problem import checks_enabled
from kdakit.serving.arguments import PoolSizes
from kdakit.serving.slots import SlotTable
from kdakit.serving.torch.storage import Storage

Slots = Iterable[int] | Tensor


class Snapshot(NamedTuple):
    """The contents of some slots as they are stored: restoring gives the same bits."""

    tensors: list[Tensor]

    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.tensors)


class Rows(NamedTuple):
    """Slots as a call uses them."""

    place: Tensor  # [N] int64; a row that is skipped has the pool's last place, which belongs to nobody
    valid: Tensor  # [N] bool
    generation: Tensor  # [N] int32, of the slot's owner


class StatePool:
    """Preallocated states [slots, HV, K, V] and convolution windows. Calls read and write them in place.

    Slots given as a list (or ints, or a NumPy array) are checked on the host: each must be allocated, none twice; -1 is a row to skip.
    Slots given as a tensor are looked at on its device only, so that a CUDA graph can hold the call: a row whose slot is -1, out of range,
    free, or named by an earlier row too is skipped. A skipped row outputs zeros and touches no state. KDAKIT_CHECKS=1 checks tensors too.

    Args:
        slots: how many sequences there is room for.
        HV, K, V: value heads and head sizes.
        dtype: of the stored states: float32, bfloat16, float16, int8, or float64 for float64 inputs. Arithmetic is float32 (float64).
        state_v_first: stored as [V, K].
        windows: {name: (width - 1, channels)} of the short convolutions whose last inputs each sequence keeps.
        feedback: 8-bit storage with a second byte for what rounding left.
    """

    def __init__(
        self, slots: int, HV: int, K: int, V: int, dtype: torch.dtype = torch.float32, state_v_first: bool = False,
        windows: Mapping[str, tuple[int, int]] | None = None, window_dtype: torch.dtype | None = None, feedback: bool = False,
        device: Any = None,
    ):  # fmt: skip
        self.sizes = PoolSizes(HV, K, V, str(dtype).rpartition(".")[2], state_v_first, feedback)
        self.table = SlotTable(slots)
        rows = self.table.capacity + 1
        self.storage = Storage(rows, self.sizes, device)
        kind = window_dtype or getattr(torch, self.sizes.compute_dtype)
        self.windows = {name: torch.zeros(rows, *shape, dtype=kind, device=device) for name, shape in (windows or {}).items()}
        self.generation = torch.zeros(rows, dtype=torch.int32, device=device)

    @property
    def device(self) -> torch.device:
        return self.generation.device

    @property
    def capacity(self) -> int:
        return self.table.capacity

    @property
    def free_slots(self) -> int:
        return self.table.free

    def bytes_per_slot(self) -> int:
        return sum(x[0].numel() * x.element_size() for x in self.tensors())

    def allocate(self, count: int = 1) -> list[int]:
        """Slots of `count` new sequences, their states and windows zero. PoolFull where there are not as many."""
        slots = self.table.take(count)
        index = self._index(slots)
        for x in self.tensors():
            x[index] = 0
        self._publish(slots, index)
        return slots

    def free(self, slots: Iterable[int] | int) -> None:
        """Give slots back. A call that still names one skips it."""
        listed = self.table.check(slots)
        self.table.release(listed)
        self._publish(listed, self._index(listed))

    def fork(self, slot: int, count: int = 1) -> list[int]:
        """`count` new slots with copies of one."""
        (source,) = self.table.check(slot)
        slots = self.table.take(count)
        index = self._index(slots)
        for x in self.tensors():
            x[index] = x[source].clone()
        self._publish(slots, index)
        return slots

    def snapshot(self, slots: Iterable[int] | int) -> Snapshot:
        """A copy of some slots, to restore into any slots later."""
        index = self._index(self.table.check(slots))
        return Snapshot([x[index] for x in self.tensors()])

    def restore(self, slots: Iterable[int] | int, snapshot: Snapshot) -> None:
        """Overwrite slots with a snapshot's rows, in order."""
        listed, tensors = self.table.check(slots), self.tensors()
        shapes = [tuple(x.shape[1:]) for x in tensors]
        if [tuple(x.shape[1:]) for x in snapshot.tensors] != shapes:
            raise ValueError(f"snapshot must be of a pool of the same sizes {shapes}, got {[tuple(x.shape[1:]) for x in snapshot.tensors]}")
        if len(snapshot.tensors[0]) != len(listed):
            raise ValueError(f"snapshot must hold {len(listed)} rows, one for each slot, got {len(snapshot.tensors[0])}")
        index = self._index(listed)
        for x, rows in zip(tensors, snapshot.tensors, strict=True):
            x[index] = rows.to(x)
        self.table.renew(listed)
        self._publish(listed, index)

    def states(self, slots: Iterable[int] | int) -> Tensor:
        """The states [n, HV, K, V] of some slots, in the compute dtype."""
        return self.storage.read(self._index(self.table.check(slots)))

    def device_slots(self, slots: Slots) -> Tensor:
        """Slots as an integer tensor on the pool's device; what the host can see is checked."""
        if not isinstance(slots, Tensor):
            return self._index(self.table.check(slots, skip=True))
        if slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"slots must be [N] int32 or int64, got {tuple(slots.shape)} {slots.dtype}")
        if slots.device != self.device:
            raise ValueError(f"slots must be on the pool's device {self.device}, got {slots.device}; a list is taken too")
        if checks_enabled():
            self.table.check(slots.tolist(), skip=True)
        return slots

    def rows(self, slots: Tensor) -> Rows:
        """Who is skipped, decided on the device."""
        s = slots.long()
        inside = (s >= 0) & (s < self.capacity)
        place = torch.where(inside, s, self.capacity)
        generation = self.generation[place]
        repeated = (s[:, None] == s).tril(-1).any(1)
        valid = inside & (generation % 2 == 1) & ~repeated
        return Rows(torch.where(valid, place, self.capacity), valid, torch.where(valid, generation, -1))

    def shift(self, rows: Rows, inputs: Mapping[str, Tensor] | None, accepted: Tensor | None = None) -> None:
        """Windows move on by the first `accepted` (all if None) of inputs [N, T, D]: the last width - 1 of (window, inputs) stay."""
        for name, x in (inputs or {}).items():
            window = self.window(name, x)
            keep = window.shape[1]
            line = torch.cat([window[rows.place], x.to(window.dtype)], 1)  # [N, keep + T, D]
            first = torch.full_like(rows.place, x.shape[1]) if accepted is None else accepted.long()
            place = first[:, None] + torch.arange(keep, device=x.device)  # [N, keep]
            window[rows.place] = line.gather(1, place[..., None].expand(-1, -1, x.shape[2]))

    def window(self, name: str, x: Tensor) -> Tensor:
        if name not in self.windows:
            raise ValueError(f"window inputs must be of {', '.join(self.windows) or 'none: the pool has no windows'}, got {name!r}")
        window = self.windows[name]
        if x.dim() != 3 or x.shape[2] != window.shape[2]:
            raise ValueError(f"the inputs of window {name!r} must be [N, T, D] with D = {window.shape[2]}, got {tuple(x.shape)}")
        return window

    def tensors(self) -> list[Tensor]:
        """Everything that is kept by slot."""
        return [*self.storage.tensors(), *self.windows.values()]

    def _index(self, slots: list[int]) -> Tensor:
        return torch.tensor(slots, dtype=torch.int64, device=self.device)

    def _publish(self, slots: list[int], index: Tensor) -> None:
        """Generations to the device."""
        self.generation[index] = torch.tensor([self.table.generation[s] for s in slots], dtype=torch.int32, device=self.device)
