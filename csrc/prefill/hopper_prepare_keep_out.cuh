// `lower` and `solved`, staged by hopper_prepare_keep.cuh, to memory by whole rows, a lane two adjacent numbers of each; zeros beside what
// is strictly lower, or lower.
#pragma once
#include "hopper_prepare_keep.cuh"

namespace kda::hopper {

// 128 channels: eight rows a warp.
__device__ __forceinline__ void wide_lower_out(const Kept& kept, int64_t item, const Place& at) {
  const int j0 = token_of(2 * at.lane, kept.group_bits), j1 = token_of(2 * at.lane + 1, kept.group_bits);
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    const int i = at.warp * kTokens + t;
    const float x = j0 < i ? __uint_as_float(load_shared_word(lower_at<128>(at, i, j0))) : 0.0f;
    const float y = j1 < i ? __uint_as_float(load_shared_word(lower_at<128>(at, i, j1))) : 0.0f;
    const int64_t to = (item * kChunk + row_of(i, kept.group_bits)) * (kChunk / 2) + at.lane;
    if (kept.lower_float32)
      static_cast<float2*>(kept.lower)[to] = make_float2(x, y);
    else
      static_cast<uint32_t*>(kept.lower)[to] = pack_half(x, y);
  }
}
__device__ __forceinline__ void wide_solved_out(const Kept& kept, int64_t item, const Place& at) {
  const int j0 = token_of(2 * at.lane, kept.group_bits), j1 = token_of(2 * at.lane + 1, kept.group_bits);
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    const int i = at.warp * kTokens + t;
    const uint32_t x = j0 <= i ? load_shared_word(solved_at<128>(at, i, j0 & ~1)) >> 16 * (j0 & 1) & 0xffff : 0;
    const uint32_t y = j1 <= i ? load_shared_word(solved_at<128>(at, i, j1 & ~1)) >> 16 * (j1 & 1) : 0;
    reinterpret_cast<uint32_t*>(kept.solved)[(item * kChunk + row_of(i, kept.group_bits)) * (kChunk / 2) + at.lane] = x | y << 16;
  }
}

// 64 channels: 16 rows a warp, and few instructions a row. `row_of` moves bits, so that of 16 w + t it is the sum over w's and t's bits;
// in shared memory a row's number turns some bits of an address, the others lie a multiple of 128 bytes further.
static_assert(Places<64>::kept % 128 == 0 && Places<64>::columns % 128 == 0 && Places<64>::rows_k % 128 == 0, "");
template <typename Each>
__device__ __forceinline__ void each_row(int bits, int warp, Each each) {  // each(t, where its row lies)
  const int first = row_of(16 * warp, bits), bit[4] = {row_of(1, bits), row_of(2, bits), row_of(4, bits), row_of(8, bits)};
#pragma unroll
  for (int t = 0; t < kBlock; ++t) {
    int row = first;
#pragma unroll
    for (int b = 0; b < 4; ++b)
      if (t >> b & 1) row += bit[b];
    each(t, row);
  }
}
__device__ __forceinline__ void small_lower_out(const Kept& kept, int64_t item, const Place& at) {
  const int first = 16 * at.warp, j0 = token_of(2 * at.lane, kept.group_bits), j1 = token_of(2 * at.lane + 1, kept.group_bits);
  const uint32_t from0 = lower_at<64>(at, first, j0), from1 = lower_at<64>(at, first, j1);
  const auto number = [&](int t, int j, uint32_t from) {
    return j < first + t ? __uint_as_float(load_shared_word((from ^ (lower_turn(t) << 2)) + t * 128)) : 0.0f;
  };
  if (kept.lower_float32) {
    float2* to = static_cast<float2*>(kept.lower) + item * kChunk * (kChunk / 2) + at.lane;
    each_row(kept.group_bits, at.warp, [&](int t, int row) {
      to[row * (kChunk / 2)] = make_float2(number(t, j0, from0), number(t, j1, from1));
    });
  } else {
    uint32_t* to = static_cast<uint32_t*>(kept.lower) + item * kChunk * (kChunk / 2) + at.lane;
    each_row(kept.group_bits, at.warp, [&](int t, int row) {
      to[row * (kChunk / 2)] = pack_half(number(t, j0, from0), number(t, j1, from1));
    });
  }
}
__device__ __forceinline__ void small_solved_out(const Kept& kept, int64_t item, const Place& at) {
  const int first = 16 * at.warp, j0 = token_of(2 * at.lane, kept.group_bits), j1 = token_of(2 * at.lane + 1, kept.group_bits);
  const uint32_t from0 = solved_at<64>(at, first, j0 & ~1), from1 = solved_at<64>(at, first, j1 & ~1);
  const auto word = [&](int t, int j, uint32_t from) {
    return j <= first + t ? load_shared_word((from ^ ((t & 3) << 5 | (t >> 2 & 1) << 4)) + (t & 12) * 32) : 0u;
  };
  uint32_t* to = reinterpret_cast<uint32_t*>(kept.solved) + item * kChunk * (kChunk / 2) + at.lane;
  const uint32_t halves = (j0 & 1 ? 0x32u : 0x10u) | (j1 & 1 ? 0x7600u : 0x5400u);
  each_row(kept.group_bits, at.warp, [&](int t, int row) {
    to[row * (kChunk / 2)] = __byte_perm(word(t, j0, from0), word(t, j1, from1), halves);
  });
}

template <int HEAD>
__device__ __forceinline__ void lower_out(const Kept& kept, int64_t item, const Place& at) {
  HEAD == 64 ? small_lower_out(kept, item, at) : wide_lower_out(kept, item, at);
}
template <int HEAD>
__device__ __forceinline__ void solved_out(const Kept& kept, int64_t item, const Place& at) {
  HEAD == 64 ? small_solved_out(kept, item, at) : wide_solved_out(kept, item, at);
}

}  // namespace kda::hopper
