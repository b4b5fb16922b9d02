"""Host side of the backward after a forward that has left its own records (`borrowed.records`): nothing is made again."""

from __future__ import annotations

from dataclasses import replace

import torch

from kdakit.backends.triton_gpu import borrowed
from kdakit.backends.triton_gpu.config import Config
from kdakit.backends.triton_gpu.host.backward import Replayed, Reversed, borrowed_of_chunks, gradients
from kdakit.backends.triton_gpu.host.forward import Recorded
from kdakit.backends.triton_gpu.runtime.launch import note_lent
from kdakit.backends.triton_gpu.runtime.layout import views
from kdakit.problem import Arrays, Problem


def here(problem: Problem, config: Config, d_o) -> bool:
    """Whether the forward of such a call has left records."""
    return borrowed.lends_to(d_o) and borrowed.records(problem, config, d_o.device)


def reverse(problem: Problem, arrays: Arrays, y: Recorded, d_o, d_final, config: Config) -> Reversed:
    """dS' of every chunk and the gradient of v; where beta is given also what its gradient needs."""
    d_states = torch.empty(y.checkpoints.shape, dtype=y.checkpoints.dtype, device=d_o.device)
    d_v = torch.empty(d_o.shape, dtype=d_o.dtype, device=d_o.device)
    given = problem.options.beta == "given"
    alone = torch.empty((*y.factors.shape[:2], config.chunk, problem.V), dtype=d_v.dtype, device=d_v.device) if given else None
    written = dict(d_states=d_states, d_v=d_v, y_lost=None, alone=alone, d_initial=None)
    if (kernel := borrowed.reverse(problem, config, d_o.device)) is not None:
        read = dict(record=y.record, factors=y.factors if given else None, d_o=d_o, d_final=d_final)
        note_lent(kernel(problem, arrays, **read, **written, group=1))
    return Reversed(d_states, None, None, d_v, None, alone, None)


def backward(problem: Problem, arrays: Arrays, saved, d_o, d_final, config: Config) -> Arrays:
    """Two launches, and short ones for the gate's parameters, on contiguous parameters and cotangents; d_q and d_k have HV heads."""
    x, kept = views(arrays), Recorded(*saved)
    back = reverse(problem, arrays, kept, d_o, d_final, config)
    none = kept.record.new_empty(0)
    y = Replayed(tiles=none, decay=none, factors=kept.factors, first=none, states=kept.checkpoints, r=kept.r)
    d_beta = torch.empty(arrays.beta.shape, dtype=arrays.beta.dtype, device=d_o.device)
    kernel = borrowed.gradient(problem, config, d_o.device)
    of_tokens = replace(config, group=1)  # rows, whatever Triton's order is
    run = borrowed_of_chunks(kernel, problem, arrays, x, y, back, kept.lower, d_o, d_final, d_beta, of_tokens)
    d_q, d_k, d_g, d_A_log, d_dt_bias = gradients(problem, arrays, x, len(kept.lower), run, back.d_v, d_beta, config)
    return Arrays(d_q, d_k, back.d_v, d_g, d_beta, d_A_log, d_dt_bias, None)
