// From registers into a chunk's record: tokens or channels as rows of tiles, the triangle A_qk, rows of w and u.
#pragma once

#include "tiles.cuh"

namespace kda {

// A warp's eight tokens of 32 channels, as the upper or lower half of two tiles that have tokens as rows. Two lanes with neighbouring
// channels share the work: the even one has the first four tokens, the odd one the others. Returns 1 / m.
__device__ __forceinline__ float store_row_tiles(Tile *tiles, const float (&x)[8], int half) {
  const int lane = threadIdx.x % 32, pair = lane % 16 / 2;
  const bool odd = lane % 2;
  const Power power(warp_largest(largest_of(x)));
  Tile &tile = tiles[lane / 16];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float mine = odd ? x[4 + i] : x[i], other = __shfl_xor_sync(0xffffffffu, odd ? x[i] : x[4 + i], 1);
    uint32_t hi, lo;
    split_pair(odd ? other : mine, odd ? mine : other, power.m, hi, lo);
    const int to = ((odd ? 4 : 0) + i) * 4 + pair % 4, word = half + pair / 4 * 2;
    reinterpret_cast<uint32_t *>(&tile[0][to])[word] = hi;
    reinterpret_cast<uint32_t *>(&tile[1][to])[word] = lo;
  }
  return power.inverse;
}

// The same for tiles that have channels as rows, `apart` tiles from each other: half of the columns. Lanes with channels 8
// apart share the work.
__device__ __forceinline__ void store_column_tiles(Tile *tiles, int apart, const float (&x)[8], int half, float m) {
  const int lane = threadIdx.x % 32;
  const bool low = lane % 16 >= 8;  // of the tile's rows
  Tile &tile = tiles[lane / 16 * apart];
  uint32_t hi[4], lo[4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float mine0 = low ? x[4 + 2 * i] : x[2 * i], mine1 = low ? x[5 + 2 * i] : x[2 * i + 1];
    const float other0 = __shfl_xor_sync(0xffffffffu, low ? x[2 * i] : x[4 + 2 * i], 8);
    const float other1 = __shfl_xor_sync(0xffffffffu, low ? x[2 * i + 1] : x[5 + 2 * i], 8);
    split_pair(low ? other0 : mine0, low ? other1 : mine1, m, hi[2 * i], lo[2 * i]);
    split_pair(low ? mine0 : other0, low ? mine1 : other1, m, hi[2 * i + 1], lo[2 * i + 1]);
  }
  const int to = lane % 8 * 4 + half * 2 + low;
  tile[0][to] = make_uint4(hi[0], hi[1], hi[2], hi[3]);
  tile[1][to] = make_uint4(lo[0], lo[1], lo[2], lo[3]);
}

// A_qk, the lower triangle of A [C, C], as tiles, a warp per tile.
template <int C, int LD_A>
__device__ __forceinline__ void store_triangle(const float *A, Tile *tiles, float2 *powers, int start, int step) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int tile = start; tile < (C / 16) * (C / 16 + 1) / 2; tile += step) {
    int i = 0;
    while ((i + 1) * (i + 2) / 2 <= tile) ++i;
    const int first = (tile - i * (i + 1) / 2) * 16 + 4 * t;  // token
    float x[8];  // row g's two pairs at 0 and 4, row g + 8's at 2 and 6
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = i * 16 + g + half * 8;
      const float4 a = *reinterpret_cast<const float4 *>(A + row * LD_A + first);
      const float four[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e / 2 * 4 + half * 2 + e % 2] = first + e <= row ? four[e] : 0.f;
    }
    const Power power(warp_largest(largest_of(x)));
    store_tile(tiles[tile], x, power.m);
    if (lane == 0) powers[tile] = make_float2(power.inverse, power.inverse);
  }
}

// C fragments to 16 rows of D floats in device memory.
template <int N, int D>
__device__ __forceinline__ void store_rows(float *to, const float (&x)[N][4]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2 *>(to + (g + half * 8) * D + n * 8 + 2 * t) = make_float2(x[n][2 * half], x[n][2 * half + 1]);
  }
}

}  // namespace kda
