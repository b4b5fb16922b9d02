"""One token of each sequence, or a few: a KimiDeltaAttention whose sequences carry a state and windows, between its projections.

The kernel reads and writes the rows of a cache, or the slots of a pool, in place where it is told to. No value on the device is looked at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kdakit.layers.torch.fused import fast, fits
from kdakit.layers.torch.fused.layer import fused_dtype, projected
from kdakit.torch_operators import unwatched

TOKENS = 8  # at most
FEW = 132  # programs: with fewer, each takes a whole head at once
# Value channels of a block and warps for heads of 128, as timed on an H200 (benchmarks/results/gpu/trials, layer_step).
CUTS = {  # (few programs, one token)
    (True, True): (128, 4),
    (True, False): (32, 4),
    (False, True): (64, 4),
    (False, False): (32, 2),
}
STATES = (torch.float32, torch.bfloat16, torch.float16)


class Carried(NamedTuple):
    """What sequences carry: windows [N, W - 1, D] of q, k and v, and states [N, HV, K, V]; rows are sequences, or slots of a pool."""

    q: Tensor
    k: Tensor
    v: Tensor
    state: Tensor


class Slots(NamedTuple):
    """Of a pool: which row of it each sequence has, see kdakit.serving."""

    slots: Tensor  # [N]
    generation: Tensor  # [capacity + 1] int32
    capacity: int
    state_v_first: bool = False


class Log(NamedTuple):
    """Of tokens that may be accepted later, as kdakit.serving's commit takes them."""

    k: Tensor  # [N, T, HV, K]
    decay: Tensor  # [N, T, HV, K] float32
    u: Tensor  # [N, T, HV, V] float32, divided by k's norm
    slots: Tensor  # [N], -1 where a row was skipped
    generation: Tensor  # [N] int32


def takes_step(layer: Any, x: Tensor, *carried: Any) -> bool:
    """Whether `layer_step` can run x [N, T, hidden_size] of this layer, with these tensors carried along."""
    if not x.is_cuda or not 1 <= x.shape[1] <= TOKENS or x.shape[0] == 0 or not layer.sizes.delta_rule or torch.is_grad_enabled():
        return False
    if any(a is None or not a.is_contiguous() for a in carried) or carried[-1].dtype not in STATES or not fits(*carried):
        return False
    return unwatched((x, layer.q_proj.weight)) and fused_dtype(layer, x) is not None


def layer_step(
    layer: Any, x: Tensor, before: Carried, after: Carried, slots: Slots | None = None, draft: bool = False
) -> tuple[Tensor, Tensor, Log | None]:
    """o [N, T, hidden_size] of x, the inputs of the convolutions [N, T, D], and with `draft`, where nothing moves, the log."""
    x = x.to(fused_dtype(layer, x))
    row, low_f, low_g, beta = projected(layer, x)
    y, log = step(layer, row, layer.f_proj[1](low_f), beta, F.linear(low_g, layer.g_proj[1].weight), before, after, slots, draft)
    return layer.o_proj(y), row, log


def step(
    layer: Any, row: Tensor, g: Tensor, beta: Tensor, gate: Tensor, before: Carried, after: Carried, slots: Slots | None = None,
    draft: bool = False,
) -> tuple[Tensor, Log | None]:  # fmt: skip
    """Everything between the projections, in one launch. row [N, T, 2 key_dim + value_dim], g [N, T, gate_dim], beta [N, T, HV], the
    gate without its bias [N, T, value_dim] -> y [N, T, value_dim]."""
    s, (N, T), bias = layer.sizes, row.shape[:2], layer.g_proj[1].bias
    y = torch.empty((N, T, s.value_dim), dtype=row.dtype, device=row.device)
    log = _log(layer, row, slots) if draft else None
    filters = (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)
    where = (0, False) if slots is None else (slots.capacity, slots.state_v_first)
    form = Form(
        N, T, s.num_heads, s.value_heads, s.head_dim, s.head_v_dim, s.conv_size, s.conv_bias, bias is not None, s.lower_bound,
        s.allow_neg_eigval, s.norm_eps, row.stride()[:2], beta.stride()[:2], *where, slots is not None, draft, fast(row),
    )  # fmt: skip
    width = 3 * _padded(s.head_dim) + _padded(s.head_v_dim) + 16
    scratch = torch.empty((N * s.num_heads, form.tokens, width), dtype=torch.float32, device=row.device)
    run, on_device = _launch(form)
    q, k, v = row.split((s.key_dim, s.key_dim, s.value_dim), -1)
    tensors = dict(q=q, k=k, v=v, g=g.contiguous(), beta=beta, gate=gate.contiguous())
    tensors |= {f"{n}_weight": c.weight for n, c in zip("qkv", filters, strict=True)} | {
        f"{n}_bias": c.bias for n, c in zip("qkv", filters, strict=True)
    }
    tensors |= dict(A_log=layer.A_log, dt_bias=layer.dt_bias, norm=layer.o_norm.weight, gate_bias=bias)
    tensors |= dict(q_window=before.q, k_window=before.k, v_window=before.v, state=before.state)
    tensors |= dict(q_after=after.q, k_after=after.k, v_after=after.v, state_after=after.state)
    tensors |= dict(slots=None if slots is None else slots.slots.contiguous(), generation=None if slots is None else slots.generation)
    logs = dict.fromkeys(Log._fields) if log is None else log._asdict()
    with on_device(row):
        run(**tensors, scratch=scratch, y=y, **{f"log_{name}": x for name, x in logs.items()})
    return y, log


def _log(layer: Any, x: Tensor, slots: Slots | None) -> Log:
    s, (N, T), device = layer.sizes, x.shape[:2], x.device
    wide = lambda *shape: torch.empty((N, T, s.value_heads, *shape), dtype=torch.float32, device=device)
    k = torch.empty((N, T, s.value_heads, s.head_dim), dtype=x.dtype, device=device)
    kind = torch.int64 if slots is None else slots.slots.dtype
    owners = torch.empty(N, dtype=kind, device=device), torch.empty(N, dtype=torch.int32, device=device)
    return Log(k, wide(s.head_dim), wide(s.head_v_dim), *owners)


@dataclass(frozen=True)
class Form:
    """What the launch of a step depends on."""

    N: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    W: int
    conv_bias: bool
    gate_bias: bool
    lower_bound: float | None
    allow_neg_eigval: bool
    eps: float
    row_strides: tuple[int, ...]
    beta_strides: tuple[int, ...]
    capacity: int
    state_v_first: bool
    pooled: bool
    draft: bool
    ptx: bool

    @property
    def tokens(self) -> int:
        return 1 << (self.T - 1).bit_length()

    def cut(self) -> tuple[int, int, int]:
        """Value channels of a block, warps, and a thread's registers at most, 0: the compiler's choice. Heads of other sizes than those of
        CUTS: a whole one at once where there are few, else small blocks, many programs at a time."""
        KP, VP, few, single = _padded(self.K), _padded(self.V), self.N * self.H <= FEW, self.T == 1
        if KP == VP == 128:
            return *CUTS[few, single], 0
        if few and single:
            return VP, max(1, min(8, KP * VP // 2048)), 0
        block = max(16, min(VP, 32 * 128 // KP))
        return block, max(1, min(2, KP * block // 2048)), 0


@lru_cache(maxsize=1024)
def _launch(form: Form) -> tuple[Any, Any]:
    from kdakit.backends.triton_gpu.runtime.launch import Launch, on_device
    from kdakit.layers.torch.fused.step_kernel import layer_step_kernel

    f, KP, (block, warps, registers) = form, _padded(form.K), form.cut()
    own = [s if n > 1 else 0 for s, n in zip(f.row_strides, (f.N, f.T), strict=True)]
    align = math.gcd(16, f.H * f.K, f.HV * f.V, *own)  # also of where q, k and v begin in the row
    values = dict(
        T=f.T, H=f.H, HV=f.HV, CAPACITY=f.capacity, scale=f.K**-0.5, lower_bound=f.lower_bound or 0.0, eps=f.eps, s_n=own[0] // align,
        s_t=own[1] // align, s_bn=f.beta_strides[0], s_bt=f.beta_strides[1], K=f.K, V=f.V, KP=KP, VP=_padded(f.V), BV=block, TP=f.tokens,
        W=f.W, ALIGN=align, V_FIRST=f.state_v_first, GATE="softplus" if f.lower_bound is None else "bounded",
        BETA="double_sigmoid" if f.allow_neg_eigval else "sigmoid", HAS_CONV_BIAS=f.conv_bias, HAS_GATE_BIAS=f.gate_bias,
        HAS_SLOTS=f.pooled, DRAFT=f.draft, SINGLE=f.T == 1, PTX=f.ptx,
    )  # fmt: skip
    limit = registers if torch.version.hip is None else 0
    return Launch(layer_step_kernel, f.N * f.H, values, limit, num_warps=warps), on_device


def _padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def commit_windows(row: Tensor, windows: list[Tensor], slots: Slots, generation: Tensor, accepted: Tensor) -> None:
    """The windows of a pool's slots move on by the first accepted[n] of the inputs row [N, T, D]; a launch for each."""
    accepted = accepted.contiguous()
    for window, x in zip(windows, row.split([w.shape[2] for w in windows], -1), strict=True):
        run, on_device = _commit_launch(x.shape, x.stride(), window.shape[1] + 1, slots.capacity)
        with on_device(row):
            run(x=x, window=window, slots=slots.slots, generation=slots.generation, log_generation=generation, accepted=accepted)


@lru_cache(maxsize=1024)
def _commit_launch(shape: tuple[int, ...], stride: tuple[int, ...], W: int, capacity: int) -> tuple[Any, Any]:
    from kdakit.backends.triton_gpu.runtime.launch import Launch, on_device
    from kdakit.layers.torch.fused.step_kernel import commit_window_kernel

    N, T, D = shape
    values = dict(T=T, D=D, CAPACITY=capacity, s_n=stride[0], s_t=stride[1], W=W, BD=256)
    return Launch(commit_window_kernel, (-(-D // 256), N, 1), values, num_warps=2), on_device
