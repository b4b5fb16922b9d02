// What the prepare kernel of blocks hands to their scan: a record per block of 16 tokens and value head, four of them where hopper_record.h
// has one. A block is a chunk of its own, so nothing lies between blocks: less to prepare, and about as much to read. The scan has more
// steps, which counts where there are few heads.
//
//   rows [2 halves of 64 channels][k_in of 16 tokens, q_decayed of 16][64] bfloat16;   k_solved [2 halves][16 tokens][64] bfloat16;
//   A_solved^T [16, 16] bfloat16;   decay [128] float32
//
// Swizzled as in hopper_record.h. k_in and q_decayed are one factor of 32 columns.
#pragma once
#include "hopper_record.h"

namespace kda::hopper {

struct BlockRecord {
  static constexpr int k_in = 0, q_decayed = 16 * 128, half = 32 * 128;  // bytes from a half of either to the other
  static constexpr int k_solved = 2 * half, solved_half = 16 * 128;
  static constexpr int a_solved = k_solved + 2 * solved_half, decay = a_solved + 16 * 16 * 2;
  static constexpr int bytes = decay + 128 * 4, chunk_bytes = 4 * bytes;
};
static_assert(BlockRecord::bytes % 1024 == 0 && BlockRecord::chunk_bytes <= Record<128>::record_bytes, "");

}  // namespace kda::hopper
