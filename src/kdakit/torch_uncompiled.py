"""What torch.compile leaves to PyTorch. Imported only while it compiles: torch.compiler.disable brings all of it, which takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def not_compiled_under_a_transform(call: Callable[..., Any], *args: Any) -> Any:
    """A compiler would lose the derivative in torch.func, or refuse the vmap."""
    return call(*args)
