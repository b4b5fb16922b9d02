"""torch.func over a call: grad, vjp, jacrev and vmap are right; forward mode (jvp, jacfwd, dual tensors) is refused with the reason.

A transform sees an autograd.Function, whose backward is another one. Both know vmap: calls of a batch become one call with more rows, or,
where they are packed or bring parameters of their own, a loop. A differentiated call keeps its inputs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_mode
from torch import Tensor
from torch._functorch.pyfunctorch import FunctionalizeInterpreter, retrieve_all_functorch_interpreters

from kdakit.problem import DIFFERENTIABLE, Arrays, Options
from kdakit.torch_operators import _backward, run

INPUTS = 10  # of the public calls' tensors, those that PyTorch's take
NO_FORWARD_MODE = (
    "KDA has no forward-mode derivative (torch.func.jvp, jacfwd, linearize, hessian, dual tensors): use reverse mode (torch.func.vjp, "
    "grad, jacrev, .backward()), or kdakit.torch.naive_chunk_kda and naive_recurrent_kda, which PyTorch differentiates either way"
)


def transforms_active() -> bool:
    """Whether a transform of torch.func is at work that knows an autograd.Function: functionalize knows operators alone."""
    if not torch._C._are_functorch_transforms_active():
        return False
    return not any(isinstance(x, FunctionalizeInterpreter) for x in retrieve_all_functorch_interpreters())


def check_no_tangents(tensors: Sequence[Tensor | None]) -> None:
    """A tangent that an operator does not know of would be lost without a word."""
    if forward_mode._current_level < 0:
        return
    for x in tensors:
        if x is not None and forward_mode.unpack_dual(x).tangent is not None:
            raise NotImplementedError(NO_FORWARD_MODE)


class Transformed(torch.autograd.Function):
    """o, the final state and the states before each chunk; empty tensors for what is not asked for."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        arrays, (op, options, backend) = Arrays(*inputs[:INPUTS]), inputs[INPUTS:]
        found = run(arrays, op, Options.decode(options), backend, False)[0]
        return tuple(arrays.q.new_empty(0) if x is None else x for x in found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:INPUTS])
        ctx.rest = inputs[INPUTS:]
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx: Any, d_o: Tensor, d_final_state: Tensor, _d_states: Tensor) -> tuple:
        arrays = ctx.saved_tensors
        d_final = d_final_state if Options.decode(ctx.rest[1]).output_final_state else None
        grads = Backward.apply(*arrays, d_o, d_final, *ctx.rest)
        wanted = (grad if x is not None else None for x, grad in zip(arrays, grads, strict=False))
        return *wanted, *[None] * (INPUTS - len(DIFFERENTIABLE) + len(ctx.rest))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple:
        raise NotImplementedError(NO_FORWARD_MODE)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *inputs: Any) -> tuple:
        return _vmapped(Transformed.apply, info.batch_size, in_dims, inputs, INPUTS)


class Backward(torch.autograd.Function):
    """The gradients of the differentiable inputs; inputs are those of `Transformed` with d_o and d_final_state after the tensors."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return tuple(_backward(*inputs[:INPUTS], [], *inputs[INPUTS:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        raise RuntimeError("KDA has no second derivative: call backward without create_graph=True")

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple:
        raise NotImplementedError(NO_FORWARD_MODE)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *inputs: Any) -> tuple:
        return _vmapped(Backward.apply, info.batch_size, in_dims, inputs, INPUTS + 2)


def _operator_vmapped(info: Any, in_dims: tuple, *inputs: Any) -> tuple[list[Tensor], list[int]]:
    """kdakit::backward for many cotangents of one call. What its forward has kept, after the tensors, is of that call alone."""
    call = lambda *x: torch.ops.kdakit.backward(*x[:INPUTS], [], *x[INPUTS:])
    dims, x = (given[:INPUTS] + given[INPUTS + 1 :] for given in (in_dims, inputs))
    found, out_dims = _vmapped(call, info.batch_size, dims, x, INPUTS + 2)
    return list(found), list(out_dims)


torch.library.register_vmap("kdakit::backward", _operator_vmapped)


def _vmapped(call: Callable[..., tuple], size: int, in_dims: tuple, inputs: tuple, tensors: int) -> tuple:
    """`call` for each of a batch: (results, the dimension of each result that counts them). All inputs of calls that are not packed have a
    row for each sequence, but for the parameters, places 5 and 6, whose gradients would be added up."""
    if not size:
        raise ValueError("torch.func.vmap must map a call over at least one element, got a dimension of 0")
    parameters, offsets = inputs[5:7], inputs[8:10]
    shared = all(dim is None for dim in in_dims[5:7]) if tensors == INPUTS else all(x is None for x in parameters)
    if shared and all(x is None for x in offsets):
        rows = [_rows(x, dim, size) if i not in (5, 6) else x for i, (x, dim) in enumerate(zip(inputs[:tensors], in_dims, strict=False))]
        found = call(*rows, *inputs[tensors:])
        return tuple(x.unflatten(0, (size, -1)) if x.numel() or x.ndim > 1 else x.expand(size, 0) for x in found), (0,) * len(found)
    calls = []
    for n in range(size):
        own = [x if dim is None or x is None else x.select(dim, n) for x, dim in zip(inputs[:tensors], in_dims, strict=False)]
        calls.append(call(*own, *inputs[tensors:]))
    return tuple(torch.stack(x) for x in zip(*calls, strict=True)), (0,) * len(calls[0])


def _rows(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """[.., size, ..] -> [size * rows, ..]."""
    if x is None:
        return None
    return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)
