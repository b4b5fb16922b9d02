"""Stage intra for bfloat16 inputs whose q and k the kernel normalises, in chunks of 64 tokens: one program per chunk and value head.

The same results as `intra.prepare_kernel`, laid out so that little moves between threads and a warp reads and writes whole lines of memory.
Tiles of 32 tokens are [8 J, R, c]: 8 j + p on the first axis is the c channels from j c on and token 4 p + r, so that 4 tokens lie in a
thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.gate import LOG2E, gate_slope, inverse_norm, log2_one_plus, power_of_2, reciprocal, write_strength
from kdakit.backends.triton_gpu.intra import DIVISIBLE
from kdakit.backends.triton_gpu.tile import locate, narrow, product

# 2^(s + SHIFT) and its inverse fit for the log2-decays s of 32 tokens at least -7.22 each, and of 8 tokens at least FLOOR each.
SHIFT = tl.constexpr(118.0)
UNSHIFT = tl.constexpr(2.0**-118)
FLOOR = tl.constexpr(-29.0)  # an unbounded gate is raised to this: 2^-29 is far below what bfloat16 factors resolve


@triton.jit
def gate_share(b_g, b_bias, a, unit, GATE: tl.constexpr, BOUNDED: tl.constexpr, PTX: tl.constexpr):
    """The log2-decay in (negative) units of `gate_unit`, which is left to its sums; b_bias as `scaled_bias` makes it.

    log_decay: -g        softplus: max(x, 0) + log2(1 + 2^-|x|)        bounded: 1 / (1 + 2^-a x)        with x = log2(e) (g + bias)
    """
    if GATE == "bounded":
        return reciprocal(1.0 + power_of_2(b_g * (-a * LOG2E) + b_bias, PTX), PTX)
    if GATE == "softplus":
        b_x = b_g * LOG2E + b_bias
        b_y = tl.maximum(b_x, 0.0) + log2_one_plus(power_of_2(-tl.abs(b_x), PTX), False, PTX)
    else:
        b_y = -b_g
    return b_y if BOUNDED else tl.minimum(b_y, FLOOR / unit)


@triton.jit
def gate_unit(a, lower_bound, GATE: tl.constexpr):
    if GATE == "bounded":
        return lower_bound * LOG2E
    return -a if GATE == "softplus" else lower_bound * 0.0 - LOG2E


@triton.jit
def scaled_bias(b_bias, a, GATE: tl.constexpr):
    return b_bias * (-a * LOG2E) if GATE == "bounded" else b_bias * LOG2E


@triton.jit
def pick(b_x, i: tl.constexpr):
    """b_x [8 J, R, c] -> b_x[:, i]. A sum of integers, so that the compiler drops the zeros and only a register is named."""
    o_i = tl.arange(0, b_x.shape[1])[None, :, None]
    return tl.sum(tl.where(o_i == i, b_x.to(tl.int32, bitcast=True), 0), 1).to(tl.float32, bitcast=True)


@triton.jit
def across(b_x, s: tl.constexpr):
    """b_x [8 J, c] -> at each p the value of p ^ s. A sum of two integers less the one is exactly the other."""
    c: tl.constexpr = b_x.shape[1]
    M: tl.constexpr = b_x.shape[0]
    b_i = tl.reshape(b_x.to(tl.int32, bitcast=True), [M // (2 * s), 2, s, c])
    return tl.reshape(tl.sum(b_i, 1, keep_dims=True) - b_i, [M, c]).to(tl.float32, bitcast=True)


@triton.jit
def running_sums(b_g):
    """b_g [8 J, 4, c] -> sums over the token and those before it in its thread, and over all of them [8 J, c]."""
    o_i = tl.arange(0, 4)[None, :, None]
    b_s, b_total = b_g, pick(b_g, 0)
    for j in tl.static_range(1, 4):
        b_total = b_total + pick(b_g, j)
        b_s = tl.where(o_i == j, b_total[:, None, :], b_s)
    return b_s, b_total


@triton.jit
def by_token(b_x):
    """b_x [8 J, n 4, c] -> [n 32, J c], rows by token."""
    n: tl.constexpr = b_x.shape[1] // 4
    J: tl.constexpr = b_x.shape[0] // 8
    c: tl.constexpr = b_x.shape[2]
    return tl.reshape(tl.permute(tl.reshape(b_x, [J, 8, n, 4, c]), (2, 1, 3, 0, 4)), [n * 32, J * c])


@triton.jit
def beside(b_x, b_y):
    """[M, N], [M, N] -> [M, 2 N]"""
    return tl.reshape(tl.permute(tl.join(b_x, b_y), (0, 2, 1)), [b_x.shape[0], 2 * b_x.shape[1]])


@triton.jit
def widened(b_x, PTX: tl.constexpr):
    """bfloat16 -> float32. The compiler keeps whatever it has widened once; widened here, it can wait in half the registers."""
    if PTX:
        asm: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        return tl.inline_asm_elementwise(asm, "=f,=f,r", [b_x], dtype=tl.float32, is_pure=True, pack=2)
    return b_x.to(tl.float32)


@triton.jit
def channels(J: tl.constexpr, c: tl.constexpr):
    """[8 J, 1, c]"""
    return tl.arange(0, 8 * J)[:, None, None] // 8 * c + tl.max_contiguous(tl.arange(0, c), 8 if c >= 32 else 4)[None, None, :]


@triton.jit
def tokens(J: tl.constexpr, R: tl.constexpr):
    """[8 J, R, 1]"""
    return tl.arange(0, 8 * J)[:, None, None] % 8 * 4 + tl.arange(0, R)[None, :, None] % 4


@triton.jit
def load_half(p_q, p_k, p_g, length, s_qt, s_kt, s_gt, K: tl.constexpr, J: tl.constexpr, c: tl.constexpr,
               ALIGN: tl.constexpr, FLIP: tl.constexpr, GATE: tl.constexpr):  # fmt: skip
    """Of 32 tokens, of which `length` are there, q above k (FLIP: k above q) [8 J, 8, c], and g [8 J, 4, c]; where there is none, g is what
    GATE makes no decay of ("log_decay": 0, for callers that mask the decays themselves)."""
    o_k = channels(J, c)
    o_t = tokens(J, 4)
    none: tl.constexpr = 0.0 if GATE == "log_decay" else float("-inf")
    b_g = tl.load(p_g + o_t * s_gt * ALIGN + o_k, mask=(o_t < length) & (o_k < K), other=none)
    o_t = tokens(J, 8)
    m_q = (tl.arange(0, 8) < 4)[None, :, None] != FLIP
    p_qk = tl.where(m_q, p_q + o_t * s_qt * ALIGN, p_k + o_t * s_kt * ALIGN) + o_k
    return tl.load(p_qk, mask=(o_t < length) & (o_k < K), other=0.0), b_g


@triton.jit
def row_scale(b_squares, scale, FLIP: tl.constexpr):
    """b_squares [8 J, 8, c] -> scale / |q| and 1 / |k|, [8 J, 8]."""
    J: tl.constexpr = b_squares.shape[0] // 8
    b_norm = tl.sum(tl.reshape(tl.sum(b_squares, 2), [J, 8, 8]), 0)  # [8, 8]
    b_norm = inverse_norm(b_norm) * tl.where((tl.arange(0, 8) < 4) != FLIP, scale, 1.0)[None, :]
    return tl.reshape(tl.broadcast_to(b_norm[None], [J, 8, 8]), [8 * J, 8])


@triton.jit
def k_part(b_qk, FLIP: tl.constexpr):
    """b_qk [8 J, 2, 4, c] -> k [8 J, 4, c]."""
    o_2 = tl.arange(0, 2)[None, :, None, None]
    return tl.sum(tl.where(o_2 == (0 if FLIP else 1), b_qk.to(tl.int32, bitcast=True), 0), 1).to(tl.float32, bitcast=True)


@triton.jit
def store_tiles(p_tiles, b_rows, b_tail, KP: tl.constexpr, FLIP: tl.constexpr):
    """q_decayed and k_in from b_rows [8 J, 8, c]; b_tail [8 J, 4, c] to where k_solved will be."""
    J: tl.constexpr = b_tail.shape[0] // 8
    DTYPE: tl.constexpr = p_tiles.dtype.element_ty
    p_tiles += channels(J, b_tail.shape[2])
    m_first = (tl.arange(0, 8) < 4)[None, :, None]
    o_row = tokens(J, 8) + (tl.where(m_first, 32, 96) if FLIP else tl.where(m_first, 64, 0))
    tl.store(p_tiles + o_row * KP, narrow(b_rows, DTYPE))
    tl.store(p_tiles + (tokens(J, 4) + (160 if FLIP else 128)) * KP, narrow(b_tail, DTYPE))


@triton.jit
def bounded_pairs(b_qk, b_g, unit, b_before, p_tiles, KP: tl.constexpr, FLIP: tl.constexpr, PTX: tl.constexpr,
                  PRECISION: tl.constexpr):  # fmt: skip
    """The products of all pairs of a half [64, 32]: with s the log2-decay from its start, rows times 2^(s + SHIFT), columns times
    2^-(s + SHIFT). Stores the tiles. Returns also those rows, [64, KP], and the log2-decay over the half [8 J, c]."""
    DTYPE: tl.constexpr = p_tiles.dtype.element_ty
    b_s, b_total = running_sums(b_g)
    o_p = (tl.arange(0, b_g.shape[0]) % 8)[:, None]
    b_in = tl.zeros(b_total.shape, tl.float32)
    for i in tl.static_range(3):
        b_other = across(b_total, 1 << i)
        b_in = tl.where(((o_p >> i) & 1) == 1, b_in + b_other, b_in)
        b_total = b_total + b_other
    b_s = (b_s + b_in[:, None, :]) * unit + SHIFT
    b_total = b_total * unit
    b_row = power_of_2(b_s, PTX)
    b_cols = k_part(b_qk, FLIP) * power_of_2(-b_s, PTX)
    b_tail = b_cols * power_of_2(b_total + SHIFT, PTX)[:, None, :]
    b_near = by_token(narrow(tl.reshape(b_qk * b_row[:, None], [b_g.shape[0], 8, b_g.shape[2]]), DTYPE))
    b_row = b_row * UNSHIFT
    if FLIP:
        b_row = b_row * b_before[:, None, :]
    store_tiles(p_tiles, tl.reshape(b_qk * b_row[:, None], [b_g.shape[0], 8, b_g.shape[2]]), b_tail, KP, FLIP)
    return product(b_near, tl.trans(by_token(narrow(b_cols, DTYPE))), PRECISION), b_near, b_total


@triton.jit
def unbounded_pairs(b_qk, b_g, unit, b_before, p_tiles, KP: tl.constexpr, FLIP: tl.constexpr, PTX: tl.constexpr,
                    PRECISION: tl.constexpr):  # fmt: skip
    """As `bounded_pairs`, where decays are raised to FLOOR: pairs within blocks of 8 tokens that way, the others by levels, see
    `intra.prepare_kernel`. The rows that are returned decay from the half's start."""
    DTYPE: tl.constexpr = p_tiles.dtype.element_ty
    M: tl.constexpr = b_g.shape[0]
    c: tl.constexpr = b_g.shape[2]
    o_p = (tl.arange(0, b_g.shape[0]) % 8)[:, None]
    b_s, b_total = running_sums(b_g)
    b_other = across(b_total, 1)
    b_s = (b_s + tl.where(o_p % 2 == 1, b_other, 0.0)[:, None, :]) * unit + SHIFT
    b_total = (b_total + b_other) * unit
    b_8 = power_of_2(b_total + SHIFT, PTX)[:, None, :]
    b_other = across(b_total, 2)
    m_odd = o_p // 2 % 2 == 1
    b_from, b_to = tl.where(m_odd, b_other, 0.0), tl.where(m_odd, 0.0, b_other)
    b_from16, b_to16 = power_of_2(b_from, PTX), power_of_2(b_to, PTX)
    b_total = b_total + b_other
    b_other = across(b_total, 4)
    m_odd = o_p >= 4
    b_from, b_to = power_of_2(tl.where(m_odd, b_other, 0.0), PTX), power_of_2(tl.where(m_odd, 0.0, b_other), PTX)
    b_total = b_total + b_other
    o_i, o_j = tl.arange(0, 64)[:, None] % 32, tl.arange(0, 32)[None, :]
    b_row = power_of_2(b_s, PTX)
    b_cols = k_part(b_qk, FLIP) * power_of_2(-b_s, PTX)
    b_near = by_token(narrow(tl.reshape(b_qk * b_row[:, None], [M, 8, c]), DTYPE))
    b_A = product(b_near, tl.trans(by_token(narrow(b_cols, DTYPE))), PRECISION)
    b_cols = b_cols * b_8
    b_A = tl.where(o_i // 8 == o_j // 8, b_A, product(b_near, tl.trans(by_token(narrow(b_cols, DTYPE))), PRECISION) * UNSHIFT)
    b_row = b_row * UNSHIFT * b_from16[:, None, :]
    b_cols = b_cols * b_to16[:, None, :]
    b_near = by_token(narrow(tl.reshape(b_qk * b_row[:, None], [M, 8, c]), DTYPE))
    b_A = tl.where(o_i // 16 == o_j // 16, b_A, product(b_near, tl.trans(by_token(narrow(b_cols, DTYPE))), PRECISION))
    b_row = b_row * b_from[:, None, :]
    b_rows = tl.reshape(b_qk * b_row[:, None], [M, 8, c])
    b_near = by_token(narrow(b_rows, DTYPE))
    if FLIP:
        b_rows = b_rows * b_before[:, None, :]
    store_tiles(p_tiles, b_rows, b_cols * b_to[:, None, :], KP, FLIP)
    return b_A, b_near, b_total


@triton.jit
def half_pairs(
    b_qk, b_g, p_tiles, p_dt_bias, a, scale, unit, length, b_before,
    K: tl.constexpr, KP: tl.constexpr, FLIP: tl.constexpr, GATE: tl.constexpr, BOUNDED: tl.constexpr, HAS_DT_BIAS: tl.constexpr,
    PTX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gate, norms, pairs and tiles of a half."""
    J: tl.constexpr = b_g.shape[0] // 8
    c: tl.constexpr = b_g.shape[2]
    b_scale = row_scale(b_qk.to(tl.float32) * b_qk.to(tl.float32), scale, FLIP)
    b_bias = tl.zeros([8 * J, 1, c], tl.float32)
    if HAS_DT_BIAS:
        o_k = tl.arange(0, 8 * J)[:, None] // 8 * c + tl.arange(0, c)[None, :]  # two axes: the layout of other loads is not to follow it
        b_bias = scaled_bias(tl.load(p_dt_bias + o_k, mask=o_k < K, other=0.0).to(tl.float32), a, GATE)[:, None, :]
    b_g = tl.where(tokens(J, 4) < length, gate_share(b_g.to(tl.float32), b_bias, a, unit, GATE, BOUNDED, PTX), 0.0)
    b_qk = tl.reshape(widened(b_qk, PTX) * b_scale[:, :, None], [8 * J, 2, 4, c])
    if BOUNDED:
        return bounded_pairs(b_qk, b_g, unit, b_before, p_tiles, KP, FLIP, PTX, PRECISION)
    return unbounded_pairs(b_qk, b_g, unit, b_before, p_tiles, KP, FLIP, PTX, PRECISION)


@triton.jit
def inverse_of_blocks(b_L, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L)^-1 for strictly lower L [4, 16, 16] by masked doubling, see `intra.unit_lower_inverse`. Every value is kept beside its
    transpose, so that both factors of every product lie in registers as the matrix unit wants them."""
    o_i = tl.arange(0, 16)
    o_x = (o_i[:, None] ^ o_i[None, :])[None]
    b_X = tl.where(o_x == 0, 1.0, 0.0) - tl.where(o_x == 1, b_L, 0.0)
    b_Xt = tl.permute(b_X, (0, 2, 1))
    for i in tl.static_range(1, 4):
        b_M = narrow(tl.where((o_x >= (1 << i)) & (o_x < (2 << i)), b_L, 0.0), DTYPE)
        b_Xn, b_Xtn = narrow(b_X, DTYPE), narrow(b_Xt, DTYPE)
        b_Yt = narrow(product(b_Xtn, tl.permute(b_M, (0, 2, 1)), PRECISION), DTYPE)
        b_X = b_X - product(b_Xn, tl.permute(b_Yt, (0, 2, 1)), PRECISION)
        b_Xt = b_Xt - product(b_Yt, tl.permute(b_Xn, (0, 2, 1)), PRECISION)
    return b_X


@triton.jit
def unit_lower_inverse(b_L, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L)^-1 for strictly lower L [64, 64], the second half of rows and columns first: blocks of 16, then two more doublings."""
    o_i, o_j = tl.arange(0, 4)[:, None, None, None], tl.arange(0, 4)[None, None, :, None]
    b_L = tl.reshape(b_L, [4, 16, 4, 16])
    b_D = tl.sum(tl.where(o_i == o_j, b_L.to(tl.int32, bitcast=True), 0), 2).to(tl.float32, bitcast=True)
    b_D = inverse_of_blocks(b_D, DTYPE, PRECISION)
    b_X = tl.reshape(tl.where(o_i == o_j, b_D[:, :, None, :], 0.0), [64, 64])
    for i in tl.static_range(2):
        m_b = (o_i == o_j + 1) & (o_j % 2 == 0) if i == 0 else (o_i < 2) & (o_j >= 2)
        b_M = tl.where(m_b, b_L, 0.0)
        b_Xn = narrow(b_X, DTYPE)
        b_Y = product(narrow(tl.reshape(b_M, [64, 64]), DTYPE), b_Xn, PRECISION)
        b_X = b_X - product(b_Xn, narrow(b_Y, DTYPE), PRECISION)
    return b_X


@triton.jit(do_not_specialize=["T", "N", "NT", "H", "HV", "scale", "lower_bound", "s_qb", "s_qt", "s_qh", "s_kb", "s_kt", "s_kh",
                               "s_gb", "s_gt", "s_gh", "s_bb", "s_bt", "s_bh"])  # fmt: skip
def prepare_normed_kernel(
    p_q, p_k, p_g, p_beta, p_A_log, p_dt_bias, p_cu_seqlens, p_tiles, p_squares, p_decay, p_betas, p_lower, p_solved,
    T, N, NT, H, HV, scale, lower_bound,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_gb, s_gt, s_gh, s_bb, s_bt, s_bh,
    K: tl.constexpr, KP: tl.constexpr, ALIGN: tl.constexpr, VARLEN: tl.constexpr, GATE: tl.constexpr, BOUNDED: tl.constexpr,
    BETA: tl.constexpr, HAS_A_LOG: tl.constexpr, HAS_DT_BIAS: tl.constexpr, PRECISION: tl.constexpr, SOLVE: tl.constexpr,
    PTX: tl.constexpr, HAS_LOWER: tl.constexpr,
):  # fmt: skip
    """What `intra.prepare_kernel` makes, rows in the order of tokens. Grid: (slots * HV,), heads fastest.

    A half's rows are q above k, or in the second half k above q, so that the rows of A_qk and A_kk that a warp needs are those that it has.
    """
    C: tl.constexpr = 64
    J: tl.constexpr = 2 if KP == 128 else 4
    c: tl.constexpr = KP // J
    DTYPE: tl.constexpr = p_tiles.dtype.element_ty
    i_p = tl.program_id(0).to(tl.int64)
    i_s, i_h = i_p // HV, i_p % HV
    i_b, _, i_c, bos, eos = locate(p_cu_seqlens, i_s, T, N, NT, C, VARLEN)
    start = bos + i_c * C
    if start >= eos:
        return
    length = tl.minimum(eos - start, C).to(tl.int32)
    i_hk = i_h // (HV // H)
    p_q += (i_b * s_qb + start * s_qt + i_hk * s_qh) * ALIGN
    p_k += (i_b * s_kb + start * s_kt + i_hk * s_kh) * ALIGN
    p_g += (i_b * s_gb + start * s_gt + i_h * s_gh) * ALIGN
    p_beta += i_b * s_bb + start * s_bt + i_h * s_bh
    p_tiles += i_p * 3 * C * KP
    p_decay += i_p * KP
    if HAS_DT_BIAS:
        p_dt_bias += i_h * K
    a = gate_slope(p_A_log, i_h, False, HAS_A_LOG)
    unit = gate_unit(a, lower_bound, GATE)
    o_i = tl.arange(0, 64)
    b_beta = write_strength(tl.load(p_beta + o_i * s_bt, mask=o_i < length, other=0.0).to(tl.float32), BETA)
    p_betas += i_p * C
    tl.store(p_betas + o_i, tl.where(o_i < length, b_beta, 0.0))
    b_qk, b_g = load_half(p_q, p_k, p_g, length, s_qt, s_kt, s_gt, K, J, c, ALIGN, False, "log_decay")
    b_A0, b_rows, b_total0 = half_pairs(
        b_qk, b_g, p_tiles, p_dt_bias, a, scale, unit, length, tl.full([8 * J, c], 1.0, tl.float32),
        K, KP, False, GATE, BOUNDED, HAS_DT_BIAS, PTX, PRECISION,
    )  # fmt: skip
    tl.debug_barrier()  # k of this half, decayed to its end, is read back
    p_q += 32 * s_qt * ALIGN
    p_k += 32 * s_kt * ALIGN
    p_g += 32 * s_gt * ALIGN
    b_qk, b_g = load_half(p_q, p_k, p_g, length - 32, s_qt, s_kt, s_gt, K, J, c, ALIGN, True, "log_decay")
    b_A1, b_rows, b_total1 = half_pairs(
        b_qk, b_g, p_tiles, p_dt_bias, a, scale, unit, length - 32, power_of_2(b_total0, PTX),
        K, KP, True, GATE, BOUNDED, HAS_DT_BIAS, PTX, PRECISION,
    )  # fmt: skip
    o_k, o_32 = tl.arange(0, KP), tl.arange(0, 32)
    p_tail = p_tiles + 2 * C * KP + o_k[None, :]
    b_A10 = product(b_rows, tl.trans(tl.load(p_tail + o_32[:, None] * KP)), PRECISION)  # these rows, columns of the first half
    o_m = tl.arange(0, 8 * J)[:, None]
    p_total = p_decay + o_m // 8 * c + tl.arange(0, c)[None, :]  # [8 J, c]
    tl.store(p_total, power_of_2(b_total1, PTX), mask=o_m % 8 == 0)
    tl.debug_barrier()  # this and the other half of k are read back
    if BOUNDED:
        b_A10 = b_A10 * UNSHIFT

    o_t = (o_i + 32) % 64  # rows of A_kk, and all columns: the second half first
    m_0 = (o_i < 32)[:, None]
    b_A_qk = tl.where(o_t[None, :] <= o_i[:, None], beside(b_A1, tl.where(m_0, b_A0, b_A10)), 0.0)  # [64, 64]
    b_A_kk = tl.where(o_t[None, :] < o_t[:, None], beside(b_A1, tl.where(m_0, b_A10, b_A0)), 0.0)
    b_beta = tl.load(p_betas + o_t)
    b_T = unit_lower_inverse(b_A_kk * b_beta[:, None], SOLVE, PRECISION)
    o_square = i_p * C * C + o_t[None, :]
    if HAS_LOWER:
        b_Tn = narrow(b_T, SOLVE)
        tl.store(p_solved + o_square + o_i[:, None] * C, narrow(product(narrow(b_A_qk, SOLVE), b_Tn, PRECISION), DTYPE))
        b_lower = product(narrow(b_A_kk, SOLVE), b_Tn, PRECISION)
        b_eye = tl.where(o_t[:, None] == o_t[None, :], 1.0, 0.0)
        b_lower = tl.where((tl.abs(b_beta) > DIVISIBLE)[:, None], (b_eye - b_T) / b_beta[:, None], b_lower)
        tl.store(p_lower + o_square + o_t[:, None] * C, narrow(b_lower, SOLVE))
    p_tail += o_t[:, None] * KP
    b_k, b_decay = tl.load(p_tail), tl.load(p_decay + o_k)
    b_T = narrow(b_T * tl.load(p_betas + o_t)[None, :], SOLVE)
    tl.store(p_squares + o_square + o_i[:, None] * C, narrow(product(narrow(b_A_qk, SOLVE), b_T, PRECISION), DTYPE))
    b_k = tl.where((o_t < 32)[:, None], b_k.to(tl.float32) * b_decay[None, :], b_k.to(tl.float32)).to(SOLVE)  # decayed to the chunk's end
    tl.store(p_tail, narrow(product(tl.trans(b_T), b_k, PRECISION), DTYPE))
    tl.debug_barrier()
    tl.store(p_total, power_of_2(b_total0 + b_total1, PTX), mask=o_m % 8 == 0)
