"""kdakit inside vLLM: Kimi-Linear's, Kimi-K3's and GLM-5-Next's prefill and decode on our kernels, on vLLM's own pool.

vLLM 0.32 and 0.33 take three functions from `vllm.models.kimi_k3.nvidia.ops.third_party.kda` whenever a layer runs:

    chunk_kda_with_fused_gate          prefill; states gathered before and put back after, [N, H, V, K]
    fused_recurrent_kda                speculative decoding: a slot for every token, counts of accepted tokens
    fused_recurrent_kda_packed_decode  one token a row, q, k and v in one row

and two others for GLM-5-Next (`vllm_glm5next.py`). Its pool is [pages, H, V, K] with padded pages, and slots <= 0 are nobody's. The plugin
(entry point group vllm.general_plugins) acts where KDAKIT_VLLM=1 is set, or after kdakit.enable("vllm"). A version that is not known is
left alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from kdakit import torch as ours
from kdakit.problem import Arrays
from kdakit.serving.torch import pages
from kdakit.stacks import asked_for, vllm_glm5next, wanted
from kdakit.stacks.engines import Replaced, refusal, split_row

MODULE = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
FIRST = 1  # vLLM's slot 0 is nobody's
_replaced = Replaced("vllm", "vllm", ("0.32", "0.33"))


def plugin() -> None:
    """vLLM calls this in every process that it starts."""
    if asked_for("vllm"):
        enable()


def enabled() -> bool:
    return bool(_replaced.before)


def enable() -> None:
    if not enabled() and wanted("vllm") and _replaced.known():
        replace(importlib.import_module(MODULE))
        vllm_glm5next.enable(_replaced)


def disable() -> None:
    _replaced.undo()
    vllm_glm5next.settle()


def replace(module: Any) -> None:
    """Our calls in `module`, vLLM's behind them."""
    _replaced.put(module, "chunk_kda_with_fused_gate", _prefill)
    _replaced.put(module, "fused_recurrent_kda", _speculative)
    _replaced.put(module, "fused_recurrent_kda_packed_decode", _decode)


def _flags(lower_bound: float | None, **more: Any) -> dict[str, Any]:
    return dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=lower_bound, **more)


def _prefill(theirs: Callable) -> Callable:
    def chunk_kda_with_fused_gate(
        q, k, v, raw_g, raw_beta, A_log, g_bias, scale=None, initial_state=None, output_final_state=False, lower_bound=None,
        use_qk_l2norm_in_kernel=False, cu_seqlens=None, out=None, **others,
    ):  # fmt: skip
        state = None if initial_state is None else initial_state.float()
        flags = _flags(
            lower_bound, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, output_final_state=output_final_state, state_v_first=True
        )
        arrays = Arrays(q, k, v, raw_g, raw_beta, A_log, g_bias, state, cu_seqlens)
        if refusal("vllm", "chunk_kda_with_fused_gate", "chunk", arrays, **flags):
            return theirs(q, k, v, raw_g, raw_beta, A_log, g_bias, scale, initial_state, output_final_state, lower_bound,
                          use_qk_l2norm_in_kernel, cu_seqlens, out, **others)  # fmt: skip
        o, final = ours.chunk_kda(
            q, k, v, raw_g, raw_beta, scale=scale, A_log=A_log, dt_bias=g_bias, initial_state=state, cu_seqlens=cu_seqlens, **flags
        )
        return (o if out is None else out.copy_(o)), final

    return chunk_kda_with_fused_gate


def _speculative(theirs: Callable) -> Callable:
    def fused_recurrent_kda(
        q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens, ssm_state_indices, num_accepted_tokens=None,
        out=None, fuse_gate=None,
    ):  # fmt: skip
        arrays = Arrays(q, k, v, raw_g, raw_beta, A_log, dt_bias, None, cu_seqlens)
        flags = _flags(lower_bound, use_qk_l2norm_in_kernel=True)
        if refusal("vllm", "fused_recurrent_kda", "recurrent", arrays, **flags):
            return theirs(q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens, ssm_state_indices,
                          num_accepted_tokens, out, fuse_gate)  # fmt: skip
        held = pages.Pages(initial_state, state_v_first=True, first=FIRST)
        o = pages.decode(held, ssm_state_indices, *arrays[:7], accepted=num_accepted_tokens, cu_seqlens=cu_seqlens, out=out, **flags)
        return o, initial_state

    return fused_recurrent_kda


def _decode(theirs: Callable) -> Callable:
    def fused_recurrent_kda_packed_decode(
        mixed_qkv, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, state_indices, scale=None, out=None
    ):
        _, H, V, K = initial_state.shape
        q, k, v = split_row(mixed_qkv, H, H, K, V)
        g, beta = raw_g.transpose(0, 1), raw_beta.transpose(0, 1)  # [1, N, ..] -> [N, 1, ..]
        arrays = Arrays(q, k, v, g, beta, A_log, dt_bias)
        flags = _flags(lower_bound, use_qk_l2norm_in_kernel=True)
        if refusal("vllm", "fused_recurrent_kda_packed_decode", "recurrent", arrays, **flags):
            return theirs(mixed_qkv, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, state_indices, scale, out)
        if out is None:
            out = mixed_qkv.new_empty(1, mixed_qkv.shape[0], H, V)
        held = pages.Pages(initial_state, state_v_first=True, first=FIRST)
        pages.decode(held, state_indices, *arrays[:7], out=out.transpose(0, 1), scale=scale, **flags)
        return out, initial_state

    return fused_recurrent_kda_packed_decode
