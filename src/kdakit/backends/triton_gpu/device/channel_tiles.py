"""Spans of 32 tokens as tiles [BK, 32]: channels are rows, so that sums along tokens stay in a thread's registers."""

from __future__ import annotations

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.device.gate import exact_decays, gate_decay
from kdakit.backends.triton_gpu.device.matrix import in_parts, product, product_add


@triton.jit
def span_tokens(R: tl.constexpr):
    """[R], R a multiple of 32: the token of each column. Column 8 n + 2 t + e of a span is token 8 t + 2 n + e.

    The matrix units leave columns 2 t and 2 t + 1 of every eight in one thread. In this order they are an octet, 8 tokens in a row.
    """
    o_p = tl.arange(0, R)
    return o_p - o_p % 32 + (o_p // 2 % 4) * 8 + (o_p % 32 // 8) * 2 + o_p % 2


@triton.jit
def split_octets(b_x):
    """[BK, 32] -> 8 x [BK, 4]: the i-th tokens of the four octets. Names registers, moves nothing."""
    BK: tl.constexpr = b_x.shape[0]
    b_x = tl.permute(tl.reshape(b_x, [BK, 2, 2, 4, 2]), (0, 3, 1, 2, 4))
    b_even, b_odd = tl.split(b_x)
    b_04, b_26 = tl.split(b_even)
    b_15, b_37 = tl.split(b_odd)
    b_0, b_4 = tl.split(b_04)
    b_2, b_6 = tl.split(b_26)
    b_1, b_5 = tl.split(b_15)
    b_3, b_7 = tl.split(b_37)
    return b_0, b_1, b_2, b_3, b_4, b_5, b_6, b_7


@triton.jit
def join_octets(x):
    """8 x [BK, 4] -> [BK, 32]: the inverse of `split_octets`."""
    b_even = tl.join(tl.join(x[0], x[4]), tl.join(x[2], x[6]))
    b_odd = tl.join(tl.join(x[1], x[5]), tl.join(x[3], x[7]))
    b_x = tl.join(b_even, b_odd)
    BK: tl.constexpr = b_x.shape[0]
    return tl.reshape(tl.permute(b_x, (0, 2, 3, 1, 4)), [BK, 32])


@triton.jit
def channel_rows(BK: tl.constexpr):
    """[BK]: the channel of each row of a tile in the order of tokens, so that the 8 tokens in a row that a thread loads or stores are those
    that the matrix units leave in it."""
    o_a = tl.arange(0, BK)
    return o_a % (BK // 2) // 8 * 16 + o_a // (BK // 2) * 8 + o_a % 8


@triton.jit
def as_span(b_x):
    """[BK, 32] of the channels of `channel_rows` and tokens in order -> as every other span. Names registers, moves nothing."""
    BK: tl.constexpr = b_x.shape[0]
    b_x = tl.permute(tl.reshape(b_x, [2, BK // 16, 8, 4, 4, 2]), (1, 0, 2, 4, 3, 5))
    return tl.reshape(b_x, [BK, 32])


@triton.jit
def in_order(b_x):
    """The inverse of `as_span`."""
    BK: tl.constexpr = b_x.shape[0]
    b_x = tl.permute(tl.reshape(b_x, [BK // 16, 2, 8, 4, 4, 2]), (1, 0, 2, 4, 3, 5))
    return tl.reshape(b_x, [BK, 32])


@triton.jit
def side_by_side(b_x, b_y):
    """[BK, R], [BK, R] -> [BK, 2 R]."""
    BK: tl.constexpr = b_x.shape[0]
    R: tl.constexpr = b_x.shape[1]
    return tl.reshape(tl.permute(tl.join(b_x, b_y), (0, 2, 1)), [BK, 2 * R])


@triton.jit
def split_sides(b_x):
    """[BK, 2 R] -> [BK, R], [BK, R]."""
    BK: tl.constexpr = b_x.shape[0]
    R: tl.constexpr = b_x.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(b_x, [BK, 2, R]), (0, 2, 1)))


@triton.jit
def pick_octet(b_x, t: tl.constexpr):
    """[BK, 4] -> [BK, 1]: the value of octet t."""
    return tl.sum(tl.where(tl.arange(0, 4)[None, :] == t, b_x, 0.0), 1, keep_dims=True)


@triton.jit
def per_octet(b_0, b_1, b_2, b_3):
    """4 x [BK, 1] -> [BK, 4]."""
    o_t = tl.arange(0, 4)[None, :]
    return tl.where(o_t < 2, tl.where(o_t == 0, b_0, b_1), tl.where(o_t == 2, b_2, b_3))


@triton.jit
def spread_octets(b_x):
    """[BK, 4] -> [BK, 32]: the same for every token of an octet."""
    return join_octets((b_x, b_x, b_x, b_x, b_x, b_x, b_x, b_x))


@triton.jit
def octet_sums(b_x):
    """[BK, 32] -> [BK, 4]."""
    x = split_octets(b_x)
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]))


@triton.jit
def earlier_get(b_x):
    """[BK, 4] -> [BK, 4]: every octet gets the sum of those after it."""
    b_3 = pick_octet(b_x, 3)
    b_2 = pick_octet(b_x, 2) + b_3
    return per_octet(pick_octet(b_x, 1) + b_2, b_2, b_3, tl.zeros_like(b_3))


@triton.jit
def later_get(b_x):
    """[BK, 4] -> [BK, 4]: every octet gets the sum of those before it."""
    b_0 = pick_octet(b_x, 0)
    b_1 = pick_octet(b_x, 1) + b_0
    return per_octet(tl.zeros_like(b_0), b_0, b_1, pick_octet(b_x, 2) + b_1)


@triton.jit
def running_product(x):
    """8 x [BK, 4] -> y_i = x_0 .. x_i."""
    b_run = x[0]
    y = (b_run,)
    for i in tl.static_range(1, 8):
        b_run = b_run * x[i]
        y = y + (b_run,)  # noqa: RUF005 - no unpacking in kernels
    return y


@triton.jit
def remaining_product(x):
    """8 x [BK, 4] -> y_i = x_{i+1} .. x_7."""
    b_run = tl.full(x[0].shape, 1.0, tl.float32)
    y = (b_run,)
    for i in tl.static_range(7):
        b_run = b_run * x[7 - i]
        y = (b_run,) + y  # noqa: RUF005
    return y


@triton.jit
def octet_decays(b_e):
    """b_e [BK, 32], the tokens' decays -> decay from the octet's start to each token and from each token to the octet's end, [BK, 32];
    the octets' decays, 4 x [BK, 1], and the span's. All are products, so nothing cancels."""
    e = split_octets(b_e)
    prefix, suffix = running_product(e), remaining_product(e)
    b_c0, b_c1, b_c2, b_c3 = pick_octet(prefix[7], 0), pick_octet(prefix[7], 1), pick_octet(prefix[7], 2), pick_octet(prefix[7], 3)
    return join_octets(prefix), join_octets(suffix), (b_c0, b_c1, b_c2, b_c3), (b_c0 * b_c1) * (b_c2 * b_c3)


@triton.jit
def from_start(b_prefix, c):
    """Decay from the span's start to each token, [BK, 32]."""
    return b_prefix * spread_octets(per_octet(tl.full(c[0].shape, 1.0, tl.float32), c[0], c[0] * c[1], c[0] * c[1] * c[2]))


@triton.jit
def to_end(b_suffix, c):
    """Decay from each token to the span's end, [BK, 32]."""
    return b_suffix * spread_octets(per_octet(c[1] * c[2] * c[3], c[2] * c[3], c[3], tl.full(c[0].shape, 1.0, tl.float32)))


@triton.jit
def identity_matrix(R: tl.constexpr):
    o_i = tl.arange(0, R)
    return tl.where(o_i[:, None] == o_i[None, :], 1.0, 0.0).to(tl.bfloat16)


@triton.jit
def placed_by_product(b_x, b_I):
    """[BK, R] -> float32, by products with the identity: the result lies as every other product's does, and so does all that is computed
    from it."""
    if b_x.dtype.is_bf16():
        b_y = product(b_x, b_I, "ieee")
    else:
        x = in_parts(b_x.to(tl.float32))
        b_y = product_add(x[0], b_I, product_add(x[1], b_I, product(x[2], b_I, "ieee"), "ieee"), "ieee")
    return b_y


@triton.jit
def load_span(p_x, o_t, s_t, o_k, eos, b_I, K: tl.constexpr, KP: tl.constexpr, ALIGN: tl.constexpr):
    """Rows o_t [R] of a token tensor, channels o_k [BK] -> [BK, R] float32; zeros past the end."""
    p_x += (o_t * s_t)[:, None] * ALIGN + o_k[None, :]
    m_x = (o_t < eos)[:, None]
    if K < KP:
        m_x = m_x & (o_k < K)[None, :]
    return placed_by_product(tl.trans(tl.load(p_x, mask=m_x, other=0.0)), b_I)


@triton.jit
def load_gate_input(
    p_g, p_dt_bias, o_t, s_t, o_k, eos, b_I, K: tl.constexpr, KP: tl.constexpr, ALIGN: tl.constexpr, HAS_DT_BIAS: tl.constexpr
):
    """[BK, R]: x = g + bias, and what rounding takes from it."""
    b_g = load_span(p_g, o_t, s_t, o_k, eos, b_I, K, KP, ALIGN)
    if HAS_DT_BIAS:
        b_bias = tl.load(p_dt_bias + o_k, mask=o_k < K, other=0.0).to(tl.float32)[:, None]
        b_x = b_g + b_bias
        b_part = b_x - b_g
        return b_x, (b_g - (b_x - b_part)) + (b_bias - b_part)
    return b_g, tl.zeros_like(b_g)


@triton.jit
def load_decay(
    p_g, p_dt_bias, a, lower_bound, o_t, s_t, o_k, eos, b_I, K: tl.constexpr, KP: tl.constexpr, ALIGN: tl.constexpr, GATE: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr, EXACT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The tokens' decays [BK, R], 1 past the end; EXACT: and the sum of their log-decays [BK, 1]."""
    b_x, _lost = load_gate_input(p_g, p_dt_bias, o_t, s_t, o_k, eos, b_I, K, KP, ALIGN, HAS_DT_BIAS)
    if EXACT:
        b_e, b_log = exact_decays(b_x, (o_t < eos)[None, :], a, lower_bound, GATE)
        b_log = tl.sum(b_log, 1, keep_dims=True)
    else:
        b_e = tl.where((o_t < eos)[None, :], gate_decay(b_x, a, lower_bound, GATE, False, PTX), 1.0)
        b_log = tl.zeros([b_x.shape[0], 1], tl.float32)  # nobody asks
    return b_e, b_log


@triton.jit
def without_first(b_d_g, o_t, first):
    """Gradients of log-decays [BK, R], 0 for a chunk's token 0 if that is a sequence's `first`: before it there is no state to decay."""
    return tl.where(first & (o_t == 0)[None, :], 0.0, b_d_g)
