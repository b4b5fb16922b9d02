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

using ByToken = float[4][4];  // [token][channel]

// Where a lane's first token and channels lie in its warp's patch.
template <int HEAD>
__device__ __forceinline__ uint8_t* patch_of(const Seat<HEAD>& at) {
  return at.bytes + at.kAtRowsQ + at.warp * kPatch + at.lane / 8 * 4 * kPatchPitch + at.lane % 8 * 16;
}
__device__ __forceinline__ float* in_patch(uint8_t* patch, int t) { return reinterpret_cast<float*>(patch + t * kPatchPitch); }

// Results of products to a lane's tokens, within the warp.
template <int HEAD>
__device__ __forceinline__ void by_token(ByToken& y, const Results& x, const Seat<HEAD>& at) {
  uint8_t *to = at.bytes + at.kAtRowsQ + at.warp * kPatch + at.lane / 4 * kPatchPitch + at.lane % 4 * 8, *from = patch_of(at);
#pragma unroll
  for (int t = 0; t < 4; ++t)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(to + half * 8 * kPatchPitch + t * 32) = make_float2(x[t][2 * half], x[t][2 * half + 1]);
  __syncwarp();
#pragma unroll
  for (int t = 0; t < 4; ++t) unpack(y[t], load_four(in_patch(from, t)));
  __syncwarp();
}

// Sums over N lanes of N numbers each; lane l keeps number l % N.
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
template <int HEAD>
__device__ __forceinline__ void undo_decays(const HopperGradient& p, const Tokens& x, const Raw<uint2>& q, const Raw<uint2>& k,
                                            const float* factors, float unit, ByToken& d_q, ByToken& d_k, ByToken& d_c,
                                            const Seat<HEAD>& at) {
  const Norms norms(factors, p.group_bits, at);
  const uint32_t tile = at.smem + at.kAtVNew + at.in_tile();
  float along[8], thirds[4];
  unpack(thirds, load_four(at.own_share()));
  uint8_t* patch = patch_of(at);
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    float s[4], part[4], ahead[4];
    unpack(s, load_four(exponents_of(at) + t * 128));
    const Factors y(q.of[t], k.of[t], s, norms.q(t), norms.k(t));
    const float diagonal = at.floats(at.kAtDiagonal)[at.token() + t] * unit;
    unpack_state_part(part, load_shared_pair(tile ^ (t * (at.kPitch + 16))), thirds[t]);
    float rows_q[4], rows_k[4], columns[4];
    unpack(rows_q, y.rows_q), unpack(rows_k, y.rows_k), unpack(columns, y.columns);
    along[t] = along[4 + t] = 0.0f;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float u = fmaf(rows_q[c], d_q[t][c], fmaf(rows_k[c], d_k[t][c], -columns[c] * d_c[t][c]));
      d_q[t][c] = fmaf(y.row[c], d_q[t][c], diagonal * y.k[c]);
      const float to_end = exp2_fast(x.rest[c] - s[c]) * part[c];
      d_k[t][c] = fmaf(y.row[c], d_k[t][c], fmaf(y.column[c], d_c[t][c], fmaf(diagonal, y.q[c], to_end)));
      ahead[c] = y.k[c] * to_end;
      d_c[t][c] = u;
      along[t] = fmaf(y.q[c], d_q[t][c], along[t]), along[4 + t] = fmaf(y.k[c], d_k[t][c], along[4 + t]);
    }
    store_four(in_patch(patch, t), ahead);  // the lane's own place
  }
  const auto put_along = [&] {
    if (p.in.l2norm)
      at.floats(at.kAtDots)[((at.lane & 4) * 16 + at.token() + at.lane % 4) * at.kSlices + at.slice] = sum_of_lanes(along, at.lane);
  };
  if (!Seat<HEAD>::kNarrow) put_along();  // at once: eight registers more for what follows. With 64 channels more would be spilled.
#pragma unroll
  for (int t = 2; t >= 0; --t)
#pragma unroll
    for (int c = 0; c < 4; ++c) d_c[t][c] += d_c[t + 1][c];
  float later[4], before[4] = {}, z[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) later[c] = d_c[0][c];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    unpack(z, load_four(in_patch(patch, t)));
#pragma unroll
    for (int c = 0; c < 4; ++c) d_c[t][c] += before[c], before[c] += z[c];
  }
  // The first half of a group gets what the second gives to earlier gates, the second what the first gives to later ones.
  float all[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float other = __shfl_xor_sync(~0u, at.second() ? later[c] : before[c], 8);
    all[c] = (at.second() ? before[c] : later[c]) + other;
#pragma unroll
    for (int t = 0; t < 4; ++t) d_c[t][c] += other;
  }
  store_four(at.own_share(), all);
  if (Seat<HEAD>::kNarrow) put_along();
}

// What all gates of the lane's group get from the state and from the other groups.
template <int HEAD>
__device__ __forceinline__ void shares_of_all(float (&all)[4], float unit, const Seat<HEAD>& at) {
  const int group = at.group();
  unpack(all, load_four(at.floats(at.kAtDDecay) + at.channel()));
#pragma unroll
  for (int c = 0; c < 4; ++c) all[c] *= unit;
#pragma unroll
  for (int i = 0; i < kGroups; ++i)
    if (i != group) {
      float z[4];
      unpack(z, load_four(at.floats(i > group ? at.kAtSums : at.kAtAhead) + i * HEAD + at.channel()));
#pragma unroll
      for (int c = 0; c < 4; ++c) all[c] += z[c];
    }
}

__device__ __forceinline__ void write_four(uint8_t* to, bool wide, const float (&x)[4]) {
  if (wide)
    *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
  else
    *reinterpret_cast<uint2*>(to) = uint2{pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3])};
}

// d_q, d_k, d_g of the lane's tokens; sums over them of the gradients of the gate's parameters go to shared memory.
template <Gate GATE, bool BOUNDED, bool G32, int HEAD>
__device__ __forceinline__ void write_gradients(const HopperGradient& p, int turn, const Raw<uint2>& keys_q, const Raw<uint2>& keys_k,
                                                RawGates<G32>& raw, bool raised, const float* factors, float back, const ByToken& d_q,
                                                const ByToken& d_k, const ByToken& d_c, const Seat<HEAD>& at) {
  const GateOf<GATE> gates = gates_of<GATE>(p.in, turn, at);
  const ThroughGate<GATE> through_gate(gates, back);
  const Norms norms(factors, p.group_bits, at);
  const Chunk& chunk = chunk_at(turn, at);
  float all[4], bias[4] = {}, A[4] = {};
  shares_of_all(all, over_power(back), at);
  if (GATE != Gate::log_decay && G32) load_gates(raw, p, chunk, at);  // read once more: they take more registers than there are
  const int left = chunk.length - at.token(), bytes = p.wide ? 4 : 2;
  const auto step = static_cast<uint32_t>(p.in.HV) * HEAD;
  const int64_t first = chunk.token * HEAD + (at.token() * step + at.channel());
  auto *to_q = static_cast<uint8_t*>(p.d_q) + first * bytes, *to_k = static_cast<uint8_t*>(p.d_k) + first * bytes;
  auto* to_g = static_cast<uint8_t*>(p.d_g) + first * (G32 ? 4 : 2);
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    if (t >= left) break;
    const float norm_q = norms.q(t), norm_k = norms.k(t), by_q = norm_q * back, by_k = norm_k * back;
    float x[4], y[4];
    if (p.in.l2norm) {
      float q[4], k[4];
      const float* dots = at.floats(at.kAtDots) + (at.token() + t) * at.kSlices;
      const auto z = load_slices<HEAD>(dots), w = load_slices<HEAD>(dots + at.kSlices * kChunk);
      const float along_q = sum_of_slices(z) * -norm_q, along_k = sum_of_slices(w) * -norm_k;
      unpack(q, keys_q.of[t]), unpack(k, keys_k.of[t]);
#pragma unroll
      for (int c = 0; c < 4; ++c) x[c] = fmaf(q[c], along_q, d_q[t][c]) * by_q, y[c] = fmaf(k[c], along_k, d_k[t][c]) * by_k;
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) x[c] = d_q[t][c] * by_q, y[c] = d_k[t][c] * by_k;
    }
    write_four(to_q + t * step * bytes, p.wide, x), write_four(to_k + t * step * bytes, p.wide, y);
    float d[4], g[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) d[c] = d_c[t][c] + all[c];
    if (t == 0 && at.token() == 0 && (chunk.states & kNone))  // a sequence's first token decays nothing
      d[0] = d[1] = d[2] = d[3] = 0.0f;
    if constexpr (GATE != Gate::log_decay) {
      unpack(g, raw.of[t]);
      through_gate(d, A, g, raised);
#pragma unroll
      for (int c = 0; c < 4; ++c) bias[c] += d[c];
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) d[c] *= back;
    }
    if (GATE == Gate::log_decay && !BOUNDED && raised) {  // seldom
      load_gates(raw, p, chunk, at);
      unpack(g, raw.of[t]);
#pragma unroll
      for (int c = 0; c < 4; ++c) g[c] *= kLog2e;
      share_of_raised(d, g);
    }
    write_four(to_g + t * step * (G32 ? 4 : 2), G32, d);
  }
  if constexpr (GATE != Gate::log_decay) {
#pragma unroll
    for (int c = 0; c < 4; ++c) A[c] *= through_gate.A_unit;
    const int to = at.token() / 4 * HEAD + at.channel();
    store_four(at.floats(at.kAtBiasShares) + to, bias), store_four(at.floats(at.kAtAShares) + to, A);
  }
}

// The chunk's shares of d_A_log and d_dt_bias, one channel of one of them per thread.
template <int HEAD>
__device__ __forceinline__ void write_shares(const HopperGradient& p, const Chunk& c, const Seat<HEAD>& at) {
  float* to = at.thread < HEAD ? p.bias_shares : p.A_shares;
  if (at.thread >= 2 * HEAD || !to) return;
  const float* from = at.floats(at.thread < HEAD ? at.kAtBiasShares : at.kAtAShares) + at.thread % HEAD;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunk / 4; ++i) sum += from[i * HEAD];
  to[c.item * HEAD + at.thread % HEAD] = sum;
}

}  // namespace kda::hopper
