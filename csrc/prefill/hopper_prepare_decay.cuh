// Of a group of eight tokens: the tiles of rows, columns and tails, decayed.
//
// Off the diagonal, rows are decayed from the start of their own block and columns up to there: both factors <= 1. On it, where the gate is
// bounded, rows and columns of 16 tokens refer to their start. For any gate a group of eight tokens has a reference of its own, the
// whole number m nearest to the log2-decay s at its middle: rows 2^(s - m), columns 2^(m - s). Gates are raised to kFloor, so that both
// stay within 2^117. Pairs of one group meet as they are. Rows of a block's second group meet columns of its first after both are moved to
// the whole number x nearest to the boundary between them, by powers of two: that rounds nothing, and only pairs that vanish can underflow.
// Keys and queries are normalised throughout. Where the caller does not want that, they are divided by the power of two above their norm,
// which rounds nothing: X of such keys and beta |k|^2 is similar to the one asked for, and the powers go to the edges.
#pragma once
#include "hopper.h"
#include "hopper_prepare_block.cuh"

namespace kda::hopper {

constexpr float kFloor = -29.0f;  // log2-decays below are raised to it: under float32's resolution, and four of them fit bfloat16

// 1 / x of a power of two, by its exponent alone.
__device__ __forceinline__ float inverse_power(float x) { return __uint_as_float(0x7f000000u - __float_as_uint(x)); }

// Inputs that come without norms in the kernel are exact, and scaling them by powers of two keeps them so.
template <int HEAD, typename Arrays>
__device__ __forceinline__ void keep_norms(Inputs<HEAD>& x, const Arrays& shared, int warp, int lane) {
  x.inverse_norm = __uint_as_float(__float_as_uint(x.inverse_norm) & 0x7f800000u);
  if (HEAD == 64 || lane % 2 == 0)
    shared.norms[norm_kind<HEAD>(lane)][warp * Warp<HEAD>::tokens + norm_token<HEAD>(lane)] = inverse_power(x.inverse_norm);
}

// The diagonal of A_qk in float32: where gates are strong it is most of the output.
template <int HEAD, typename Arrays>
__device__ __forceinline__ void exact_diagonal(const Inputs<HEAD>& x, const Arrays& shared, int warp, int lane) {
  const int t = lane / 4;
#pragma unroll
  for (int group = 0; group < Warp<HEAD>::groups; ++group) {
    const float dot = x.dot[group] * x.norm_q_of(group, t) * x.norm_k_of(group, t);
    if (lane % 4 == t / 2) shared.norms[2][warp * Warp<HEAD>::tokens + group * kTokens + t] = dot;
  }
}

// Two words of four channels, from 4 lane on, every second word of a table.
__device__ __forceinline__ void store_powers(uint32_t table, int which, int lane, const float (&exponent)[4]) {
  float y[4];
  exponentials(y, exponent);
  const uint2 words = packed(y);
  store_shared(table + lane * 16 + which * 4, words.x), store_shared(table + lane * 16 + 8 + which * 4, words.y);
}

// The group's reference m: `sum`, the log2-decay before the group's first token, becomes sum - m, and `before` that of the chunk up to m.
// Writes the powers of two that move the group's tiles.
template <int HEAD>
__device__ __forceinline__ void refer(const Inputs<HEAD>& x, const Shared<HEAD>& shared, const Place& at, float (&sum)[4],
                                      float (&before)[4]) {
  using P = Places<HEAD>;
  const int channels = Warp<HEAD>::channels(at.lane);
  float boundary[4] = {}, to_boundary[4], to_start[4];
  add_sums(boundary, shared, 2 * at.block, 2 * at.block + 1, at.lane);
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float whole = rintf(boundary[c]);
    if (at.odd) sum[c] = boundary[c] - whole, before[c] += whole;  // from the whole number at the boundary on
    const float m = rintf(sum[c] + ((x.g[0][c] + x.g[1][c]) + (x.g[2][c] + x.g[3][c])));
    sum[c] -= m, before[c] += m;
    to_boundary[c] = at.odd ? m : whole - m, to_start[c] = at.odd ? whole : m;
  }
  store_powers(at.smem + P::to_boundary + at.block * HEAD * 4, at.odd, channels, to_boundary);
  if (at.block > 0) store_powers(at.smem + P::to_start + (at.block - 1) * HEAD * 4, at.odd, channels, to_start);
}

// Decayed tiles of a group's tokens; k_in, q_decayed and the decay go to the record. Rows meet columns that have grown, and are bfloat16;
// tails, which cannot exceed 1, are float16.
template <int HEAD, bool BOUNDED, bool L2NORM>
__device__ __forceinline__ void decay_tokens(const HopperForward& p, Inputs<HEAD>& x, const Shared<HEAD>& shared, const Place& at,
                                             uint8_t* record) {
  using P = Places<HEAD>;
  using W = Warp<HEAD>;
  using R = Record<HEAD>;
  const int lane = at.lane, first = 2 * at.block, group = group_of<HEAD>(at), channels = W::channels(lane);
  float before[4] = {}, before_q[4], total[4] = {}, sum[4] = {}, tail[4];
  add_sums(before, shared, 0, first, lane), add_sums(total, shared, first, first + 2, lane);
  if (group == 0) {
    float all[4] = {};
    add_sums(all, shared, 0, kGroups, lane), exponentials(all, all);
    *reinterpret_cast<float4*>(record + R::record_decay + 16 * channels) = make_float4(all[0], all[1], all[2], all[3]);
  }
  if (group == 2) {
    float both[4] = {};
    add_sums(both, shared, 2, 6, lane), exponentials(both, both);
    shared.between[2][channels] = packed_half(both);
  }
  if (BOUNDED) {
    add_sums(sum, shared, first, first + at.odd, lane);
  } else {
    refer(x, shared, at, sum, before);
#pragma unroll
    for (int c = 0; c < 4; ++c) tail[c] = sum[c];
    add_sums(tail, shared, group, first + 2, lane);
#pragma unroll
    for (int c = 0; c < 4; ++c) tail[c] = exp2_fast(0.5f * tail[c]);  // twice: a column may have grown by more than the whole has decayed
  }
  exponentials(before, before), exponentials(total, total);
  if (group == 2 || group == 4) shared.between[at.block - 1][channels] = packed_half(total);
#pragma unroll
  for (int c = 0; c < 4; ++c) before_q[c] = before[c] * p.scale;
  if (!at.odd && at.block > 0)
    *reinterpret_cast<float4*>(&shared.totals[at.block - 1][4 * channels]) = make_float4(total[0], total[1], total[2], total[3]);
  // Where a lane's channels of token t lie, but for t rows: units are turned by t, and from token to token these bits change in place.
  uint32_t own = at.smem + at.block * P::tile + (HEAD == 128 ? at.odd * kTokens * 256 : 0) + lane_offset<HEAD>(0, lane);
  uint64_t out = reinterpret_cast<uint64_t>(record + at.warp * W::tokens * 128 + record_offset<HEAD>(0, lane));
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (t > 0) own ^= (t ^ (t - 1)) << 4, out ^= (t ^ (t - 1)) << 4;
    KDA_HIDE_WORD(own);
    KDA_HIDE(out);
    float e[4], y[4], z[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) sum[c] += x.g[t][c], e[c] = exp2_fast(sum[c]);
    const uint32_t place = own + t * W::row;
    const float inverse_q = x.norm_q(t), inverse_k = x.norm_k(t);
    scaled(y, load_shared_pair(place + P::rows_q), inverse_q), multiply(y, e);
    store_shared(place + P::rows_q, packed(y));
#pragma unroll
    for (int c = 0; c < 4; ++c) y[c] *= L2NORM ? before_q[c] : before_q[c] * inverse_power(inverse_q);
    store_global(out + R::q_decayed + t * 128, packed(y));
    scaled(z, load_shared_pair(place + P::rows_k), inverse_k);
#pragma unroll
    for (int c = 0; c < 4; ++c) y[c] = z[c] * e[c];
    store_shared(place + P::rows_k, packed(y));
#pragma unroll
    for (int c = 0; c < 4; ++c) y[c] *= L2NORM ? before[c] : before[c] * inverse_power(inverse_k);
    store_global(out + R::k_in + t * 128, packed(y));
#pragma unroll
    for (int c = 0; c < 4; ++c) z[c] *= exp2_fast(-sum[c]);
    store_shared(place + P::columns, packed(z));
    if (BOUNDED)
      multiply(z, total);
    else
      multiply(z, tail), multiply(z, tail);
    store_shared(place + P::tails, packed_half(z));
  }
}

}  // namespace kda::hopper
