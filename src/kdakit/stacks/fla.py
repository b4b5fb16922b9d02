"""kdakit as a backend of flash-linear-attention: `fla.ops.kda.chunk_kda` and `fused_recurrent_kda`, and all that calls them.

FLA 0.6 asks the backends that are registered with it, in the order of their priority, whether they take a call, and runs its own kernels if
nobody does. FLA 0.5 has one registry for KDA, through which `chunk_kda` alone goes. On a CPU, where FLA has no kernels, the gates by
themselves are ours too.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch

from kdakit import torch as ours
from kdakit.problem import Arrays
from kdakit.stacks import counts, wanted
from kdakit.stacks.verdict import why_not

log = logging.getLogger("kdakit.stacks")

CHUNK_SIZES = (32, 64)  # FLA's own: others it refuses, and says so
PRIORITY = 1  # before FlashKDA's 3 and everybody else's 5
_on = False


def enabled() -> bool:
    return _on


def enable() -> None:
    """Registers with the FLA that is installed; again: does nothing but switch on."""
    global _on
    _on = True
    _register()


def disable() -> None:
    global _on
    _on = False


_registered: list[type] = []


def _register() -> None:
    if _registered:
        return
    try:
        chunk: Any = importlib.import_module("fla.ops.kda.chunk")
    except ImportError as missing:
        raise ImportError(f"kdakit.enable('fla') needs flash-linear-attention (pip install fla-core): {missing}") from missing
    if not hasattr(chunk, "dispatch"):
        raise ImportError("kdakit.enable('fla') needs flash-linear-attention 0.5 or newer, whose KDA calls ask for backends")
    registry: Any = importlib.import_module(chunk.dispatch.__module__)
    kind = _backend(registry.BaseBackend)
    if hasattr(registry, "register"):  # 0.6
        registry.register(chunk.chunk_kda)(kind)
        registry.register("kda")(kind)
    else:  # 0.5
        importlib.import_module("fla.ops.kda.backends").kda_registry.register(kind())
    if registry._DISPATCH_DISABLED:
        log.warning("FLA_DISABLE_BACKEND_DISPATCH=1: flash-linear-attention asks no backend, and kdakit gets no calls")
    _registered.append(kind)


def _say(function: str, reason: str | None) -> tuple[bool, str | None]:
    """FLA's form of an answer; what is passed on is counted here, what is taken where it runs."""
    if reason is not None:
        counts.pass_on("fla", function, reason)
    return reason is None, reason


def _backend(base: type) -> type:
    """A subclass of FLA's BaseBackend. FLA calls a method by its own function's name, after `<name>_verifier` has said (True, None)."""

    class Kdakit(base):  # type: ignore[misc, valid-type]
        backend_type = "kdakit"
        package_name = "kdakit"
        env_var = "KDAKIT_FLA"
        priority = PRIORITY

        @classmethod
        def is_enabled(cls) -> bool:
            return _on and wanted("fla")

        def chunk_kda_verifier(self, *args, **named):
            return _say("chunk_kda", _chunk_refusal(*args, **named))

        def chunk_kda(self, *args, **named):
            counts.take("fla", "chunk_kda")
            return _chunk(*args, **named)

        def fused_recurrent_kda_fwd_verifier(self, *args, **named):
            return _say("fused_recurrent_kda", _recurrent_refusal(*args, **named))

        def fused_recurrent_kda_fwd(self, *args, **named):
            counts.take("fla", "fused_recurrent_kda")
            return _recurrent(*args, **named)

        def fused_kda_gate_verifier(self, g, *args, **named):
            return _say("fused_kda_gate", _gate_refusal(g))

        def fused_kda_gate(self, *args, **named):
            counts.take("fla", "fused_kda_gate")
            return ours.fused_kda_gate(*args, **named)

        def kda_gate_chunk_cumsum_verifier(self, g, *args, **named):
            return _say("kda_gate_chunk_cumsum", _gate_refusal(g))

        def kda_gate_chunk_cumsum(self, *args, **named):
            counts.take("fla", "kda_gate_chunk_cumsum")
            return ours.kda_gate_chunk_cumsum(*args, **named)

    return Kdakit


def _gate_refusal(g) -> str | None:
    return None if g.device.type == "cpu" else "FLA has a kernel for it"


def _chunk_call(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False, lower_bound=None, disable_recompute=False,
    return_intermediate_states=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None, use_graph=False,
    max_num_seqs=None, *, A_log=None, dt_bias=None, chunk_size=64, transpose_state_layout=None, **ignored,
):  # fmt: skip
    """FLA's arguments, in FLA's order -> tensors, flags, and its context of context parallel calls. FLA ignores other keywords."""
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    arrays = Arrays(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu)
    flags = dict(
        scale=scale, output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        safe_gate=safe_gate, lower_bound=lower_bound, disable_recompute=disable_recompute,
        return_intermediate_states=return_intermediate_states,
        state_v_first=state_v_first if transpose_state_layout is None else transpose_state_layout, chunk_size=chunk_size,
    )  # fmt: skip
    return arrays, flags, cp_context


def _chunk_refusal(*args, **named) -> str | None:
    arrays, flags, cp_context = _chunk_call(*args, **named)
    if cp_context is not None:
        return "context parallel calls are FLA's (kdakit's are in kdakit.parallel)"
    if flags["chunk_size"] not in CHUNK_SIZES:
        return f"FLA refuses chunk_size={flags['chunk_size']!r}"
    if flags["return_intermediate_states"] and not torch.is_inference_mode_enabled():
        return "FLA returns intermediate states in inference mode only"
    if "transpose_state_layout" in named and named.get("state_v_first"):
        return "FLA refuses state_v_first together with its old name"
    return why_not("chunk", arrays, **flags)


def _chunk(*args, **named):
    arrays, flags, _ = _chunk_call(*args, **named)
    return ours.chunk_kda(**_by_name(arrays), **flags)


def _recurrent_call(
    q, k, v, g, beta, A_log=None, dt_bias=None, initial_state=None, scale=None, output_final_state=False, inplace_final_state=True,
    state_v_first=False, cu_seqlens=None, ssm_state_indices=None, num_accepted_tokens=None, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, lower_bound=None, out=None, **ignored,
):  # fmt: skip
    """The arguments of FLA's `fused_recurrent_kda_fwd` -> tensors, flags, and what is special."""
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    arrays = Arrays(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
    flags = dict(
        scale=scale, output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound if use_gate_in_kernel else None, state_v_first=state_v_first,
    )  # fmt: skip
    special = dict(inplace_final_state=inplace_final_state, slots=ssm_state_indices, accepted=num_accepted_tokens, out=out)
    return arrays, flags, special


def _recurrent_refusal(*args, **named) -> str | None:
    arrays, flags, special = _recurrent_call(*args, **named)
    if special["slots"] is not None or special["accepted"] is not None or special["out"] is not None:
        return "pools of states belong to FLA here (kdakit's calls on them are in kdakit.serving)"
    if arrays.beta.ndim == arrays.v.ndim:
        return "beta per value channel is FLA's alone"
    with torch.no_grad():
        return why_not("recurrent", arrays, **flags)


@torch.no_grad()  # FLA's recurrence is not differentiated
def _recurrent(*args, **named):
    arrays, flags, special = _recurrent_call(*args, **named)
    return ours.fused_recurrent_kda(**_by_name(arrays), **flags, inplace_final_state=special["inplace_final_state"])


def _by_name(arrays: Arrays) -> dict[str, Any]:
    return {name: x for name, x in arrays._asdict().items() if name != "segment_ids"}
