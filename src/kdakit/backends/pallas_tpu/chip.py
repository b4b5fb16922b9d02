"""The TPU that programs are made for: its VMEM and its cores."""

from __future__ import annotations

import math
from typing import NamedTuple

from jax.experimental.pallas import tpu as pltpu

SMALL = 16  # MiB of VMEM, as a TPU v4 has
LEFT = 25 / 32  # of a larger VMEM for a kernel; XLA keeps arrays of its own there
UNKNOWN = 64  # MiB: the least of the chips since the v5e


class Chip(NamedTuple):
    vmem_mib: float  # infinite if it is none, but the interpreter
    cores: int  # that share one device and a grid's parallel axes: two of a v5p

    @property
    def vmem_limit(self) -> int:
        """Bytes that a kernel may take: on a v6e 100 MiB, on a tpu7x or v5p 50, on a v4 all of its 16."""
        size = UNKNOWN if math.isinf(self.vmem_mib) else self.vmem_mib
        return int(size * 2**20 * (1 if size <= SMALL else LEFT))


def this_chip() -> Chip:
    """By JAX's current device or abstract mesh."""
    try:
        info = pltpu.get_tpu_info()
    except ValueError:
        return Chip(math.inf, 1)
    return Chip(info.vmem_capacity_bytes / 2**20, info.num_cores)
