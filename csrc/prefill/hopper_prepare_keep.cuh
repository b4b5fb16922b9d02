// The solve of the prepare kernel where a backward follows: the same X, and `lower` on the way to it.
//
// With A_kk = Diag(b) A, b the strengths: X = I - Diag(b) L, L = A X = M A, M = (I + A Diag(b))^-1 = I - L Diag(b). Below the diagonal,
// L_ij = M_ii sum_m A_im X_mj over the blocks m < i, and X_ij = -Diag(b) L_ij: nothing is divided by a strength that may be 0.
// Keys are normalised here, see hopper_prepare_decay.cuh: the norms that were taken from tokens i and j go back into L_ij.
//
// `lower` and `solved` wait in shared memory in the order of tokens, only what lies below their diagonals, and go out by whole rows
// (hopper_prepare_keep_out.cuh).
//
// 128 channels: by pairs of warps. 64 channels: a warp has its block's rows of both A, and its column of blocks of X and `lower`.
#pragma once
#include "hopper_kept.cuh"
#include "hopper_prepare_pairs.cuh"

namespace kda::hopper {

constexpr float kDivisible = 0.015625f;  // a smaller strength leaves too few digits of what it multiplied
constexpr int kM = Wide::x;              // halves of M, from a block's q rows on: between A_qk and the stage behind it
static_assert(kM >= kBlock * Wide::pitch && kM + kBlock * Wide::pitch_x <= Wide::stage_a, "M fits between A_qk and A_solved^T");
static_assert(kBlock * kChunk * 4 <= Wide::tile, "16 rows of `lower`, float32, fit in a block's columns");
static_assert(kBlock * kChunk * 2 <= Wide::stage_a, "16 rows of `solved` fit in a block's k rows before A_solved^T");
static_assert(kBlock * 32 * 4 == Places<64>::tile, "64 channels: half of them do");

// Halves of M of a block. 64 channels: the square right of A_qk's last, or over the sums.
template <int HEAD>
__device__ __forceinline__ uint32_t m_at(const Place& at, int block) {
  using P = Places<HEAD>;
  if (HEAD == 64 && block == 3) return at.smem + P::sums + P::next;
  return at.smem + block * P::tile + P::rows_q + (HEAD == 64 ? 3 * P::next : kM);
}
__device__ __forceinline__ int lower_turn(int i) { return (i >> 1 & 3) << 3 | (i & 1); }  // 64 channels
// float32 number (i, j) of `lower`. 128 channels: rows of 256 bytes over the columns, every second pair of rows turned by 8 numbers.
// 64 channels: rows of 128 bytes, those of the first 32 tokens j over the columns, the others behind all the rest; neighbours of every
// second row change places.
template <int HEAD>
__device__ __forceinline__ uint32_t lower_at(const Place& at, int i, int j) {
  if constexpr (HEAD == 64)
    return at.smem + (j < 32 ? Places<64>::columns + i * 128 : Places<64>::kept + (i - 32) * 128) +
           (((j & 31) ^ lower_turn(i)) << 2);
  else
    return at.smem + Wide::columns + i * 256 + ((j ^ ((i >> 1 & 3) << 3)) << 2);
}
// bfloat16 numbers (i, j) and (i, j + 1) of `solved`, j even, over A_kk. 128 channels: rows of 128 bytes, the 16-byte unit u of row r at
// u ^ (r % 8). 64 channels: 16 x 16 squares, that on the diagonal over X: A_solved^T is staged in its place. Row r of square s is at r ^ s.
template <int HEAD>
__device__ __forceinline__ uint32_t solved_at(const Place& at, int i, int j) {
  using P = Places<HEAD>;
  const uint32_t tile = at.smem + P::rows_k + i / kBlock * P::tile;
  if constexpr (HEAD == 64) {
    const int square = i / kBlock == j / kBlock ? 3 : j / kBlock;
    return square_unit<32>(tile + square * P::next, i % kBlock ^ square, j >> 3 & 1) + (j & 7) * 2;
  } else {
    return tile + i % kBlock * 128 + (((j >> 3) ^ (i & 7)) << 4) + (j & 7) * 2;
  }
}

template <bool L2NORM, int HEAD>
__device__ __forceinline__ float key_norm(const Shared<HEAD>& shared, int token) {
  return L2NORM ? 1.0f : shared.norms[1][token];
}
template <bool L2NORM, int HEAD>
__device__ __forceinline__ float strength_of(const Shared<HEAD>& shared, int token) {
  const float norm = key_norm<L2NORM>(shared, token);
  return shared.betas[token] * norm * norm;
}

// X, over k_rows, M and `lower` of a block from `near`, its A below the diagonal. Its rows and columns are read.
template <bool L2NORM, int HEAD>
__device__ __forceinline__ void keep_diagonal(const Place& at, const Shared<HEAD>& shared, uint32_t k_rows, const Square& near) {
  using P = Places<HEAD>;
  const int lane = at.lane, first = at.block * kBlock;
  Square negative, L = {};
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int r = 0; r < 4; ++r) negative.x[n][r] = -strength_of<L2NORM>(shared, first + square_row(r, lane)) * near.x[n][r];
  const Square X = unit_lower_inverse(negative, lane);
  store_square<P::pitch_x>(k_rows + P::x, X, lane);
  uint32_t a[4];
  half_operand(a, near);
  multiply_add(L, a, X);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int i = square_row(r, lane), j = square_column(n, r, lane);
      const float b = strength_of<L2NORM>(shared, first + i);
      const float norms = key_norm<L2NORM>(shared, first + i) * key_norm<L2NORM>(shared, first + j);
      float x = j < i ? L.x[n][r] : 0.0f;
      if (j < i && fabsf(b) > kDivisible) x = -X.x[n][r] / b;
      store_shared(lower_at<HEAD>(at, first + i, first + j), __float_as_uint(x * norms));
      L.x[n][r] = j == i ? 1.0f : -x * strength_of<L2NORM>(shared, first + j);  // M
    }
  store_square<P::pitch_x>(m_at<HEAD>(at, at.block), L, lane);
}

// In place of `store_rows`: -A_kk without strengths, its block's X, M and `lower`; A_qk. The pair has read its rows and columns.
template <bool L2NORM>
__device__ __forceinline__ void store_and_keep_rows(const Place& at, const Shared<128>& shared, Square& near, Square (&far)[3]) {
  const int lane = at.lane, first = at.block * kBlock;
  const uint32_t to = at.smem + at.block * Wide::tile + (at.odd ? Wide::rows_q : Wide::rows_k);
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
    if (j < at.block) store_square<Wide::pitch>(to + j * Wide::next, far[j], lane);
  if (at.odd) {
    store_square<Wide::pitch>(to + at.block * Wide::next, near, lane);
    return;
  }
  keep_diagonal<L2NORM>(at, shared, to, near);
}

// In place of `solve_columns`. Every second block of `lower` per warp of a pair.
template <bool L2NORM, int HEAD>
__device__ __forceinline__ void solve_and_keep_columns(const Place& at, const Shared<HEAD>& shared, uint32_t (&solved)[4][4]) {
  using P = Places<HEAD>;
  const int lane = at.lane, first = at.block * kBlock;
  const uint32_t k_rows = at.smem + P::rows_k;
  load_matrices_transposed(solved[0],
                           square_unit<P::pitch_x>(k_rows + at.block * P::tile + P::x, (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1));
#pragma unroll
  for (int d = 1; d < 4; ++d) {
    const int block = at.block + d;
    if (block >= 4) continue;
    Square acc = {}, next = {};
#pragma unroll
    for (int e = 0; e < d; ++e)
      multiply_transposed<P::pitch>(acc, solved[e], k_rows + block * P::tile + (at.block + e) * P::next, lane);
    uint32_t a[4];
    half_operand(a, acc);
    multiply_transposed<P::pitch_x>(next, a, m_at<HEAD>(at, block), lane);  // -L^T
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int i = block * kBlock + square_column(n, r, lane), j = first + square_row(r, lane);
        if (HEAD == 64 || block % 2 == at.odd) {
          const float norms = key_norm<L2NORM>(shared, i) * key_norm<L2NORM>(shared, j);
          store_shared(lower_at<HEAD>(at, i, j), __float_as_uint(-next.x[n][r] * norms));
        }
        next.x[n][r] *= strength_of<L2NORM>(shared, i);
      }
    half_operand(solved[d], next);
  }
}

// From `square_out`: block (i, at.block) of `solved` from its transpose, which the norms and the scale were kept out of.
template <bool L2NORM, int HEAD>
__device__ __forceinline__ void stage_solved(const HopperForward& p, const Place& at, const Shared<HEAD>& shared, int block,
                                             const Square& sum) {
  const int lane = at.lane, first = at.block * kBlock;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = block * kBlock + square_column(n, 0, lane);
      const float f = p.scale * key_norm<L2NORM>(shared, first + square_row(2 * half, lane));
      const float f0 = L2NORM ? f : f * shared.norms[0][i], f1 = L2NORM ? f : f * shared.norms[0][i + 1];
      const uint32_t pair = transposed(pack_bf16(sum.x[n][2 * half] * f0, sum.x[n][2 * half + 1] * f1));
      store_shared(solved_at<HEAD>(at, block * kBlock + 8 * n + lane / 4, first + 8 * half + 2 * (lane % 4)), pair);
    }
}

}  // namespace kda::hopper
