// The state before a part of a sequence, from what the parts before it left (hopper_links.cuh).
#pragma once
#include "hopper_scan_block.cuh"
#include "hopper_wgmma.cuh"

namespace kda::hopper {

// S^T of the part: the state after an earlier one, then S <- M S + b. Both factors are two bfloat16 numbers each, and their three largest
// products are added: an error of 2^-16.
template <int GROUPS, bool BY_COLUMNS>
__device__ __forceinline__ void follow_links(const HopperForward& p, const Task& task, float (&S)[64], uint32_t smem) {
  using L = Layout<128, GROUPS, 1>;
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
    const uint32_t at = smem + stage * L::stage, base = descriptor_base(at), full = smem + L::barriers + stage * 8;
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
      const int tile = s / 4 * 16384 + s % 4 * 32;
      wgmma<0>(S, big[s], descriptor(base, tile), 1);
      wgmma<0>(S, big[s], descriptor(base, tile + 32768), 1);
      wgmma<0>(S, small[s], descriptor(base, tile), 1);
    }
    wgmma_commit();
    wgmma_wait<0>();
    touch(S);
    named_barrier(1, 128);  // M is read: the stage is one of records again
    clear_squares<128, BY_COLUMNS>(at, kASolved, thread);
    fence_async();
    barrier_arrive(full + L::stages * 8);
  }
}

}  // namespace kda::hopper
