"""The inputs of a timed job: the same values for every contestant, drawn in NumPy or, where there is a GPU, on it.

NumPy would spend ten seconds on a shape that a GPU handles in a millisecond.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from kdakit import reference
from kdakit.cases import Case
from kdakit.measure import checking, regimes
from kdakit.problem import Arrays


def tensors(case: Case, dtype: str, device: Any, seed: int = 0, regime: str = "") -> Arrays:
    """The case's arrays as torch tensors on `device`; `regime`: one of regimes.REGIMES for its gates, or what the case says."""
    if device.type == "cuda":
        return drawn(case, dtype, device, seed, regime)
    return checking.to_torch(in_regime(case.arrays(dtype, seed), case, regime), case.dtypes(dtype), device)


def in_regime(arrays: Arrays, case: Case, regime: str) -> Arrays:
    """NumPy arrays with the gates' parameters of a regime."""
    if not regime or not (case.A_log and case.dt_bias):
        return arrays
    A_log, dt_bias = regimes.parameters(regime, case.HV, case.K)
    return arrays._replace(A_log=A_log.astype(np.float64), dt_bias=dt_bias.astype(np.float64))


def drawn(case: Case, dtype: str, device: Any, seed: int = 0, regime: str = "") -> Arrays:
    """What `case.arrays` draws for a timed case (random keys, raw or mild gates), from the device's generator."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    types = Arrays(*(getattr(torch, d) for d in case.dtypes(dtype)))

    def normal(*size):
        return torch.randn(*size, device=device, generator=generator)

    B, T, H, HV, K, V = case.B, case.T, case.H, case.HV, case.K, case.V
    q, k = normal(B, T, H, K), normal(B, T, H, K)
    if not case.options.get("use_qk_l2norm_in_kernel"):
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    v, g, beta = normal(B, T, HV, V), normal(B, T, HV, K), normal(B, T, HV)
    if case.gate == "mild":
        g = torch.nn.functional.logsigmoid(1 + 1.5 * g)
    elif case.gate != "raw":
        raise ValueError(f"a timed case has raw or mild gates, got {case.gate!r}")
    made = Arrays(
        q.to(types.q), k.to(types.k), v.to(types.v), g.to(types.g), (beta.sigmoid() if case.beta == "uniform" else beta).to(types.beta),
        normal(HV).abs().to(types.A_log) if case.A_log else None,
        normal(HV * K).to(types.dt_bias) if case.dt_bias else None,
        normal(*case.problem_sizes[2]).to(types.initial_state) if case.initial_state else None,
        torch.tensor([0, *np.cumsum(case.lengths)], device=device) if case.lengths else None,
    )  # fmt: skip
    if not regime or made.A_log is None or made.dt_bias is None:
        return made
    A_log, dt_bias = (torch.from_numpy(x).to(device) for x in regimes.parameters(regime, HV, K))
    return made._replace(A_log=A_log.to(types.A_log), dt_bias=dt_bias.to(types.dt_bias))


def arrays(case: Case, dtype: str, regime: str = "") -> Arrays:
    """The same values in NumPy, for frameworks that are not torch."""
    device = gpu()
    return in_regime(case.arrays(dtype), case, regime) if device is None else to_numpy(drawn(case, dtype, device, regime=regime))


def cotangents(case: Case, dtype: str, device: Any) -> tuple[Any, Any]:
    """d_o and d_final_state as torch tensors."""
    import torch

    _, o, state = case.problem_sizes
    types = case.dtypes(dtype)
    if device.type == "cuda":
        generator = torch.Generator(device).manual_seed(1)
        made = (torch.randn(size, device=device, generator=generator) for size in (o, state))
    else:
        made = map(torch.from_numpy, case.cotangents(dtype))
    return tuple(x.to(getattr(torch, d)) for x, d in zip(made, (types.v, types.initial_state), strict=True))  # type: ignore[return-value]


def host_cotangents(case: Case, dtype: str):
    """The same in NumPy."""
    device = gpu()
    return case.cotangents(dtype) if device is None else to_numpy(cotangents(case, dtype, device))


def gpu() -> Any:
    """torch's GPU, or None."""
    if importlib.util.find_spec("torch") is None:
        return None
    device = checking.default_device("torch")
    return device if device.type == "cuda" else None


def to_numpy(values):
    """torch tensors of a tuple as float64 or integer arrays; anything else as it is."""

    def convert(x):
        if x is None or not type(x).__module__.startswith("torch"):
            return x
        return (x.detach().double() if x.is_floating_point() else x).cpu().numpy()

    made = [convert(x) for x in values]
    return type(values)(*made) if hasattr(values, "_fields") else tuple(made)


def heads(count: int) -> np.ndarray:
    """The heads that are compared, of `count`: the first, one between and the last. Heads know nothing of each other."""
    return np.unique([0, count // 2, count - 1])


def picked(outputs) -> tuple[np.ndarray, ...]:
    """o and, if there is one, final_state of those heads in float64, from any framework."""
    o, *states = (x for x in outputs[:2] if x is not None)
    chosen = heads(o.shape[2])
    return tuple(np.asarray(x, np.float64) for x in to_numpy((o[:, :, chosen], *(x[:, chosen] for x in states))))


def picked_truth(job: Any) -> tuple[np.ndarray, ...]:
    """What `picked` should give: the float64 token recurrence on the same heads of the same inputs, whatever the chunk size."""
    forward = "decode" if job.mode == "decode" else "fwd"
    return _picked_truth(replace(job, mode=forward, chunk_size=64, disable_recompute=False))


@lru_cache(maxsize=32)
def _picked_truth(job: Any) -> tuple[np.ndarray, ...]:
    case, device = job.case(), gpu()
    drawn_arrays = (
        in_regime(case.arrays(job.dtype), case, job.regime) if device is None else drawn(case, job.dtype, device, regime=job.regime)
    )
    values = pick_heads(case, drawn_arrays)
    found = reference.kda(**{n: x for n, x in values._asdict().items() if x is not None}, **case.call_options)[:2]
    return tuple(x for x in found if x is not None)


def pick_heads(case: Case, values: Arrays) -> Arrays:
    """The arrays of those heads alone, as float64."""
    chosen = heads(case.H)
    if case.H != case.HV:
        raise ValueError(f"heads can be picked where there are as many value heads, got {case.HV} and {case.H}")
    tokens = (x[:, :, chosen] for x in values[:5])
    A_log = None if values.A_log is None else values.A_log[chosen]
    bias = None if values.dt_bias is None else values.dt_bias.reshape(case.HV, case.K)[chosen].reshape(-1)
    state = None if values.initial_state is None else values.initial_state[:, chosen]
    return to_numpy(Arrays(*tokens, A_log, bias, state, values.cu_seqlens))
