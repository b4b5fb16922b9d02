// Matrices that the copy engine brings in pieces, with the 128-byte swizzle of wgmma: rows of 64 columns, 16-byte unit u of row r at
// u ^ (r % 8).
#pragma once
#include "../prefill/hopper_ptx.cuh"
#ifndef KDA_EMULATE
#include <cuda.h>

namespace kda::hopper {

using Matrix = CUtensorMap;  // [rows, columns] of 16-bit elements

// Columns x .. x + 64 of the map's number of rows from y on.
__device__ __forceinline__ void load_piece(uint32_t to, const Matrix& matrix, int x, int y, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(&matrix)), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void store_piece(const Matrix& matrix, int x, int y, uint32_t from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(reinterpret_cast<uint64_t>(&matrix)),
               "r"(x), "r"(y), "r"(from)
               : "memory");
}
__device__ __forceinline__ void pieces_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// The thread's pieces so far have been read from shared memory.
__device__ __forceinline__ void pieces_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Of two pairs of bfloat16 the larger magnitudes; signs mean nothing.
__device__ __forceinline__ uint32_t larger_bf16(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

}  // namespace kda::hopper
#endif
