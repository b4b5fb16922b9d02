"""Triton without a GPU: as much of a driver as a compilation asks for, and what a compiled kernel takes."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile


def offline_driver(chip):
    """As much of a GPU driver as a compilation asks for."""
    import torch
    from triton.backends.compiler import GPUTarget

    gpu = GPUTarget("hip", chip.name, 64) if chip.hip else GPUTarget("cuda", int(chip.name[3:]), 32)

    class Driver:
        get_current_target = staticmethod(lambda: gpu)
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device=None: 0)
        get_active_torch_device = staticmethod(lambda: torch.device("cpu"))
        is_active = staticmethod(lambda: True)
        map_python_to_cpp_type = staticmethod(lambda name: name)

    return Driver()


def tool(name: str) -> str:
    """A program that Triton brings for NVIDIA's GPUs."""
    from triton.backends import nvidia

    return os.path.join(nvidia.__path__[0], "bin", name)


def said_of(cubin: bytes, name: str, *options: str) -> str:
    """What such a program prints about machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool(name), *options, file.name], capture_output=True, text=True, check=True).stdout


def resources(kernel) -> dict[str, int]:
    """Registers and bytes of stack per thread."""
    if "amdgcn" in kernel.asm:
        found = [re.search(rf"\.{n}:\s+(\d+)", kernel.asm["amdgcn"]) for n in ("vgpr_count", "private_segment_fixed_size")]
        return dict(registers=int(found[0][1]), stack=int(found[1][1]))
    text = said_of(kernel.asm["cubin"], "cuobjdump", "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return dict(registers=int(found[1]), stack=int(found[2]))
