// X <- (I + A_kk)^-1 X by block substitution: 16 x 16 diagonal blocks are inverted exactly, row by row; the rest is products of tiles.
#pragma once

#include "tiles.cuh"

namespace kda {

// The inverse of one unit lower 16 x 16 diagonal block, a thread per column: x_r = -(A[r,c] + sum_{c<j<r} A[r,j] x_j).
template <int LD_A, int LD_INV>
__device__ void invert_diagonal(const float *A, float *inverse, int block, int column) {
  const float *L = A + block * 16 * (LD_A + 1);  // L[j * LD_A + r] = A_kk[r, j]
  float x[16];
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < r; ++j) sum = fmaf(L[j * LD_A + r], x[j], sum);
    x[r] = (r == column ? 1.f : 0.f) - sum;
    inverse[(block * 16 + r) * LD_INV + column] = x[r];
  }
}

// X <- (I + A_kk)^-1 X for N * 8 columns of X, by one warp. X is float32; as they are read, rows give way to their hi and lo, which take
// the same place. `done(i, x, split)` is given the C fragments of row block i.
template <int BLOCKS, int N, int LD, typename Shared, typename Done>
__device__ __forceinline__ void solve_columns(const Shared &sh, float *X, const Done &done) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint32_t *words = reinterpret_cast<uint32_t *>(X);
  const Rows<LD> rows{words, words + N * 4};
  const uint32_t *lane_row = rows.lane_in_order();
  float power[BLOCKS];  // 1 / m of the solved blocks
#pragma unroll
  for (int i = 0; i < BLOCKS; ++i) {
    float sum[N][4], x[N][4] = {};
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 right = *reinterpret_cast<const float2 *>(&X[(i * 16 + g + half * 8) * LD + n * 8 + 2 * t]);
        sum[n][2 * half] = right.x, sum[n][2 * half + 1] = right.y;
      }
    }
    auto add_product = [&](float (&to)[N][4], const Tile &left, int block, float factor) {
      TileA a;
      a.read(left);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        uint32_t b[4];
        load_transposed(b, lane_row + block * 16 * LD + n * 4);
        multiply_add(to[n], a, b, factor, factor);
      }
    };
#pragma unroll
    for (int j = 0; j < i; ++j) {
      const int tile = i * (i - 1) / 2 + j;
      add_product(sum, sh.lower[tile], j, -sh.lower_power[tile] * power[j]);
    }
    __syncwarp();
    const Split<N> right(sum);
    rows.put(i * 16, right);
    __syncwarp();
    add_product(x, sh.inverse_tiles[i], i, sh.inverse_power[i] * right.inverse);
    __syncwarp();
    const Split<N> solved(x);
    power[i] = solved.inverse;
    if (i + 1 < BLOCKS) rows.put(i * 16, solved);
    done(i, x, solved);
    __syncwarp();
  }
}

// The blocks of A_kk below the diagonal blocks as tiles: column j of A holds A_kk[j, ..].
template <int C, int LD_A, typename Shared>
__device__ __forceinline__ void split_lower(Shared &sh, int first, int step) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int tile = first; tile < C / 16 * (C / 16 - 1) / 2; tile += step) {
    int i = 1;
    while (i * (i + 1) / 2 <= tile) ++i;
    const float *from = sh.A + ((tile - i * (i - 1) / 2) * 16 + 2 * t) * LD_A + i * 16 + g;
    const float x[8] = {from[0],        from[LD_A],     from[8],            from[LD_A + 8],
                        from[8 * LD_A], from[9 * LD_A], from[8 * LD_A + 8], from[9 * LD_A + 8]};
    const Power power(warp_largest(largest_of(x)));
    store_tile(sh.lower[tile], x, power.m);
    if (lane == 0) sh.lower_power[tile] = power.inverse;
  }
}

// Diagonal block `block`: a warp inverts it, half a warp per block, and makes tiles of both.
template <int LD_A, int LD_INV, typename Shared>
__device__ __forceinline__ void invert_two(Shared &sh, int warp) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  invert_diagonal<LD_A, LD_INV>(sh.A, sh.inverse, 2 * warp + lane / 16, lane % 16);
  __syncwarp();
#pragma unroll
  for (int block = 2 * warp; block < 2 * warp + 2; ++block) {
    const float *from = sh.inverse + (block * 16 + g) * LD_INV + 2 * t;
    const float x[8] = {from[0], from[1], from[8 * LD_INV],     from[8 * LD_INV + 1],
                        from[8], from[9], from[8 * LD_INV + 8], from[8 * LD_INV + 9]};
    const Power power(warp_largest(largest_of(x)));
    store_tile(sh.inverse_tiles[block], x, power.m);
    if (lane == 0) sh.inverse_power[block] = power.inverse;
  }
}

}  // namespace kda
