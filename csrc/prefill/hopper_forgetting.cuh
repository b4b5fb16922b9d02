// Whether the last chunks of a part of a sequence forget all that was before them. Over a chunk the state goes from S to
// (Diag(decay) - k_solved^T k_in) S + k_solved^T v, and by the triangle inequality, for any gates, keys and write strengths,
//
//   |Diag(decay) - k_solved^T k_in| <= max decay + sum_t |k_solved_t| |k_in_t|
//
// Where the product of these bounds is below kForgotten, what was before is far below float32's resolution of what it meets. Found on the
// device, from the records; nothing is assumed.
#pragma once
#include "hopper_ptx.cuh"
#include "hopper_record.h"

namespace kda::hopper {

constexpr float kForgotten = 0x1p-40f, kPromising = 0x1p-8f;  // where one chunk's bound is above the second, no other is looked at
constexpr int kTries = 3;                                       // chunks

// The bound of one chunk's matrix, by the first JUDGES threads; all threads of the block ask. `scratch`: JUDGES / 16 floats.
template <int JUDGES>
__device__ __forceinline__ float bound(const uint8_t* record, float* scratch) {
  constexpr int kPerToken = JUDGES / kChunk, kUnits = 16 / kPerToken, kWarps = JUDGES / 32;  // units of 16 bytes
  const int thread = threadIdx.x, lane = thread % 32;
  __syncthreads();
  if (thread < JUDGES) {
    const int token = thread / kPerToken, first = thread % kPerToken * kUnits, at = first / 8 * 8192 + token * 128 + first % 8 * 16;
    float squares[2] = {};
#pragma unroll
    for (int which = 0; which < 2; ++which)
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        const uint4 x = *reinterpret_cast<const uint4*>(record + (which ? kKSolved : kKIn) + at + i * 16);
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; ++j)
          squares[which] = fmaf(low(words[j]), low(words[j]), fmaf(high(words[j]), high(words[j]), squares[which]));
      }
#pragma unroll
    for (int which = 0; which < 2; ++which)
#pragma unroll
      for (int step = 1; step < kPerToken; step *= 2) squares[which] += __shfl_xor_sync(~0u, squares[which], step);
    float sum = sqrtf(squares[0]) * sqrtf(squares[1]);
    float largest = thread < kHead ? reinterpret_cast<const float*>(record + kRecordDecay)[thread] : 0.0f;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      if (step >= kPerToken) sum += __shfl_xor_sync(~0u, sum, step);
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    }
    if (lane == 0) scratch[thread / 32] = sum, scratch[kWarps + thread / 32] = largest;
  }
  __syncthreads();
  float sum = 0.0f, largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += scratch[i], largest = fmaxf(largest, scratch[kWarps + i]);
  return 1.0001f * (sum + largest);  // and what these sums were rounded by
}

// How many of the last `chunks` chunks, records `step` bytes apart, decide about the state after them; 0: all. NaN decides for all.
template <int JUDGES>
__device__ __forceinline__ int deciding(const uint8_t* last, int64_t step, int chunks, float* scratch) {
  float product = 1.0f;
  for (int i = 0; i < min(chunks, kTries); ++i) {
    const float one = bound<JUDGES>(last - i * step, scratch);
    product *= one;
    if (product < kForgotten) return i + 1;
    if (!(one < kPromising)) return 0;
  }
  return 0;
}

}  // namespace kda::hopper
