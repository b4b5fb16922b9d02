"""Memory of PyTorch's allocator for a call's scratch, without a tensor around it: making one takes the host longer than the memory does."""

from __future__ import annotations

from collections.abc import Callable

import torch

# (bytes, stream) -> address. Whoever takes memory gives it back after the launches on that stream which want it.
take: Callable[[int, int], int] = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_alloc", None)  # type: ignore[assignment]
give_back: Callable[[int], None] = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_delete", None)  # type: ignore[assignment]
