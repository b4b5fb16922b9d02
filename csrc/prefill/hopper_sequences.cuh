// Which tokens a chunk or a sequence holds. Sequence n's records start at slot cu[n] / 64 + n: gaps, but no overlaps and no prefix sum.
#pragma once
#include "hopper.h"
#include "hopper_record.h"

namespace kda::hopper {

struct Span {
  int64_t batch, first, length;  // tokens first .. first + length of a batch row
};

__device__ __forceinline__ int64_t boundary(const HopperForward& p, int64_t n) {
  return p.cu_int32 ? static_cast<const int32_t*>(p.cu_seqlens)[n] : static_cast<const int64_t*>(p.cu_seqlens)[n];
}

__device__ __forceinline__ int64_t chunks_per_row(const HopperForward& p) { return (p.T + kChunk - 1) / kChunk; }

__device__ __forceinline__ int64_t first_slot(const HopperForward& p, int64_t n) {
  return p.cu_seqlens ? boundary(p, n) / kChunk + n : n * chunks_per_row(p);
}

__device__ __forceinline__ Span sequence_span(const HopperForward& p, int64_t n) {
  if (!p.cu_seqlens) return {n, 0, p.T};
  const int64_t first = boundary(p, n);
  return {0, first, boundary(p, n + 1) - first};
}

// The tokens of a slot; length <= 0 for a slot between two sequences, or after the last. A whole warp asks, and
// looks at 32 boundaries at a time.
__device__ __forceinline__ Span chunk_span(const HopperForward& p, uint32_t slot, int lane) {
  if (!p.cu_seqlens) {
    const uint32_t per_row = (static_cast<uint32_t>(p.T) + kChunk - 1) / kChunk, row = p.B == 1 ? 0 : slot / per_row;
    const int64_t first = static_cast<int64_t>(slot - row * per_row) * kChunk;
    return {row, first, row < p.B ? min(p.T - first, static_cast<int64_t>(kChunk)) : 0};
  }
  uint32_t low = 0, high = static_cast<uint32_t>(p.N);  // first_slot(low) <= slot < first_slot(high)
  while (high - low > 1) {
    const uint32_t step = (high - low + 31) / 32, middle = low + (lane + 1) * step;
    low += step * __popc(__ballot_sync(~0u, middle < high && first_slot(p, middle) <= slot));
    high = min(high, low + step);
  }
  const int64_t start = boundary(p, low), first = start + static_cast<int64_t>(slot - (start / kChunk + low)) * kChunk;
  return {0, first, min(boundary(p, low + 1) - first, static_cast<int64_t>(kChunk))};
}

// Where beta has a token of a span, and a value head; in elements.
__device__ __forceinline__ int64_t beta_offset(const HopperForward& p, const Span& span, int token, int head) {
  return span.batch * p.beta_strides.batch + (span.first + token) * p.beta_strides.token + head * p.beta_strides.head;
}

// The sequence that holds token `first` of a batch row.
__device__ __forceinline__ int64_t sequence_of(const HopperForward& p, int64_t batch, int64_t first) {
  if (!p.cu_seqlens) return batch;
  int64_t low = 0, high = p.N;  // boundary(low) <= first < boundary(high)
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (boundary(p, middle) <= first ? low : high) = middle;
  }
  return low;
}

}  // namespace kda::hopper
