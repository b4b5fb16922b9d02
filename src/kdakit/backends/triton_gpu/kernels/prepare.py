"""Stage intra: everything of a chunk that needs no state, one program per chunk and value head."""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.arguments import arguments
from kdakit.backends.triton_gpu.config import Config, chunk_slots
from kdakit.backends.triton_gpu.device.gate import (
    decay_over,
    exact_decays,
    gate_decay,
    gate_slope,
    inverse_norm,
    log2_decay,
    write_strength,
)
from kdakit.backends.triton_gpu.device.inverse import DIVISIBLE
from kdakit.backends.triton_gpu.device.like_keys import first_key, pair_products
from kdakit.backends.triton_gpu.device.matrix import product, product_add, round_to, stored_operand
from kdakit.backends.triton_gpu.device.program import find_sequence, first_slot, pairs_by_token, row_tokens, rows_by_token
from kdakit.backends.triton_gpu.device.versions import either
from kdakit.backends.triton_gpu.runtime.kernel import kernel
from kdakit.backends.triton_gpu.runtime.launch import Launch
from kdakit.backends.triton_gpu.runtime.layout import Layout
from kdakit.problem import Problem


@triton.jit
def pick_of_group(b_x, i: tl.constexpr, GROUP: tl.constexpr):
    """b_x [GROUP, N, BK] -> b_x[i]. A sum of integers, so that the compiler drops the zeros and only a register is named."""
    o_i = tl.arange(0, GROUP)[:, None, None]
    return tl.sum(tl.where(o_i == i, b_x.to(tl.int32, bitcast=True), 0), 0).to(tl.float32, bitcast=True)


@triton.jit
def block_totals(b_total, s: tl.constexpr):
    """b_total [N, BK], equal within blocks of s rows -> the totals of the even and the odd block of each pair, for both."""
    N: tl.constexpr = b_total.shape[0]
    BK: tl.constexpr = b_total.shape[1]
    b_x = tl.reshape(b_total, [N // (2 * s), 2, s, BK])
    odd = (tl.arange(0, 2) == 1)[None, :, None, None]
    b_even = tl.sum(tl.where(odd, 0.0, b_x), 1, keep_dims=True)
    b_odd = tl.sum(tl.where(odd, b_x, 0.0), 1, keep_dims=True)
    b_even = tl.reshape(tl.broadcast_to(b_even, [N // (2 * s), 2, s, BK]), [N, BK])
    b_odd = tl.reshape(tl.broadcast_to(b_odd, [N // (2 * s), 2, s, BK]), [N, BK])
    return b_even, b_odd


@triton.jit
def widen_span(b_x, b_y, b_total, s: tl.constexpr):
    """From blocks of s groups to blocks of 2 s: decay from the block's start to each group, from each group to its end, and over it."""
    m_odd = (tl.arange(0, b_x.shape[0]) // s % 2 == 1)[:, None]
    b_even, b_odd = block_totals(b_total, s)
    return tl.where(m_odd, b_x * b_even, b_x), tl.where(m_odd, b_y, b_y * b_odd), b_even * b_odd


@triton.jit
def running_sums(b_g, START: tl.constexpr, GROUP: tl.constexpr):
    """b_g [GROUP, N, BK] -> y[i] = g[START] + .. + g[i] along axis 0 (0 before START), and the last of them [N, BK]."""
    o_i = tl.arange(0, GROUP)[:, None, None]
    b_y = tl.zeros(b_g.shape, tl.float32)
    b_run = tl.zeros([b_g.shape[1], b_g.shape[2]], tl.float32)
    for j in tl.static_range(START, GROUP):
        b_run = b_run + pick_of_group(b_g, j, GROUP)
        b_y = tl.where(o_i == j, b_run[None], b_y)
    return b_y, b_run


@triton.jit
def block_factors(b_g, C: tl.constexpr, GROUP: tl.constexpr, DIAGONAL: tl.constexpr):
    """Decays inside the blocks of DIAGONAL tokens. b_g [GROUP, GROUPS, BK], log2; for blocks of two tokens the decays themselves.

    For a reference point of the block: row = d(reference, i), column = 1 / d(reference, j) and tail = d(j, end) / column, all
    [GROUP, GROUPS, BK]; first = d(start, reference) and total = d(start, end), both [GROUPS, BK].
    """
    GROUPS: tl.constexpr = C // GROUP
    if DIAGONAL == 2:  # two tokens, the reference between them: no factor above 1, nothing rounded away
        b_e0, b_e1 = pick_of_group(b_g, 0, GROUP), pick_of_group(b_g, 1, GROUP)
        m_first = (tl.arange(0, GROUP) == 0)[:, None, None]
        b_one = tl.full([GROUP, GROUPS, b_g.shape[2]], 1.0, tl.float32)
        return tl.where(m_first, b_one, b_e1[None]), b_one, tl.where(m_first, b_e1[None], b_one), b_e0, b_e0 * b_e1
    if DIAGONAL == GROUP:  # the reference is the first token
        b_s, b_last = running_sums(b_g, 1, GROUP)
        b_first = tl.exp2(pick_of_group(b_g, 0, GROUP))
        b_last = tl.exp2(b_last)
        b_tail = tl.broadcast_to(b_last[None], [GROUP, GROUPS, b_g.shape[2]])
        return tl.exp2(b_s), tl.exp2(-b_s), b_tail, b_first, b_first * b_last
    b_s, b_total = running_sums(b_g, 0, GROUP)  # the reference is the block's start
    b_before = tl.zeros([GROUPS, b_g.shape[2]], tl.float32)
    o_j = tl.arange(0, GROUPS)[:, None]
    for i in tl.static_range(6):
        if (GROUP << i) < DIAGONAL:
            b_even, b_odd = block_totals(b_total, 1 << i)
            b_before = tl.where(((o_j >> i) & 1) == 1, b_before + b_even, b_before)
            b_total = b_even + b_odd
    b_s = b_s + b_before[None]
    b_total = tl.exp2(b_total)
    b_one = tl.full([GROUPS, b_g.shape[2]], 1.0, tl.float32)
    return tl.exp2(b_s), tl.exp2(-b_s), tl.broadcast_to(b_total[None], [GROUP, GROUPS, b_g.shape[2]]), b_one, b_total


@triton.jit
def split_q_above_k(b_A):
    """[2 HALF, HALF] -> A_qk [HALF, HALF], A_kk [HALF, HALF]."""
    HALF: tl.constexpr = b_A.shape[1]
    return tl.split(tl.permute(tl.reshape(b_A, [2, HALF, HALF]), (1, 2, 0)))


@triton.jit
def pick_row(b_x, i: tl.constexpr):
    """b_x [2, GROUP, GROUPS, KP] -> b_x[i]."""
    o_i = tl.arange(0, 2)[:, None, None, None]
    return tl.sum(tl.where(o_i == i, b_x.to(tl.int32, bitcast=True), 0), 0).to(tl.float32, bitcast=True)


@triton.jit
def flat_rows(b_x, R: tl.constexpr, KP: tl.constexpr, DTYPE: tl.constexpr):
    """[.., KP] -> [R, KP], rounded."""
    return round_to(tl.reshape(b_x, [R, KP]), DTYPE)


@triton.jit
def inverse_by_doubling(b_A, o_t, C: tl.constexpr, DTYPE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 for strictly lower A [C, C] by masked doubling:  X <- X - X (A o M_b) X,  b = 1, 2, .., C/2.

    M_b are the pairs whose blocks of b tokens are siblings; X is then the inverse of I + A restricted to blocks of 2b. The algebra is
    exact: no powers of A appear, so nothing grows and cancels. EXACT, for float32: a step of Newton's,  X <- X + X (I - (I + A) X).
    """
    o_x = o_t[:, None] ^ o_t[None, :]  # [C, C]: the highest bit tells the level
    b_X = tl.where(o_x == 0, 1.0, 0.0) - tl.where(o_x == 1, b_A, 0.0)
    for i in tl.static_range(1, 7):
        if (1 << i) < C:
            m_b = (o_x >= (1 << i)) & (o_x < (2 << i))
            b_Xn = round_to(b_X, DTYPE)
            b_Y = product(round_to(tl.where(m_b, b_A, 0.0), DTYPE), b_Xn, PRECISION)
            b_X = b_X - product(b_Xn, round_to(b_Y, DTYPE), PRECISION)
    if EXACT:
        b_off = tl.where(o_x == 0, 1.0, 0.0) - b_X - product(b_A, b_X, PRECISION)
        b_X = b_X + product(b_X, b_off, PRECISION)
    return b_X


@triton.jit
def lower_of(b_T, b_A_kk, b_beta, o_t, PRECISION: tl.constexpr):
    """A_kk / beta inverse [HALF, HALF], strictly lower: (I - inverse) / beta, which gives the inverse back to the last bit, but for rows
    that beta cannot divide."""
    b_eye = tl.where(o_t[:, None] == o_t[None, :], 1.0, 0.0)
    b_lower = product(round_to(b_A_kk, b_T.dtype), b_T, PRECISION)
    return tl.where((tl.abs(b_beta) > DIVISIBLE)[:, None], (b_eye - b_T.to(tl.float32)) / b_beta[:, None], b_lower)


@triton.jit
def load_half(
    p_q, p_k, p_g, p_beta, start, eos, s_qt, s_kt, s_gt, s_bt,
    K: tl.constexpr, KP: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, ALIGN: tl.constexpr, VECTOR: tl.constexpr,
    BETA: tl.constexpr, HIP: tl.constexpr,
):  # fmt: skip
    """The inputs of the HALF tokens from `start`: g [HALF, KP], q above k [2 HALF, KP], beta [HALF]; zeros past the end."""
    o_t = row_tokens(HALF, HALF, GROUP)  # [HALF]
    o_i = row_tokens(2 * HALF, HALF, GROUP) % HALF  # [2 HALF]
    o_k = tl.max_contiguous(tl.arange(0, KP), VECTOR)
    m_t = start + o_t < eos
    m_q = (tl.arange(0, 2 * HALF) < HALF)[:, None]
    m_qk = (start + o_i < eos)[:, None] & (o_k < K)[None, :]
    o_row = (start + o_i.to(tl.int64))[:, None]
    o_token = start + o_t.to(tl.int64)
    b_g = tl.load(p_g + (o_token * s_gt)[:, None] * ALIGN + o_k[None, :], mask=m_t[:, None] & (o_k < K)[None, :], other=0.0)
    if HIP:  # AMD's compiler cannot choose between two pointers
        b_q = tl.load(p_q + (o_token * s_qt)[:, None] * ALIGN + o_k[None, :], mask=m_t[:, None] & (o_k < K)[None, :], other=0.0)
        b_k = tl.load(p_k + (o_token * s_kt)[:, None] * ALIGN + o_k[None, :], mask=m_t[:, None] & (o_k < K)[None, :], other=0.0)
        b_qk = tl.reshape(tl.permute(tl.join(b_q, b_k), (2, 0, 1)), [2 * HALF, KP])
    else:
        b_qk = tl.load(either(m_q, p_q + o_row * s_qt * ALIGN, p_k + o_row * s_kt * ALIGN, ALIGN) + o_k[None, :], mask=m_qk, other=0.0)
    b_beta = tl.where(m_t, write_strength(tl.load(p_beta + o_token * s_bt, mask=m_t, other=0.0).to(tl.float32), BETA), 0.0)
    if p_beta.dtype.element_ty.primitive_bitwidth < 32:
        # A sum of one number, behind which the compiler does not see that it came in 16 bits: it would lay out the float32 factors of the
        # inverse for such, and read them word by word.
        b_beta = tl.sum(b_beta[:, None], 1)
    return b_g, b_qk, b_beta


@triton.jit
def store_rows(p_tile, b_qk, b_x, b_before, C: tl.constexpr, HALF: tl.constexpr, KP: tl.constexpr, FIRST: tl.constexpr):
    """Stores q_decayed and k_in; returns the rows decayed from the half's start only, rounded."""
    DTYPE: tl.constexpr = p_tile.dtype.element_ty
    b_qk = b_qk * b_x[None, None]
    b_rows = flat_rows(b_qk, 2 * HALF, KP, DTYPE)
    if FIRST:
        tl.store(p_tile, b_rows)
    else:
        tl.store(p_tile + HALF * KP, flat_rows(b_qk * b_before[None, None, None, :], 2 * HALF, KP, DTYPE))
    return b_rows


@triton.jit
def half_chunk(
    b_g, b_qk, p_tile, b_bias, a, scale, lower_bound, start, eos, b_before, b_r,
    KP: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, DIAGONAL: tl.constexpr, FLOOR: tl.constexpr,
    GATE: tl.constexpr, L2NORM: tl.constexpr, PTX: tl.constexpr, FIRST: tl.constexpr, PRECISION: tl.constexpr,
    COLS_DTYPE: tl.constexpr,
):  # fmt: skip
    """The HALF tokens from `start`: A_qk above A_kk / beta [2 HALF, HALF]; rows [2 HALF, KP], q above k, decayed from their start; cols
    [HALF, KP], k decayed to their end; their total decay [KP]; in float32 the chunk's first key (b_r, unless FIRST).
    Stores k_in and q_decayed, which decay over the tokens before as well (b_before, unless FIRST)."""
    DTYPE: tl.constexpr = p_tile.dtype.element_ty
    GROUPS: tl.constexpr = HALF // GROUP
    o_t = row_tokens(HALF, HALF, GROUP)  # [HALF]
    o_i = row_tokens(2 * HALF, HALF, GROUP) % HALF  # [2 HALF]
    m_t = start + o_t < eos
    m_q = (tl.arange(0, 2 * HALF) < HALF)[:, None]
    if DTYPE.is_fp32():
        b_g, b_log = exact_decays(b_g.to(tl.float32) + b_bias[None, :], m_t[:, None], a, lower_bound, GATE)
        b_log = tl.sum(b_log, 0)  # [KP]
    elif DIAGONAL == 2:
        b_g = gate_decay(b_g.to(tl.float32) + b_bias[None, :], a, lower_bound, GATE, False, PTX)
        b_g = tl.where(m_t[:, None], b_g, 1.0)
    else:
        b_g = tl.where(m_t[:, None], log2_decay(b_g.to(tl.float32), b_bias[None, :], a, lower_bound, GATE, False, PTX), 0.0)
        if FLOOR < 0:
            b_g = tl.maximum(b_g, FLOOR, tl.PropagateNan.ALL)  # NaN is no gate that forgets
    b_row, b_col, b_tail, b_first, b_total = block_factors(tl.reshape(b_g, [GROUP, GROUPS, KP]), HALF, GROUP, DIAGONAL)
    # One level above the blocks, with their own rows: no tile waits for a product.
    ONE_LEVEL: tl.constexpr = 2 * DIAGONAL == HALF and DIAGONAL > GROUP
    b_x, b_y = b_first, tl.full([GROUPS, KP], 1.0, tl.float32)  # [GROUPS, KP]
    if ONE_LEVEL:
        b_x, b_y, b_total = widen_span(b_x, b_y, b_total, DIAGONAL // GROUP)
    b_qk = b_qk.to(tl.float32)
    b_scale = tl.where(m_q, scale, 1.0)
    if L2NORM:
        b_scale = b_scale * inverse_norm(tl.sum(b_qk * b_qk, 1), DTYPE.is_fp32())[:, None]
    b_qk = tl.reshape(b_qk * b_scale, [2, GROUP, GROUPS, KP])
    b_k = pick_row(b_qk, 1)  # [GROUP, GROUPS, KP]
    b_dot = tl.reshape(tl.sum(pick_row(b_qk, 0) * b_k, 2), [HALF])
    if FIRST and DTYPE.is_fp32():
        b_r = first_key(tl.reshape(b_k, [HALF, KP]))
    b_qk = b_qk * b_row[None]
    b_near = flat_rows(b_qk, 2 * HALF, KP, DTYPE)  # decayed from the reference of their block
    if ONE_LEVEL:
        b_rows = store_rows(p_tile, b_qk, b_x, b_before, C, HALF, KP, FIRST)
    b_k = b_k * b_col
    b_cols = flat_rows(b_k, HALF, KP, DTYPE)
    b_k = b_k * b_tail
    b_A = tl.where(m_q & (o_i[:, None] == o_t[None, :]), b_dot[None, :], 0.0)  # [2 HALF, HALF]
    m_pairs = (o_i[:, None] > o_t[None, :]) & (o_i[:, None] // DIAGONAL == o_t[None, :] // DIAGONAL)  # [2 HALF, HALF]
    b_A = tl.where(m_pairs, pair_products(b_near, b_cols, b_r, PRECISION), b_A)
    if ONE_LEVEL:
        b_cols = flat_rows(b_k * b_y[None], HALF, KP, COLS_DTYPE)
        m_pairs = (o_i >= DIAGONAL)[:, None] & (o_t < DIAGONAL)[None, :]
        b_A = tl.where(m_pairs, product(b_near, tl.trans(flat_rows(b_k, HALF, KP, DTYPE)), PRECISION), b_A)
    else:
        for i_l in tl.static_range(6):
            if (GROUP << i_l) >= DIAGONAL and (GROUP << i_l) < HALF:
                o_l = o_i // (GROUP << i_l)
                m_pairs = tl.where(o_l % 2 == 1, o_l, -1)[:, None] == (o_t // (GROUP << i_l) + 1)[None, :]
                b_near = flat_rows(b_qk * b_x[None, None], 2 * HALF, KP, DTYPE)
                b_A = tl.where(m_pairs, pair_products(b_near, flat_rows(b_k * b_y[None], HALF, KP, DTYPE), b_r, PRECISION), b_A)
                b_x, b_y, b_total = widen_span(b_x, b_y, b_total, 1 << i_l)
        b_rows = store_rows(p_tile, b_qk, b_x, b_before, C, HALF, KP, FIRST)
        b_cols = flat_rows(b_k * b_y[None], HALF, KP, COLS_DTYPE)
    b_total = tl.max(b_total, 0)  # it is equal in all groups
    return b_A, b_rows, b_cols, decay_over(b_log, b_total) if DTYPE.is_fp32() else b_total, b_r


@kernel
def prepare_kernel(
    p_q, p_k, p_g, p_beta, p_A_log, p_dt_bias, p_cu_seqlens, p_tiles, p_squares, p_decay, p_betas, p_lower, p_solved,
    T, N, NT, H, HV, scale, lower_bound,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_gb, s_gt, s_gh, s_bb, s_bt, s_bh,
    K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, DIAGONAL: tl.constexpr,
    FLOOR: tl.constexpr, ALIGN: tl.constexpr, VECTOR: tl.constexpr, VARLEN: tl.constexpr, GATE: tl.constexpr, BETA: tl.constexpr,
    L2NORM: tl.constexpr, HAS_A_LOG: tl.constexpr, HAS_DT_BIAS: tl.constexpr, PRECISION: tl.constexpr, SOLVE_DTYPE: tl.constexpr,
    PTX: tl.constexpr, HIP: tl.constexpr, HAS_LOWER: tl.constexpr,
):  # fmt: skip
    """Decayed tiles and pair matrices of one chunk. With d(j, i) the product of the decays of tokens j+1 .. i:

        k_in = k d(start, i)        q_decayed = scale q d(start, i)        k_decayed = k d(i, end)        decay = d(start, end)
        A_qk[i,j] = scale q_i . (k_j d(j, i)),  j <= i        A_kk[i,j] = beta_i k_i . (k_j d(j, i)),  j < i
        inverse = (I + A_kk)^-1        k_solved = Diag(beta) inverse^T k_decayed        A_solved = A_qk inverse Diag(beta)

    Grid: (slots * HV,), heads fastest. Writes tiles [slot, HV, 3, C, KP] = k_in, q_decayed, k_solved; squares [slot, HV, C, C] = A_solved;
    decay [slot, HV, KP]; for a backward A_qk inverse and lower = A_kk / beta inverse [slot, HV, C, C], the latter so that
    inverse = I - Diag(beta) lower. Rows are in the order of `row_tokens`, in float32 in that of tokens. SOLVE_DTYPE is the operand dtype
    of what follows A_qk and A_kk.

    d(j, i) is never a quotient or difference of cumulative quantities that could cancel. Tokens are paired by levels: at level b each odd
    block of b tokens meets the even block before it, both referred to the boundary between them, so both factors are products of decays
    and <= 1. Blocks of DIAGONAL tokens at the bottom are one product with the one-sided factors of `block_factors`: they fit because the
    gate is bounded, or because log2-decays are raised to FLOOR, far below float32's resolution, or trivially for pairs of tokens. The chunk
    is worked on in halves of HALF tokens (or as one, where C = HALF), whose tiles fit the registers; the top level pairs the halves.
    """
    DTYPE: tl.constexpr = p_tiles.dtype.element_ty
    IN_ORDER: tl.constexpr = DTYPE.is_fp32()  # of tokens, from the pairs on: where signs change from one to the next, sums stay small
    # Where keys are alike, k_solved are differences of decayed keys: these keep their digits where the inverse has as many.
    COLS_DTYPE: tl.constexpr = SOLVE_DTYPE if SOLVE_DTYPE.is_fp32() else DTYPE
    i_p = tl.program_id(0).to(tl.int64)
    i_s, i_h = i_p // HV, i_p % HV
    if VARLEN:
        i_n = find_sequence(p_cu_seqlens, i_s, N, C)
        i_b = i_n * 0
        bos = tl.load(p_cu_seqlens + i_n).to(tl.int64)
        eos = tl.load(p_cu_seqlens + i_n + 1).to(tl.int64)
        start = bos + (i_s - first_slot(p_cu_seqlens, i_n, C)) * C
    else:
        i_b = i_s // NT
        eos = i_b * 0 + T
        start = (i_s % NT) * C
    if start >= eos:
        return
    i_hk = i_h // (HV // H)
    p_q += (i_b * s_qb + i_hk * s_qh) * ALIGN
    p_k += (i_b * s_kb + i_hk * s_kh) * ALIGN
    p_g += (i_b * s_gb + i_h * s_gh) * ALIGN
    p_beta += i_b * s_bb + i_h * s_bh
    o_s, o_k = tl.arange(0, HALF), tl.max_contiguous(tl.arange(0, KP), VECTOR)
    p_tile = p_tiles + i_p * 3 * C * KP + o_s[:, None] * KP + o_k[None, :]  # [HALF, KP]
    o_qk = tl.arange(0, 2 * HALF)
    o_row = row_tokens(2 * HALF, HALF, GROUP) if IN_ORDER else o_qk
    p_rows = p_tiles + i_p * 3 * C * KP + tl.where(o_qk < HALF, C + o_row, o_row - HALF)[:, None] * KP + o_k[None, :]  # q_decayed, k_in
    p_square = p_squares + i_p * C * C + o_s[:, None] * C + o_s[None, :]  # [HALF, HALF]
    a = gate_slope(p_A_log, i_h, DTYPE.is_fp32(), HAS_A_LOG)
    b_bias = tl.zeros([KP], tl.float32)
    if HAS_DT_BIAS:
        b_bias = tl.load(p_dt_bias + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
    o_t = o_s if IN_ORDER else row_tokens(HALF, HALF, GROUP)
    b_one = tl.full([KP], 1.0, tl.float32)
    b_g, b_qk, b_beta = load_half(p_q, p_k, p_g, p_beta, start, eos, s_qt, s_kt, s_gt, s_bt, K, KP, HALF, GROUP, ALIGN, VECTOR, BETA, HIP)
    b_A, b_rows, b_cols, b_decay, b_r = half_chunk(
        b_g, b_qk, p_rows, b_bias, a, scale, lower_bound, start, eos, b_one, b_one,
        KP, C, HALF, GROUP, DIAGONAL, FLOOR, GATE, L2NORM, PTX, True, PRECISION, COLS_DTYPE,
    )  # fmt: skip
    if C > HALF:  # asked for before the first half is solved, which takes a while and few registers
        b_g, b_qk, b_beta1 = load_half(
            p_q, p_k, p_g, p_beta, start + HALF, eos, s_qt, s_kt, s_gt, s_bt, K, KP, HALF, GROUP, ALIGN, VECTOR, BETA, HIP
        )
    if IN_ORDER:
        b_A, b_cols = pairs_by_token(b_A, GROUP), rows_by_token(b_cols, HALF, GROUP)
        b_beta = tl.sum(rows_by_token(b_beta[:, None], HALF, GROUP), 1)
    b_A_qk, b_A_kk = split_q_above_k(b_A)
    b_T = inverse_by_doubling(b_A_kk * b_beta[:, None], o_t, HALF, SOLVE_DTYPE, IN_ORDER, PRECISION)
    b_T = round_to(b_T, SOLVE_DTYPE)  # [HALF, HALF]
    b_square = product(round_to(b_A_qk, SOLVE_DTYPE), b_T, PRECISION)
    tl.store(p_square, round_to(b_square * b_beta[None, :], DTYPE))
    if HAS_LOWER:
        p_lower += i_p * C * C + o_s[:, None] * C + o_s[None, :]  # [HALF, HALF]
        p_solved += i_p * C * C + o_s[:, None] * C + o_s[None, :]  # [HALF, HALF]
        tl.store(p_solved, round_to(b_square, DTYPE))
        tl.store(p_lower, round_to(lower_of(b_T, b_A_kk, b_beta, o_t, PRECISION), SOLVE_DTYPE))
    if C > HALF:
        b_A, b_rows, b_cols1, b_decay1, _r = half_chunk(
            b_g, b_qk, p_rows, b_bias, a, scale, lower_bound, start + HALF, eos, b_decay, b_r,
            KP, C, HALF, GROUP, DIAGONAL, FLOOR, GATE, L2NORM, PTX, False, PRECISION, COLS_DTYPE,
        )  # fmt: skip
        if IN_ORDER:
            b_A, b_rows, b_cols1 = pairs_by_token(b_A, GROUP), rows_by_token(b_rows, HALF, GROUP), rows_by_token(b_cols1, HALF, GROUP)
            b_beta1 = tl.sum(rows_by_token(b_beta1[:, None], HALF, GROUP), 1)
        b_A_qk, b_A_kk = split_q_above_k(b_A)
        b_A = pair_products(b_rows, round_to(b_cols, DTYPE), b_r, PRECISION)  # rows of the second half, columns of the first
        b_A_qk10, b_A_kk10 = split_q_above_k(b_A)
        b_T1 = inverse_by_doubling(b_A_kk * b_beta1[:, None], o_t, HALF, SOLVE_DTYPE, IN_ORDER, PRECISION)
        b_T1 = round_to(b_T1, SOLVE_DTYPE)
        b_T10 = product(round_to(b_A_kk10 * b_beta1[:, None], SOLVE_DTYPE), b_T, PRECISION)
        b_T10 = round_to(-product(b_T1, round_to(b_T10, SOLVE_DTYPE), PRECISION), SOLVE_DTYPE)
        if HAS_LOWER:
            b_lower = product_add(round_to(b_A_kk, SOLVE_DTYPE), b_T10, product(round_to(b_A_kk10, SOLVE_DTYPE), b_T, PRECISION), PRECISION)
            b_lower = tl.where((tl.abs(b_beta1) > DIVISIBLE)[:, None], -b_T10.to(tl.float32) / b_beta1[:, None], b_lower)
            tl.store(p_lower + HALF, tl.zeros([HALF, HALF], SOLVE_DTYPE))
            tl.store(p_lower + HALF * C, round_to(b_lower, SOLVE_DTYPE))
            tl.store(p_lower + HALF * C + HALF, round_to(lower_of(b_T1, b_A_kk, b_beta1, o_t, PRECISION), SOLVE_DTYPE))
        b_A_qk = round_to(b_A_qk, SOLVE_DTYPE)
        b_square10 = product_add(b_A_qk, b_T10, product(round_to(b_A_qk10, SOLVE_DTYPE), b_T, PRECISION), PRECISION)
        tl.store(p_square + HALF, tl.zeros([HALF, HALF], DTYPE))
        tl.store(p_square + HALF * C, round_to(b_square10 * b_beta[None, :], DTYPE))
        b_square = product(b_A_qk, b_T1, PRECISION)
        tl.store(p_square + HALF * C + HALF, round_to(b_square * b_beta1[None, :], DTYPE))
        if HAS_LOWER:
            tl.store(p_solved + HALF, tl.zeros([HALF, HALF], DTYPE))
            tl.store(p_solved + HALF * C, round_to(b_square10, DTYPE))
            tl.store(p_solved + HALF * C + HALF, round_to(b_square, DTYPE))
        b_cols1 = stored_operand(b_cols1, SOLVE_DTYPE)
        b_solved = product(tl.trans(b_T1), b_cols1, PRECISION) * b_beta1[:, None]
        tl.store(p_tile + (2 * C + HALF) * KP, round_to(b_solved, DTYPE))
        b_solved = product(tl.trans(b_T), stored_operand(b_cols, SOLVE_DTYPE), PRECISION) * b_decay1[None, :]  # [HALF, KP]
        b_solved = product_add(tl.trans(b_T10), b_cols1, b_solved, PRECISION)
        b_decay = b_decay * b_decay1
    else:
        b_solved = product(tl.trans(b_T), stored_operand(b_cols, SOLVE_DTYPE), PRECISION)
    tl.store(p_tile + 2 * C * KP, round_to(b_solved * b_beta[:, None], DTYPE))
    tl.store(p_decay + i_p * KP + o_k, b_decay)


@lru_cache(maxsize=1024)
def launch(problem: Problem, config: Config, layout: Layout) -> Launch:
    grid = chunk_slots(problem, config.chunk) * problem.HV
    options = dict(num_warps=config.prepare_warps, num_stages=1, registers=config.prepare_registers)
    values = dict(GROUP=config.group, PRECISION=config.prepare_precision)
    return Launch(prepare_kernel, grid, arguments(problem, config, layout) | values, **options)
