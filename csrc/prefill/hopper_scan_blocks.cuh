// The walk of a warp group along the blocks of a sequence (hopper_block_record.h), see hopper_scan_blocks.cu.
//
// Tensor cores take products in order: [k_in; q_decayed] S, k_solved^T r, A_solved r. During the first the state decays and the output of
// the block before is rounded. Outputs leave by 64 tokens.
#pragma once
#include "hopper_block_record.h"
#include "hopper_scan_walk.cuh"

namespace kda::hopper {

// A stage holds a block where two groups share it: memory is what they wait for. A group alone waits for its own products: four blocks.
template <int GROUPS>
struct BlocksLayout {
  static constexpr int per_stage = GROUPS == 2 ? 1 : 4, tokens = 16 * per_stage;
  static constexpr int values = per_stage * BlockRecord::bytes, values_pitch = GROUPS * kSlice * 2 + 16;
  static constexpr int stage = (values + tokens * values_pitch + 1023) / 1024 * 1024;
  static constexpr int stages = (232448 - GROUPS * 2 * kOutBytes - 256) / stage;
  static constexpr int fetchers = GROUPS == 2 ? 128 : 32;
  static constexpr int out = stages * stage, barriers = out + GROUPS * 2 * kOutBytes;
  static constexpr int bytes = barriers + 2 * stages * 8, threads = GROUPS * 128 + fetchers;
};
static_assert(BlocksLayout<1>::stages == 3 && BlocksLayout<2>::stages == 10, "");

// The fetching threads: the first asks for records, all for values, with zeros past the sequence's end.
template <int GROUPS>
__device__ void fetch_blocks(const HopperForward& p, const Task& task, uint32_t smem, int thread) {
  using L = BlocksLayout<GROUPS>;
  using R = BlockRecord;
  constexpr int kRowUnits = GROUPS * kSlice / 8, kStep = L::fetchers / kRowUnits;  // units of 16 bytes; rows per round
  constexpr int kPerChunk = 4 / L::per_stage;                                      // stages
  const int unit = thread % kRowUnits, row = thread / kRowUnits;
  const int64_t token_bytes = p.v_strides.token * 2;
  const auto* values = static_cast<const uint8_t*>(p.v) +
                       2 * (task.span.batch * p.v_strides.batch + task.head * p.v_strides.head + task.span.first * p.v_strides.token +
                            task.channel + unit * 8);
  const uint8_t* record = static_cast<const uint8_t*>(p.workspace) + task.record * R::chunk_bytes;
  const uint8_t* from = values + row * token_bytes;
  int left = static_cast<int>(min(task.span.length, static_cast<int64_t>(1) << 30)) - row;  // rows from this thread's first on
  int stage = 0;
  uint32_t phase = 1;
  for (int i = 0; i < kPerChunk * task.chunks; ++i, left -= L::tokens) {
    const uint32_t at = smem + stage * L::stage, full = smem + L::barriers + stage * 8;
    if (i >= L::stages) barrier_wait(full + L::stages * 8, phase);
    if (thread == 0) {
      if (i == 0) wait_for_previous_kernel();
      barrier_arrive_expect(full, L::per_stage * R::bytes);
#pragma unroll
      for (int b = 0; b < L::per_stage; ++b) bulk_load(at + b * R::bytes, record + b * R::bytes, R::bytes, full);
    }
    record += L::per_stage * R::bytes;
    if (i % kPerChunk == kPerChunk - 1) record += (p.HV - 1) * R::chunk_bytes;
    const uint32_t to = at + L::values + row * L::values_pitch + unit * 16;
#pragma unroll
    for (int t = 0; t < L::tokens; t += kStep, from += kStep * token_bytes)
      copy_async(to + t * L::values_pitch, t < left ? from : values, t < left ? 16 : 0);
    copy_async_arrive(full);
    if (++stage == L::stages) stage = 0, phase ^= 1;
  }
}

template <int GROUPS>
__device__ void walk_blocks(const HopperForward& p, const Task& task, const uint8_t* shared, uint32_t smem) {
  using L = BlocksLayout<GROUPS>;
  using R = BlockRecord;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // warp / 4 is the group
  const int value = warp * 16;                                                      // within the thread block
  float S[64], both[2][16];  // k_in S, and q_decayed S, which becomes the output; of a block and of the one before
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int v = task.channel + value + lane / 4 + 8 * (i / 2 % 2), k = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
    S[i] = p.initial_state ? p.initial_state[state_offset<128>(p, task, v, k)] : 0.0f;
  }
  uint32_t pending[16];  // outputs of four blocks
  const auto round_output = [&](int b) {
#pragma unroll
    for (int j = 0; j < 4; ++j) pending[4 * b + j] = pack_bf16(both[b % 2][8 + 2 * j], both[b % 2][9 + 2 * j]);
  };
  Outputs outputs(p, task, 0, warp, lane);
  const uint32_t out = smem + L::out + warp / 4 * 2 * kOutBytes;
  const uint32_t values = L::values + ((lane & 7) + ((lane >> 4) << 3)) * L::values_pitch + value * 2 + ((lane >> 3) & 1) * 16;
  int stage = 0;
  uint32_t phase = 0, read = 0;  // barrier of the stage whose products are under way
  if (task.chunks > 0) barrier_wait(smem + L::barriers, 0);
  if (task.chunks < 0) {  // never, see hopper_scan_walk.cuh
    const uint32_t none[4] = {};
    wgmma_begin();
    wgmma<1>(S, none, descriptor(descriptor_base(smem), 0, R::solved_half), 1);
    wgmma_commit();
    wgmma_wait<0>();
    touch(S);
  }
  for (int i = 0; i < task.chunks; ++i) {
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int in_stage = b % L::per_stage;
      const bool first_of_stage = in_stage == 0, last_of_stage = in_stage == L::per_stage - 1;
      const uint32_t at = smem + stage * L::stage, base = descriptor_base(at) + (in_stage * R::bytes >> 4);
      float(&now)[16] = both[b % 2], (&last)[16] = both[1 - b % 2];
      touch(now);
#pragma unroll
      for (int first = 0; first < 8; first += 4) {
        uint32_t left[4][4];
#pragma unroll
        for (int s = 0; s < 4; ++s)
#pragma unroll
          for (int j = 0; j < 4; ++j) left[s][j] = pack_bf16(S[8 * (first + s) + 2 * j], S[8 * (first + s) + 2 * j + 1]);
        wgmma_begin();
#pragma unroll
        for (int s = 0; s < 4; ++s) wgmma<0>(now, left[s], descriptor(base, R::k_in + first / 4 * R::half + s * 32), first + s > 0);
      }
      wgmma_commit();
      const auto* decay = reinterpret_cast<const float*>(shared + stage * L::stage + in_stage * R::bytes + R::decay) + 2 * (lane % 4);
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        const float2 d = *reinterpret_cast<const float2*>(decay + 8 * n);
        S[4 * n] *= d.x, S[4 * n + 1] *= d.y, S[4 * n + 2] *= d.x, S[4 * n + 3] *= d.y;
      }
      uint32_t v[4], error[4];
      load_matrices_transposed(v, at + values + 16 * in_stage * L::values_pitch);
      if (b > 0) {
        wgmma_wait<1>();  // the output of the block before
        touch(last);
        round_output(b - 1);
      }
      if (first_of_stage && (b > 0 || i > 0)) barrier_arrive(read);  // every thread for what it read itself
      if (last_of_stage) read = smem + L::barriers + (L::stages + stage) * 8;
      if (b == 0 && i > 0) write_output(outputs, pending, out + i % 2 * kOutBytes, warp, lane);
      wgmma_wait<0>();
      touch(now);
#pragma unroll
      for (int j = 0; j < 4; ++j) error[j] = pack_bf16(low(v[j]) - now[2 * j], high(v[j]) - now[2 * j + 1]);
      touch(S);
      wgmma_begin();
      wgmma<1>(S, error, descriptor(base, R::k_solved, R::solved_half), 1);
      wgmma_commit();
      // A square lies before that of A_solved^T, whichever: nobody reads the first half any more.
      wgmma<1>(now, error, descriptor_of_squares(base, R::a_solved - 512), 1);
      wgmma_commit();
      if (last_of_stage) {
        if (++stage == L::stages) stage = 0, phase ^= 1;
        if (b < 3 || i + 1 < task.chunks) barrier_wait(smem + L::barriers + stage * 8, phase);
      }
      if (b < 3) {
        wgmma_wait<1>();
        touch(S);
      } else {  // none in flight where the loop begins again, or ptxas waits more often (C7517)
        wgmma_wait<0>();
        touch(S), touch(now);
        round_output(3);
      }
    }
  }
  if (task.chunks > 0) write_output(outputs, pending, out + task.chunks % 2 * kOutBytes, warp, lane);
  if (p.final_state && task.last) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const int v = task.channel + value + lane / 4 + 8 * (i / 2 % 2), k = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
      p.final_state[state_offset<128>(p, task, v, k)] = S[i];
    }
  }
}

}  // namespace kda::hopper
