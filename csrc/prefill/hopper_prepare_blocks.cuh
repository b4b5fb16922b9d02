// Stage intra of a block of 16 tokens and value head, everything that needs no state: the formulas of hopper_prepare_chunk.cuh with a block
// in place of a chunk. A thread block of two warps: a group of eight tokens each while decays are formed, then A_kk and its inverse (even)
// and A_qk (odd), then half the channels of k_solved each.
#pragma once
#include "hopper_block_record.h"
#include "hopper_prepare_decay.cuh"
#include "hopper_prepare_pairs.cuh"

namespace kda::hopper {

// Shared memory: tiles of q rows, k rows, columns and tails, the float arrays, and for any gate the powers of two that move pairs to the
// boundary between groups. Once A is done, X and A_solved^T lie over the k rows, A_qk over the q rows, k_solved over the columns.
struct BlockPlaces {
  static constexpr int tile = kBlock * 256;
  static constexpr int rows_q = 0, rows_k = tile, columns = 2 * tile, tails = 3 * tile, sums = 4 * tile;
  static constexpr int betas = sums + 2 * 128 * 4, norms = betas + kBlock * 4, to_boundary = norms + 3 * kBlock * 4;
  static constexpr int bytes(bool bounded) { return bounded ? to_boundary : to_boundary + 128 * 4; }
  static constexpr int pitch = (kBlock + 8) * 2, stage_a = 1024, threads = 64, blocks = 12;  // on a multiprocessor
};
static_assert(BlockPlaces::blocks * (BlockPlaces::bytes(false) + 1024) <= 228 * 1024, "");

struct BlockShared {
  float (&sums)[2][128];
  float (&betas)[kBlock];
  float (&norms)[3][kBlock];
};

// A number as a power of two, at least 2^-126, times one in [1, 2) or 0.
__device__ __forceinline__ float power_below(float x) {
  const uint32_t exponent = __float_as_uint(x) & 0x7f800000u;
  return __uint_as_float(exponent > 0x00800000u ? exponent : 0x00800000u);
}

// Decayed tiles of a group's tokens; k_in, q_decayed and the decay go to the record. Rows of q are multiplied by the scale but for its
// power of two. The record has a row times powers of two: that rounds nothing.
template <bool BOUNDED, bool L2NORM>
__device__ __forceinline__ void decay_group(const HopperForward& p, const Inputs<128>& x, const BlockShared& shared, uint32_t smem, int odd,
                                            int lane, uint8_t* record) {
  using P = BlockPlaces;
  using R = BlockRecord;
  const float4 first = *reinterpret_cast<const float4*>(&shared.sums[0][4 * lane]);
  const float4 second = *reinterpret_cast<const float4*>(&shared.sums[1][4 * lane]);
  const float one[4] = {first.x, first.y, first.z, first.w}, two[4] = {second.x, second.y, second.z, second.w};
  const float power = power_below(p.scale), rest = p.scale * inverse_power(power);
  float sum[4], before[4], to_end[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) sum[c] = BOUNDED && odd ? one[c] : 0.0f, before[c] = 0.0f, to_end[c] = one[c] + two[c];
  if (!odd) {
    float decay[4];
    exponentials(decay, to_end);
    *reinterpret_cast<float4*>(record + R::decay + 16 * lane) = make_float4(decay[0], decay[1], decay[2], decay[3]);
  }
  if (BOUNDED) {
    exponentials(to_end, to_end);
  } else {
    float to_boundary[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float whole = rintf(one[c]);
      if (odd) sum[c] = one[c] - whole, before[c] = whole;  // from the whole number at the boundary on
      const float m = rintf(sum[c] + ((x.g[0][c] + x.g[1][c]) + (x.g[2][c] + x.g[3][c])));
      sum[c] -= m, before[c] += m;
      to_boundary[c] = odd ? m : whole - m;
      to_end[c] = exp2_fast(0.5f * (sum[c] + (odd ? two[c] : one[c] + two[c])));  // twice: a column may have grown by more
    }
    store_powers(smem + P::to_boundary, odd, lane, to_boundary);
  }
  exponentials(before, before);
  const uint2 k_power = packed(before);
#pragma unroll
  for (int c = 0; c < 4; ++c) before[c] *= power;
  const uint2 q_power = packed(before);
  uint32_t own = smem + odd * kTokens * 256 + lane_offset<128>(0, lane);
  const int unit = (lane & 15) >> 1 << 4 | (lane & 1) << 3;
  uint64_t out = reinterpret_cast<uint64_t>(record + (lane >> 4) * R::half + odd * kTokens * 128 + unit);
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (t > 0) own ^= (t ^ (t - 1)) << 4, out ^= (t ^ (t - 1)) << 4;
    KDA_HIDE_WORD(own);
    KDA_HIDE(out);
    float e[4], y[4], z[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) sum[c] += x.g[t][c], e[c] = exp2_fast(sum[c]);
    const uint32_t place = own + t * 256;
    const float inverse_q = x.norm_q(t), inverse_k = x.norm_k(t);
    const auto recorded = [&](uint2 row, uint2 by, float inverse) {
      row = {multiply_bf16(row.x, by.x), multiply_bf16(row.y, by.y)};
      if (L2NORM) return row;
      const uint32_t norm = pack_bf16(inverse_power(inverse), inverse_power(inverse));
      return uint2{multiply_bf16(row.x, norm), multiply_bf16(row.y, norm)};
    };
    scaled(y, load_shared_pair(place + P::rows_q), inverse_q * rest), multiply(y, e);
    const uint2 q = packed(y);
    store_shared(place + P::rows_q, q);
    store_global(out + R::q_decayed + t * 128, recorded(q, q_power, inverse_q));
    scaled(z, load_shared_pair(place + P::rows_k), inverse_k);
#pragma unroll
    for (int c = 0; c < 4; ++c) y[c] = z[c] * e[c];
    const uint2 k = packed(y);
    store_shared(place + P::rows_k, k);
    store_global(out + R::k_in + t * 128, BOUNDED && L2NORM ? k : recorded(k, k_power, inverse_k));
#pragma unroll
    for (int c = 0; c < 4; ++c) z[c] *= exp2_fast(-sum[c]);
    store_shared(place + P::columns, packed(z));
    multiply(z, to_end);
    if (!BOUNDED) multiply(z, to_end);
    store_shared(place + P::tails, packed_half(z));
  }
}

// The pairs of rows, k's or q's, with columns.
template <bool BOUNDED>
__device__ __forceinline__ Square block_pairs(uint32_t smem, int odd, int lane) {
  using P = BlockPlaces;
  const uint32_t rows = smem + (odd ? P::rows_q : P::rows_k) + row_fragment<128>(lane);
  const uint32_t columns = smem + P::columns + column_fragment<128>(lane);
  Square near = {};
  if (BOUNDED) {
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      uint32_t a[4], b[4];
      load_matrices(a, at_step(rows, s)), load_matrices(b, at_step(columns, s));
      mma_bf16(near.x[0], a, b[0], b[1]), mma_bf16(near.x[1], a, b[2], b[3]);
    }
  } else {
    pairs_of_groups(rows, columns, 0, smem + P::to_boundary, lane, near);
  }
  return near;
}

template <Gate GATE, bool BOUNDED, bool G32, bool L2NORM>
__device__ __forceinline__ void prepare_block(const HopperForward& p, uint32_t slot) {
  using P = BlockPlaces;
  using R = BlockRecord;
#ifdef KDA_EMULATE
  uint8_t* bytes = memory;
#else
  extern __shared__ __align__(1024) uint8_t bytes[];
#endif
  const int lane = threadIdx.x % 32, odd = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int block = blockIdx.x % 4, head = blockIdx.x / 4, group = 2 * block + odd;
  const uint32_t smem = shared_address(bytes);
  const BlockShared shared{*reinterpret_cast<float(*)[2][128]>(bytes + P::sums), *reinterpret_cast<float(*)[kBlock]>(bytes + P::betas),
                           *reinterpret_cast<float(*)[3][kBlock]>(bytes + P::norms)};
  const Span span = chunk_span(p, slot, lane);
  if (span.length <= 0) return;
  uint8_t* record = static_cast<uint8_t*>(p.workspace) + (slot * p.HV + head) * R::chunk_bytes + block * R::bytes;

  Inputs<128> x;
  const int row = group * kTokens + lane;
  const bool has_beta = lane < kTokens && row < span.length;
  uint32_t raw_beta = 0;
  if (has_beta) raw_beta = ask_for_beta(p, beta_offset(p, span, row, head));
  const uint32_t own = smem + odd * kTokens * 256;
  load_tokens<128, GATE, G32>(p, span, head, group, lane, own + P::rows_q, own + P::rows_k, x);
  if (lane < kTokens) shared.betas[odd * kTokens + lane] = has_beta ? write_strength(p, beta_of(p, raw_beta)) : 0.0f;
  if (!L2NORM) keep_norms(x, shared, odd, lane);
  exact_diagonal(x, shared, odd, lane);
  float sum[4] = {};
#pragma unroll
  for (int t = 0; t < kTokens; ++t)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (!BOUNDED) x.g[t][c] = max_or_nan(x.g[t][c], kFloor);
      sum[c] += x.g[t][c];
    }
  *reinterpret_cast<float4*>(&shared.sums[odd][4 * lane]) = make_float4(sum[0], sum[1], sum[2], sum[3]);
  __syncthreads();
  decay_group<BOUNDED, L2NORM>(p, x, shared, smem, odd, lane, record);
  __syncthreads();

  Square near = block_pairs<BOUNDED>(smem, odd, lane);
  __syncwarp();  // the rows are read: squares take their place
  const float power = power_below(p.scale), rest = p.scale * inverse_power(power);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int i = square_row(r, lane), j = square_column(n, r, lane);
      const float norm = L2NORM ? 1.0f : shared.norms[1][i];
      near.x[n][r] = j < i ? (odd ? near.x[n][r] : -shared.betas[i] * norm * norm * near.x[n][r]) : 0.0f;
      if (odd && j == i) near.x[n][r] = shared.norms[2][i] * rest;
    }
  if (odd)
    store_square<P::pitch>(smem + P::rows_q, near, lane);
  else
    store_square<P::pitch>(smem + P::rows_k, unit_lower_inverse(near, lane), lane);
  __syncthreads();

  uint32_t solved[4];  // X^T
  load_matrices_transposed(solved, square_unit<P::pitch>(smem + P::rows_k, (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1));
  float strength[2];  // of the two rows a lane holds
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = square_row(2 * i, lane);
    strength[i] = shared.betas[row] * (L2NORM ? 1.0f : shared.norms[1][row]);
  }
  float acc[8][4] = {};  // k_solved
  const uint32_t tails = smem + P::tails + row_fragment<128>(lane) + odd * 128;
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    uint32_t b[4];
    load_matrices_transposed(b, tails ^ (s << 5));
    mma_half(acc[2 * s], solved, b[0], b[1]), mma_half(acc[2 * s + 1], solved, b[2], b[3]);
  }
  const uint32_t stage = smem + P::columns + odd * R::solved_half;
#pragma unroll
  for (int n = 0; n < 8; n += 2) {  // matrices (tokens 0-7, 8-15) x (channels 8 n, 8 n + 8)
    const uint32_t words[4] = {pack_bf16(acc[n][0] * strength[0], acc[n][1] * strength[0]),
                               pack_bf16(acc[n][2] * strength[1], acc[n][3] * strength[1]),
                               pack_bf16(acc[n + 1][0] * strength[0], acc[n + 1][1] * strength[0]),
                               pack_bf16(acc[n + 1][2] * strength[1], acc[n + 1][3] * strength[1])};
    const int row = lane & 15;
    store_matrices(stage + row * 128 + (((n + (lane >> 4)) ^ (row & 7)) << 4), words);
  }
  if (odd) {
    Square square = {};
    multiply_transposed<P::pitch>(square, solved, smem + P::rows_q, lane);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = square_row(2 * half, lane), column = square_column(n, 0, lane);
        const float f = strength[half] * power;
        const float f0 = L2NORM ? f : f * shared.norms[0][column], f1 = L2NORM ? f : f * shared.norms[0][column + 1];
        store_shared(smem + P::rows_k + P::stage_a + row * 32 + ((n ^ (row >> 2 & 1)) << 4) + (lane % 4) * 4,
                     pack_bf16(square.x[n][2 * half] * f0, square.x[n][2 * half + 1] * f1));
      }
  }
  fence_async();
  __syncwarp();
  if (lane == 0) {
    bulk_store(record + R::k_solved + odd * R::solved_half, stage, R::solved_half);
    if (odd) bulk_store(record + R::a_solved, smem + P::rows_k + P::stage_a, 512);
    bulk_store_wait();
  }
}

}  // namespace kda::hopper
