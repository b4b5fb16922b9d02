// A block of the gradient kernel: its threads, its shared memory, and how the next chunk comes into it.
//
// Sixteen warps. Warp w has the block of 16 tokens b = w % 4 and the slice of 32 channels n = w / 4, in two layouts:
//   as results of mma.sync, lane l: tokens l / 4 and l / 4 + 8, channels 8 t + 2 (l % 4) + {0, 1}, t = 0 .. 3
//   by token, lane l: the eight tokens of group l / 16, channels 2 (l % 16) + {0, 1}: sums over tokens stay in registers
#pragma once
#include "../prefill/hopper_kept.cuh"
#include "../prefill/hopper_sequences.cuh"
#include "../prefill/hopper_ptx.cuh"
#include "hopper_gradient.h"

namespace kda::hopper {

constexpr int kGradientWarps = 16, kGradientThreads = kGradientWarps * 32;
constexpr int kGroups = kChunk / 8;  // of eight tokens

// Tiles have rows of 256 bytes, 16-byte unit u of row r at u ^ (r % 8); pairs and float16 `lower` rows of 128 bytes.
constexpr int kAtS = 0, kAtDS = kAtS + 32768, kAtDO = kAtDS + 32768, kAtDV = kAtDO + 16384, kAtR = kAtDV + 16384;
constexpr int kAtLower = kAtR + 16384, kAtFactors = kAtLower + 16384;  // twice: the next chunk's come while this one's are in use
constexpr int kAtVNew = kAtFactors + 2 * 768;
constexpr int kAtRowsQ = kAtVNew + 16384, kAtRowsK = kAtRowsQ + 16384, kAtColumns = kAtRowsK + 16384, kAtPairs = kAtColumns + 16384;
constexpr int kAtSums = kAtPairs + 16384, kAtSteps = kAtSums + 4096, kAtAhead = kAtSteps + 4096;  // [groups][128] float32 each
constexpr int kAtDots = kAtAhead + 4096;                                                           // [2][64][4 slices] float32
constexpr int kAtDDecay = kAtDots + 2048, kAtDiagonal = kAtDDecay + 512, kAtLargest = kAtDiagonal + 256;
constexpr int kAtChunk = kAtLargest + 64;  // twice
constexpr int kGradientBytes = kAtChunk + 2 * 32;
static_assert(kGradientBytes <= 232448, "one block on a multiprocessor");
// Once tiles are used up: a patch per warp in which results of mma.sync change to tokens; then sums per group.
constexpr int kPatchPitch = 40 * 4, kPatch = 16 * kPatchPitch;
constexpr int kAtBiasShares = kAtColumns, kAtAShares = kAtColumns + 4096;
static_assert(kGradientWarps * kPatch <= 3 * 16384, "patches lie in the tiles' place");

struct Seat {
  uint32_t smem;
  uint8_t* bytes;  // the same
  int thread, lane, warp, block, slice;

  __device__ __forceinline__ float* floats(int at) const { return reinterpret_cast<float*>(bytes + at); }
  __device__ __forceinline__ int group() const { return 2 * block + lane / 16; }           // by token
  __device__ __forceinline__ int channel() const { return 32 * slice + 2 * (lane % 16); }  // by token, the first of two
  __device__ __forceinline__ int result_row(int r) const { return 16 * block + lane / 4 + 8 * (r / 2); }
  __device__ __forceinline__ int result_channel(int t) const { return 32 * slice + 8 * t + 2 * (lane % 4); }
};

// Asked for anew in every phase, so that no address is kept in a register from one to the next.
__device__ __forceinline__ Seat seat_of(uint8_t* bytes) {
  const int thread = thread_index(), warp = __shfl_sync(~0u, thread / 32, 0);
  return {shared_address(bytes), bytes, thread, thread % 32, warp, warp % 4, warp / 4};
}

__device__ __forceinline__ float2 load_two(const float* at) { return *reinterpret_cast<const float2*>(at); }
__device__ __forceinline__ uint32_t tile_at(int row, int unit) { return row * 256 + ((unit ^ (row & 7)) << 4); }
// The two channels from `channel` on of a row.
__device__ __forceinline__ uint32_t word_at(int row, int channel) { return tile_at(row, channel >> 3) + (channel & 7) * 2; }
__device__ __forceinline__ uint32_t pair_at(int row, int unit) { return row * 128 + ((unit ^ (row & 7)) << 4); }  // [128 rows][64]

struct Chunk {
  int64_t item;                     // slot * HV + head
  int batch, first, length, head;  // tokens first .. first + length of a batch row

  // The first token's row of a [B, T, HV, ..] tensor, and its offset in elements of one with strides.
  __device__ __forceinline__ int64_t token(const HopperForward& p) const { return (batch * p.T + first) * p.HV + head; }
  __device__ __forceinline__ int64_t offset(const TokenStrides& s, int of_head) const {
    return batch * s.batch + first * s.token + of_head * s.head;
  }
  __device__ __forceinline__ int key_head(const HopperForward& p) const { return p.H == p.HV ? head : head / static_cast<int>(p.HV / p.H); }
};

// In shared memory, so that it takes no registers from one phase to the next.
__device__ __forceinline__ void store_chunk(const Chunk& c, int turn, const Seat& at) {
  if (at.thread != 0) return;
  const auto word = [](int64_t x) { return static_cast<uint32_t>(x); };
  const uint32_t to = at.smem + kAtChunk + turn * 32;
  store_shared(to, make_uint4(word(c.item), word(c.item >> 32), word(c.batch), word(c.first)));
  store_shared(to + 16, make_uint4(word(c.length), word(c.head), 0, 0));
}
__device__ __forceinline__ Chunk load_chunk(int turn, const Seat& at) {
  const uint4 x = load_shared(at.smem + kAtChunk + turn * 32);
  const uint2 y = load_shared_pair(at.smem + kAtChunk + turn * 32 + 16);
  return {static_cast<int64_t>(static_cast<uint64_t>(x.y) << 32 | x.x), static_cast<int>(x.z), static_cast<int>(x.w),
          static_cast<int>(y.x), static_cast<int>(y.y)};
}

// The next chunk from `item` on that holds tokens; item >= items: there is none. Of those that hold none, shares are zero.
__device__ __forceinline__ Chunk chunk_from(const HopperGradient& p, int64_t item, int64_t items, int64_t step, const Seat& at) {
  Chunk c{item, 0, 0, 0, 0};
  for (; c.item < items; c.item += step) {
    const auto slot = static_cast<uint32_t>(c.item / p.in.HV);
    c.head = static_cast<int>(c.item - slot * p.in.HV);
    const Span span = chunk_span(p.in, slot, at.lane);
    c.batch = static_cast<int>(span.batch), c.first = static_cast<int>(span.first), c.length = static_cast<int>(span.length);
    if (c.length > 0) break;
    if (at.thread < kHead) {
      if (p.A_shares) p.A_shares[c.item * kHead + at.thread] = 0.0f;
      if (p.bias_shares) p.bias_shares[c.item * kHead + at.thread] = 0.0f;
    }
  }
  return c;
}

__device__ __forceinline__ void fetch_square(uint32_t to, const uint8_t* from, int rows, const Seat& at) {  // rows of 256 bytes
  const int row = at.thread / 16, unit = at.thread % 16;
#pragma unroll 4
  for (int i = 0; i < rows; i += kGradientThreads / 16) copy_async(to + tile_at(row + i, unit), from + (row + i) * 256 + unit * 16, 16);
}
__device__ __forceinline__ void fetch_tokens(uint32_t to, const void* tensor, const HopperGradient& p, const Chunk& c, const Seat& at) {
  const int row = at.thread / 16, unit = at.thread % 16;
  const uint8_t* from = static_cast<const uint8_t*>(tensor) + c.token(p.in) * 256 + unit * 16;
#pragma unroll
  for (int i = 0; i < kChunk; i += kGradientThreads / 16) {
    const bool inside = row + i < c.length;
    copy_async(to + tile_at(row + i, unit), inside ? from + (row + i) * (static_cast<uint32_t>(p.in.HV) * 256) : from, inside ? 16 : 0);
  }
}

// All that the products of a chunk need, asynchronously. `turn`: which of two places its factors take.
__device__ __forceinline__ void fetch_chunk(const HopperGradient& p, const Chunk& c, int turn, const Seat& at) {
  fetch_tokens(at.smem + kAtR, p.r, p, c, at);
  fetch_tokens(at.smem + kAtDV, p.d_v, p, c, at);
  fetch_tokens(at.smem + kAtDO, p.d_o, p, c, at);
  const auto* lower = static_cast<const uint8_t*>(p.lower) + c.item * (p.lower_float32 ? 16384 : 8192);
  if (p.lower_float32)
    fetch_square(at.smem + kAtLower, lower, kChunk, at);
  else
    copy_async(at.smem + kAtLower + pair_at(at.thread / 8, at.thread % 8), lower + at.thread * 16, 16);
  const auto* factors = reinterpret_cast<const uint8_t*>(p.factors + c.item * 3 * kChunk);
  if (at.thread < 48) copy_async(at.smem + kAtFactors + turn * 768 + at.thread * 16, factors + at.thread * 16, 16);
  fetch_square(at.smem + kAtDS, static_cast<const uint8_t*>(p.d_states) + c.item * 32768, kHead, at);
  fetch_square(at.smem + kAtS, static_cast<const uint8_t*>(p.states) + c.item * 32768, kHead, at);
}

// The warp's own q and k, 16 tokens and 32 channels, where their decayed rows will lie.
__device__ __forceinline__ void fetch_keys(const HopperGradient& p, const Chunk& c, const Seat& at) {
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const TokenStrides& s = which ? p.in.k_strides : p.in.q_strides;
    const auto* base = static_cast<const uint8_t*>(which ? p.in.k : p.in.q) +
                       2 * (c.offset(s, c.key_head(p.in)) + 32 * at.slice + at.lane % 4 * 8);
#pragma unroll
    for (int i = 0; i < 16; i += 8) {
      const int row = 16 * at.block + i + at.lane / 4;
      const bool inside = row < c.length;
      const uint32_t to = at.smem + (which ? kAtRowsK : kAtRowsQ) + tile_at(row, 4 * at.slice + at.lane % 4);
      copy_async(to, inside ? base + row * (2 * static_cast<uint32_t>(s.token)) : base, inside ? 16 : 0);
    }
  }
}

}  // namespace kda::hopper
