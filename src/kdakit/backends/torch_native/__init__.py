"""Vectorised PyTorch on any device: the backend that always works. Stages: gate -> intra -> state -> output, and back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from kdakit.backends.torch_native import draft as draft
from kdakit.backends.torch_native.backward import chunk_backward
from kdakit.backends.torch_native.blocks import spiked
from kdakit.backends.torch_native.gate import Activated, activate, activate_backward, compute_dtype
from kdakit.backends.torch_native.intra import intra
from kdakit.backends.torch_native.output import output
from kdakit.backends.torch_native.plan import chunk_tokens, chunks_per_piece, keep_memory, make_plan, visible_cu_seqlens
from kdakit.backends.torch_native.state import state
from kdakit.backends.torch_native.step import recurrence
from kdakit.backends.torch_native.token import token_backward
from kdakit.backends.torch_native.wide import as_computed, widened
from kdakit.chunked import as_chunked
from kdakit.problem import Arrays, Problem
from kdakit.reference import Result


def supports(problem: Problem, device: Any) -> str | None:
    if problem.varlen == "segment_ids":
        return "takes cu_seqlens, not segment_ids"
    return None


def default_config(problem: Problem, device: Any) -> None:
    """Nothing to choose."""


def saved_specs(problem: Problem, device: Any) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of what `forward` keeps for `backward` beside the inputs: A, its inverse and the state before each piece; with
    disable_recompute the state before each chunk, v - k S and v_new."""
    problem = as_computed(as_chunked(problem), device)
    rows = problem.HV if problem.varlen else problem.B * problem.HV
    NT, C, K, V = problem.chunks, chunk_tokens(problem), problem.K, problem.V
    shapes: list[tuple[int, ...]] = [(NT, rows, 2, C, C), (NT, rows, C, C)]
    if problem.options.disable_recompute:
        shapes += [(NT, rows, K, V), (NT, rows, C, V), (NT, rows, C, V)]
    else:
        shapes += [(-(-NT // chunks_per_piece(problem, torch.device(device))), rows, K, V)]
    return [(shape, problem.compute_dtype) for shape in shapes]


class Chunks(NamedTuple):
    """Activated inputs of some chunks of every row; M = chunks * rows."""

    rows: torch.Tensor  # [M, 2, C, K]  q scaled, and k
    beta: torch.Tensor  # [M, C, 1]
    g: torch.Tensor  # [M, C, K]
    v: torch.Tensor  # [chunks, rows, C, V]


def forward(problem: Problem, arrays: Arrays, config: Any = None) -> tuple[Result, list[torch.Tensor]]:
    device = arrays.q.device
    problem = as_computed(as_chunked(problem), device)
    plan, dtype = make_plan(problem, arrays), compute_dtype(problem)
    keep_memory(device)
    initial = initial_states(problem, arrays)
    final = initial.clone()
    o = plan.empty(arrays.v.shape, arrays.v.dtype, device)
    look = device.type == "cpu"
    saved = []
    if problem.needs_grad:
        new = torch.empty if plan.used == plan.NT else torch.zeros
        saved = [new(shape, dtype=dtype, device=device) for shape, _ in saved_specs(problem, device)]
    before = None
    if problem.options.return_intermediate_states:
        before = torch.empty(plan.NT, plan.rows, problem.K, problem.V, dtype=arrays.q.dtype, device=device)
    buffer = plan.state_buffer(initial)
    S = buffer[0].zero_()
    for index, (n0, n1) in enumerate(plan.pieces()):
        x = _chunk_inputs(problem, _piece(plan, arrays, n0, n1), plan, n0, n1)
        mixed = intra(*x[:3], look)
        states, errors, v_new = _states(plan, n0, S, x, mixed, initial, final, buffer)
        states, S = states[:-1], states[-1]
        out = output(mixed.rows[:, 0], mixed.A[:, 0], states.flatten(0, 1), v_new.flatten(0, 1))
        plan.put(o, plan.from_chunks(_by_chunk(plan, out), n0, n1), n0, n1)
        if problem.needs_grad:
            for kept, a in zip(saved, (mixed.A, mixed.inverse), strict=False):
                kept[n0:n1] = _by_chunk(plan, a)
            if problem.options.disable_recompute:
                for kept, a in zip(saved[2:], (states, errors, v_new), strict=True):
                    kept[n0:n1] = a
            else:
                saved[2][index] = states[0]
        if before is not None:
            before[n0:n1] = states
    if before is not None:
        before = _layout(problem, plan.chunk_states(before)).contiguous()
    return Result(plan.finish(o), _final_state(problem, final), before), saved


def backward(problem: Problem, arrays: Arrays, saved, d_o, d_final_state, config: Any = None) -> Arrays:
    device = arrays.q.device
    problem = as_computed(as_chunked(problem), device)
    plan, dtype = make_plan(problem, arrays), compute_dtype(problem)
    keep_memory(device)
    initial, look = initial_states(problem, arrays), device.type == "cpu"
    if not saved:  # the forward was the token recurrence
        saved = forward(problem, arrays)[1]
    d_final = initial_states(problem, arrays._replace(initial_state=d_final_state))
    d_initial = d_final.clone()
    grads = [plan.empty(x.shape, x.dtype, device) for x in arrays[:5]]
    parameters = arrays.A_log, arrays.dt_bias
    d_A_log, d_dt_bias = (None if x is None else widened(torch.zeros(x.shape, dtype=dtype, device=device)) for x in parameters)
    buffer, d_buffer = plan.state_buffer(initial), plan.state_buffer(initial)
    dS = d_buffer[0].zero_()
    for index, (n0, n1) in reversed(list(enumerate(plan.pieces()))):
        piece = _piece(plan, arrays, n0, n1)
        x = _chunk_inputs(problem, piece, plan, n0, n1)
        mixed = intra(*x[:3], look, [a[n0:n1].flatten(0, 1) for a in saved[:2]], keep=True)
        if problem.options.disable_recompute:
            states, errors, v_new = (a[n0:n1].flatten(0, 1) for a in saved[2:])
        else:
            states, errors, v_new = _states(plan, n0, saved[2][index], x, mixed, initial, initial.clone(), buffer)
            states, errors, v_new = (a.flatten(0, 1) for a in (states[:-1], errors, v_new))
        d_out = plan.to_chunks(plan.tokens(d_o, n0, n1).to(dtype), n0, n1)
        if plan.C == 1:
            *d, dS = token_backward(plan, n0, dS, x.rows, x.beta, mixed.decay, states, errors, v_new, d_out, d_final, d_initial)
        else:
            *d, dS = chunk_backward(
                plan, n0, dS, x.rows, x.beta, mixed, _exact(problem, x.g), states, errors, v_new, d_out, d_final, d_initial, d_buffer
            )
        d = _activated_gradients(problem, plan, n0, n1, *d)
        d = activate_backward(problem, piece, d)
        for out, a in zip(grads, d, strict=False):
            plan.put(out, a, n0, n1)
        if d_A_log is not None:
            d_A_log += d.A_log.view_as(d_A_log)
        if d_dt_bias is not None:
            d_dt_bias += d.dt_bias.view_as(d_dt_bias)
    d_state = None
    if arrays.initial_state is not None:
        d_state = _layout(problem, d_initial[: problem.N]).to(arrays.initial_state.dtype).contiguous()
    return Arrays(
        *map(plan.finish, grads),
        *(None if x is None else d.to(x.dtype) for x, d in zip(parameters, (d_A_log, d_dt_bias), strict=True)),
        d_state,
    )


def step(problem: Problem, arrays: Arrays, config: Any = None, final_state: torch.Tensor | None = None) -> Result:
    """final_state: where the state goes, perhaps over the initial one."""
    if final_state is not None:
        result = step(problem.replace(output_final_state=True), arrays)
        return result._replace(final_state=final_state.copy_(result.final_state))
    x = activate(problem, arrays)
    q, k = (a.repeat_interleave(problem.group, 2) for a in (x.q * problem.options.scale, x.k))
    x = x._replace(q=q, k=k)
    if problem.varlen:
        x, place, real = _pad_sequences(problem, arrays, x)
    initial = initial_states(problem, arrays)[: problem.N]
    o, final = recurrence(x, initial)
    final = final.clone() if final is initial else final  # after no tokens: perhaps the caller's own memory
    if problem.varlen:
        o = o.flatten(0, 1).index_select(0, place).masked_fill(~real[:, None, None], 0)[None] if o.numel() else torch.zeros_like(arrays.v)
    return Result(o.to(arrays.v.dtype), _final_state(problem, final))


def _piece(plan, arrays: Arrays, n0: int, n1: int) -> Arrays:
    """The call's arrays with their tokens narrowed to chunks n0..n1."""
    q, k, v, g = (plan.tokens(x, n0, n1) for x in arrays[:4])
    return arrays._replace(q=q, k=k, v=v, g=g, beta=plan.tokens(arrays.beta[..., None], n0, n1)[..., 0])


def _chunk_inputs(problem: Problem, piece: Arrays, plan, n0: int, n1: int) -> Chunks:
    x = activate(problem, piece)
    q, k, v, g, beta = (plan.to_chunks(a, n0, n1) for a in (*x[:4], x.beta[..., None]))
    if problem.group > 1:  # row (batch, head) -> the rows of its value heads
        q, k = (a.repeat_interleave(problem.group, 1) for a in (q, k))
    rows = q.new_empty(*q.shape[:2], 2, *q.shape[2:])
    torch.mul(q, problem.options.scale, out=rows[:, :, 0])
    rows[:, :, 1] = k
    return Chunks(*(a.flatten(0, 1) for a in (rows, beta, g)), v)


def _exact(problem: Problem, g) -> torch.Tensor | bool:
    """Whether, or in which chunks [M], small gradients of gates beside large ones matter: the gate is computed here, and its parameters'
    gradients weight each with its gate, or some gates are strong. Without a look at them they all go through levels, which are exact."""
    if g.device.type != "cpu":
        return False
    return problem.options.gate != "log_decay" or spiked(g)


def _activated_gradients(problem: Problem, plan, n0: int, n1: int, d_rows, d_v, d_g, d_beta) -> Activated:
    """From gradients in chunks, d_rows those of q scaled and of k, to those by token."""

    def tokens(a, group=1):
        a = plan.from_chunks(_by_chunk(plan, a), n0, n1)
        return a.unflatten(2, (-1, group)).sum(3) if group > 1 else a

    d_q, d_k = d_rows.unbind(1)
    d_q *= problem.options.scale
    return Activated(tokens(d_q, problem.group), tokens(d_k, problem.group), tokens(d_v), tokens(d_g), tokens(d_beta).squeeze(-1))


def initial_states(problem: Problem, arrays: Arrays) -> torch.Tensor:
    """[N, HV, K, V] in the compute dtype, zeros where none are given; packed calls get a row more for their unused chunks."""
    dtype = compute_dtype(problem)
    if arrays.initial_state is None:
        states = arrays.q.new_zeros(problem.N, problem.HV, problem.K, problem.V, dtype=dtype)
    else:
        states = _layout(problem, arrays.initial_state.to(dtype)).contiguous()
    return F.pad(states, (0, 0, 0, 0, 0, 0, 0, 1)) if problem.varlen else states


def _states(plan, n0, S, x: Chunks, mixed, initial, final, buffer):
    """The state stage on flat chunks."""
    flat = (mixed.inverse * x.beta.mT, mixed.rows[:, 1], mixed.k_decayed, mixed.decay)
    return state(plan, n0, S, x.v, *(_by_chunk(plan, a) for a in flat), initial, final, buffer)


def _by_chunk(plan, x):
    """[M, ..] -> [chunks, rows, ..]."""
    return x.unflatten(0, (-1, plan.rows))


def _layout(problem, states):
    """[.., K, V] <-> the caller's layout."""
    return states.transpose(-1, -2) if problem.options.state_v_first else states


def _final_state(problem, final):
    if not problem.options.output_final_state:
        return None
    return _layout(problem, final[: problem.N]).to(getattr(torch, problem.state_dtype)).contiguous()


def _pad_sequences(problem, arrays, x: Activated):
    """Packed [1, T, ..] -> one padded row per sequence [N, L, ..]; for each token its place among N * L, and whether it has one."""
    visible = visible_cu_seqlens(arrays)
    L = problem.T if visible is None else int((visible[1:] - visible[:-1]).max())
    cu = arrays.cu_seqlens.long()
    token = cu[:-1, None] + torch.arange(L, device=cu.device)  # [N, L]
    padding = token >= cu[1:, None]
    token = token.clamp(0, max(problem.T - 1, 0)).flatten()
    t = torch.arange(problem.T, device=cu.device)
    owner = torch.searchsorted(cu[1:].contiguous(), t, right=True).clamp(max=problem.N - 1)

    def pad(a):
        a = a[0].index_select(0, token).unflatten(0, (problem.N, L))
        return a.masked_fill(padding.view(problem.N, L, *[1] * (a.ndim - 2)), 0)

    # Within bounds even where cu_seqlens_cpu, which gave L, is not cu_seqlens.
    return Activated(*map(pad, x)), (owner * L + t - cu[owner]).clamp(max=max(problem.N * L - 1, 0)), t < cu[-1]
