"""Kimi Delta Attention on every accelerator. Import `kdakit.torch` or `kdakit.jax`; this package alone imports neither framework.

    kdakit.enable("fla")             flash-linear-attention's KDA calls, its layers and its models run on kdakit's kernels
    kdakit.enable("transformers")    Transformers' Kimi-Linear does, with or without flash-linear-attention

What a stack asks for is taken where kdakit runs it fast, and goes on to the stack's own code elsewhere: see `kdakit.stacks`.
"""

from importlib import import_module

__version__ = "0.1.0"


def enable(stack: str) -> None:
    """Let `stack`, one of `kdakit.stacks.STACKS`, call kdakit's kernels in this process."""
    import_module("kdakit.stacks").enable(stack)


def disable(stack: str) -> None:
    """The way back: `stack` runs its own code again."""
    import_module("kdakit.stacks").disable(stack)
