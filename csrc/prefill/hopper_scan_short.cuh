// The walk of a warp group along short chunks (hopper_short_record.h), see hopper_scan_short.cu. A stage of shared memory holds two.
//
// Tensor cores take products in order: [k_in; q_decayed] S, k_solved^T r, A_solved r. During the first the state decays and the output of
// the short chunk before is rounded.
#pragma once
#include "hopper_scan_walk.cuh"
#include "hopper_short_record.h"

namespace kda::hopper {

template <int GROUPS>
struct ShortLayout {
  static constexpr int values = kChunk / kShort * ShortRecord::stage_bytes, values_pitch = GROUPS * kSlice * 2 + 16;
  static constexpr int stage = values + kChunk * values_pitch, stages = GROUPS == 2 ? 2 : 3;
  static constexpr int fetchers = GROUPS == 2 ? 128 : 32;
  static constexpr int out = stages * stage, barriers = out + GROUPS * 2 * kOutBytes;
  static constexpr int bytes = barriers + 2 * stages * 8, threads = GROUPS * 128 + fetchers;
};
static_assert(ShortLayout<1>::stage % 1024 == 0 && ShortLayout<2>::stage % 1024 == 0, "");
static_assert(ShortLayout<1>::bytes <= 232448 && ShortLayout<2>::bytes <= 232448, "");

// The fetching threads: the first asks for records, all for values, with zeros past the sequence's end.
template <int GROUPS>
__device__ void fetch_short(const HopperForward& p, const Task& task, uint32_t smem, int thread) {
  using L = ShortLayout<GROUPS>;
  using R = ShortRecord;
  constexpr int kRowUnits = GROUPS * kSlice / 8, kStep = L::fetchers / kRowUnits;  // units of 16 bytes; rows per round
  const int unit = thread % kRowUnits, row = thread / kRowUnits;
  const int64_t token_bytes = p.v_strides.token * 2;
  const auto* values = static_cast<const uint8_t*>(p.v) +
                       2 * (task.span.batch * p.v_strides.batch + task.head * p.v_strides.head + task.span.first * p.v_strides.token +
                            task.channel + unit * 8);
  const uint8_t* record = static_cast<const uint8_t*>(p.workspace) + task.record * R::chunk_bytes;
  const uint8_t* from = values + row * token_bytes;
  int left = static_cast<int>(min(task.span.length, static_cast<int64_t>(1) << 30)) - row;  // rows from this thread's first on
  for (int i = 0; i < task.chunks; ++i, record += p.HV * R::chunk_bytes, left -= kChunk) {
    const int stage = i % L::stages;
    const uint32_t at = smem + stage * L::stage, full = smem + L::barriers + stage * 8;
    if (i >= L::stages) barrier_wait(full + L::stages * 8, (i / L::stages - 1) & 1);
    if (thread == 0) {
      if (i == 0) wait_for_previous_kernel();
      barrier_arrive_expect(full, R::chunk_bytes);
#pragma unroll
      for (int u = 0; u < kChunk / kShort; ++u) {  // past the zeros of A_solved^T; the decay follows its last square
        bulk_load(at + u * R::stage_bytes, record + u * R::bytes, R::last_square, full);
        bulk_load(at + u * R::stage_bytes + R::stage_last_square, record + u * R::bytes + R::last_square, R::bytes - R::last_square, full);
      }
    }
    const uint32_t to = at + L::values + row * L::values_pitch + unit * 16;
#pragma unroll
    for (int t = 0; t < kChunk; t += kStep, from += kStep * token_bytes)
      copy_async(to + t * L::values_pitch, t < left ? from : values, t < left ? 16 : 0);
    copy_async_arrive(full);
  }
}

template <int GROUPS>
__device__ void walk_short(const HopperForward& p, const Task& task, const uint8_t* shared, uint32_t smem) {
  using L = ShortLayout<GROUPS>;
  using R = ShortRecord;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // warp / 4 is the group
  const int value = warp * 16;                                                      // within the block
  float S[64], both[2][32];  // k_in S and q_decayed S, which becomes the output; of a short chunk and of the one before
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int v = task.channel + value + lane / 4 + 8 * (i / 2 % 2), k = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
    S[i] = p.initial_state ? p.initial_state[state_offset<128>(p, task, v, k)] : 0.0f;
  }
  uint32_t pending[16];  // outputs of two
  const auto round_output = [&](int u) {
#pragma unroll
    for (int j = 0; j < 8; ++j) pending[8 * u + j] = pack_bf16(both[u][16 + 2 * j], both[u][17 + 2 * j]);
  };
  Outputs outputs(p, task, 0, warp, lane);
  const uint32_t out = smem + L::out + warp / 4 * 2 * kOutBytes;
  const uint32_t values = L::values + ((lane & 7) + ((lane >> 4) << 3)) * L::values_pitch + value * 2 + ((lane >> 3) & 1) * 16;
  int stage = 0, before = 0;
  uint32_t phase = 0;
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
    const uint32_t at = smem + stage * L::stage;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const uint32_t base = descriptor_base(at) + (u * R::stage_bytes >> 4);
      touch(both[u]);
#pragma unroll
      for (int first = 0; first < 8; first += 4) {
        uint32_t left[4][4];
#pragma unroll
        for (int s = 0; s < 4; ++s)
#pragma unroll
          for (int j = 0; j < 4; ++j) left[s][j] = pack_bf16(S[8 * (first + s) + 2 * j], S[8 * (first + s) + 2 * j + 1]);
        wgmma_begin();
#pragma unroll
        for (int s = 0; s < 4; ++s) wgmma<0>(both[u], left[s], descriptor(base, R::k_in + first / 4 * R::half + s * 32), first + s > 0);
      }
      wgmma_commit();
      const auto* decay = reinterpret_cast<const float*>(shared + stage * L::stage + u * R::stage_bytes + R::decay) + 2 * (lane % 4);
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        const float2 d = *reinterpret_cast<const float2*>(decay + 8 * n);
        S[4 * n] *= d.x, S[4 * n + 1] *= d.y, S[4 * n + 2] *= d.x, S[4 * n + 3] *= d.y;
      }
      uint32_t v[2][4], error[2][4];
#pragma unroll
      for (int n = 0; n < 2; ++n) load_matrices_transposed(v[n], at + values + (32 * u + 16 * n) * L::values_pitch);
      if (u == 1) {
        wgmma_wait<1>();
        touch(both[0]);
        round_output(0);
      } else if (i > 0) {
        round_output(1);
        barrier_arrive(smem + L::barriers + (L::stages + before) * 8);
        write_output(outputs, pending, out + i % 2 * kOutBytes, warp, lane);
      }
      wgmma_wait<0>();
      touch(both[u]);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          error[n][j] = pack_bf16(low(v[n][j]) - both[u][8 * n + 2 * j], high(v[n][j]) - both[u][8 * n + 2 * j + 1]);
      touch(S);
      wgmma_begin();
#pragma unroll
      for (int s = 0; s < 2; ++s) wgmma<1>(S, error[s], descriptor(base, R::k_solved + s * 2048, R::solved_half), 1);
      wgmma_commit();
#pragma unroll
      for (int s = 0; s < 2; ++s)  // two squares lie before those of A_solved^T, whichever: nobody reads the first half any more
        wgmma<1>(both[u], error[s], descriptor_of_squares(base, R::a_solved + (s - 1) * 2 * R::square), 1);
      wgmma_commit();
      if (u == 0) {
        wgmma_wait<1>();
        touch(S);
      } else {  // none in flight where the loop begins again, or ptxas waits more often (C7517)
        before = stage;
        if (++stage == L::stages) stage = 0, phase ^= 1;
        if (i + 1 < task.chunks) barrier_wait(smem + L::barriers + stage * 8, phase);
        wgmma_wait<0>();
        touch(S), touch(both[1]);
      }
    }
  }
  if (task.chunks > 0) {
    round_output(1);
    write_output(outputs, pending, out + task.chunks % 2 * kOutBytes, warp, lane);
  }
  if (p.final_state && task.last) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const int v = task.channel + value + lane / 4 + 8 * (i / 2 % 2), k = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
      p.final_state[state_offset<128>(p, task, v, k)] = S[i];
    }
  }
}

}  // namespace kda::hopper
