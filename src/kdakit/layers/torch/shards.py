"""Parameters that tensor parallelism has turned into DTensors, as this rank computes with them."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def own(parameter: Any) -> Tensor:
    """This rank's part of a parameter that is split over the ranks; an ordinary parameter itself."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def shared(parameter: Any) -> Tensor:
    """A parameter that every rank has whole and applies to its own heads: its gradient is the sum of theirs."""
    if not hasattr(parameter, "to_local"):
        return parameter
    from torch.distributed.tensor import Partial

    return parameter.to_local(grad_placements=[Partial()] * parameter.device_mesh.ndim)
