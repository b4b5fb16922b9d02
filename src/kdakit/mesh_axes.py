"""Over which mesh axes an array varies inside shard_map: JAX checks it, and sums the gradient of what does not vary. For JAX."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


def varying(x) -> frozenset:
    """The attribute has changed its place between versions of JAX."""
    kind: Any = jax.typeof(x)
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying


def vary(x, axes: frozenset):
    """x, said to vary over `axes` too."""
    more = tuple(sorted(axes - varying(x)))
    if not more:
        return x
    namespace: Any = lax
    return namespace.pcast(x, more, to="varying") if hasattr(lax, "pcast") else namespace.pvary(x, more)


def all_varying(arrays) -> frozenset:
    """The axes over which any of them varies; None among them is passed over."""
    return frozenset().union(*(varying(x) for x in arrays if x is not None))


def result_like(array, shape, dtype):
    """The ShapeDtypeStruct of a result that varies as `array` does."""
    kind: Any = jax.typeof(array)
    make: Any = jax.ShapeDtypeStruct
    return make(shape, dtype, vma=kind.vma) if hasattr(kind, "vma") else make(shape, dtype, manual_axis_type=kind.manual_axis_type)
