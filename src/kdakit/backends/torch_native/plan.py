"""Where each token goes: pieces of [B, T, H, D] tensors to chunks [chunks, rows, C, D] and back, and which state a chunk starts from.

The work streams over pieces of a few chunks, so that temporaries stay in the cache and memory does not grow beyond inputs and outputs.
Without cu_seqlens a row is one (batch, head) pair. With cu_seqlens a row is one head, every sequence starts a new chunk, and the number of
chunks is known without looking at the values: an upper bound, of which the last chunks stay empty. Padding has k = v = beta = 0 and
log-decay 0, so it changes no state.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from kdakit.problem import Arrays, Problem

PIECE = {"cpu": 1 << 18}  # elements of one [chunks, rows, C, D] temporary: fewer and larger operations, still near the caches
PIECE_ELSEWHERE = 1 << 26


def make_plan(problem: Problem, arrays: Arrays) -> DensePlan | PackedPlan:
    return (PackedPlan if problem.varlen else DensePlan)(problem, arrays)


def chunks_per_piece(problem: Problem, device: torch.device) -> int:
    rows = problem.HV if problem.varlen else problem.B * problem.HV
    elements = rows * problem.options.chunk_size * max(problem.K, problem.V)
    return max(1, PIECE.get(device.type, PIECE_ELSEWHERE) // max(elements, 1))


def keep_memory(device: torch.device) -> None:
    """Before the first piece: glibc's allocator returns freed memory to the system, and pages that come back cost more than work done in
    them, until it has seen a large block freed. One of 31 MiB that nobody touches costs microseconds."""
    if device.type == "cpu":
        torch.empty(31 << 20, dtype=torch.uint8, device=device)


def visible_cu_seqlens(arrays: Arrays) -> torch.Tensor | None:
    """cu_seqlens on the host, if it is there already: looking must not make the host wait for a device."""
    for cu in (arrays.cu_seqlens_cpu, arrays.cu_seqlens):
        if cu is not None and cu.device.type == "cpu":
            return cu
    return None


def covering_chunk(length: int, chunk_size: int) -> int:
    """The smallest power of two that holds `length` tokens, at most chunk_size. A length that torch.compile does not know stays unknown, so
    that one program serves all: each power below chunk_size is added where there are more tokens."""
    if isinstance(length, int):
        return min(chunk_size, 1 << max(length - 1, 0).bit_length())
    size, power = 1, 1
    while power < chunk_size:
        size, power = size + power * torch.sym_min(length // (power + 1), 1), 2 * power
    return size


def chunk_tokens(problem: Problem) -> int:
    """A single short chunk may be shorter than the call says, unless all its intermediates are kept. (Packed sequences: see PackedPlan.)"""
    o = problem.options
    as_said = problem.varlen or o.deterministic or (problem.needs_grad and o.disable_recompute)
    return o.chunk_size if as_said else covering_chunk(problem.T, o.chunk_size)


class DensePlan:
    """B sequences of one length."""

    def __init__(self, problem: Problem, arrays: Arrays):
        self.B, self.T, self.HV, self.rows = problem.B, problem.T, problem.HV, problem.B * problem.HV
        self.C = chunk_tokens(problem)
        self.NT = -(-problem.T // self.C)
        self.used = self.NT if problem.B else 0
        self.stride = chunks_per_piece(problem, arrays.q.device)

    def pieces(self) -> Iterator[tuple[int, int]]:
        for n in range(0, self.used, self.stride):
            yield n, min(n + self.stride, self.used)

    def state_buffer(self, states: torch.Tensor) -> torch.Tensor:
        """[chunks of a piece + 1, rows, K, V], for states [N, HV, K, V]."""
        return states.new_empty(min(self.stride, self.used) + 1, self.rows, *states.shape[2:])

    def tokens(self, x: torch.Tensor, n0: int, n1: int) -> torch.Tensor:
        """The tokens of chunks n0..n1: [B, T, H, D] -> [B, t, H, D]."""
        return x[:, n0 * self.C : n1 * self.C]

    def to_chunks(self, x: torch.Tensor, n0: int, n1: int) -> torch.Tensor:
        """[B, t, H, D] -> [n1 - n0, B * H, C, D], padded with zeros."""
        B, t, H, D = x.shape
        missing = (n1 - n0) * self.C - t
        x = F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x
        return x.reshape(B, n1 - n0, self.C, H, D).permute(1, 0, 3, 2, 4).reshape(n1 - n0, B * H, self.C, D)

    def from_chunks(self, x: torch.Tensor, n0: int, n1: int) -> torch.Tensor:
        """[n1 - n0, B * H, C, D] -> [B, t, H, D], padding dropped."""
        t = min(n1 * self.C, self.T) - n0 * self.C
        return x.unflatten(1, (self.B, -1)).permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :t]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def put(self, out: torch.Tensor, x: torch.Tensor, n0: int, n1: int) -> None:
        out[:, n0 * self.C : n0 * self.C + x.shape[1]] = x

    def finish(self, out: torch.Tensor) -> torch.Tensor:
        return out

    def enter(self, n: int, state: torch.Tensor, initial: torch.Tensor) -> None:
        """Before chunk n: where a sequence starts, its initial state replaces the one carried over."""
        if n == 0:
            state.copy_(initial.reshape(state.shape))

    def leave(self, n: int, state: torch.Tensor, final: torch.Tensor) -> None:
        """After chunk n: where a sequence ends, its state goes to the results."""
        if n == self.NT - 1:
            final.copy_(state.unflatten(0, final.shape[:2]))

    def enter_backward(self, n: int, d_state: torch.Tensor, d_final: torch.Tensor) -> None:
        if n == self.NT - 1:
            d_state.copy_(d_final.reshape(d_state.shape))

    def leave_backward(self, n: int, d_state: torch.Tensor, d_initial: torch.Tensor) -> None:
        if n == 0:
            d_initial.copy_(d_state.unflatten(0, d_initial.shape[:2]))

    def chunk_states(self, states: torch.Tensor) -> torch.Tensor:
        """[NT, rows, K, V] -> [B, NT, HV, K, V]."""
        return states.unflatten(1, (self.B, self.HV)).transpose(0, 1)


class PackedPlan:
    """N sequences packed along T, each in chunks of its own."""

    def __init__(self, problem: Problem, arrays: Arrays):
        self.T, self.N, self.rows = problem.T, problem.N, problem.HV
        self.C, self.NT, self.used = problem.options.chunk_size, problem.chunks, problem.chunks
        visible = visible_cu_seqlens(arrays)
        self.padded = visible is None or int(visible[-1]) < self.T  # perhaps
        if visible is not None:
            lengths = visible[1:] - visible[:-1]
            # Where nothing outlives the call in chunks, many short sequences get short chunks.
            if not (problem.needs_grad or problem.options.return_intermediate_states or problem.options.deterministic):
                self.C = covering_chunk(int(lengths.max()), self.C)
            self.used = int(((lengths + self.C - 1) // self.C).sum())
            self.NT = self.NT if problem.needs_grad else self.used
        self.stride = chunks_per_piece(problem, arrays.q.device)
        cu = arrays.cu_seqlens.long()
        counts = (cu[1:] - cu[:-1] + self.C - 1) // self.C  # [N]
        ends = counts.cumsum(0)
        slot = torch.arange(self.used, device=cu.device)
        self.sequence = torch.searchsorted(ends, slot, right=True)  # [used], N where the slot is empty
        owner = self.sequence.clamp(max=self.N - 1)
        within = slot - (ends - counts)[owner]
        self.first = within == 0  # [used]
        self.last = within == counts[owner] - 1
        token = (cu[owner] + within * self.C)[:, None] + torch.arange(self.C, device=cu.device)  # [used, C]
        self.valid = (token < cu[owner + 1][:, None]) & (self.sequence < self.N)[:, None]
        self.source = torch.minimum(token, cu[owner + 1][:, None] - 1).clamp(min=0)  # what lies past the last sequence may be anything
        self.target = torch.where(self.valid, token, self.T)  # padding goes to one row past the end

    pieces = DensePlan.pieces
    state_buffer = DensePlan.state_buffer

    def tokens(self, x: torch.Tensor, n0: int, n1: int) -> torch.Tensor:
        """[1, T, H, D] -> [1, (n1 - n0) * C, H, D], padding filled with some token."""
        return x.index_select(1, self.source[n0:n1].flatten())

    def to_chunks(self, x: torch.Tensor, n0: int, n1: int) -> torch.Tensor:
        """[1, t, H, D] -> [n1 - n0, H, C, D], padding zeroed."""
        x = x.masked_fill(~self.valid[n0:n1].flatten()[:, None, None], 0)
        return x.reshape(n1 - n0, self.C, *x.shape[2:]).transpose(1, 2).contiguous()

    def from_chunks(self, x: torch.Tensor, n0: int, n1: int) -> torch.Tensor:
        """[n1 - n0, H, C, D] -> [1, t, H, D], padding zeroed."""
        x = x.transpose(1, 2).flatten(0, 1)[None]
        return x.masked_fill(~self.valid[n0:n1].flatten()[:, None, None], 0)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        # Zeros for tokens that no chunk holds: behind the last sequence, or where cu_seqlens_cpu is not cu_seqlens.
        return torch.zeros((1, self.T + 1, *shape[2:]), dtype=dtype, device=device)

    def put(self, out: torch.Tensor, x: torch.Tensor, n0: int, n1: int) -> None:
        out.index_copy_(1, self.target[n0:n1].flatten(), x.to(out.dtype))

    def finish(self, out: torch.Tensor) -> torch.Tensor:
        return out[:, : self.T]

    def enter(self, n: int, state: torch.Tensor, initial: torch.Tensor) -> None:
        self._replace(n, self.first, state, initial)

    def enter_backward(self, n: int, d_state: torch.Tensor, d_final: torch.Tensor) -> None:
        self._replace(n, self.last, d_state, d_final)

    def leave(self, n: int, state: torch.Tensor, final: torch.Tensor) -> None:
        """Every chunk writes its sequence's state; the last one stays. Empty slots write to row N."""
        final.index_copy_(0, self.sequence[n : n + 1], state[None])

    leave_backward = leave

    def _replace(self, n, here, state, states):
        own = states.index_select(0, self.sequence[n : n + 1])[0]
        state.copy_(torch.where(here[n], own, state))

    def chunk_states(self, states: torch.Tensor) -> torch.Tensor:
        """[NT, HV, K, V] -> [1, used, HV, K, V]: behind those that are used nothing has been written."""
        return states[None, : self.used]
