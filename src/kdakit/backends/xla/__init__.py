"""KDA in pure JAX, for any XLA device. The stages are public functions, each with its backward: a staged reference for other kernels.

    gate      activate          [B, T, H, ..] inputs -> q, k, v, log-decay, beta as the recurrence wants them
              block_decays      the decays inside a chunk
    intra     pair_products     A_qk, A_kk
              unit_lower_inverse, wy     w, u
              intra_forward     all of a chunk that needs no state
    state     state_forward     states before each chunk, v_new, final states
    output    output_forward    o

`forward`, `backward` and `step` put them together.
"""

from __future__ import annotations

from kdakit.backends.xla import draft
from kdakit.backends.xla.call import Kept, Saved, backward, forward, step
from kdakit.backends.xla.gate import Activated, BlockDecays, activate, activate_backward, block_decays, block_decays_backward
from kdakit.backends.xla.intra import (
    Intra,
    intra_backward,
    intra_forward,
    unit_lower_inverse,
    wy,
    wy_backward,
)
from kdakit.backends.xla.output import output_backward, output_forward
from kdakit.backends.xla.pairs import pair_products, pair_products_backward
from kdakit.backends.xla.plan import Config, default_config
from kdakit.backends.xla.state import state_backward, state_forward
from kdakit.problem import Problem

__all__ = [
    "Activated", "BlockDecays", "Config", "Intra", "Kept", "Saved", "activate", "activate_backward", "backward", "block_decays",
    "block_decays_backward", "default_config", "draft", "forward", "intra_backward", "intra_forward", "mixes", "output_backward",
    "output_forward", "pair_products", "pair_products_backward", "state_backward", "state_forward", "step", "supports",
    "unit_lower_inverse", "wy", "wy_backward",
]  # fmt: skip


def mixes(problem: Problem, config: Config) -> bool:
    """A chunk may hold several segments; packed sequences have chunks of their own."""
    return problem.varlen == "segment_ids"


def supports(problem: Problem, device) -> str | None:
    """Why this backend cannot run `problem` on `device`; None: it can."""
    return None
