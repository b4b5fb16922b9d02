// A long sequence scanned in parts: what each part hands to the later ones. Over a part the state goes from S to M S + b; `parts` finds b
// of every part but the last, and M of those between the first and the last; the scan of a part starts from what lies before it.
//
//   b: S^T as the accumulators hold it, [2 slices of 64 value channels][64 registers][128 threads] float32
//   M: two bfloat16 numbers whose sum it is, each [2 halves of 64 columns][128 rows][64] with the 128-byte swizzle of wgmma
//   deciding: how many of its last chunks decide about the state after it; 0: all, and M counts
#pragma once
#include "hopper_sequences.cuh"

namespace kda::hopper {

constexpr int kLinkBytes = kHead * kHead * 4;  // of b, and of M

__host__ __device__ inline int64_t links_bytes(int64_t rows, int parts) {
  return parts > 2 ? rows * (2 * parts - 3) * kLinkBytes + rows * parts * 4 : 0;
}

struct Links {
  uint8_t* base;
  int64_t rows;
  int parts;

  __device__ __forceinline__ float* b(int64_t row, int part, int slice) const {  // part 0 .. parts - 2
    return reinterpret_cast<float*>(base + (row * (2 * parts - 3) + part) * kLinkBytes) + slice * (kHead * kHead / 2);
  }
  __device__ __forceinline__ uint8_t* M(int64_t row, int part) const {  // part 1 .. parts - 2
    return base + (row * (2 * parts - 3) + parts - 2 + part) * kLinkBytes;
  }
  __device__ __forceinline__ int& deciding(int64_t row, int part) const {
    return reinterpret_cast<int*>(base + rows * (2 * parts - 3) * kLinkBytes)[row * parts + part];
  }
};

__device__ __forceinline__ Links links_of(const HopperForward& p) { return {static_cast<uint8_t*>(p.links), p.N * p.HV, p.parts}; }

// Chunks first .. first + count of a sequence; parts are equally long but for the last ones, which may be empty.
struct Part {
  int first, count;
  bool last;  // of those that are not empty; the first of an empty sequence
};
__device__ __forceinline__ Part part_of(int chunks, int parts, int part) {
  const int length = (chunks + parts - 1) / parts, first = min(part * length, chunks);
  return {first, min(length, chunks - first), chunks == 0 ? part == 0 : part == (chunks - 1) / length};
}

}  // namespace kda::hopper
