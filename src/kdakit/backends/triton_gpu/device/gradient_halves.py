"""Inputs, outputs and gates of a half of 32 tokens, for the kernel of `gradient_normed`."""

from __future__ import annotations

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.device.channel_tiles import as_span, channel_rows, octet_sums, side_by_side, span_tokens
from kdakit.backends.triton_gpu.device.gate import bounded_gate_backward, gate_backward
from kdakit.backends.triton_gpu.device.matrix import round_to
from kdakit.backends.triton_gpu.device.pair_gradients import load_pairs
from kdakit.backends.triton_gpu.device.token_tiles import to_float32
from kdakit.backends.triton_gpu.device.versions import either


@triton.jit
def load_d_tile(p_d_tiles, i: tl.constexpr, FIRST: tl.constexpr, KP: tl.constexpr):
    """Gradients of q_decayed (0), k_in (1) or k_decayed (2) of the half that begins at token FIRST, [KP, 32], for `as_span`."""
    o_x = (i * KP + channel_rows(KP))[:, None] * 64 + FIRST + tl.arange(0, 32)[None, :]
    return tl.load(p_d_tiles + o_x)


@triton.jit
def load_scale(p_scales, i: tl.constexpr, KP: tl.constexpr):
    """What the channels of that tile are to be taken times, [KP, 1]."""
    return tl.load(p_scales + i * KP + tl.arange(0, KP))[:, None]


@triton.jit
def widened_d_tile(b_x, PTX: tl.constexpr):
    """A tile as `load_d_tile` has it -> [KP, 32] float32, before it is scaled. See `token_tiles.to_float32`."""
    b_x = as_span(b_x)
    if PTX:
        asm: tl.constexpr = "{ .reg .b16 x, y; mov.b32 {x, y}, $2; cvt.f32.f16 $0, x; cvt.f32.f16 $1, y; }"
        return tl.inline_asm_elementwise(asm, "=f,=f,r", [b_x], dtype=tl.float32, is_pure=True, pack=2)
    return b_x.to(tl.float32)


@triton.jit
def load_rows(p_x, p_y, FIRST: tl.constexpr, s_x, s_y, length, other, R: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
              ALIGN: tl.constexpr):  # fmt: skip
    """Tokens of a half of one tensor [32, KP], or of two [64, KP]; `other` where there is none."""
    o_k, o_t = tl.arange(0, KP), span_tokens(R) % 32 + FIRST
    p_x += (o_t * s_x) * ALIGN
    if R == 64:
        p_x = either(tl.arange(0, 64) < 32, p_x, p_y + (o_t * s_y) * ALIGN, ALIGN)
    m_x = (o_t < length)[:, None]
    if K < KP:
        m_x = m_x & (o_k < K)[None, :]
    return tl.load(p_x[:, None] + o_k[None, :], mask=m_x, other=other)


@triton.jit
def input_without_decay(GATE: tl.constexpr):
    """A gate's input that decays nothing; finite, since it goes through a product."""
    return 0.0 if GATE == "log_decay" else -3e38


@triton.jit
def load_half(p_q, p_k, p_g, p_norms, p_pairs, p_d_tiles, FIRST: tl.constexpr, length, s_qt, s_kt, s_gt, K: tl.constexpr,
              KP: tl.constexpr, ALIGN: tl.constexpr, GATE: tl.constexpr, TURNED: tl.constexpr):  # fmt: skip
    """All that a half needs, as it lies in memory: g, q above k, 1 / |q|, 1 / |k| [1, 32], the three tiles, and the pairs
    [64, 32]. Asked for at once, so that the memory's delay is paid once."""
    o_t = span_tokens(32) + FIRST
    b_g = load_rows(p_g, p_g, FIRST, s_gt, s_gt, length, input_without_decay(GATE), 32, K, KP, ALIGN)
    b_qk = load_rows(p_q, p_k, FIRST, s_qt, s_kt, length, 0.0, 64, K, KP, ALIGN)
    b_r_q, b_r_k = tl.load(p_norms + o_t)[None, :], tl.load(p_norms + 64 + o_t)[None, :]
    b_dq, b_dk, b_dc = load_d_tile(p_d_tiles, 0, FIRST, KP), load_d_tile(p_d_tiles, 1, FIRST, KP), load_d_tile(p_d_tiles, 2, FIRST, KP)
    return b_g, b_qk, b_r_q, b_r_k, b_dq, b_dk, b_dc, load_pairs(p_pairs, FIRST, FIRST, 64, TURNED)


@triton.jit
def other_octet(b_x, s: tl.constexpr):
    """[KP, 4] -> at octet t the value of octet t ^ s. A sum of two integers less the one is exactly the other."""
    b_i = tl.reshape(b_x.to(tl.int32, bitcast=True), [b_x.shape[0], 2 // s, 2, s])
    return tl.reshape(tl.sum(b_i, 2, keep_dims=True) - b_i, [b_x.shape[0], 4]).to(tl.float32, bitcast=True)


@triton.jit
def token_totals(b_x):
    """[KP, 32] -> sums over all tokens, [KP, 4]."""
    b_x = octet_sums(b_x)
    b_x += other_octet(b_x, 1)
    return b_x + other_octet(b_x, 2)


@triton.jit
def store_rows(p_x, p_y, FIRST: tl.constexpr, HV, length, b_x, b_y, K: tl.constexpr, KP: tl.constexpr):
    """b_x, b_y [KP, 32] -> rows of a half of two token tensors."""
    o_k, o_t = tl.arange(0, KP), span_tokens(64) % 32 + FIRST
    p_d = either(tl.arange(0, 64) < 32, p_x + o_t * HV * K, p_y + o_t * HV * K, K & -K)[:, None] + o_k[None, :]
    m_d = (o_t < length)[:, None]
    if K < KP:
        m_d = m_d & (o_k < K)[None, :]
    tl.store(p_d, tl.trans(round_to(side_by_side(b_x, b_y), p_x.dtype.element_ty)), mask=m_d)


@triton.jit
def half_gates(
    p_d_g, p_dt_bias, FIRST: tl.constexpr, b_g, b_d, a, lower_bound, HV, length,
    K: tl.constexpr, KP: tl.constexpr, GATE: tl.constexpr, HAS_DT_BIAS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """From the gradient b_d of the log-decays of a half and their inputs b_g: stores d_g; returns the sums over its tokens of the gradient
    of the gate's input and of the terms of d_A_log, both [KP]."""
    o_k, o_t = tl.arange(0, KP), span_tokens(32) + FIRST
    b_x = to_float32(b_g, PTX) if b_g.dtype.is_bf16() else b_g.to(tl.float32)
    if HAS_DT_BIAS:
        b_x += tl.load(p_dt_bias + o_k, mask=o_k < K, other=0.0).to(tl.float32)[:, None]
    if GATE == "bounded":
        b_d, b_A = bounded_gate_backward(b_x, b_d, a, lower_bound, PTX)
    else:
        b_d, b_A = gate_backward(b_x, 0.0, b_d, a, 0.0, lower_bound, GATE, False, PTX)
    p_d = p_d_g + (o_t * HV)[:, None] * K + o_k[None, :]
    m_d = (o_t < length)[:, None]
    if K < KP:
        m_d = m_d & (o_k < K)[None, :]
    tl.store(p_d, tl.trans(round_to(b_d, p_d_g.dtype.element_ty)), mask=m_d)
    return tl.sum(b_d, 1), tl.sum(b_A, 1)
