"""The operators behind `kdakit.torch`: kdakit::forward, kdakit::backward, kdakit::inference and kdakit::step_, with their fake kernels.

Here a call is checked and gets its backend. torch.compile, torch.export, autocast and activation checkpointing see each as a single call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from kdakit import dispatch
from kdakit.problem import (
    DIFFERENTIABLE,
    Arrays,
    Options,
    Problem,
    Spec,
    check_cu_seqlens,
    check_devices,
    checks_enabled,
    make_options,
    make_problem,
)
from kdakit.values import check_same_cu_seqlens, check_values

_SCHEMA_ARRAYS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, "
    "Tensor? cu_seqlens, Tensor? cu_seqlens_cpu"
)
_LIBRARY = torch.library.Library("kdakit", "DEF")
_LIBRARY.define(
    f"forward({_SCHEMA_ARRAYS}, str op, str options, str backend, bool needs_grad) -> (Tensor, Tensor, Tensor, Tensor[])",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(f"inference({_SCHEMA_ARRAYS}, str op, str options, str backend) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define(
    f"backward({_SCHEMA_ARRAYS}, Tensor[] saved, Tensor d_o, Tensor? d_final_state, str op, str options, str backend) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    f"step_({_SCHEMA_ARRAYS.replace('Tensor? initial_state', 'Tensor(a!) initial_state')}, str options, str backend) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@lru_cache(maxsize=256)
def all_in_kernel(allow_neg_eigval: bool, safe_gate: bool, lower_bound: float | None) -> Options:
    """Of a call whose norms, gate with A_log and dt_bias, and sigmoid of beta are the kernels' work, as in a layer."""
    given: Any = True  # only whether they are there counts
    return make_options(
        Arrays(None, None, None, None, None, given, given), use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, allow_neg_eigval=allow_neg_eigval, safe_gate=safe_gate, lower_bound=lower_bound,
    )  # fmt: skip


def _describe(arrays: Arrays, op: str, options: str, needs_grad: bool) -> Problem:
    check_devices(arrays)
    return make_problem(op, arrays, Options.decode(options), needs_grad)


def _describe_real(arrays: Arrays, op: str, options: Options, needs_grad: bool) -> Problem:
    """`_describe` for tensors whose sizes are plain numbers: a call like an earlier one is not described, nor checked, anew."""
    return _described(op, options, needs_grad, *[None if x is None else (x.shape, x.dtype, x.device) for x in arrays])


@lru_cache(maxsize=1024)
def _described(op: str, options: Options, needs_grad: bool, *specs: tuple | None) -> Problem:
    arrays = Arrays(*(None if x is None else Spec(*x) for x in specs))
    check_devices(arrays)
    return make_problem(op, arrays, options, needs_grad)


def _without_autocast(kind: str):
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


def _check_values(problem: Problem, arrays: Arrays) -> None:
    """cu_seqlens where the host can see it; when checks are on everything, everywhere."""
    every, seen = checks_enabled(), []
    for name in ("cu_seqlens", "cu_seqlens_cpu"):
        cu = getattr(arrays, name)
        if cu is not None and (cu.device.type == "cpu" or every):
            seen.append(cu.cpu().numpy())
            check_cu_seqlens(seen[-1], problem.T, name)
    if len(seen) == 2:
        check_same_cu_seqlens(*seen)
    if every:
        wide = (None if x is None else x.detach().to("cpu", torch.float64).numpy() for x in arrays[: len(DIFFERENTIABLE)])
        check_values(problem, Arrays(*wide, seen[0] if seen else None))


def _empty(like: Tensor) -> Tensor:
    return like.new_empty(0)


@torch.library.impl(_LIBRARY, "forward", "CompositeExplicitAutograd")
def _forward(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, op, options, backend, needs_grad):
    arrays = Arrays(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu)
    result, saved = run(arrays, op, Options.decode(options), backend, needs_grad)
    return result.o, *(_empty(q) if x is None else x for x in result[1:]), saved


@torch.library.impl(_LIBRARY, "inference", "CompositeExplicitAutograd")
def _inference(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, op, options, backend):
    """`forward` for calls that are not differentiated: what PyTorch does around an operator with a derivative takes as long as a short
    sequence. Returns o, and the final state and the states before each chunk where they are asked for."""
    arrays = Arrays(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu)
    return [x for x in run(arrays, op, Options.decode(options), backend, False)[0] if x is not None]


_plans: dict[Any, Callable[[Sequence[Tensor | None]], Any]] = {}


def run(arrays: Arrays, op: str, options: Options, backend: str, needs_grad: bool):
    """Result and what is saved for a backward: what the operators do, for calls that are `unwatched`."""
    key = _alike(f"{op}, differentiated" if needs_grad else op, arrays, options, backend)
    plan = _plans.get(key)
    if plan is not None:
        return plan(arrays) if needs_grad else (plan(arrays), [])
    problem = _describe_real(arrays, op, options, needs_grad)
    device = arrays.q.device
    module = dispatch.select("torch", problem, device, backend)
    _check_values(problem, arrays)
    config = module.default_config(problem, device)
    with _without_autocast(device.type):
        if (
            key is not None
            and (module.planned_backward if needs_grad else module.planned) is not None
            and (op == "chunk" or not needs_grad)
        ):
            found = _planned(key, module.planned, problem, arrays, config)
            return found if needs_grad else (found, [])
        if op == "recurrent":
            return module.step(problem, arrays, config), []
        return module.forward(problem, arrays, config)


def _alike(what: str, arrays: Arrays, options: Options, backend: str, *more: Tensor | None) -> Any:
    """What calls on a GPU have in common that differ in values and addresses alone; None where values are looked at."""
    if not arrays.q.is_cuda or arrays.cu_seqlens_cpu is not None or checks_enabled():
        return None
    tensors = [None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) for x in (*arrays, *more)]
    return what, options, backend, *tensors


def _planned(key: Any, call: Callable[..., tuple[Any, Any]], *args: Any) -> Any:
    """A call by a backend that can say how to repeat it."""
    result, plan = call(*args)
    if plan is not None:
        if len(_plans) >= 1024:
            _plans.clear()
        _plans[key] = plan
    return result


@torch.library.register_fake("kdakit::forward", lib=_LIBRARY)
def _forward_fake(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, op, options, backend, needs_grad):
    arrays = Arrays(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu)
    problem = _describe(arrays, op, options, needs_grad)
    module = dispatch.select("torch", problem, q.device, backend)
    o = q.new_empty(v.shape, dtype=v.dtype)
    final, states, saved = _empty(q), _empty(q), []
    if problem.options.output_final_state:
        final = q.new_empty(problem.state_shape, dtype=getattr(torch, problem.state_dtype))
    if problem.options.return_intermediate_states:
        chunks = torch.library.get_ctx().new_dynamic_size() if problem.varlen else problem.chunks
        states = q.new_empty(problem.B, chunks, *problem.state_shape[1:])
    if needs_grad and op == "chunk":
        saved = [q.new_empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in module.saved_specs(problem, q.device)]
    return o, final, states, saved


@torch.library.register_fake("kdakit::inference", lib=_LIBRARY)
def _inference_fake(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, op, options, backend):
    arrays = q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu
    o, final_state, states, _ = _forward_fake(*arrays, op, options, backend, False)
    wanted = Options.decode(options)
    return [o] + [final_state] * wanted.output_final_state + [states] * wanted.return_intermediate_states


@torch.library.impl(_LIBRARY, "step_", "CompositeExplicitAutograd")
def _step_(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, options, backend):
    arrays = Arrays(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu)
    return run_in_place(arrays, Options.decode(options), backend)


def run_in_place(arrays: Arrays, options: Options, backend: str) -> Tensor:
    """o of a token recurrence whose final state goes over the initial one: what kdakit::step_ does, for calls that are `unwatched`."""
    key = _alike("in place", arrays, options, backend)
    plan = _plans.get(key)
    if plan is not None:
        torch.autograd.graph.increment_version(arrays.initial_state)
        return plan(arrays).o
    problem, device = _describe_real(arrays, "recurrent", options, False), arrays.q.device
    module = dispatch.select("torch", problem, device, backend)
    _check_values(problem, arrays)
    torch.autograd.graph.increment_version(arrays.initial_state)
    config = module.default_config(problem, device)
    with _without_autocast(device.type):
        if key is not None and module.planned is not None:
            return _planned(key, module.planned, problem, arrays, config, arrays.initial_state).o
        return module.step(problem, arrays, config, final_state=arrays.initial_state).o


@torch.library.register_fake("kdakit::step_", lib=_LIBRARY)
def _step_fake(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, options, backend):
    arrays = Arrays(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu)
    dispatch.select("torch", _describe(arrays, "recurrent", options, False), q.device, backend)
    return q.new_empty(v.shape, dtype=v.dtype)


@torch.library.impl(_LIBRARY, "backward", "CompositeExplicitAutograd")
def _backward(
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, saved, d_o, d_final_state, op, options, backend
):  # fmt: skip
    arrays = Arrays(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu)
    return run_backward(arrays, saved, d_o, d_final_state, op, Options.decode(options), backend)


def run_backward(
    arrays: Arrays, saved: Sequence[Tensor], d_o: Tensor, d_final_state: Tensor | None, op: str, options: Options, backend: str
) -> list[Tensor]:
    """Gradients of the DIFFERENTIABLE arrays, empty where there is no such array: what kdakit::backward does, for calls that are
    `unwatched`."""
    q = arrays.q
    key = _alike(f"{op}, backward", arrays, options, backend, *saved, d_o, d_final_state)
    plan = _plans.get(key)
    if plan is not None:
        grads = plan((*arrays, *saved, d_o, d_final_state))
    else:
        problem = _describe_real(arrays, op, options, needs_grad=True)
        module = dispatch.differentiates(dispatch.select("torch", problem, q.device, backend))
        given = problem, arrays, saved, d_o, d_final_state, module.default_config(problem, q.device)
        with _without_autocast(q.device.type):
            can = key is not None and module.planned_backward is not None
            grads = _planned(key, module.planned_backward, *given) if can else module.backward(*given)
    return [_empty(q) if x is None else x.contiguous() for x in grads[: len(DIFFERENTIABLE)]]


@torch.library.register_fake("kdakit::backward", lib=_LIBRARY)
def _backward_fake(
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, saved, d_o, d_final_state, op, options, backend
):  # fmt: skip
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    return [_empty(q) if x is None else x.new_empty(x.shape) for x in inputs]


def _setup_context(ctx, inputs, output):
    arrays, (ctx.op, ctx.options, ctx.backend, _) = inputs[:10], inputs[10:]
    ctx.has_final_state = Options.decode(ctx.options).output_final_state
    ctx.save_for_backward(*arrays, *output[3])
    ctx.set_materialize_grads(False)  # what is saved counts as output: its gradients would be written out as zeros


NO_BATCHED_GRADIENTS = (
    "KDA has no gradients by PyTorch's older vmap (is_grads_batched=True, torch.autograd.functional with vectorize=True): use "
    "torch.func.vmap over torch.autograd.grad(.., retain_graph=True), or torch.func.jacrev"
)


def _autograd_backward(ctx, d_o, d_final_state, _d_states, _d_saved):
    if any(d is not None and is_legacy_batchedtensor(d) for d in (d_o, d_final_state)):
        raise NotImplementedError(NO_BATCHED_GRADIENTS)
    kept = ctx.saved_tensors  # once: activation checkpointing unpacks them on access
    arrays, saved = kept[:10], list(kept[10:])
    if d_o is None:
        d_o = torch.zeros_like(arrays[2])
    d_final = d_final_state if ctx.has_final_state else None
    backward = _backward if unwatched((*arrays, d_o)) and not torch.is_grad_enabled() else torch.ops.kdakit.backward
    grads = backward(*arrays, saved, d_o, d_final, ctx.op, ctx.options, ctx.backend)
    grads = [grad if x is not None and needed else None for x, grad, needed in zip(arrays, grads, ctx.needs_input_grad, strict=False)]
    return *grads, None, None, None, None, None, None


torch.library.register_autograd("kdakit::forward", _autograd_backward, setup_context=_setup_context, lib=_LIBRARY)


_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


def unwatched(tensors) -> bool:
    """Whether nobody would see an operator: no compiler, tracer, dispatch mode or transform is at work, and these are plain tensors. Those
    on the device meta have no values: they are an operator's fake kernel's."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    return torch._C._get_tracing_state() is None and _PLAIN.issuperset(map(type, tensors)) and not getattr(tensors[0], "is_meta", False)


Result = TypeVar("Result", Tensor, Tensor | None)


def no_view(x: Result) -> Result:
    """The same memory, as a tensor of its own: autograd takes part of a larger one for a view, which nobody may detach_ and, where it is
    one of several, change in place."""
    return x.new_empty(0).set_(x) if x is not None and x._is_view() else x


class Differentiated(torch.autograd.Function):
    """kdakit::forward with its derivative, for calls that are `unwatched`: what PyTorch does around an operator takes the host as long as
    all the rest. Returns o, the final state and the states."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _forward(*inputs, True)
        _setup_context(ctx, (*inputs, True), output)
        return tuple(map(no_view, output[:3]))

    @staticmethod
    def backward(ctx, *grads):
        return _autograd_backward(ctx, *grads, None)[:-1]


def _no_second_derivative(ctx, *grads):
    raise RuntimeError("KDA has no second derivative: call backward without create_graph=True")


torch.library.register_autograd("kdakit::backward", _no_second_derivative, lib=_LIBRARY)
