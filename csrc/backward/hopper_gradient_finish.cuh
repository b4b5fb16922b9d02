// From the gradients of decayed rows and columns to those of the inputs. By token, with u_i = q_i d_q_i + k_i d_k_i as a row - as a column,
// the pair of a token with itself left out, a gate's gradient is
//
//   d_g_m = sum_{i >= m} u_i + sum_{j < m} k_decayed_j d_k_decayed_j + decay d_decay
//
// in which the pairs that a gate does not lie between cancel but for float32 sums; columns have no part of the state in u, which would be
// far larger than what is left where every gate is strong. A gate that was raised to the floor has the share of its
// gradient that it has of the decay.
#pragma once
#include "hopper_gradient_pairs.cuh"

namespace kda::hopper {

using ByToken = float[8][2];

struct Keys {  // q and k of a lane's tokens as they lie in memory, read where they are needed: there are too few registers to keep them
  uint32_t q[8], k[8];
};
__device__ __forceinline__ void load_keys(const HopperGradient& p, const Chunk& c, Keys& x, const Seat& at) {
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const TokenStrides& s = which ? p.in.k_strides : p.in.q_strides;
    int64_t offset = c.offset(s, c.key_head(p.in)) + 8 * at.group() * s.token + at.channel();
    const auto step = static_cast<uint32_t>(s.token);
    KDA_HIDE(offset);
    const auto* from = static_cast<const uint16_t*>(which ? p.in.k : p.in.q) + offset;
#pragma unroll
    for (int t = 0; t < 8; ++t)
      (which ? x.k : x.q)[t] = 8 * at.group() + t < c.length ? __ldg(reinterpret_cast<const uint32_t*>(from + t * step)) : 0;
  }
}

// Where a lane's first token and channels lie in its warp's patch.
__device__ __forceinline__ uint8_t* patch_of(const Seat& at) {
  return at.bytes + kAtRowsQ + at.warp * kPatch + at.lane / 16 * 8 * kPatchPitch + at.lane % 16 * 8;
}

// Results of mma.sync to a lane's tokens, within the warp.
__device__ __forceinline__ void by_token(ByToken& y, const Results& x, const Seat& at) {
  uint8_t* patch = at.bytes + kAtRowsQ + at.warp * kPatch;
#pragma unroll
  for (int t = 0; t < 4; ++t)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(patch + (at.lane / 4 + 8 * half) * kPatchPitch + (8 * t + 2 * (at.lane % 4)) * 4) =
          make_float2(x[t][2 * half], x[t][2 * half + 1]);
  __syncwarp();
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    const float2 z = *reinterpret_cast<const float2*>(patch_of(at) + t * kPatchPitch);
    y[t][0] = z.x, y[t][1] = z.y;
  }
  __syncwarp();
}

// Sums over 16 lanes of 16 numbers each; lane l keeps number l % 16.
template <int N>
__device__ __forceinline__ float sum_of_lanes(const float (&x)[N], int lane) {
  if constexpr (N == 1) {
    return x[0];
  } else {
    constexpr int kStep = N / 2;
    const bool upper = lane & kStep;
    float y[kStep];
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      const float mine = upper ? x[i + kStep] : x[i], other = upper ? x[i] : x[i + kStep];
      y[i] = mine + __shfl_xor_sync(~0u, other, kStep);
    }
    return sum_of_lanes(y, lane);
  }
}

// d_q and d_k become gradients of normalised q and k, d_c what its group's tokens give to each gate; all still divided by the chunk's power
// of two. What lies along q and k, and what groups give to gates of earlier ones and of later ones, go to shared memory.
__device__ __forceinline__ void undo_decays(const HopperGradient& p, const Tokens& x, const Keys& keys, const float* factors, float back,
                                            ByToken& d_q, ByToken& d_k, ByToken& d_c, const Seat& at) {
  float run[2] = {}, along[16], ahead[2];
  const float unit = __frcp_rn(back);
  uint8_t* patch = patch_of(at);
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    const int row = 8 * at.group() + t, from = row_of(row, p.group_bits);
    const Factors y(x, keys.q[t], keys.k[t], run, t, factors[kChunk + from], factors[2 * kChunk + from]);
    const float diagonal = at.floats(kAtDiagonal)[row] * unit;
    along[t] = along[8 + t] = 0.0f;
    const uint32_t state_part = load_shared_word(at.smem + kAtVNew + word_at(row, at.channel()));
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float rows_q = c ? high(y.rows_q) : low(y.rows_q), rows_k = c ? high(y.rows_k) : low(y.rows_k);
      const float columns = c ? high(y.columns) : low(y.columns);
      const float u = fmaf(rows_q, d_q[t][c], fmaf(rows_k, d_k[t][c], -columns * d_c[t][c]));
      d_q[t][c] = fmaf(y.row[c], d_q[t][c], diagonal * y.k[c]);
      const float to_end = exp2_fast(x.rest[c] - y.s[c]) * (c ? high(state_part) : low(state_part));
      d_k[t][c] = fmaf(y.row[c], d_k[t][c], fmaf(y.column[c], d_c[t][c], fmaf(diagonal, y.q[c], to_end)));
      ahead[c] = y.k[c] * to_end;
      d_c[t][c] = u;
      along[t] = fmaf(y.q[c], d_q[t][c], along[t]), along[8 + t] = fmaf(y.k[c], d_k[t][c], along[8 + t]);
    }
    *reinterpret_cast<float2*>(patch + t * kPatchPitch) = make_float2(ahead[0], ahead[1]);  // the lane's own place
  }
#pragma unroll
  for (int t = 6; t >= 0; --t) d_c[t][0] += d_c[t + 1][0], d_c[t][1] += d_c[t + 1][1];
  const int own = at.group() * kHead + at.channel();
  *reinterpret_cast<float2*>(at.floats(kAtSums) + own) = make_float2(d_c[0][0], d_c[0][1]);
  float before[2] = {};
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    const float2 z = *reinterpret_cast<const float2*>(patch + t * kPatchPitch);
    d_c[t][0] += before[0], d_c[t][1] += before[1], before[0] += z.x, before[1] += z.y;
  }
  *reinterpret_cast<float2*>(at.floats(kAtAhead) + own) = make_float2(before[0], before[1]);
  at.floats(kAtDots)[((at.lane & 8) * 8 + 8 * at.group() + at.lane % 8) * 4 + at.slice] = sum_of_lanes(along, at.lane);
}

// What all gates of the lane's group get from the state and from the other groups.
__device__ __forceinline__ void shares_of_all(float (&all)[2], float unit, const Seat& at) {
  const float2 d = load_two(at.floats(kAtDDecay) + at.channel());
  all[0] = d.x * unit, all[1] = d.y * unit;
#pragma unroll 1
  for (int i = 0; i < kGroups; ++i) {
    if (i == at.group()) continue;
    const float2 z = load_two(at.floats(i > at.group() ? kAtSums : kAtAhead) + i * kHead + at.channel());
    all[0] += z.x, all[1] += z.y;
  }
}

__device__ __forceinline__ void write_two(void* to, int64_t first, uint32_t at, bool wide, float x, float y) {
  if (wide)
    *reinterpret_cast<float2*>(static_cast<float*>(to) + first + at) = make_float2(x, y);
  else
    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(to) + first + at) = pack_bf16(x, y);
}

// d_q, d_k, d_g of the lane's tokens; sums over them of the gradients of the gate's parameters go to shared memory.
template <Gate GATE, bool BOUNDED, bool G32>
__device__ __forceinline__ void write_gradients(const HopperGradient& p, const Chunk& c, const float* factors, float back,
                                                const ByToken& d_q, const ByToken& d_k, const ByToken& d_c, const Seat& at) {
  const GateOf<GATE> gate(p.in, c.head, at.channel());
  float all[2], bias[2] = {}, A[2] = {};
  Keys keys;
  load_keys(p, c, keys, at);
  shares_of_all(all, __frcp_rn(back), at);
  const int64_t first = c.token(p.in) * kHead;
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    const int row = 8 * at.group() + t, from = row_of(row, p.group_bits);
    if (row >= c.length) continue;
    const float norm_q = factors[kChunk + from], norm_k = factors[2 * kChunk + from];
    const float4 y = *reinterpret_cast<const float4*>(at.floats(kAtDots) + row * 4);
    const float4 z = *reinterpret_cast<const float4*>(at.floats(kAtDots) + (kChunk + row) * 4);
    const float along_q = p.in.l2norm ? ((y.x + y.y) + (y.z + y.w)) * norm_q : 0.0f;
    const float along_k = p.in.l2norm ? ((z.x + z.y) + (z.z + z.w)) * norm_k : 0.0f;
    const uint32_t to = row * (static_cast<uint32_t>(p.in.HV) * kHead) + at.channel();
    const float fq = norm_q * back, fk = norm_k * back;
    const uint32_t q = keys.q[t], k = keys.k[t];
    write_two(p.d_q, first, to, p.wide, (d_q[t][0] - low(q) * along_q) * fq, (d_q[t][1] - high(q) * along_q) * fq);
    write_two(p.d_k, first, to, p.wide, (d_k[t][0] - low(k) * along_k) * fk, (d_k[t][1] - high(k) * along_k) * fk);
    const float2 raw = load_gate<G32>(p, c, at, t);
    float d_g[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float g = i ? raw.y : raw.x;
      float d = (d_c[t][i] + all[i]) * back;
      if (!BOUNDED) d *= exp2_fast(fminf(gate.log2_decay(g, i) - kGateFloor, 0.0f));
      const float2 found = gate.backward(g, d, i);
      d_g[i] = found.x, bias[i] += found.x, A[i] += found.y;
    }
    write_two(p.d_g, first, to, G32, d_g[0], d_g[1]);
  }
  const int to = at.group() * kHead + at.channel();
  if (p.bias_shares) *reinterpret_cast<float2*>(at.floats(kAtBiasShares) + to) = make_float2(bias[0], bias[1]);
  if (p.A_shares) *reinterpret_cast<float2*>(at.floats(kAtAShares) + to) = make_float2(A[0], A[1]);
}

// The chunk's shares of d_A_log and d_dt_bias, one channel of one of them per thread.
__device__ __forceinline__ void write_shares(const HopperGradient& p, const Chunk& c, const Seat& at) {
  float* to = at.thread < kHead ? p.bias_shares : p.A_shares;
  if (at.thread >= 2 * kHead || !to) return;
  const float* from = at.floats(at.thread < kHead ? kAtBiasShares : kAtAShares) + at.thread % kHead;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) sum += from[i * kHead];
  to[c.item * kHead + at.thread % kHead] = sum;
}

}  // namespace kda::hopper
