// The instructions that C++ has no name for. tests/emulate.h has the same functions for a CPU.
#pragma once

#ifdef KDA_EMULATE
#include "../tests/emulate.h"
#else

#include <cstdint>

namespace kda {

// c += a b on tf32 tensor cores, m16n8k8; the low 13 bits of a and b are not looked at.
__device__ __forceinline__ void mma_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8 x 4 blocks of floats from shared memory. Lane l gives the address of row l % 8 of block l / 8, 4 aligned floats, and gets
// element (l / 4, l % 4) of every block.
__device__ __forceinline__ void load_blocks(float (&x)[4], const float *row) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "r"(address)
               : "memory");
}

// 16 bytes from device to shared memory, in the background.
__device__ __forceinline__ void copy_async(float *to, const float *from) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from));
}

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

}  // namespace kda

#endif
