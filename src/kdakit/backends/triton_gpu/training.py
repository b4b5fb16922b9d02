"""Host side of the backward: five launches (and a short one for initial states), and what the forward keeps for them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kdakit.backends.triton_gpu import launch
from kdakit.backends.triton_gpu.config import Config, bounded, padded
from kdakit.backends.triton_gpu.gradient import gradient_kernel
from kdakit.backends.triton_gpu.normed_gradient import gradient_normed_kernel
from kdakit.backends.triton_gpu.products import products_kernel
from kdakit.backends.triton_gpu.rebuild import rebuild_normed_kernel
from kdakit.backends.triton_gpu.replay import rebuild_kernel, replay_kernel
from kdakit.backends.triton_gpu.reverse import restore_kernel, reverse_kernel
from kdakit.problem import Arrays, Problem


class Replayed(NamedTuple):
    """What the replay makes of a forward's inputs, its `lower` and its checkpoints; rows as in launch.Workspace."""

    tiles: torch.Tensor  # [slots, HV, 3, C, KP]  k_in, q_decayed, k_solved
    decay: torch.Tensor  # [slots, HV, KP]
    factors: torch.Tensor  # [slots, HV, 3, C]  beta, 1 / |q|, 1 / |k|
    first: torch.Tensor  # [N, HV, 2, C, KP]  what rounding took from k_in and q_decayed of the first chunks
    states: torch.Tensor  # [slots, HV, VP, KP]  before each chunk
    r: torch.Tensor  # [B, T, HV, V]  v - k_in S


def replayed_specs(problem: Problem, config: Config) -> list[tuple[tuple[int, ...], str]]:
    C, KP, VP, HV = config.chunk, padded(problem.K), padded(problem.V), problem.HV
    slots = launch.chunk_slots(problem, C)
    first = problem.N if corrected(problem) else 0
    shapes = [(slots, HV, 3, C, KP), (slots, HV, KP), (slots, HV, 3, C), (first, HV, 2, C, KP), (slots, HV, VP, KP)]
    shapes += [(problem.B, problem.T, HV, problem.V)]
    lost = "float32" if problem.dtype == "float16" else problem.dtype  # strong decays underflow in float16
    dtypes = (problem.dtype, "float32", "float32", lost, problem.dtype, problem.dtype)
    return list(zip(shapes, dtypes, strict=True))


def k_solved(x: Replayed, config: Config) -> torch.Tensor:
    """The tiles as k_solved, the last of three, is kept in them: as precisely as the inverse where that fits."""
    return x.tiles.view(torch.float16) if config.solve == "float16" else x.tiles


def corrected(problem: Problem) -> bool:
    """Half-precision tiles: the gradient of the initial state gets back what they lost."""
    return problem.has_initial_state and problem.dtype != "float32"


def saved_specs(problem: Problem, config: Config) -> list[tuple[tuple[int, ...], str]]:
    """`lower`, A_qk inverse and checkpoints of the state; or, with disable_recompute, in place of the latter all that the replay makes."""
    C, HV = config.chunk, problem.HV
    slots = launch.chunk_slots(problem, C)
    specs = [((slots, HV, C, C), config.solve), ((slots, HV, C, C), problem.dtype)]
    if problem.options.disable_recompute:
        return specs + replayed_specs(problem, config)
    return [*specs, ((-(-slots // launch.CHECKPOINT), HV, padded(problem.V), padded(problem.K)), problem.dtype)]


def saved(problem: Problem, arrays: Arrays, x: launch.Views, space: launch.Workspace, config: Config) -> list[torch.Tensor]:
    if problem.options.disable_recompute:
        y = rebuild(problem, arrays, x, space.lower, config)
        replay(problem, arrays, x, y, space.checkpoints, config)
        return [space.lower, space.solved, *y]
    return [space.lower, space.solved, space.checkpoints]


def rebuild(problem: Problem, arrays: Arrays, x: launch.Views, lower, config: Config) -> Replayed:
    """First launch: the tiles of every chunk again."""
    o, C = problem.options, config.chunk
    out = Replayed(*(torch.empty(s, dtype=getattr(torch, d), device=arrays.q.device) for s, d in replayed_specs(problem, config)))
    slots, NT = lower.shape[0], -(-problem.T // C)
    if not slots * problem.HV:
        return out
    args = (
        x.q, x.k, x.g, arrays.beta, arrays.A_log, arrays.dt_bias, arrays.cu_seqlens, lower, out.tiles, k_solved(out, config),
        out.decay, out.factors, out.first,
        problem.T, problem.N, NT, problem.H, problem.HV, o.scale, o.lower_bound or 0.0,
        *x.strides["q"], *x.strides["k"], *x.strides["g"], *x.strides["b"],
    )  # fmt: skip
    constants = common(problem, config) | dict(
        BK=config.slice_k, ALIGN=x.align, GATE=o.gate, BETA=o.beta, L2NORM=o.l2norm, HAS_A_LOG=problem.has_A_log,
        HAS_DT_BIAS=problem.has_dt_bias, HAS_FIRST=corrected(problem), SOLVE=launch.DTYPES[config.solve], PTX=config.ptx,
        BOUNDED=bounded(problem),
    )  # fmt: skip
    if config.normed:
        launch.launch(rebuild_normed_kernel, slots * problem.HV, args, constants, num_warps=4, num_stages=1)
    else:
        launch.launch(rebuild_kernel, slots * problem.HV, args, constants, num_warps=config.slice_warps, num_stages=1, **limit(config))
    return out


def replay(problem: Problem, arrays: Arrays, x: launch.Views, out: Replayed, checkpoints, config: Config) -> None:
    """Second launch: the states before every chunk and v - k_in S again."""
    slots, C = out.tiles.shape[0], config.chunk
    if not slots * problem.HV:
        return
    args = (
        x.v, arrays.cu_seqlens, checkpoints, arrays.initial_state, out.tiles, k_solved(out, config), out.decay, out.factors, out.states,
        out.r,
        problem.T, problem.N, -(-problem.T // C), problem.HV, launch.CHECKPOINT, *x.strides["v"],
    )  # fmt: skip
    constants = common(problem, config) | dict(
        BV=config.replay_block_v, ALIGN=x.align, HAS_INITIAL=problem.has_initial_state, STAGES=config.replay_stages,
    )  # fmt: skip
    grid = slots * problem.HV * -(-problem.V // config.replay_block_v)
    launch.launch(replay_kernel, grid, args, constants, num_warps=config.replay_warps, **limit(config))


def reverse(problem: Problem, arrays: Arrays, x: Replayed, solved, d_o, d_final, config: Config):
    """Third launch: dS' of every chunk, the gradients of v (without beta where that is given) and of the initial state."""
    C, device = config.chunk, d_o.device
    d_states = torch.empty(x.states.shape, dtype=x.states.dtype, device=device)
    d_v = torch.empty(d_o.shape, dtype=d_o.dtype, device=device)
    small, d_initial, lost = getattr(torch, config.small), None, None
    if small != torch.float32:
        lost = torch.empty((x.tiles.shape[0], problem.HV, lost_size(problem, config)), dtype=small, device=device)
    if arrays.initial_state is not None:
        d_initial = torch.empty(problem.state_shape, dtype=arrays.initial_state.dtype, device=device)
    grid = problem.N * problem.HV * -(-problem.V // config.reverse_block_v)
    if grid:
        args = (
            d_o, x.tiles, k_solved(x, config), solved, x.decay, x.factors, arrays.cu_seqlens, d_final, d_states, d_v, lost, d_initial,
            problem.T, -(-problem.T // C), problem.HV,
        )  # fmt: skip
        constants = common(problem, config) | dict(
            BV=config.reverse_block_v, HAS_FINAL=d_final is not None, HAS_INITIAL=d_initial is not None, BETA=problem.options.beta,
            LOST=lost_size(problem, config), STAGES=config.reverse_stages,
        )  # fmt: skip
        launch.launch(reverse_kernel, grid, args, constants, num_warps=config.reverse_warps, **limit(config))
    return d_states, d_v, lost, d_initial


def lost_size(problem: Problem, config: Config) -> int:
    """Elements per chunk and head for what rounding took: from y, then in its place from two of three parts."""
    R = max(32, config.chunk)
    return max(config.chunk * padded(problem.V), 2 * padded(problem.K) * R)


def restore(problem: Problem, arrays: Arrays, x: Replayed, d_o, d_v, d_initial, config: Config) -> None:
    """A short launch for a gradient of the initial state from half-precision tiles: adds to d_initial what they lost."""
    grid = problem.N * problem.HV * -(-problem.V // 32)
    if grid and corrected(problem):
        constants = {n: c for n, c in common(problem, config).items() if n != "VP"} | dict(BV=32)
        args = d_o, d_v, x.first, arrays.cu_seqlens, d_initial, problem.T, problem.HV
        launch.launch(restore_kernel, grid, args, constants, num_warps=4)


class Products(NamedTuple):
    """Gradients of what a chunk is made of, from `products_kernel`; R is the chunk, at least 32."""

    pairs: torch.Tensor  # [slots, HV, 2, R, R]
    parts: torch.Tensor  # [slots, HV, 3, KP, R]
    d_decay: torch.Tensor  # [slots, HV, KP]
    d_beta: torch.Tensor


def products(problem: Problem, arrays: Arrays, y: Replayed, lower, d_states, d_o, d_v, lost, d_final, config: Config) -> Products:
    """Fourth launch: all products over V; d_v gets the beta that it lacks. Tiles that the replay made are used up."""
    C, KP, device, small = config.chunk, padded(problem.K), d_o.device, getattr(torch, config.small)
    slots, HV, R = lower.shape[0], problem.HV, max(32, config.chunk)
    mine = y.tiles.dtype == small and C == R and not problem.options.disable_recompute
    out = Products(
        torch.empty((slots, HV, 2, R, R), dtype=small, device=device),
        y.tiles.view(slots, HV, 3, KP, R) if mine else torch.empty((slots, HV, 3, KP, R), dtype=small, device=device),
        torch.empty((slots, HV, KP), device=device),
        torch.empty(arrays.beta.shape, dtype=arrays.beta.dtype, device=device),
    )
    if slots * HV:
        args = (
            arrays.beta, arrays.cu_seqlens, lower, y.factors, y.states, d_states, y.r, d_o, arrays.initial_state, d_final, d_v, out.d_beta,
            out.pairs, out.parts, lost, out.d_decay, problem.T, problem.N, -(-problem.T // C), HV, problem.options.scale,
            *arrays.beta.stride(),
        )  # fmt: skip
        constants = common(problem, config) | dict(
            BK=config.product_slice_k, BV=config.slice_v, BETA=problem.options.beta, HAS_INITIAL=problem.has_initial_state,
            HAS_FINAL=d_final is not None, SMALL=launch.DTYPES[config.small], STAGES=config.product_stages,
            NORMED=joint(problem, config), LOST=lost_size(problem, config),
        )  # fmt: skip
        launch.launch(products_kernel, slots * HV, args, constants, num_warps=config.product_warps, num_stages=1, **limit(config))
    return out


def gradients(problem: Problem, arrays: Arrays, x: launch.Views, y: Replayed, z: Products, lost, dtype, config: Config):
    """Fifth launch: gradients of q, k, g, A_log, dt_bias."""
    o, C, device = problem.options, config.chunk, z.parts.device
    B, T, H, HV, K = problem.B, problem.T, problem.H, problem.HV, problem.K
    slots, wide = z.parts.shape[0], torch.float32 if problem.group > 1 else dtype
    d_q, d_k = (torch.empty((B, T, HV, K), dtype=wide, device=device) for _ in "qk")
    d_g = torch.empty(arrays.g.shape, dtype=arrays.g.dtype, device=device)
    d_A_log = torch.empty((slots, HV, padded(K)), device=device) if problem.has_A_log else None
    d_dt_bias = torch.empty((slots, HV, padded(K)), device=device) if problem.has_dt_bias else None
    if slots * HV:
        args = (
            x.q, x.k, x.g, arrays.A_log, arrays.dt_bias, arrays.cu_seqlens, y.factors, z.pairs, z.parts, lost, z.d_decay, d_q, d_k, d_g,
            d_A_log, d_dt_bias, T, problem.N, -(-T // C), H, HV, o.lower_bound or 0.0, *x.strides["q"], *x.strides["k"], *x.strides["g"],
        )  # fmt: skip
        constants = common(problem, config) | dict(
            BK=config.slice_k, ALIGN=x.align, GATE=o.gate, BOUNDED=bounded(problem), L2NORM=o.l2norm, HAS_A_LOG=problem.has_A_log,
            HAS_DT_BIAS=problem.has_dt_bias, PTX=config.ptx, HIP=config.hip, LOST=lost_size(problem, config),
        )  # fmt: skip
        if joint(problem, config):
            few = {"maxnreg": config.gradient_registers} if config.gradient_registers else {}
            launch.launch(gradient_normed_kernel, slots * HV, args, constants, num_warps=8, num_stages=1, **few)
        else:
            launch.launch(gradient_kernel, slots * HV, args, constants, num_warps=config.slice_warps, num_stages=1, **limit(config))
    if z.parts.is_meta:  # nobody wants the sums, for which PyTorch would import sympy: seconds
        return d_q, d_k, d_g, d_A_log, d_dt_bias
    if problem.group > 1:
        d_q, d_k = (w.view(B, T, H, problem.group, K).sum(3).to(dtype) for w in (d_q, d_k))
    if d_A_log is not None:
        d_A_log = d_A_log.sum((0, 2)).view(arrays.A_log.shape).to(arrays.A_log.dtype)
    if d_dt_bias is not None:
        d_dt_bias = d_dt_bias.sum(0)[:, :K].reshape(arrays.dt_bias.shape).to(arrays.dt_bias.dtype)
    return d_q, d_k, d_g, d_A_log, d_dt_bias


def joint(problem: Problem, config: Config) -> bool:
    """One formula for all gates of a chunk, `normed_gradient`: for the head size whose speed it is for."""
    return config.normed and bounded(problem) and padded(problem.K) == 128


def limit(config: Config) -> dict[str, int]:
    return {"maxnreg": config.registers} if config.registers else {}


def common(problem: Problem, config: Config) -> dict:
    return dict(
        K=problem.K, V=problem.V, KP=padded(problem.K), VP=padded(problem.V), C=config.chunk, S=config.half, GROUP=config.group,
        VARLEN=bool(problem.varlen), V_FIRST=problem.options.state_v_first, PRECISION=config.precision,
    )  # fmt: skip


def backward(problem: Problem, arrays: Arrays, kept, d_o, d_final, config: Config) -> Arrays:
    if not kept:  # the forward was the token recurrence
        problem = problem.replace(op="chunk", needs_grad=True, output_final_state=False)
        kept = launch.forward(problem, arrays, config)[1]
    arrays = launch.contiguous_parameters(arrays)
    x, d_o = launch.views(arrays), d_o.contiguous()
    d_final = None if d_final is None else d_final.contiguous()
    with launch.on_device(arrays.q):
        lower, solved, *rest = kept
        if problem.options.disable_recompute:
            y = Replayed(*rest)
            d_states, d_v, lost, d_initial = reverse(problem, arrays, y, solved, d_o, d_final, config)
        else:
            y = rebuild(problem, arrays, x, lower, config)
            with launch.beside(d_o) as aside:  # neither of the two fills the chip
                d_states, d_v, lost, d_initial = reverse(problem, arrays, y, solved, d_o, d_final, config)
                with aside():
                    replay(problem, arrays, x, y, rest[0], config)
        z = products(problem, arrays, y, lower, d_states, d_o, d_v, lost, d_final, config)
        d_q, d_k, d_g, d_A_log, d_dt_bias = gradients(problem, arrays, x, y, z, lost, d_o.dtype, config)
        restore(problem, arrays, y, d_o, d_v, d_initial, config)
    return Arrays(d_q, d_k, d_v, d_g, z.d_beta, d_A_log, d_dt_bias, d_initial)
