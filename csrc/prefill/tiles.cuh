// What `intra` hands to `state`: one record per chunk and value head, made of tiles that are ready for the tensor cores.
//
// A tile is [16, 16] numbers, each the sum of two float16 with a common power of two:
//
//     x = (hi + lo) / m,   m = 2^(14 - exponent of the tile's largest),   hi = x m rounded to float16,   lo = x m - hi rounded likewise
//
// which keeps 22 bits of everything above 2^-17 of the largest, and 2^-39 of the largest below. Two tiles are multiplied like float32:
//
//     a b ~ (a_lo b_hi + a_hi b_lo + a_hi b_hi) / (m_a m_b)
//
// The tensor cores truncate when they accumulate, always towards zero. So each step of 16 starts from zero and its sum is added, with
// the two powers of two taken out, by an ordinary, rounding operation.
#pragma once

#include <cstdint>

#include "ptx.cuh"

namespace kda {

// The fragments of mma.m16n8k16, with g = lane / 4 and t = lane % 4, two numbers a register:
//   A [16, 16]: (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8)      B [16, 8]: (2t, g), (2t + 8, g)
//   C [16, 8]: floats (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
// A tile in memory: all lanes' four registers of hi, then those of lo.
using Tile = uint4[2][32];

template <int K, int V, int C>
struct alignas(128) Record {
  static constexpr int ROWS = C / 16, STEPS = K / 16, TRIANGLE = ROWS * (ROWS + 1) / 2;
  struct alignas(16) Small {
    float2 w[ROWS * STEPS], q[ROWS * STEPS], k[STEPS * ROWS];  // 1 / m of a tile's upper and lower eight rows
    float2 A[(TRIANGLE + 1) / 2 * 2];
    float decay[K];  // exp(G_C)
  };
  Tile w[ROWS * STEPS];    // [tokens, channels]
  Tile q[ROWS * STEPS];    // [tokens, channels]  scale q exp(G)
  Tile k[STEPS * ROWS];    // [channels, tokens]  k exp(G_C - G)
  Tile A[TRIANGLE];        // [tokens, tokens]    A_qk: tile (i, j) at i (i + 1) / 2 + j
  float4 u[ROWS * V / 8][32];  // C fragments
  Small small;
};

// In tiles whose columns are tokens, column c of 16 is token `token_of(c)`: a lane's four columns are four neighbours.
__device__ __forceinline__ int token_of(int column) { return column % 8 / 2 * 4 + column % 2 + column / 8 * 2; }

// The power of two m for numbers of which none is larger, and 1 / m.
struct Power {
  float m, inverse;
  __device__ explicit Power(float largest) {
    const uint32_t exponent = __float_as_uint(largest) >> 23, up = exponent < 15 ? 253 : 268 - exponent;
    m = __uint_as_float(up << 23);
    inverse = __uint_as_float((254 - up) << 23);
  }
};

// The largest magnitude. NaN is passed over: it stays NaN whatever m is.
template <int N>
__device__ __forceinline__ float largest_of(const float (&x)[N], float largest = 0.f) {
#pragma unroll
  for (int i = 0; i < N; ++i) largest = fmaxf(largest, fabsf(x[i]));
  return largest;
}

// Two neighbours, times m, as hi and lo.
__device__ __forceinline__ void split_pair(float x0, float x1, float m, uint32_t &hi, uint32_t &lo) {
  x0 *= m, x1 *= m;  // exact
  hi = pack_half(x0, x1);
  const float2 part = unpack_half(hi);
  lo = pack_half(x0 - part.x, x1 - part.y);
}

// The eight numbers of this lane, in the registers' order, into a tile.
__device__ __forceinline__ void store_tile(Tile &tile, const float (&x)[8], float m) {
  uint4 hi, lo;
  split_pair(x[0], x[1], m, hi.x, lo.x);
  split_pair(x[2], x[3], m, hi.y, lo.y);
  split_pair(x[4], x[5], m, hi.z, lo.z);
  split_pair(x[6], x[7], m, hi.w, lo.w);
  tile[0][threadIdx.x % 32] = hi;
  tile[1][threadIdx.x % 32] = lo;
}

// This lane's part of a tile in registers.
struct TileA {
  uint4 hi, lo;
  __device__ __forceinline__ void read(const Tile &tile) {  // from shared memory
    hi = tile[0][threadIdx.x % 32];
    lo = tile[1][threadIdx.x % 32];
  }
};

// C fragments of [16, 8 N] numbers as hi and lo.
template <int N>
struct Split {
  uint32_t hi[N][2], lo[N][2];  // of rows g and g + 8
  float inverse;                // 1 / m

  __device__ __forceinline__ explicit Split(const float (&x)[N][4]) {
    float largest = 0.f;
#pragma unroll
    for (int n = 0; n < N; ++n) largest = largest_of(x[n], largest);
    const Power power(warp_largest(largest));
    inverse = power.inverse;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) split_pair(x[n][2 * half], x[n][2 * half + 1], power.m, hi[n][half], lo[n][half]);
    }
  }
};

// Rows in shared memory, LD words of two numbers each, hi and lo apart: 16 of them are the right factor of a step.
template <int LD>
struct Rows {
  uint32_t *hi, *lo;

  template <int N>
  __device__ __forceinline__ void put(int row, const Split<N> &x) const {  // 16 rows from `row` on
    const int lane = threadIdx.x % 32, at = (row + lane / 4) * LD + lane % 4;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        hi[at + half * 8 * LD + n * 4] = x.hi[n][half];
        lo[at + half * 8 * LD + n * 4] = x.lo[n][half];
      }
    }
  }

  // Where this lane's address for load_transposed lies, of 16 rows in order, or in the order of tokens in a tile's columns: the B
  // fragment's hi, hi, lo, lo. Tile n of step j is at 16 j LD + 4 n.
  __device__ __forceinline__ const uint32_t *lane_in_order() const { return of_lane(threadIdx.x % 16); }
  __device__ __forceinline__ const uint32_t *lane_of_tokens() const { return of_lane(token_of(threadIdx.x % 16)); }
  __device__ __forceinline__ const uint32_t *of_lane(int row) const { return (threadIdx.x % 32 < 16 ? hi : lo) + row * LD; }
};

// c += a b, where b is hi, hi, lo, lo of a B fragment; `upper`, `lower`: 1 / (m_a m_b) of rows g and g + 8.
__device__ __forceinline__ void multiply_add(float (&c)[4], const TileA &a, const uint32_t (&b)[4], float upper, float lower) {
  float part[4];
  mma_half(part, a.lo, b[0], b[1], {0.f, 0.f, 0.f, 0.f});
  mma_half(part, a.hi, b[2], b[3], part);
  mma_half(part, a.hi, b[0], b[1], part);
  c[0] = fmaf(part[0], upper, c[0]);
  c[1] = fmaf(part[1], upper, c[1]);
  c[2] = fmaf(part[2], lower, c[2]);
  c[3] = fmaf(part[3], lower, c[3]);
}

}  // namespace kda
