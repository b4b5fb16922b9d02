"""Stage intra for bfloat16 inputs whose q and k the kernel normalises, in chunks of 64 tokens: one program per chunk and value head.

The same results as `prepare_kernel`, in the tiles of `token_tiles`, so that little moves between threads.
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.arguments import arguments
from kdakit.backends.triton_gpu.config import Config, chunk_slots
from kdakit.backends.triton_gpu.device.gate import (
    gate_share,
    gate_slope,
    gate_unit,
    inverse_norm,
    inverse_power_of_2,
    power_of_2,
    scaled_bias,
    write_strength,
)
from kdakit.backends.triton_gpu.device.inverse import DIVISIBLE, before_row, join_columns, unit_lower_inverse
from kdakit.backends.triton_gpu.device.matrix import INTERPRETED, product, round_to
from kdakit.backends.triton_gpu.device.program import locate_chunk
from kdakit.backends.triton_gpu.device.token_tiles import (
    SHIFT,
    UNSHIFT,
    by_token,
    channel_index,
    four_rows,
    half_sums,
    running_sums,
    scaled_bf16,
    squares_of,
    stack_rows,
    times_unshift,
    to_float32,
    token_index,
    value_across,
)
from kdakit.backends.triton_gpu.device.versions import NEWER, either, rows_at
from kdakit.backends.triton_gpu.runtime.kernel import kernel
from kdakit.backends.triton_gpu.runtime.launch import Launch
from kdakit.backends.triton_gpu.runtime.layout import Layout
from kdakit.problem import Problem

SECOND = 2**15  # the most programs along a grid's second axis


@triton.jit
def load_rows(p_q, p_k, p_g, first: tl.constexpr, length, s_qt, s_kt, s_gt, K: tl.constexpr, KP: tl.constexpr, J: tl.constexpr,
              ALIGN: tl.constexpr, FLIP: tl.constexpr):  # fmt: skip
    """Of 32 tokens from the chunk's token `first` on, q above k (FLIP: k above q) [8 J, 8, c], and g [8 J, 4, c]. What is not there is the
    last token that is: a mask would cost more."""
    o_k = channel_index(J, KP // J)
    o_t = tl.minimum(first + token_index(J, 4), length - 1)
    p_g = rows_at(p_g, o_t * s_gt * ALIGN + o_k, KP == 128)
    o_t = tl.minimum(first + token_index(J, 8), length - 1)
    m_q = (tl.arange(0, 8) < 4)[None, :, None] != FLIP
    if NEWER:
        p_q = rows_at(either(m_q, p_q + o_t * s_qt * ALIGN, p_k + o_t * s_kt * ALIGN, ALIGN), o_k)
    else:
        p_q = tl.where(m_q, p_q + (o_t * s_qt * ALIGN + o_k), p_k + (o_t * s_kt * ALIGN + o_k))
        if KP == 128:
            p_q = tl.max_contiguous(p_q, [2, 1, 8])
    if K == KP:
        b_g, b_qk = tl.load(p_g), tl.load(p_q)
    else:
        b_g, b_qk = tl.load(p_g, mask=o_k < K, other=0.0), tl.load(p_q, mask=o_k < K, other=0.0)
    return b_qk, b_g


@triton.jit
def load_bias(p_bias, K: tl.constexpr, KP: tl.constexpr, J: tl.constexpr):
    """[8 J, c], the same for all p. Of 32 channels a thread needs 8 adjacent ones but loads 4 at once: rows and columns are named so that
    it loads its own, which then go to their places without leaving it."""
    c: tl.constexpr = KP // J
    o_m, o_c = tl.arange(0, 8 * J)[:, None], tl.arange(0, c)[None, :]
    o_k = o_m // 8 * c + o_c
    if c == 32:
        o_k = o_m // 4 % 4 * c + o_c // 4 % 4 * 8 + o_m // 16 * 4 + tl.max_contiguous(o_c % 4, [1, 4])
    b_x = tl.load(p_bias + o_k, mask=o_k < K, other=0.0).to(tl.float32)
    if c == 32:
        b_x = tl.reshape(tl.permute(tl.reshape(b_x, [2, 4, 4, 2, 4, 4]), (1, 2, 3, 4, 0, 5)), [8 * J, c])
    return b_x


@triton.jit
def row_scale(b_squares, p_norms, scale, left, FLIP: tl.constexpr):
    """b_squares [8 J, 8, c] -> scale / |q| and 1 / |k|, [8 J, 8]; 0 from token `left` on. The sum over j, which goes through shared memory,
    is one of [J, 64] with p fastest: 8 lanes then write and read 8 banks, not one. p_norms [2, 64]: gets 1 / |q| and 1 / |k|, if it is
    there."""
    J: tl.constexpr = b_squares.shape[0] // 8
    b_norm = tl.permute(tl.reshape(tl.sum(b_squares, 2), [J, 8, 8]), (0, 2, 1))
    b_norm = tl.trans(tl.reshape(tl.sum(tl.reshape(b_norm, [J, 64]), 0), [8, 8]))  # [8, 8]
    o_r = tl.arange(0, 8)[None, :]
    b_norm = inverse_norm(b_norm)
    if p_norms is not None:
        tl.store(p_norms + tl.where((o_r < 4) != FLIP, 0, 64) + tl.arange(0, 8)[:, None] * 4 + o_r % 4, b_norm)
    b_norm = b_norm * tl.where((o_r < 4) != FLIP, scale, 1.0)
    b_norm = tl.where(tl.arange(0, 8)[:, None] * 4 + o_r % 4 < left, b_norm, 0.0)
    return tl.reshape(tl.broadcast_to(b_norm[None], [J, 8, 8]), [8 * J, 8])


@triton.jit
def bounded_sums(b_g, unit):
    """b_g [8 J, 4, c] -> with SHIFT the log2-decay from the half's start to each token, and over it [8 J, c]."""
    b_s, b_total = running_sums(b_g)
    b_in, b_total = half_sums(b_total)
    return b_s * unit + (b_in * unit + SHIFT)[:, None, :], b_total * unit


@triton.jit
def unbounded_sums(b_g, unit):
    """As `bounded_sums`, from the start of each block of 8 tokens; log2-decays over those 8, the 8 beside them, the 16 beside those."""
    o_p = (tl.arange(0, b_g.shape[0]) % 8)[:, None]
    b_s, b_8 = running_sums(b_g)
    b_other = value_across(b_8, 1)
    b_s = b_s * unit + (tl.where(o_p % 2 == 1, b_other, 0.0) * unit + SHIFT)[:, None, :]
    b_8 = (b_8 + b_other) * unit
    b_16 = value_across(b_8, 2)
    return b_s, b_8, b_16, value_across(b_8 + b_16, 4)


@triton.jit
def pick_normalised(b_qk, b_scale, i: tl.constexpr, PTX: tl.constexpr):
    """q or k, whichever is above (0) or below (1), [8 J, 4, c]."""
    return to_float32(four_rows(b_qk, i), PTX) * four_rows(b_scale, i)


@triton.jit
def store_decayed(p_x, b_x, b_xn, b_from, EXACT: tl.constexpr, PTX: tl.constexpr):
    """Stores b_x, which rounded is b_xn, times b_from (EXACT: UNSHIFT)."""
    tl.store(p_x, times_unshift(b_xn, PTX) if EXACT else round_to(b_x * b_from, tl.bfloat16))


@triton.jit
def store_pair_factors(b_qk, b_scale, b_s, b_from, b_to, p_tiles, KP: tl.constexpr, FLIP: tl.constexpr, BOUNDED: tl.constexpr,
            SOLVE_DTYPE: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """Of a half, q and k times 2^b_s [8 J, 8, c], k times 2^-b_s [8 J, 4, c], and that times b_to, which is k decayed to the half's end, in
    both types. Stores the first times b_from, k_in and q_decayed.

    The order is the fastest of many tried and differs between gates: it decides what waits in registers."""
    J: tl.constexpr = b_s.shape[0] // 8
    Q: tl.constexpr = 1 if FLIP else 0  # where q is, above or below k
    EXACT: tl.constexpr = BOUNDED and not FLIP
    p_k = p_tiles + (tl.arange(0, 8 * J)[:, None, None] % 8 * (4 * KP) + channel_index(J, KP // J))
    p_k += (tl.arange(0, 4) * KP)[None, :, None]  # alone, so that it is part of the instruction
    p_k = rows_at(p_k, 32 * KP if FLIP else 0)
    if NEWER:
        p_q = rows_at(p_k, 64 * KP)
    b_scale, b_from = b_scale[:, :, None], b_from[:, None, :]
    if not BOUNDED:
        b_e = power_of_2(b_s, PTX)
        b_q = pick_normalised(b_qk, b_scale, Q, PTX) * b_e
        b_qn = round_to(b_q, tl.bfloat16)
        store_decayed(p_q if NEWER else p_k + 64 * KP, b_q, b_qn, b_from, EXACT, PTX)
    b_k = pick_normalised(b_qk, b_scale, 1 - Q, PTX)
    b_x = b_k * inverse_power_of_2(b_s, PTX)
    b_cols = round_to(b_x, tl.bfloat16)
    if BOUNDED:
        b_e = power_of_2(b_s, PTX)
        b_k = b_k * b_e
        b_kn = round_to(b_k, tl.bfloat16)
        b_q = pick_normalised(b_qk, b_scale, Q, PTX) * b_e
        b_qn = round_to(b_q, tl.bfloat16)
    b_x = b_x * b_to[:, None, :]
    b_tails, b_first = round_to(b_x, SOLVE_DTYPE), round_to(b_x, tl.bfloat16)
    if BOUNDED:
        store_decayed(p_q if NEWER else p_k + 64 * KP, b_q, b_qn, b_from, EXACT, PTX)
    else:
        b_k = b_k * b_e
        b_kn = round_to(b_k, tl.bfloat16)
    store_decayed(p_k, b_k, b_kn, b_from, EXACT, PTX)
    return stack_rows(b_kn, b_qn) if FLIP else stack_rows(b_qn, b_kn), b_cols, b_first, b_tails


@triton.jit
def store_decay(p_decay, b_x):
    """b_x [8 J, c], the same for all p. Of the channels that a thread has, the first half is stored where p is 0 and the second where it is
    1, so that nothing moves between threads."""
    M: tl.constexpr = b_x.shape[0]
    c: tl.constexpr = b_x.shape[1]
    W: tl.constexpr = 4 if c >= 32 else 2
    o_m, o_c = tl.arange(0, M)[:, None], tl.arange(0, c // 2)[None, :]
    b_i = tl.reshape(b_x.to(tl.int32, bitcast=True), [M, c // (2 * W), 2, W])
    b_i = tl.sum(tl.where(tl.arange(0, 2)[None, None, :, None] == (o_m % 2)[:, :, None, None], b_i, 0), 2)  # one of the two
    b_x = tl.reshape(b_i, [M, c // 2]).to(tl.float32, bitcast=True)
    o_c = tl.max_contiguous(o_c // W * 2 * W + o_c % W, [1, W])
    tl.store(p_decay + o_m // 8 * c + o_m % 2 * W + o_c, b_x, mask=o_m % 8 < 2)


@triton.jit
def half_factors(
    b_qk, b_g, b_bias, b_before, p_tiles, p_decay, p_norms, a, scale, unit, left,
    KP: tl.constexpr, FLIP: tl.constexpr, GATE: tl.constexpr, BOUNDED: tl.constexpr, SOLVE_DTYPE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Gate, norms, pair factors and tiles of a half, of which `left` tokens are there, after a log2-decay of b_before [8 J, c]. Returns
    also the log2-decay over it, and for `unbounded_pairs` those over 8 tokens and the 8 beside them, and the decay from the half's start.
    Of the second half (FLIP) it returns the decay instead, and stores that of the chunk.

    Gates come before norms: behind them the compiler would ask for g when q and k are there."""
    J: tl.constexpr = b_g.shape[0] // 8
    b_g = to_float32(b_g, PTX) if b_g.dtype.is_bf16() else b_g.to(tl.float32)
    b_g = gate_share(b_g, b_bias, a, unit, GATE, BOUNDED, PTX) * tl.where(token_index(J, 4) < left, 1.0, 0.0)
    b_scale = row_scale(squares_of(b_qk, PTX), p_norms, scale, left, FLIP)
    if BOUNDED:
        b_s, b_total = bounded_sums(b_g, unit)
        b_8, b_16, b_from = b_total, b_total, b_total
        b_to = power_of_2(b_total + SHIFT, PTX)
        b_start = power_of_2(b_before, PTX) * UNSHIFT
    else:
        b_s, b_8, b_16, b_32 = unbounded_sums(b_g, unit)
        o_p = (tl.arange(0, 8 * J) % 8)[:, None]
        m_16, m_32 = o_p // 2 % 2 == 1, o_p >= 4
        b_total = b_8 + b_16 + b_32
        b_to = power_of_2(b_8 + SHIFT + tl.where(m_16, 0.0, b_16) + tl.where(m_32, 0.0, b_32), PTX)
        b_from = power_of_2(tl.where(m_16, b_16, 0.0) + tl.where(m_32, b_32, 0.0), PTX) * UNSHIFT
        b_start = b_from * power_of_2(b_before, PTX)
    if FLIP:  # here, because more registers are alive in what follows than anywhere
        store_decay(p_decay, power_of_2(b_before + b_total, PTX))
        b_total = b_to * UNSHIFT if BOUNDED else power_of_2(b_total, PTX)
    b_rows, b_cols, b_first, b_tails = store_pair_factors(b_qk, b_scale, b_s, b_start, b_to, p_tiles, KP, FLIP, BOUNDED, SOLVE_DTYPE, PTX)
    return b_rows, b_cols, b_first, b_tails, b_total, b_8, b_16, b_from


@triton.jit
def unbounded_pairs(b_rows, b_cols, b_8, b_16, PTX: tl.constexpr, PRECISION: tl.constexpr):
    """The products of all pairs of a half [64, 32], where decays are raised to FLOOR: within blocks of 8 tokens, which share a reference,
    then by levels, see `prepare_kernel`."""
    o_p = (tl.arange(0, b_8.shape[0]) % 8)[:, None]
    o_i, o_j = tl.arange(0, 64)[:, None] % 32, tl.arange(0, 32)[None, :]
    m_16 = o_p // 2 % 2 == 1
    b_near = by_token(b_rows)
    b_A = product(b_near, tl.trans(by_token(b_cols)), PRECISION)
    b_cols = scaled_bf16(b_cols, power_of_2(b_8 + SHIFT, PTX)[:, None, :], PTX)
    b_A = tl.where(o_i // 8 == o_j // 8, b_A, product(b_near, tl.trans(by_token(b_cols)), PRECISION) * UNSHIFT)
    b_rows = scaled_bf16(b_rows, power_of_2(tl.where(m_16, b_16, 0.0) - SHIFT, PTX)[:, None, :], PTX)
    b_cols = scaled_bf16(b_cols, power_of_2(tl.where(m_16, 0.0, b_16), PTX)[:, None, :], PTX)
    return tl.where(o_i // 16 == o_j // 16, b_A, product(by_token(b_rows), tl.trans(by_token(b_cols)), PRECISION))


@triton.jit
def swapped_columns(b_x):
    """[64, N] -> of every 32 columns, 8 i + 2 j + r goes to 8 j + 2 i + r: of a product with it, a thread has 8 adjacent ones of a row."""
    N: tl.constexpr = b_x.shape[1]
    G: tl.constexpr = min(N, 32)
    return tl.reshape(tl.permute(tl.reshape(b_x, [64, N // G, 4, G // 8, 2]), (0, 1, 3, 2, 4)), [64, N])


@triton.jit
def store_swapped(p_x, b_x):
    """Stores [64, N], a product with `swapped_columns`, the second half of rows first: 16 bytes a thread, nothing moves between threads."""
    N: tl.constexpr = b_x.shape[1]
    G: tl.constexpr = min(N, 32)
    b_x = tl.permute(tl.reshape(b_x, [4, 2, 8, N // G, G // 8, 4, 2]), (3, 1, 0, 2, 5, 4, 6))
    o_x = tl.arange(0, N // G * 64)[:, None]
    o_row = (o_x // 8 % 4 * 16 + o_x // 32 % 2 * 8 + o_x % 8 + 32) % 64
    o_col = o_x // 64 * G + tl.max_contiguous(tl.arange(0, G), G // 4)[None, :]
    tl.store(p_x + o_row * N + o_col, tl.reshape(b_x, [N // G * 64, G]))


@triton.jit
def both_tails(b_x, b_tails, b_decay, SOLVE_DTYPE: tl.constexpr, ALIGN: tl.constexpr, PTX: tl.constexpr):
    """k decayed to the chunk's end [64, KP], columns swapped, the second half's b_x first; the other's b_tails decays by b_decay more."""
    b_decay = b_decay[:, None, :]
    b_tails = round_to(b_tails.to(tl.float32) * b_decay, SOLVE_DTYPE) if INTERPRETED else b_tails * b_decay.to(SOLVE_DTYPE)
    b_k = swapped_columns(by_token(stack_rows(b_x, b_tails)))
    if ALIGN % 2 and PTX:  # loaded two bytes at a time, it would be reshaped in shared memory, which the compiler tries and cannot
        b_k = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_k], dtype=b_k.dtype, is_pure=True, pack=2)
    return b_k


@kernel
def prepare_normed_kernel(
    p_q, p_k, p_g, p_beta, p_A_log, p_dt_bias, p_cu_seqlens, p_tiles, p_squares, p_decay, p_betas, p_lower, p_solved,
    p_k_solved, T, N, NT, H, HV, scale, lower_bound,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_gb, s_gt, s_gh, s_bb, s_bt, s_bh,
    K: tl.constexpr, KP: tl.constexpr, ALIGN: tl.constexpr, VARLEN: tl.constexpr, GATE: tl.constexpr, BOUNDED: tl.constexpr,
    BETA: tl.constexpr, HAS_A_LOG: tl.constexpr, HAS_DT_BIAS: tl.constexpr, PRECISION: tl.constexpr, SOLVE_DTYPE: tl.constexpr,
    PTX: tl.constexpr, HAS_LOWER: tl.constexpr,
):  # fmt: skip
    """What `prepare_kernel` makes, rows in the order of tokens. Grid: (HV, ., .), with as many of the others as slots or more:
    a division would delay the first load.

    A half's rows are q above k, or in the second half k above q, so that the rows of A_qk and A_kk that a warp needs are those that it has.

    p_k_solved [slot, HV, C, KP]: gets the scan's k_solved where tiles are kept for a backward. Their third is then the backward's, as
    SOLVE_DTYPE and without beta: k_solved = inverse^T k_decayed; and betas are its factors [slot, HV, 3, C] = beta, 1 / |q|, 1 / |k|.
    """
    C: tl.constexpr = 64
    J: tl.constexpr = 4
    c: tl.constexpr = KP // J
    DTYPE: tl.constexpr = p_tiles.dtype.element_ty
    i_h, i_s = tl.program_id(0), tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    i_b, i_hk = i_s * 0, i_h
    if H != HV:
        i_hk = i_h * H // HV
    if VARLEN:
        i_b, _, i_c, bos, eos = locate_chunk(p_cu_seqlens, i_s.to(tl.int64), T, N, NT, C, VARLEN)
    else:
        if i_s >= NT:
            i_b = i_s // NT
        i_c, bos, eos = i_s - i_b * NT, i_s * 0, T
    start = tl.cast(bos, tl.int64) + i_c * C
    if (start >= eos) | (i_b >= N):  # past the sequence, or the last slot
        return
    length = tl.minimum(eos - start, C).to(tl.int32)
    i_b, i_hk, i_h, i_p = i_b.to(tl.int64), i_hk.to(tl.int64), i_h.to(tl.int64), (i_s * HV + i_h).to(tl.int64)
    p_q += (i_b * s_qb + start * s_qt + i_hk * s_qh) * ALIGN
    p_k += (i_b * s_kb + start * s_kt + i_hk * s_kh) * ALIGN
    p_g += (i_b * s_gb + start * s_gt + i_h * s_gh) * ALIGN
    p_beta += i_b * s_bb + start * s_bt + i_h * s_bh
    p_tiles += i_p * 3 * C * KP
    p_decay += i_p * KP
    b_bias = tl.zeros([8 * J, c], tl.float32)
    if HAS_DT_BIAS:
        b_bias = load_bias(p_dt_bias + i_h * K, K, KP, J)
    b_qk, b_g = load_rows(p_q, p_k, p_g, 0, length, s_qt, s_kt, s_gt, K, KP, J, ALIGN, False)
    a = gate_slope(p_A_log, i_h, False, HAS_A_LOG)
    unit = gate_unit(a, lower_bound, GATE)
    b_bias = scaled_bias(b_bias, a, GATE)[:, None, :]
    o_i = tl.arange(0, 64)
    b_beta = write_strength(tl.load(p_beta + o_i * s_bt, mask=o_i < length, other=0.0).to(tl.float32), BETA)
    p_norms, p_norms1 = None, None
    if p_k_solved is None:
        p_betas += i_p * C
    else:
        p_betas += i_p * 3 * C
        p_norms, p_norms1 = p_betas + C, p_betas + C + 32
    tl.store(p_betas + o_i, tl.where(o_i < length, b_beta, 0.0))
    b_none = tl.zeros([8 * J, c], tl.float32)
    b_rows, b_cols, b_first, b_tails, b_total, b_8, b_16, b_from = half_factors(
        b_qk, b_g, b_bias, b_none, p_tiles, p_decay, p_norms, a, scale, unit, length, KP, False, GATE, BOUNDED, SOLVE_DTYPE, PTX
    )  # fmt: skip
    b_first = tl.trans(by_token(b_first))
    if BOUNDED:  # leaves registers before the loads need them
        b_near, b_far = by_token(b_rows), tl.trans(by_token(b_cols))
    b_qk, b_g = load_rows(p_q, p_k, p_g, 32, length, s_qt, s_kt, s_gt, K, KP, J, ALIGN, True)  # on its way during the product
    # Products of all pairs of a half [64, 32]; those of later columns mean nothing.
    b_A0 = product(b_near, b_far, PRECISION) if BOUNDED else unbounded_pairs(b_rows, b_cols, b_8, b_16, PTX, PRECISION)
    b_rows, b_cols, _, b_tails1, b_decay, b_8, b_16, b_from = half_factors(
        b_qk, b_g, b_bias, b_total, p_tiles, p_decay, p_norms1, a, scale, unit, length - 32, KP, True, GATE, BOUNDED, SOLVE_DTYPE, PTX
    )  # fmt: skip
    o_t = (o_i + 32) % 64  # rows of A_kk, and all columns: the second half first
    tl.debug_barrier()  # betas are read back, on their way during the products
    b_beta = tl.load(p_betas + o_t)
    b_k = both_tails(b_tails1, b_tails, b_decay, SOLVE_DTYPE, ALIGN, PTX)
    if BOUNDED:  # A10: these rows, columns of the first half
        b_near = by_token(b_rows)
        b_A1 = product(b_near, tl.trans(by_token(b_cols)), PRECISION)
        b_A10 = product(b_near, b_first, PRECISION) * UNSHIFT
    else:
        b_A10 = product(by_token(scaled_bf16(b_rows, b_from[:, None, :], PTX)), b_first, PRECISION)
        b_A1 = unbounded_pairs(b_rows, b_cols, b_8, b_16, PTX, PRECISION)

    m_0 = before_row(o_i, 32)[:, None]
    o_row, o_col = (o_i % 32)[:, None], tl.arange(0, 32)[None, :]
    b_A_kk = tl.where(m_0, b_A1, b_A0)  # [64, 32]
    b_A_qk = tl.where(o_col <= o_row, tl.where(m_0, b_A0, b_A1), 0.0)
    b_A_qk = round_to(join_columns(tl.where(m_0, 0.0, b_A_qk), tl.where(m_0, b_A_qk, b_A10)), SOLVE_DTYPE)  # [64, 64]
    b_T = unit_lower_inverse(b_A_kk * -b_beta[:, None], b_A10 * -b_beta[:, None], SOLVE_DTYPE, PRECISION)
    if HAS_LOWER:
        o_square = i_p * C * C + o_t[None, :]
        b_Tn = round_to(b_T, SOLVE_DTYPE)
        tl.store(p_solved + o_square + o_i[:, None] * C, round_to(product(b_A_qk, b_Tn, PRECISION), DTYPE))
        b_A_kk = tl.where(o_col < o_row, b_A_kk, 0.0)
        b_lower = round_to(join_columns(tl.where(m_0, b_A_kk, 0.0), tl.where(m_0, b_A10, b_A_kk)), SOLVE_DTYPE)
        b_lower = product(b_lower, b_Tn, PRECISION)
        b_eye = tl.where(o_t[:, None] == o_t[None, :], 1.0, 0.0)
        b_lower = tl.where((tl.abs(b_beta) > DIVISIBLE)[:, None], (b_eye - b_T) / b_beta[:, None], b_lower)
        tl.store(p_lower + o_square + o_t[:, None] * C, round_to(b_lower, SOLVE_DTYPE))
    b_T = round_to(b_T * tl.load(p_betas + o_t)[None, :], SOLVE_DTYPE)
    tl.store(p_squares + i_p * C * C + o_t[None, :] + o_i[:, None] * C, round_to(product(b_A_qk, b_T, PRECISION), DTYPE))
    b_solved = round_to(product(tl.trans(b_T), b_k, PRECISION), DTYPE)
    store_swapped(p_tiles + 2 * C * KP if p_k_solved is None else p_k_solved + i_p * C * KP, b_solved)
    if p_k_solved is not None:
        b_solved = round_to(product(tl.trans(b_Tn), b_k, PRECISION), SOLVE_DTYPE)
        store_swapped((p_tiles + 2 * C * KP).to(tl.pointer_type(SOLVE_DTYPE)), b_solved)


@lru_cache(maxsize=1024)
def launch(problem: Problem, config: Config, layout: Layout) -> Launch:
    slots = chunk_slots(problem, config.chunk)
    grid = problem.HV, min(slots, SECOND), -(-slots // SECOND)
    options = dict(num_warps=config.prepare_warps, num_stages=1, registers=config.prepare_registers)
    return Launch(prepare_normed_kernel, grid, arguments(problem, config, layout), **options)
