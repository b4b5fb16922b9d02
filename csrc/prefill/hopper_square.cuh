// 16 x 16 matrices in a warp's registers: products over channels, masks, the unit lower triangular inverse.
#pragma once
#include "hopper_ptx.cuh"

namespace kda::hopper {

struct Square {  // two C tiles side by side
  float x[2][4];
};
__device__ __forceinline__ int square_row(int r, int lane) { return lane / 4 + 8 * (r / 2); }
__device__ __forceinline__ int square_column(int n, int r, int lane) { return 8 * n + 2 * (lane % 4) + r % 2; }

// The pairs (i, j) whose highest differing bit is in [from, to) are taken from `fresh`.
__device__ __forceinline__ void take(Square& acc, const Square& fresh, int from, int to, int lane) {
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int differ = square_row(r, lane) ^ square_column(n, r, lane);
      acc.x[n][r] = differ >= from && differ < to ? fresh.x[n][r] : acc.x[n][r];
    }
}

__device__ __forceinline__ void half_operand(uint32_t (&a)[4], const Square& s) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = pack_half(s.x[i / 2][2 * (i % 2)], s.x[i / 2][2 * (i % 2) + 1]);
}

// acc += a right, everything in registers.
__device__ __forceinline__ void multiply_add(Square& acc, const uint32_t (&a)[4], const Square& right) {
  uint32_t b[4];
  half_operand(b, right);
#pragma unroll
  for (int i = 0; i < 4; ++i) b[i] = transposed(b[i]);
  mma_half(acc.x[0], a, b[0], b[1]), mma_half(acc.x[1], a, b[2], b[3]);
}

// Where unit u, 16 bytes, of row r of 16 x 16 halves in shared memory lies; without padding, rows of 32 bytes, at u ^ (r / 4 % 2).
template <int PITCH>
__device__ __forceinline__ uint32_t square_unit(uint32_t square, int row, int unit) {
  return square + row * PITCH + (PITCH == 32 ? unit ^ (row >> 2 & 1) : unit) * 16;
}

// acc += a right^T with right [16, 16] halves in shared memory.
template <int PITCH>
__device__ __forceinline__ void multiply_transposed(Square& acc, const uint32_t (&a)[4], uint32_t right, int lane) {
  uint32_t b[4];
  load_matrices(b, square_unit<PITCH>(right, (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1));
  mma_half(acc.x[0], a, b[0], b[1]), mma_half(acc.x[1], a, b[2], b[3]);
}

template <int PITCH>
__device__ __forceinline__ void store_square(uint32_t to, const Square& s, int lane) {  // as halves
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const auto place = [&](int r) {
      if (PITCH == 32) return square_unit<PITCH>(to, square_row(r, lane), n) + lane % 4 * 4;
      return to + square_row(r, lane) * PITCH + square_column(n, 0, lane) * 2;
    };
    store_shared(place(0), pack_half(s.x[n][0], s.x[n][1]));
    store_shared(place(2), pack_half(s.x[n][2], s.x[n][3]));
  }
}

// (I - N)^-1 for strictly lower N by masked doubling: X <- X + X (N o M_b) X, b = 2, 4, 8. Exact algebra: no powers of N, nothing cancels.
__device__ __forceinline__ Square unit_lower_inverse(const Square& negative, int lane) {
  Square inverse;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int differ = square_row(r, lane) ^ square_column(n, r, lane);
      inverse.x[n][r] = differ == 0 ? 1.0f : differ == 1 ? negative.x[n][r] : 0.0f;
    }
#pragma unroll
  for (int b = 2; b < 16; b *= 2) {
    Square level = {}, right = {};
    take(level, negative, b, 2 * b, lane);
    uint32_t a[4];
    half_operand(a, level);
    multiply_add(right, a, inverse);
    half_operand(a, inverse);
    multiply_add(inverse, a, right);
  }
  return inverse;
}

}  // namespace kda::hopper
