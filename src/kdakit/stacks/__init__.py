"""kdakit inside the stacks that people already run: one module for each, loaded when somebody enables it.

    kdakit.enable("fla")             or  import kdakit.fla       KDAKIT_FLA=0 switches it off
    kdakit.enable("transformers")                                KDAKIT_TRANSFORMERS=0
    the plugins of vLLM and SGLang   (entry points)              KDAKIT_VLLM=1, KDAKIT_SGLANG=1 switch them on

A stack's module has `enable()`, `disable()` and `enabled() -> bool`. Every call that reaches it is either taken, because a fast backend of
ours runs it, or passed on to the stack's own code with a reason: `counts` keeps both, and `kdakit doctor` shows them.
"""

from __future__ import annotations

import difflib
import os
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from kdakit.stacks import counts

STACKS = {
    "fla": "flash-linear-attention",
    "transformers": "Hugging Face Transformers",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "sglang_jax": "sglang-jax",
}


def enable(stack: str) -> None:
    _module(stack).enable()


def disable(stack: str) -> None:
    _module(stack).disable()


def wanted(stack: str) -> bool:
    """Whether the environment leaves `stack` to us: KDAKIT_<STACK>=0 does not."""
    return os.environ.get(f"KDAKIT_{stack.upper()}", "1") != "0"


def asked_for(stack: str) -> bool:
    """Whether KDAKIT_<STACK>=1 asks for it: an engine loads every plugin that is installed, and installing kdakit alone changes nothing."""
    return os.environ.get(f"KDAKIT_{stack.upper()}", "0") not in ("", "0")


def report() -> dict[str, Any]:
    """{stack: {"enabled", "taken", "passed on"}} of this process; with KDAKIT_COUNTS=FILE also of the last one that wrote it there."""
    found: dict[str, Any] = {}
    for stack in STACKS:
        module = sys.modules.get(f"kdakit.stacks.{stack}")
        on = module is not None and module.enabled()
        found[stack] = {"enabled": on if wanted(stack) else f"no: KDAKIT_{stack.upper()}=0"} | counts.of(stack)
    earlier = counts.written()
    return found if earlier is None else found | {"earlier process": earlier}


def _module(stack: str) -> ModuleType:
    if stack not in STACKS:
        near = difflib.get_close_matches(str(stack), STACKS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"stack must be one of {', '.join(STACKS)}, got {stack!r}{hint}")
    return import_module(f"kdakit.stacks.{stack}")
