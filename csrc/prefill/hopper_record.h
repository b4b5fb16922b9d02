// What the prepare kernel hands to the scan, per chunk of 64 tokens and value head: one contiguous record, laid out as the scan's shared memory.
//
//   k_in, q_decayed, k_solved [2, 64 tokens, 64 channels] bfloat16;   A_solved^T [64, 64] bfloat16;   decay [128] float32
//
// Rows of 128 bytes; the 16-byte unit u of row r lies at u ^ (r % 8): the 128-byte swizzle of wgmma.
#pragma once
#include <cstddef>

namespace kda::hopper {

constexpr int kChunk = 64;
constexpr int kHead = 128;
constexpr int kTileBytes = kChunk * kHead * 2;
constexpr int kKIn = 0;
constexpr int kQDecayed = kTileBytes;
constexpr int kKSolved = 2 * kTileBytes;
constexpr int kASolved = 3 * kTileBytes;
constexpr int kDecay = kASolved + kChunk * kChunk * 2;
constexpr int kRecordBytes = kDecay + kHead * 4;

}  // namespace kda::hopper
