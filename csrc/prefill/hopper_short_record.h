// What the prepare kernel of short chunks hands to their scan: a record per 32 tokens and value head, two of them where hopper_record.h has
// one. A shorter chunk is less to prepare, and a block of shared memory holds two of them.
//
//   rows [2 halves of 64 channels][k_in of 32 tokens, q_decayed of 32][64] bfloat16;   k_solved [2 halves][32 tokens][64] bfloat16;
//   A_solved^T [32, 32] bfloat16;   decay [128] float32
//
// Swizzled as in hopper_record.h; k_in and q_decayed are one factor of 64 columns. Of the four squares of A_solved^T the record has those
// that are not zero: (0, 0), (0, 1) and (1, 1).
#pragma once
#include "hopper_record.h"

namespace kda::hopper {

constexpr int kShort = 32;

struct ShortRecord {
  static constexpr int k_in = 0, q_decayed = kShort * 128, half = 2 * kShort * 128;  // bytes from a half of either to the other
  static constexpr int k_solved = 2 * half, solved_half = kShort * 128;
  static constexpr int a_solved = k_solved + 2 * solved_half, square = 16 * 16 * 2;
  static constexpr int last_square = a_solved + 2 * square, record_decay = last_square + square, bytes = record_decay + 128 * 4;
  // In shared memory, with its zeros.
  static constexpr int stage_last_square = a_solved + 3 * square, decay = stage_last_square + square;
  static constexpr int stage_bytes = (decay + 128 * 4 + 1023) / 1024 * 1024;
  static constexpr int chunk_bytes = kChunk / kShort * bytes;
};
static_assert(ShortRecord::bytes % 256 == 0 && ShortRecord::chunk_bytes <= Record<128>::record_bytes, "");

}  // namespace kda::hopper
