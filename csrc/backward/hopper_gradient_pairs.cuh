// Through the decayed products of a chunk. With s the log2-decay from the chunk's start to a token and m a whole number, for each channel
// and group of eight tokens, in the middle of what s goes through there, every pair is
//
//   A[i,j] = (x_i 2^(s_i - m_i)) 2^(m_i - m_j) (k_j 2^(m_j - s_j))        x = q or k
//
// Log2-decays are raised to -29, so that factors stay within 2^117 for any gate, and pairs are divided by the power of two at the largest.
// A warp goes through the groups from the farthest to its own and moves its sums from reference to reference by powers of two, which rounds
// nothing: a step is 2^(m_i - m_(i-1)), at most 1; for any gate two, to the whole number x_i nearest to s at the boundary between the
// groups and on from there, since one alone may underflow. So rows and columns take the same rounded factors, and what must cancel does.
#pragma once
#include "hopper_gradient_products.cuh"

namespace kda::hopper {

// Of a lane's eight tokens and two channels.
struct Tokens {
  float g[8][2];          // log2-decay, not below kGateFloor
  float base[2], rest[2];  // log2-decay from m back to the group's start, and on to the chunk's end

  __device__ __forceinline__ float exponent(float (&run)[2], int t, int c) const { return base[c] + (run[c] += g[t][c]); }
};

template <bool G32>
__device__ __forceinline__ float2 load_gate(const HopperGradient& p, const Chunk& c, const Seat& at, int t) {
  const int row = 8 * at.group() + t;
  if (row >= c.length) return make_float2(0.0f, 0.0f);
  const TokenStrides& s = p.in.g_strides;
  int64_t first = c.offset(s, c.head);
  KDA_HIDE(first);  // the compiler would keep what the first reading brought
  const uint32_t from = row * static_cast<uint32_t>(s.token) + at.channel();
  if (G32) return __ldg(reinterpret_cast<const float2*>(static_cast<const float*>(p.in.g) + first + from));
  const uint32_t x = __ldg(reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(p.in.g) + first + from));
  return make_float2(low(x), high(x));
}

// Log2-decays of the lane's tokens: for the tiles, and again once pairs are done, since there are too few registers to keep them.
template <Gate GATE, bool BOUNDED, bool G32>
__device__ __forceinline__ void load_gates(const HopperGradient& p, const Chunk& c, Tokens& x, const Seat& at) {
  const GateOf<GATE> gate(p.in, c.head, at.channel());
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    const float2 raw = load_gate<G32>(p, c, at, t);
    const bool inside = 8 * at.group() + t < c.length;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float y = inside ? gate.log2_decay(i ? raw.y : raw.x, i) : 0.0f;
      x.g[t][i] = BOUNDED ? y : max_or_nan(y, kGateFloor);
    }
  }
}

// Their sums, for all.
__device__ __forceinline__ void store_sums(const Tokens& x, const Seat& at) {
  float sum[2] = {};
#pragma unroll
  for (int t = 0; t < 8; ++t) sum[0] += x.g[t][0], sum[1] += x.g[t][1];
  *reinterpret_cast<float2*>(at.floats(kAtSums) + at.group() * kHead + at.channel()) = make_float2(sum[0], sum[1]);
}

// References, and steps between them. A step for any gate is a word of two bfloat16 numbers.
template <bool BOUNDED>
__device__ __forceinline__ void refer(Tokens& x, const Seat& at) {
  const float* sums = at.floats(kAtSums) + at.channel();
  float before[2] = {}, m[2] = {}, last[2] = {}, base[2] = {}, step[2];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const float2 z = load_two(sums + i * kHead);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float sum = c ? z.y : z.x, own = rintf(before[c] + 0.5f * sum);
      if (i + 1 == at.group()) last[c] = own;
      if (i == at.group()) m[c] = own, base[c] = before[c] - own, step[c] = rintf(before[c]);
      before[c] += sum;
    }
  }
  const int to = at.group() * kHead + at.channel();
#pragma unroll
  for (int c = 0; c < 2; ++c)
    step[c] = BOUNDED ? exp2_fast(m[c] - last[c]) : __uint_as_float(pack_bf16(exp2_fast(m[c] - step[c]), exp2_fast(step[c] - last[c])));
  *reinterpret_cast<float2*>(at.floats(kAtSteps) + to) = make_float2(step[0], step[1]);
#pragma unroll
  for (int c = 0; c < 2; ++c) x.base[c] = base[c], x.rest[c] = before[c] - m[c];
  if (at.group() == 0) {  // decay d_decay, for the gates
    auto* d = reinterpret_cast<float2*>(at.floats(kAtDDecay) + at.channel());
    *d = make_float2(d->x * exp2_fast(before[0]), d->y * exp2_fast(before[1]));
  }
}

struct Factors {  // of a token, two channels: normalised q and k, s - m and its powers, and the rounded rows and column
  float q[2], k[2], s[2], row[2], column[2];
  uint32_t rows_q, rows_k, columns;

  __device__ __forceinline__ Factors(const Tokens& x, uint32_t raw_q, uint32_t raw_k, float (&run)[2], int t, float norm_q, float norm_k) {
    q[0] = low(raw_q) * norm_q, q[1] = high(raw_q) * norm_q, k[0] = low(raw_k) * norm_k, k[1] = high(raw_k) * norm_k;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      s[c] = x.exponent(run, t, c);
      row[c] = exp2_fast(s[c]), column[c] = exp2_fast(-s[c]);
    }
    rows_q = pack_bf16(q[0] * row[0], q[1] * row[1]), rows_k = pack_bf16(k[0] * row[0], k[1] * row[1]);
    columns = pack_bf16(k[0] * column[0], k[1] * column[1]);
  }
};

// From q and k of the lane's tokens their decayed tiles, in the same place.
__device__ __forceinline__ void make_tiles(const HopperGradient& p, const Tokens& x, const float* factors, const Seat& at) {
  float run[2] = {};
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    const int row = 8 * at.group() + t, from = row_of(row, p.group_bits);
    const uint32_t to = at.smem + word_at(row, at.channel());
    const uint32_t q = load_shared_word(to + kAtRowsQ), k = load_shared_word(to + kAtRowsK);
    const Factors y(x, q, k, run, t, factors[kChunk + from], factors[2 * kChunk + from]);
    store_shared(to + kAtRowsQ, y.rows_q), store_shared(to + kAtRowsK, y.rows_k), store_shared(to + kAtColumns, y.columns);
  }
}

// Results r = FIRST .. LAST (0 and 1 are a lane's first token, 2 and 3 its second) moved from one group's reference to that of the next, or
// back: both are the same step.
__device__ __forceinline__ void load_steps(float2 (&by)[4], int group, const Seat& at) {
#pragma unroll
  for (int t = 0; t < 4; ++t) by[t] = load_two(at.floats(kAtSteps) + group * kHead + at.result_channel(t));
}
template <bool BOUNDED, int FIRST, int LAST>
__device__ __forceinline__ void step(Results& x, const float2 (&by)[4]) {
#pragma unroll
  for (int t = 0; t < 4; ++t)
#pragma unroll
    for (int r = FIRST; r <= LAST; ++r) {
      const float f = r % 2 ? by[t].y : by[t].x;
      x[t][r] = BOUNDED ? x[t][r] * f : x[t][r] * low(__float_as_uint(f)) * high(__float_as_uint(f));
    }
}
// Eight tokens of a group, the four n-tiles of the warp's channels, as B operands.
__device__ __forceinline__ void load_group(uint32_t (&b)[4], uint32_t tile, int group, const Seat& at) {
  load_matrices_transposed(b, tile + tile_at(8 * group + (at.lane & 7), 4 * at.slice + (at.lane >> 3)));
}

// The gradient of k_decayed waits in v_new's place, which is used up, in the warp's own part of it, while pairs are added up.
__device__ __forceinline__ void keep_state_part(Results& d_c, const Seat& at) {
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const uint32_t to = at.smem + kAtVNew + word_at(at.result_row(0), at.result_channel(t));
    store_shared(to, pack_bf16(d_c[t][0], d_c[t][1])), store_shared(to + 8 * 256, pack_bf16(d_c[t][2], d_c[t][3]));
#pragma unroll
    for (int r = 0; r < 4; ++r) d_c[t][r] = 0.0f;
  }
}

// To the gradients of rows, which begin with what the state gives, all columns up to their own group.
template <bool BOUNDED>
__device__ __forceinline__ void row_pairs(Results& d_q, Results& d_k, const Seat& at) {
#pragma unroll 1
  for (int group = 0; group < 2 * at.block + 2; ++group) {
    float2 by[4];
    uint32_t a[4], b[4];
    load_steps(by, group, at);
    load_matrices(a, at.smem + kAtPairs + pair_at(16 * at.block + (at.lane & 15) + (at.lane >> 4) * kChunk, group));
    load_group(b, at.smem + kAtColumns, group, at);
    if (group <= 2 * at.block)
      step<BOUNDED, 0, 3>(d_q, by), step<BOUNDED, 0, 3>(d_k, by);
    else
      step<BOUNDED, 2, 3>(d_q, by), step<BOUNDED, 2, 3>(d_k, by);
#pragma unroll
    for (int t = 0; t < 4; ++t) mma_bf16(d_q[t], a[0], a[1], b[t]), mma_bf16(d_k[t], a[2], a[3], b[t]);
  }
}

// To those of columns all rows down to their own group.
template <bool BOUNDED>
__device__ __forceinline__ void column_pairs(Results& d_c, const Seat& at) {
#pragma unroll 1
  for (int group = kGroups - 1; group >= 2 * at.block; --group) {
    float2 by[4];
    uint32_t a[4], b[4];
    load_matrices_transposed(a, at.smem + kAtPairs +
                                    pair_at(8 * group + (at.lane & 7) + (at.lane >> 4) * kChunk, 2 * at.block + ((at.lane >> 3) & 1)));
    load_group(b, at.smem + kAtRowsQ, group, at);
#pragma unroll
    for (int t = 0; t < 4; ++t) mma_bf16(d_c[t], a[0], a[1], b[t]);
    load_group(b, at.smem + kAtRowsK, group, at);
#pragma unroll
    for (int t = 0; t < 4; ++t) mma_bf16(d_c[t], a[2], a[3], b[t]);
    load_steps(by, group, at);
    if (group > 2 * at.block + 1) step<BOUNDED, 0, 3>(d_c, by);
    if (group == 2 * at.block + 1) step<BOUNDED, 0, 1>(d_c, by);
  }
}

}  // namespace kda::hopper
