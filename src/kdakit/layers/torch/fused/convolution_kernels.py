"""Short causal convolution and SiLU, forward and backward: a thread walks along the tokens of its channels.

    z_t = bias + sum_i w_i x_{t-i}        y_t = z_t sigmoid(z_t)        w_i = weight[:, W - 1 - i], i = 0 .. W - 1
    dz_t = dy_t silu'(z_t)                dx_t = sum_i w_i dz_{t+i}        dw_i = sum_t dz_t x_{t-i}        dbias = sum_t dz_t

Before a sequence's first token, place 0, x is its window [W - 1, D], or 0. So x_{t-i} of place p is a token where i <= p, else the window's
row W - 1 - i + p. Channels come in up to three sections, each of which has an output of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.device.matrix import round_to
from kdakit.layers.torch.fused.rows import sigmoid, silu_slope


@triton.jit(do_not_specialize=["T", "N", "STEPS"])
def places_kernel(p_cu_seqlens, p_places, T, N, STEPS, BLOCK: tl.constexpr):
    """places [2, T]: each token's sequence n, by bisection, and its place in it; n = N for tokens after the last sequence."""
    o_t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], tl.int32)
    high = low + N
    for _ in range(STEPS):
        middle = (low + high + 1) // 2
        later = tl.load(p_cu_seqlens + middle).to(tl.int64) <= o_t
        low, high = tl.where(later, middle, low), tl.where(later, high, middle - 1)
    start = tl.load(p_cu_seqlens + low).to(tl.int64)
    tl.store(p_places + o_t, low, mask=o_t < T)
    tl.store(p_places + T + o_t, (o_t - start).to(tl.int32), mask=o_t < T)


@triton.jit
def place_of(p_places, i_b, t, T, PACKED: tl.constexpr):
    """The sequence of token t of row b, and its place there; place 0 for tokens that do not exist."""
    if PACKED:
        inside = (t >= 0) & (t < T)
        i_n, place = tl.load(p_places + t, mask=inside, other=0).to(tl.int64), tl.load(p_places + T + t, mask=inside, other=0).to(tl.int64)
    else:
        i_n, place = i_b, t
    return i_n, place


@triton.jit
def section_of(i_d, D0, D1, D2, p_0, p_1, p_2, BD: tl.constexpr, UNIT: tl.constexpr):
    """Of the i_d-th block of channels: where its section begins, how wide it is, the block's first channel in it, and its tensor."""
    D0, D1, D2 = D0 * UNIT, D1 * UNIT, D2 * UNIT
    n0, n1 = tl.cdiv(D0, BD), tl.cdiv(D1, BD)
    second, third = i_d >= n0, i_d >= n0 + n1  # selections, not branches: AMD's compiler takes no pointers out of these
    base = tl.where(third, D0 + D1, tl.where(second, D0, 0))
    width = tl.where(third, D2, tl.where(second, D1, D0))
    first = (i_d - tl.where(third, n0 + n1, tl.where(second, n0, 0))) * BD
    p = tl.where(third, p_2, tl.where(second, p_1, p_0))
    return base, width, first, p


@triton.jit
def taps_of(p_weight, o_c, m_d, W: tl.constexpr):
    """w_0 .. w_{W-1}, [BD] each."""
    taps = ()
    for i in tl.static_range(W):
        taps += (tl.load(p_weight + o_c * W + (W - 1 - i), mask=m_d, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def input_at(
    p_x, s_xt, p_window, t, i: tl.constexpr, i_n, place, o_c, m_d, N, D, W: tl.constexpr, ALIGN: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """x_{t-i} of a token t at `place` of sequence i_n."""
    b_x = tl.load(p_x + (t - i) * s_xt * ALIGN, mask=m_d & (place >= i), other=0.0).to(tl.float32)
    if HAS_WINDOW and i > 0:
        row = i_n * (W - 1) + (W - 1 - i) + place
        b_w = tl.load(p_window + row * D + o_c, mask=m_d & (place < i) & (i_n < N), other=0.0).to(tl.float32)
        b_x = tl.where(place >= i, b_x, b_w)
    return b_x


@triton.jit(do_not_specialize=["T", "N", "D0", "D1", "D2", "s_xb", "s_xt"])
def convolution_kernel(
    p_x, p_weight, p_bias, p_window, p_places, p_y0, p_y1, p_y2,
    T, N, D0, D1, D2, s_xb, s_xt,
    W: tl.constexpr, BD: tl.constexpr, GROUP: tl.constexpr, ALIGN: tl.constexpr, UNIT: tl.constexpr, PACKED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_WINDOW: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """GROUP tokens of BD channels. Sizes of sections are in units of UNIT channels. Grid: (blocks of channels, groups of tokens, B)."""
    D = (D0 + D1 + D2) * UNIT
    i_d, t0, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64) * GROUP, tl.program_id(2).to(tl.int64)
    base, width, first, p_y = section_of(i_d, D0, D1, D2, p_y0, p_y1, p_y2, BD, UNIT)
    o_d = first + tl.arange(0, BD)
    m_d = o_d < width
    o_c = base + o_d
    p_x += i_b * s_xb * ALIGN + o_c
    p_y += i_b * T * width + o_d
    taps = taps_of(p_weight, o_c, m_d, W)
    b_bias = tl.zeros([BD], tl.float32)
    if HAS_BIAS:
        b_bias = tl.load(p_bias + o_c, mask=m_d, other=0.0).to(tl.float32)
    i_n, place = place_of(p_places, i_b, t0, T, PACKED)
    past, rows = (), ()
    for i in tl.static_range(1, W):
        past += (input_at(p_x, s_xt, p_window, t0, i, i_n, place, o_c, m_d, N, D, W, ALIGN, HAS_WINDOW),)
    for j in tl.static_range(GROUP):
        rows += (tl.load(p_x + (t0 + j) * s_xt * ALIGN, mask=m_d & (t0 + j < T), other=0.0),)
    for j in tl.static_range(GROUP):
        if PACKED and j > 0:  # a sequence may begin here
            i_n, place = place_of(p_places, i_b, t0 + j, T, PACKED)
            anew = ()
            for i in tl.static_range(1, W):
                b_w = tl.zeros([BD], tl.float32)
                if HAS_WINDOW:
                    row = i_n * (W - 1) + (W - 1 - i)
                    b_w = tl.load(p_window + row * D + o_c, mask=m_d & (place == 0) & (i_n < N), other=0.0).to(tl.float32)
                anew += (tl.where(place == 0, b_w, past[i - 1]),)
            past = anew
        b_x = rows[j].to(tl.float32)
        b_z = b_bias + taps[0] * b_x
        for i in tl.static_range(1, W):
            b_z += taps[i] * past[i - 1]
        tl.store(p_y + (t0 + j) * width, round_to(b_z * sigmoid(b_z, PTX), p_y.dtype.element_ty), mask=m_d & (t0 + j < T))
        moved = (b_x,)
        for i in tl.static_range(1, W - 1):
            moved += (past[i - 1],)
        past = moved


@triton.jit(do_not_specialize=["T", "N", "D", "s_xb", "s_xt"])
def last_inputs_kernel(
    p_x, p_window, p_cu_seqlens, p_lengths, p_after, T, N, D, s_xb, s_xt,
    W: tl.constexpr, BD: tl.constexpr, ALIGN: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """after [N, W - 1, D]: the last inputs of each sequence; a short one keeps part of its window. Grid: (cdiv(D, BD), N)."""
    i_n = tl.program_id(1).to(tl.int64)
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m_d = o_d < D
    length = i_n * 0 + T
    if PACKED:
        bos = tl.load(p_cu_seqlens + i_n).to(tl.int64)
        length = tl.load(p_cu_seqlens + i_n + 1).to(tl.int64) - bos
        p_x += bos * s_xt * ALIGN
    else:
        p_x += i_n * s_xb * ALIGN
    if HAS_LENGTHS:
        length = tl.load(p_lengths + i_n).to(tl.int64)
    for r in tl.static_range(W - 1):
        place = length - (W - 1) + r
        b_x = tl.load(p_x + place * s_xt * ALIGN + o_d, mask=m_d & (place >= 0), other=0.0).to(tl.float32)
        p_row = (i_n * (W - 1) + r) * D + o_d
        b_w = tl.load(p_window + (i_n * (W - 1) + r + length) * D + o_d, mask=m_d & (place < 0), other=0.0).to(tl.float32)
        tl.store(p_after + p_row, round_to(tl.where(place >= 0, b_x, b_w), p_after.dtype.element_ty), mask=m_d)


@triton.jit(do_not_specialize=["T", "N", "D0", "D1", "D2", "s_xb", "s_xt", "STRIP"])
def convolution_backward_kernel(
    p_x, p_weight, p_bias, p_window, p_places, p_d0, p_d1, p_d2, p_dx, p_shares, p_d_window,
    T, N, D0, D1, D2, s_xb, s_xt, STRIP,
    W: tl.constexpr, BD: tl.constexpr, GROUP: tl.constexpr, ALIGN: tl.constexpr, UNIT: tl.constexpr, PACKED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_D_WINDOW: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """STRIP tokens of BD channels, a multiple of GROUP, from the last to the first. dx [B, T, D]; each strip's share of dw_i and dbias in
    shares [B * strips, W + 1, D]; the window's gradient where a sequence begins. Grid: (blocks of channels, strips, B).
    """
    D = (D0 + D1 + D2) * UNIT
    i_d, i_s, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    t0 = i_s.to(tl.int64) * STRIP
    base, width, first, p_dy = section_of(i_d, D0, D1, D2, p_d0, p_d1, p_d2, BD, UNIT)
    o_d = first + tl.arange(0, BD)
    m_d = o_d < width
    o_c = base + o_d
    p_x += i_b * s_xb * ALIGN + o_c
    p_dy += i_b * T * width + o_d
    p_dx += i_b * T * D + o_c
    taps = taps_of(p_weight, o_c, m_d, W)
    b_bias = tl.zeros([BD], tl.float32)
    if HAS_BIAS:
        b_bias = tl.load(p_bias + o_c, mask=m_d, other=0.0).to(tl.float32)
    b_zero = tl.zeros([BD], tl.float32)
    ahead, shares = (), ()
    for _ in tl.static_range(1, W):
        ahead += (b_zero,)
    for _ in tl.static_range(W + 1):
        shares += (b_zero,)
    end = t0 + STRIP
    for back in tl.static_range(1, W):  # dz of the tokens after the strip, which its last ones meet
        t = end + (W - 1 - back)
        i_n, place = place_of(p_places, i_b, t, T, PACKED)
        b_z = b_bias
        for i in tl.static_range(W):
            b_z += taps[i] * input_at(p_x, s_xt, p_window, t, i, i_n, place, o_c, m_d & (t < T), N, D, W, ALIGN, HAS_WINDOW)
        b_dz = tl.load(p_dy + t * width, mask=m_d & (t < T), other=0.0).to(tl.float32) * silu_slope(b_z, PTX)
        moved = (tl.where(place == 0, 0.0, b_dz),)
        for i in tl.static_range(1, W - 1):
            moved += (tl.where(place == 0, 0.0, ahead[i - 1]),)
        ahead = moved
    for g in range(STRIP // GROUP):
        t1 = end - (g + 1) * GROUP  # the first token of the group
        xs, dys = (), ()
        for j in tl.static_range(GROUP):
            dys += (tl.load(p_dy + (t1 + j) * width, mask=m_d & (t1 + j < T), other=0.0),)
        for j in tl.static_range(GROUP + W - 1):  # x from t1 - (W - 1) on
            t = t1 + j - (W - 1)
            xs += (tl.load(p_x + t * s_xt * ALIGN, mask=m_d & (t >= 0) & (t < T), other=0.0),)
        for back in tl.static_range(GROUP):
            t = t1 + (GROUP - 1 - back)
            i_n, place = place_of(p_places, i_b, t, T, PACKED)
            inputs = ()
            b_z = b_bias
            for i in tl.static_range(W):
                b_x = xs[GROUP - 1 - back + W - 1 - i].to(tl.float32)
                if i > 0 and (PACKED or HAS_WINDOW):
                    b_w = b_zero
                    if HAS_WINDOW:
                        row = i_n * (W - 1) + (W - 1 - i) + place
                        b_w = tl.load(p_window + row * D + o_c, mask=m_d & (place < i) & (i_n < N), other=0.0).to(tl.float32)
                    b_x = tl.where(place >= i, b_x, b_w)
                inputs += (b_x,)
                b_z += taps[i] * b_x
            b_dz = dys[GROUP - 1 - back].to(tl.float32) * silu_slope(b_z, PTX)
            b_dx = taps[0] * b_dz
            for i in tl.static_range(1, W):
                b_dx += taps[i] * ahead[i - 1]
            tl.store(p_dx + t * D, round_to(b_dx, p_dx.dtype.element_ty), mask=m_d & (t < T))
            more = ()
            for i in tl.static_range(W):
                more += (shares[i] + b_dz * inputs[i],)
            more += (shares[W] + b_dz,)
            shares = more
            moved = ()
            if W > 1:
                moved = (b_dz,)
            for i in tl.static_range(1, W - 1):
                moved += (ahead[i - 1],)
            ahead = moved
            if HAS_D_WINDOW and W > 1:  # noqa: SIM102 - the compiler decides the one, the device the other
                if (place == 0) & (t < T) & (i_n < N):
                    for r in tl.static_range(W - 1):  # place r - (W - 1) meets the first r + 1 tokens
                        b_d = b_zero
                        for i in tl.static_range(W - 1 - r, W):
                            b_d += taps[i] * ahead[i - (W - 1 - r)]
                        p_row = p_d_window + (i_n * (W - 1) + r) * D + o_c
                        tl.store(p_row, round_to(b_d, p_d_window.dtype.element_ty), mask=m_d)
            if PACKED and W > 1:  # the token before belongs to another sequence
                apart = ()
                for i in tl.static_range(1, W):
                    apart += (tl.where(place == 0, 0.0, ahead[i - 1]),)
                ahead = apart
    p_shares += ((i_b * tl.num_programs(1) + i_s) * (W + 1)) * D + o_c
    for i in tl.static_range(W + (1 if HAS_BIAS else 0)):
        tl.store(p_shares + i * D, shares[i], mask=m_d)


@triton.jit(do_not_specialize=["S", "D"])
def weight_sums_kernel(p_shares, p_d_weight, p_d_bias, S, D, W: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """d_weight [D, W] and d_bias [D] from shares [S, W + 1, D], in one order. Grid: (cdiv(D, BD),)."""
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m_d = o_d < D
    o_s = tl.arange(0, ROWS)
    for i in tl.static_range(W + (1 if HAS_BIAS else 0)):
        b_sum = tl.zeros([ROWS, BD], tl.float32)
        for start in range(0, S, ROWS):
            o = ((start + o_s).to(tl.int64) * (W + 1) + i)[:, None] * D + o_d[None, :]
            b_sum += tl.load(p_shares + o, mask=(start + o_s < S)[:, None] & m_d[None, :], other=0.0)
        b_out = tl.sum(b_sum, 0)
        if i < W:
            tl.store(p_d_weight + o_d * W + (W - 1 - i), round_to(b_out, p_d_weight.dtype.element_ty), mask=m_d)
        else:
            tl.store(p_d_bias + o_d, round_to(b_out, p_d_bias.dtype.element_ty), mask=m_d)
