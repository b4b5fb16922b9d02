// What a training forward keeps for a backward (`Kept` in hopper.h), as results of mma.sync lie in registers.
#pragma once
#include "hopper_record.h"
#include "hopper_square.cuh"
#include "hopper.h"

namespace kda::hopper {

// The row, or column, of a chunk that holds a token: with group = 2^bits, token t of each 32 is in t % group * (32 / group) + t / group.
__device__ __forceinline__ int row_of(int token, int bits) {
  const int t = token & 31;
  return (token & 32) | (t & ((1 << bits) - 1)) << (5 - bits) | t >> bits;
}

// One chunk's and head's `lower` and `solved`.
struct KeptChunk {
  void* lower;
  uint16_t* solved;
  bool lower_float32;
  int bits;

  __device__ __forceinline__ KeptChunk(const Kept& kept, int64_t item)
      : lower(static_cast<uint8_t*>(kept.lower) + item * kChunk * kChunk * (kept.lower_float32 ? 4 : 2)),
        solved(kept.solved + item * kChunk * kChunk),
        lower_float32(kept.lower_float32 != 0),
        bits(kept.group_bits) {}

  __device__ __forceinline__ int at(int i, int j) const { return row_of(i, bits) * kChunk + row_of(j, bits); }
  __device__ __forceinline__ void keep_lower(int i, int j, float x) const {
    if (lower_float32)
      static_cast<float*>(lower)[at(i, j)] = x;
    else
      static_cast<uint16_t*>(lower)[at(i, j)] = static_cast<uint16_t>(pack_half(x, x));
  }
  __device__ __forceinline__ void keep_solved(int i, int j, float x) const {
    solved[at(i, j)] = static_cast<uint16_t>(pack_bf16(x, x));
  }

  // Block (row, column) of either matrix, whose transpose a warp holds; and zeros in the block on the other side of the diagonal. `Store`
  // is one of the two functions above, `factor(i, j)` goes with each number.
  template <typename Store, typename Factor>
  __device__ __forceinline__ void keep_block(int row, int column, const Square& transposed, int lane, Store store, Factor factor) const {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int i = square_column(n, r, lane), j = square_row(r, lane);
        store(16 * row + i, 16 * column + j, transposed.x[n][r] * factor(16 * row + i, 16 * column + j));
        if (row != column) store(16 * column + i, 16 * row + j, 0.0f);
      }
  }
};

// S^T of 16 value channels of the state before a chunk, from `value` on, rounded: left[s][j] has value lane / 4 + 8 (j % 2) and keys
// 16 s + 8 (j / 2) + 2 (lane % 4) + {0, 1}.
__device__ __forceinline__ void keep_state(const Kept& kept, uint32_t slot, int64_t heads, int64_t head, int value,
                                           const uint32_t (&left)[8][4], int lane) {
  uint16_t* to = kept.states + ((slot / static_cast<uint32_t>(kept.every) * heads + head) * kHead + value + lane / 4) * kHead +
                 2 * (lane % 4);
#pragma unroll
  for (int s = 0; s < 8; ++s)
#pragma unroll
    for (int j = 0; j < 4; ++j) *reinterpret_cast<uint32_t*>(to + 8 * (j % 2) * kHead + 16 * s + 8 * (j / 2)) = left[s][j];
}

}  // namespace kda::hopper
