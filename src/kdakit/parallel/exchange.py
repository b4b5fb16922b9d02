"""What ranks tell each other: that they agree on the call, and the state that enters each of them.

A slice maps the state that enters it to the one that leaves it,  S_out = M S_in + b.  Such maps compose, so the state that enters rank r
comes from a scan over the ranks in 1 + ceil(log2(ranks - 1)) messages of one map each, whatever the length of the slices.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Traffic:
    """Bytes and messages that this process has sent while `count_traffic` was on."""

    def __init__(self) -> None:
        self.bytes = 0
        self.messages = 0


_counting: list[Traffic] = []


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """with count_traffic() as sent: ...; sent.bytes is what the states' exchange has put on the wire."""
    traffic = Traffic()
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        _counting.remove(traffic)


def scan_bytes(ranks: int, rows: int, HV: int, K: int, V: int, itemsize: int = 4) -> int:
    """The most that one rank sends for one scan: a map [K, K + V] per row and head, to 1 + ceil(log2(ranks - 1)) others."""
    messages = 0 if ranks < 2 else 1 + max(ranks - 2, 0).bit_length()
    return messages * rows * HV * K * (K + V) * itemsize


def fingerprint(value: Any) -> int:
    """A number by which ranks compare what is no number."""
    return zlib.crc32(repr(value).encode())


def collective_device(group: Any, device: torch.device) -> torch.device:
    """Where a group's collectives take small tensors from: the host, unless the group knows only the accelerator."""
    return device if "gloo" not in dist.get_backend_config(group) else torch.device("cpu")


def agree(group: Any, device: torch.device, tokens: int, facts: dict[str, int], refusal: Exception | None) -> list[int]:
    """Every rank's token count, once all ranks have said the same of everything else; otherwise the same error on all of them.

    `refusal`: what this rank has against its own call. It is raised here, and the others learn that it was.
    """
    mine = torch.tensor([refusal is not None, tokens, *facts.values()], dtype=torch.int64, device=device)
    said = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(said, mine, group=group)
    rows = torch.stack(said).tolist()
    if refusal is not None:
        raise refusal
    refused = [rank for rank, row in enumerate(rows) if row[0]]
    if refused:
        raise ValueError(f"the call was refused on rank {', '.join(map(str, refused))} of the group; the error there says why")
    for place, name in enumerate(facts, 2):
        values = [row[place] for row in rows]
        if len(set(values)) > 1:
            raise ValueError(f"{name} must be the same on every rank of the group, got {values}")
    return [row[1] for row in rows]


class Affine(NamedTuple):
    """S -> M S + b for every row and head. Where M is zero nothing comes through, be it NaN: it belongs to another sequence, or to one
    whose gates have forgotten all."""

    M: Tensor  # [R, HV, K, K]
    b: Tensor  # [R, HV, K, V]

    def shut(self) -> Tensor:
        """[R, HV, 1, 1]: whether nothing comes through."""
        return (self.M == 0).flatten(-2).all(-1)[..., None, None]

    def after(self, earlier: Affine) -> Affine:
        shut = self.shut()
        M, b = self.M @ earlier.M, self.M @ earlier.b
        return Affine(M.masked_fill(shut | earlier.shut(), 0), b.masked_fill(shut, 0) + self.b)


class Scan:
    """The value before each rank of the ranks' composed maps, from zero before the first: `start`, other work, `finish`.

    `reverse`: from the last rank to the first, for gradients. The order of the products depends on nothing but the number of ranks.
    """

    def __init__(self, group: Any, reverse: bool = False):
        self.group, self.size = group, dist.get_world_size(group)
        rank = dist.get_rank(group)
        self.sign = -1 if reverse else 1
        self.place = self.size - 1 - rank if reverse else rank

    def start(self, own: Affine) -> None:
        """Send this rank's map to the next one; then the first place holds none, and takes no part in what follows."""
        self.pending = self._exchange(own, 1, first=0)

    def finish(self) -> Tensor:
        before = self._receive()
        distance = 1
        while distance < self.size - 1:
            self.pending = self._exchange(before, distance, first=1)
            before = before.after(self._receive())
            distance *= 2
        return before.b

    def _exchange(self, own: Affine, distance: int, first: int):
        """From places first.. : own map to the one `distance` further, that of the one as far behind into a buffer."""
        packed = torch.cat(own, -1).contiguous()  # [R, HV, K, K + V]
        incoming = torch.zeros_like(packed)  # from nowhere: the map to zero
        operations = []
        if first <= self.place < self.size - distance:
            operations.append(dist.P2POp(dist.isend, packed, group=self.group, group_peer=self._rank(self.place + distance)))
            for traffic in _counting:
                traffic.bytes += packed.numel() * packed.element_size()
                traffic.messages += 1
        if self.place >= first + distance:
            operations.append(dist.P2POp(dist.irecv, incoming, group=self.group, group_peer=self._rank(self.place - distance)))
        return dist.batch_isend_irecv(operations) if operations else [], packed, incoming, own.M.shape[-1]

    def _receive(self) -> Affine:
        requests, _, incoming, K = self.pending
        for request in requests:
            request.wait()
        return Affine(*incoming.split([K, incoming.shape[-1] - K], -1))

    def _rank(self, place: int) -> int:
        return self.size - 1 - place if self.sign < 0 else place
