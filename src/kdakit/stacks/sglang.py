"""kdakit inside SGLang: Kimi-Linear's decode and prefill on our kernels, on SGLang's own pool.

SGLang 0.5.23 calls the methods of `TritonKDAKernel` (sglang.srt.layers.attention.linear.kernels.kda_triton), the kernels it takes for KDA
where no other is asked for:

    packed_decode(mixed_qkv, a, b, ..)   one token a row, q, k and v in one row          decode(q, k, v, a, b, ..)   the same, apart
    extend(q, k, v, g, beta, ..)         prefill, from and into the pool's slots

Its pool is [slots, HV, V, K], and slots < 0 are nobody's. The plugin (entry point group sglang.srt.plugins) acts where KDAKIT_SGLANG=1 is
set, or after kdakit.enable("sglang"). Calls that track states for its prefix cache, return intermediate states, must be able to roll back
or keep a replay buffer are SGLang's own, as is the verification of drafts. A version that is not known is left alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from kdakit.problem import Arrays
from kdakit.serving.torch import pages
from kdakit.stacks import asked_for, counts, wanted
from kdakit.stacks.engines import Replaced, refusal, split_row

MODULE = "sglang.srt.layers.attention.linear.kernels.kda_triton"
_replaced = Replaced("sglang", "sglang", ("0.5.23",))


def plugin() -> None:
    """SGLang calls this in every process that it starts."""
    if asked_for("sglang"):
        enable()


def enabled() -> bool:
    return bool(_replaced.before)


def enable() -> None:
    if not enabled() and wanted("sglang") and _replaced.known():
        replace(importlib.import_module(MODULE).TritonKDAKernel)


def disable() -> None:
    _replaced.undo()


def replace(kernel: Any) -> None:
    """Our calls as methods of the class `kernel`, SGLang's behind them."""
    _replaced.put(kernel, "packed_decode", _packed_decode)
    _replaced.put(kernel, "decode", _decode)
    _replaced.put(kernel, "extend", _extend)


def _flags(lower_bound: float | None, **more: Any) -> dict[str, Any]:
    return dict(use_gate_in_kernel=True, lower_bound=lower_bound, use_qk_l2norm_in_kernel=True, **more)


def _asks_for_more(function: str, named: dict[str, Any]) -> bool:
    """Whether a call wants something beside outputs and states."""
    own = ("replayssm", "track", "return", "num_state_checkpoints", "is_spec_decode")
    more = [name for name, x in named.items() if name.startswith(own) and x is not None and (isinstance(x, Tensor) or x)]
    if more:
        counts.pass_on("sglang", function, f"{', '.join(sorted(more))} is SGLang's own")
    return bool(more)


def _packed_decode(theirs: Callable) -> Callable:
    def packed_decode(self, mixed_qkv, a, b, *, A_log, dt_bias, scale, ssm_states, cache_indices, num_v_heads, head_v_dim,
                      lower_bound=None, **named):  # fmt: skip
        def back():
            return theirs(self, mixed_qkv, a, b, A_log=A_log, dt_bias=dt_bias, scale=scale, ssm_states=ssm_states,
                          cache_indices=cache_indices, num_v_heads=num_v_heads, head_v_dim=head_v_dim, lower_bound=lower_bound,
                          **named)  # fmt: skip

        if _asks_for_more("packed_decode", named):
            return back()
        N, K = mixed_qkv.shape[0], ssm_states.shape[-1]
        H = (mixed_qkv.shape[1] - num_v_heads * head_v_dim) // (2 * K)
        q, k, v = split_row(mixed_qkv, H, num_v_heads, K, head_v_dim)
        arrays = Arrays(q, k, v, a.reshape(N, 1, num_v_heads, K), b.reshape(N, 1, num_v_heads), A_log.reshape(-1), dt_bias.reshape(-1))
        flags = _flags(lower_bound, use_beta_sigmoid_in_kernel=True)
        if refusal("sglang", "packed_decode", "recurrent", arrays, **flags):
            return back()
        held = pages.Pages(ssm_states, state_v_first=True)
        return pages.decode(held, cache_indices, *arrays[:7], scale=scale, **flags).transpose(0, 1)  # [1, N, HV, V]

    return packed_decode


def _decode(theirs: Callable) -> Callable:
    def decode(self, q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, lower_bound=None, **named):
        def back():
            return theirs(self, q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, ssm_states=ssm_states, cache_indices=cache_indices,
                          query_start_loc=query_start_loc, lower_bound=lower_bound, **named)  # fmt: skip

        if _asks_for_more("decode", named):
            return back()
        heads, K = v.shape[2], ssm_states.shape[-1]
        gates, betas = a.reshape(1, -1, heads, K), b.reshape(1, -1, heads)
        arrays = Arrays(q, k, v, gates, betas, A_log.reshape(-1), dt_bias.reshape(-1), None, query_start_loc)
        flags = _flags(lower_bound, use_beta_sigmoid_in_kernel=True)
        if refusal("sglang", "decode", "recurrent", arrays, **flags):
            return back()
        held = pages.Pages(ssm_states, state_v_first=True)
        return pages.decode(held, cache_indices, *arrays[:7], cu_seqlens=query_start_loc, **flags)

    return decode


def _extend(theirs: Callable) -> Callable:
    def extend(self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, A_log=None, dt_bias=None, lower_bound=None,
               beta_is_raw=False, return_intermediate_states=False, **named):  # fmt: skip
        def back():
            return theirs(self, q, k, v, g, beta, ssm_states=ssm_states, cache_indices=cache_indices, query_start_loc=query_start_loc,
                          A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, beta_is_raw=beta_is_raw,
                          return_intermediate_states=return_intermediate_states, **named)  # fmt: skip

        if _asks_for_more("extend", named | dict(return_intermediate_states=return_intermediate_states)):
            return back()
        flags = dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=beta_is_raw, use_gate_in_kernel=A_log is not None)
        if A_log is not None:
            flags["lower_bound"] = lower_bound
        parameters = (None if x is None else x.reshape(-1) for x in (A_log, dt_bias if A_log is not None else None))
        arrays = Arrays(q, k, v, g.reshape(1, -1, v.shape[2], q.shape[3]), beta, *parameters, None, query_start_loc)
        if refusal("sglang", "extend", "chunk", arrays, **flags):
            return back()
        held = pages.Pages(ssm_states, state_v_first=True)
        named_parameters = dict(A_log=arrays.A_log, dt_bias=arrays.dt_bias, cu_seqlens=query_start_loc)
        return pages.prefill(held, cache_indices, *arrays[:5], **named_parameters, **flags)

    return extend
