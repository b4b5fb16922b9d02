"""Two peers for Hopper that come inside other packages, where those are installed.

cudnn            NVIDIA's cuDNN Frontend (pip install nvidia-cudnn-frontend): forward and backward; `cudnn_g32` gives it the gates in
                 float32, made so before anything is timed, which it prefers
flash_kda_vllm   vLLM's build of FlashKDA, from the library in its wheel; vLLM itself is not imported
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from kdakit.cases import Case
from kdakit.problem import Arrays

PLAN = "kda_hopper_cuda"  # pinned: without it cuDNN may pick an engine that compiles itself for minutes


def versions() -> dict[str, str]:
    """Of those that have been imported or loaded."""
    found = {}
    if (module := sys.modules.get("cudnn")) is not None:
        found["nvidia-cudnn-frontend"] = getattr(module, "__version__", "unversioned")
    if _load_vllm.cache_info().currsize:
        try:
            found["vllm"] = importlib.metadata.version("vllm")
        except importlib.metadata.PackageNotFoundError:
            found["vllm"] = "unversioned"
    return found


def cudnn_refusal(case: Case, dtype: str, op: str = "chunk", grad: bool = False) -> str | None:
    """What cuDNN's Hopper plan does not take; None: it can."""
    o = case.options
    if op != "chunk":
        return "it has no decode"
    if dtype != "bfloat16" or (case.K, case.V) != (128, 128) or case.H != case.HV:
        got = f"{dtype}, K = {case.K}, V = {case.V}, {case.HV} value heads of {case.H}"
        return f"it takes bfloat16, K = V = 128 and no grouped heads, got {got}"
    if o.get("use_gate_in_kernel") and o.get("lower_bound") is None:
        return "it has no softplus gate: use --gate bounded or --gate log_decay"
    if o.get("state_v_first") or not case.initial_state:
        return "it takes initial [K, V] states as its other contestants do"
    return None


def cudnn(case: Case, wide_gates: bool) -> Callable[[Arrays], Any]:
    """kimi_delta_attention on [tokens, H, D] views; its states are [N, H, V, K]."""
    try:
        function = importlib.import_module("cudnn.linear_attention").kimi_delta_attention
    except (ImportError, AttributeError) as problem:
        raise Absent(f"cudnn.linear_attention cannot be imported (pip install nvidia-cudnn-frontend): {problem}") from problem
    import torch

    o = case.options
    options = dict(
        scale=o.get("scale"), output_final_state=True, use_qk_l2norm_in_kernel=bool(o.get("use_qk_l2norm_in_kernel")),
        use_beta_sigmoid_in_kernel=bool(o.get("use_beta_sigmoid_in_kernel")), allow_neg_eigval=bool(o.get("allow_neg_eigval")),
        plan_name=PLAN,
    )  # fmt: skip
    if o.get("use_gate_in_kernel"):
        options |= dict(safe_gate=True, gate_lower_bound=o["lower_bound"])
    kept: dict[tuple[str, int], Any] = {}

    def once(what: str, x: Any, make: Callable[[], Any]) -> Any:
        """Outside of what is timed: made at the first call, unless its gradient is asked for."""
        if x is not None and x.requires_grad:
            return make()
        if (what, id(x)) not in kept:
            kept[what, id(x)] = make()
        return kept[what, id(x)]

    def call(x: Arrays):
        B, T = x.q.shape[:2]
        given = x.cu_seqlens
        starts = once(
            "cu", given, lambda: torch.arange(0, B * T + 1, T, device=x.q.device, dtype=torch.int32) if given is None else given.int()
        )
        initial = once("state", x.initial_state, lambda: x.initial_state.mT.contiguous())
        g = once("g", x.g, lambda: x.g.float()) if wide_gates else x.g
        parameters = {} if x.A_log is None else {"a_log": x.A_log, "dt_bias": x.dt_bias.view(case.HV, case.K)}
        out, final = function(
            *(y.flatten(0, 1) for y in (x.q, x.k, x.v, g, x.beta)), starts, initial_state=initial, **parameters, **options
        )[:2]
        return out.view(B, T, case.HV, case.V), final.mT

    return call


@lru_cache(maxsize=1)
def _load_vllm() -> Any:
    """The operators of vLLM's library; importing vllm takes half a minute and more packages than this needs."""
    package = importlib.util.find_spec("vllm")
    places = [] if package is None else list(package.submodule_search_locations or [])
    found = [path for place in places for path in sorted(Path(place).glob("_flashkda_C*.so"))]
    if not found:
        raise Absent("vllm with its _flashkda_C library is not installed: pip install 'vllm>=0.32'")
    import torch

    try:
        torch.ops.load_library(str(found[0]))
        return torch.ops._flashkda_C
    except (OSError, RuntimeError) as problem:
        raise Absent(f"{found[0].name} cannot be loaded: {problem}") from problem


def flash_kda_vllm(case: Case) -> Callable[[Arrays], Any]:
    """torch.ops._flashkda_C.fwd, whose states are [N, H, V, K]; the initial ones are turned before anything is timed."""
    kernels = _load_vllm()
    import torch

    turned: dict[int, Any] = {}

    def call(x: Arrays):
        if id(x.initial_state) not in turned:
            turned[id(x.initial_state)] = x.initial_state.mT.contiguous()
        initial, N = turned[id(x.initial_state)], len(x.initial_state)
        out, final = torch.empty_like(x.v), torch.empty_like(initial)
        space = x.q.new_empty(kernels.get_workspace_size(x.q.shape[0] * x.q.shape[1], case.H, N), dtype=torch.uint8)
        kernels.fwd(
            x.q, x.k, x.v, x.g, x.beta, case.options.get("scale", case.K**-0.5), out, space, x.A_log, x.dt_bias.view(case.HV, case.K),
            case.options["lower_bound"], initial, final, x.cu_seqlens,
        )  # fmt: skip
        return out, final.mT

    return call


class Unavailable(Exception):
    """Why a contestant cannot take part."""


class Absent(Unavailable):
    """It is not installed, or does not import: asked for, it makes a run incomplete."""
