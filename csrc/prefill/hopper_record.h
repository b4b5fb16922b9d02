// What the prepare kernel hands to the scan, per chunk of 64 tokens and value head: one contiguous record, laid out as the scan's shared
// memory but for the zeros of A_solved^T.
//
//   k_in, q_decayed, k_solved [2, 64 tokens, 64 channels] bfloat16;   A_solved^T [64, 64] bfloat16;   decay [128] float32
//
// Rows of 128 bytes; the 16-byte unit u of row r lies at u ^ (r % 8): the 128-byte swizzle of wgmma. A_solved^T as 16 x 16 blocks, rows of
// 32 bytes, unit u of row r at u ^ (r / 4 % 2): the 32-byte swizzle. Of its row block b the record has the column blocks b .. 3.
#pragma once
#ifdef KDA_EMULATE
#include "../tests/emulate_hopper.h"
#else
#include <cuda_runtime.h>
#endif

namespace kda::hopper {

constexpr int kChunk = 64;
constexpr int kHead = 128;
constexpr int kTileBytes = kChunk * kHead * 2;
constexpr int kKIn = 0;
constexpr int kQDecayed = kTileBytes;
constexpr int kKSolved = 2 * kTileBytes;
constexpr int kASolved = 3 * kTileBytes;
constexpr int kDecay = kASolved + kChunk * kChunk * 2;
constexpr int kStageBytes = kDecay + kHead * 4;  // in shared memory

constexpr int kSquare = 16 * 16 * 2;
// Where the squares of a row block, 0 to 3, begin in the record: 4, 3 and 2 of them lie before.
__host__ __device__ constexpr int first_square(int block) { return kASolved + kSquare * (4 * block - (block > 1 ? 2 * block - 3 : 0)); }
constexpr int kRecordDecay = kASolved + 10 * kSquare;
static_assert(first_square(1) == kASolved + 4 * kSquare && first_square(2) == kASolved + 7 * kSquare &&
              first_square(3) == kASolved + 9 * kSquare, "");
constexpr int kRecordBytes = kRecordDecay + kHead * 4;

}  // namespace kda::hopper
