"""A kernel with its derivative: as operators of torch.library, and as a function for calls that nobody watches.

torch.compile, torch.export and activation checkpointing see kdakit::NAME and kdakit::NAME_backward as single calls. What PyTorch does
around an operator with a derivative takes the host as long as the kernel takes a GPU, so that plain calls go around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kdakit.torch_operators import unwatched

_LIBRARY = torch.library.Library("kdakit", "FRAGMENT")
Made = list[Tensor]


class Operator:
    """forward(*args) -> tensors, backward(grads, *args) -> the gradients of the tensors among `args`, None where there is none.

    arguments: their schema. Tensors come first, the `tensors` first ones of them; the `differentiable` first of these have gradients.
    shapes(*args) -> the results without their values.
    """

    def __init__(
        self, name: str, arguments: str, tensors: int, differentiable: int, forward: Callable, backward: Callable, shapes: Callable
    ):
        self.name, self.tensors, self.differentiable, self.run, self.differentiate = name, tensors, differentiable, forward, backward
        tags = (torch.Tag.pt2_compliant_tag,)
        _LIBRARY.define(f"{name}({arguments}) -> Tensor[]", tags=tags)
        _LIBRARY.define(f"{name}_backward(Tensor?[] grads, bool[] needed, {arguments}) -> Tensor[]", tags=tags)
        torch.library.impl(_LIBRARY, name, "CompositeExplicitAutograd")(forward)
        torch.library.impl(_LIBRARY, f"{name}_backward", "CompositeExplicitAutograd")(self._backward)
        torch.library.register_fake(f"kdakit::{name}", shapes, lib=_LIBRARY)
        torch.library.register_fake(f"kdakit::{name}_backward", self._backward_shapes, lib=_LIBRARY)
        torch.library.register_autograd(f"kdakit::{name}", self._gradients, setup_context=self._keep, lib=_LIBRARY)
        torch.library.register_autograd(f"kdakit::{name}_backward", self._no_second, lib=_LIBRARY)
        self.watched = getattr(torch.ops.kdakit, name)
        self.watched_backward = getattr(torch.ops.kdakit, f"{name}_backward")
        operator = self

        class Differentiated(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *args):
                operator._keep(ctx, args, None)
                return tuple(forward(*args))

            @staticmethod
            def backward(ctx, *grads):
                return operator._gradients(ctx, grads)

        self.function = Differentiated

    def __call__(self, *args: Any) -> Sequence[Tensor]:
        tensors = args[: self.tensors]
        if not unwatched(tensors):
            return self.watched(*args)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors[: self.differentiable]):
            return self.function.apply(*args)
        return self.run(*args)

    def _keep(self, ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs[: self.tensors])
        ctx.rest = inputs[self.tensors :]
        ctx.set_materialize_grads(False)

    def _gradients(self, ctx, grads):
        tensors = ctx.saved_tensors
        needed = [x is not None and bool(want) for x, want in zip(tensors, ctx.needs_input_grad, strict=False)][: self.differentiable]
        plain = unwatched((*tensors, *grads)) and not torch.is_grad_enabled()
        made = iter((self._backward if plain else self.watched_backward)(list(grads), needed, *tensors, *ctx.rest))
        return *[next(made) if want else None for want in needed], *[None] * (len(tensors) - len(needed) + len(ctx.rest))

    def _backward(self, grads, needed, *args) -> Made:
        return [x for x, want in zip(self.differentiate(grads, needed, *args), needed, strict=True) if want]

    def _backward_shapes(self, grads, needed, *args) -> Made:
        return [x.new_empty(x.shape) for x, want in zip(args, needed, strict=False) if want]

    def _no_second(self, ctx, *grads):
        raise RuntimeError(f"kdakit::{self.name} has no second derivative: call backward without create_graph=True")
