// What a block of the prepare kernel is: its warps, where things lie in its shared memory, and how a lane addresses them.
#pragma once
#include "hopper_square.cuh"
#include "hopper_tokens.cuh"

namespace kda::hopper {

constexpr int kWarps = kChunk / kTokens;

// Shared memory: four tiles, a block each, of q rows, k rows, columns and tails, and the float arrays.
constexpr int kRowsQ = 0, kRowsK = 4 * kTile, kColumns = 8 * kTile, kTails = 12 * kTile, kSums = 16 * kTile;
constexpr int kTotals = kSums + kWarps * kHead * 4, kBetas = kTotals + 3 * kHead * 4;
constexpr int kNorms = kBetas + kChunk * 4, kBetween = kNorms + 3 * kChunk * 4;
// Powers of two per pair of channels, two words: to the boundary (first group's columns, second group's rows) of four blocks, then to the
// block's start (rows of either group, the second from the boundary) of blocks 1 to 3.
constexpr int kToBoundary = kBetween + 3 * kHead * 2, kToStart = kToBoundary + 4 * kHead * 4;
constexpr int shared_bytes(bool bounded) { return bounded ? kToBoundary : kToStart + 3 * kHead * 4; }
static_assert(3 * (shared_bytes(false) + 1024) <= 228 * 1024, "three blocks on a multiprocessor");
// Once A is done: halves of -A_kk and X over the k rows, of A_qk over the q rows; A_solved^T and k_solved on their way out.
constexpr int kPitch = (kChunk + 8) * 2, kPitchX = (kBlock + 8) * 2, kX = kBlock * kPitch;
constexpr int kStageA = kX + kBlock * kPitchX, kStageK = kColumns;  // from a block's k rows on, from its columns on
static_assert(kX + kBlock * kPitchX + 1024 <= kTile && kBlock * kPitch + 1024 <= kTile,
              "half of A_solved^T fits beside A_kk and X, half beside A_qk");

struct Place {
  uint32_t smem;
  int lane, warp, block, odd;  // odd: of the pair
};

struct Shared {  // the float arrays
  float (&sums)[kWarps][kHead];  // log2-decay of each warp's tokens
  float (&totals)[3][kHead];     // decay of each block but the first
  float (&betas)[kChunk];
  float (&norms)[3][kChunk];  // those taken from q and k where the caller keeps them; q . k of what is left
  uint2 (&between)[3][kHead / 4];  // float16 decay over block 1, block 2, both
};

__device__ __forceinline__ void pair_barrier(int block) { named_barrier(block + 1, 64); }

// Fragment addresses in a block's tile: 16 rows as an A operand, 16 rows as the columns of a B operand, and k-step s of either.
__device__ __forceinline__ uint32_t row_fragment(int lane) { return (lane & 15) * 256 + (((lane >> 4) ^ (lane & 7)) << 4); }
__device__ __forceinline__ uint32_t column_fragment(int lane) {
  return ((lane & 7) + ((lane >> 4) << 3)) * 256 + ((((lane >> 3) & 1) ^ (lane & 7)) << 4);
}

__device__ __forceinline__ uint32_t at_step(uint32_t fragment, int s) { return (fragment ^ (s % 4 << 5)) + s / 4 * 128; }

// Adds the log2-decays of warps first .. last - 1, for a lane's four channels.
__device__ __forceinline__ void add_sums(float (&sum)[4], const Shared& shared, int first, int last, int lane) {
#pragma unroll 1
  for (int m = first; m < last; ++m) {
    const float4 z = *reinterpret_cast<const float4*>(&shared.sums[m][4 * lane]);
    sum[0] += z.x, sum[1] += z.y, sum[2] += z.z, sum[3] += z.w;
  }
}
__device__ __forceinline__ void exponentials(float (&y)[4], const float (&sum)[4]) {
#pragma unroll
  for (int c = 0; c < 4; ++c) y[c] = exp2_fast(sum[c]);
}

}  // namespace kda::hopper
