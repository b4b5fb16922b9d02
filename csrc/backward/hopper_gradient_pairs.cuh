// Through the decayed products of a chunk. With s the log2-decay from the chunk's start to a token and m a whole number, for each channel
// and group of eight tokens, in the middle of what s goes through there, every pair is
//
//   A[i,j] = (x_i 2^(s_i - m_i)) 2^(m_i - m_j) (k_j 2^(m_j - s_j))        x = q or k
//
// Log2-decays are raised to -29, so that factors stay within 2^117 for any gate, and pairs are divided by the power of two at the largest.
// A warp goes through the groups from the farthest to its own and moves its sums from reference to reference by powers of two, which rounds
// nothing: a step is 2^(m_i - m_(i-1)), at most 1. Where that would underflow in some channel it is two, to the whole number x_i nearest to
// s at the boundary between the groups and on from there. So rows and columns take the same rounded factors, and what must cancel does.
// Bounded gates have one m for a block of 16 tokens, over which they lose at most 116 bits, and go from block to block.
#pragma once
#include <type_traits>

#include "hopper_gradient_products.cuh"

namespace kda::hopper {

// Gates of the lane's channels.
template <Gate GATE, int HEAD>
__device__ __forceinline__ GateOf<GATE> gates_of(const HopperForward& p, int turn, const Seat<HEAD>& at) {
  return {p, chunk_at(turn, at).a, [&] { return load_four(at.floats(at.kAtBias + turn * (4 * HEAD)) + at.channel()); }};
}

__device__ __forceinline__ void touch(uint2& x) {
  KDA_HIDE_WORD(x.x);
  KDA_HIDE_WORD(x.y);
}
__device__ __forceinline__ void touch(float4& x) {
  KDA_TOUCH(x.x);
  KDA_TOUCH(x.y);
  KDA_TOUCH(x.z);
  KDA_TOUCH(x.w);
}

// A lane's tokens of a tensor as they lie in memory; zeros past the end.
template <typename Four>  // uint2: bfloat16, float4: float32
struct Raw {
  Four of[4];
  const Four* from;  // the next token's

  template <int HEAD>
  __device__ __forceinline__ void begin(const void* tensor, int64_t first, int64_t step, const Seat<HEAD>& at) {
    const uint32_t own = at.token() * static_cast<uint32_t>(step) + at.channel();
    from = reinterpret_cast<const Four*>(static_cast<const uint8_t*>(tensor) + first * (sizeof(Four) / 4)) + own / 4;
  }
  __device__ __forceinline__ void load(int t, bool inside, int64_t step) {
    of[t] = Four{};
    if (inside) of[t] = __ldg(from);
    from += static_cast<uint32_t>(step) / 4;
  }
  // Keeps the compiler from carrying what it computed from these over this point: there is more of it than registers.
  __device__ __forceinline__ void forget() {
#pragma unroll
    for (int t = 0; t < 4; ++t) touch(of[t]);
  }
};
template <bool G32>
using RawGates = Raw<std::conditional_t<G32, float4, uint2>>;

template <typename Four, int HEAD>
__device__ __forceinline__ void load_gates(Raw<Four>& g, const HopperGradient& p, const Chunk& c, const Seat<HEAD>& at) {
  const int left = c.length - at.token();
  g.begin(p.in.g, c.offsets[2], p.in.g_strides.token, at);
#pragma unroll
  for (int t = 0; t < 4; ++t) g.load(t, t < left, p.in.g_strides.token);
}
template <typename Four, int HEAD>
__device__ __forceinline__ void load_tokens(Raw<uint2>& q, Raw<uint2>& k, Raw<Four>& g, const HopperGradient& p, const Chunk& c,
                                            const Seat<HEAD>& at) {
  const int left = c.length - at.token();
  q.begin(p.in.q, c.offsets[0], p.in.q_strides.token, at), k.begin(p.in.k, c.offsets[1], p.in.k_strides.token, at);
  g.begin(p.in.g, c.offsets[2], p.in.g_strides.token, at);
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    g.load(t, t < left, p.in.g_strides.token), q.load(t, t < left, p.in.q_strides.token), k.load(t, t < left, p.in.k_strides.token);
  }
}

// Of a lane's four tokens and channels.
struct Tokens {
  float g[4][4];           // log2-decay, not below kGateFloor; 0 past the end
  float sum[4], start[4];  // of the group, and of those tokens of it that come before the lane's
  float base[4], rest[4];  // log2-decay from m to the lane's first token, and on to the chunk's end
  bool raised;             // some log2-decay to the floor
};

// Log2-decays, and their sums for all.
template <Gate GATE, bool BOUNDED, bool G32, int HEAD>
__device__ __forceinline__ void make_gates(const HopperGradient& p, int turn, const RawGates<G32>& raw, Tokens& x, const Seat<HEAD>& at) {
  const GateOf<GATE> gates = gates_of<GATE>(p.in, turn, at);
  const int left = chunk_at(turn, at).length - at.token();
  float least = 0.0f;
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    unpack(x.g[t], raw.of[t]);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      x.g[t][c] = gates.log2_decay(x.g[t][c], c);
      if (!BOUNDED) least = fminf(least, x.g[t][c]), x.g[t][c] = max_or_nan(x.g[t][c], kGateFloor);
    }
  }
  if (GATE != Gate::log_decay && left < 4)
#pragma unroll
    for (int t = 0; t < 4; ++t)
#pragma unroll
      for (int c = 0; c < 4; ++c) x.g[t][c] = t < left ? x.g[t][c] : 0.0f;
  x.raised = least < kGateFloor;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float own = (x.g[0][i] + x.g[1][i]) + (x.g[2][i] + x.g[3][i]), other = __shfl_xor_sync(~0u, own, 8);
    x.sum[i] = own + other, x.start[i] = at.second() ? other : 0.0f;
  }
  if (!at.second()) store_four(at.floats(at.kAtSums) + at.group() * HEAD + at.channel(), x.sum);
}

// To the nearest whole number; |x| < 2^22.
__device__ __forceinline__ float nearest(float x) {
  float y = x + 12582912.0f;
  KDA_TOUCH(y);
  return y - 12582912.0f;
}

// References, and steps between them; of each group's two lanes with the same channels either takes two of them. A step of two powers is a
// word of two bfloat16 numbers. Bounded gates have one reference for the two groups of a block, and a step with the first of them.
template <bool BOUNDED, int HEAD>
__device__ __forceinline__ void refer(Tokens& x, const Seat<HEAD>& at) {
  constexpr int kSpan = BOUNDED ? 2 : 1;  // groups with one reference
  const int group = at.group(), first = BOUNDED ? 2 * at.block : group, channel = at.channel() + (at.second() ? 2 : 0);
  const float* sums = at.floats(at.kAtSums) + channel;
  float own[2] = {at.second() ? x.sum[2] : x.sum[0], at.second() ? x.sum[3] : x.sum[1]};
  float last[2] = {}, before[2] = {}, total[2], m[2], step[2], base[2], rest[2];
  const auto add = [&](float (&y)[2], int i) {
    const float2 z = *reinterpret_cast<const float2*>(sums + i * HEAD);
    y[0] += z.x, y[1] += z.y;
  };
#pragma unroll
  for (int i = 0; i < kGroups - 2 * kSpan; ++i)
    if (i + kSpan < first) add(before, i);
  if (first > 0) {
    float z[2] = {};
#pragma unroll
    for (int i = kSpan; i > 0; --i) add(z, first - i);
#pragma unroll
    for (int c = 0; c < 2; ++c) last[c] = nearest(fmaf(0.5f, z[c], before[c])), before[c] += z[c];
  }
  if (BOUNDED) add(own, group == first ? first + 1 : first);
#pragma unroll
  for (int c = 0; c < 2; ++c) total[c] = before[c] + own[c];
#pragma unroll
  for (int i = kSpan; i < kGroups; ++i)
    if (i >= first + kSpan) add(total, i);
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    m[c] = nearest(fmaf(0.5f, own[c], before[c]));
    step[c] = m[c] - last[c], base[c] = before[c] - m[c], rest[c] = total[c] - m[c];
  }
  if (BOUNDED && group > first) add(base, first);
  bool deep = false;
  if (!BOUNDED) {
    const uint32_t found = __ballot_sync(~0u, fminf(step[0], step[1]) < -126.0f);
    deep = found >> (at.lane & 16) & 0xffffu;
  }
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float boundary = nearest(before[c]);
    step[c] = deep ? __uint_as_float(pack_bf16(exp2_fast(m[c] - boundary), exp2_fast(boundary - last[c]))) : exp2_fast(step[c]);
  }
  if (group == first) *reinterpret_cast<float2*>(at.floats(at.kAtSteps) + group * HEAD + channel) = make_float2(step[0], step[1]);
  if (!BOUNDED && at.lane % 16 == 0) at.ints(at.kAtDeep)[group * at.kSlices + at.slice] = deep;
  if (at.block == 0 && at.lane < 16) {  // decay d_decay, for the gates
    auto* d = reinterpret_cast<float2*>(at.floats(at.kAtDDecay) + channel);
    *d = make_float2(d->x * exp2_fast(total[0]), d->y * exp2_fast(total[1]));
  }
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float of_base = __shfl_xor_sync(~0u, base[c], 8), of_rest = __shfl_xor_sync(~0u, rest[c], 8);
    x.base[c] = (at.second() ? of_base : base[c]) + x.start[c], x.base[2 + c] = (at.second() ? base[c] : of_base) + x.start[2 + c];
    x.rest[c] = at.second() ? of_rest : rest[c], x.rest[2 + c] = at.second() ? rest[c] : of_rest;
  }
}

// 1 / |q| and 1 / |k| of the lane's tokens.
struct Norms {
  const float* factors;
  int first, bits;
  template <int HEAD>
  __device__ __forceinline__ Norms(const float* factors, int bits, const Seat<HEAD>& at)
      : factors(factors), first(row_of(at.token(), bits)), bits(bits) {}
  __device__ __forceinline__ float q(int t) const { return factors[kChunk + (first | row_of(t, bits))]; }
  __device__ __forceinline__ float k(int t) const { return factors[2 * kChunk + (first | row_of(t, bits))]; }
};

// Of a token: normalised q and k, powers of s - m, and the rounded rows and column.
struct Factors {
  float q[4], k[4], row[4], column[4];
  uint2 rows_q, rows_k, columns;

  __device__ __forceinline__ Factors(uint2 raw_q, uint2 raw_k, const float (&s)[4], float norm_q, float norm_k) {
    unpack(q, raw_q), unpack(k, raw_k);
    float x[4], y[4], z[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      q[c] *= norm_q, k[c] *= norm_k, row[c] = exp2_fast(s[c]), column[c] = exp2_fast(-s[c]);
      x[c] = q[c] * row[c], y[c] = k[c] * row[c], z[c] = k[c] * column[c];
    }
    rows_q = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3])}, rows_k = {pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3])};
    columns = {pack_bf16(z[0], z[1]), pack_bf16(z[2], z[3])};
  }
};

// Where the exponents of the lane's first token wait until they are needed again.
template <int HEAD>
__device__ __forceinline__ float* exponents_of(const Seat<HEAD>& at) { return at.floats(at.kAtExponents) + at.warp * 512 + at.lane * 4; }

// The decayed tiles of the lane's q and k.
template <int HEAD>
__device__ __forceinline__ void make_tiles(const HopperGradient& p, const Tokens& x, const Raw<uint2>& q, const Raw<uint2>& k,
                                           const float* factors, const Seat<HEAD>& at) {
  const Norms norms(factors, p.group_bits, at);
  const uint32_t to = at.smem + at.in_tile();
  float run[4] = {}, s[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
#pragma unroll
    for (int c = 0; c < 4; ++c) s[c] = x.base[c] + (run[c] += x.g[t][c]);
    store_four(exponents_of(at) + t * 128, s);
    const Factors y(q.of[t], k.of[t], s, norms.q(t), norms.k(t));
    const uint32_t tile = to ^ (t * (at.kPitch + 16));
    store_shared(tile + at.kAtRowsQ, y.rows_q), store_shared(tile + at.kAtRowsK, y.rows_k), store_shared(tile + at.kAtColumns, y.columns);
  }
}

// Results from r = FIRST to LAST (0 and 1 are a lane's first token, 2 and 3 its second) moved from one group's reference to that of the
// next, or back: both are the same step.
template <bool DEEP, int FIRST, int LAST>
__device__ __forceinline__ void step(Results& x, const float2 (&by)[4]) {
#pragma unroll
  for (int t = 0; t < 4; ++t)
#pragma unroll
    for (int r = FIRST; r <= LAST; ++r) {
      const float f = r % 2 ? by[t].y : by[t].x;
      x[t][r] = DEEP ? x[t][r] * low(__float_as_uint(f)) * high(__float_as_uint(f)) : x[t][r] * f;
    }
}
struct Steps {
  float2 by[4];
  bool deep;
  template <int HEAD>
  __device__ __forceinline__ Steps(bool bounded, int group, const Seat<HEAD>& at) {
    const float* from = at.floats(at.kAtSteps) + group * HEAD + 32 * at.slice + 2 * (at.lane % 4);
#pragma unroll
    for (int t = 0; t < 4; ++t) by[t] = *reinterpret_cast<const float2*>(from + 8 * t);
    deep = !bounded && at.ints(at.kAtDeep)[group * at.kSlices + at.slice];
  }
};
// Eight tokens of group 0, the four n-tiles of the warp's channels, as B operands; others are kEight bytes a group further.
template <int HEAD>
__device__ __forceinline__ uint32_t group_at(uint32_t tile, const Seat<HEAD>& at) {
  return at.smem + tile + tile_at<kChunk>(at.lane & 7, 4 * at.slice + (at.lane >> 3));
}

// The gradient of k_decayed waits while pairs are added up: two bytes of each number in v_new's place, which is used up, in the warp's own
// part of it, and a third where sums were and ahead will be: a word for each token and four channels, in the own share of the lane that
// will have them.
template <int HEAD>
__device__ __forceinline__ void keep_state_part(Results& d_c, const Seat<HEAD>& at) {
  const uint32_t to = at.smem + at.kAtVNew + at.result_in_tile();
  const int lane = at.lane, share = 2 * at.block * (4 * HEAD) + at.slice * 128;
  uint8_t* third = at.bytes + (lane & 16 ? at.kAtAhead : at.kAtSums) + share + (lane >> 1 & 1) * 16 + (lane >> 2 & 3) * 4 + (lane & 1) * 2;
#pragma unroll
  for (int t = 0; t < 4; ++t)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t x = __float_as_uint(d_c[t][2 * half]), y = __float_as_uint(d_c[t][2 * half + 1]);
      store_shared((to ^ (t << 4)) + half * at.kEight, __byte_perm(x, y, 0x7632));
      *reinterpret_cast<uint16_t*>(third + t * 32 + half * (4 * HEAD)) = static_cast<uint16_t>(__byte_perm(x, y, 0x51));
      d_c[t][2 * half] = d_c[t][2 * half + 1] = 0.0f;
    }
}
// What has waited, of four channels: of words with two bytes of each, and of a word with the third. The fourth, which is lost, is the third
// once more: as often too large as too small.
__device__ __forceinline__ void unpack_state_part(float (&y)[4], uint2 x, float thirds) {
  const uint32_t z = __float_as_uint(thirds);
  y[0] = __uint_as_float(__byte_perm(x.x, z, 0x1044)), y[1] = __uint_as_float(__byte_perm(x.x, z, 0x3255));
  y[2] = __uint_as_float(__byte_perm(x.y, z, 0x1066)), y[3] = __uint_as_float(__byte_perm(x.y, z, 0x3277));
}

// To the gradients of rows, which begin with what the state gives, the columns of one group.
template <int FIRST, int HEAD>
__device__ __forceinline__ void rows_with(Results& d_q, Results& d_k, int group, uint32_t pairs, uint32_t columns, const Seat<HEAD>& at) {
  const Steps steps(false, group, at);
  uint32_t a[4], b[4];
  load_matrices(a, pairs ^ (group << 4));
  load_matrices_transposed(b, columns + group * at.kEight);
  if (steps.deep)
    step<true, FIRST, 3>(d_q, steps.by), step<true, FIRST, 3>(d_k, steps.by);
  else
    step<false, FIRST, 3>(d_q, steps.by), step<false, FIRST, 3>(d_k, steps.by);
#pragma unroll
  for (int t = 0; t < 4; ++t) mma_bf16(d_q[t], a[0], a[1], b[t]), mma_bf16(d_k[t], a[2], a[3], b[t]);
}
// All of them up to their own group.
template <int HEAD>
__device__ __forceinline__ void row_pairs(Results& d_q, Results& d_k, const Seat<HEAD>& at) {
  const uint32_t pairs = at.smem + at.kAtPairs + pair_at(16 * at.block + (at.lane & 15) + (at.lane >> 4) * kChunk, 0);
  const uint32_t columns = group_at(at.kAtColumns, at);
#pragma unroll 1
  for (int group = 0; group <= 2 * at.block; ++group) rows_with<0>(d_q, d_k, group, pairs, columns, at);
  rows_with<2>(d_q, d_k, 2 * at.block + 1, pairs, columns, at);
}

// To those of columns the rows of one group; then on to the next reference, up to result LAST.
template <int LAST, int HEAD>
__device__ __forceinline__ void columns_with(Results& d_c, int group, uint32_t pairs, uint32_t rows, const Seat<HEAD>& at) {
  uint32_t a[4], b[4];
  load_matrices_transposed(a, pairs + group * 1024);
  load_matrices_transposed(b, rows + group * at.kEight);
#pragma unroll
  for (int t = 0; t < 4; ++t) mma_bf16(d_c[t], a[0], a[1], b[t]);
  load_matrices_transposed(b, rows + group * at.kEight + at.kTile);
#pragma unroll
  for (int t = 0; t < 4; ++t) mma_bf16(d_c[t], a[2], a[3], b[t]);
  if (LAST == 0) return;
  const Steps steps(false, group, at);
  if (steps.deep)
    step<true, 0, LAST>(d_c, steps.by);
  else
    step<false, 0, LAST>(d_c, steps.by);
}
// All of them down to their own group.
template <int HEAD>
__device__ __forceinline__ void column_pairs(Results& d_c, const Seat<HEAD>& at) {
  const uint32_t pairs = at.smem + at.kAtPairs + pair_at((at.lane & 7) + (at.lane >> 4) * kChunk, 2 * at.block + ((at.lane >> 3) & 1));
  const uint32_t rows = group_at(at.kAtRowsQ, at);
#pragma unroll 1
  for (int group = kGroups - 1; group > 2 * at.block + 1; --group) columns_with<3>(d_c, group, pairs, rows, at);
  columns_with<1>(d_c, 2 * at.block + 1, pairs, rows, at);
  columns_with<0>(d_c, 2 * at.block, pairs, rows, at);
}

// The same by blocks of 16 tokens, where those of a block have one reference.
//
// Sixteen tokens of block 0, the four n-tiles of the channels of a warp, as twice two B operands; a block further are 2 kEight bytes.
template <int HEAD>
__device__ __forceinline__ uint32_t block_at(uint32_t tile, const Seat<HEAD>& at) {
  return at.smem + tile + tile_at<kChunk>(at.lane & 15, 4 * at.slice + (at.lane >> 4));
}
__device__ __forceinline__ void add_block(Results& x, const uint32_t (&a)[4], const uint32_t (&b)[2][4]) {
#pragma unroll
  for (int t = 0; t < 4; ++t) mma_bf16(x[t], a, b[t / 2][t % 2 * 2], b[t / 2][t % 2 * 2 + 1]);
}

template <int HEAD>
__device__ __forceinline__ void block_row_pairs(Results& d_q, Results& d_k, const Seat<HEAD>& at) {
  const uint32_t pairs = at.smem + at.kAtPairs + pair_at(16 * at.block + (at.lane & 15), at.lane >> 4);
  uint32_t columns = block_at(at.kAtColumns, at);
#pragma unroll 1
  for (int block = 0; block <= at.block; ++block, columns += 2 * at.kEight) {
    const Steps steps(true, 2 * block, at);
    uint32_t of_q[4], of_k[4], b[2][4];
    load_matrices(of_q, pairs ^ (block << 5)), load_matrices(of_k, (pairs ^ (block << 5)) + kChunk * 128);
    load_matrices_transposed(b[0], columns), load_matrices_transposed(b[1], columns ^ (2 << 4));
    step<false, 0, 3>(d_q, steps.by), step<false, 0, 3>(d_k, steps.by);
    add_block(d_q, of_q, b), add_block(d_k, of_k, b);
  }
}

template <int HEAD>
__device__ __forceinline__ void block_column_pairs(Results& d_c, const Seat<HEAD>& at) {
  const uint32_t pairs = at.smem + at.kAtPairs + pair_at((at.lane & 7) + ((at.lane >> 4) << 3), 2 * at.block + ((at.lane >> 3) & 1));
  uint32_t rows = block_at(at.kAtRowsQ, at) + 6 * at.kEight;
#pragma unroll 1
  for (int block = 3;; --block, rows -= 2 * at.kEight) {
    uint32_t of_q[4], of_k[4], b[2][4];
    load_matrices_transposed(of_q, pairs + block * 2048), load_matrices_transposed(of_k, pairs + block * 2048 + kChunk * 128);
    load_matrices_transposed(b[0], rows), load_matrices_transposed(b[1], rows ^ (2 << 4));
    add_block(d_c, of_q, b);
    load_matrices_transposed(b[0], rows + at.kTile), load_matrices_transposed(b[1], (rows ^ (2 << 4)) + at.kTile);
    add_block(d_c, of_k, b);
    if (block == at.block) break;
    const Steps steps(true, 2 * block, at);
    step<false, 0, 3>(d_c, steps.by);
  }
}

}  // namespace kda::hopper
