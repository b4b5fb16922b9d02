"""A few integers between host and device: page-locked memory that is allocated once, and copies for which nobody waits too early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Exchange:
    """`there` on the device and as many integers on the host."""

    def __init__(self, there: Tensor):
        self.there, on_gpu = there, there.is_cuda
        self.here = torch.zeros(there.shape, dtype=there.dtype, device="cpu", pin_memory=on_gpu)
        self.numbers = self.here.numpy().reshape(-1)  # the same memory
        self.copied: Any = torch.cuda.Event() if on_gpu else None

    def write(self, numbers: Sequence[int], filler: int, start: int = 0, stop: int | None = None) -> None:
        """On the host, into the places start .. stop; those that are left of them get the filler."""
        self.wait()
        part = self.numbers[start:stop]
        part[: len(numbers)] = numbers
        part[len(numbers) :] = filler

    def send(self) -> None:
        """What has been written is there for whatever the device does next."""
        self.there.copy_(self.here, non_blocking=True)
        self._mark()

    def fetch(self) -> None:
        """What the device has then done comes back; see `read`."""
        self.here.copy_(self.there, non_blocking=True)
        self._mark()

    def read(self, rows: int) -> list:
        """The first rows, as soon as they have come."""
        self.wait()
        return self.here[:rows].tolist()

    def wait(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()

    def _mark(self) -> None:
        if self.copied is not None:
            self.copied.record(torch.cuda.current_stream(self.there.device))
