"""Several processes that train one model: each batch is cut over them, rows over `data`, tokens over `context`.

Every process draws the same batches and keeps its part; losses and gradients are added up over all, so that each then makes the same step.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from kdakit.parallel.torch import Context
from kdakit.training.cuts import check_team


class Team:
    """The processes of the default group, `context` of them to a sequence."""

    def __init__(self, context: int, device: str = "cpu"):
        size = dist.get_world_size()
        check_team(size, context)
        self.mesh = init_device_mesh(device, (size // context, context), mesh_dim_names=("data", "context"))
        self.context = Context(self.mesh.get_group("context"))

    def part(self, array: np.ndarray) -> np.ndarray:
        """This process's part of a batch [B, T]."""
        for i, (name, n) in enumerate(zip(("batch", "length"), array.shape, strict=True)):
            if n < self.mesh.size(i):
                raise ValueError(f"{name} must be at least 1 in each of the {self.mesh.size(i)} parts it is cut into, got {n} for all")
        rows, columns = (np.array_split(np.arange(n), self.mesh.size(i))[self.mesh.get_local_rank(i)] for i, n in enumerate(array.shape))
        return np.ascontiguousarray(array[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1])

    def sum(self, x: Tensor) -> Tensor:
        """Over all processes, in place."""
        dist.all_reduce(x)
        return x

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Those of all processes, in one exchange for all parameters."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = self.sum(torch.cat([g.flatten() for g in gradients]))
        for gradient, new in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(new.view_as(gradient))
