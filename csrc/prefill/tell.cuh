// The warps of `state` that tell, 16 tokens each, behind those that walk: o = q_decayed S + A_qk v_new, the first product while v_new is
// made, the second one chunk later.
#pragma once

#include "place.cuh"

namespace kda {

template <typename S>
struct Teller {
  static constexpr int N = S::N, ROWS = S::ROWS, STEPS = S::STEPS, INSIDE = 2 * STEPS;
  using Small = typename S::R::Small;
  using Shared = typename S::Shared;

  const Params &p;
  const Place<S> &here;
  Shared &sh;
  const int row, lane, g, t;
  const Ring<S> ring;
  const uint4 *q_from, *A_from, *small_from;  // this lane's pieces of the first record
  float *o;
  TileA rows[STEPS], inside[ROWS];
  float sum[N][4];

  __device__ __forceinline__ Teller(const Params &params, const Place<S> &place, Shared &shared)
      : p(params), here(place), sh(shared), row(threadIdx.x / 32 % ROWS), lane(threadIdx.x % 32), g(lane / 4), t(lane % 4),
        ring{&sh.ring[0][ROWS * S::WALK + row * S::TELL][lane]} {
    q_from = &here.record->q[row * STEPS][0][lane], A_from = &here.record->A[row * (row + 1) / 2][0][lane];
    small_from = reinterpret_cast<const uint4 *>(&here.record->small) + row * 32 + lane;
    o = const_cast<float *>(row_of(p.o, here.batch, here.head, here.first + row * 16 + g)) + here.v0 + 2 * t;
  }

  __device__ __forceinline__ void fetch_inside(int slot, int64_t chunk) const {
    const uint4 *from = A_from + here.piece_of(chunk);
#pragma unroll
    for (int j = 0; j < ROWS; ++j)
      if (j <= row) ring.template fetch<2>(slot, INSIDE + 2 * j, from + j * 64);
  }
  __device__ __forceinline__ void fetch_rows(int slot, int small_slot, int64_t chunk) const {  // and the small parts, for all warps
    constexpr int PIECES = sizeof(Small) / 16;
    static_assert(PIECES <= S::HALF, "a piece each");
    const int64_t at = here.piece_of(chunk);
    ring.template fetch<2 * STEPS>(slot, 0, q_from + at);
    if (row * 32 + lane < PIECES) copy_async(reinterpret_cast<uint4 *>(&sh.small[small_slot]) + row * 32 + lane, small_from + at);
    copies_commit();
  }
  __device__ __forceinline__ void read_rows(int slot) {
#pragma unroll
    for (int j = 0; j < STEPS; ++j) rows[j] = ring.read_tile(slot, 2 * j);
  }
  __device__ __forceinline__ void read_inside(int slot) {
#pragma unroll
    for (int j = 0; j < ROWS; ++j)
      if (j <= row) inside[j] = ring.read_tile(slot, INSIDE + 2 * j);
  }

  // sum = q_decayed S
  __device__ __forceinline__ void begin(int parity, const Small &small) {
    const uint32_t *state_row = sh.state_rows(parity).lane_in_order();
#pragma unroll
    for (int n = 0; n < N; ++n) sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0.f;
#pragma unroll
    for (int j = 0; j < STEPS; ++j) {
      const float2 power = small.q[row * STEPS + j];
      const float upper = power.x * sh.state_power[parity][j], lower = power.y * sh.state_power[parity][j];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        uint32_t right[4];
        load_transposed(right, state_row + j * 16 * S::LD + n * 4);
        multiply_add(sum[n], rows[j], right, upper, lower);
      }
    }
  }

  // o = sum + A_qk v_new
  __device__ __forceinline__ void finish(int64_t chunk, const Small &small) {
    const int parity = int(chunk % 2);
    const uint32_t *v_new_row = sh.v_new_rows(parity).lane_of_tokens();
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
      if (j > row) continue;
      const float power = small.A[row * (row + 1) / 2 + j].x * sh.v_new_power[parity][j];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        uint32_t right[4];
        load_transposed(right, v_new_row + j * 16 * S::LD + n * 4);
        multiply_add(sum[n], inside[j], right, power, power);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (chunk * S::C + row * 16 + g + half * 8 < here.length) {
        float *to = o + half * 8 * p.o.token_stride;
#pragma unroll
        for (int n = 0; n < N; ++n) *reinterpret_cast<float2 *>(to + n * 8) = make_float2(sum[n][2 * half], sum[n][2 * half + 1]);
      }
    }
    o += S::C * p.o.token_stride;
  }
};

template <typename S>
__device__ __forceinline__ void tell(const Params &p, const Place<S> &here, typename S::Shared &sh) {
  wait_for_previous_kernel();
  if (here.chunks <= 0) return;
  Teller<S> teller(p, here, sh);
  for (int d = 0; d < S::DEPTH; ++d) teller.fetch_inside(d, d), teller.fetch_rows(d, d, d);
  copies_wait<S::DEPTH - 1>();
  teller.read_rows(0);
  teller.fetch_rows(0, S::DEPTH, S::DEPTH);
  int slot = 0, small_slot = 0;
  for (int64_t chunk = 0; chunk < here.chunks; ++chunk) {
    const int next = Ring<S>::after(slot);
    sync_part<1, S::THREADS>();  // the state, this chunk's small parts and the last chunk's v_new are there
    if (chunk > 0) teller.finish(chunk - 1, sh.small[small_slot_after<S>(small_slot, S::SMALLS - 1)]);
    teller.begin(int(chunk % 2), sh.small[small_slot]);
    copies_wait<S::DEPTH - 1>();
    teller.read_inside(slot);
    teller.fetch_inside(slot, chunk + S::DEPTH);
    teller.read_rows(next);
    teller.fetch_rows(next, small_slot_after<S>(small_slot, 1 + S::DEPTH), chunk + 1 + S::DEPTH);
    slot = next, small_slot = small_slot_after<S>(small_slot);
  }
  sync_part<1, S::THREADS>();  // the last v_new is there
  teller.finish(here.chunks - 1, sh.small[small_slot_after<S>(small_slot, S::SMALLS - 1)]);
}

}  // namespace kda
