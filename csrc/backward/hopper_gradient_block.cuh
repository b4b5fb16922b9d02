// A block of the gradient kernel: its threads, its shared memory, and how the next chunk comes into it.
//
// Sixteen warps. Each has a block of 16 tokens and a slice of 32 channels, in two layouts:
//   as results of mma.sync, lane l: tokens l / 4 and l / 4 + 8, channels 8 t + 2 (l % 4) + {0, 1}, t = 0 .. 3
//   by token, lane l: tokens 4 (l / 8) + {0 .. 3}, half of a group of eight, and channels 4 (l % 8) + {0 .. 3}
// What has an address, a norm or a mask of its own for every token has it for four channels.
#pragma once
#include "../prefill/hopper_kept.cuh"
#include "../prefill/hopper_ptx.cuh"
#include "../prefill/hopper_sequences.cuh"
#include "hopper_gradient.h"

namespace kda::hopper {

constexpr int kGradientWarps = 16, kGradientThreads = kGradientWarps * 32;
constexpr int kGroups = kChunk / 8;  // of eight tokens

// Tiles have rows of 256 bytes, 16-byte unit u of row r at u ^ (r % 8); pairs and float16 `lower` rows of 128 bytes. All tiles start at
// multiples of 1024 bytes, so that steps from row to row are bits of an address.
constexpr int kAtS = 0, kAtDS = kAtS + 32768, kAtDO = kAtDS + 32768, kAtDV = kAtDO + 16384, kAtR = kAtDV + 16384;
constexpr int kAtLower = kAtR + 16384, kAtVNew = kAtLower + 16384;
constexpr int kAtRowsQ = kAtVNew + 16384, kAtRowsK = kAtRowsQ + 16384, kAtColumns = kAtRowsK + 16384, kAtPairs = kAtColumns + 16384;
constexpr int kAtSums = kAtPairs + 16384, kAtSteps = kAtSums + 4096, kAtAhead = kAtSteps + 4096;  // [groups][128] float32 each
constexpr int kAtFactors = kAtAhead + 4096;   // twice: the next chunk's come while this one's are in use
constexpr int kAtDots = kAtFactors + 2 * 768;  // [2][64][4 slices] float32
constexpr int kAtDDecay = kAtDots + 2048, kAtDiagonal = kAtDDecay + 512, kAtLargest = kAtDiagonal + 256;
constexpr int kAtPower = kAtLargest + 64;  // the power of two that pairs are divided by
constexpr int kAtDeep = kAtPower + 16;     // [groups][4 slices] int: steps of two powers
constexpr int kAtBias = kAtDeep + 128;    // twice: dt_bias of the head
constexpr int kAtChunk = kAtBias + 2 * 512;  // twice
constexpr int kChunkBytes = 80;
constexpr int kGradientBytes = kAtChunk + 2 * kChunkBytes;
static_assert(kGradientBytes <= 232448, "one block on a multiprocessor");
// Once v_new is made: exponents of the tokens' decays, float32, as lanes hold them.
constexpr int kAtExponents = kAtR;
static_assert(kAtExponents + 16 * kGradientThreads * 4 == kAtVNew, "exponents lie in the place of r and lower");
// Once tiles are used up: a patch per warp in which results of mma.sync change to tokens; then sums per half group.
constexpr int kPatchPitch = 40 * 4, kPatch = 16 * kPatchPitch;
constexpr int kAtBiasShares = kAtColumns, kAtAShares = kAtColumns + 8192;
static_assert(kGradientWarps * kPatch <= 3 * 16384, "patches lie in the tiles' place");

// Two bits a warp: its block of tokens. Warps w, w + 4, w + 8, w + 12 take turns at one scheduler: they have all four blocks, and two or
// three of the ten warps that make pairs.
constexpr uint32_t kBlocks = 0x8dd27827u;

struct Seat {
  uint32_t smem;
  uint8_t* bytes;  // the same
  int thread, lane, warp, block, slice;

  __device__ __forceinline__ float* floats(int at) const { return reinterpret_cast<float*>(bytes + at); }
  __device__ __forceinline__ int* ints(int at) const { return reinterpret_cast<int*>(bytes + at); }
  // By token: the first of four tokens, the first of four channels, the group of eight tokens, and which half of it.
  __device__ __forceinline__ int token() const { return 16 * block + 4 * (lane / 8); }
  __device__ __forceinline__ int channel() const { return 32 * slice + 4 * (lane % 8); }
  __device__ __forceinline__ int group() const { return 2 * block + lane / 16; }
  __device__ __forceinline__ bool second() const { return lane & 8; }
  // Where the lane's first token lies in a tile; token t is at this ^ (t * 272).
  __device__ __forceinline__ uint32_t in_tile() const {
    return token() * 256 + (((4 * slice + lane % 8 / 2) ^ (lane & 8) / 2) << 4) + lane % 2 * 8;
  }
  // As results: the first token's row, and where its channels lie in a tile; n-tile t is at this ^ (t << 4), the second token 2048 on.
  __device__ __forceinline__ int result_row() const { return 16 * block + lane / 4; }
  __device__ __forceinline__ uint32_t result_in_tile() const {
    return result_row() * 256 + (((4 * slice) ^ (lane / 4)) << 4) + lane % 4 * 4;
  }
};

// Asked for anew where registers are scarce, so that no address is kept in one from phase to phase. Bits that cannot be set are cleared:
// the compiler then knows that nothing is negative.
__device__ __forceinline__ Seat seat_of(uint8_t* bytes) {
  const int thread = thread_index() & (kGradientThreads - 1), warp = __shfl_sync(~0u, thread >> 5, 0) & (kGradientWarps - 1);
  return {shared_address(bytes), bytes, thread, thread & 31, warp, static_cast<int>(kBlocks >> 2 * warp & 3), warp >> 2};
}

__device__ __forceinline__ float4 load_four(const float* at) { return *reinterpret_cast<const float4*>(at); }
__device__ __forceinline__ void store_four(float* at, const float (&x)[4]) {
  *reinterpret_cast<float4*>(at) = make_float4(x[0], x[1], x[2], x[3]);
}
__device__ __forceinline__ void unpack(float (&y)[4], uint2 x) { y[0] = low(x.x), y[1] = high(x.x), y[2] = low(x.y), y[3] = high(x.y); }
__device__ __forceinline__ void unpack(float (&y)[4], float4 x) { y[0] = x.x, y[1] = x.y, y[2] = x.z, y[3] = x.w; }
__device__ __forceinline__ uint32_t tile_at(int row, int unit) { return row * 256 + ((unit ^ (row & 7)) << 4); }
__device__ __forceinline__ uint32_t pair_at(int row, int unit) { return row * 128 + ((unit ^ (row & 7)) << 4); }  // [128 rows][64]

// 1 / x of a power of two, between 2^-126 and 2^126.
__device__ __forceinline__ float over_power(float x) { return __uint_as_float(0x7f000000u - __float_as_uint(x)); }

// In shared memory. One warp finds it; offsets are in elements, of the chunk's first token.
struct Chunk {
  int64_t item, token;  // slot * HV + head; the first token's row of a [B, T, HV, ..] tensor
  int64_t offsets[4];    // of q, k, g, beta
  const float *initial, *final;  // S and dS' in float32, at the sequence's first chunk and at its last; or null
  int length, head;
  float a;  // e^A_log
  int callers;  // kInitial: S is the caller's initial_state; kFinal: dS' is d_final
};
constexpr int kInitial = 1, kFinal = 2;
static_assert(sizeof(Chunk) == kChunkBytes, "");

__device__ __forceinline__ Chunk& chunk_at(int turn, const Seat& at) {
  return *reinterpret_cast<Chunk*>(at.bytes + kAtChunk + turn * kChunkBytes);
}

// One warp: the next chunk from `item` on that holds tokens; item >= items: there is none. Of those that hold none, shares are zero.
__device__ __forceinline__ void find_chunk(const HopperGradient& p, int64_t item, int64_t items, int64_t step, int turn, const Seat& at) {
  Chunk c{};
  c.item = item;
  int64_t batch = 0, first = 0;
  for (; c.item < items; c.item += step) {
    const auto slot = static_cast<uint32_t>(c.item / p.in.HV);
    c.head = static_cast<int>(c.item - slot * p.in.HV);
    const Span span = chunk_span(p.in, slot, at.lane);
    batch = span.batch, first = span.first, c.length = static_cast<int>(span.length);
    if (c.length > 0) break;
    const float zeros[4] = {};
    if (p.A_shares) store_four(p.A_shares + c.item * kHead + 4 * at.lane, zeros);
    if (p.bias_shares) store_four(p.bias_shares + c.item * kHead + 4 * at.lane, zeros);
  }
  if (c.item < items && (p.in.initial_state || p.d_final)) {
    const int64_t n = sequence_of(p.in, batch, first), state = (n * p.in.HV + c.head) * kHead * kHead;
    const Span span = sequence_span(p.in, n);
    const bool begins = first == span.first, ends = first + c.length == span.first + span.length;
    if (p.in.initial_state && begins) c.initial = p.in.initial_state + state, c.callers |= kInitial;
    if (p.d_final && ends) c.final = p.d_final + state, c.callers |= kFinal;
    if (p.before_last && ends && !begins) c.initial = p.before_last + state;
    if (p.after_first && begins && !ends) c.final = p.after_first + state;
  }
  c.token = (batch * p.in.T + first) * p.in.HV + c.head;
  c.a = p.in.A_log && c.item < items ? __expf(p.in.A_log[c.head]) : 1.0f;
  const TokenStrides strides = at.lane == 0   ? p.in.q_strides
                               : at.lane == 1 ? p.in.k_strides
                               : at.lane == 2 ? p.in.g_strides
                                              : p.in.beta_strides;
  const int head = p.in.H == p.in.HV || at.lane >= 2 ? c.head : c.head / static_cast<int>(p.in.HV / p.in.H);
  const int64_t offset = batch * strides.batch + first * strides.token + head * strides.head;
  if (at.lane == 0) chunk_at(turn, at) = c;
  __syncwarp();
  if (at.lane < 4) chunk_at(turn, at).offsets[at.lane] = offset;
}

// Rows of 256 bytes, one a token, to a tile.
__device__ __forceinline__ void fetch_tokens(int place, const void* tensor, const HopperGradient& p, const Chunk& c, const Seat& at) {
  const int row = at.thread / 16, unit = at.thread % 16, length = c.length;
  const auto* from = static_cast<const uint8_t*>(tensor) + c.token * 256;
  const uint32_t stride = static_cast<uint32_t>(p.in.HV) * 256;
#pragma unroll
  for (int i = 0; i < kChunk; i += 32) {
    const bool inside = row + i < length;
    copy_async(at.smem + place + tile_at(row, unit) + i * 256, from + (inside ? (row + i) * stride + unit * 16 : 0), inside ? 16 : 0);
  }
}

// All that the products of a chunk need, asynchronously, but for r and lower. `turn`: which of two places its factors take.
__device__ __forceinline__ void fetch_states(const HopperGradient& p, int turn, const Seat& at) {
  const Chunk& c = chunk_at(turn, at);
  const int64_t item = c.item;
  const uint32_t to = at.smem + tile_at(at.thread / 16, at.thread % 16);
  fetch_tokens(kAtDV, p.d_v, p, c, at), fetch_tokens(kAtDO, p.d_o, p, c, at);
  if (at.thread < 48)
    copy_async(at.smem + kAtFactors + turn * 768 + at.thread * 16,
               reinterpret_cast<const uint8_t*>(p.factors) + item * 768 + at.thread * 16, 16);
  if (const int i = at.thread - 64; p.in.dt_bias && i >= 0 && i < 32)
    copy_async(at.smem + kAtBias + turn * 512 + i * 16, p.in.dt_bias + c.head * kHead + 4 * i, 16);
  const auto *d_states = static_cast<const uint8_t*>(p.d_states) + item * 32768 + at.thread * 16,
             *states = static_cast<const uint8_t*>(p.states) + item * 32768 + at.thread * 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) copy_async(to + kAtDS + i * 8192, d_states + i * 8192, 16);
#pragma unroll
  for (int i = 0; i < 4; ++i) copy_async(to + kAtS + i * 8192, states + i * 8192, 16);
}
// And these, once the exponents that lie in their place are used up.
__device__ __forceinline__ void fetch_lower(const HopperGradient& p, int turn, const Seat& at) {
  const Chunk& c = chunk_at(turn, at);
  fetch_tokens(kAtR, p.r, p, c, at);
  if (p.lower_float32) {
    const auto* from = static_cast<const uint8_t*>(p.lower) + c.item * 16384 + at.thread * 16;
    const uint32_t to = at.smem + kAtLower + tile_at(at.thread / 16, at.thread % 16);
    copy_async(to, from, 16), copy_async(to + 8192, from + 8192, 16);
  } else {
    const auto* from = static_cast<const uint8_t*>(p.lower) + c.item * 8192 + at.thread * 16;
    copy_async(at.smem + kAtLower + pair_at(at.thread / 8, at.thread % 8), from, 16);
  }
}

}  // namespace kda::hopper
