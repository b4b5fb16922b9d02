// The walk of a warp group along a sequence's chunks, from the last to the first.
//
// Tensor cores take products in order: A_solved^T d_o, k_solved dS', q_decayed^T d_o, k_in^T beta y. The first runs while dS' is rounded,
// the third while y is; dS' leaves during the second, d_v, which takes the place of d_o, during the last.
#pragma once
#include "../prefill/hopper_wgmma.cuh"
#include "hopper_reverse_block.cuh"

namespace kda::hopper {

constexpr float kTinyBeta = 0x1p-64f;  // a smaller given beta divides nothing

// Where a lane's four units of 16 bytes of d_v go: tokens 4 apart.
struct BackOutputs {
  uint8_t* to;      // the lane's first token in the chunk at hand
  int64_t step;     // bytes from token to token
  int first, left;  // the lane's first token; tokens of the chunk from it on

  __device__ __forceinline__ BackOutputs(const HopperReverse& p, const BackTask& task, int head, int warp, int lane) {
    first = warp % 4 * 16 + lane / 8;
    step = p.in.HV * head * 2;
    const int64_t last = static_cast<int64_t>(task.chunks - 1) * kChunk;
    to = static_cast<uint8_t*>(p.d_v) + (task.span.batch * p.in.T + task.span.first + last + first) * step +
         2 * (task.head * head + task.channel + warp / 4 * kBackSlice + lane % 8 * 8);
    left = static_cast<int>(task.span.length - last) - first;
  }
  // From rows of `pitch` bytes that begin with the lane's channels; then on to the chunk before.
  __device__ __forceinline__ void store(uint32_t rows, int pitch, int group_bits) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (4 * i < left) store_global(to + 4 * i * step, load_shared(rows + row_of(first + 4 * i, group_bits) * pitch));
    to -= kChunk * step, left = kChunk - first;
  }
};

// Per value channel of the lane's two the power of two at or below the largest magnitude of dS', as bits; `left` is dS', rounded.
template <int STEPS>
__device__ __forceinline__ void powers_of_rows(const uint32_t (&left)[STEPS][4], uint32_t (&bits)[2]) {
  uint32_t largest[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    largest[half] = larger_bf16(left[0][half], left[0][half + 2]);
#pragma unroll
    for (int s = 1; s < STEPS; ++s) largest[half] = larger_bf16(largest[half], larger_bf16(left[s][half], left[s][half + 2]));
  }
  uint32_t both = larger_bf16(largest[0] << 16 | (largest[1] & 0xffffu), largest[0] >> 16 << 16 | largest[1] >> 16);
  both = larger_bf16(both, __shfl_xor_sync(~0u, both, 1));
  both = larger_bf16(both, __shfl_xor_sync(~0u, both, 2));
  bits[0] = min(max(both & 0x7f800000u, 0x00800000u), 0x7e800000u);
  bits[1] = min(max(both << 16 & 0x7f800000u, 0x00800000u), 0x7e800000u);
}

__device__ __forceinline__ float smallest(const float (&beta)[16]) {
  float least = fabsf(beta[0]);
#pragma unroll
  for (int i = 1; i < 16; ++i) least = fminf(least, fabsf(beta[i]));
  return least;
}

// y by token, where a given beta divides nothing; and what rounding takes of a sequence's last chunk.
template <int HEAD>
__device__ __forceinline__ void write_alone(uint16_t* to, const float (&y)[32], const float (&beta)[16], int length, int bits, int lane) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int token = token_of(8 * (i / 4) + 2 * (lane % 4) + i % 2, bits);
    if (fabsf(beta[i / 4 * 2 + i % 2]) < kTinyBeta && token < length)
      to[token * HEAD + lane / 4 + 8 * (i / 2 % 2)] = static_cast<uint16_t>(pack_bf16(y[i], 0.0f));
  }
}
template <int HEAD>
__device__ __forceinline__ void write_lost(uint16_t* to, const float (&y)[32], const float (&beta)[16], bool given, int length, int bits,
                                           int lane) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int token = token_of(8 * (i / 4) + 2 * (lane % 4) + i % 2, bits);
    const float b = beta[i / 4 * 2 + i % 2], x = y[i] * (given && fabsf(b) < kTinyBeta ? 1.0f : b);
    if (token < length)
      to[token * HEAD + lane / 4 + 8 * (i / 2 % 2)] = static_cast<uint16_t>(pack_bf16(x - low(pack_bf16(x, 0.0f)), 0.0f));
  }
}

// A state [K, V], or [V, K] with v_first, from accumulators of 16 value channels. Once a sequence: nothing of it stays in registers.
template <int HEAD>
__device__ __forceinline__ void write_state(float* to, const float (&state)[HEAD / 2], int value, int v_first) {
  int lane = threadIdx.x % 32;
#ifndef KDA_EMULATE
  asm volatile("" : "+r"(lane));  // or the compiler prepares 64 addresses before the loop
#endif
  const int by_k = v_first ? 1 : HEAD, by_v = v_first ? HEAD : 1;
  to += (value + lane / 4) * by_v + 2 * (lane % 4) * by_k;
#pragma unroll
  for (int i = 0; i < HEAD / 2; ++i) to[(8 * (i / 4) + i % 2) * by_k + 8 * (i / 2 % 2) * by_v] = state[i];
}

template <int HEAD, int GROUPS, int BLOCKS, From FROM>
__device__ void walk_back(const HopperReverse& p, const ReverseMatrices& matrices, const BackTask& task, const uint8_t* shared,
                          uint32_t smem) {
  using L = BackLayout<HEAD, GROUPS, BLOCKS, FROM>;
  constexpr bool HALF = FROM == From::half_tiles;
  constexpr int kSteps = HEAD / 16;  // of a product over keys
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // warp / 4 is the group
  const int value = task.channel + warp * 16;
  const auto state_at = [&](int i) {  // of an accumulator
    const int v = value + lane / 4 + 8 * (i / 2 % 2), k = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
    return task.state * HEAD * HEAD + (p.in.state_v_first ? v * HEAD + k : k * HEAD + v);
  };
  float dS[HEAD / 2], y[32];
#pragma unroll
  for (int i = 0; i < HEAD / 2; ++i) dS[i] = p.d_final ? p.d_final[state_at(i)] : 0.0f;
  // The warp's channels of d_o, then of d_v: matrices of 8 tokens x 8 channels; dS': 8 channels x 8 keys.
  const uint32_t own = L::d_o + ((lane & 7) + ((lane >> 4) << 3)) * L::pitch + warp * 32 + ((lane >> 3) & 1) * 16;
  const uint32_t states = smem + L::states + warp * kStatesOut;
  const uint32_t state_rows = states + (lane & 15) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
  BackOutputs outputs(p, task, HEAD, warp, lane);
  uint32_t d_o[4][4];
  const auto load_d_o = [&](uint32_t at) {
#pragma unroll
    for (int n = 0; n < 4; ++n) load_matrices_transposed(d_o[n], at + own + 16 * n * L::pitch);
  };
  int stage = 0, length = static_cast<int>(task.span.length - static_cast<int64_t>(task.chunks - 1) * kChunk);
  uint32_t phase = 0;
  int64_t item = task.last;
  if (task.chunks > 0) {
    barrier_wait(smem + L::barriers, 0);
    load_d_o(smem);
  }
  if (task.chunks < 0) {  // Never: but with a product before the loop, ptxas lets dS be read while others are in flight (C7517).
    wgmma_begin();
    wgmma<1>(dS, d_o[0], descriptor(descriptor_base(smem), 0, L::half), 1);
    wgmma_commit();
    wgmma_wait<0>();
    touch(dS);
  }
  for (int i = 0; i < task.chunks; ++i, item -= p.in.HV, length = kChunk) {
    const uint32_t at = smem + stage * L::stage, base = descriptor_base(at);
    const uint8_t* small = shared + stage * L::stage + 8 * (lane % 4);
    if (i > 0 && i == task.chunks - 1 && p.after_first)
      write_state<HEAD>(p.after_first + task.state * HEAD * HEAD, dS, value, p.in.state_v_first);
    touch(y);
    wgmma_begin();
#pragma unroll
    for (int s = 0; s < 4; ++s)
      if constexpr (L::record) wgmma<0>(y, d_o[s], descriptor_of_squares(base, L::solved + s * 2048), s > 0);
      else wgmma<1>(y, d_o[s], descriptor(base, L::solved + s * 2048, 8192), s > 0);
    wgmma_commit();
    uint32_t left[kSteps][4];
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int j = 0; j < 4; ++j) left[s][j] = pack_bf16(dS[8 * s + 2 * j], dS[8 * s + 2 * j + 1]);
    [[maybe_unused]] float by_state[32];
    [[maybe_unused]] uint32_t power[2];
    if constexpr (HALF) {
      powers_of_rows(left, power);
      const float unit[2] = {__uint_as_float(0x7f000000u - power[0]), __uint_as_float(0x7f000000u - power[1])};
      uint32_t scaled[kSteps][4];
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
#pragma unroll
        for (int j = 0; j < 4; ++j) scaled[s][j] = pack_half(dS[8 * s + 2 * j] * unit[j % 2], dS[8 * s + 2 * j + 1] * unit[j % 2]);
      touch(by_state);
      wgmma_begin();
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
        wgmma_half(by_state, scaled[s], descriptor(base, L::k_solved + s / 4 * L::half + s % 4 * 32), s > 0);
    } else {
      wgmma_begin();
#pragma unroll
      for (int s = 0; s < kSteps; ++s) wgmma<0>(y, left[s], descriptor(base, L::k_solved + s / 4 * L::half + s % 4 * 32), 1);
    }
    wgmma_commit();
    if constexpr (HEAD == 64)
      if (p.d_states_lost) {
        if (lane == 0) pieces_read();
        __syncwarp();
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          uint32_t lost[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) lost[j] = pack_bf16(dS[8 * s + 2 * j] - low(left[s][j]), dS[8 * s + 2 * j + 1] - high(left[s][j]));
          store_matrices((state_rows ^ (s << 5)) + 2048, lost);
        }
      }
#pragma unroll
    for (int n = 0; n < HEAD / 8; ++n) {
      const float2 d = *reinterpret_cast<const float2*>(small + L::decay + 32 * n);
      dS[4 * n] *= d.x, dS[4 * n + 1] *= d.y, dS[4 * n + 2] *= d.x, dS[4 * n + 3] *= d.y;
    }
    touch(dS);
    wgmma_begin();
#pragma unroll
    for (int s = 0; s < 4; ++s) wgmma<1>(dS, d_o[s], descriptor(base, L::q + s * 2048, L::half), 1);
    if constexpr (L::exact)
#pragma unroll
      for (int s = 0; s < 4; ++s) wgmma<1>(dS, d_o[s], descriptor(base, L::q_lost + s * 2048, L::half), 1);
    wgmma_commit();
    if (lane == 0) pieces_read();
    __syncwarp();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) store_matrices((state_rows ^ (s % 4 << 5)) + s / 4 * 2048, left[s]);
    fence_async();
    __syncwarp();
    if (lane == 0) {
      const int row = static_cast<int>(item) * HEAD + value;
      store_piece(matrices.d_states, 0, row, states);
      if (HEAD == 128) store_piece(matrices.d_states, 64, row, states + 2048);
      else if (p.d_states_lost) store_piece(matrices.d_states_lost, 0, row, states + 2048);
      pieces_commit();
    }
    float beta[16];  // 1 where it is in the record
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 b = L::scaled ? make_float2(1.0f, 1.0f) : *reinterpret_cast<const float2*>(small + L::beta + 32 * n);
      beta[2 * n] = b.x, beta[2 * n + 1] = b.y;
    }
    wgmma_wait<1>();
    touch(y);
    if constexpr (HALF) {
      touch(by_state);
#pragma unroll
      for (int j = 0; j < 32; ++j) y[j] = fmaf(by_state[j], __uint_as_float(power[j / 2 % 2]), y[j]);
    }
    uint32_t d_r[4][4];  // -beta y, which the state takes
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        d_r[n][j] = pack_bf16(y[8 * n + 2 * j] * -beta[4 * n + j / 2 * 2], y[8 * n + 2 * j + 1] * -beta[4 * n + j / 2 * 2 + 1]);
    wgmma_begin();
#pragma unroll
    for (int s = 0; s < 4; ++s) wgmma<1>(dS, d_r[s], descriptor(base, L::k_in + s * 2048, L::half), 1);
    wgmma_commit();
    if (!L::scaled && p.alone && smallest(beta) < kTinyBeta)
      write_alone<HEAD>(p.alone + item * kChunk * HEAD + value, y, beta, length, p.group_bits, lane);
    if (i == 0 && p.y_lost)
      write_lost<HEAD>(p.y_lost + task.state * kChunk * HEAD + value, y, beta, p.in.beta_kind == Beta::given, length, p.group_bits, lane);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const uint32_t d_v[4] = {d_r[n][0] ^ 0x80008000u, d_r[n][1] ^ 0x80008000u, d_r[n][2] ^ 0x80008000u, d_r[n][3] ^ 0x80008000u};
      store_matrices_transposed(at + own + 16 * n * L::pitch, d_v);
    }
    named_barrier(warp / 4 + 1, 128);
    outputs.store(at + L::d_o + warp / 4 * 128 + lane % 8 * 16, L::pitch, p.group_bits);
    const uint32_t empty = smem + L::barriers + (L::stages + stage) * 8;
    if (++stage == L::stages) stage = 0, phase ^= 1;
    if (i + 1 < task.chunks) {
      barrier_wait(smem + L::barriers + stage * 8, phase);
      load_d_o(smem + stage * L::stage);
    }
    wgmma_wait<0>();
    touch(dS);
    barrier_arrive(empty);
  }
  if (p.d_initial)
#pragma unroll
    for (int i = 0; i < HEAD / 2; ++i) p.d_initial[state_at(i)] = dS[i];
  if (lane == 0) pieces_read();
}

}  // namespace kda::hopper
