// Products over V. With e = r - lower (beta r), what the state gets wrong about each key, and v_new = beta e:
//
//   d_beta_i = (d_v_i / beta_i) . e_i        d_A_qk = scale d_o v_new^T,  j <= i        d_A_kk / beta = -d_v v_new^T,  j < i
//   d_q_decayed = scale d_o S^T        d_k_in = -d_v S^T        d_k_decayed = v_new dS'^T        d_decay = sum_v S dS'
#pragma once
#include "../prefill/hopper_gate.cuh"
#include "hopper_gradient_block.cuh"

namespace kda::hopper {

using Results = float[4][4];  // 16 tokens, 32 channels: four C tiles side by side

// Of a tile: 16 rows as an A operand, step s of 16 channels; 16 rows as columns of a B operand; 16 rows as its depth, and two n-tiles of
// channels from `unit` on.
__device__ __forceinline__ void load_rows(uint32_t (&a)[4], uint32_t tile, int block, int s, int lane) {
  load_matrices(a, tile + tile_at(16 * block + (lane & 15), 2 * s + (lane >> 4)));
}
__device__ __forceinline__ void load_columns(uint32_t (&b)[4], uint32_t tile, int block, int s, int lane) {
  load_matrices(b, tile + tile_at(16 * block + (lane & 7) + ((lane >> 4) << 3), 2 * s + ((lane >> 3) & 1)));
}
__device__ __forceinline__ void load_depth(uint32_t (&b)[4], uint32_t tile, int block, int unit, int lane) {
  load_matrices_transposed(b, tile + tile_at(16 * block + (lane & 15), unit + (lane >> 4)));
}

// Block (block, j) of lower Diag(beta) as an A operand: two bfloat16 numbers whose sum it is.
__device__ __forceinline__ void load_lower(uint32_t (&big)[4], uint32_t (&small)[4], const HopperGradient& p, const float* factors, int j,
                                           const Seat& at) {
  uint32_t halves[4];
  if (!p.lower_float32) {
    const int row = 16 * at.block + (at.lane & 15);
    load_matrices(halves, at.smem + kAtLower + pair_at(row, 2 * j + (at.lane >> 4)));
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 16 * at.block + at.lane / 4 + 8 * (i % 2), column = 16 * j + 2 * (at.lane % 4) + 8 * (i / 2);
    float2 x;
    if (p.lower_float32) {
      const int from = row_of(row, p.group_bits), c0 = row_of(column, p.group_bits), c1 = row_of(column + 1, p.group_bits);
      const auto at_column = [&](int c) {
        return *reinterpret_cast<const float*>(at.bytes + kAtLower + tile_at(from, c >> 2) + (c & 3) * 4);
      };
      x = make_float2(at_column(c0), at_column(c1));
    } else {
      x = unpack_half(halves[i]);
    }
    x.x = column < row ? x.x * factors[row_of(column, p.group_bits)] : 0.0f;
    x.y = column + 1 < row ? x.y * factors[row_of(column + 1, p.group_bits)] : 0.0f;
    big[i] = pack_bf16(x.x, x.y);
    small[i] = pack_bf16(x.x - low(big[i]), x.y - high(big[i]));
  }
}

// Too small a given beta to divide by what was multiplied by it and rounded.
__device__ __forceinline__ bool too_small(float beta) { return fabsf(beta) < 5.421010862427522e-20f; }

// v_new of the warp's tokens, value channels of its slice, into shared memory, and its share of d_v . e.
__device__ __forceinline__ void make_v_new(const HopperGradient& p, const Chunk& c, const float* factors, const Seat& at) {
  Results acc = {};
#pragma unroll 1
  for (int j = 0; j <= at.block; ++j) {
    uint32_t big[4], small[4], b[4];
    load_lower(big, small, p, factors, j, at);
#pragma unroll
    for (int t = 0; t < 4; t += 2) {
      load_depth(b, at.smem + kAtR, j, 4 * at.slice + t, at.lane);
      mma_bf16(acc[t], big, b[0], b[1]), mma_bf16(acc[t + 1], big, b[2], b[3]);
      mma_bf16(acc[t], small, b[0], b[1]), mma_bf16(acc[t + 1], small, b[2], b[3]);
    }
  }
  float dots[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = at.result_row(2 * half);
    const float beta = factors[row_of(row, p.group_bits)];
    const bool other = p.alone && too_small(beta) && row < c.length;
    const auto* alone = static_cast<const uint32_t*>(p.alone) + (c.item * kChunk + row) * (kHead / 2);
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int channel = at.result_channel(t);
      const uint32_t at_word = word_at(row, channel), r = load_shared_word(at.smem + kAtR + at_word);
      const float e0 = low(r) - acc[t][2 * half], e1 = high(r) - acc[t][2 * half + 1];
      const uint32_t d = other ? alone[channel / 2] : load_shared_word(at.smem + kAtDV + at_word);
      dots[half] = fmaf(low(d), e0, fmaf(high(d), e1, dots[half]));
      store_shared(at.smem + kAtVNew + at_word, pack_bf16(beta * e0, beta * e1));
    }
    dots[half] += __shfl_xor_sync(~0u, dots[half], 1);
    dots[half] += __shfl_xor_sync(~0u, dots[half], 2);
    if (at.lane % 4 == 0) at.floats(kAtDots)[row * 4 + at.slice] = dots[half];
  }
}

// d_beta of one token per thread, from the slices' shares of d_v . e.
__device__ __forceinline__ void write_d_beta(const HopperGradient& p, const Chunk& c, const float* factors, const Seat& at) {
  const int row = at.thread;
  if (row >= kChunk || row >= c.length) return;
  const float4 x = *reinterpret_cast<const float4*>(at.floats(kAtDots) + row * 4);
  float d = (x.x + x.y) + (x.z + x.w);
  if (p.in.beta_kind == Beta::given) {
    const float beta = factors[row_of(row, p.group_bits)];
    d = d / (too_small(beta) ? 1.0f : beta);
  } else {  // of s = 1 / (1 + e^-x), or 2 s: (1 - s) d, where d has the strength in it
    const int64_t from = c.offset(p.in.beta_strides, c.head) + row * p.in.beta_strides.token;
    const float y = p.in.beta_float32 ? static_cast<const float*>(p.in.beta)[from]
                                      : __bfloat162float(static_cast<const __nv_bfloat16*>(p.in.beta)[from]);
    const float e = exp2_fast(-fabsf(y) * kLog2e);
    d = (y >= 0.0f ? e : 1.0f) * d * reciprocal_fast(1.0f + e);
  }
  const int64_t to = c.token(p.in) + row * p.in.HV;
  if (p.in.beta_float32)
    static_cast<float*>(p.d_beta)[to] = d;
  else
    static_cast<uint16_t*>(p.d_beta)[to] = static_cast<uint16_t>(pack_bf16(d, 0.0f));
}

// The pairs of the warp's tokens as rows with those of block `slice` as columns, if that is not later; the diagonal of A_qk goes to shared
// memory. Returns the largest.
__device__ __forceinline__ float make_pairs(const HopperGradient& p, float (&of_q)[2][4], float (&of_k)[2][4], const Seat& at) {
  if (at.slice > at.block) return 0.0f;
#pragma unroll
  for (int s = 0; s < kHead / 16; ++s) {
    uint32_t a[4], b[4];
    load_columns(b, at.smem + kAtVNew, at.slice, s, at.lane);
    load_rows(a, at.smem + kAtDO, at.block, s, at.lane);
    mma_bf16(of_q[0], a, b[0], b[1]), mma_bf16(of_q[1], a, b[2], b[3]);
    load_rows(a, at.smem + kAtDV, at.block, s, at.lane);
    mma_bf16(of_k[0], a, b[0], b[1]), mma_bf16(of_k[1], a, b[2], b[3]);
  }
  float largest = 0.0f;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int i = at.lane / 4 + 8 * (r / 2), j = 8 * n + 2 * (at.lane % 4) + r % 2;
      const bool below = at.slice < at.block || j < i;
      if (at.slice == at.block && i == j) at.floats(kAtDiagonal)[16 * at.block + i] = of_q[n][r] * p.in.scale;
      of_q[n][r] = below ? of_q[n][r] * p.in.scale : 0.0f, of_k[n][r] = below ? -of_k[n][r] : 0.0f;
      largest = fmaxf(largest, fmaxf(fabsf(of_q[n][r]), fabsf(of_k[n][r])));
    }
  return largest;
}

__device__ __forceinline__ void store_pairs(const float (&of_q)[2][4], const float (&of_k)[2][4], float unit, const Seat& at) {
  if (at.slice > at.block) return;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = at.result_row(2 * half), r = 2 * half;
      const uint32_t to = at.smem + kAtPairs + pair_at(row, 2 * at.slice + n) + at.lane % 4 * 4;
      store_shared(to, pack_bf16(of_q[n][r] * unit, of_q[n][r + 1] * unit));
      store_shared(to + kChunk * 128, pack_bf16(of_k[n][r] * unit, of_k[n][r + 1] * unit));
    }
}

// Gradients of q_decayed, k_in and k_decayed, divided by the chunk's power of two.
__device__ __forceinline__ void state_products(const HopperGradient& p, Results& d_q, Results& d_k, Results& d_c, float unit,
                                               const Seat& at) {
#pragma unroll 2  // more would want more registers
  for (int s = 0; s < kHead / 16; ++s) {
    uint32_t a[4], b[2][4];
    load_depth(b[0], at.smem + kAtS, s, 4 * at.slice, at.lane), load_depth(b[1], at.smem + kAtS, s, 4 * at.slice + 2, at.lane);
    load_rows(a, at.smem + kAtDO, at.block, s, at.lane);
#pragma unroll
    for (int t = 0; t < 4; ++t) mma_bf16(d_q[t], a, b[t / 2][t % 2 * 2], b[t / 2][t % 2 * 2 + 1]);
    load_rows(a, at.smem + kAtDV, at.block, s, at.lane);
#pragma unroll
    for (int t = 0; t < 4; ++t) mma_bf16(d_k[t], a, b[t / 2][t % 2 * 2], b[t / 2][t % 2 * 2 + 1]);
    load_depth(b[0], at.smem + kAtDS, s, 4 * at.slice, at.lane), load_depth(b[1], at.smem + kAtDS, s, 4 * at.slice + 2, at.lane);
    load_rows(a, at.smem + kAtVNew, at.block, s, at.lane);
#pragma unroll
    for (int t = 0; t < 4; ++t) mma_bf16(d_c[t], a, b[t / 2][t % 2 * 2], b[t / 2][t % 2 * 2 + 1]);
  }
#pragma unroll
  for (int t = 0; t < 4; ++t)
#pragma unroll
    for (int r = 0; r < 4; ++r) d_q[t][r] *= p.in.scale * unit, d_k[t][r] *= -unit, d_c[t][r] *= unit;
}

__device__ __forceinline__ int64_t sequence_of(const HopperForward& p, const Chunk& c) {
  if (!p.cu_seqlens) return c.batch;
  int64_t low = 0, high = p.N;  // boundary(low) <= first < boundary(high)
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (boundary(p, middle) <= c.first ? low : high) = middle;
  }
  return low;
}

// The warp's eight value channels of sum_v S dS', four key channels per lane, to `parts` [16][128] in the columns' place. At the ends of a
// sequence S and dS' are as the caller gave them: short sequences have no rounding that this could hide behind.
__device__ __forceinline__ void decay_products(const HopperGradient& p, const Chunk& c, const Seat& at) {
  float sum[4] = {};
  int64_t state = 0;
  bool from_caller = false, to_caller = false;
  if (p.in.initial_state || p.d_final) {
    const int64_t n = sequence_of(p.in, c);
    const Span span = sequence_span(p.in, n);
    state = n * p.in.HV + c.head;
    from_caller = p.in.initial_state && c.first == span.first, to_caller = p.d_final && c.first + c.length == span.first + span.length;
  }
#pragma unroll 2
  for (int i = 0; i < 8; ++i) {
    const int v = 8 * at.warp + i;
    const uint32_t offset = tile_at(v, at.lane >> 1) + (at.lane & 1) * 8;
    const uint2 x = load_shared_pair(at.smem + kAtS + offset), y = load_shared_pair(at.smem + kAtDS + offset);
    float S[4] = {low(x.x), high(x.x), low(x.y), high(x.y)}, dS[4] = {low(y.x), high(y.x), low(y.y), high(y.y)};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int k = 4 * at.lane + j;
      const int64_t index = state * kHead * kHead + (p.in.state_v_first ? v * kHead + k : k * kHead + v);
      if (from_caller) S[j] = p.in.initial_state[index];
      if (to_caller) dS[j] = p.d_final[index];
      sum[j] = fmaf(S[j], dS[j], sum[j]);
    }
  }
  *reinterpret_cast<float4*>(at.floats(kAtColumns) + at.warp * kHead + 4 * at.lane) = make_float4(sum[0], sum[1], sum[2], sum[3]);
}
__device__ __forceinline__ void add_decay_products(const Seat& at) {
  if (at.thread >= kHead) return;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kGradientWarps; ++i) sum += at.floats(kAtColumns)[i * kHead + at.thread];
  at.floats(kAtDDecay)[at.thread] = sum;
}

}  // namespace kda::hopper
