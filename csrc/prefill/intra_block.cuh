// What a block of the intra kernel is made of: its sizes, its shared memory, and which pair products each warp makes.
#pragma once

#include "tiles.cuh"

namespace kda {

constexpr int log2_of(int x) { return x <= 1 ? 0 : 1 + log2_of(x / 2); }

template <int K, int V, int C>
struct Intra {
  static_assert(K % 32 == 0 && V % 32 == 0 && (C == 32 || C == 64), "unsupported sizes");
  static constexpr int SLICE = 32;      // channels at a time, one per lane
  static constexpr int OWN = 8;         // consecutive tokens of a warp
  static constexpr int WARPS = C / OWN;
  static constexpr int THREADS = WARPS * 32;
  static constexpr int LEVELS = log2_of(C);
  static constexpr int UNITS = C / 2 / 8;  // eight rows, or columns, of a level
  static constexpr int PLANE = SLICE * UNITS;
  // Row strides in floats: multiples of 4, and such that a fragment's 32 loads fall into 32 banks.
  static constexpr int LD_K = K + 4;
  static constexpr int LD_V = V + 4;
  static constexpr int LD_A = C + 8;
  static constexpr int LD_INV = 20;
  static constexpr int TILES = (LEVELS - 1 < 4 ? LEVELS : 4) * (C / 16) + (C >= 32 ? (C / 16) * 2 : 0) + (C >= 64 ? (C / 16) * 4 : 0);
  static constexpr int WARP_TILES = TILES / WARPS;
  static_assert(TILES % WARPS == 0, "every warp has as many tiles");
  static constexpr int LOWER = C / 16 * (C / 16 - 1) / 2;  // tiles of A_kk below the diagonal blocks

  struct Shared {
    union {
      uint4 levels[LEVELS][3][2][PLANE];  // q rows, k rows, columns; hi, lo; [channel, row], a channel's units permuted
      struct {
        float u[C * LD_V];  // right sides, then the solution
        float A[C * LD_A];  // A_qk below and on the diagonal, A_kk transposed above it
        float inverse[C * LD_INV];
        Tile lower[LOWER], inverse_tiles[C / 16];
        float lower_power[LOWER], inverse_power[C / 16];
      };
    };
    float w[C * LD_K];
    float totals[WARPS * SLICE];
    alignas(16) float beta[C];
    alignas(16) float q_norm[C];  // with the scale
    alignas(16) float k_norm[C];
    float q_power[WARPS], k_power[WARPS], kb_power[WARPS];  // 1 / m of a warp's tokens, in the levels
    float k_largest[WARPS];
  };

  // Where a channel has its unit: eight neighbouring channels' units of the same number fall into 32 banks.
  __device__ static int place(int channel, int unit) { return channel * UNITS + (unit ^ (UNITS == 4 ? channel / 2 % 4 : channel / 4 % 2)); }
};

// The n-th of a warp's tiles of pair products: at level 1 << `level`, 8 odd tokens (rows) and 8 even tokens (columns). Levels 1, 2, 4, 8
// have C/16 tiles each, 16 has C/8, 32 has C/4.
template <int C>
struct PairTile {
  int level, rows, columns;
  __device__ PairTile(int n, int warp) {
    constexpr int N = C / 16;
    if (n < 2) {
      level = 2 * n + warp / N, rows = columns = warp % N;
    } else if (n == 2) {
      level = 4, rows = warp / 2, columns = (rows & ~1) + warp % 2;
    } else {
      level = 5, rows = warp / 4 + (n - 3) * (N / 2), columns = warp % 4;
    }
  }
  // The warp that has made row g, and the one of columns 2t and 2t + 1.
  __device__ int row_maker(int g) const {
    return level < 3 ? 2 * rows + g / 4 : level == 3 ? 2 * rows + 1 : level == 4 ? 2 * rows + 2 - rows % 2 : rows + 4;
  }
  __device__ int column_maker(int t) const {
    return level < 3 ? 2 * columns + t / 2 : level == 3 ? 2 * columns : level == 4 ? 2 * columns - columns % 2 : columns;
  }
};

}  // namespace kda
