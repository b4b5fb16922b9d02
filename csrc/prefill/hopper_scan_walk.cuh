// The walk of a warp group along a sequence's chunks.
#pragma once
#include "hopper_kept.cuh"
#include "hopper_scan_block.cuh"
#include "hopper_wgmma.cuh"

namespace kda::hopper {

// S^T of the part: the state after an earlier one, then S <- M S + b. Both factors are two bfloat16 numbers each, and their three largest
// products are added: an error of 2^-16.
template <int GROUPS, bool PAIRED>
__device__ __forceinline__ void follow_links(const HopperForward& p, const Task& task, float (&S)[64], uint32_t smem) {
  using L = Layout<GROUPS>;
  static_assert(GROUPS == 1 && L::stage >= kLinkBytes, "a stage holds M");
  const int thread = threadIdx.x % 128, slice = task.channel / kSlice;
  const auto load = [&](int part) {
    const float* b = links_of(p).b(task.state, part, slice) + thread;
#pragma unroll
    for (int i = 0; i < 64; ++i) S[i] = b[i * 128];
  };
  load(task.part - 1 - task.links);
  for (int i = 0; i < task.links; ++i) {
    const int stage = i % L::stages;
    const uint32_t at = smem + stage * L::stage, full = smem + L::barriers + stage * 8;
    uint32_t big[8][4], small[8][4];
#pragma unroll
    for (int s = 0; s < 8; ++s)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float x = S[8 * s + 2 * j], y = S[8 * s + 2 * j + 1];
        big[s][j] = pack_bf16(x, y), small[s][j] = pack_bf16(x - low(big[s][j]), y - high(big[s][j]));
      }
    load(task.part - task.links + i);
    barrier_wait(full, (i / L::stages) & 1);
    touch(S);
    wgmma_begin();
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      const uint32_t tile = at + (s / 4) * 16384 + (s % 4) * 32;
      wgmma<0>(S, big[s], descriptor(tile), 1);
      wgmma<0>(S, big[s], descriptor(tile + 32768), 1);
      wgmma<0>(S, small[s], descriptor(tile), 1);
    }
    wgmma_commit();
    wgmma_wait<0>();
    touch(S);
    named_barrier(1, 128);  // M is read: the stage is one of records again
    clear_squares<128>(at, thread);
    fence_async();
    hand_back<PAIRED>(full + L::stages * 8);
  }
}

// A warp group's output of one chunk: transposed into `out`, then rows of 128 bytes to memory. `out` alternates between two buffers, so
// that one barrier separates this chunk's writes from its reads and from the writes two chunks on.
__device__ __forceinline__ void write_output(const HopperForward& p, const Task& task, int chunk, const uint32_t (&o)[16], uint32_t out,
                                             int warp, int lane) {
  const int quarter = warp % 4;  // of the group: 16 value channels, then 16 tokens
#pragma unroll
  for (int n = 0; n < 4; ++n) {  // 16 tokens each: matrices (values 0-7, 8-15) x (tokens 0-7, 8-15)
    const uint32_t r[4] = {o[4 * n], o[4 * n + 1], o[4 * n + 2], o[4 * n + 3]};
    store_matrices_transposed(out + (16 * n + (lane & 7) + ((lane >> 4) << 3)) * kOutPitch + quarter * 32 + ((lane >> 3) & 1) * 16, r);
  }
  asm volatile("bar.sync %0, 128;" ::"r"(warp / 4 + 1) : "memory");
  const int first = quarter * 16 + lane / 8, left = static_cast<int>(task.span.length - static_cast<int64_t>(chunk) * kChunk);
  auto* to = static_cast<__nv_bfloat16*>(p.o) + task.span.batch * p.o_strides.batch + task.head * p.o_strides.head +
             (task.span.first + static_cast<int64_t>(chunk) * kChunk + first) * p.o_strides.token + task.channel + warp / 4 * kSlice +
                 lane % 8 * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i, to += 4 * p.o_strides.token)
    if (first + 4 * i < left) *reinterpret_cast<uint4*>(to) = load_shared(out + (first + 4 * i) * kOutPitch + lane % 8 * 16);
}

template <int GROUPS, bool KEPT>
__device__ void scan(const HopperForward& p, [[maybe_unused]] const Kept& kept, const Task& task, const uint8_t* shared, uint32_t smem) {
  using L = Layout<GROUPS>;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // warp / 4 is the group
  const int value = warp * 16;                                 // within the block
  float S[64], r[32], o[32];
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int v = task.channel + value + lane / 4 + 8 * (i / 2 % 2), k = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
    S[i] = p.initial_state && task.part == 0 ? p.initial_state[state_offset(p, task, v, k)] : 0.0f;
  }
  if constexpr (GROUPS == 1)
    if (task.part > 0 && task.silent == 0 && task.chunks > 0) follow_links<GROUPS, false>(p, task, S, smem);
  uint32_t pending[16];  // the previous chunk's output
  const uint32_t out = smem + L::out + warp / 4 * 2 * kOutBytes;
  for (int i = 0; i < task.chunks; ++i) {
    const int item = task.links + i, stage = item % L::stages;
    const uint32_t at = smem + stage * L::stage, full = smem + L::barriers + stage * 8;
    uint32_t left[8][4];
#pragma unroll
    for (int s = 0; s < 8; ++s)
#pragma unroll
      for (int j = 0; j < 4; ++j) left[s][j] = pack_bf16(S[8 * s + 2 * j], S[8 * s + 2 * j + 1]);
    if constexpr (KEPT) {
      const uint32_t slot = static_cast<uint32_t>((task.record - task.head) / p.HV) + i;
      if (i >= task.silent && slot % kept.every == 0) keep_state(kept, slot, p.HV, task.head, task.channel + value, left, lane);
    }
    barrier_wait(full, (item / L::stages) & 1);
    const auto* decay = reinterpret_cast<const float*>(shared + stage * L::stage + kDecay) + 2 * (lane % 4);
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      const float2 d = *reinterpret_cast<const float2*>(decay + 8 * n);
      S[4 * n] *= d.x, S[4 * n + 1] *= d.y, S[4 * n + 2] *= d.x, S[4 * n + 3] *= d.y;
    }
    touch(r), touch(o), touch(S);
    wgmma_begin();
#pragma unroll
    for (int s = 0; s < 8; ++s) wgmma<0>(r, left[s], descriptor(at + kKIn + (s / 4) * 8192 + (s % 4) * 32), s > 0);
    wgmma_commit();
#pragma unroll
    for (int s = 0; s < 8; ++s) wgmma<0>(o, left[s], descriptor(at + kQDecayed + (s / 4) * 8192 + (s % 4) * 32), s > 0);
    wgmma_commit();
    const auto write_pending = [&] {
      if (i > task.silent) write_output(p, task, i - 1, pending, out + i % 2 * kOutBytes, warp, lane);
    };
    if (GROUPS == 2) write_pending();
    uint32_t v[4][4];  // [16 tokens each]: (values, tokens) as in `write_output`
#pragma unroll
    for (int n = 0; n < 4; ++n)
      load_matrices_transposed(v[n], at + kRecordSpace + (16 * n + (lane & 7) + ((lane >> 4) << 3)) * L::values_pitch + value * 2 +
                                         ((lane >> 3) & 1) * 16);
    if (GROUPS == 1) write_pending();  // measured: values first pays where a block has no second group to fill the gaps
    wgmma_wait<1>();
    touch(r);
    uint32_t error[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        error[n][j] = pack_bf16(low(v[n][j]) - r[8 * n + 2 * j], high(v[n][j]) - r[8 * n + 2 * j + 1]);
    touch(S);
    wgmma_begin();
#pragma unroll
    for (int s = 0; s < 4; ++s) wgmma<1>(S, error[s], descriptor(at + kKSolved + s * 2048, 8192), 1);
    wgmma_commit();
#pragma unroll
    for (int s = 0; s < 4; ++s) wgmma<1>(o, error[s], descriptor_of_squares(at + kASolved + s * 4 * kSquare), 1);
    wgmma_commit();
    wgmma_wait<0>();
    touch(S), touch(o);
    barrier_arrive(full + L::stages * 8);  // every thread for what it read itself
#pragma unroll
    for (int j = 0; j < 16; ++j) pending[j] = pack_bf16(o[2 * j], o[2 * j + 1]);
  }
  if (task.chunks > 0) write_output(p, task, task.chunks - 1, pending, out + task.chunks % 2 * kOutBytes, warp, lane);
  if (p.final_state && task.last) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const int v = task.channel + value + lane / 4 + 8 * (i / 2 % 2), k = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
      p.final_state[state_offset(p, task, v, k)] = S[i];
    }
  }
}

}  // namespace kda::hopper
