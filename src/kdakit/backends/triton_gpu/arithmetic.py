"""In which dtype a problem is computed, and which gradients chunks cannot compute. No choice depends on the sequence length."""

from __future__ import annotations

from kdakit.backends.triton_gpu.config import padded
from kdakit.problem import Problem

FEW_CHANNELS = 4  # see `overwritten`


def overwritten(problem: Problem) -> str | None:
    """Why gradients of so few channels are not computed in chunks: with strengths of up to 2 a token may write as much as all channels
    hold, and what a chunk's tokens leave of each other is a difference. A gate's gradient is then off by 4.6 times what is allowed with
    one channel, by 2.2, 1.4, 1.1 times it with two to four, by 0.7 with eight (double sigmoids, float32)."""
    if problem.needs_grad and problem.K <= FEW_CHANNELS and problem.options.beta != "sigmoid":
        others = "for others use backend='torch_native', in JAX 'xla'"
        return f"trains up to {FEW_CHANNELS} key channels with sigmoids as strengths alone; {others}"
    return None


def as_computed(problem: Problem) -> Problem:
    """The problem in the dtype that it is computed in. Gradients of half precision with heads of up to 16 channels are computed as float32:
    as many tokens forget all that was before them, and in a longer chunk d_v must cancel, of which bfloat16 keeps too little.

    A token of strength b, where gates have left a share s of the K channels, leaves 1 - b (2 - b s) / K of the square of what those held:
    1 - 2 / K at least with sigmoids, 1 - 4 / K with twice them. So 32 channels have it too where strengths are given in bfloat16, and with
    twice a sigmoid in the gradient of the initial state. Float16 keys as they were given may be alike, strengths of 1 given: there the
    plain recurrence rounds next to nothing between slow gates, and the rule wants the gradient of their initial state to 1e-4, finer than
    such states."""
    o, KP, state = problem.options, padded(problem.K), problem.has_initial_state
    strong = KP == 32 and o.beta != "sigmoid" and state
    given = o.beta == "given"
    exact = {
        "bfloat16": KP == 16 or strong or (KP == 32 and given),
        "float16": KP == 16 or strong or (state and given and not o.l2norm),
    }
    return problem.replace(dtype="float32") if problem.needs_grad and exact.get(problem.dtype, False) else problem
