"""Stage intra: everything of a chunk that needs no state, one program per chunk and value head."""

from __future__ import annotations

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.gate import inverse_norm, log2_decay, write_strength
from kdakit.backends.triton_gpu.tile import find_sequence, first_slot, narrow, product, row_tokens


@triton.jit
def pick(b_x, i: tl.constexpr, GROUP: tl.constexpr):
    """b_x [GROUP, N, BK] -> b_x[i]. A sum of integers, so that the compiler drops the zeros and only a register is named."""
    o_i = tl.arange(0, GROUP)[:, None, None]
    return tl.sum(tl.where(o_i == i, b_x.to(tl.int32, bitcast=True), 0), 0).to(tl.float32, bitcast=True)


@triton.jit
def running_products(b_x, START: tl.constexpr, REVERSE: tl.constexpr, GROUP: tl.constexpr):
    """b_x [GROUP, N, BK] -> products along axis 0 and their total [N, BK].

    Forward: y[i] = x[START] ... x[i], inclusive.        REVERSE: y[i] = x[i+1] ... x[GROUP-1], exclusive.
    """
    o_i = tl.arange(0, GROUP)[:, None, None]
    b_y = tl.full(b_x.shape, 1.0, tl.float32)
    b_run = tl.full([b_x.shape[1], b_x.shape[2]], 1.0, tl.float32)
    for j in tl.static_range(GROUP):
        if REVERSE:
            b_y = tl.where(o_i == GROUP - 1 - j, b_run[None], b_y)
            b_run = b_run * pick(b_x, GROUP - 1 - j, GROUP)
        else:
            if j >= START:
                b_run = b_run * pick(b_x, j, GROUP)
            b_y = tl.where(o_i == j, b_run[None], b_y)
    return b_y, b_run


@triton.jit
def halves(b_total, s: tl.constexpr):
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
def add_pairs(b_A_qk, b_A_kk, b_row_q, b_row_k, b_col, m_pairs, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """A_qk += row_q col^T and A_kk += row_k col^T where m_pairs. Elsewhere the products may be anything, infinite too: select, not multiply."""
    b_col_t = tl.trans(narrow(b_col, DTYPE))
    b_A_qk = tl.where(m_pairs, b_A_qk + product(narrow(b_row_q, DTYPE), b_col_t, PRECISION), b_A_qk)
    b_A_kk = tl.where(m_pairs, b_A_kk + product(narrow(b_row_k, DTYPE), b_col_t, PRECISION), b_A_kk)
    return b_A_qk, b_A_kk


@triton.jit
def unit_lower_inverse(b_A, o_t, C: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 for strictly lower A [C, C] by masked doubling:  X <- X - X (A o M_b) X,  b = 1, 2, .., C/2.

    M_b are the pairs whose blocks of b tokens are siblings; X is then the inverse of I + A restricted to blocks of 2b. The algebra is exact:
    no powers of A appear, so nothing grows and cancels.
    """
    o_x = o_t[:, None] ^ o_t[None, :]  # [C, C]: the highest bit tells the level
    b_X = tl.where(o_x == 0, 1.0, 0.0) - tl.where(o_x == 1, b_A, 0.0)
    b: tl.constexpr = C
    for i in tl.static_range(1, 7):
        if (1 << i) < b:
            m_b = (o_x >= (1 << i)) & (o_x < (2 << i))
            b_Xn = narrow(b_X, DTYPE)
            b_Y = product(narrow(tl.where(m_b, b_A, 0.0), DTYPE), b_Xn, PRECISION)
            b_X = b_X - product(b_Xn, narrow(b_Y, DTYPE), PRECISION)
    return b_X


@triton.jit(do_not_specialize=["T", "N", "NT", "H", "HV", "scale", "lower_bound", "s_qb", "s_qt", "s_qh", "s_kb", "s_kt", "s_kh",
                               "s_gb", "s_gt", "s_gh", "s_bb", "s_bt", "s_bh"])  # fmt: skip
def prepare_kernel(
    p_q, p_k, p_g, p_beta, p_A_log, p_dt_bias, p_cu_seqlens, p_tiles, p_squares, p_decay,
    T, N, NT, H, HV, scale, lower_bound,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_gb, s_gt, s_gh, s_bb, s_bt, s_bh,
    K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr, DIAGONAL: tl.constexpr, BK: tl.constexpr,
    ALIGN: tl.constexpr, VARLEN: tl.constexpr, GATE: tl.constexpr, BETA: tl.constexpr, L2NORM: tl.constexpr,
    HAS_A_LOG: tl.constexpr, HAS_DT_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    INVERSE_DTYPE: tl.constexpr, INVERSE_PRECISION: tl.constexpr,
):  # fmt: skip
    """Decayed tiles and pair matrices of one chunk. With d(j, i) the product of the decays of tokens j+1 .. i:

        k_in = k d(start, i)        q_decayed = scale q d(start, i)        k_decayed = k d(i, end)        decay = d(start, end)
        A_qk[i,j] = scale q_i . (k_j d(j, i)),  j <= i        A_kk[i,j] = beta_i k_i . (k_j d(j, i)),  j < i
        inverse = (I + A_kk)^-1 Diag(beta)

    Grid: (slots * HV,), heads fastest. Writes tiles [slot, HV, 3, C, KP] = k_in, q_decayed, k_decayed; squares [slot, HV, 2, C, C] = inverse,
    A_qk; decay [slot, HV, KP]. Rows are in the order of `row_tokens`.

    d(j, i) is never formed by a division or difference of cumulative quantities. Tokens are paired by levels: at level b each odd block of b
    tokens meets the even block before it, both referred to the boundary between them, so both factors are products of decays and <= 1. Blocks
    of DIAGONAL tokens at the bottom are one product with one-sided factors d(first, i) and 1 / d(first, j): safe where the gate is bounded, or
    where decays below 2^-50 are rounded up to that inside a group of 4, or trivially for groups of 2.
    """
    DTYPE: tl.constexpr = p_tiles.dtype.element_ty
    EXACT: tl.constexpr = DTYPE == tl.float32
    GROUPS: tl.constexpr = C // GROUP
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
    o_t = row_tokens(C, GROUP)  # [C]
    m_t = start + o_t < eos
    p_q += ((i_b * s_qb + start * s_qt + i_hk * s_qh) + o_t.to(tl.int64) * s_qt)[:, None] * ALIGN  # [C, 1]
    p_k += ((i_b * s_kb + start * s_kt + i_hk * s_kh) + o_t.to(tl.int64) * s_kt)[:, None] * ALIGN
    p_g += ((i_b * s_gb + start * s_gt + i_h * s_gh) + o_t.to(tl.int64) * s_gt)[:, None] * ALIGN
    p_beta += i_b * s_bb + start * s_bt + i_h * s_bh
    o_tile = (i_p * 3 * C + tl.arange(0, C))[:, None] * KP  # [C, 1]

    b_rq = tl.full([C], 1.0, tl.float32)
    b_rk = tl.full([C], 1.0, tl.float32)
    if L2NORM:
        b_qq = tl.zeros([C], tl.float32)
        b_kk = tl.zeros([C], tl.float32)
        for i_k in range(KP // BK):
            o_k = i_k * BK + tl.arange(0, BK)
            m_k = m_t[:, None] & (o_k < K)[None, :]
            b_q = tl.load(p_q + o_k[None, :], mask=m_k, other=0.0).to(tl.float32)  # [C, BK]
            b_k = tl.load(p_k + o_k[None, :], mask=m_k, other=0.0).to(tl.float32)  # [C, BK]
            b_qq += tl.sum(b_q * b_q, 1)
            b_kk += tl.sum(b_k * b_k, 1)
        b_rq = inverse_norm(b_qq)
        b_rk = inverse_norm(b_kk)
    b_rq *= scale
    a = tl.exp(tl.load(p_A_log + i_h).to(tl.float32)) if HAS_A_LOG else 1.0

    o_x = o_t[:, None] ^ o_t[None, :]  # [C, C]
    m_lower = o_t[:, None] > o_t[None, :]
    b_A_qk = tl.zeros([C, C], tl.float32)
    b_A_kk = tl.zeros([C, C], tl.float32)
    b_qk = tl.zeros([C], tl.float32)
    o_j = tl.arange(0, GROUPS)[:, None]
    for i_k in range(KP // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = m_t[:, None] & (o_k < K)[None, :]
        b_q = tl.load(p_q + o_k[None, :], mask=m_k, other=0.0).to(tl.float32) * b_rq[:, None]  # [C, BK]
        b_k = tl.load(p_k + o_k[None, :], mask=m_k, other=0.0).to(tl.float32) * b_rk[:, None]  # [C, BK]
        b_g = tl.load(p_g + o_k[None, :], mask=m_k, other=0.0).to(tl.float32)  # [C, BK]
        b_bias = tl.zeros([1, BK], tl.float32)
        if HAS_DT_BIAS:
            b_bias = tl.load(p_dt_bias + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)[None, :]
        b_g = tl.where(m_k, log2_decay(b_g, b_bias, a, lower_bound, GATE, EXACT), 0.0)
        b_qk += tl.sum(b_q * b_k, 1)

        b_g = tl.reshape(b_g, [GROUP, GROUPS, BK])
        b_q = tl.reshape(b_q, [GROUP, GROUPS, BK])
        b_k = tl.reshape(b_k, [GROUP, GROUPS, BK])
        b_e = tl.exp2(b_g)
        b_prefix, b_total = running_products(b_e, 0, False, GROUP)  # inclusive, [GROUPS, BK]
        b_suffix, b_total = running_products(b_e, 0, True, GROUP)  # exclusive
        b_qp, b_kp, b_ks = b_q * b_prefix, b_k * b_prefix, b_k * b_suffix
        b_x = tl.full([GROUPS, BK], 1.0, tl.float32)  # decay from the start of the block to this group
        b_y = tl.full([GROUPS, BK], 1.0, tl.float32)  # decay from this group to the end of the block

        m_diagonal = m_lower & (o_x < DIAGONAL)
        if DIAGONAL == GROUP:
            if GROUP == 2:
                b_row, b_t0 = running_products(b_e, 1, False, GROUP)
                b_col = b_k
            else:
                b_c = tl.maximum(b_g, -100.0 / (GROUP - 2))
                b_row, b_t0 = running_products(tl.exp2(b_c), 1, False, GROUP)
                b_col, b_t0 = running_products(tl.exp2(tl.where(tl.arange(0, GROUP)[:, None, None] < GROUP - 1, -b_c, 0.0)), 1, False, GROUP)
                b_col = b_k * b_col
            b_A_qk, b_A_kk = add_pairs(
                b_A_qk, b_A_kk, tl.reshape(b_q * b_row, [C, BK]), tl.reshape(b_k * b_row, [C, BK]), tl.reshape(b_col, [C, BK]), m_diagonal,
                DTYPE, PRECISION,
            )  # fmt: skip
        for i_l in tl.static_range(6):
            if (1 << i_l) < GROUPS:
                if DIAGONAL > GROUP and (1 << i_l) * GROUP == DIAGONAL:
                    b_col, b_t0 = running_products(tl.exp2(-b_g), 0, False, GROUP)
                    b_col = b_k * b_col * (1.0 / b_x)[None]
                    b_A_qk, b_A_kk = add_pairs(
                        b_A_qk, b_A_kk, tl.reshape(b_qp * b_x[None], [C, BK]), tl.reshape(b_kp * b_x[None], [C, BK]),
                        tl.reshape(b_col, [C, BK]), m_diagonal, DTYPE, PRECISION,
                    )  # fmt: skip
                m_odd = ((o_j >> i_l) & 1) == 1  # [GROUPS, 1]
                if (1 << i_l) * GROUP >= DIAGONAL:
                    b_z = tl.where(m_odd, b_x, b_y)
                    b_kz = tl.reshape(tl.where(m_odd[None], b_kp, b_ks) * b_z[None], [C, BK])
                    m_level = m_lower & (o_x >= ((1 << i_l) * GROUP)) & (o_x < ((2 << i_l) * GROUP))
                    b_A_qk, b_A_kk = add_pairs(
                        b_A_qk, b_A_kk, tl.reshape(b_qp * b_z[None], [C, BK]), b_kz, b_kz, m_level, DTYPE, PRECISION
                    )
                b_even, b_odd = halves(b_total, 1 << i_l)
                b_x = tl.where(m_odd, b_x * b_even, b_x)
                b_y = tl.where(m_odd, b_y, b_y * b_odd)
                b_total = b_even * b_odd
        if DIAGONAL == C and DIAGONAL > GROUP:
            b_col, b_t0 = running_products(tl.exp2(-b_g), 0, False, GROUP)
            b_col = b_k * b_col * (1.0 / b_x)[None]
            b_A_qk, b_A_kk = add_pairs(
                b_A_qk, b_A_kk, tl.reshape(b_qp * b_x[None], [C, BK]), tl.reshape(b_kp * b_x[None], [C, BK]), tl.reshape(b_col, [C, BK]),
                m_diagonal, DTYPE, PRECISION,
            )  # fmt: skip
        p_tile = p_tiles + o_tile + o_k[None, :]
        tl.store(p_tile, narrow(tl.reshape(b_kp * b_x[None], [C, BK]), DTYPE))
        tl.store(p_tile + C * KP, narrow(tl.reshape(b_qp * b_x[None], [C, BK]), DTYPE))
        tl.store(p_tile + 2 * C * KP, narrow(tl.reshape(b_ks * b_y[None], [C, BK]), DTYPE))
        tl.store(p_decay + i_p * KP + o_k, tl.max(b_total, 0))

    b_beta = tl.load(p_beta + o_t.to(tl.int64) * s_bt, mask=m_t, other=0.0).to(tl.float32)  # [C]
    b_beta = tl.where(m_t, write_strength(b_beta, BETA), 0.0)
    p_square = p_squares + i_p * 2 * C * C + tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    b_A_qk = tl.where(o_x == 0, b_qk[:, None], b_A_qk)
    tl.store(p_square + C * C, narrow(b_A_qk, DTYPE))
    b_inverse = unit_lower_inverse(b_A_kk * b_beta[:, None], o_t, C, INVERSE_DTYPE, INVERSE_PRECISION)
    tl.store(p_square, narrow(b_inverse * b_beta[None, :], DTYPE))
