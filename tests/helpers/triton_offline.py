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


def resources(kernel) -> dict[str, int]:
    """Registers and bytes of stack per thread."""
    if "amdgcn" in kernel.asm:
        found = [re.search(rf"\.{n}:\s+(\d+)", kernel.asm["amdgcn"]) for n in ("vgpr_count", "private_segment_fixed_size")]
        return dict(registers=int(found[0][1]), stack=int(found[1][1]))
    from triton.backends import nvidia

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = os.path.join(os.path.dirname(nvidia.__path__[0] + "/"), "bin", "cuobjdump")
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return dict(registers=int(found[1]), stack=int(found[2]))
