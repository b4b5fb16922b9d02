// A block of the gradient kernel: its threads, its shared memory, and how the next chunk comes into it.
//
// A warp for each block of 16 tokens and slice of 32 channels: sixteen, or eight for 64 channels. It has them in two layouts:
//   as results of products, lane l: tokens l / 4 and l / 4 + 8, channels 8 t + 2 (l % 4) + {0, 1}, t = 0 .. 3
//   by token, lane l: tokens 4 (l / 8) + {0 .. 3}, half of a group of eight, and channels 4 (l % 8) + {0 .. 3}
// What has an address, a norm or a mask of its own for every token has it for four channels.
#pragma once
#include "../prefill/hopper_kept.cuh"
#include "../prefill/hopper_ptx.cuh"
#include "../prefill/hopper_sequences.cuh"
#include "hopper_gradient.h"

namespace kda::hopper {

constexpr int kGroups = kChunk / 8;  // of eight tokens
constexpr int kPatchPitch = 40 * 4, kPatch = 16 * kPatchPitch;  // bytes of a row, and of a patch, see below

// Of K = V = HEAD, 64 or 128: threads, and places in shared memory. With 64, two blocks share a multiprocessor.
//
// Tiles lie in panels of 64 channels: rows of 128 bytes, 16-byte unit u of row r at u ^ (r % 8), as wgmma reads them; so do pairs and
// float16 `lower`. Rows of float32 `lower` have 256 bytes. All start at multiples of 1024 bytes, so that steps from row to row are bits of
// an address.
template <int HEAD>
struct Seat {
  static_assert(HEAD == 64 || HEAD == 128, "");
  static constexpr bool kNarrow = HEAD == 64;
  static constexpr int kBlocksAtOnce = kNarrow ? 2 : 1;
  static constexpr int kSlices = HEAD / 32, kWarps = 4 * kSlices, kThreads = 32 * kWarps;
  static constexpr int kRow = 2 * HEAD, kTile = kChunk * kRow, kState = HEAD * kRow;  // bytes
  static constexpr int kPitch = 128, kEight = 8 * kPitch, kPanel = kChunk * kPitch, kStatePanel = HEAD * kPitch;
  static constexpr int kLanes = HEAD / 4;  // that hold a row, four channels each: a warp has one row at once, or two

  static constexpr int kAtS = 0, kAtDS = kAtS + kState, kAtDO = kAtDS + kState, kAtDV = kAtDO + kTile, kAtR = kAtDV + kTile;
  static constexpr int kAtLower = kAtR + kTile, kAtVNew = kAtLower + 16384;
  static constexpr int kAtRowsQ = kAtVNew + kTile, kAtRowsK = kAtRowsQ + kTile, kAtColumns = kAtRowsK + kTile;
  static constexpr int kAtPairs = kAtColumns + kTile;
  // Once v_new is made: exponents of the tokens' decays, float32, as lanes hold them.
  static constexpr int kAtExponents = kAtR, kAfterExponents = kAtExponents + 16 * kThreads * 4;
  static_assert(kAfterExponents <= kAtVNew, "exponents lie in the place of r and lower");

  static constexpr int kOfGroups = kGroups * HEAD * 4;  // [groups][HEAD] float32: sums, steps, ahead
  static constexpr int kAtSums = kAtPairs + 16384;
  static constexpr int kAtSteps = kNarrow ? kAfterExponents : kAtSums + kOfGroups;
  static_assert(!kNarrow || kAtSteps + kOfGroups <= kAtVNew, "steps lie beside exponents");
  // 32 bytes on: what keep_state_part puts into both meets no bank twice.
  static constexpr int kAtAhead = (kNarrow ? kAtSums + kOfGroups : kAtSteps + kOfGroups) + 32;
  static constexpr int kAtFactors = kAtAhead + kOfGroups;  // twice: the next chunk's come while this one's are in use
  static constexpr int kAtDots = kAtFactors + 2 * 768;     // [2][64][slices] float32
  static constexpr int kAtDDecay = kAtDots + 2 * kChunk * kSlices * 4, kAtDiagonal = kAtDDecay + 4 * HEAD;
  static constexpr int kAtLargest = kAtDiagonal + 256;
  static constexpr int kAtPower = kAtLargest + 4 * kWarps;         // the power of two that pairs are divided by
  static constexpr int kAtDeep = kAtPower + 16;                    // [groups][slices] int: steps of two powers
  static constexpr int kAtBias = kAtDeep + kGroups * kSlices * 4;  // twice: dt_bias of the head
  static constexpr int kAtChunk = kAtBias + 2 * 4 * HEAD;          // twice
  static constexpr int kChunkBytes = 80;
  static constexpr int kBytes = kAtChunk + 2 * kChunkBytes;
  static_assert(kBytes <= (kNarrow ? 115712 : 232448), "one block on a multiprocessor, or two");

  // Until pairs are made: parts of sum_v S dS', [warps][HEAD]; with 64 channels what rounding took from S and dS' lies in the pairs' place.
  static constexpr int kAtParts = kNarrow ? kAtAhead : kAtPairs, kAtLostS = kAtPairs, kAtLostDS = kAtPairs + kState;
  // Once tiles are used up: a patch per warp in which results of products change to tokens; then sums per half group.
  static constexpr int kAtBiasShares = kAtColumns, kAtAShares = kAtColumns + kTile / 2;
  static_assert(kWarps * kPatch <= 3 * kTile, "patches lie in the tiles' place");

  // Warp w has tokens 16 (w % 4) + {0 .. 15}, as results of wgmma lie, but for v_new, whose blocks have one to four products: two bits a
  // warp. Warps w, w + 4, .. take turns at one scheduler; of 16 they have all four blocks, of eight blocks b and 3 - b.
  static constexpr uint32_t kBlocks = kNarrow ? 0x1be4u : 0x8dd27827u;
  // Two warps make d_beta, HEAD / 32 d_decay; one of those with the fewest columns of lower finds the next chunk.
  static constexpr int kScout = kNarrow ? 7 : 4, kStrengths = kNarrow ? 6 : 9, kDecays = kNarrow ? 0 : 12;

  // And a thread of the block.
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
  // The lane's own four numbers, of its group and channels, in sums or in ahead.
  __device__ __forceinline__ float* own_share() const { return floats(second() ? kAtAhead : kAtSums) + group() * HEAD + channel(); }
  __device__ __forceinline__ int panel() const { return slice / 2 * kPanel; }  // with the warp's channels
  // Where the lane's first token lies in a tile; token t is at this ^ (t * (kPitch + 16)).
  __device__ __forceinline__ uint32_t in_tile() const {
    return panel() + token() * kPitch + (((4 * (slice & 1) + lane % 8 / 2) ^ (lane & 8) / 2) << 4) + lane % 2 * 8;
  }
  // As results: the first token's row, and where its channels lie in a tile; n-tile t is at this ^ (t << 4), the second token kEight on.
  __device__ __forceinline__ int result_row() const { return 16 * block + lane / 4; }
  __device__ __forceinline__ uint32_t result_in_tile() const {
    return panel() + result_row() * kPitch + (((4 * (slice & 1)) ^ (lane / 4)) << 4) + lane % 4 * 4;
  }
};

// Asked for anew where registers are scarce, so that no address is kept in one from phase to phase. Bits that cannot be set are cleared:
// the compiler then knows that nothing is negative.
template <int HEAD>
__device__ __forceinline__ Seat<HEAD> seat_of(uint8_t* bytes) {
  using Of = Seat<HEAD>;
  const int thread = thread_index() & (Of::kThreads - 1), warp = __shfl_sync(~0u, thread >> 5, 0) & (Of::kWarps - 1);
  Seat<HEAD> at;
  at.smem = shared_address(bytes), at.bytes = bytes, at.thread = thread, at.lane = thread & 31, at.warp = warp;
  at.block = warp & 3, at.slice = warp >> 2;
  return at;
}
// The same with another block of tokens: those whose v_new the warp makes.
template <int HEAD>
__device__ __forceinline__ Seat<HEAD> dealt(Seat<HEAD> at) {
  at.block = static_cast<int>(Seat<HEAD>::kBlocks >> 2 * at.warp & 3);
  return at;
}

__device__ __forceinline__ float4 load_four(const float* at) { return *reinterpret_cast<const float4*>(at); }
__device__ __forceinline__ void store_four(float* at, const float (&x)[4]) {
  *reinterpret_cast<float4*>(at) = make_float4(x[0], x[1], x[2], x[3]);
}
__device__ __forceinline__ void unpack(float (&y)[4], uint2 x) { y[0] = low(x.x), y[1] = high(x.x), y[2] = low(x.y), y[3] = high(x.y); }
__device__ __forceinline__ void unpack(float (&y)[4], float4 x) { y[0] = x.x, y[1] = x.y, y[2] = x.z, y[3] = x.w; }
__device__ __forceinline__ uint32_t pair_at(int row, int unit) { return row * 128 + ((unit ^ (row & 7)) << 4); }  // [128 rows][64]
template <int ROWS>
__device__ __forceinline__ uint32_t tile_at(int row, int unit) { return unit / 8 * (ROWS * 128) + pair_at(row, unit & 7); }
__device__ __forceinline__ uint32_t wide_at(int row, int unit) { return row * 256 + ((unit ^ (row & 7)) << 4); }  // [64][64] float32

// 1 / x of a power of two, between 2^-126 and 2^126.
__device__ __forceinline__ float over_power(float x) { return __uint_as_float(0x7f000000u - __float_as_uint(x)); }

// In shared memory. One warp finds it; offsets are in elements, of the chunk's first token.
struct Chunk {
  int64_t item, token;  // slot * HV + head; the first token's row of a [B, T, HV, ..] tensor
  int64_t offsets[4];    // of q, k, g, beta
  const float *initial, *final;  // S and dS' in float32, at the sequence's first chunk and at its last; or null
  int length, head;
  float a;  // e^A_log
  int states;  // kInitial: S is the caller's initial_state; kFinal: dS' is d_final; kNone: there is no state before the chunk
};
constexpr int kInitial = 1, kFinal = 2, kNone = 4;
static_assert(sizeof(Chunk) == Seat<64>::kChunkBytes, "");

template <int HEAD>
__device__ __forceinline__ Chunk& chunk_at(int turn, const Seat<HEAD>& at) {
  return *reinterpret_cast<Chunk*>(at.bytes + at.kAtChunk + turn * at.kChunkBytes);
}

// One warp: the next chunk from `item` on that holds tokens; item >= items: there is none. Of those that hold none, shares are zero.
template <int HEAD>
__device__ __forceinline__ void find_chunk(const HopperGradient& p, int64_t item, int64_t items, int64_t step, int turn,
                                           const Seat<HEAD>& at) {
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
    if (Seat<HEAD>::kNarrow && at.lane >= at.kLanes) continue;
    if (p.A_shares) store_four(p.A_shares + c.item * HEAD + 4 * at.lane, zeros);
    if (p.bias_shares) store_four(p.bias_shares + c.item * HEAD + 4 * at.lane, zeros);
  }
  if (c.item < items) {
    const int64_t n = sequence_of(p.in, batch, first), state = (n * p.in.HV + c.head) * HEAD * HEAD;
    const Span span = sequence_span(p.in, n);
    const bool begins = first == span.first, ends = first + c.length == span.first + span.length;
    if (p.in.initial_state && begins) c.initial = p.in.initial_state + state, c.states |= kInitial;
    if (p.d_final && ends) c.final = p.d_final + state, c.states |= kFinal;
    if (!p.in.initial_state && begins) c.states |= kNone;
    const bool given = p.in.initial_state || p.d_final;
    if (given && p.before_last && ends && !begins) c.initial = p.before_last + state;
    if (given && p.after_first && begins && !ends) c.final = p.after_first + state;
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

// Rows of 2 HEAD bytes, one a token, to a tile.
template <int HEAD>
__device__ __forceinline__ void fetch_tokens(int place, const void* tensor, const HopperGradient& p, const Chunk& c, const Seat<HEAD>& at) {
  const int row = at.thread / (HEAD / 8), unit = at.thread % (HEAD / 8), length = c.length;
  const auto* from = static_cast<const uint8_t*>(tensor) + c.token * at.kRow;
  const uint32_t stride = static_cast<uint32_t>(p.in.HV) * at.kRow;
#pragma unroll
  for (int i = 0; i < kChunk; i += 32) {
    const bool inside = row + i < length;
    copy_async(at.smem + place + tile_at<kChunk>(row, unit) + i * at.kPitch, from + (inside ? (row + i) * stride + unit * 16 : 0),
               inside ? 16 : 0);
  }
}

// All that the products of a chunk need, asynchronously, but for r and lower. `turn`: which of two places its factors take.
template <int HEAD>
__device__ __forceinline__ void fetch_states(const HopperGradient& p, int turn, const Seat<HEAD>& at) {
  const Chunk& c = chunk_at(turn, at);
  const int64_t item = c.item;
  const uint32_t to = at.smem + tile_at<HEAD>(at.thread / (HEAD / 8), at.thread % (HEAD / 8));
  fetch_tokens(at.kAtDV, p.d_v, p, c, at), fetch_tokens(at.kAtDO, p.d_o, p, c, at);
  if (at.thread < 48)
    copy_async(at.smem + at.kAtFactors + turn * 768 + at.thread * 16,
               reinterpret_cast<const uint8_t*>(p.factors) + item * 768 + at.thread * 16, 16);
  if (const int i = at.thread - 64; p.in.dt_bias && i >= 0 && i < at.kLanes)
    copy_async(at.smem + at.kAtBias + turn * (4 * HEAD) + i * 16, p.in.dt_bias + c.head * HEAD + 4 * i, 16);
  const auto *d_states = static_cast<const uint8_t*>(p.d_states) + item * at.kState + at.thread * 16,
             *states = static_cast<const uint8_t*>(p.states) + item * at.kState + at.thread * 16;
  constexpr int kStep = Seat<HEAD>::kThreads * 16, kShare = Seat<HEAD>::kRow / Seat<HEAD>::kPitch;  // a panel has a share of each row
#pragma unroll
  for (int i = 0; i < at.kState; i += kStep) copy_async(to + at.kAtDS + i / kShare, d_states + i, 16);
#pragma unroll
  for (int i = 0; i < at.kState; i += kStep) copy_async(to + at.kAtS + i / kShare, states + i, 16);
}
// And these, once the exponents that lie in their place are used up, and pairs.
template <int HEAD>
__device__ __forceinline__ void fetch_lower(const Given<HEAD>& p, int turn, const Seat<HEAD>& at) {
  const Chunk& c = chunk_at(turn, at);
  fetch_tokens(at.kAtR, p.r, p, c, at);
  if (p.lower_float32) {
    const auto* from = static_cast<const uint8_t*>(p.lower) + c.item * 16384 + at.thread * 16;
    const uint32_t to = at.smem + at.kAtLower + wide_at(at.thread / 16, at.thread % 16);
    copy_async(to, from, 16), copy_async(to + at.kThreads * 16, from + at.kThreads * 16, 16);
    if (Seat<HEAD>::kNarrow) copy_async(to + 8192, from + 8192, 16), copy_async(to + 12288, from + 12288, 16);
  } else {
    const auto* from = static_cast<const uint8_t*>(p.lower) + c.item * 8192 + at.thread * 16;
    const uint32_t to = at.smem + at.kAtLower + pair_at(at.thread / 8, at.thread % 8);
    copy_async(to, from, 16);
    if (Seat<HEAD>::kNarrow) copy_async(to + 4096, from + 4096, 16);
  }
  if constexpr (Seat<HEAD>::kNarrow) {
    if (!p.states_lost) return;
    const int64_t first = c.item * at.kState + at.thread * 16;
    const auto *d_states = static_cast<const uint8_t*>(p.d_states_lost) + first,
               *states = static_cast<const uint8_t*>(p.states_lost) + first;
    const uint32_t to = at.smem + tile_at<HEAD>(at.thread / (HEAD / 8), at.thread % (HEAD / 8));
#pragma unroll
    for (int i = 0; i < at.kState; i += at.kThreads * 16) {
      copy_async(to + at.kAtLostDS + i, d_states + i, 16), copy_async(to + at.kAtLostS + i, states + i, 16);
    }
  }
}

}  // namespace kda::hopper
