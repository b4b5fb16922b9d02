// What the prepare kernel hands to the scan, per chunk of 64 tokens and value head: one contiguous record, laid out as the scan's shared
// memory but for the zeros of A_solved^T.
//
//   k_in, q_decayed, k_solved [HEAD / 64, 64 tokens, 64 channels] bfloat16;   A_solved^T [64, 64] bfloat16;   decay [HEAD] float32
//
// Rows of 128 bytes; the 16-byte unit u of row r lies at u ^ (r % 8): the 128-byte swizzle of wgmma. A_solved^T as 16 x 16 blocks, rows of
// 32 bytes, unit u of row r at u ^ (r / 4 % 2): the 32-byte swizzle. Of its row block b the record has the column blocks b .. 3, row block
// after row block. A record that a backward reads too has them column block after column block, so has shared memory: there the reduction
// may go along rows as well.
#pragma once
#ifdef KDA_EMULATE
#include "../tests/emulate_hopper.h"
#else
#include <cuda_runtime.h>
#endif

namespace kda::hopper {

constexpr int kChunk = 64;

template <int HEAD>  // channels of a key: 64 or 128
struct Record {
  static constexpr int tile_bytes = kChunk * HEAD * 2;
  static constexpr int k_in = 0, q_decayed = tile_bytes, k_solved = 2 * tile_bytes, a_solved = 3 * tile_bytes;
  static constexpr int decay = a_solved + kChunk * kChunk * 2, stage_bytes = decay + HEAD * 4;  // in shared memory
  static constexpr int square = 16 * 16 * 2;
  // Where the squares of a row block, 0 to 3, begin in the record: 4, 3 and 2 of them lie before.
  __host__ __device__ static constexpr int first_square(int b) { return a_solved + square * (4 * b - (b > 1 ? 2 * b - 3 : 0)); }
  // Square (b, c), b <= c, of a record by columns; 16 squares in shared memory.
  __host__ __device__ static constexpr int square_by_columns(int b, int c) { return a_solved + square * (c * (c + 1) / 2 + b); }
  static constexpr int record_decay = a_solved + 10 * square, record_bytes = record_decay + HEAD * 4;
};

// Of 128 channels.
constexpr int kHead = 128;
constexpr int kTileBytes = Record<kHead>::tile_bytes;
constexpr int kKIn = Record<kHead>::k_in, kQDecayed = Record<kHead>::q_decayed, kKSolved = Record<kHead>::k_solved;
constexpr int kASolved = Record<kHead>::a_solved, kDecay = Record<kHead>::decay, kStageBytes = Record<kHead>::stage_bytes;
constexpr int kSquare = Record<kHead>::square;
__host__ __device__ constexpr int first_square(int block) { return Record<kHead>::first_square(block); }
static_assert(first_square(1) == kASolved + 4 * kSquare && first_square(2) == kASolved + 7 * kSquare &&
              first_square(3) == kASolved + 9 * kSquare, "");
constexpr int kRecordDecay = Record<kHead>::record_decay, kRecordBytes = Record<kHead>::record_bytes;

}  // namespace kda::hopper
