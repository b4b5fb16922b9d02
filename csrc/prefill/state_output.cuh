// The warps of `state` that form the outputs, 16 tokens each, beside those that keep the state: o = q_decayed S + A_qk v_new, the first
// product while v_new is made, the second while the state is updated.
#pragma once

#include "state_block.cuh"

namespace kda {

template <typename S>
struct OutputWarp {
  static constexpr int N = S::N, ROWS = S::ROWS, STEPS = S::STEPS, INSIDE = 2 * STEPS;
  using Small = typename S::R::Small;

  const Params &p;
  const Place<S> &here;
  typename S::Shared &sh;
  Lane<S> &x;
  float *o;

  __device__ __forceinline__ void fetch_inside(int slot, int64_t chunk) const {
    const uint4 *from = x.tiles_from + here.piece_of(chunk);
#pragma unroll
    for (int j = 0; j < ROWS; ++j)
      if (j <= x.row) x.ring.template fetch<2>(slot, INSIDE + 2 * j, from + j * 64);
  }
  __device__ __forceinline__ void fetch_rows(int slot, int small_slot, int64_t chunk) const {  // and the small parts, for all warps
    constexpr int PIECES = sizeof(Small) / 16;
    static_assert(PIECES <= S::HALF, "a piece each");
    const int64_t at = here.piece_of(chunk);
    x.ring.template fetch<2 * STEPS>(slot, 0, x.rows_from + at);
    if (x.row * 32 + x.lane < PIECES)
      copy_async(reinterpret_cast<uint4 *>(&sh.small[small_slot]) + x.row * 32 + x.lane, x.more_from + at);
    copies_commit();
  }
  __device__ __forceinline__ void read_rows(int slot) {
#pragma unroll
    for (int j = 0; j < STEPS; ++j) x.rows[j] = x.ring.read_tile(slot, 2 * j);
  }
  __device__ __forceinline__ void read_inside(int slot) {
#pragma unroll
    for (int j = 0; j < ROWS; ++j)
      if (j <= x.row) x.tiles[j] = x.ring.read_tile(slot, INSIDE + 2 * j);
  }

  // q_decayed S; meanwhile this chunk's tiles of A_qk are read.
  __device__ __forceinline__ void begin(int slot, int64_t chunk, const Small &small) {
    const uint32_t *state_row = sh.state_rows().lane_in_order();
#pragma unroll
    for (int n = 0; n < N; ++n) x.kept[0][n][0] = x.kept[0][n][1] = x.kept[0][n][2] = x.kept[0][n][3] = 0.f;
#pragma unroll
    for (int j = 0; j < STEPS; ++j) {
      const float2 power = small.q[x.row * STEPS + j];
      const float upper = power.x * sh.state_power[j], lower = power.y * sh.state_power[j];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        uint32_t right[4];
        load_transposed(right, state_row + j * 16 * S::LD + n * 4);
        multiply_add(x.kept[0][n], x.rows[j], right, upper, lower);
      }
    }
    copies_wait<S::DEPTH - 1>();
    read_inside(slot);
    fetch_inside(slot, chunk + S::DEPTH);
  }

  // o, with A_qk v_new; then the next chunk's rows are read.
  __device__ __forceinline__ void finish(int slot, int small_slot, int64_t chunk) {
    const Small &small = sh.small[small_slot];
    const uint32_t *v_new_row = sh.v_new_rows().lane_of_tokens();
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
      if (j > x.row) continue;
      const float power = small.A[x.row * (x.row + 1) / 2 + j].x * sh.v_new_power[j];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        uint32_t right[4];
        load_transposed(right, v_new_row + j * 16 * S::LD + n * 4);
        multiply_add(x.kept[0][n], x.tiles[j], right, power, power);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (chunk * S::C + x.row * 16 + x.g + half * 8 < here.length) {
        float *to = o + half * 8 * p.o.token_stride;
#pragma unroll
        for (int n = 0; n < N; ++n)
          *reinterpret_cast<float2 *>(to + n * 8) = make_float2(x.kept[0][n][2 * half], x.kept[0][n][2 * half + 1]);
      }
    }
    o += S::C * p.o.token_stride;
    const int next = Ring<S>::after(slot);
    read_rows(next);
    fetch_rows(next, small_slot_after<S>(small_slot, 1 + S::DEPTH), chunk + 1 + S::DEPTH);
  }

  __device__ __forceinline__ void start() {
    x.ring.mine = &sh.ring[0][ROWS * S::STATE_PIECES + x.row * S::OUTPUT_PIECES][x.lane];
    x.rows_from = &here.record->q[x.row * STEPS][0][x.lane], x.tiles_from = &here.record->A[x.row * (x.row + 1) / 2][0][x.lane];
    x.more_from = reinterpret_cast<const uint4 *>(&here.record->small) + x.row * 32 + x.lane;
    o = const_cast<float *>(row_of(p.o, here.batch, here.head, here.first + x.row * 16 + x.g)) + here.v0 + 2 * x.t;
    wait_for_previous_kernel();
    if (here.chunks <= 0) return;
    for (int d = 0; d < S::DEPTH; ++d) fetch_inside(d, d), fetch_rows(d, d, d);
    copies_wait<S::DEPTH - 1>();
    read_rows(0);
    fetch_rows(0, S::DEPTH, S::DEPTH);
  }
};

}  // namespace kda
