// The instructions that C++ has no name for. tests/emulate.h has the same functions for a CPU.
#pragma once

#ifdef KDA_EMULATE
#include "../tests/emulate.h"
#else

#include <cuda_fp16.h>

#include <cstdint>

namespace kda {

// d = a b + c on float16 tensor cores, m16n8k16.
__device__ __forceinline__ void mma_half(float (&d)[4], const uint4 &a, uint32_t b0, uint32_t b1, const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// Two floats rounded to float16, the first in the low half; and back.
__device__ __forceinline__ uint32_t pack_half(float a, float b) {
  uint32_t x;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(b), "f"(a));
  return x;
}
__device__ __forceinline__ float2 unpack_half(uint32_t x) { return __half22float2(*reinterpret_cast<const __half2 *>(&x)); }

// Four 8 x 8 blocks of 16-bit numbers from shared memory, transposed. Lane l gives the address of row l % 8 of block l / 8 and gets
// elements (2t, g) and (2t + 1, g) of every block.
__device__ __forceinline__ void load_transposed(uint32_t (&x)[4], const void *row) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_transposed(uint4 &x, const void *row) {
  uint32_t words[4];
  load_transposed(words, row);
  x = make_uint4(words[0], words[1], words[2], words[3]);
}

// The largest over the warp of numbers >= 0, whose bits are in the same order.
__device__ __forceinline__ float warp_largest(float x) { return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(x))); }

// 16 bytes from device to shared memory, in the background.
__device__ __forceinline__ void copy_async(void *to, const void *from) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Since sm_90 a kernel may start before its predecessor in the stream ends: the predecessor allows it, it waits before it reads.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace kda

#endif
