"""Gradients of a sequence's last chunks beside the reverse pass over the others, where a sequence has few heads.

The pass is a chain: 64 value channels of a head take a multiprocessor, and with 8 or 16 heads most have nothing to do meanwhile. In two
parts, the first of them through the last chunks,

    reverse, last chunks  ->  reverse, the others           on a stream that goes first
    replay                ->  gradients of the last chunks  ->  gradients of the others

each launch with the same memory as one for all: the same bits. Tiles are there until the end, beside the gradients, which are as large.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from kdakit.backends.triton_gpu import borrowed
from kdakit.backends.triton_gpu.config import Config, exact_ends
from kdakit.backends.triton_gpu.runtime.schedule import asked
from kdakit.problem import Problem

CHUNK = 64
# Microseconds of an H200: a chunk of the reverse pass; a chunk's gradients; a head's chunk of the replay, on the whole chip.
REVERSE_US, GRADIENT_US, REPLAY_US = 1.35, 17.4, 0.034


def chunks(problem: Problem, config: Config, d_o: torch.Tensor) -> int:
    """How many of the last chunks; 0: all launches over whole sequences. KDAKIT_SCHEDULE=ahead asks for it, KDAKIT_AHEAD names a number."""
    alone = problem.B == 1 and not problem.varlen and not problem.options.disable_recompute and not exact_ends(problem)
    if not asked("ahead") or not alone or d_o.is_meta or problem.T <= CHUNK:
        return 0
    lent = borrowed.gradient(problem, config, d_o.device), borrowed.reverse(problem, config, d_o.device)
    if None in lent:
        return 0
    number = os.environ.get("KDAKIT_AHEAD")
    return best(-(-problem.T // CHUNK), problem.HV, config.processors) if number is None else min(int(number), -(-problem.T // CHUNK) - 1)


def free(heads: int, processors: int) -> int:
    """Multiprocessors that the pass leaves."""
    return processors - 2 * heads


@lru_cache(maxsize=1024)
def best(number: int, heads: int, processors: int) -> int:
    """How many of a sequence's chunks: what takes the least time."""
    others = free(heads, processors)
    if others < processors // 4:
        return 0

    def us(late: int) -> float:
        ready = max(late * REVERSE_US, number * heads * REPLAY_US * processors / others)
        until = max(number * REVERSE_US, ready + -(-late * heads // others) * GRADIENT_US)
        return until + -(-(number - late) * heads // processors) * GRADIENT_US

    return min(range(number), key=us)


def spans(problem: Problem, late: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(first chunk, chunks) of the others and of the last ones."""
    number = -(-problem.T // CHUNK)
    return (0, number - late), (number - late, late)


def in_two(
    problem: Problem, config: Config, late: int, run: Callable[..., None], finish_reverse: Callable[[], None], join: Callable[[], None]
) -> Callable[..., None]:
    """`run`, which makes gradients of chunks, for the last ones beside what is left of the reverse pass, and for the others after it."""
    early, last = spans(problem, late)

    def both(**written: Any) -> None:
        finish_reverse()
        run(**written, span=last, blocks=max(1, free(problem.HV, config.processors)), initial_state=None)
        join()
        run(**written, span=early, d_final=None)

    return both
