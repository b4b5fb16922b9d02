"""Kernels keep their names in Triton's cache from process to process.

Triton names a compiled kernel after its source, that of the functions it calls, and the constants these use - the last only of functions
that were named before their caller (3.6: `DependenciesFinder._update_hash` merges them before it computes them). So the name depends on
what a process happened to compile first, and a filled cache is missed. Named from the innermost function outwards, all names are complete.
"""

from __future__ import annotations

from typing import Any

from triton.runtime.jit import JITCallable

_settled: set[int] = set()  # by id: a function's hash is its name


def settle(function: Any) -> None:
    """Names what `function` calls, then `function`; one of the interpreter has no name."""
    if id(function) in _settled or not isinstance(function, JITCallable):
        return
    _settled.add(id(function))
    for name in function.fn.__code__.co_names:
        settle(function.__globals__.get(name))
    function.cache_key  # noqa: B018
