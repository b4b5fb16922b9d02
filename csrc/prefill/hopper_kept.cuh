// Where a training forward leaves what a backward begins with (`Kept` in hopper.h).
#pragma once
#include "hopper.h"
#include "hopper_ptx.cuh"
#include "hopper_record.h"

namespace kda::hopper {

// The row, or column, of a chunk that holds a token: with group = 2^bits, token t of each 32 is in t % group * (32 / group) + t / group.
__device__ __forceinline__ int row_of(int token, int bits) {
  const int t = token & 31;
  return (token & 32) | (t & ((1 << bits) - 1)) << (5 - bits) | t >> bits;
}
__device__ __forceinline__ int token_of(int row, int bits) { return row_of(row, 5 - bits); }

// S^T of 16 value channels of the state before a chunk, from `value` on, rounded: left[s][j] has value lane / 4 + 8 (j % 2) and keys
// 16 s + 8 (j / 2) + 2 (lane % 4) + {0, 1}.
template <int STEPS>
__device__ __forceinline__ void keep_state(const Kept& kept, uint32_t slot, int64_t heads, int64_t head, int value,
                                           const uint32_t (&left)[STEPS][4], int lane) {
  constexpr int kHead = 16 * STEPS;
  uint16_t* to = static_cast<uint16_t*>(kept.states) +
                 ((slot / static_cast<uint32_t>(kept.every) * heads + head) * kHead + value + lane / 4) * kHead + 2 * (lane % 4);
#pragma unroll
  for (int s = 0; s < STEPS; ++s)
#pragma unroll
    for (int j = 0; j < 4; ++j) *reinterpret_cast<uint32_t*>(to + 8 * (j % 2) * kHead + 16 * s + 8 * (j / 2)) = left[s][j];
}

// The same of 128 channels for every slot: lanes trade words with their neighbours, so that each has eight bytes of a row and four have 32.
__device__ __forceinline__ void keep_every_state(const Kept& kept, int64_t item, int value, const uint32_t (&left)[8][4], int lane) {
  KDA_HIDE_WORD(lane);  // or the compiler prepares addresses before the loop
  const bool odd = lane & 1;
  uint16_t* to = static_cast<uint16_t*>(kept.states) + (item * 128 + value + lane / 4) * 128 + 8 * odd + 2 * (lane & 2);
#pragma unroll
  for (int s = 0; s < 8; ++s)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t near = left[s][half], far = left[s][half + 2], other = __shfl_xor_sync(~0u, odd ? near : far, 1);
      *reinterpret_cast<uint2*>(to + 8 * half * 128 + 16 * s) = odd ? uint2{other, far} : uint2{near, other};
    }
}

// The same in float32: S[4 n + j] has value lane / 4 + 8 (j / 2) and key 8 n + 2 (lane % 4) + j % 2.
template <int COUNT>
__device__ __forceinline__ void keep_exact_state(const Kept& kept, uint32_t slot, int64_t heads, int64_t head, int value,
                                                 const float (&S)[COUNT], int lane) {
  constexpr int kHead = 2 * COUNT;
  float* to = static_cast<float*>(kept.states) +
              ((slot / static_cast<uint32_t>(kept.every) * heads + head) * kHead + value + lane / 4) * kHead + 2 * (lane % 4);
#pragma unroll
  for (int n = 0; n < kHead / 8; ++n)
#pragma unroll
    for (int j = 0; j < 4; j += 2) *reinterpret_cast<float2*>(to + 4 * j * kHead + 8 * n) = make_float2(S[4 * n + j], S[4 * n + j + 1]);
}

}  // namespace kda::hopper
