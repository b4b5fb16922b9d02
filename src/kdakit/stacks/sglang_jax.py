"""kdakit inside sglang-jax: the two functions of `sgl_jax.srt.kernels.kda` that its KDA layers call.

    chunk_kda(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, ..)    a row of packed sequences, padding behind them
    naive_recurrent_kda(q, k, v, g, beta, scale, initial_state, output_final_state)          a token of each of B sequences

Enable it before the modules that import them: `kdakit.enable("sglang_jax")`. KDAKIT_SGLANG_JAX=0 switches it off.
"""

from __future__ import annotations

import importlib
from typing import Any

from kdakit import jax as ours
from kdakit.stacks import counts, wanted

MODULE = "sgl_jax.srt.kernels.kda"
_before: list[tuple[Any, str, Any]] = []


def enabled() -> bool:
    return bool(_before)


def enable() -> None:
    if _before or not wanted("sglang_jax"):
        return
    try:
        module = importlib.import_module(MODULE)
    except ImportError as missing:
        raise ImportError(f"kdakit.enable('sglang_jax') needs sglang-jax: {missing}") from missing
    for name, call in (("chunk_kda", chunk_kda), ("naive_recurrent_kda", naive_recurrent_kda)):
        _before.append((module, name, getattr(module, name)))
        setattr(module, name, call)


def disable() -> None:
    while _before:
        setattr(*_before.pop())


def chunk_kda(
    q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel=False, chunk_indices=None,
    chunk_size=64, safe_gate=False, lower_bound=None, use_gate_in_kernel=False, A_log=None, dt_bias=None, disable_recompute=False,
    return_intermediate_states=False, cp_context=None, transpose_state_layout=False, neumann_inv=True,
):  # fmt: skip
    """sglang-jax's twelve results, of which only o, final_state and initial_state are ever asked for; the others are None.

    chunk_indices, neumann_inv and disable_recompute say how, not what. Tokens past cu_seqlens[-1] are padding.
    """
    if cp_context is not None or return_intermediate_states:
        raise ValueError("chunk_kda takes no cp_context and returns no intermediate states here, as in sglang-jax")
    counts.take("sglang_jax", "chunk_kda")
    safe = bool(safe_gate) and lower_bound is not None
    o, final = ours.chunk_kda(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, chunk_size=chunk_size, safe_gate=safe, lower_bound=lower_bound,
        use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias, state_v_first=transpose_state_layout,
    )  # fmt: skip
    return o, final, *(None,) * 9, initial_state


def naive_recurrent_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
    counts.take("sglang_jax", "naive_recurrent_kda")
    return ours.fused_recurrent_kda(q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state)
