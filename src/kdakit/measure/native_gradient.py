"""KDAKIT_CUDA_GRADIENT=1: `kdakit verify` and `kdakit bench` run the Triton backward with the CUDA kernel of csrc/backward in place of its
last two launches over chunks. For measurements on a GPU: nothing else takes it before one has shown it to be right and faster."""

from __future__ import annotations

import os
from types import SimpleNamespace

VARIABLE = "KDAKIT_CUDA_GRADIENT"


def install_if_asked() -> bool:
    """Whether it was asked for. Raises where the library is missing."""
    if os.environ.get(VARIABLE, "0") in ("", "0"):
        return False
    install()
    return True


def install() -> None:
    from kdakit.backends.cuda import library, op
    from kdakit.backends.triton_gpu.host import backward

    library.load()
    backward.native = SimpleNamespace(supports=op.gradient_refusal, run=op.chunk_gradient)


def remove() -> None:
    from kdakit.backends.triton_gpu.host import backward

    backward.native = None
