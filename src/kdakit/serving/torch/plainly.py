"""How calls over states run, wherever the caller has them: not differentiated, and in the dtypes that their tensors have."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Result = TypeVar("Result")


def plainly(call: Callable[Given, Result]) -> Callable[Given, Result]:
    """`call` without gradients and without autocast, which would round states to the dtype of the layers around it."""

    @wraps(call)
    def made(*args: Given.args, **named: Given.kwargs) -> Result:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                with torch.autocast(kind, enabled=False):
                    return made(*args, **named)
        with torch.no_grad():
            return call(*args, **named)

    return made
