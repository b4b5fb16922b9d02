"""Launches of compiled kernels: found again, handed addresses, recorded or watched. Nothing here knows what the kernels compute."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kdakit.backends.triton_gpu.runtime.interpreter import INTERPRETED
from kdakit.backends.triton_gpu.runtime.kernel import parameters
from kdakit.backends.triton_gpu.runtime.names import settle
from kdakit.backends.triton_gpu.runtime.streams import aside_here, seen_here

DTYPES = {"float16": tl.float16, "bfloat16": tl.bfloat16, "float32": tl.float32}
FAR_INT = 2**31
Grid = int | tuple[int, int, int]
_compiled: dict[Any, Any] = {}
_recorded: ContextVar[list | None] = ContextVar("recorded", default=None)
_traced: ContextVar[list | None] = ContextVar("traced", default=None)


class Traced(NamedTuple):
    """A launch that did not run."""

    kernel: Any
    grid: Grid
    args: tuple  # tensors and numbers
    constants: dict[str, Any]
    options: dict[str, Any]


class Seen(NamedTuple):
    """A launch that ran; aside: on the second stream of `beside`."""

    compiled: Any
    grid: Grid
    tensors: tuple
    rest: tuple
    aside: bool


class Lent(NamedTuple):
    """A launch of another backend's kernel that ran; again(addresses): once more, on the current stream, with these tensors' addresses, or
    those of their copies in float32."""

    again: Callable[[Sequence[int | None]], None]
    tensors: tuple
    widened: tuple[int, ...]  # which of the tensors, all of them a call's own, are copied


RAN = Seen, Lent


class Called(NamedTuple):
    """A launch of another backend's that did not run: `call`, else `Lent.again`, can be `written()` as numbers."""

    call: Any
    tensors: tuple


def note_lent(repeat: tuple[Callable[[Sequence[int | None]], None], tuple, tuple[int, ...]] | None) -> None:
    """For whoever is `watching` or `tracing`: the fields of another backend's launch. None: it cannot be repeated, and nor can the call."""
    if (trace := _traced.get()) is not None:
        if repeat is None or repeat[2]:
            raise NotImplementedError("another backend's kernel wants a copy of a tensor, which is not handed over")
        trace.append(Called(*repeat[:2]))
        return
    if (seen := seen_here.get()) is not None:
        seen.append(None if repeat is None else Lent(*repeat))


def launch(kernel, grid: Grid, args: tuple, constants: dict[str, Any], **options: int) -> Any:
    """Run `kernel` on `grid` programs; `args` and `constants` are its parameters. Returns the compiled kernel.

    Triton binds and inspects every parameter on every launch, which for short sequences takes longer than the kernel. Here a compiled
    kernel is found again by what it was specialised on - constants, dtypes, alignment of pointers, wide integers - and called directly.
    """
    values = [constants[name] for name in kernel.arg_names[len(args) :]]
    record = _recorded.get()
    if (trace := _traced.get()) is not None:
        settle(kernel)
        trace.append(Traced(kernel, grid, args, dict(zip(kernel.arg_names[len(args) :], values, strict=True)), options))
        return None
    if INTERPRETED or record is not None:
        named = dict(zip(kernel.arg_names[len(args) :], values, strict=True))
        if record is not None:
            settle(kernel)
            record.append((kernel, args, named, options))
        elif grid:
            kernel[axes(grid)](*args, **named)
        return None
    key = kernel, torch.cuda.current_device(), *options.values(), *values, *map(specialised, args)
    compiled = _compiled.get(key)
    if compiled is None:
        settle(kernel)
        named = dict(zip(kernel.arg_names[len(args) :], values, strict=True))
        compiled = kernel[axes(grid)](*args, **named, **options) if grid else kernel.warmup(*args, grid=(1,), **named, **options)
        _compiled[key] = compiled
    else:
        start(compiled, grid, args, values)
    return compiled


def launcher() -> type | None:
    """Of Triton 3.6, for NVIDIA GPUs: it takes scratch memory for a kernel that wants some, and calls the C function that launches. For all
    others that function is called here, which spares the host a microsecond. None: of other versions nobody knows what they call."""
    if tuple(triton.__version__.split(".")[:2]) != ("3", "6"):
        return None
    from triton.backends.nvidia.driver import CudaLauncher

    return CudaLauncher


LAUNCHER = launcher()


def axes(grid: Grid) -> tuple[int, ...]:
    return grid if isinstance(grid, tuple) else (grid, 1, 1)


def start(compiled, grid: Grid, args: Iterable, values: Iterable, stream: int | None = None) -> None:
    """What Triton does once it has found the compiled kernel, less its calls of hooks that nobody has set."""
    if not grid:
        return
    hooks = triton.knobs.runtime
    if stream is None:
        driver = triton.runtime.driver.active
        stream = driver.get_current_stream(driver.get_current_device())
    run = compiled.run  # loads the kernel when asked for the first time
    enter, leave, about = hooks.launch_enter_hook, hooks.launch_exit_hook, None
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        about = compiled.launch_metadata(axes(grid), stream, *args, *values)
    else:
        enter = leave = None
    more = ()
    if type(run) is LAUNCHER and not run.global_scratch_size and not run.profile_scratch_size:
        run, more = run.launch, (run.launch_cooperative_grid, run.launch_pdl, None, None)
    run(*axes(grid), stream, compiled.function, *more, compiled.packed_metadata, about, enter, leave, *args, *values)


class Launch:
    """A kernel with its grid and all its parameters but the tensors, for calls that come again.

    What Triton specialises on is then settled but for the tensors, so that a compiled kernel is found by

        (device, dtype of each tensor, which of them start at a multiple of 16 bytes)

    and gets addresses: Triton would ask each tensor for its own, and the driver whose it is.
    """

    def __init__(self, kernel: Any, grid: Grid, values: Mapping[str, Any], registers: int = 0, **options: int | bool):
        """values: of the kernel's numbers and constants, by name, and perhaps of others; registers: a thread's at most, 0: any number.

        A product and a sum may be one instruction: Triton 3.10 no longer makes it so unasked, and 3.9 warns of that."""
        names = parameters(kernel.fn)
        unknown = [name for name in (*names.numbers, *names.constants) if name not in values]
        if unknown:
            raise TypeError(f"{kernel.__name__} has parameters without a value: {', '.join(unknown)}")
        self.kernel, self.grid, self.names = kernel, grid, names.tensors
        self.options = options | {"enable_fp_fusion": True} | ({"maxnreg": registers} if registers else {})
        self.numbers = tuple(values[name] for name in names.numbers)
        self.constants = {name: values[name] for name in names.constants}
        self.rest = *self.numbers, *self.constants.values()
        self.compiled: dict[Any, Any] = {}

    def __call__(self, **named: torch.Tensor | None) -> None:
        """named: the kernel's tensors, without the p_ of their names."""
        if tuple(named) != self.names:
            named = self.in_order(named)
        tensors, compiled = tuple(named.values()), None
        if _recorded.get() is None and _traced.get() is None:
            addresses = [None if x is None else x.data_ptr() for x in tensors]
            key = tensors[0].get_device(), *[x and x % 16 for x in addresses], *[None if x is None else x.dtype for x in tensors]
            compiled = self.compiled.get(key)
        if compiled is not None:
            start(compiled, self.grid, addresses, self.rest)
        else:
            compiled = launch(self.kernel, self.grid, (*tensors, *self.numbers), self.constants, **self.options)
            if compiled is None:
                return
            self.compiled[key] = compiled
        if (seen := seen_here.get()) is not None:
            seen.append(Seen(compiled, self.grid, tensors, self.rest, aside_here.get()))

    def in_order(self, named: dict[str, Any]) -> dict[str, Any]:
        if set(named) != set(self.names):
            raise TypeError(f"{self.kernel.__name__} takes the tensors {', '.join(self.names)}, got {', '.join(named)}")
        return {name: named[name] for name in self.names}


@contextlib.contextmanager
def recording() -> Iterator[list]:
    """Within, `launch` runs nothing: it adds (kernel, arguments, constants, options) to the list."""
    token = _recorded.set(record := [])
    try:
        yield record
    finally:
        _recorded.reset(token)


@contextlib.contextmanager
def tracing() -> Iterator[list[Traced | Called]]:
    """Within, launches are added to the list instead of run: exactly those that a call of these sizes makes."""
    token = _traced.set(trace := [])
    try:
        yield trace
    finally:
        _traced.reset(token)


def is_recording() -> bool:
    return _recorded.get() is not None


@contextlib.contextmanager
def watching() -> Iterator[list]:
    """Within, every `Launch` that runs is added to the list as `Seen`, and others' as `Lent`; FORK and JOIN are where `beside` begins and
    ends."""
    token = seen_here.set(seen := [])
    try:
        yield seen
    finally:
        seen_here.reset(token)


def specialised(x: Any) -> Any:
    """What Triton compiles a kernel parameter for."""
    kind = type(x)
    if kind is int:
        return -FAR_INT <= x < FAR_INT
    if kind is float or x is None:
        return kind
    return x.dtype, x.data_ptr() % 16 == 0


def on_device(x: torch.Tensor):
    """Launches go to the current device: make it the tensors' own."""
    if not x.is_cuda or x.get_device() == torch._C._cuda_getDevice():
        return _HERE
    return torch.cuda.device(x.device)


_HERE = contextlib.nullcontext()


def current_stream(x: torch.Tensor) -> int:
    """The address of the current stream of a tensor's device; a Stream object takes 4 us."""
    return torch._C._cuda_getCurrentRawStream(x.get_device())
