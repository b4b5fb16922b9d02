// X = (I + A_kk)^-1 by columns of blocks, and what is solved with it: A_solved^T and k_solved, staged for the record.
#pragma once
#include "hopper.h"
#include "hopper_prepare_block.cuh"

namespace kda::hopper {

// A operands: the blocks (block + d, block) of X, transposed, as halves.
template <int HEAD>
__device__ __forceinline__ void solve_columns(const Place& at, uint32_t (&solved)[4][4]) {
  using P = Places<HEAD>;
  const uint32_t k_rows = at.smem + P::rows_k;
  load_matrices_transposed(solved[0], square_unit<P::pitch_x>(k_rows + at.block * P::tile + P::x,
                                                              (at.lane & 7) + ((at.lane >> 4) << 3), (at.lane >> 3) & 1));
#pragma unroll
  for (int d = 1; d < 4; ++d) {
    if (at.block + d >= 4) continue;
    const uint32_t below = k_rows + (at.block + d) * P::tile;
    Square acc = {}, next = {};
#pragma unroll
    for (int e = 0; e < d; ++e) multiply_transposed<P::pitch>(acc, solved[e], below + (at.block + e) * P::next, at.lane);
    uint32_t a[4];
    half_operand(a, acc);
    multiply_transposed<P::pitch_x>(next, a, below + P::x, at.lane);
    half_operand(solved[d], next);
  }
}

// Where column block block + d of A_solved^T of this block is staged, with 64 channels.
__device__ __forceinline__ uint32_t stage_of(const Place& at, int d) {
  using P = Places<64>;
  if (d == 0 && at.block == 3) return at.smem + P::sums;
  return at.smem + at.block * P::tile + (d == 0 ? P::rows_k : P::rows_q) + (at.block + d) * P::next;
}

// Rows of A_solved^T of this block, every second column block where a pair of warps has it, staged for the record: those at and right of
// the diagonal. keep(i, sum) sees the sum of column block i, (A_qk X)^T, on its way.
template <int HEAD, bool L2NORM, typename Keep>
__device__ __forceinline__ void square_out(const HopperForward& p, const Place& at, const Shared<HEAD>& shared,
                                           const uint32_t (&solved)[4][4], const float (&strength)[2], Keep keep) {
  using P = Places<HEAD>;
  const int lane = at.lane;
  const uint32_t tile = at.smem + at.block * P::tile;
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    const int i = at.block + d;
    if (i >= 4 || (HEAD == 128 && i % 2 != at.odd)) continue;
    uint32_t to;
    if constexpr (HEAD == 64)
      to = stage_of(at, d);
    else
      to = tile + (d < 2 ? P::rows_k : P::rows_q) + P::stage_a + d % 2 * kSquare;
    Square acc = {};
#pragma unroll
    for (int e = 0; e <= d; ++e)
      multiply_transposed<P::pitch>(acc, solved[e], tile + P::rows_q + d * P::tile + (at.block + e) * P::next, lane);
    keep(i, acc);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = square_row(2 * half, lane), column = i * kBlock + square_column(n, 0, lane);
        const float f = strength[half] * p.scale;
        const float f0 = L2NORM ? f : f * shared.norms[0][column], f1 = L2NORM ? f : f * shared.norms[0][column + 1];
        store_shared(to + row * 32 + ((n ^ (row >> 2 & 1)) << 4) + (lane % 4) * 4,
                     pack_bf16(acc.x[n][2 * half] * f0, acc.x[n][2 * half + 1] * f1));
      }
  }
}

// Rows of k_solved of this block, 64 channels per warp: blocks from the nearest to the farthest, decayed on the way.
template <int HEAD>
__device__ __forceinline__ void keys_out(const Place& at, const Shared<HEAD>& shared, const uint32_t (&solved)[4][4],
                                         const float (&strength)[2]) {
  using P = Places<HEAD>;
  const int lane = at.lane, half = HEAD == 128 ? at.odd : 0;
  const uint32_t tails = at.smem + P::tails + at.block * P::tile + row_fragment<HEAD>(lane) + half * 128;
  float acc[8][4] = {};
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    if (at.block + d >= 4) continue;
    const float* factors = d == 0 ? nullptr : &shared.totals[at.block + d - 1][64 * half + 2 * (lane % 4)];
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      if (d > 0) {
        const float2 f0 = *reinterpret_cast<const float2*>(factors + 16 * s), f1 = *reinterpret_cast<const float2*>(factors + 16 * s + 8);
#pragma unroll
        for (int r = 0; r < 4; ++r) acc[2 * s][r] *= r % 2 ? f0.y : f0.x, acc[2 * s + 1][r] *= r % 2 ? f1.y : f1.x;
      }
      uint32_t b[4];
      load_matrices_transposed(b, (tails ^ (s << 5)) + d * P::tile);
      mma_half(acc[2 * s], solved[d], b[0], b[1]), mma_half(acc[2 * s + 1], solved[d], b[2], b[3]);
    }
  }
  const uint32_t stage = at.smem + P::stage_k + at.block * P::tile + half * 2048;
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = square_row(2 * i, lane);
      store_shared(stage + row * 128 + ((n ^ (row & 7)) << 4) + (lane % 4) * 4,
                   pack_bf16(acc[n][2 * i] * strength[i], acc[n][2 * i + 1] * strength[i]));
    }
}

}  // namespace kda::hopper
