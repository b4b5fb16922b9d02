// k_solved = X^T k_decayed of a chunk, X = I - Diag(beta) lower: float16 factors with a float16 lower, else tf32.
//
// In shared memory, by token j:
//   float16: X [64][64], rows of 128 bytes, 16-byte unit u of row j at u ^ (j % 8); k_decayed [64][HEAD], rows of 2 HEAD bytes, eight of
//     them every 32 HEAD bytes, units likewise
//   tf32: X, rows of 256 bytes, word i of row j at i ^ 8 (j % 4); k_decayed, rows of 4 HEAD bytes, word c of row j at c ^ 2 (j % 4)
// Columns i of X are in the order of `row_of`: so are the rows of k_solved.
//
// A warp has 16 rows and 64 channels. Column 2 m + e of n-tile t of 32 channels is channel 8 m + 2 t + e, so that a lane's results are
// eight channels side by side. With float16 they lie in shared memory in that order.
#pragma once
#include "../prefill/hopper_kept.cuh"
#include "../prefill/hopper_tokens.cuh"
#include "hopper_rebuild.h"

namespace kda::hopper {

template <int HEAD>
constexpr int kOwn = 32 * HEAD;  // bytes from the keys of eight tokens to those of the next eight

// Units of 16 bytes of `lower`, row by row: a thread of a block's THREADS copies, and later turns into X, every THREADS-th from its own
// number on.
template <int THREADS, bool LOWER32>
struct Unit {
  static constexpr int of_row = LOWER32 ? 16 : 8, count = kChunk * of_row / THREADS;
  int row, column;  // of the chunk's matrix; eight or four columns from `column` on
  uint32_t place;   // in shared memory

  __device__ __forceinline__ Unit(int thread, int i, int bits) {
    const int unit = thread % of_row;
    row = (thread + i * THREADS) / of_row, column = unit * (LOWER32 ? 4 : 8);
    const int token = LOWER32 ? token_of(row, bits) : row;
    place = LOWER32 ? token * 256 + ((unit ^ (token % 4 * 2)) << 4) : token * 128 + ((unit ^ (token % 8)) << 4);
  }
};

template <int THREADS, bool LOWER32>
__device__ __forceinline__ void fetch_lower(const HopperRebuild& p, int64_t item, int thread, uint32_t to) {
  const auto* from = static_cast<const uint8_t*>(p.lower) + item * (kChunk * kChunk * (LOWER32 ? 4 : 2)) + thread * 16;
#pragma unroll
  for (int i = 0; i < Unit<THREADS, LOWER32>::count; ++i)
    copy_async(to + Unit<THREADS, LOWER32>(thread, i, p.group_bits).place, from + i * THREADS * 16, 16);
}

// `betas` by token.
template <int THREADS, bool LOWER32>
__device__ __forceinline__ void make_inverse(const HopperRebuild& p, const float* betas, int thread, uint32_t at) {
#pragma unroll
  for (int i = 0; i < Unit<THREADS, LOWER32>::count; ++i) {
    const Unit<THREADS, LOWER32> unit(thread, i, p.group_bits);
    const float strength = -betas[LOWER32 ? token_of(unit.row, p.group_bits) : unit.row];
    const uint4 x = load_shared(at + unit.place);
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
    uint32_t made[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (LOWER32) {
        made[j] = round_tf32(fmaf(strength, __uint_as_float(words[j]), unit.column + j == unit.row ? 1.0f : 0.0f));
      } else {
        const float2 y = unpack_half(words[j]);
        const int column = unit.column + 2 * j;
        const float here = column == unit.row ? 1.0f : 0.0f, next = column + 1 == unit.row ? 1.0f : 0.0f;
        made[j] = pack_half(fmaf(strength, y.x, here), fmaf(strength, y.y, next));
      }
    }
    store_shared(at + unit.place, make_uint4(made[0], made[1], made[2], made[3]));
  }
}

// Four channels of a token, from 4 lane on. `rows`: of eight tokens, `t` the number of this one.
template <int HEAD, bool LOWER32>
__device__ __forceinline__ void store_decayed(uint32_t rows, int t, int lane, const float (&x)[4]) {
  if (LOWER32) {
    const uint32_t a = round_tf32(x[0]), b = round_tf32(x[1]), c = round_tf32(x[2]), d = round_tf32(x[3]);
    store_shared(rows + t * HEAD * 4 + ((lane ^ (t % 4 / 2)) << 4), t % 2 ? make_uint4(c, d, a, b) : make_uint4(a, b, c, d));
  } else {
    const int unit = lane / 8 * 4 + lane % 2 * 2;
    const uint32_t place = rows + t * HEAD * 2 + lane % 8 / 2 * 4;
    store_shared(place + ((unit ^ t) << 4), pack_half(x[0], x[1]));
    store_shared(place + (((unit + 1) ^ t) << 4), pack_half(x[2], x[3]));
  }
}

// Rows 16 block .. of k_solved, channels 64 half ..
template <int HEAD, bool LOWER32>
__device__ __forceinline__ void solve_keys(const HopperRebuild& p, int64_t item, int block, int half, int lane, uint32_t inverse,
                                           uint32_t decayed) {
  float sums[8][4] = {};
  if (LOWER32) {
    // Token by token within a span of 32 rows, whatever its order: blocks of two meet all tokens of their own span and of later ones.
    const int first = p.group_bits ? block / 2 * 2 : block, j = lane % 4, i = lane / 4;
    const uint32_t rows = inverse + j * 256 + ((16 * block + i) ^ 8 * j) * 4;
    const uint32_t depth = decayed + j * HEAD * 4 + ((64 * half + i / 2 * 8 + i % 2) ^ 2 * j) * 4;
#pragma unroll 1
    for (int s = 2 * first; s < kChunk / 8; ++s) {
      uint32_t a[4];
      const uint32_t row = rows + s * 2048, column = depth + s * kOwn<HEAD>;
      a[0] = load_shared_word(row), a[1] = load_shared_word(row ^ 32);
      a[2] = load_shared_word(row + 1024), a[3] = load_shared_word((row ^ 32) + 1024);
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        const uint32_t at = (column ^ (t % 4 * 8)) + t / 4 * 128;
        mma_tf32(sums[t], a, load_shared_word(at), load_shared_word(at + 16 * HEAD));
      }
    }
  } else {
    const uint32_t rows = inverse + ((lane & 7) + (lane >> 4 << 3)) * 128 + (((2 * block + (lane >> 3 & 1)) ^ (lane & 7)) << 4);
    const uint32_t depth = decayed + (lane & 7) * HEAD * 2 + (lane >> 3 & 1) * kOwn<HEAD> + (((8 * half + (lane >> 4)) ^ (lane & 7)) << 4);
#pragma unroll 1
    for (int s = block; s < kChunk / 16; ++s) {
      uint32_t a[4], b[4][4];
      load_matrices_transposed(a, rows + s * 2048);
#pragma unroll
      for (int n = 0; n < 4; ++n) load_matrices_transposed(b[n], (depth ^ (n << 5)) + s * 2 * kOwn<HEAD>);
#pragma unroll
      for (int t = 0; t < 8; ++t) mma_half(sums[t], a, b[t / 2][t % 2 * 2], b[t / 2][t % 2 * 2 + 1]);
    }
  }
  auto* to = static_cast<uint8_t*>(p.tiles) + ((item * 3 + 2) * kChunk + 16 * block + lane / 4) * (HEAD * 2) + half * 128 + lane % 4 * 16;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int r = 0; r < 4; r += 2) {
      uint32_t words[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const float x = sums[4 * n + t][r], y = sums[4 * n + t][r + 1];
        words[t] = LOWER32 ? pack_bf16(x, y) : pack_half(x, y);
      }
      *reinterpret_cast<uint4*>(to + n * 64 + r * HEAD * 8) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

}  // namespace kda::hopper
