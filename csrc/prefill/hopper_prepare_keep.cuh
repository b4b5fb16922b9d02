// The solve of the prepare kernel where a backward follows: the same X, and `lower` on the way to it.
//
// With A_kk = Diag(b) A, b the strengths: X = I - Diag(b) L, L = A X = M A, M = (I + A Diag(b))^-1 = I - L Diag(b). Below the diagonal,
// L_ij = M_ii sum_m A_im X_mj over the blocks m < i, and X_ij = -Diag(b) L_ij: nothing is divided by a strength that may be 0.
// Keys are normalised here, see hopper_prepare_decay.cuh: the norms that were taken from tokens i and j go back into L_ij.
#pragma once
#include "hopper_kept.cuh"
#include "hopper_prepare_block.cuh"

namespace kda::hopper {

constexpr float kDivisible = 0.015625f;  // a smaller strength leaves too few digits of what it multiplied
constexpr int kM = kX;                   // halves of M, from a block's q rows on: between A_qk and the stage behind it
static_assert(kM >= kBlock * kPitch && kM + kBlock * kPitchX <= kStageA, "M fits between A_qk and A_solved^T");

template <bool L2NORM>
__device__ __forceinline__ float key_norm(const Shared& shared, int token) {
  return L2NORM ? 1.0f : shared.norms[1][token];
}
template <bool L2NORM>
__device__ __forceinline__ float strength_of(const Shared& shared, int token) {
  const float norm = key_norm<L2NORM>(shared, token);
  return shared.betas[token] * norm * norm;
}

// In place of `store_rows`: -A_kk without strengths, its block's X and M; A_qk. The pair has read its rows.
template <bool L2NORM>
__device__ __forceinline__ void store_and_keep_rows(const KeptChunk& kept, const Place& at, const Shared& shared, Square& near,
                                                    Square (&far)[3]) {
  const int lane = at.lane, first = at.block * kBlock;
  const uint32_t to = at.smem + at.block * kTile + (at.odd ? kRowsQ : kRowsK);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int i = square_row(r, lane), j = square_column(n, r, lane);
      near.x[n][r] = j < i ? near.x[n][r] : 0.0f;
      if (at.odd && j == i) near.x[n][r] = shared.norms[2][first + i];
#pragma unroll
      for (int m = 0; m < 3; ++m) far[m].x[n][r] = at.odd ? far[m].x[n][r] : -far[m].x[n][r];
    }
#pragma unroll
  for (int j = 0; j < 3; ++j)
    if (j < at.block) store_square(to + j * kBlock * 2, kPitch, far[j], lane);
  if (at.odd) {
    store_square(to + at.block * kBlock * 2, kPitch, near, lane);
    return;
  }
  Square negative, L = {};
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int r = 0; r < 4; ++r) negative.x[n][r] = -strength_of<L2NORM>(shared, first + square_row(r, lane)) * near.x[n][r];
  const Square X = unit_lower_inverse(negative, lane);
  store_square(to + kX, kPitchX, X, lane);
  uint32_t a[4];
  half_operand(a, near);
  multiply_add(L, a, X);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int i = square_row(r, lane), j = square_column(n, r, lane);
      const float b = strength_of<L2NORM>(shared, first + i);
      float x = j < i ? L.x[n][r] : 0.0f;
      if (j < i && fabsf(b) > kDivisible) x = -X.x[n][r] / b;
      kept.keep_lower(first + i, first + j, x * key_norm<L2NORM>(shared, first + i) * key_norm<L2NORM>(shared, first + j));
      L.x[n][r] = j == i ? 1.0f : -x * strength_of<L2NORM>(shared, first + j);  // M
    }
  store_square(at.smem + at.block * kTile + kRowsQ + kM, kPitchX, L, lane);
}

// In place of `solve_columns`. Every second block of `lower` per warp of a pair.
template <bool L2NORM>
__device__ __forceinline__ void solve_and_keep_columns(const KeptChunk& kept, const Place& at, const Shared& shared,
                                                       uint32_t (&solved)[4][4]) {
  const uint32_t k_rows = at.smem + kRowsK, q_rows = at.smem + kRowsQ;
  load_matrices_transposed(solved[0], k_rows + at.block * kTile + kX + ((at.lane & 7) + ((at.lane >> 4) << 3)) * kPitchX +
                                          ((at.lane >> 3) & 1) * 16);
#pragma unroll
  for (int d = 1; d < 4; ++d) {
    const int i = at.block + d;
    if (i >= 4) continue;
    Square acc = {}, next = {};
#pragma unroll
    for (int e = 0; e < d; ++e) multiply_transposed(acc, solved[e], k_rows + i * kTile + (at.block + e) * kBlock * 2, kPitch, at.lane);
    uint32_t a[4];
    half_operand(a, acc);
    multiply_transposed(next, a, q_rows + i * kTile + kM, kPitchX, at.lane);  // -L^T
    if (i % 2 == at.odd)
      kept.keep_block(i, at.block, next, at.lane, [&](int row, int column, float x) { kept.keep_lower(row, column, x); },
                      [&](int row, int column) { return -key_norm<L2NORM>(shared, row) * key_norm<L2NORM>(shared, column); });
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) next.x[n][r] *= strength_of<L2NORM>(shared, i * kBlock + square_column(n, r, at.lane));
    half_operand(solved[d], next);
  }
}

}  // namespace kda::hopper
