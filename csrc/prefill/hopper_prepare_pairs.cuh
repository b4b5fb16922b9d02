// Row blocks of A_kk and A_qk from decayed tiles, 128 channels, by pairs of warps: row block b of A_kk (even warp) and of A_qk (odd warp).
// hopper_prepare_both.cuh has those of 64 channels.
#pragma once
#include "hopper_prepare_block.cuh"

namespace kda::hopper {

using Wide = Places<128>;

// Powers of two of a lane's channels in k-step s, from a table of two words per pair of channels: (first, second group), low and high half.
struct Powers {
  uint2 low_half, high_half;
  __device__ __forceinline__ Powers(uint32_t table, int lane, int s)
      : low_half(load_shared_pair(table + lane % 4 * 8 + s * 64)), high_half(load_shared_pair(table + lane % 4 * 8 + s * 64 + 32)) {}
};
__device__ __forceinline__ void move_second(uint32_t (&rows)[4], const Powers& powers) {
  rows[1] = multiply_bf16(rows[1], powers.low_half.y), rows[3] = multiply_bf16(rows[3], powers.high_half.y);
}

// A block's own pairs, for any gate: those of the second group of rows with the first of columns are moved to the boundary between. The
// block's columns begin `offset` bytes behind the place of the fragment `columns`.
__device__ __forceinline__ void pairs_of_groups(uint32_t rows, uint32_t columns, int offset, uint32_t to_boundary, int lane, Square& near) {
  float cross[4] = {};
#pragma unroll
  for (int s = 0; s < 128 / 16; ++s) {
    uint32_t a[4], b[4];
    load_matrices(a, at_step(rows, s)), load_matrices(b, at_step(columns, s) + offset);
    mma_bf16(near.x[0], a, b[0], b[1]), mma_bf16(near.x[1], a, b[2], b[3]);
    const Powers powers(to_boundary, lane, s);
    move_second(a, powers);
    mma_bf16(cross, a, multiply_bf16(b[0], powers.low_half.x), multiply_bf16(b[1], powers.high_half.x));
  }
  near.x[0][2] = cross[2], near.x[0][3] = cross[3];
}
__device__ __forceinline__ void near_pairs(const Place& at, uint32_t rows, uint32_t columns, Square& near) {
  const uint32_t to_boundary = at.smem + Wide::to_boundary + at.block * 128 * 4;
  pairs_of_groups(rows, columns, at.block * Wide::tile + Wide::columns, to_boundary, at.lane, near);
}

// Pairs of row block BLOCK with those before it: rows from the block's start on, tails decayed over the blocks between, both as halves.
template <int BLOCK>
__device__ __forceinline__ void far_pairs(const Place& at, uint32_t rows, uint32_t columns, Square (&far)[3]) {
#pragma unroll
  for (int s = 0; s < 128 / 16; ++s) {
    uint32_t a[4];
    load_matrices(a, at_step(rows, s));
    move_second(a, Powers(at.smem + Wide::to_boundary + BLOCK * 128 * 4, at.lane, s));
    const Powers powers(at.smem + Wide::to_start + (BLOCK - 1) * 128 * 4, at.lane, s);
    move_second(a, powers);
    a[0] = multiply_bf16(a[0], powers.low_half.x), a[2] = multiply_bf16(a[2], powers.high_half.x);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = pack_half(low(a[i]), high(a[i]));
#pragma unroll
    for (int j = 0; j < BLOCK; ++j) {
      uint32_t b[4];
      load_matrices(b, at_step(columns, s) + Wide::tails + j * Wide::tile);
      if (j < BLOCK - 1) {
        const uint32_t factors = at.smem + Wide::between + (j == 1 ? 1 : BLOCK == 2 ? 0 : 2) * 128 * 2 + at.lane % 4 * 4 + s * 32;
        const uint32_t f0 = load_shared_word(factors), f1 = load_shared_word(factors + 16);
        b[0] = multiply_half(b[0], f0), b[1] = multiply_half(b[1], f1), b[2] = multiply_half(b[2], f0), b[3] = multiply_half(b[3], f1);
      }
      mma_half(far[j].x[0], a, b[0], b[1]), mma_half(far[j].x[1], a, b[2], b[3]);
    }
  }
}

// The same with a bounded gate, whose rows fit in registers from the first pair to the last.
__device__ __forceinline__ void bounded_pairs(const Place& at, uint32_t rows, uint32_t columns, Square& near, Square (&far)[3]) {
  constexpr int kSteps = 128 / 16;
  uint32_t a[kSteps][4], b[4];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    load_matrices(a[s], at_step(rows, s)), load_matrices(b, at_step(columns, s) + at.block * Wide::tile + Wide::columns);
    mma_bf16(near.x[0], a[s], b[0], b[1]), mma_bf16(near.x[1], a[s], b[2], b[3]);
  }
  if (at.block > 0) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i) a[s][i] = pack_half(low(a[s][i]), high(a[s][i]));
  }
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    if (j >= at.block) continue;
    const uint32_t tails = Wide::tails + j * Wide::tile;
    if (j == at.block - 1) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        load_matrices(b, at_step(columns, s) + tails);
        mma_half(far[j].x[0], a[s], b[0], b[1]), mma_half(far[j].x[1], a[s], b[2], b[3]);
      }
    } else {  // columns end with block j: decay them over the blocks between
      const uint32_t factors = at.smem + Wide::between + (j == 1 ? 1 : at.block == 2 ? 0 : 2) * 128 * 2 + at.lane % 4 * 4;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const uint32_t f0 = load_shared_word(factors + s * 32), f1 = load_shared_word(factors + s * 32 + 16);
        load_matrices(b, at_step(columns, s) + tails);
        mma_half(far[j].x[0], a[s], multiply_half(b[0], f0), multiply_half(b[1], f1));
        mma_half(far[j].x[1], a[s], multiply_half(b[2], f0), multiply_half(b[3], f1));
      }
    }
  }
}

// Row block of A_kk (even warps) or A_qk (odd): the diagonal block and blocks j < block.
template <bool BOUNDED>
__device__ __forceinline__ void block_rows(const Place& at, Square& near, Square (&far)[3]) {
  const uint32_t rows = at.smem + at.block * Wide::tile + (at.odd ? Wide::rows_q : Wide::rows_k) + row_fragment<128>(at.lane);
  const uint32_t columns = at.smem + column_fragment<128>(at.lane);
  if constexpr (BOUNDED) {
    bounded_pairs(at, rows, columns, near, far);
  } else {
    near_pairs(at, rows, columns, near);
    if (at.block == 1) far_pairs<1>(at, rows, columns, far);
    if (at.block == 2) far_pairs<2>(at, rows, columns, far);
    if (at.block == 3) far_pairs<3>(at, rows, columns, far);
  }
  __syncwarp();  // the rows are read: squares take their place
}

// The pair's squares to shared memory, as halves: -A_kk with its block's inverse, A_qk.
template <bool L2NORM>
__device__ __forceinline__ void store_rows(const Place& at, const Shared<128>& shared, Square& near, Square (&far)[3]) {
  const int lane = at.lane;
  const uint32_t to = at.smem + at.block * Wide::tile + (at.odd ? Wide::rows_q : Wide::rows_k);
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
    if (j < at.block) store_square<Wide::pitch>(to + j * Wide::next, far[j], lane);
  if (at.odd)
    store_square<Wide::pitch>(to + at.block * Wide::next, near, lane);
  else
    store_square<Wide::pitch_x>(to + Wide::x, unit_lower_inverse(near, lane), lane);
}

}  // namespace kda::hopper
