// Matrix products of float32 on tf32 tensor cores with float32's accuracy.
//
//     x = hi + lo,   hi = x rounded to tf32,   lo = x - hi            a b ~ a_hi b_hi + a_hi b_lo + a_lo b_hi      (error ~ 2^-22)
//
// Tensor cores truncate when they accumulate, always towards zero. So each step of 8 starts from zero and its sum is added by an
// ordinary, rounding addition.
#pragma once

#include <cstdint>

#include "ptx.cuh"

namespace kda {

// Fragments of mma.m16n8k8, with g = lane / 4 and t = lane % 4:
//   A [16, 8]: (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4)      B [8, 8]: (t, g), (t + 4, g)
//   C [16, 8]: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
struct FragA {
  uint32_t hi[4], lo[4];
};

struct FragB {
  uint32_t hi[2], lo[2];
};

__device__ __forceinline__ void split(float x, uint32_t &hi, uint32_t &lo) {
  hi = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
  lo = __float_as_uint(x - __uint_as_float(hi));
}

__device__ __forceinline__ FragA frag_a(float x0, float x1, float x2, float x3) {
  FragA a;
  split(x0, a.hi[0], a.lo[0]);
  split(x1, a.hi[1], a.lo[1]);
  split(x2, a.hi[2], a.lo[2]);
  split(x3, a.hi[3], a.lo[3]);
  return a;
}

__device__ __forceinline__ FragA frag_a(const float (&x)[4]) { return frag_a(x[0], x[1], x[2], x[3]); }

// Where this lane's address lies in a row-major [16, 8] tile that load_blocks reads as an A fragment.
template <int LD>
__device__ __forceinline__ int frag_a_offset() {
  const int lane = threadIdx.x % 32;
  return lane % 16 * LD + lane / 16 * 4;
}

__device__ __forceinline__ FragB frag_b(float x0, float x1) {
  FragB b;
  split(x0, b.hi[0], b.lo[0]);
  split(x1, b.hi[1], b.lo[1]);
  return b;
}

// c += a b
__device__ __forceinline__ void mma3(float (&c)[4], const FragA &a, const FragB &b) {
  float part[4];
  mma_tf32(part, a.lo, b.hi, {0.f, 0.f, 0.f, 0.f});
  mma_tf32(part, a.hi, b.lo, part);
  mma_tf32(part, a.hi, b.hi, part);
#pragma unroll
  for (int i = 0; i < 4; ++i) c[i] += part[i];
}

}  // namespace kda
