// What a block of the prepare kernel is: its warps, where things lie in its shared memory, and how a lane addresses them.
#pragma once
#include "hopper_square.cuh"
#include "hopper_tokens.cuh"

namespace kda::hopper {

constexpr int kGroups = kChunk / kTokens;

template <int HEAD>
struct Places {
  static constexpr int tile = kBlock * HEAD * 2;  // bytes: a block's rows
  // Shared memory: four tiles, a block each, of q rows, k rows, columns and tails, and the float arrays.
  static constexpr int rows_q = 0, rows_k = 4 * tile, columns = 8 * tile, tails = 12 * tile, sums = 16 * tile;
  static constexpr int totals = sums + kGroups * HEAD * 4, betas = totals + 3 * HEAD * 4;
  static constexpr int norms = betas + kChunk * 4, between = norms + 3 * kChunk * 4;
  // Powers of two per pair of channels, two words: to the boundary (first group's columns, second group's rows) of four blocks, then to
  // the block's start (rows of either group, the second from the boundary) of blocks 1 to 3.
  static constexpr int to_boundary = between + 3 * HEAD * 2, to_start = to_boundary + 4 * HEAD * 4;
  static constexpr int bytes(bool bounded) { return bounded ? to_boundary : to_start + 3 * HEAD * 4; }
  static constexpr int blocks(bool bounded) { return HEAD == 128 ? 3 : bounded ? 6 : 5; }  // on a multiprocessor
  // Where a backward follows: of 64 channels 32 x 32 numbers of `lower` behind all the rest, which the columns have no room for.
  static constexpr int kept = to_start + 3 * HEAD * 4, kept_blocks = HEAD == 128 ? 3 : 5;
  static constexpr int kept_bytes(bool bounded) { return HEAD == 128 ? bytes(bounded) : kept + 32 * 32 * 4; }

  // Once A is done: halves of -A_kk and X over the k rows, of A_qk over the q rows; A_solved^T and k_solved on their way out, the latter
  // over the columns. 128 channels: rows of blocks side by side, padded, A_solved^T behind them. 64 channels: 16 x 16 squares one behind
  // the other, of A_kk before X, of A_qk before those of A_solved^T right of the diagonal; that on it is the next one of A_kk, which the
  // last block has over the sums.
  static constexpr bool squares = HEAD == 64;
  static constexpr int pitch = squares ? 32 : (kChunk + 8) * 2, pitch_x = squares ? 32 : (kBlock + 8) * 2;
  static constexpr int next = squares ? 512 : kBlock * 2;  // bytes from a square to the one right of it
  static constexpr int x = squares ? 3 * next : kBlock * pitch;
  static constexpr int stage_a = x + kBlock * pitch_x, stage_k = columns;  // from a block's k rows on, from its columns on
};
template <int HEAD>
constexpr bool kFits = Places<HEAD>::blocks(true) * (Places<HEAD>::bytes(true) + 1024) <= 228 * 1024 &&
                       Places<HEAD>::blocks(false) * (Places<HEAD>::bytes(false) + 1024) <= 228 * 1024 &&
                       Places<HEAD>::kept_blocks * (Places<HEAD>::kept_bytes(false) + 1024) <= 228 * 1024;
static_assert(kFits<64> && kFits<128>, "as many blocks on a multiprocessor");
static_assert(Places<128>::stage_a + 1024 <= Places<128>::tile && kBlock * Places<128>::pitch + 1024 <= Places<128>::tile,
              "half of A_solved^T fits beside A_kk and X, half beside A_qk");
static_assert(Places<64>::stage_a == Places<64>::tile && 4 * Places<64>::next == Places<64>::tile, "four squares in a tile");

// 128 channels: a pair of warps has a block, of which each of its lanes has the `odd` group. 64 channels: a warp has a block, and half of
// its lanes each of the groups.
struct Place {
  uint32_t smem;
  int lane, warp, block, odd;
};
template <int HEAD>
__device__ __forceinline__ int group_of(const Place& at) {  // in the chunk
  return HEAD == 128 ? at.warp : 2 * at.warp + at.odd;
}

template <int HEAD>
struct Shared {  // the float arrays
  float (&sums)[kGroups][HEAD];  // log2-decay of each group's tokens
  float (&totals)[3][HEAD];      // decay of each block but the first
  float (&betas)[kChunk];
  float (&norms)[3][kChunk];  // those taken from q and k where the caller keeps them; q . k of what is left
  uint2 (&between)[3][HEAD / 4];  // float16 decay over block 1, block 2, both
};

__device__ __forceinline__ void pair_barrier(int block) { named_barrier(block + 1, 64); }

// Fragment addresses in a block's tile: 16 rows as an A operand, 16 rows as the columns of a B operand, and k-step s of either.
template <int HEAD>
__device__ __forceinline__ uint32_t row_fragment(int lane) {
  return (lane & 15) * Warp<HEAD>::row + (((lane >> 4) ^ (lane & 7)) << 4);
}
template <int HEAD>
__device__ __forceinline__ uint32_t column_fragment(int lane) {
  return ((lane & 7) + ((lane >> 4) << 3)) * Warp<HEAD>::row + ((((lane >> 3) & 1) ^ (lane & 7)) << 4);
}

__device__ __forceinline__ uint32_t at_step(uint32_t fragment, int s) { return (fragment ^ (s % 4 << 5)) + s / 4 * 128; }

// Adds the log2-decays of groups first .. last - 1, for a lane's four channels.
template <int HEAD>
__device__ __forceinline__ void add_sums(float (&sum)[4], const Shared<HEAD>& shared, int first, int last, int lane) {
#pragma unroll 1
  for (int m = first; m < last; ++m) {
    const float4 z = *reinterpret_cast<const float4*>(&shared.sums[m][4 * Warp<HEAD>::channels(lane)]);
    sum[0] += z.x, sum[1] += z.y, sum[2] += z.z, sum[3] += z.w;
  }
}
__device__ __forceinline__ void exponentials(float (&y)[4], const float (&sum)[4]) {
#pragma unroll
  for (int c = 0; c < 4; ++c) y[c] = exp2_fast(sum[c]);
}

}  // namespace kda::hopper
