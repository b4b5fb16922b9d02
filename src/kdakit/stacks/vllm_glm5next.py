"""GLM-5-Next inside vLLM: its layer calls two functions of its own, beside those of Kimi-Linear and Kimi-K3 (`vllm.py`).

    chunk_kda_with_fused_gate   prefill, where the layer's backend is "triton"; raw gates, strengths, states [N, HV, V, K]
    fused_recurrent_kda         decode, one slot a row, and speculative decoding, a slot for every token; raw gates and logits of strengths

The layer takes both by name when its file is imported: ours go where it looks for them, and into the file if that was earlier.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from kdakit import torch as ours
from kdakit.problem import Arrays
from kdakit.serving.torch import pages
from kdakit.stacks import counts
from kdakit.stacks.engines import Replaced, refusal

MODULE = "vllm.models.glm5next.nvidia.ops.third_party.kda"
LAYER = "vllm.models.glm5next.common.kda"
NAMES = ("chunk_kda_with_fused_gate", "fused_recurrent_kda")
FIRST = 1  # vLLM's slot 0 is nobody's


def enable(replaced: Replaced) -> None:
    replace(importlib.import_module(MODULE), replaced)
    settle()


def replace(module: Any, replaced: Replaced) -> None:
    """Our calls in `module`, vLLM's behind them."""
    for name, make in zip(NAMES, (_prefill, _recurrent), strict=True):
        replaced.put(module, name, make)


def settle() -> None:
    """A layer's file that is imported has what its functions' module has."""
    if MODULE in sys.modules and LAYER in sys.modules:
        for name in NAMES:
            setattr(sys.modules[LAYER], name, getattr(sys.modules[MODULE], name))


def _prefill(theirs: Callable) -> Callable:
    def chunk_kda_with_fused_gate(
        q, k, v, raw_g, beta, A_log, g_bias, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
        cu_seqlens=None, safe_gate=False, lower_bound=-5.0, **others,
    ):  # fmt: skip
        state, bias = None if initial_state is None else initial_state.float(), _flat(g_bias)
        flags = dict(
            use_gate_in_kernel=True, lower_bound=lower_bound if safe_gate else None, output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_v_first=True,
        )  # fmt: skip
        arrays = Arrays(q, k, v, raw_g, beta, _flat(A_log), bias, state, cu_seqlens)
        if refusal("vllm", "glm5next.chunk_kda_with_fused_gate", "chunk", arrays, **flags):
            return theirs(q, k, v, raw_g, beta, A_log, g_bias, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
                          cu_seqlens, safe_gate, lower_bound, **others)  # fmt: skip
        named = dict(A_log=arrays.A_log, dt_bias=bias, initial_state=state, cu_seqlens=cu_seqlens)
        return ours.chunk_kda(q, k, v, raw_g, beta, scale=scale, **named, **flags)

    return chunk_kda_with_fused_gate


def _recurrent(theirs: Callable) -> Callable:
    def fused_recurrent_kda(
        q, k, v, g, beta=None, scale=None, initial_state=None, inplace_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=None,
        ssm_state_indices=None, num_accepted_tokens=None, out=None, sigmoid_beta=False, a_log=None, g_bias=None, compute_gate=False,
        lower_bound=-5.0, **others,
    ):  # fmt: skip
        arrays = Arrays(q, k, v, g, beta, _flat(a_log), _flat(g_bias), None, cu_seqlens)
        flags = dict(
            use_gate_in_kernel=compute_gate, lower_bound=lower_bound if compute_gate else None, use_beta_sigmoid_in_kernel=sigmoid_beta,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )  # fmt: skip
        if _elsewhere(initial_state, inplace_final_state, ssm_state_indices) or refusal(
            "vllm", "glm5next.fused_recurrent_kda", "recurrent", arrays, **flags
        ):
            return theirs(q, k, v, g, beta, scale, initial_state, inplace_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
                          ssm_state_indices, num_accepted_tokens, out, sigmoid_beta, a_log, g_bias, compute_gate, lower_bound,
                          **others)  # fmt: skip
        held = pages.Pages(initial_state, state_v_first=True, first=FIRST)
        named = dict(accepted=num_accepted_tokens, cu_seqlens=cu_seqlens, out=out, scale=scale)
        return pages.decode(held, ssm_state_indices, *arrays[:7], **named, **flags), initial_state

    return fused_recurrent_kda


def _elsewhere(initial_state: Any, inplace_final_state: bool, slots: Any) -> bool:
    """States that do not stay in a pool: no layer calls it so."""
    if inplace_final_state and initial_state is not None and slots is not None:
        return False
    counts.pass_on("vllm", "glm5next.fused_recurrent_kda", "states that are not in a pool")
    return True


def _flat(x: Any) -> Any:
    """A_log [1, 1, HV, 1] as [HV], dt_bias of any shape in a row."""
    return None if x is None else x.reshape(-1)
