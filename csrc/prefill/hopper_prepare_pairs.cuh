// Row blocks of A_kk and A_qk from decayed tiles, by pairs of warps: row block b of A_kk (even warp) and of A_qk (odd warp).
#pragma once
#include "hopper_prepare_block.cuh"

namespace kda::hopper {

// Pairs of the block's second group of rows with its first group of columns, both moved to the boundary. The rows stay there.
__device__ __forceinline__ void across_groups(float (&cross)[4], uint32_t (&rows)[4], uint32_t (&columns)[4], uint32_t powers) {
  const uint2 low_half = load_shared_pair(powers), high_half = load_shared_pair(powers + 32);
  columns[0] = multiply_bf16(columns[0], low_half.x), columns[1] = multiply_bf16(columns[1], high_half.x);
  rows[1] = multiply_bf16(rows[1], low_half.y), rows[3] = multiply_bf16(rows[3], high_half.y);
  mma_bf16(cross, rows, columns[0], columns[1]);
}

// Row block of A_kk (even warps) or A_qk (odd): the diagonal block and blocks j < block.
template <bool BOUNDED>
__device__ __forceinline__ void block_rows(const Place& at, Square& near, Square (&far)[3]) {
  constexpr int kSteps = kHead / 16;
  const uint32_t tile = at.smem + at.block * kTile, fragment = column_fragment(at.lane);
  const uint32_t rows = tile + (at.odd ? kRowsQ : kRowsK) + row_fragment(at.lane);
  uint32_t a[kSteps][4], b[4];
  float cross[4] = {};
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    load_matrices(a[s], rows ^ (s << 5)), load_matrices(b, (tile + kColumns + fragment) ^ (s << 5));
    mma_bf16(near.x[0], a[s], b[0], b[1]), mma_bf16(near.x[1], a[s], b[2], b[3]);
    if (!BOUNDED) across_groups(cross, a[s], b, at.smem + kToBoundary + at.block * kHead * 4 + at.lane % 4 * 8 + s * 64);
  }
  if (!BOUNDED) near.x[0][2] = cross[2], near.x[0][3] = cross[3];
  if (at.block > 0) {  // the rows as halves, as the tails are
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (!BOUNDED) {
        const uint32_t powers = at.smem + kToStart + (at.block - 1) * kHead * 4 + at.lane % 4 * 8 + s * 64;
        const uint2 low_half = load_shared_pair(powers), high_half = load_shared_pair(powers + 32);
        a[s][0] = multiply_bf16(a[s][0], low_half.x), a[s][2] = multiply_bf16(a[s][2], high_half.x);
        a[s][1] = multiply_bf16(a[s][1], low_half.y), a[s][3] = multiply_bf16(a[s][3], high_half.y);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) a[s][i] = pack_half(low(a[s][i]), high(a[s][i]));
    }
  }
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    if (j >= at.block) continue;
    const uint32_t columns = at.smem + kTails + j * kTile + fragment;
    if (j == at.block - 1) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        load_matrices(b, columns ^ (s << 5));
        mma_half(far[j].x[0], a[s], b[0], b[1]), mma_half(far[j].x[1], a[s], b[2], b[3]);
      }
    } else {  // columns end with block j: decay them over the blocks between
      const uint32_t factors = at.smem + kBetween + (j == 1 ? 1 : at.block == 2 ? 0 : 2) * kHead * 2 + at.lane % 4 * 4;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const uint32_t f0 = load_shared_word(factors + s * 32), f1 = load_shared_word(factors + s * 32 + 16);
        load_matrices(b, columns ^ (s << 5));
        mma_half(far[j].x[0], a[s], multiply_half(b[0], f0), multiply_half(b[1], f1));
        mma_half(far[j].x[1], a[s], multiply_half(b[2], f0), multiply_half(b[3], f1));
      }
    }
  }
  __syncwarp();  // the rows are read: squares take their place
}

// The pair's squares to shared memory, as halves: -A_kk with its block's inverse, A_qk.
template <bool L2NORM>
__device__ __forceinline__ void store_rows(const Place& at, const Shared& shared, Square& near, Square (&far)[3]) {
  const int lane = at.lane;
  const uint32_t to = at.smem + at.block * kTile + (at.odd ? kRowsQ : kRowsK);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int i = square_row(r, lane), j = square_column(n, r, lane), row = at.block * kBlock + i;
      const float norm = L2NORM ? 1.0f : shared.norms[1][row];
      const float factor = at.odd ? 1.0f : -shared.betas[row] * norm * norm;
      near.x[n][r] = j < i ? factor * near.x[n][r] : 0.0f;
      if (at.odd && j == i) near.x[n][r] = shared.norms[2][row];
#pragma unroll
      for (int m = 0; m < 3; ++m) far[m].x[n][r] *= factor;
    }
#pragma unroll
  for (int j = 0; j < 3; ++j)
    if (j < at.block) store_square(to + j * kBlock * 2, kPitch, far[j], lane);
  if (at.odd)
    store_square(to + at.block * kBlock * 2, kPitch, near, lane);
  else
    store_square(to + kX, kPitchX, unit_lower_inverse(near, lane), lane);
}

}  // namespace kda::hopper
