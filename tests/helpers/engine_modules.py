"""Kernel modules of serving engines by themselves: from a wheel or a folder named by KDAKIT_TEST_WHEELS, the rest of the engine stubbed."""

import contextlib
import importlib
import math
import os
import sys
import types
import zipfile
from pathlib import Path

import torch
import triton
import triton.language as tl

MODELS = ("kimi_k3", "glm5next")
VLLM = (*(f"vllm/models/{model}/nvidia/ops/third_party/kda/" for model in MODELS), "vllm/third_party/flash_linear_attention/")


def find_vllm(into: Path) -> Path | None:
    """A folder with vLLM's KDA kernels, or None."""
    for folder in (Path(p) for p in os.environ.get("KDAKIT_TEST_WHEELS", "").split(os.pathsep) if p):
        if (folder / VLLM[0]).is_dir():
            return folder
        for wheel in sorted(folder.glob("vllm-0.3[23]*.whl"))[::-1]:
            archive = zipfile.ZipFile(wheel)
            archive.extractall(into, [n for n in archive.namelist() if n.startswith(VLLM) and n.endswith(".py")])
            return into
    return None


def stub(name: str, folder: Path | None = None, **content) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(content)
    if folder is not None:
        module.__path__ = [str(folder)]
    sys.modules[name] = module
    return module


def load_vllm(folder: Path) -> tuple[types.ModuleType, types.ModuleType]:
    """`vllm.models.MODEL.nvidia.ops.third_party.kda` of Kimi-K3 and of GLM-5-Next, with real kernels and nothing else of vLLM."""
    stub("vllm", folder / "vllm")
    platform = types.SimpleNamespace(
        is_arch_support_pdl=lambda: False, is_rocm=lambda: False, is_cuda=lambda: torch.cuda.is_available(), is_xpu=lambda: False,
        is_cuda_alike=lambda: torch.cuda.is_available(), is_cpu=lambda: not torch.cuda.is_available(), device_type="cuda",
        get_device_capability=lambda *a: None, has_device_capability=lambda *a: True, is_device_capability_family=lambda *a: False,
        is_device_capability=lambda *a: False,
    )  # fmt: skip
    stub("vllm.platforms", current_platform=platform)
    stub("vllm.triton_utils", tl=tl, triton=triton, tldevice=tl.math, HAS_TRITON=True)
    stub("vllm.utils", folder / "vllm/utils")
    numbers = dict(cdiv=lambda a, b: -(-a // b), next_power_of_2=triton.next_power_of_2, RCP_LN2=1 / math.log(2))
    stub("vllm.utils.math_utils", **numbers)
    stub("vllm.utils.gpu_sync_debug", gpu_sync_allowed=contextlib.nullcontext)
    stub("vllm.utils.torch_utils", async_tensor_h2d=lambda x, dtype=None, device=None, **_: torch.tensor(x, dtype=dtype, device=device))
    stub("vllm.logger", init_logger=lambda name: __import__("logging").getLogger(name))
    stub("vllm.envs")
    for model in MODELS:
        parts = "models", model, "nvidia", "ops", "third_party"
        for i in range(1, len(parts) + 1):
            stub(".".join(("vllm", *parts[:i])), folder.joinpath("vllm", *parts[:i]))
    stub("vllm.third_party", folder / "vllm/third_party")
    stub("vllm.third_party.flash_linear_attention", folder / "vllm/third_party/flash_linear_attention")
    stub("vllm.third_party.flash_linear_attention.ops", folder / "vllm/third_party/flash_linear_attention/ops")
    if os.environ.get("TRITON_INTERPRET") == "1":  # the interpreter knows functions of triton.language by that name alone
        functions = dict(exp=exp, exp2=exp2, log=log, log2=log2, gather=tl.gather, make_tensor_descriptor=None)
        stub("vllm.third_party.flash_linear_attention.ops.op", **functions)
    kimi, glm = (importlib.import_module(f"vllm.models.{model}.nvidia.ops.third_party.kda") for model in MODELS)
    return kimi, glm


@triton.jit
def exp(x):
    return tl.exp(x)


@triton.jit
def exp2(x):
    return tl.exp2(x)


@triton.jit
def log(x):
    return tl.log(x)


@triton.jit
def log2(x):
    return tl.log2(x)
