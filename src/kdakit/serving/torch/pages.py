"""States in memory that somebody else owns: an engine's pool, with its own pages, slots and conventions.

    pages = Pages(states, state_v_first=True, first=1)         # vLLM: [pages, HV, V, K], page 0 is nobody's
    o = decode(pages, slots, q, k, v, g, beta)                 # one token a row, or a few
    o = decode(pages, slots [N, T], .., accepted=accepted)     # speculative: reads slots[n, accepted[n] - 1], token t goes to slots[n, t]
    o = prefill(pages, slots, .., cu_seqlens=.., marks=marks)  # and leaves states at the marked positions

A row whose slot is nobody's (below `first`, or past the last page) outputs zeros and touches no state. Nothing is allocated, freed or
checked by owner: that is the engine's business. Nothing on a GPU is looked at by the host, so a CUDA graph can hold these calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kdakit import dispatch
from kdakit.problem import Arrays, Problem, Spec, check_devices
from kdakit.serving.arguments import PoolSizes, describe
from kdakit.serving.torch.plainly import plainly

TOKENS = ("q", "k", "v", "g", "beta")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Pages:
    """states: [pages, HV, K, V], or [pages, HV, V, K] with state_v_first; float32, bfloat16 or float16. A page is contiguous, and pages may
    lie any distance apart. first: slots below it are nobody's: 1 for vLLM, 0 for SGLang."""

    states: Tensor
    state_v_first: bool = False
    first: int = 0

    def __post_init__(self):
        if not isinstance(self.states, Tensor) or self.states.dim() != 4 or self.states.dtype not in DTYPES:
            got = (tuple(self.states.shape), self.states.dtype) if isinstance(self.states, Tensor) else type(self.states).__name__
            raise TypeError(f"states must be [pages, HV, K, V] (or [pages, HV, V, K]) of float32, bfloat16 or float16, got {got}")
        _, HV, rows, columns = self.states.shape
        if self.states.stride()[1:] != (rows * columns, columns, 1):
            raise ValueError(f"a page of states must be contiguous, got strides {self.states.stride()} of {tuple(self.states.shape)}")
        if len(self.states) > 1 and self.states.stride(0) < HV * rows * columns:
            raise ValueError(f"pages of states must not overlap, got a stride of {self.states.stride(0)}")

    @property
    def sizes(self) -> PoolSizes:
        _, HV, K, V = self.states.shape
        K, V = (V, K) if self.state_v_first else (K, V)
        return _sizes(HV, K, V, self.states.dtype, self.state_v_first)

    def inside(self, slots: Tensor) -> Tensor:
        return (slots >= self.first) & (slots < len(self.states))

    def read(self, slots: Tensor) -> Tensor:
        """[n, HV, K, V] in float32, zeros for nobody's."""
        inside = self.inside(slots)
        found = self.states[torch.where(inside, slots, 0).long()].float()
        found = torch.where(inside[:, None, None, None], found, 0)
        return found.mT if self.state_v_first else found

    def write(self, slots: Tensor, states: Tensor) -> None:
        """states [n, HV, K, V]; those of nobody's slots are dropped. Of a slot named twice the last one stays."""
        kept = self.inside(slots).nonzero().flatten()
        states = states.mT if self.state_v_first else states
        self.states[slots[kept].long()] = states[kept].to(self.states.dtype)


@lru_cache(maxsize=64)
def _sizes(HV: int, K: int, V: int, dtype: torch.dtype, state_v_first: bool) -> PoolSizes:
    return PoolSizes(HV, K, V, str(dtype).rpartition(".")[2], state_v_first)


@dataclass(frozen=True, eq=False)
class Marks:
    """States to leave inside a prefill, on the device: after `position[m]` tokens of sequence `sequence[m]`, 1 .. its length, in page
    `slot[m]`; a slot that is nobody's leaves none. At most one in each 64 tokens of a sequence. aligned: all positions are multiples of 64
    and before their sequence's end, which spares a launch."""

    sequence: Tensor  # [M]
    position: Tensor  # [M]
    slot: Tensor  # [M]
    aligned: bool = False

    def __post_init__(self):
        for name in ("sequence", "position", "slot"):
            x = getattr(self, name)
            if not isinstance(x, Tensor) or x.dim() != 1 or x.dtype not in (torch.int32, torch.int64) or len(x) != len(self.slot):
                raise TypeError(f"{name} must be [M] int32 or int64, one entry a mark, got {getattr(x, 'shape', x)}")


@plainly
def prefill(
    pages: Pages, slots: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, A_log: Tensor | None = None, dt_bias: Tensor | None = None, known: Tensor | None = None,
    marks: Marks | None = None, out: Tensor | None = None, chunk_size: int = 64, backend: str = "auto", **options: Any,
) -> Tensor:  # fmt: skip
    """Tokens of N sequences, each going on from its slot's state and leaving its last one there: o.

    q .. beta [B, T, ..] with one slot a row, or [1, T, ..] with cu_seqlens [N + 1] and one slot a sequence; tokens past cu_seqlens[-1] are
    padding. known [N]: 0 (or False) for a sequence that begins with zeros whatever its page holds. marks: states to leave on the way.
    """
    arrays = Arrays(q, k, v, g, beta, A_log, dt_bias, None, cu_seqlens, cu_seqlens_cpu)
    rows = _check_slots(pages, slots, None)
    if slots.dim() != 1:
        raise ValueError(f"slots must be [N] for a prefill, got {tuple(slots.shape)}")
    problem = _describe("prefill", "chunk", pages, arrays, rows, options, chunk_size=chunk_size).replace(state_v_first=pages.state_v_first)
    out = None if out is None else _output(problem, v, out)
    module = dispatch.select_pooled("torch", problem, q.device, backend)
    if module.pooled is not None:
        flags = None if known is None else known.to(torch.int8) if known.dtype == torch.bool else known
        o = module.pooled().prefill_pages(problem, arrays, pages, slots, flags, marks, module.default_config(problem, q.device))
    else:
        o = _prefill(problem, arrays, pages, slots, known, marks, module)
    return o if out is None else out.copy_(o)


def _prefill(problem: Problem, arrays: Arrays, pages: Pages, slots: Tensor, known, marks: Marks | None, module: Any) -> Tensor:
    """With any backend's chunked call: states out of their pages and back; one call more for each mark."""
    real, state = pages.inside(slots), pages.read(slots)
    if known is not None:
        state = torch.where(known.bool()[:, None, None, None], state, 0)
    plain = problem.replace(state_v_first=False, state_dtype="float32")
    config = module.default_config(plain, arrays.q.device)
    result, _ = module.forward(plain, arrays._replace(initial_state=state.contiguous()), config)
    if problem.varlen:
        t = torch.arange(problem.T, device=slots.device)
        owner = torch.searchsorted(arrays.cu_seqlens[1:].contiguous(), t, right=True).clamp(max=problem.N - 1)
        o = torch.where(real[owner][None, :, None, None], result.o, 0)
    else:
        o = torch.where(real[:, None, None, None], result.o, 0)
    for n, p, slot in () if marks is None else zip(*(x.tolist() for x in (marks.sequence, marks.position, marks.slot)), strict=True):
        row, start = (0, int(arrays.cu_seqlens[n])) if problem.varlen else (n, 0)
        cut = {name: getattr(arrays, name)[row : row + 1, start : start + p] for name in TOKENS}
        part = arrays._replace(**cut, initial_state=state[n : n + 1].contiguous(), cu_seqlens=None, cu_seqlens_cpu=None)
        own = plain.replace(B=1, N=1, T=p, varlen="")
        found = module.forward(own, part, module.default_config(own, slots.device))[0].final_state
        pages.write(torch.where(real[n : n + 1], torch.tensor([slot], device=slots.device, dtype=slots.dtype), -1), found)
    pages.write(slots, result.final_state)
    return o


@plainly
def decode(
    pages: Pages, slots: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, accepted: Tensor | None = None, cu_seqlens: Tensor | None = None, out: Tensor | None = None,
    backend: str = "auto", **options: Any,
) -> Tensor:  # fmt: skip
    """The next tokens of each row: o [N, T, HV, V]; the states move on in place.

    q, k [N, T, H, K], v [N, T, HV, V], g [N, T, HV, K], beta [N, T, HV]; or with cu_seqlens [N + 1] all of them [1, tokens, ..], row n's
    from cu_seqlens[n] on. They may be parts of wider rows: only the channels of a head need be adjacent.
    slots: [N], the state of row n, read and written; or [N, T], one for each token, where the state after token t goes to slots[n, t], and
        comes from slots[n, accepted[n] - 1] (slots[n, 0] without accepted [N]).
    out: where o goes, of any strides with adjacent channels.
    options: those of `fused_recurrent_kda`.
    """
    arrays = Arrays(q, k, v, g, beta, A_log, dt_bias, None, cu_seqlens)
    rows = _check_slots(pages, slots, accepted)
    problem = _describe("decode", "recurrent", pages, arrays, rows, options)
    if accepted is not None and slots.dim() != 2:
        raise ValueError(f"accepted needs slots [N, T], one for each token, got {tuple(slots.shape)}")
    if slots.dim() == 2 and not problem.varlen and slots.shape[1] < problem.T:
        raise ValueError(f"slots must be [N, T] with T >= {problem.T} tokens, got {tuple(slots.shape)}")
    out = _output(problem, v, out)
    module = dispatch.select("torch", problem, q.device, backend)
    if module.pooled is not None:
        slots = slots if slots.stride(-1) == 1 else slots.contiguous()
        module.pooled().decode_pages(problem, arrays, pages, slots, accepted, out)
    else:
        _decode(problem, arrays, pages, slots, accepted, out)
    return out


def _decode(problem: Problem, arrays: Arrays, pages: Pages, slots: Tensor, accepted: Tensor | None, out: Tensor) -> None:
    """Token by token in PyTorch."""
    from_slots = slots
    if slots.dim() == 2:
        column = torch.zeros_like(slots[:, 0]) if accepted is None else accepted.clamp(min=1).to(slots.dtype) - 1
        from_slots = slots.gather(1, column[:, None].long())[:, 0]
    taken, state = pages.inside(from_slots), pages.read(from_slots)
    native = dispatch.load("torch_native")
    spans = list(pairwise(arrays.cu_seqlens.tolist())) if problem.varlen else [(0, problem.T)] * problem.N
    out.zero_()
    one = problem.replace(B=1, N=1, T=1, varlen="", state_v_first=False, has_initial_state=True, state_dtype="float32")
    for n, (start, end) in enumerate(spans):
        if not taken[n]:
            continue
        S, row = state[n : n + 1], 0 if problem.varlen else n
        for t in range(start, end):
            token = {name: getattr(arrays, name)[row : row + 1, t : t + 1] for name in TOKENS}
            step = native.step(one, arrays._replace(**token, initial_state=S.contiguous(), cu_seqlens=None))
            S, out[row, t] = step.final_state, step.o[0, 0].to(out.dtype)
            if slots.dim() == 2:
                pages.write(slots[n, t - start : t - start + 1], S)
        if slots.dim() == 1:
            pages.write(slots[n : n + 1], S)


def _check_slots(pages: Pages, slots: Tensor, accepted: Tensor | None) -> int:
    """How many rows there are."""
    for name, x, dims in (("slots", slots, (1, 2)), ("accepted", accepted, (1,))):
        if x is None and name == "accepted":
            continue
        if not isinstance(x, Tensor) or x.dim() not in dims or x.dtype not in (torch.int32, torch.int64):
            got = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name} must be int32 or int64 of {' or '.join(map(str, dims))} dimensions, got {got}")
        if x.device != pages.states.device:
            raise ValueError(f"{name} must be on the states' device {pages.states.device}, got {x.device}")
        if len(x) != len(slots):
            raise ValueError(f"{name} must hold one entry for each of the {len(slots)} rows, got {len(x)}")
    return len(slots)


def _describe(call: str, op: str, pages: Pages, arrays: Arrays, rows: int, options: dict[str, Any], **more: Any) -> Problem:
    for name, x in zip(Arrays._fields, arrays, strict=True):
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    specs = [None if x is None else (x.shape, x.dtype, x.device) for x in arrays]
    return _described(call, op, pages.sizes, pages.states.device, rows, tuple(more.items()), *specs, **options)


@lru_cache(maxsize=1024, typed=True)
def _described(
    call: str, op: str, sizes: PoolSizes, device: torch.device, rows: int, more: tuple, /, *specs: tuple | None, **options: Any
) -> Problem:
    """A call like an earlier one is not described, nor checked, anew."""
    arrays = Arrays(*(None if x is None else Spec(*x) for x in specs))
    check_devices(arrays)
    if arrays.q.device != device:
        raise ValueError(f"q must be on the states' device {device}, got {arrays.q.device}")
    return describe(call, op, sizes, arrays, rows, options, **dict(more))


def _output(problem: Problem, v: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if tuple(out.shape) != tuple(v.shape) or out.device != v.device or not out.is_floating_point():
        raise ValueError(f"out must be {tuple(v.shape)} floats on {v.device}, got {tuple(out.shape)} {out.dtype} on {out.device}")
    if out.stride(-1) != 1:
        raise ValueError(f"out must have adjacent channels, got strides {out.stride()}")
    return out
