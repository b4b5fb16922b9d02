"""Host side of the backward: five launches (and short ones for the gate's parameters and initial states), and what the forward keeps."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from kdakit.backends.triton_gpu import config as configs
from kdakit.backends.triton_gpu.config import Config, bounded, chunk_slots, padded
from kdakit.backends.triton_gpu.host.forward import Workspace, clear_gradients
from kdakit.backends.triton_gpu.kernels.gradient import gradient_kernel
from kdakit.backends.triton_gpu.kernels.gradient_normed import gradient_normed_kernel
from kdakit.backends.triton_gpu.kernels.parameter_sums import sums_kernel
from kdakit.backends.triton_gpu.kernels.products import products_kernel
from kdakit.backends.triton_gpu.kernels.rebuild import rebuild_kernel
from kdakit.backends.triton_gpu.kernels.rebuild_normed import rebuild_normed_kernel
from kdakit.backends.triton_gpu.kernels.replay import replay_kernel
from kdakit.backends.triton_gpu.kernels.reverse import restore_kernel, reverse_kernel
from kdakit.backends.triton_gpu.runtime.launch import DTYPES, Launch
from kdakit.backends.triton_gpu.runtime.layout import Layout, Views, views
from kdakit.backends.triton_gpu.runtime.streams import beside
from kdakit.problem import Arrays, Problem


class Replayed(NamedTuple):
    """What the replay makes of a forward's inputs, its `lower` and its checkpoints; rows as in Workspace."""

    tiles: torch.Tensor  # [slots, HV, 3, C, KP]  k_in, q_decayed, k_solved
    decay: torch.Tensor  # [slots, HV, KP]
    factors: torch.Tensor  # [slots, HV, 3, C]  beta, 1 / |q|, 1 / |k|
    first: torch.Tensor  # [N, HV, 2, C, KP]  what rounding took from k_in and q_decayed of the first chunks
    states: torch.Tensor  # [slots, HV, VP, KP]  before each chunk
    r: torch.Tensor  # [B, T, HV, V]  v - k_in S


def replayed_specs(problem: Problem, config: Config) -> list[tuple[tuple[int, ...], str]]:
    C, KP, VP, HV = config.chunk, padded(problem.K), padded(problem.V), problem.HV
    slots = chunk_slots(problem, C)
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
    slots = chunk_slots(problem, C)
    specs = [((slots, HV, C, C), config.solve), ((slots, HV, C, C), problem.dtype)]
    if problem.options.disable_recompute:
        return specs + replayed_specs(problem, config)
    return [*specs, ((-(-slots // configs.CHECKPOINT), HV, padded(problem.V), padded(problem.K)), problem.dtype)]


def saved(problem: Problem, arrays: Arrays, x: Views, space: Workspace, config: Config) -> list[torch.Tensor]:
    if problem.options.disable_recompute:
        y = rebuild(problem, arrays, x, space.lower, config)
        replay(problem, arrays, x, y, space.checkpoints, config)
        return [space.lower, space.solved, *y]
    return [space.lower, space.solved, space.checkpoints]


class Launches(NamedTuple):
    """Of a backward, in order; `restore` is for gradients of an initial state."""

    rebuild: Launch
    replay: Launch
    reverse: Launch
    products: Launch
    gradient: Launch
    sums: Launch
    restore: Launch


@lru_cache(maxsize=1024)
def launches(problem: Problem, config: Config, layout: Layout, has_final: bool = False) -> Launches:
    """has_final: the final state has a gradient. All launches are made, those that a call does not need too."""
    o, C, HV, KP, VP = problem.options, config.chunk, problem.HV, padded(problem.K), padded(problem.V)
    T, N, NT, H, slots = problem.T, problem.N, -(-problem.T // config.chunk), problem.H, chunk_slots(problem, config.chunk)
    every = dict(
        K=problem.K, V=problem.V, KP=KP, VP=VP, C=C, S=config.half, GROUP=config.group, VARLEN=bool(problem.varlen),
        V_FIRST=o.state_v_first, PRECISION=config.precision, ALIGN=layout.align, BK=config.slice_k, GATE=o.gate, BETA=o.beta,
        L2NORM=o.l2norm, HAS_A_LOG=problem.has_A_log, HAS_DT_BIAS=problem.has_dt_bias, HAS_INITIAL=problem.has_initial_state,
        HAS_FINAL=has_final, HAS_FIRST=corrected(problem), SOLVE=DTYPES[config.solve], SMALL=DTYPES[config.small],
        PTX=config.ptx, HIP=config.hip, BOUNDED=differences(problem), NORMED=joint(problem, config),
    )  # fmt: skip
    limit = {"maxnreg": config.registers} if config.registers else {}
    q, k, v, g, b = (layout.strides[n] for n in "qkvgb")

    def of(kernel, grid: int, numbers: tuple, warps: int, **more) -> Launch:
        options = {n: more.pop(n) for n in ("num_stages", "maxnreg") if n in more}
        constants = {n: c for n, c in (every | more).items() if n in kernel.arg_names}
        return Launch(kernel, grid, numbers, constants, num_warps=warps, **options)

    def blocks(width: int) -> int:
        return HV * -(-problem.V // width)

    slices = dict(num_stages=1, **limit)
    gradient, gradient_warps, of_gradient = gradient_kernel, config.slice_warps, slices
    if joint(problem, config):
        few = {"maxnreg": config.gradient_registers} if config.gradient_registers else {}
        gradient, gradient_warps, of_gradient = gradient_normed_kernel, 8, dict(num_stages=1, **few)
    tiles, tile_warps, of_tiles = rebuild_kernel, config.slice_warps, slices
    if config.normed:
        tiles, tile_warps, of_tiles = rebuild_normed_kernel, 4, dict(num_stages=1)
    place = T, N, NT
    return Launches(
        of(tiles, slots * HV, (*place, H, HV, o.scale, o.lower_bound or 0.0, *q, *k, *g, *b), tile_warps, **of_tiles),
        of(replay_kernel, slots * blocks(config.replay_block_v), (*place, HV, configs.CHECKPOINT, *v), config.replay_warps,
           BV=config.replay_block_v, STAGES=config.replay_stages, **limit),
        of(reverse_kernel, N * blocks(config.reverse_block_v), (T, NT, HV), config.reverse_warps,
           BV=config.reverse_block_v, STAGES=config.reverse_stages, **limit),
        of(products_kernel, slots * HV, (*place, HV, o.scale, *b), config.product_warps,
           BK=config.product_slice_k, BV=config.slice_v, STAGES=config.product_stages, **slices),
        of(gradient, slots * HV, (*place, H, HV, o.lower_bound or 0.0, *q, *k, *g), gradient_warps, **of_gradient),
        of(sums_kernel, HV, (slots, HV), 4),
        of(restore_kernel, N * blocks(32), (T, HV), 4, BV=32),
    )  # fmt: skip


def rebuild(problem: Problem, arrays: Arrays, x: Views, lower, config: Config) -> Replayed:
    """First launch: the tiles of every chunk again."""
    out = Replayed(*(torch.empty(s, dtype=getattr(torch, d), device=arrays.q.device) for s, d in replayed_specs(problem, config)))
    if lower.shape[0] * problem.HV:
        launches(problem, config, x.layout).rebuild(
            x.q, x.k, x.g, arrays.beta, arrays.A_log, arrays.dt_bias, arrays.cu_seqlens, lower, out.tiles, k_solved(out, config),
            out.decay, out.factors, out.first,
        )  # fmt: skip
    return out


def replay(problem: Problem, arrays: Arrays, x: Views, out: Replayed, checkpoints, config: Config) -> None:
    """Second launch: the states before every chunk and v - k_in S again."""
    if out.tiles.shape[0] * problem.HV:
        launches(problem, config, x.layout).replay(
            x.v, arrays.cu_seqlens, checkpoints, arrays.initial_state, out.tiles, k_solved(out, config), out.decay, out.factors,
            out.states, out.r,
        )  # fmt: skip


def reverse(problem: Problem, arrays: Arrays, x: Views, y: Replayed, solved, d_o, d_final, config: Config):
    """Third launch: dS' of every chunk, the gradients of v (without beta where that is given) and of the initial state."""
    C, device = config.chunk, d_o.device
    d_states = torch.empty(y.states.shape, dtype=y.states.dtype, device=device)
    d_v = torch.empty(d_o.shape, dtype=d_o.dtype, device=device)
    d_initial, lost = None, None
    if problem.options.beta == "given" and config.small != "float32":
        lost = torch.empty((y.tiles.shape[0], problem.HV, C, padded(problem.V)), dtype=getattr(torch, config.small), device=device)
    if arrays.initial_state is not None:
        d_initial = torch.empty(problem.state_shape, dtype=arrays.initial_state.dtype, device=device)
    if problem.N * problem.HV * problem.V:
        launches(problem, config, x.layout, d_final is not None).reverse(
            d_o, y.tiles, k_solved(y, config), solved, y.decay, y.factors, arrays.cu_seqlens, d_final, d_states, d_v, lost, d_initial
        )
    return d_states, d_v, lost, d_initial


def restore(problem: Problem, arrays: Arrays, x: Views, y: Replayed, d_o, d_v, d_initial, config: Config) -> None:
    """A short launch for a gradient of the initial state from half-precision tiles: adds to d_initial what they lost."""
    if corrected(problem) and problem.N * problem.HV * problem.V:
        launches(problem, config, x.layout).restore(d_o, d_v, y.first, arrays.cu_seqlens, d_initial)


class Products(NamedTuple):
    """Gradients of what a chunk is made of, from `products_kernel`; R is the chunk, at least 32."""

    pairs: torch.Tensor  # [slots, HV, 2, R, R]
    parts: torch.Tensor  # [slots, HV, 3, KP, R]  float16 or float32
    scales: torch.Tensor | None  # [slots, HV, 3, KP]  of float16 parts
    d_decay: torch.Tensor  # [slots, HV, KP]
    d_beta: torch.Tensor


def products(problem: Problem, arrays: Arrays, x: Views, y: Replayed, lower, d_states, d_o, d_v, lost, d_final, config) -> Products:
    """Fourth launch: all products over V; d_v gets the beta that it lacks. Tiles that the replay made are used up."""
    C, KP, device, small = config.chunk, padded(problem.K), d_o.device, getattr(torch, config.small)
    slots, HV, R = lower.shape[0], problem.HV, max(32, config.chunk)
    part = torch.float32 if small == torch.float32 else torch.float16
    mine = y.tiles.dtype == small and C == R and not problem.options.disable_recompute
    out = Products(
        torch.empty((slots, HV, 2, R, R), dtype=small, device=device),
        y.tiles.view(slots, HV, 3, KP, R).view(part) if mine else torch.empty((slots, HV, 3, KP, R), dtype=part, device=device),
        None if part == torch.float32 else torch.empty((slots, HV, 3, KP), device=device),
        torch.empty((slots, HV, KP), device=device),
        torch.empty(arrays.beta.shape, dtype=arrays.beta.dtype, device=device),
    )
    if slots * HV:
        launches(problem, config, x.layout, d_final is not None).products(
            arrays.beta, arrays.cu_seqlens, lower, y.factors, y.states, d_states, y.r, d_o, arrays.initial_state, d_final, d_v, out.d_beta,
            out.pairs, out.parts, out.scales, lost, out.d_decay,
        )  # fmt: skip
    return out


def gradients(problem: Problem, arrays: Arrays, x: Views, y: Replayed, z: Products, d_v, config: Config):
    """Fifth launch and a short one for sums over chunks: gradients of q, k, g, A_log, dt_bias."""
    device, K, shape = z.parts.device, problem.K, (problem.B, problem.T, problem.HV, problem.K)
    slots, dtype = z.parts.shape[0], d_v.dtype
    wide = torch.float32 if problem.group > 1 else dtype
    d_q, d_k = (torch.empty(shape, dtype=wide, device=device) for _ in "qk")
    d_g = torch.empty(arrays.g.shape, dtype=arrays.g.dtype, device=device)

    def of(parameter):
        """Its gradient, and every chunk's share of it."""
        if parameter is None:
            return None, None
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        return whole, torch.empty((slots, problem.HV, padded(K)), device=device)

    (d_A_log, A_shares), (d_dt_bias, bias_shares) = of(arrays.A_log), of(arrays.dt_bias)
    made = launches(problem, config, x.layout)
    if slots * problem.HV:
        made.gradient(
            x.q, x.k, x.g, arrays.A_log, arrays.dt_bias, arrays.cu_seqlens, y.factors, z.pairs, z.parts, z.scales, z.d_decay, d_q, d_k, d_g,
            A_shares, bias_shares,
        )  # fmt: skip
    if d_A_log is not None or d_dt_bias is not None:
        made.sums(d_g, A_shares, bias_shares, d_A_log, d_dt_bias)
    clear_gradients(problem, arrays, d_q, d_k, d_v, d_g, z.d_beta)
    if problem.group > 1 and not d_q.is_meta:  # without memory PyTorch would import sympy for the sums: seconds
        d_q, d_k = (w.view(problem.B, problem.T, problem.H, problem.group, K).sum(3).to(dtype) for w in (d_q, d_k))
    return d_q, d_k, d_g, d_A_log, d_dt_bias


def differences(problem: Problem) -> bool:
    """Whether a gate's gradient may be a difference of two sums, which a bounded gate allows: not in float32, where saturated gates have
    gradients far below the sums, nor in float16, whose gradients are float32's."""
    return bounded(problem) and problem.dtype == "bfloat16"


def joint(problem: Problem, config: Config) -> bool:
    """One formula for all gates of a chunk, `gradient_normed`: for the head size whose speed it is for."""
    return config.normed and bounded(problem) and padded(problem.K) == 128


def backward(problem: Problem, arrays: Arrays, kept, d_o, d_final, config: Config) -> Arrays:
    """All launches, on contiguous parameters and cotangents."""
    x = views(arrays)
    lower, solved, *rest = kept
    if problem.options.disable_recompute:
        y = Replayed(*rest)
        d_states, d_v, lost, d_initial = reverse(problem, arrays, x, y, solved, d_o, d_final, config)
    else:
        y = rebuild(problem, arrays, x, lower, config)
        with beside(d_o) as aside:  # neither of the two fills the chip
            d_states, d_v, lost, d_initial = reverse(problem, arrays, x, y, solved, d_o, d_final, config)
            with aside():
                replay(problem, arrays, x, y, rest[0], config)
    z = products(problem, arrays, x, y, lower, d_states, d_o, d_v, lost, d_final, config)
    d_q, d_k, d_g, d_A_log, d_dt_bias = gradients(problem, arrays, x, y, z, d_v, config)
    restore(problem, arrays, x, y, d_o, d_v, d_initial, config)
    return Arrays(d_q, d_k, d_v, d_g, z.d_beta, d_A_log, d_dt_bias, d_initial)
