// Row blocks of A_kk and A_qk from decayed tiles, 64 channels: a warp has both of its block, which meet the same columns.
#pragma once
#include "hopper_prepare_keep.cuh"
#include "hopper_prepare_pairs.cuh"

namespace kda::hopper {

constexpr int kSteps = 64 / 16;  // of 16 channels

// The block's own pairs, see `near_pairs` and `bounded_pairs`; rows are left moved to the boundary between their groups.
template <bool BOUNDED>
__device__ __forceinline__ void near_both(const Place& at, uint32_t (&q)[kSteps][4], uint32_t (&k)[kSteps][4], Square& near_q,
                                          Square& near_k) {
  using P = Places<64>;
  const uint32_t tile = at.smem + at.block * P::tile;
  const uint32_t rows = tile + row_fragment<64>(at.lane), columns = tile + column_fragment<64>(at.lane);
  float cross_q[4] = {}, cross_k[4] = {};
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    uint32_t b[4];
    load_matrices(q[s], at_step(rows, s) + P::rows_q), load_matrices(k[s], at_step(rows, s) + P::rows_k);
    load_matrices(b, at_step(columns, s) + P::columns);
    mma_bf16(near_k.x[0], k[s], b[0], b[1]), mma_bf16(near_k.x[1], k[s], b[2], b[3]);
    mma_bf16(near_q.x[0], q[s], b[0], b[1]), mma_bf16(near_q.x[1], q[s], b[2], b[3]);
    if (!BOUNDED) {
      const Powers powers(at.smem + P::to_boundary + at.block * 64 * 4, at.lane, s);
      move_second(k[s], powers), move_second(q[s], powers);
      b[0] = multiply_bf16(b[0], powers.low_half.x), b[1] = multiply_bf16(b[1], powers.high_half.x);
      mma_bf16(cross_k, k[s], b[0], b[1]), mma_bf16(cross_q, q[s], b[0], b[1]);
    }
  }
  if (!BOUNDED) near_q.x[0][2] = cross_q[2], near_q.x[0][3] = cross_q[3], near_k.x[0][2] = cross_k[2], near_k.x[0][3] = cross_k[3];
}

// Rows of a block after the first, from its start on, as halves.
template <bool BOUNDED>
__device__ __forceinline__ void from_start(const Place& at, uint32_t (&rows)[kSteps][4]) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    if (!BOUNDED) {
      const Powers powers(at.smem + Places<64>::to_start + (at.block - 1) * 64 * 4, at.lane, s);
      move_second(rows[s], powers);
      rows[s][0] = multiply_bf16(rows[s][0], powers.low_half.x), rows[s][2] = multiply_bf16(rows[s][2], powers.high_half.x);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) rows[s][i] = pack_half(low(rows[s][i]), high(rows[s][i]));
  }
}

// Row block of A_qk and of -A_kk, with the inverse of its block, to shared memory, as halves: squares take the place of rows and columns,
// which no other warp reads. KEPT: A_kk without strengths, and M and `lower` of the block.
template <bool BOUNDED, bool L2NORM, bool KEPT>
__device__ __forceinline__ void both_rows(const Place& at, const Shared<64>& shared) {
  using P = Places<64>;
  const int lane = at.lane;
  const uint32_t tile = at.smem + at.block * P::tile, tails = at.smem + P::tails + column_fragment<64>(lane);
  uint32_t q[kSteps][4], k[kSteps][4];
  Square near_q = {}, near_k = {};
  near_both<BOUNDED>(at, q, k, near_q, near_k);
  __syncwarp();  // the rows are read
  float strength[2];  // of the two rows a lane holds
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = at.block * kBlock + square_row(2 * i, lane);
    const float norm = L2NORM ? 1.0f : shared.norms[1][row];
    strength[i] = KEPT ? -1.0f : -shared.betas[row] * norm * norm;
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int i = square_row(r, lane), j = square_column(n, r, lane);
      near_k.x[n][r] = j < i ? (KEPT ? 1.0f : strength[r / 2]) * near_k.x[n][r] : 0.0f;
      near_q.x[n][r] = j < i ? near_q.x[n][r] : 0.0f;
      if (j == i) near_q.x[n][r] = shared.norms[2][at.block * kBlock + i];
    }
  store_square<P::pitch>(tile + P::rows_q + at.block * P::next, near_q, lane);
  if constexpr (KEPT)
    keep_diagonal<L2NORM>(at, shared, tile + P::rows_k, near_k);
  else
    store_square<P::pitch_x>(tile + P::rows_k + P::x, unit_lower_inverse(near_k, lane), lane);
  if (at.block == 0) return;
  from_start<BOUNDED>(at, q), from_start<BOUNDED>(at, k);
#pragma unroll 1
  for (int j = 0; j < at.block; ++j) {
    uint32_t b[kSteps][4];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) load_matrices(b[s], at_step(tails, s) + j * P::tile);
    if (j < at.block - 1) {  // columns end with block j: decay them over the blocks between
      const uint32_t factors = at.smem + P::between + (j == 1 ? 1 : at.block == 2 ? 0 : 2) * 64 * 2 + lane % 4 * 4;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const uint32_t f0 = load_shared_word(factors + s * 32), f1 = load_shared_word(factors + s * 32 + 16);
        b[s][0] = multiply_half(b[s][0], f0), b[s][1] = multiply_half(b[s][1], f1);
        b[s][2] = multiply_half(b[s][2], f0), b[s][3] = multiply_half(b[s][3], f1);
      }
    }
    Square far_q = {}, far_k = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      mma_half(far_k.x[0], k[s], b[s][0], b[s][1]), mma_half(far_k.x[1], k[s], b[s][2], b[s][3]);
      mma_half(far_q.x[0], q[s], b[s][0], b[s][1]), mma_half(far_q.x[1], q[s], b[s][2], b[s][3]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) far_k.x[n][r] *= strength[r / 2];
    store_square<P::pitch>(tile + P::rows_q + j * P::next, far_q, lane);
    store_square<P::pitch>(tile + P::rows_k + j * P::next, far_k, lane);
  }
}

}  // namespace kda::hopper
