// Through the decayed products of a chunk. With s the log2-decay from the chunk's start to a token and m a whole number, for each channel and
// group of eight tokens, in the middle of what s goes through there, every pair is
//
//   A[i,j] = (x_i 2^(s_i - m_i)) 2^(m_i - m_j) (k_j 2^(m_j - s_j))        x = q or k
//
// Log2-decays are raised to -29, so that factors stay within 2^116 for any gate, and pairs are divided by the power of two above the largest.
// A warp goes through the groups from the farthest to its own and moves its sums from reference to reference by powers of two, which rounds
// nothing: steps[m] = 2^(m_m - m_(m-1)), at most 1. So rows and columns take the same rounded factors, and what must cancel does.
#pragma once
#include "hopper_gradient_products.cuh"

namespace kda::hopper {

// Of a lane's eight tokens and two channels.
struct Tokens {
  float g[8][2];          // log2-decay, not below kGateFloor
  uint32_t q[8], k[8];    // as they are in memory
  float base[2], all[2];  // log2-decay before the group, less m; over the chunk

  __device__ __forceinline__ float exponent(float (&run)[2], int t, int c) const { return base[c] + (run[c] += g[t][c]); }
};

template <bool G32>
__device__ __forceinline__ float2 load_gate(const HopperGradient& p, const Chunk& c, const Seat& at, int t) {
  const int row = 8 * at.group() + t;
  if (row >= c.span.length) return make_float2(0.0f, 0.0f);
  const TokenStrides& s = p.in.g_strides;
  const int64_t from = c.span.batch * s.batch + (c.span.first + row) * s.token + c.head * s.head + at.channel();
  if (G32) return __ldg(reinterpret_cast<const float2*>(static_cast<const float*>(p.in.g) + from));
  const uint32_t x = __ldg(reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(p.in.g) + from));
  return make_float2(low(x), high(x));
}

// Log2-decays of the lane's tokens, and their sums, for all, in shared memory.
template <Gate GATE, bool BOUNDED, bool G32>
__device__ __forceinline__ void load_gates(const HopperGradient& p, const Chunk& c, Tokens& x, const Seat& at) {
  const GateOf<GATE> gate(p.in, c.head, at.channel());
  float sum[2] = {};
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    const float2 raw = load_gate<G32>(p, c, at, t);
    const bool inside = 8 * at.group() + t < c.span.length;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float y = inside ? gate.log2_decay(i ? raw.y : raw.x, i) : 0.0f;
      if (!BOUNDED) y = max_or_nan(y, kGateFloor);
      x.g[t][i] = y, sum[i] += y;
    }
  }
  *reinterpret_cast<float2*>(at.floats(kAtSums) + at.group() * kHead + at.channel()) = make_float2(sum[0], sum[1]);
}

// References, steps between them, what is left from each to the chunk's end.
__device__ __forceinline__ void refer(Tokens& x, const Seat& at) {
  const float* sums = at.floats(kAtSums) + at.channel();
  float before[2] = {}, m[2] = {}, last[2] = {}, base[2] = {};
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const float2 z = load_two(sums + i * kHead);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float sum = c ? z.y : z.x, own = rintf(before[c] + 0.5f * sum);
      if (i + 1 == at.group()) last[c] = own;
      if (i == at.group()) m[c] = own, base[c] = before[c] - own;
      before[c] += sum;
    }
  }
  const int to = at.group() * kHead + at.channel();
  *reinterpret_cast<float2*>(at.floats(kAtSteps) + to) = make_float2(exp2_fast(m[0] - last[0]), exp2_fast(m[1] - last[1]));
  *reinterpret_cast<float2*>(at.floats(kAtToEnd) + to) = make_float2(exp2_fast(before[0] - m[0]), exp2_fast(before[1] - m[1]));
#pragma unroll
  for (int c = 0; c < 2; ++c) x.base[c] = base[c], x.all[c] = before[c];
}

struct Factors {  // of a token, two channels: normalised q and k, 2^(s - m) and 2^(m - s), and the rounded rows and column
  float q[2], k[2], row[2], column[2];
  uint32_t rows_q, rows_k, columns;

  __device__ __forceinline__ Factors(const Tokens& x, float (&run)[2], int t, float norm_q, float norm_k) {
    q[0] = low(x.q[t]) * norm_q, q[1] = high(x.q[t]) * norm_q, k[0] = low(x.k[t]) * norm_k, k[1] = high(x.k[t]) * norm_k;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float s = x.exponent(run, t, c);
      row[c] = exp2_fast(s), column[c] = exp2_fast(-s);
    }
    rows_q = pack_bf16(q[0] * row[0], q[1] * row[1]), rows_k = pack_bf16(k[0] * row[0], k[1] * row[1]);
    columns = pack_bf16(k[0] * column[0], k[1] * column[1]);
  }
};

// q, k of the lane's tokens from the tiles, and their decayed tiles in the same place.
__device__ __forceinline__ void make_tiles(const HopperGradient& p, Tokens& x, const float* factors, const Seat& at) {
  float run[2] = {};
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    const int row = 8 * at.group() + t, from = row_of(row, p.group);
    const uint32_t to = at.smem + word_at(row, at.channel());
    x.q[t] = load_shared_word(to + kAtRowsQ), x.k[t] = load_shared_word(to + kAtRowsK);
    const Factors y(x, run, t, factors[kChunk + from], factors[2 * kChunk + from]);
    store_shared(to + kAtRowsQ, y.rows_q), store_shared(to + kAtRowsK, y.rows_k), store_shared(to + kAtColumns, y.columns);
  }
}

// Rows `first` .. last of every result times a table's powers of two: r = 0, 1 are a lane's first token, 2, 3 its second.
template <int FIRST, int LAST>
__device__ __forceinline__ void move(Results& x, const float2 (&by)[4]) {
#pragma unroll
  for (int t = 0; t < 4; ++t)
#pragma unroll
    for (int r = FIRST; r <= LAST; ++r) x[t][r] *= r % 2 ? by[t].y : by[t].x;
}
__device__ __forceinline__ void load_powers(float2 (&by)[4], int table, int group, const Seat& at) {
#pragma unroll
  for (int t = 0; t < 4; ++t) by[t] = load_two(at.floats(table) + group * kHead + at.result_channel(t));
}
// Eight tokens of a group, the four n-tiles of the warp's channels, as B operands.
__device__ __forceinline__ void load_group(uint32_t (&b)[4], uint32_t tile, int group, const Seat& at) {
  load_matrices_transposed(b, tile + tile_at(8 * group + (at.lane & 7), 4 * at.slice + (at.lane >> 3)));
}

// sum_j k_decayed d_k_decayed over the warp's tokens, for the gates.
__device__ __forceinline__ void state_shares(const Results& d_c, const Seat& at) {
  float2 first[4], second[4];
  load_powers(first, kAtToEnd, 2 * at.block, at), load_powers(second, kAtToEnd, 2 * at.block + 1, at);
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const uint32_t word = at.smem + kAtColumns + word_at(at.result_row(0), at.result_channel(t));
    const uint32_t x = load_shared_word(word), y = load_shared_word(word + 8 * 256);
    float2 sum = make_float2(low(x) * (d_c[t][0] * first[t].x) + low(y) * (d_c[t][2] * second[t].x),
                             high(x) * (d_c[t][1] * first[t].y) + high(y) * (d_c[t][3] * second[t].y));
#pragma unroll
    for (int step = 4; step < 32; step *= 2)
      sum.x += __shfl_xor_sync(~0u, sum.x, step), sum.y += __shfl_xor_sync(~0u, sum.y, step);
    if (at.lane < 4) *reinterpret_cast<float2*>(at.floats(kAtTotals) + at.block * kHead + at.result_channel(t)) = sum;
  }
}

// To the gradients of rows, which begin with what the state gives, all columns up to their own group.
__device__ __forceinline__ void row_pairs(Results& d_q, Results& d_k, const Seat& at) {
#pragma unroll 1
  for (int group = 0; group < 2 * at.block + 2; ++group) {
    float2 by[4];
    uint32_t a[4], b[4];
    load_powers(by, kAtSteps, group, at);
    load_matrices(a, at.smem + kAtPairs + pair_at(16 * at.block + (at.lane & 15) + (at.lane >> 4) * kChunk, group));
    load_group(b, at.smem + kAtColumns, group, at);
    if (group <= 2 * at.block)
      move<0, 3>(d_q, by), move<0, 3>(d_k, by);
    else
      move<2, 3>(d_q, by), move<2, 3>(d_k, by);
#pragma unroll
    for (int t = 0; t < 4; ++t) mma_bf16(d_q[t], a[0], a[1], b[t]), mma_bf16(d_k[t], a[2], a[3], b[t]);
  }
}

// To those of columns, which begin with what the state after the chunk gives, all rows down to their own group.
__device__ __forceinline__ void column_pairs(Results& d_c, const Seat& at) {
  float2 by[4];
  load_powers(by, kAtToEnd, kGroups - 1, at);
  move<0, 3>(d_c, by);
#pragma unroll 1
  for (int group = kGroups - 1; group >= 2 * at.block; --group) {
    uint32_t a[4], b[4];
    load_matrices_transposed(a, at.smem + kAtPairs +
                                    pair_at(8 * group + (at.lane & 7) + (at.lane >> 4) * kChunk, 2 * at.block + ((at.lane >> 3) & 1)));
    load_group(b, at.smem + kAtRowsQ, group, at);
#pragma unroll
    for (int t = 0; t < 4; ++t) mma_bf16(d_c[t], a[0], a[1], b[t]);
    load_group(b, at.smem + kAtRowsK, group, at);
#pragma unroll
    for (int t = 0; t < 4; ++t) mma_bf16(d_c[t], a[2], a[3], b[t]);
    load_powers(by, kAtSteps, group, at);
    if (group > 2 * at.block + 1) move<0, 3>(d_c, by);
    if (group == 2 * at.block + 1) move<0, 1>(d_c, by);
  }
}

}  // namespace kda::hopper
