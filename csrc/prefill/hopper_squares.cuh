// A_solved^T of a record in shared memory, 16 squares of 16 x 16 numbers.
#pragma once
#include "hopper_ptx.cuh"
#include "hopper_record.h"

namespace kda::hopper {

// No record fills A_solved^T left of its diagonal: zeros for those squares. BY_COLUMNS: one column block lies after the other.
template <int THREADS, bool BY_COLUMNS>
__device__ __forceinline__ void clear_squares(uint32_t stage, int a_solved, int thread) {
  constexpr int kUnits = kSquare / 16;
  for (int i = thread; i < 6 * kUnits; i += THREADS) {
    const int square = i / kUnits, b = square < 1 ? 1 : square < 3 ? 2 : 3, c = square - b * (b - 1) / 2;
    store_shared(stage + a_solved + (BY_COLUMNS ? 4 * c + b : 4 * b + c) * kSquare + i % kUnits * 16, make_uint4(0, 0, 0, 0));
  }
}

}  // namespace kda::hopper
