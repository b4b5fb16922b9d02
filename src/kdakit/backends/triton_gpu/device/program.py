"""Which sequence, chunk, tokens and state a program owns, and when it may begin."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def first_slot(p_cu_seqlens, i_n, C: tl.constexpr):
    """Where sequence n's chunks start in the workspace: cu[n] // C + n. There are gaps but no overlaps, and no prefix sum is needed."""
    return tl.load(p_cu_seqlens + i_n).to(tl.int64) // C + i_n


@triton.jit
def locate_chunk(p_cu_seqlens, i_s, T, N, NT, C: tl.constexpr, VARLEN: tl.constexpr):
    """Of the chunk in slot i_s: batch row, sequence, index in its sequence, and the sequence's first and last token + 1."""
    if VARLEN:
        i_n = find_sequence(p_cu_seqlens, i_s, N, C)
        bos = tl.load(p_cu_seqlens + i_n).to(tl.int64)
        eos = tl.load(p_cu_seqlens + i_n + 1).to(tl.int64)
        return i_n * 0, i_n, i_s - first_slot(p_cu_seqlens, i_n, C), bos, eos
    i_n = i_s // NT
    return i_n, i_n, i_s % NT, i_n * 0, i_n * 0 + T


@triton.jit
def find_sequence(p_cu_seqlens, i_s, N, C: tl.constexpr):
    """The sequence n with first_slot(n) <= i_s < first_slot(n + 1), by a 128-way search."""
    low = i_s * 0
    width = low + N
    while width > 1:
        stride = (width + 127) // 128
        i_n = low + tl.arange(0, 128) * stride  # [128]
        m_n = i_n < low + width
        slot = tl.load(p_cu_seqlens + i_n, mask=m_n, other=0).to(tl.int64) // C + i_n
        hit = tl.sum((m_n & (slot <= i_s)).to(tl.int32), 0)
        end = low + width
        low += (hit - 1) * stride
        width = tl.minimum(stride, end - low)
    return low


@triton.jit
def row_tokens(C: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr):
    """[C]: the token that each row of a chunk's tiles holds.

    Within each part of HALF rows, row r is token (r % (HALF / GROUP)) * GROUP + r // (HALF / GROUP): GROUP consecutive tokens end up in the
    registers of one thread, where scans over them cost nothing. Everything inside a chunk lives in this order; only loads of inputs and
    stores of outputs know tokens.
    """
    o_c = tl.arange(0, C)
    o_r = o_c % HALF
    return o_c - o_r + (o_r % (HALF // GROUP)) * GROUP + o_r // (HALF // GROUP)


@triton.jit
def row_of_token(o_t, HALF: tl.constexpr, GROUP: tl.constexpr):
    """The row that holds token o_t of a chunk: the inverse of `row_tokens`."""
    o_r = o_t % HALF
    return o_t - o_r + (o_r % GROUP) * (HALF // GROUP) + o_r // GROUP


@triton.jit
def rows_by_token(b_x, HALF: tl.constexpr, GROUP: tl.constexpr):
    """[P HALF, X] in the order of `row_tokens` -> in that of tokens."""
    P: tl.constexpr = b_x.shape[0] // HALF
    X: tl.constexpr = b_x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(b_x, [P, GROUP, HALF // GROUP, X]), (0, 2, 1, 3)), [P * HALF, X])


@triton.jit
def pairs_by_token(b_A, GROUP: tl.constexpr):
    """[2 HALF, HALF], rows and columns."""
    HALF: tl.constexpr = b_A.shape[1]
    return tl.trans(rows_by_token(tl.trans(rows_by_token(b_A, HALF, GROUP)), HALF, GROUP))


@triton.jit
def state_offsets(i_state, o_v, o_k, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """[BV, KP] offsets of HALF^T in the i_state-th [K, V] (or [V, K]) matrix."""
    if V_FIRST:
        return i_state * K * V + o_v[:, None] * K + o_k[None, :]
    return i_state * K * V + o_k[None, :] * V + o_v[:, None]


@triton.jit
def zero_here(i, PTX: tl.constexpr):
    """0, for the int32 i, of which the compiler does not know that it is: addresses with it are made here, and not before a loop, where
    they would wait in registers for a branch that few chunks take."""
    if PTX:
        return tl.inline_asm_elementwise("and.b32 $0, $1, 0;", "=r,r", [i], dtype=tl.int32, is_pure=False, pack=1)
    return i * 0


@triton.jit
def sequence_of(p_cu_seqlens, i_n, T, NT, C: tl.constexpr, VARLEN: tl.constexpr):
    """Of sequence n: batch row, first token, number of tokens, and the slot of its first chunk."""
    if VARLEN:
        bos = tl.load(p_cu_seqlens + i_n).to(tl.int64)
        return i_n * 0, bos, tl.load(p_cu_seqlens + i_n + 1).to(tl.int64) - bos, first_slot(p_cu_seqlens, i_n, C)
    return i_n, i_n * 0, i_n * 0 + T, i_n * NT


@triton.jit
def wait_for_last(CHAINED: tl.constexpr):
    """From here on all that earlier launches wrote is there."""
    if CHAINED:
        gdc_wait()


@triton.jit
def let_next_begin(CHAINED: tl.constexpr):
    """The next launch may begin; what it sees before it waits is what this one saw when it came here."""
    if CHAINED:
        gdc_launch_dependents()


@triton.jit
def part_of(length, i_part, PARTS, C: tl.constexpr):
    """First and last chunk + 1 of a part of a sequence of `length` tokens, and whether no later part has any. Parts are equally long; the
    first may be shorter, and the last ones empty."""
    chunks = tl.cdiv(length, C).to(tl.int32)
    each = tl.maximum(tl.cdiv(chunks, PARTS), 1)
    end = (i_part - tl.cdiv(chunks, each) + 1) * each + chunks  # of the last one that is not empty: chunks
    return tl.minimum(tl.maximum(end - each, 0), chunks), tl.minimum(end, chunks), end >= chunks
