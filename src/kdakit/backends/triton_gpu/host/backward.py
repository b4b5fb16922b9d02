"""Host side of the backward: five launches (and short ones for the gate's parameters and initial states), and what the forward keeps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from kdakit.backends.triton_gpu import borrowed
from kdakit.backends.triton_gpu.config import (
    Config,
    checkpoint_dtype,
    chunk_slots,
    corrected,
    exact_decay,
    exact_ends,
    exact_pairs,
    exact_q,
    padded,
)
from kdakit.backends.triton_gpu.host.forward import (
    Kept,
    Recorded,
    Workspace,
    clear_gradients,
    end_states,
    last_shape,
    recorded_specs,
    states_specs,
)
from kdakit.backends.triton_gpu.kernels import gradient as gradient_plain
from kdakit.backends.triton_gpu.kernels import gradient_normed, parameter_sums, rebuild_normed, replay_wide, reverse_wide
from kdakit.backends.triton_gpu.kernels import products as products_kernel
from kdakit.backends.triton_gpu.kernels import rebuild as rebuild_plain
from kdakit.backends.triton_gpu.kernels import replay as replay_kernel
from kdakit.backends.triton_gpu.kernels import reverse as reverse_kernel
from kdakit.backends.triton_gpu.runtime.launch import note_lent
from kdakit.backends.triton_gpu.runtime.layout import Views, views
from kdakit.backends.triton_gpu.runtime.streams import beside
from kdakit.problem import Arrays, Problem


class Replayed(NamedTuple):
    """What is made again of a forward's inputs, its `lower` and its checkpoints; rows as in Workspace. With config.keep the first three are
    the forward's own, with config.keeps_states all but `first`, which is then empty."""

    tiles: torch.Tensor  # [slots, HV, 3, C, KP]  k_in, q_decayed, k_solved
    decay: torch.Tensor  # [slots, HV, KP]
    factors: torch.Tensor  # [slots, HV, 3, C]  beta, 1 / |q|, 1 / |k|
    first: torch.Tensor  # [N, HV, 2, C, KP]  what rounding took from k_in and q_decayed of the first chunks; in bfloat16 q_lost's part less
    states: torch.Tensor  # [slots, HV, VP, KP]  before each chunk
    r: torch.Tensor  # [B, T, HV, V]  v - k_in S
    r_lost: torch.Tensor | None = None  # [N, HV, C, VP]  what rounding took from r of the last chunks, if config.exact_last
    q_lost: torch.Tensor | None = None  # [slots, HV, C, KP]  what it took from q_decayed, if exact_q
    states_lost: torch.Tensor | None = None  # [slots, HV, VP, KP]  what it took from states, if exact_decay
    before_last: torch.Tensor | None = None  # `end_states`: S before the last chunks but the first, if exact_ends


def replayed_specs(problem: Problem, config: Config) -> dict[str, tuple[tuple[int, ...], str]]:
    """(shape, dtype) of the fields of Replayed that a call has."""
    C, KP, VP, HV = config.chunk, padded(problem.K), padded(problem.V), problem.HV
    slots = chunk_slots(problem, C)
    lost = "float32" if problem.dtype == "float16" else problem.dtype  # strong decays underflow in float16
    return dict(
        tiles=((slots, HV, 3, C, KP), problem.dtype),
        decay=((slots, HV, KP), "float32"),
        factors=((slots, HV, 3, C), "float32"),
        first=((problem.N if corrected(problem) else 0, HV, 2, C, KP), lost),
        states=((slots, HV, VP, KP), problem.dtype),
        **({"q_lost": ((slots, HV, C, KP), problem.dtype)} if exact_q(problem) else {}),
        **states_specs(problem, config),
    )


def k_solved(x: Replayed, config: Config) -> torch.Tensor:
    """The tiles as k_solved, the last of three, is kept in them: as precisely as the inverse where that fits."""
    return x.tiles.view(torch.float16) if config.solve_dtype == "float16" else x.tiles


def kept_names(problem: Problem, config: Config) -> tuple[str, ...]:
    """Fields of Replayed that the forward has made and left, beside what it always leaves: of tiles, and of states, which are its
    checkpoints."""
    tiles = ("tiles", "decay", "factors") if config.keep else ()
    return (*tiles, *(states_specs(problem, config) if config.keeps_states else ()))


def saved_specs(problem: Problem, config: Config, device: Any) -> list[tuple[tuple[int, ...], str]]:
    """`lower`, A_qk inverse and checkpoints of the state; and `kept_names`. With `borrowed.records` those of Recorded."""
    if borrowed.records(problem, config, device):
        return recorded_specs(problem, config)
    C, HV = config.chunk, problem.HV
    slots = chunk_slots(problem, C)
    specs = [((slots, HV, C, C), config.solve_dtype), ((slots, HV, C, C), problem.dtype)]
    specs += [((-(-slots // config.checkpoint), HV, padded(problem.V), padded(problem.K)), checkpoint_dtype(problem, config))]
    every = replayed_specs(problem, config)
    return specs + [every[name] for name in kept_names(problem, config)]


def saved(problem: Problem, space: Workspace | Kept | Recorded, config: Config) -> list[Any]:
    if isinstance(space, Recorded):
        return list(space)
    places = {"factors": "beta"}  # of Workspace, where it has another name
    return [space.lower, space.solved, space.checkpoints, *(getattr(space, places.get(n, n)) for n in kept_names(problem, config))]


def replaced(problem: Problem, config: Config, device: torch.device) -> tuple[str, ...]:
    """Names of the kernels in whose place a call that will be differentiated, and its backward, have another backend's."""
    return borrowed.replaced(problem, config, device) if problem.needs_grad else ()


def room(problem: Problem, config: Config, device: torch.device, checkpoints: torch.Tensor, kept: list[torch.Tensor]) -> Replayed:
    """What the forward has kept, and room for what is made again."""
    have = dict(zip(kept_names(problem, config), kept, strict=True)) | ({"states": checkpoints} if config.keeps_states else {})
    rest = {name: spec for name, spec in replayed_specs(problem, config).items() if name not in have}
    return Replayed(**have, **{name: torch.empty(s, dtype=getattr(torch, d), device=device) for name, (s, d) in rest.items()})


def rebuild(problem: Problem, arrays: Arrays, x: Views, lower, out: Replayed, config: Config) -> None:
    """First launch, unless they were kept: the tiles of every chunk again."""
    device = arrays.q.device
    if borrowed.lends_to(arrays.q) and (lent := borrowed.rebuild(problem, config, device)) is not None:
        own, first = arrays._replace(q=x.q, k=x.k, g=x.g), out.first if corrected(problem) else None
        group = 1 if config.normed else config.group
        made_too = dict(decay=out.decay, factors=out.factors, first=first, q_lost=out.q_lost)
        note_lent(lent(problem, own, lower=lower, tiles=out.tiles, **made_too, group=group))
    elif lower.shape[0] * problem.HV:
        kernel = rebuild_normed if config.normed else rebuild_plain
        kernel.launch(problem, config, x.layout)(
            q=x.q,
            k=x.k,
            g=x.g,
            beta=arrays.beta,
            A_log=arrays.A_log,
            dt_bias=arrays.dt_bias,
            cu_seqlens=arrays.cu_seqlens,
            lower=lower,
            tiles=out.tiles,
            k_solved=k_solved(out, config),
            decay=out.decay,
            factors=out.factors,
            first=out.first,
            **({} if config.normed else {"q_lost": out.q_lost}),
        )


def replay(problem: Problem, arrays: Arrays, x: Views, out: Replayed, checkpoints, config: Config) -> None:
    """Second launch, unless they were kept: the states before every chunk and v - k_in S again."""
    if out.tiles.shape[0] * problem.HV:
        kernel = replay_wide if config.in_halves else replay_kernel
        kernel.launch(problem, config, x.layout)(
            v=x.v,
            cu_seqlens=arrays.cu_seqlens,
            checkpoints=checkpoints,
            initial=arrays.initial_state,
            tiles=out.tiles,
            k_solved=k_solved(out, config),
            decay=out.decay,
            factors=out.factors,
            states=out.states,
            states_lost=out.states_lost,
            before_last=out.before_last,
            r=out.r,
            r_lost=out.r_lost,
        )


class Reversed(NamedTuple):
    """What the reverse pass over a sequence makes."""

    d_states: torch.Tensor  # [slots, HV, VP, KP]  dS' after each chunk
    d_states_lost: torch.Tensor | None  # what rounding took from them, if exact_decay
    after_first: torch.Tensor | None  # `end_states`: dS' after the first chunks but the last, if exact_ends
    d_v: torch.Tensor  # [B, T, HV, V]
    y_lost: torch.Tensor | None  # [N, HV, C, VP]  what rounding took from d_v, or from `alone`, of the last chunks
    alone: torch.Tensor | None  # what the gradient of a given beta needs
    d_initial: torch.Tensor | None


def reverse(problem: Problem, arrays: Arrays, x: Views, y: Replayed, solved, d_o, d_final, config: Config) -> Reversed:
    """Third launch: dS' of every chunk, the gradients of v and of the initial state; where beta is given also what its gradient needs."""
    C, device = config.chunk, d_o.device
    d_states = torch.empty(y.states.shape, dtype=y.states.dtype, device=device)
    d_states_lost = torch.empty(d_states.shape, dtype=d_states.dtype, device=device) if exact_decay(problem) else None
    has_after = exact_ends(problem) and arrays.initial_state is not None
    after_first = torch.empty(end_states(problem, config), dtype=torch.float32, device=device) if has_after else None
    d_v = torch.empty(d_o.shape, dtype=d_o.dtype, device=device)
    y_lost = torch.empty(last_shape(problem, config), dtype=d_v.dtype, device=device) if config.exact_last else None
    d_initial, alone = None, None
    if problem.options.beta == "given":
        alone = torch.empty((y.tiles.shape[0], problem.HV, C, padded(problem.V)), dtype=d_v.dtype, device=device)
    if arrays.initial_state is not None:
        d_initial = torch.empty(problem.state_shape, dtype=arrays.initial_state.dtype, device=device)
    given = dict(tiles=y.tiles, k_solved=k_solved(y, config), solved=solved, decay=y.decay, factors=y.factors, d_o=d_o, d_final=d_final)
    given |= dict(q_lost=y.q_lost)
    written = dict(d_states=d_states, d_states_lost=d_states_lost, after_first=after_first, d_v=d_v, y_lost=y_lost)
    written |= dict(alone=alone, d_initial=d_initial)
    if borrowed.lends_to(d_o) and (kernel := borrowed.reverse(problem, config, device)) is not None:
        note_lent(kernel(problem, arrays, **given, **written, group=1 if config.normed else config.group))
    elif problem.N * problem.HV * problem.V:
        of = problem, config, x.layout, d_final is not None
        launches = [reverse_kernel.launch_reverse(*of)]
        if config.in_halves:
            launches = [reverse_wide.launch(*of, part) for part in (("far", "near") if has_after else ("all",))]
        for launch in launches:
            launch(cu_seqlens=arrays.cu_seqlens, **given, **written)
    return Reversed(d_states, d_states_lost, after_first, d_v, y_lost, alone, d_initial)


def restore(problem: Problem, arrays: Arrays, x: Views, y: Replayed, d_o, back: Reversed, config: Config) -> None:
    """A short launch for a gradient of the initial state from half-precision tiles: adds to d_initial what they lost."""
    if corrected(problem) and problem.N * problem.HV * problem.V:
        lent = borrowed.lends_to(arrays.q) and borrowed.rebuild(problem, config, arrays.q.device) is not None
        # Triton's `rebuild` leaves here what that loses in turn.
        had_q_lost = lent and exact_q(problem) and problem.dtype == "bfloat16"
        launch = reverse_kernel.launch_restore(problem, config, x.layout, had_q_lost)
        launch(d_o=d_o, d_v=back.d_v, first=y.first, cu_seqlens=arrays.cu_seqlens, d_initial=back.d_initial)


class Products(NamedTuple):
    """Gradients of what a chunk is made of, from `products_kernel`; R is the chunk, at least 32."""

    pairs: torch.Tensor  # [slots, HV, 2, R, R]
    d_tiles: torch.Tensor  # [slots, HV, 3, KP, R]  of q_decayed, k_in, k_solved, float16 or float32
    scales: torch.Tensor | None  # [slots, HV, 3, KP]  of float16 tiles
    d_q_lost: torch.Tensor | None  # [N, HV, KP, R]  what rounding took from q_decayed's of the first chunks, if exact_q, in float16
    d_decay: torch.Tensor  # [slots, HV, KP]
    d_beta: torch.Tensor


def products(problem: Problem, arrays: Arrays, x: Views, y: Replayed, back: Reversed, lower, d_o, d_final, config: Config) -> Products:
    """Fourth launch: all products over V. Tiles that were made again are used up."""
    C, KP, device, small = config.chunk, padded(problem.K), d_o.device, getattr(torch, config.gradient_dtype)
    slots, HV, R = lower.shape[0], problem.HV, max(32, config.chunk)
    part = torch.float32 if small == torch.float32 else torch.float16
    mine = y.tiles.dtype == small and C == R and not config.keep
    out = Products(
        torch.empty((slots, HV, 2, R, R), dtype=torch.float32 if exact_pairs(problem, config) else small, device=device),
        y.tiles.view(slots, HV, 3, KP, R).view(part) if mine else torch.empty((slots, HV, 3, KP, R), dtype=part, device=device),
        None if part == torch.float32 else torch.empty((slots, HV, 3, KP), dtype=torch.float32, device=device),
        torch.empty((problem.N, HV, KP, R), dtype=part, device=device) if exact_q(problem) and part != torch.float32 else None,
        torch.empty((slots, HV, KP), dtype=torch.float32, device=device),
        torch.empty(arrays.beta.shape, dtype=arrays.beta.dtype, device=device),
    )
    if slots * HV:
        products_kernel.launch(problem, config, x.layout, d_final is not None)(
            beta=arrays.beta,
            cu_seqlens=arrays.cu_seqlens,
            lower=lower,
            factors=y.factors,
            states=y.states,
            states_lost=y.states_lost,
            d_states=back.d_states,
            d_states_lost=back.d_states_lost,
            r=y.r,
            d_o=d_o,
            initial=arrays.initial_state,
            d_final=d_final,
            before_last=y.before_last,
            after_first=back.after_first,
            d_v=back.d_v,
            d_beta=out.d_beta,
            pairs=out.pairs,
            d_tiles=out.d_tiles,
            scales=out.scales,
            d_q_lost=out.d_q_lost,
            alone=back.alone,
            y_lost=back.y_lost,
            r_lost=y.r_lost,
            d_decay=out.d_decay,
        )
    return out


def gradient_of_chunks(problem: Problem, arrays: Arrays, x: Views, y: Replayed, z: Products, config: Config) -> Callable[..., None]:
    """Fifth launch, a function of what it writes."""
    kernel = gradient_normed if config.by_token else gradient_plain
    launch = kernel.launch(problem, config, x.layout)
    return partial(
        launch,
        q=x.q,
        k=x.k,
        g=x.g,
        A_log=arrays.A_log,
        dt_bias=arrays.dt_bias,
        cu_seqlens=arrays.cu_seqlens,
        factors=y.factors,
        pairs=z.pairs,
        d_tiles=z.d_tiles,
        scales=z.scales,
        d_decay=z.d_decay,
        **({} if config.by_token else {"d_q_lost": z.d_q_lost}),
    )


def borrowed_of_chunks(
    kernel: Callable[..., Any], problem: Problem, arrays: Arrays, x: Views, y: Replayed, back: Reversed,
    lower, d_o, d_final, d_beta, c: Config,
) -> Callable[..., None]:  # fmt: skip
    """Both launches in one, of `borrowed.gradient`: a function of what the fifth writes."""

    def run(**written: Any) -> None:
        repeat = kernel(
            problem,
            arrays._replace(q=x.q, k=x.k, g=x.g),
            lower=lower,
            factors=y.factors,
            states=y.states,
            d_states=back.d_states,
            r=y.r,
            d_o=d_o,
            d_v=back.d_v,
            alone=back.alone,
            d_final=d_final,
            before_last=y.before_last,
            after_first=back.after_first,
            states_lost=y.states_lost,
            d_states_lost=back.d_states_lost,
            d_beta=d_beta,
            group=1 if c.normed else c.group,
            **written,
        )
        note_lent(repeat)

    return run


def gradients(problem: Problem, arrays: Arrays, x: Views, slots: int, run: Callable[..., None], d_v, d_beta, config: Config):
    """`run` and a short launch for sums over chunks: gradients of q and k, of every value head, and of g, A_log, dt_bias."""
    device, K, shape = d_v.device, problem.K, (problem.B, problem.T, problem.HV, problem.K)
    wide = torch.float32 if problem.group > 1 else d_v.dtype
    d_q, d_k = (torch.empty(shape, dtype=wide, device=device) for _ in "qk")
    d_g = torch.empty(arrays.g.shape, dtype=arrays.g.dtype, device=device)

    def of(parameter):
        """Its gradient, and every chunk's share of it."""
        if parameter is None:
            return None, None
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        return whole, torch.empty((slots, problem.HV, padded(K)), dtype=torch.float32, device=device)

    (d_A_log, A_shares), (d_dt_bias, bias_shares) = of(arrays.A_log), of(arrays.dt_bias)
    if slots * problem.HV:
        run(d_q=d_q, d_k=d_k, d_g=d_g, d_A_log=A_shares, d_dt_bias=bias_shares)
    if d_A_log is not None or d_dt_bias is not None:
        launch = parameter_sums.launch(problem, config, x.layout)
        launch(d_g=d_g, A_shares=A_shares, bias_shares=bias_shares, d_A_log=d_A_log, d_dt_bias=d_dt_bias)
    clear_gradients(problem, arrays, d_q, d_k, d_v, d_g, d_beta)
    return d_q, d_k, d_g, d_A_log, d_dt_bias


def over_groups(problem: Problem, found: Arrays) -> Arrays:
    """Gradients of q and k, of every value head in float32, summed over those that share a head."""
    if problem.group == 1:
        return found
    shape, dtype = (problem.B, problem.T, problem.H, problem.group, problem.K), getattr(torch, problem.dtype)
    d_q, d_k = (x.view(shape).sum(3).to(dtype) for x in (found.q, found.k))
    return found._replace(q=d_q, k=d_k)


def backward(problem: Problem, arrays: Arrays, kept, d_o, d_final, config: Config) -> Arrays:
    """All launches, on contiguous parameters and cotangents; d_q and d_k have HV heads."""
    x = views(arrays)
    lower, solved, checkpoints, *rest = kept
    y = room(problem, config, d_o.device, checkpoints, rest)
    if not config.keep:
        rebuild(problem, arrays, x, lower, y, config)
    if config.keeps_states:
        back = reverse(problem, arrays, x, y, solved, d_o, d_final, config)
    else:
        with beside(d_o) as aside:  # neither of the two fills the chip
            back = reverse(problem, arrays, x, y, solved, d_o, d_final, config)
            with aside():
                replay(problem, arrays, x, y, checkpoints, config)
            restore(problem, arrays, x, y, d_o, back, config)  # while the replay still runs
    slots = lower.shape[0]
    if borrowed.lends_to(d_o) and (kernel := borrowed.gradient(problem, config, d_o.device)) is not None:
        y = y._replace(tiles=y.tiles.new_empty(0))  # it has no use for them, and the gradients want room
        d_beta = torch.empty(arrays.beta.shape, dtype=arrays.beta.dtype, device=d_o.device)
        run: Callable[..., None] = borrowed_of_chunks(kernel, problem, arrays, x, y, back, lower, d_o, d_final, d_beta, config)
    else:
        z = products(problem, arrays, x, y, back, lower, d_o, d_final, config)
        d_beta, run = z.d_beta, gradient_of_chunks(problem, arrays, x, y, z, config)
    d_q, d_k, d_g, d_A_log, d_dt_bias = gradients(problem, arrays, x, slots, run, back.d_v, d_beta, config)
    return Arrays(d_q, d_k, back.d_v, d_g, d_beta, d_A_log, d_dt_bias, back.d_initial)
