"""Calls of the library: their arguments but for addresses, made with these at once, or written down for whoever makes them later."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kdakit.backends.cuda import library
from kdakit.backends.cuda.library import PrefillArgs

# Fields of PrefillArgs: tensors with strides, and addresses.
TENSORS = "q", "k", "v", "g", "beta", "o"
KEPT = "lower", "solved", "checkpoints", "record", "r", "factors"
FORWARD = "initial_state", "final_state", "cu_seqlens", "A_log", "dt_bias", *KEPT, "workspace"
GIVEN = "initial_state", "cu_seqlens", "A_log", "dt_bias"


class Written(NamedTuple):
    """A call as numbers, for whoever has addresses and a stream."""

    function: int  # its address in this process
    reason: int  # and that of the function that says why it failed
    forward: bytes  # PrefillArgs
    own: bytes  # of a stage of the backward
    places: list[tuple[int, int]]  # where addresses go: (0, byte of `forward`) or (1, byte of `own`)
    stream: int  # byte of `forward` where the stream goes
    where: int | None  # byte of `own` where the address of `forward` goes


class Call(NamedTuple):
    """A function of the library and its arguments but for addresses, which go to TENSORS and `fields` of PrefillArgs, then to `own_fields`
    of the arguments of a stage of the backward, whose `forward` those are."""

    stage: str  # in `library`
    dtype: str
    forward: PrefillArgs
    fields: tuple[str, ...]
    index: int | None  # of the device; None: of a CPU
    own: Any = None
    own_fields: tuple[str, ...] = ()

    def __call__(self, addresses: Sequence[int | None]) -> None:
        """On the device's current stream."""
        forward, first = PrefillArgs.from_buffer_copy(self.forward), len(TENSORS) + len(self.fields)
        for name, address in zip(TENSORS, addresses, strict=False):
            getattr(forward, name).data = address
        for name, address in zip(self.fields, addresses[len(TENSORS) : first], strict=True):
            setattr(forward, name, address)
        forward.stream = current_stream(self.index)
        if self.own is None:
            library.prefill(forward, self.dtype)
            return
        args = type(self.own).from_buffer_copy(self.own)
        for name, address in zip(self.own_fields, addresses[first:], strict=True):
            setattr(args, name, address)
        args.forward = ctypes.pointer(forward)
        getattr(library, self.stage)(args)

    @property
    def function(self) -> str:
        """Of the library."""
        return f"kda_{self.stage}_{self.dtype}"

    def written(self) -> Written:
        """What a program in C needs to make it."""
        own, forward = self.own, PrefillArgs
        places = [(0, getattr(forward, name).offset) for name in (*TENSORS, *self.fields)]  # `data` comes first in a tensor
        places += [(1, getattr(type(own), name).offset) for name in self.own_fields]
        functions = library.address(self.function), library.address("kda_last_error")
        images = bytes(self.forward), b"" if own is None else bytes(own)
        return Written(*functions, *images, places, forward.stream.offset, None if own is None else type(own).forward.offset)


def current_stream(index: int | None) -> int | None:
    """The current stream of a device; a Stream object takes 4 us. None: of a CPU."""
    return None if index is None else torch._C._cuda_getCurrentRawStream(index)
