"""Compile quickly, interpret quickly, compute the same: most of the suite's time would be LLVM optimising XLA programs that run once.

test_jax.py verifies a few cases with the default flags in a process of its own. Set XLA_FLAGS yourself to test with others.
"""

import os
from types import SimpleNamespace

import pytest

os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")


@pytest.fixture(autouse=True, scope="session")
def one_patch_a_launch():
    """Triton's interpreter replaces the functions of triton.language anew at every call of a jitted helper: a third of its time."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    patch, launched = interpreter._patch_lang, []

    def patch_once(function):
        if launched:
            return interpreter._LangPatchScope()  # nothing changed, nothing to restore
        scope = patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        launched.append(scope.restore)
        scope.restore = lambda: launched.pop()()
        return scope

    interpreter._patch_lang = patch_once
