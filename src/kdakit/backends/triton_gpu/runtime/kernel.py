"""Kernels and their parameters. In a signature tensors come first and begin with p_, then numbers, then constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton

from kdakit.backends.triton_gpu.runtime import masks
from kdakit.backends.triton_gpu.runtime.interpreter import INTERPRETED

if INTERPRETED:
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    masks.keep_booleans(InterpreterBuilder, TensorHandle)


class Parameters(NamedTuple):
    """Names, in order; tensors without their p_."""

    tensors: tuple[str, ...]
    numbers: tuple[str, ...]  # known when a kernel is launched
    constants: tuple[str, ...]  # known when it is compiled


def parameters(function: Callable) -> Parameters:
    """Of a Python function that is or will be a kernel."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    constants = tuple(name for name in names if name in function.__annotations__)
    tensors = tuple(name[2:] for name in names if name.startswith("p_"))
    return Parameters(tensors, names[len(tensors) : len(names) - len(constants)], constants)


def kernel(function: Callable) -> Any:
    """A kernel that is compiled once whatever its numbers are."""
    return triton.jit(do_not_specialize=list(parameters(function).numbers))(function)
