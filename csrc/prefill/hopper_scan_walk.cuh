// The walk of a warp group along a sequence's chunks, with little on the way from one state to the next but what makes it.
//
// Tensor cores take products in order: k_in S, q_decayed S, k_solved^T r, A_solved r. A group alone in its block begins the first with half
// of the state rounded; during it the output of the chunk before is rounded, during the second the state decays and that output is stored.
// Of two groups one works while the other waits, so each rounds its state at once and its output at the chunk's end.
#pragma once
#include "hopper_kept.cuh"
#include "hopper_scan_links.cuh"

namespace kda::hopper {

// Where a thread's units of 16 bytes of the outputs go: 4 of a chunk, 4 tokens apart. From chunk to chunk they move on.
struct Outputs {
  uint8_t* to;
  int64_t step;  // bytes from token to token
  int left;      // tokens of the sequence from the thread's first row on

  __device__ __forceinline__ Outputs(const HopperForward& p, const Task& task, int chunk, int warp, int lane) {
    const int first = chunk * kChunk + warp % 4 * 16 + lane / 8;
    step = p.o_strides.token * 2;
    to = static_cast<uint8_t*>(p.o) + 2 * (task.span.batch * p.o_strides.batch + task.head * p.o_strides.head + task.channel +
                                           warp / 4 * kSlice + lane % 8 * 8) + (task.span.first + first) * step;
    left = static_cast<int>(min(task.span.length, static_cast<int64_t>(1) << 30)) - first;
  }
  __device__ __forceinline__ void store(uint32_t from) {
    store_beside(from, 0);
    to += kChunk * step, left -= kChunk;
  }
  // What belongs to the chunk that is next, `beside` bytes from where its output will be.
  __device__ __forceinline__ void store_beside(uint32_t from, int64_t beside) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (4 * i < left) store_global(to + beside + 4 * i * step, load_shared(from + 4 * i * kOutPitch));
  }
};

// A warp group's output of one chunk: transposed into `out`, then store(from) of rows of 128 bytes to memory. `out` alternates between two
// buffers, so that one barrier separates this chunk's writes from its reads and from the writes two chunks on.
template <typename Store>
__device__ __forceinline__ void write_rows(const uint32_t (&o)[16], uint32_t out, int warp, int lane, Store store) {
  const int quarter = warp % 4;  // of the group: 16 value channels, then 16 tokens
#pragma unroll
  for (int n = 0; n < 4; ++n) {  // 16 tokens each: matrices (values 0-7, 8-15) x (tokens 0-7, 8-15)
    const uint32_t r[4] = {o[4 * n], o[4 * n + 1], o[4 * n + 2], o[4 * n + 3]};
    store_matrices_transposed(out + (16 * n + (lane & 7) + ((lane >> 4) << 3)) * kOutPitch + quarter * 32 + ((lane >> 3) & 1) * 16, r);
  }
  named_barrier(warp / 4 + 1, 128);
  store(out + (quarter * 16 + lane / 8) * kOutPitch + lane % 8 * 16);
}
__device__ __forceinline__ void write_output(Outputs& outputs, const uint32_t (&o)[16], uint32_t out, int warp, int lane) {
  write_rows(o, out, warp, lane, [&](uint32_t from) { outputs.store(from); });
}

template <int HEAD, int GROUPS, int BLOCKS, Keep KEEP>
__device__ void walk(const HopperForward& p, [[maybe_unused]] const Kept& kept, const Task& task, const uint8_t* shared, uint32_t smem) {
  constexpr bool RECORD = keeps_records(KEEP), PLAIN = KEEP == Keep::plain_record;
  using L = Layout<HEAD, GROUPS, BLOCKS>;
  using R = Record<HEAD>;
  constexpr int kSteps = HEAD / 16;  // of a product over keys
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // warp / 4 is the group
  const int value = warp * 16;                                                      // within the block
  float S[HEAD / 2], r[32], o[32] = {};
#pragma unroll
  for (int i = 0; i < HEAD / 2; ++i) {
    const int v = task.channel + value + lane / 4 + 8 * (i / 2 % 2), k = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
    S[i] = p.initial_state && task.part == 0 ? p.initial_state[state_offset<HEAD>(p, task, v, k)] : 0.0f;
  }
  if constexpr (HEAD == 128 && GROUPS == 1)
    if (task.part > 0 && task.silent == 0 && task.chunks > 0) follow_links<GROUPS, RECORD>(p, task, S, smem);
  uint32_t pending[16];  // the previous chunk's output
  const auto round_output = [&] {
#pragma unroll
    for (int j = 0; j < 16; ++j) pending[j] = pack_bf16(o[2 * j], o[2 * j + 1]);
  };
  Outputs outputs(p, task, task.silent, warp, lane);
  const uint32_t out = smem + L::out + warp / 4 * 2 * kOutBytes;
  const uint32_t values = L::values + ((lane & 7) + ((lane >> 4) << 3)) * L::values_pitch + value * 2 + ((lane >> 3) & 1) * 16;
  constexpr int kAtOnce = GROUPS == 1 ? kSteps / 2 : kSteps;  // k-steps of the state that are rounded before their products
  int stage = task.links % L::stages, before = 0;
  uint32_t phase = task.links / L::stages & 1;
  if (task.chunks > 0) barrier_wait(smem + L::barriers + stage * 8, phase);
  if constexpr (HEAD == 64 || RECORD)
    if (task.chunks < 0) {  // Never: but with products before the loop, ptxas lets S and o be read while others are in flight (C7517).
      const uint32_t none[4] = {};
      wgmma_begin();
      wgmma<1>(S, none, descriptor(descriptor_base(smem), 0, 8192), 1);
      wgmma<1>(o, none, descriptor(descriptor_base(smem), 0, 8192), 1);
      wgmma_commit();
      wgmma_wait<0>();
      touch(S), touch(o);
    }
  for (int i = 0; i < task.chunks; ++i) {
    const uint32_t at = smem + stage * L::stage, base = descriptor_base(at);
    uint32_t left[kSteps][4];
    const auto decay_state = [&] {
      const auto* decay = reinterpret_cast<const float*>(shared + stage * L::stage + R::decay) + 2 * (lane % 4);
#pragma unroll
      for (int n = 0; n < HEAD / 8; ++n) {
        const float2 d = *reinterpret_cast<const float2*>(decay + 8 * n);
        S[4 * n] *= d.x, S[4 * n + 1] *= d.y, S[4 * n + 2] *= d.x, S[4 * n + 3] *= d.y;
      }
    };
    touch(r);
#pragma unroll
    for (int first = 0; first < kSteps; first += kAtOnce) {
#pragma unroll
      for (int s = first; s < first + kAtOnce; ++s)
#pragma unroll
        for (int j = 0; j < 4; ++j) left[s][j] = pack_bf16(S[8 * s + 2 * j], S[8 * s + 2 * j + 1]);
      wgmma_begin();
#pragma unroll
      for (int s = first; s < first + kAtOnce; ++s) wgmma<0>(r, left[s], descriptor(base, R::k_in + s / 4 * 8192 + s % 4 * 32), s > 0);
    }
    wgmma_commit();
    if (GROUPS == 2) decay_state();
    if constexpr (KEEP == Keep::checkpoints) {
      const uint32_t slot = static_cast<uint32_t>((task.record - task.head) / p.HV) + i;
      if (i >= task.silent && slot % kept.every == 0) {
        if (HEAD == 64 && kept.states_float32)
          keep_exact_state(kept, slot, p.HV, task.head, task.channel + value, S, lane);
        else
          keep_state(kept, slot, p.HV, task.head, task.channel + value, left, lane);
      }
    }
    if (GROUPS == 1) {  // every thread arrives for what it read itself
      if (i > 0) barrier_arrive(smem + L::barriers + (L::stages + before) * 8);
      round_output();
    }
    touch(o);
    wgmma_begin();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) wgmma<0>(o, left[s], descriptor(base, R::q_decayed + s / 4 * 8192 + s % 4 * 32), s > 0);
    wgmma_commit();
    if (GROUPS == 1) decay_state();
    uint32_t v[4][4];  // [16 tokens each]: (values, tokens) as in `write_output`
    const auto load_values = [&] {
#pragma unroll
      for (int n = 0; n < 4; ++n) load_matrices_transposed(v[n], at + values + 16 * n * L::values_pitch);
    };
    constexpr bool kLate = BLOCKS == 2 || (RECORD && GROUPS == 2);  // for want of registers
    if (!kLate) load_values();
    if (i > task.silent) write_output(outputs, pending, out + (RECORD ? 0 : i % 2 * kOutBytes), warp, lane);
    if (kLate) load_values();
    wgmma_wait<1>();
    touch(r);
    uint32_t error[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        error[n][j] = pack_bf16(low(v[n][j]) - r[8 * n + 2 * j], high(v[n][j]) - r[8 * n + 2 * j + 1]);
    [[maybe_unused]] uint32_t written[4][4];  // error times beta, where the record has none
    if constexpr (PLAIN) {
      const auto* betas = reinterpret_cast<const float*>(shared + stage * L::stage + R::stage_bytes) + 2 * (lane % 4);
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 b = *reinterpret_cast<const float2*>(betas + 16 * n + j / 2 * 8);
          written[n][j] = pack_bf16((low(v[n][j]) - r[8 * n + 2 * j]) * b.x, (high(v[n][j]) - r[8 * n + 2 * j + 1]) * b.y);
        }
    }
    const auto& wrote = PLAIN ? written : error;
    touch(S);
    wgmma_begin();
#pragma unroll
    for (int s = 0; s < 4; ++s) wgmma<1>(S, wrote[s], descriptor(base, R::k_solved + s * 2048, 8192), 1);
    wgmma_commit();
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const auto squares = RECORD ? descriptor_of_squares(base, R::a_solved + s * R::square, 4 * R::square)
                                  : descriptor_of_squares(base, R::a_solved + s * 4 * R::square);
      wgmma<1>(o, wrote[s], squares, 1);
    }
    wgmma_commit();
    if constexpr (RECORD)
      if (i >= task.silent) {  // r: outputs have the first buffer then, this the second, and either's barrier frees the other
        write_rows(reinterpret_cast<const uint32_t(&)[16]>(error), out + kOutBytes, warp, lane, [&](uint32_t from) {
          outputs.store_beside(from, static_cast<uint8_t*>(kept.r) - static_cast<uint8_t*>(p.o));
        });
        keep_every_state(kept, task.record + i * p.HV, task.channel + value, left, lane);
      }
    before = stage;
    if (++stage == L::stages) stage = 0, phase ^= 1;
    if (i + 1 < task.chunks) barrier_wait(smem + L::barriers + stage * 8, phase);
    wgmma_wait<0>();
    touch(S), touch(o);
    if (GROUPS == 2) barrier_arrive(smem + L::barriers + (L::stages + before) * 8), round_output();
  }
  if (GROUPS == 1) round_output();
  if (task.chunks > 0) write_output(outputs, pending, out + (RECORD ? 0 : task.chunks % 2 * kOutBytes), warp, lane);
  if (p.final_state && task.last) {
    int mine = lane;
    if constexpr (HEAD == 64) KDA_HIDE_WORD(mine);  // or the compiler prepares the addresses before the loop
#pragma unroll
    for (int i = 0; i < HEAD / 2; ++i) {
      const int v = task.channel + value + mine / 4 + 8 * (i / 2 % 2), k = 8 * (i / 4) + 2 * (mine % 4) + i % 2;
      p.final_state[state_offset<HEAD>(p, task, v, k)] = S[i];
    }
  }
}

}  // namespace kda::hopper
