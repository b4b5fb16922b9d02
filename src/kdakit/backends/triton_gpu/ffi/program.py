"""The launches of a call as numbers: the host side is run on tensors without memory, and what it would launch is written down.

A buffer is an operand, a result, or a piece of the scratch memory: whatever the kernels' tensors share storage with. Kernels are compiled
for the GPU and loaded, or functions of the CUDA library; a program holds their handles, so that it is good for one process.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton

from kdakit.backends.triton_gpu.runtime import precompile
from kdakit.backends.triton_gpu.runtime.launch import Called, Traced, axes, tracing

APART = 256  # bytes: where tensors begin in the scratch memory
LAUNCH, CALL = range(2)  # what an item of the table is
BUFFER, WORD, LONG, NOTHING = range(4)  # and a parameter
SCRATCH_POINTERS = 2  # that Triton's kernels take after their own parameters: of global and of profiling memory, unused here


@dataclass(frozen=True)
class Program:
    table: np.ndarray  # int64, see launches.cpp
    results: tuple[tuple[tuple[int, ...], str], ...]  # (shape, dtype name)
    scratch: int  # bytes


def empty(shape: Sequence[int], dtype: str) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta")


def trace(run: Callable[[], Sequence[torch.Tensor | None]]) -> tuple[list[Traced | Called], list[torch.Tensor]]:
    """What `run` launches, and the tensors it returns."""
    with tracing() as launches:
        results = [x for x in run() if x is not None]
    return [x for x in launches if isinstance(x, Called) or x.grid], results


def write(operands: Sequence[torch.Tensor], run: Callable[[], Sequence[torch.Tensor | None]], load: Callable[[Any], int]) -> Program:
    """operands: what `run` reads, in the call's order. load(compiled kernel) -> its handle."""
    launches, results = trace(run)
    compiled = iter(compile_all([one for one in launches if isinstance(one, Traced)]))
    places = {_storage(x): (i, 0) for i, x in reversed(list(enumerate([*operands, *results])))}
    own, scratch = len(operands) + len(results), 0
    for x in (x for one in launches for x in _tensors(one)):
        if _storage(x) not in places:
            places[_storage(x)] = own, scratch
            scratch += -(-max(x.untyped_storage().nbytes(), 1) // APART) * APART
    table: list[int] = []
    for one in launches:
        table += _called(one, places) if isinstance(one, Called) else _launched(one, next(compiled), load, places)
    shapes = tuple((tuple(x.shape), str(x.dtype).rpartition(".")[2]) for x in results)
    return Program(np.asarray(table, np.int64), shapes, scratch)


def compile_all(launches: list[Traced]) -> list[Any]:
    """The compiled kernels; at the same time where a compiler of Triton's leaves the interpreter alone."""
    recorded = [(one.kernel, one.args, one.constants, one.options) for one in launches]
    precompile.hash_triton().join()
    with precompile.Compilers(precompile.WORKERS) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        precompile.compile_each(recorded)
    return [kernel.warmup(*args, grid=(1,), **constants, **options) for kernel, args, constants, options in recorded]


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def _tensors(one: Traced | Called) -> list[torch.Tensor]:
    return [x for x in (one.tensors if isinstance(one, Called) else one.args) if isinstance(x, torch.Tensor)]


def _place(x: torch.Tensor, places: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """The buffer that x lies in, and how many bytes from its beginning."""
    buffer, offset = places[_storage(x)]
    return buffer, offset + x.storage_offset() * x.element_size()


def _launched(one: Traced, kernel: Any, load: Callable[[Any], int], places: dict[int, tuple[int, int]]) -> list[int]:
    parameters = _parameters(one, kernel, places)
    head = [load(kernel), *axes(one.grid), kernel.metadata.num_warps * 32, kernel.metadata.shared, len(parameters)]
    return [LAUNCH, *head, *(word for parameter in parameters for word in parameter)]


def _called(one: Called, places: dict[int, tuple[int, int]]) -> list[int]:
    """The arguments as they lie in memory, and where in them addresses go."""
    call = one.call.written()
    words = struct.unpack(f"<{(len(call.forward) + len(call.own)) // 8}q", call.forward + call.own)
    addresses = [(*at, *_place(x, places)) for at, x in zip(call.places, one.tensors, strict=True) if x is not None]
    head = [call.function, call.reason, len(call.forward) // 8, len(call.own) // 8, call.stream, call.where or 0, len(addresses)]
    return [CALL, *head, *words, *(word for address in addresses for word in address)]


def _parameters(one: Traced, kernel: Any, places: dict[int, tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(kind, value, offset) of everything that the compiled kernel takes: constants, and what is not there, it does not."""
    if getattr(kernel.metadata, "global_scratch_size", 0) or getattr(kernel.metadata, "num_ctas", 1) != 1:
        raise NotImplementedError(f"{kernel.metadata.name} wants memory or blocks of its own")
    found = []
    for name, value in zip(one.kernel.arg_names, (*one.args, *one.constants.values()), strict=True):
        kind = kernel.src.signature[name]
        if kind == "constexpr":
            continue
        if isinstance(value, torch.Tensor):
            found.append((BUFFER, *_place(value, places)))
        else:
            found.append(_number(kind, value))
    return found + [(NOTHING, 0, 0)] * SCRATCH_POINTERS


def _number(kind: str, value: Any) -> tuple[int, int, int]:
    if kind in ("i64", "u64"):
        return LONG, int(value), 0
    if kind in ("i32", "u32", "i16", "i8", "i1"):
        return WORD, int(value), 0
    if kind in ("fp32", "f32"):
        return WORD, struct.unpack("<i", struct.pack("<f", value))[0], 0
    raise NotImplementedError(f"a kernel's parameter of type {kind} is not handed over")


@lru_cache(maxsize=1)
def use_driver(capability: tuple[int, int]) -> Any:
    """Triton's driver. The usual one asks PyTorch for devices; where PyTorch was built without them, it is told."""
    drivers = triton.runtime.driver
    try:
        return drivers.active
    except RuntimeError:  # PyTorch has no GPU
        from triton.backends.nvidia.driver import CudaDriver

        told = CudaDriver()
        told.get_device_capability = lambda device=0: capability
        told.get_current_device = lambda: 0
        told.get_current_stream = lambda device=0: 0
        drivers.set_active(told)
        return told


def load(kernel: Any, device: int = 0) -> int:
    """The handle of a compiled kernel on a device; the module stays loaded as long as the process lives."""
    utilities, about = triton.runtime.driver.active.utils, kernel.metadata
    _, function, *_ = utilities.load_binary(about.name, kernel.asm["cubin"], about.shared, device)
    return int(function)
