"""Guessed tokens over a pool of states: their outputs without a state for each, and the replay of those that were accepted.

With S the state, d_t the decay e^g of token t, c_t the product of the first t decays, and x_tj = k_j times the decays after j up to t:

    u_t = beta_t (v_t - S^T c_t k_t - sum_{j<t} u_j x_tj^T k_t)        o_t = scale (S^T c_t q_t + sum_{j<=t} u_j x_tj^T q_t)

`tokens_kernel` knows no state: it makes the vectors that meet S and the coefficients of the u_j. `draft_kernel` reads S once and multiplies
it with all of them. `commit_kernel` adds what was accepted: S <- Diag(c_n) S + sum_j x_nj u_j^T.

CHAINED: the kernel is launched while the one before it ends (programmatic dependent launch) and waits itself for what that one writes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import triton
import triton.language as tl

from kdakit.backends.triton_gpu.arguments import activations, pool_states, strides
from kdakit.backends.triton_gpu.config import Cut, padded
from kdakit.backends.triton_gpu.device.gate import inverse_norm, log2_decay, write_strength
from kdakit.backends.triton_gpu.device.matrix import round_to
from kdakit.backends.triton_gpu.device.pool_state import load_state, owner_of, slot_of, store_state
from kdakit.backends.triton_gpu.device.program import state_offsets, wait_for_last
from kdakit.backends.triton_gpu.runtime.kernel import kernel
from kdakit.backends.triton_gpu.runtime.launch import Launch
from kdakit.backends.triton_gpu.runtime.layout import Layout
from kdakit.problem import Problem


@triton.jit
def fetch_into_cache(p, size):
    """Asks for `size` bytes from address p, both multiples of 16, to be brought into the L2 cache. Nothing is read."""
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
        }
        """,
        "=r,l,r",
        [p, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_tokens_before(p_k, p_decay, s_k, s_decay, m_x, o_t, lag: tl.constexpr):
    """k and d [TP, KP] of the token `lag` before each; 0 and 1 where there is none."""
    m_lag = m_x & (o_t >= lag)[:, None]
    return tl.load(p_k - lag * s_k, mask=m_lag, other=0.0), tl.load(p_decay - lag * s_decay, mask=m_lag, other=1.0)


@kernel
def tokens_kernel(
    p_q, p_k, p_g, p_beta, p_A_log, p_dt_bias, p_states, p_slots, p_generation,
    p_log_k, p_log_decay, p_log_slots, p_log_generation, p_vectors, p_coefficients,
    T, H, HV, CAPACITY, fetch_from, fetch_to, fetch_bytes, scale, lower_bound,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_gb, s_gt, s_gh, s_bb, s_bt, s_bh,
    K: tl.constexpr, KP: tl.constexpr, TP: tl.constexpr, ALIGN: tl.constexpr,
    GATE: tl.constexpr, BETA: tl.constexpr, L2NORM: tl.constexpr, HAS_A_LOG: tl.constexpr, HAS_DT_BIAS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """For `draft_kernel`: vectors [TP, 2, KP] of each row and head, -beta_t c_t k_t and scale c_t q_t, and coefficients [2, TP, TP],
    -beta_t x_tj^T k_t below a diagonal of beta_t, and scale x_tj^T q_t. Logs k, d, the row's slot and its generation.

    q and k stay as they came: norms are numbers, and u carries that of k. The memory has little to do meanwhile: programs from fetch_from
    to fetch_to ask for the state, of fetch_bytes, that `draft_kernel` will read. Grid: (N + N * HV,), the first N for the owners.
    """
    wait_for_last(CHAINED)
    i_p = tl.program_id(0)
    rows = tl.num_programs(0) // (HV + 1)
    if i_p < rows:
        slot, inside = slot_of(p_slots, i_p, CAPACITY)
        generation = owner_of(p_slots, p_generation, i_p, slot, inside)
        tl.store(p_log_generation + i_p, generation)
        tl.store(p_log_slots + i_p, tl.where(generation >= 0, slot, -1))
        return
    i_p -= rows
    i_n, i_h = (i_p // HV).to(tl.int64), i_p % HV
    i_hk = i_h // (HV // H)
    o_k, o_t = tl.arange(0, KP), tl.arange(0, TP)
    m_k, m_t = o_k < K, o_t < T
    m_x = m_t[:, None] & m_k[None, :]
    p_q += (i_n * s_qb + i_hk.to(tl.int64) * s_qh) * ALIGN + (o_t * s_qt)[:, None] * ALIGN + o_k[None, :]
    p_k += (i_n * s_kb + i_hk.to(tl.int64) * s_kh) * ALIGN + (o_t * s_kt)[:, None] * ALIGN + o_k[None, :]
    p_g += (i_n * s_gb + i_h.to(tl.int64) * s_gh) * ALIGN + (o_t * s_gt)[:, None] * ALIGN + o_k[None, :]
    b_beta = tl.load(p_beta + i_n * s_bb + i_h.to(tl.int64) * s_bh + o_t * s_bt, mask=m_t, other=0.0).to(tl.float32)  # [TP]
    a = tl.exp(tl.load(p_A_log + i_h).to(tl.float32)) if HAS_A_LOG else 1.0
    b_bias = tl.zeros([KP], tl.float32)
    if HAS_DT_BIAS:
        b_bias = tl.load(p_dt_bias + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_q = tl.load(p_q, mask=m_x, other=0.0).to(tl.float32)  # [TP, KP]
    b_k_given = tl.load(p_k, mask=m_x, other=0.0)  # [TP, KP]
    b_g = tl.load(p_g, mask=m_x, other=0.0).to(tl.float32)  # [TP, KP]
    o_log = ((i_n * T + o_t[:, None]) * HV + i_h) * K + o_k[None, :]
    b_c = tl.exp2(log2_decay(b_g, b_bias[None, :], a, lower_bound, GATE, True, False))  # d_t, and c_t in the end
    tl.store(p_log_decay + o_log, b_c, mask=m_x)
    tl.store(p_log_k + o_log, b_k_given, mask=m_x)
    b_k = b_k_given.to(tl.float32)
    scale_q = tl.full([TP], 1.0, tl.float32) * scale
    norm_k = tl.full([TP], 1.0, tl.float32)
    if L2NORM:
        scale_q = scale * inverse_norm(tl.sum(b_q * b_q, 1))
        norm_k = inverse_norm(tl.sum(b_k * b_k, 1))
    strength = tl.where(m_t, write_strength(b_beta, BETA, False) * norm_k, 0.0)
    minus = -strength * norm_k
    o_lag = o_t[:, None] - o_t[None, :]
    b_of_k = tl.where(o_lag == 0, strength[:, None], 0.0)  # [TP, TP]
    b_of_q = tl.where(o_lag == 0, (tl.sum(b_q * b_k, 1) * scale_q)[:, None], 0.0)  # [TP, TP]
    tl.debug_barrier()  # decays of earlier tokens come back from the log
    if CHAINED:  # noqa: SIM102 - the compiler decides the one, the device the other
        if (i_p >= fetch_from) & (i_p < fetch_to):
            slot, inside = slot_of(p_slots, i_n, CAPACITY)
            if inside:
                fetch_into_cache(p_states.to(tl.int64) + (slot * HV + i_h) * fetch_bytes, fetch_bytes)
    before = ()
    for lag in tl.static_range(1, 4):
        before += (load_tokens_before(p_k, p_log_decay + o_log, s_kt * ALIGN, HV * K, m_x, o_t, lag),)
    for lag in tl.static_range(1, TP):
        if lag + 3 < TP:
            before += (load_tokens_before(p_k, p_log_decay + o_log, s_kt * ALIGN, HV * K, m_x, o_t, lag + 3),)
        b_x = before[lag - 1][0].to(tl.float32) * b_c
        b_of_k = tl.where(o_lag == lag, (tl.sum(b_k * b_x, 1) * minus)[:, None], b_of_k)
        b_of_q = tl.where(o_lag == lag, (tl.sum(b_q * b_x, 1) * scale_q)[:, None], b_of_q)
        b_c *= before[lag - 1][1]
    p_coefficients += i_p.to(tl.int64) * (2 * TP * TP) + o_t[:, None] * TP + o_t[None, :]
    tl.store(p_coefficients, b_of_k)
    tl.store(p_coefficients + TP * TP, b_of_q)
    p_vectors += i_p.to(tl.int64) * (2 * TP * KP) + o_t[:, None] * (2 * KP) + o_k[None, :]
    tl.store(p_vectors, b_k * b_c * minus[:, None])
    tl.store(p_vectors + KP, b_q * b_c * scale_q[:, None])


@triton.jit
def split_to_tf32(x):
    """x = high + low, high in tf32's 11 bits."""
    high = ((x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def exact_product(a, b, TF32: tl.constexpr):
    """a @ b to float32's accuracy. TF32: from products of 11-bit halves, on matrix units."""
    if TF32:
        a_high, a_low = split_to_tf32(a)
        b_high, b_low = split_to_tf32(b)
        c = tl.dot(a_low, b_high, input_precision="tf32")
        c = tl.dot(a_high, b_low, c, input_precision="tf32")
        c = tl.dot(a_high, b_high, c, input_precision="tf32")
    else:
        c = tl.dot(a, b, input_precision="ieee")
    return c


@triton.jit
def split_four_columns(b, ROWS: tl.constexpr):
    even, odd = tl.split(tl.reshape(b, [ROWS, 2, 2]))
    b_0, b_2 = tl.split(even)
    b_1, b_3 = tl.split(odd)
    return b_0, b_1, b_2, b_3


@triton.jit
def split_columns(b, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The 4 or 8 columns of b [ROWS, COLUMNS]."""
    if COLUMNS == 4:
        out = split_four_columns(b, ROWS)
    else:
        even, odd = tl.split(tl.reshape(b, [ROWS, 4, 2]))
        b_0, b_2, b_4, b_6 = split_four_columns(even, ROWS)
        b_1, b_3, b_5, b_7 = split_four_columns(odd, ROWS)
        out = (b_0, b_1, b_2, b_3, b_4, b_5, b_6, b_7)
    return out


@triton.jit
def load_triangle(p, TP: tl.constexpr):
    """The numbers of [TP, TP] on and below the diagonal, row by row."""
    out = ()
    for t in tl.static_range(TP):
        for j in tl.static_range(t + 1):
            out += (tl.load(p + t * TP + j),)
    return out


@triton.jit
def state_times_vectors(b_S, p_vectors, o_k, BV: tl.constexpr, KP: tl.constexpr, TP: tl.constexpr, PRODUCT: tl.constexpr):
    """S^T w for all vectors w [TP, 2, KP]: two tuples of TP columns [BV].

    PRODUCT "sums": a sum over K for each, which costs nothing but its multiplications where a thread holds many key channels of few value
    channels; all vectors are asked for before the first is used. Otherwise one matrix product: "tf32", from halves, or "ieee".
    """
    if PRODUCT == "sums":
        us, os, ws = (), (), ()
        for i in tl.static_range(2 * TP):
            ws += (tl.load(p_vectors + i * KP + o_k),)
        for t in tl.static_range(TP):
            us += (tl.sum(b_S * ws[2 * t][None, :], 1),)
            os += (tl.sum(b_S * ws[2 * t + 1][None, :], 1),)
    else:
        b_vectors = tl.load(p_vectors + tl.arange(0, 2 * TP)[None, :] * KP + o_k[:, None])  # [KP, 2 TP]
        b_us, b_os = tl.split(tl.reshape(exact_product(b_S, b_vectors, PRODUCT == "tf32"), [BV, TP, 2]))
        us, os = split_columns(b_us, BV, TP), split_columns(b_os, BV, TP)
    return us, os


@triton.jit
def load_accepted_tokens(
    p_log_k, p_log_decay, p_log_u, i_t, HV, accepted, o_k, o_v, m_k, m_v, K: tl.constexpr, V: tl.constexpr, TP: tl.constexpr
):
    """k and d [KP], and u [BV], of each token; 0, 1 and 0 for those that were not accepted."""
    keys, decays, values = (), (), ()
    for t in tl.static_range(TP):
        values += (tl.load(p_log_u + (i_t + t * HV) * V + o_v, mask=m_v & (t < accepted), other=0.0),)
    for t in tl.static_range(TP):
        o_log = (i_t + t * HV) * K + o_k
        keys += (tl.load(p_log_k + o_log, mask=m_k & (t < accepted), other=0.0),)
        decays += (tl.load(p_log_decay + o_log, mask=m_k & (t < accepted), other=1.0),)
    return keys, decays, values


@triton.jit
def add_accepted_tokens(b_S, b_scale, keys, decays, values, TP: tl.constexpr):
    """S <- Diag(c_n) S + sum_j x_nj u_j^T: every element of the state meets one product a token."""
    b_c = tl.full([b_S.shape[1]], 1.0, tl.float32)
    xs = ()
    for back in tl.static_range(TP):
        xs += (keys[TP - 1 - back].to(tl.float32) * b_c,)  # [KP]
        b_c = b_c * decays[TP - 1 - back]
    b_S = b_S * b_c[None, :]
    for back in tl.static_range(TP):
        b_S = tl.fma(values[TP - 1 - back][:, None], xs[back][None, :], b_S)
    return b_S, b_scale * b_c


@kernel
def draft_kernel(
    p_v, p_o, p_states, p_scales, p_residual, p_slots, p_generation, p_vectors, p_coefficients,
    p_log_u, p_log_generation, p_past_k, p_past_decay, p_past_u, p_past_generation, p_accepted,
    T, T_past, HV, CAPACITY, s_vb, s_vt, s_vh,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, TP: tl.constexpr, PAST: tl.constexpr, ALIGN: tl.constexpr,
    V_FIRST: tl.constexpr, FEEDBACK: tl.constexpr, PRODUCT: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """o and u of T <= TP tokens from the state S of slot slots[n]. S^T [BV, KP] is read once and, but for PAST, not written.

    PAST > 0: up to PAST tokens of an earlier draft of the same slots are replayed first, and that state is written back.
    Grid: (N * HV * cdiv(V, BV),), blocks of V fastest, then heads.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_p = tl.program_id(0)
    i_v, i_nh = i_p % NV, i_p // NV
    i_n, i_h = (i_nh // HV).to(tl.int64), i_nh % HV
    slot, inside = slot_of(p_slots, i_n, CAPACITY)
    o_k, o_v = tl.arange(0, KP), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_state = m_v[:, None] & m_k[None, :]
    o_state = state_offsets(slot * HV + i_h, o_v, o_k, K, V, V_FIRST)
    o_scale = ((slot * HV + i_h) * K + o_k) * NV + i_v
    b_S, b_scale = load_state(p_states, p_scales, p_residual, o_state, o_scale, m_state & inside, m_k & inside, FEEDBACK)
    p_v += (i_n * s_vb + i_h.to(tl.int64) * s_vh) * ALIGN + o_v
    vs = ()
    for t in tl.static_range(TP):
        vs += (tl.load(p_v + t * s_vt * ALIGN, mask=m_v & (t < T), other=0.0),)  # [BV]
    wait_for_last(CHAINED)  # for `tokens_kernel`, which began after all that ever wrote a state
    p_vectors += i_nh.to(tl.int64) * (2 * TP * KP)
    p_of_k = p_coefficients + i_nh.to(tl.int64) * (2 * TP * TP)
    p_of_q = p_of_k + TP * TP
    generation = tl.load(p_log_generation + i_n)
    if PAST:
        accepted = tl.minimum(tl.load(p_accepted + i_n).to(tl.int32), T_past)
        accepted = tl.where((generation >= 0) & (tl.load(p_past_generation + i_n) == generation), accepted, 0)
        i_past = i_n * T_past * HV + i_h
        moves = accepted > 0
        keys, decays, values = load_accepted_tokens(p_past_k, p_past_decay, p_past_u, i_past, HV, accepted, o_k, o_v, m_k, m_v, K, V, PAST)
        b_new, b_scale = add_accepted_tokens(b_S, b_scale, keys, decays, values, PAST)
        if p_states.dtype.element_ty != tl.float32:  # the tokens see the state as it is stored
            b_new, _ = store_state(p_states, p_scales, p_residual, o_state, o_scale, m_state & moves, m_k & moves, b_new, b_scale, FEEDBACK)
        if p_states.dtype.element_ty == tl.int8:  # in floats the replay of nothing is what was read
            b_new = tl.where(moves, b_new, b_S)
        b_S = b_new
    # All loads come before the stores, which they cannot overtake. Eight tokens have too many numbers to keep beside the state.
    if TP == 4:
        of_k, of_q = load_triangle(p_of_k, TP), load_triangle(p_of_q, TP)
    us, os = state_times_vectors(b_S, p_vectors, o_k, BV, KP, TP, PRODUCT)
    if TP != 4:
        of_k, of_q = load_triangle(p_of_k, TP), load_triangle(p_of_q, TP)
    if PAST and p_states.dtype.element_ty == tl.float32:
        tl.store(p_states + o_state, b_S, mask=m_state & moves)
    b_us, b_os = (), ()
    for t in tl.static_range(TP):
        b_u, b_o = us[t] + vs[t].to(tl.float32) * of_k[t * (t + 1) // 2 + t], os[t]  # [BV]
        for j in tl.static_range(t):
            b_u += b_us[j] * of_k[t * (t + 1) // 2 + j]
            b_o += b_us[j] * of_q[t * (t + 1) // 2 + j]
        b_us += (b_u,)
        b_os += (b_o + b_u * of_q[t * (t + 1) // 2 + t],)
    for t in tl.static_range(TP):
        m_out = m_v & (t < T)
        o_out = ((i_n * T + t) * HV + i_h) * V + o_v
        tl.store(p_log_u + o_out, b_us[t], mask=m_out)
        tl.store(p_o + o_out, round_to(tl.where(generation >= 0, b_os[t], 0.0), p_o.dtype.element_ty), mask=m_out)


@kernel
def commit_kernel(
    p_states, p_scales, p_residual, p_slots, p_generation, p_accepted, p_log_k, p_log_decay, p_log_u, p_log_generation,
    T, HV,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, TP: tl.constexpr, V_FIRST: tl.constexpr, FEEDBACK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """The first accepted[n] tokens of the log into the states: what decoding them leaves.

    Skipped: rows that were skipped before, and slots that have changed hands since. Programs go from the last row to the first: the states
    that `draft_kernel` read last are still in the cache.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    wait_for_last(CHAINED)
    i_p = tl.num_programs(0) - 1 - tl.program_id(0)
    i_v, i_nh = i_p % NV, i_p // NV
    i_n, i_h = (i_nh // HV).to(tl.int64), i_nh % HV
    accepted = tl.minimum(tl.load(p_accepted + i_n).to(tl.int32), T)
    drafted = tl.load(p_log_generation + i_n)
    slot = tl.load(p_slots + i_n).to(tl.int64)
    if (accepted > 0) & (drafted >= 0) & (slot >= 0):  # all three at once: loaded in here, the slot would come later
        o_k, o_v = tl.arange(0, KP), i_v * BV + tl.arange(0, BV)
        m_k, m_v = o_k < K, o_v < V
        m_state = m_v[:, None] & m_k[None, :]
        o_state = state_offsets(slot * HV + i_h, o_v, o_k, K, V, V_FIRST)
        o_scale = ((slot * HV + i_h) * K + o_k) * NV + i_v
        i_t = i_n * T * HV + i_h
        b_S, b_scale = load_state(p_states, p_scales, p_residual, o_state, o_scale, m_state, m_k, FEEDBACK)
        same = tl.load(p_generation + slot) == drafted  # found out while the state is on its way
        keys, decays, values = load_accepted_tokens(p_log_k, p_log_decay, p_log_u, i_t, HV, accepted, o_k, o_v, m_k, m_v, K, V, TP)
        b_S, b_scale = add_accepted_tokens(b_S, b_scale, keys, decays, values, TP)
        store_state(p_states, p_scales, p_residual, o_state, o_scale, m_state & same, m_k & same, b_S, b_scale, FEEDBACK)


def padded_tokens(tokens: int) -> int:
    """4 or 8: a draft's length as the kernels are compiled for it."""
    return max(4, triton.next_power_of_2(tokens))


@lru_cache(maxsize=1024)
def launch_tokens(problem: Problem, layout: Layout, capacity: int, fetched: tuple[int, int, int], cut: Cut) -> Launch:
    """fetched: from which head of which row on, and up to which, states are asked for; and the bytes of one."""
    sizes = dict(T=problem.T, H=problem.H, HV=problem.HV, CAPACITY=capacity, K=problem.K, KP=padded(problem.K), TP=padded_tokens(problem.T))
    sizes |= dict(zip(("fetch_from", "fetch_to", "fetch_bytes"), fetched, strict=True))
    values = sizes | strides(layout) | activations(problem) | dict(ALIGN=layout.align, CHAINED=cut.chained)
    return Launch(tokens_kernel, problem.N + problem.N * problem.HV, values, **cut.options)


@lru_cache(maxsize=1024)
def launch_draft(problem: Problem, layout: Layout, pool: Any, capacity: int, past: int | None, product: str, cut: Cut) -> Launch:
    """pool: the sizes of its states; past: tokens of an earlier draft; None: there is none."""
    grid = problem.N * problem.HV * -(-problem.V // cut.block_v)
    sizes = dict(T=problem.T, T_past=past or 0, HV=problem.HV, CAPACITY=capacity, TP=padded_tokens(problem.T))
    sizes |= dict(PAST=0 if past is None else padded_tokens(past), ALIGN=layout.align, PRODUCT=product, CHAINED=cut.chained)
    return Launch(draft_kernel, grid, sizes | pool_states(pool, cut) | strides(layout), **cut.options)


@lru_cache(maxsize=1024)
def launch_commit(rows: int, tokens: int, pool: Any, cut: Cut) -> Launch:
    """rows: of the draft; pool: the sizes of its states."""
    sizes = dict(T=tokens, HV=pool.HV, TP=padded_tokens(tokens), CHAINED=cut.chained)
    return Launch(commit_kernel, rows * pool.HV * -(-pool.V // cut.block_v), sizes | pool_states(pool, cut), **cut.options)
