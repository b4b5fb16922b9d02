"""The pool: states and convolution windows of many sequences, by slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kdakit import dispatch
from kdakit.problem import checks_enabled
from kdakit.serving.arguments import PoolSizes
from kdakit.serving.slots import SlotTable
from kdakit.serving.torch import owners
from kdakit.serving.torch.pending import Pending
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
        beside: a pool whose slots are this one's too, as those of a model's layers are: a sequence has the same slot in all of them, one
            table and one tensor say whose it is. Slots are then taken and given back for all at once (kdakit.serving.torch.owners).
        pending: 2 .. 8: on a GPU a `decode` of one token reads a state, but only every so many tokens is it written; until then the tokens
            wait in a log of float32, and who asks for a state has it written first. Stored in fewer bits it is rounded as seldom.
    """

    def __init__(
        self, slots: int, HV: int, K: int, V: int, dtype: torch.dtype = torch.float32, state_v_first: bool = False,
        windows: Mapping[str, tuple[int, int]] | None = None, window_dtype: torch.dtype | None = None, feedback: bool = False,
        device: Any = None, beside: StatePool | None = None, pending: int = 0,
    ):  # fmt: skip
        self.sizes = PoolSizes(HV, K, V, str(dtype).rpartition(".")[2], state_v_first, feedback)
        self.table: SlotTable = SlotTable(slots) if beside is None else beside.table
        rows = self.table.capacity + 1
        self.storage = Storage(rows, self.sizes, device)
        kind = window_dtype or getattr(torch, self.sizes.compute_dtype)
        self.windows = {name: torch.zeros(rows, *shape, dtype=kind, device=device) for name, shape in (windows or {}).items()}
        self.pending: Pending | None = Pending(pending, rows, self.sizes, device) if pending else None
        fresh = torch.zeros(rows, dtype=torch.int32, device=device)
        self.generation: Tensor = fresh if beside is None else beside.generation

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
        more = [] if self.pending is None else self.pending.tensors()
        return sum(x[0].numel() * x.element_size() for x in [*self.tensors(), *more])

    def allocate(self, count: int = 1) -> list[int]:
        """Slots of `count` new sequences, their states and windows zero. PoolFull where there are not as many."""
        return owners.allocate([self], count)

    def free(self, slots: Iterable[int] | int) -> None:
        """Give slots back. A call that still names one skips it."""
        owners.free([self], self.table.check(slots))

    def reset(self, slots: Iterable[int] | int) -> None:
        """States and windows of slots are zero again; their owners stay."""
        owners.reset([self], self.table.check(slots))

    def fork(self, slot: int, count: int = 1) -> list[int]:
        """`count` new slots with copies of one."""
        (source,) = self.table.check(slot)
        return owners.fork([self], source, count)

    def snapshot(self, slots: Iterable[int] | int) -> Snapshot:
        """A copy of some slots, to restore into any slots later."""
        index = self.index(self.table.check(slots))
        self.settle(index)
        return Snapshot([x[index] for x in self.tensors()])

    def restore(self, slots: Iterable[int] | int, snapshot: Snapshot) -> None:
        """Overwrite slots with a snapshot's rows, in order."""
        owners.restore([self], self.table.check(slots), [snapshot])

    def check_snapshot(self, snapshot: Snapshot, count: int) -> None:
        """`count` rows of a pool like this one."""
        if not isinstance(snapshot, Snapshot):
            raise TypeError(f"snapshot must be a Snapshot of a pool, got {type(snapshot).__name__}")
        describe = lambda tensors: [(tuple(x.shape[1:]), str(x.dtype).removeprefix("torch.")) for x in tensors]
        wanted, got = describe(self.tensors()), describe(snapshot.tensors)
        if got != wanted:
            raise ValueError(f"snapshot must be of a pool of the same sizes and dtypes {wanted}, got {got}")
        for x in snapshot.tensors:
            if len(x) != count:
                raise ValueError(f"snapshot must hold {count} rows, one for each slot, got {len(x)}")

    def states(self, slots: Iterable[int] | int) -> Tensor:
        """The states [n, HV, K, V] of some slots, in the compute dtype."""
        index = self.index(self.table.check(slots))
        self.settle(index)
        return self.storage.read(index)

    def device_slots(self, slots: Slots) -> Tensor:
        """Slots as an integer tensor on the pool's device; what the host can see is checked."""
        if not isinstance(slots, Tensor):
            return self.index(self.table.check(slots, skip=True))
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

    def settle(self, slots: Tensor) -> None:
        """No token of these slots waits any longer: their states are what `decode` has left. Those to skip are skipped."""
        if self.pending is not None and self.pending.possible:
            rows = self.rows(slots)
            accepted, log = self.pending.waiting(rows.place)
            slots = torch.where(rows.valid, rows.place, -1)
            self.pending.forget(rows.place)  # before they are written: never twice, whatever raises
            dispatch.load("triton_gpu").pooled().write_pending(self, slots, rows.generation, accepted, log)

    def shift(self, rows: Rows, inputs: Mapping[str, Tensor], accepted: Tensor | None = None) -> None:
        """Windows move on by the first `accepted` (all if None) of inputs [N, T, D]: the last width - 1 of (window, inputs) stay."""
        for name, x in inputs.items():
            window = self.windows[name]
            keep = window.shape[1]
            line = torch.cat([window[rows.place], x.to(window.dtype)], 1)  # [N, keep + T, D]
            first = torch.full_like(rows.place, x.shape[1]) if accepted is None else accepted.long()
            place = first[:, None] + torch.arange(keep, device=x.device)  # [N, keep]
            window[rows.place] = line.gather(1, place[..., None].expand(-1, -1, x.shape[2]))

    def check_inputs(self, inputs: Mapping[str, Tensor] | None, rows: int, tokens: int) -> dict[str, Tensor]:
        """Inputs of the convolutions: [rows, tokens, D] as q has them, for windows that the pool has. Looked at before any state moves."""
        if inputs is not None and not isinstance(inputs, Mapping):
            raise TypeError(f"window_inputs must be a mapping of names to tensors, got {type(inputs).__name__}")
        for name, x in (inputs or {}).items():
            if name not in self.windows:
                raise ValueError(f"window inputs must be of {', '.join(self.windows) or 'none: the pool has no windows'}, got {name!r}")
            if not isinstance(x, Tensor) or not x.is_floating_point():
                raise TypeError(f"the inputs of window {name!r} must be a tensor of floats, got {getattr(x, 'dtype', type(x).__name__)}")
            want = (rows, tokens, self.windows[name].shape[2])
            if tuple(x.shape) != want:
                raise ValueError(f"the inputs of window {name!r} must be [B, T, D] = {want}, got {tuple(x.shape)}")
            if x.device != self.device:
                raise ValueError(f"the inputs of window {name!r} must be on the pool's device {self.device}, got {x.device}")
        return dict(inputs or {})

    def tensors(self) -> list[Tensor]:
        """Everything that is kept by slot, once no token waits."""
        return [*self.storage.tensors(), *self.windows.values()]

    def seen_by_kernels(self) -> list[Tensor]:
        """Everything that a decode reads or writes."""
        return [*self.storage.tensors(), self.generation, *([] if self.pending is None else self.pending.tensors())]

    def index(self, slots: list[int]) -> Tensor:
        return torch.tensor(slots, dtype=torch.int64, device=self.device)

    def publish(self, slots: list[int], changes: int) -> None:
        """Generations to the device, as they will be after so many changes: the table follows when everything else has gone well."""
        new = torch.tensor(self.table.after(slots, changes), dtype=torch.int32, device=self.device)
        self.generation[self.index(slots)] = new
