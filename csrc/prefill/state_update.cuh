// The warps of `state` that keep it while they walk along the chunks, 16 tokens each:
//
//     v_new = u - w S,  then  S <- Diag(decay) S + k_decayed^T v_new
//
// A chunk is two phases with a barrier before each. Tiles are read from the ring in the phase before the one that needs them, after that
// phase's own loads and before its products: so nothing that matters waits behind them.
#pragma once

#include "state_block.cuh"

namespace kda {

template <typename S>
struct StateWarp {
  static constexpr int N = S::N, ROWS = S::ROWS, STEPS = S::STEPS, OWN = S::OWN, KEYS = 2 * STEPS, U = KEYS + 2 * OWN * ROWS;
  static constexpr bool ROOM = Lane<S>::ROOM;             // tiles are read a phase ahead
  static constexpr int GROUP = ROOM ? STEPS : 1;          // steps whose right factors are loaded at once
  using Small = typename S::R::Small;

  const Params &p;
  const Place<S> &here;
  typename S::Shared &sh;
  Lane<S> &x;

  __device__ __forceinline__ void fetch_rows(int slot, int64_t chunk) const {  // w and u
    const int64_t at = here.piece_of(chunk);
    x.ring.template fetch<2 * STEPS>(slot, 0, x.rows_from + at);
    x.ring.template fetch<N>(slot, U, x.more_from + at);
    copies_commit();
  }
  __device__ __forceinline__ void fetch_keys(int slot, int64_t chunk) const {
    x.ring.template fetch<2 * OWN * ROWS>(slot, KEYS, x.tiles_from + here.piece_of(chunk));
    copies_commit();
  }
  // One in two groups of copies is for rows, and DEPTH of both are on their way: all but the oldest may still be.
  __device__ __forceinline__ void read_rows(int slot) {
    copies_wait<2 * S::DEPTH - 1>();
#pragma unroll
    for (int j = 0; j < STEPS; ++j) x.rows[j] = x.ring.read_tile(slot, 2 * j);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const uint4 u = x.ring.read(slot, U + n);
      x.u[n] = make_float4(__uint_as_float(u.x), __uint_as_float(u.y), __uint_as_float(u.z), __uint_as_float(u.w));
    }
  }
  __device__ __forceinline__ void read_keys(int slot, int m) {
#pragma unroll
    for (int j = 0; j < ROWS; ++j) x.tiles[(ROOM ? m : 0) * ROWS + j] = x.ring.read_tile(slot, KEYS + 2 * (m * ROWS + j));
  }

  __device__ __forceinline__ void take_keys(int slot, int64_t chunk) {
    copies_wait<2 * S::DEPTH - 1>();
#pragma unroll
    for (int m = 0; m < OWN; ++m) read_keys(slot, m);
    fetch_keys(slot, chunk + S::DEPTH);
  }
  __device__ __forceinline__ void take_rows(int slot, int64_t chunk) {
    read_rows(slot);
    fetch_rows(slot, chunk + S::DEPTH);
  }

  __device__ __forceinline__ int64_t state_at(int m, int n, int e) const {
    return here.state_at(p, (x.row * OWN + m) * 16 + x.g + e / 2 * 8, n * 8 + 2 * x.t + e % 2);
  }
  __device__ __forceinline__ void put_state(int m) const {
    const Split<N> split(x.kept[m]);
    sh.state_rows().put((x.row * OWN + m) * 16, split);
    if (x.lane == 0) sh.state_power[x.row * OWN + m] = split.inverse;
  }
  __device__ __forceinline__ void load_state() {
#pragma unroll
    for (int m = 0; m < OWN; ++m) {
#pragma unroll
      for (int i = 0; i < 4 * N; ++i)
        x.kept[m][i / 4][i % 4] = p.initial_state != nullptr ? p.initial_state[state_at(m, i / 4, i % 4)] : 0.f;
      put_state(m);
    }
  }
  __device__ __forceinline__ void store_state() const {
    if (p.final_state == nullptr) return;
#pragma unroll
    for (int m = 0; m < OWN; ++m) {
#pragma unroll
      for (int i = 0; i < 4 * N; ++i) p.final_state[state_at(m, i / 4, i % 4)] = x.kept[m][i / 4][i % 4];
    }
  }

  // v_new = u - w S; meanwhile this chunk's keys are read.
  __device__ __forceinline__ void make_v_new(int slot, int64_t chunk, const Small &small) {
    const uint32_t *state_row = sh.state_rows().lane_in_order();
    float sum[N][4] = {};
#pragma unroll
    for (int first = 0; first < STEPS; first += GROUP) {
      uint32_t right[GROUP][N][4];
      float power[GROUP];
#pragma unroll
      for (int i = 0; i < GROUP * N; ++i) load_transposed(right[i / N][i % N], state_row + (first + i / N) * 16 * S::LD + i % N * 4);
#pragma unroll
      for (int j = 0; j < GROUP; ++j) power[j] = -small.w[x.row * STEPS + first + j].x * sh.state_power[first + j];
      if (ROOM) take_keys(slot, chunk);
#pragma unroll
      for (int i = 0; i < GROUP * N; ++i) multiply_add(sum[i % N], x.rows[first + i / N], right[i / N][i % N], power[i / N], power[i / N]);
    }
#pragma unroll
    for (int n = 0; n < N; ++n) sum[n][0] += x.u[n].x, sum[n][1] += x.u[n].y, sum[n][2] += x.u[n].z, sum[n][3] += x.u[n].w;
    const Split<N> split(sum);
    sh.v_new_rows().put(x.row * 16, split);
    if (x.lane == 0) sh.v_new_power[x.row] = split.inverse;
  }

  // S <- Diag(decay) S + k_decayed^T v_new; meanwhile the next chunk's rows are read.
  __device__ __forceinline__ void update_state(int slot, int64_t chunk, const Small &small) {
    const uint32_t *v_new_row = sh.v_new_rows().lane_of_tokens();
    uint32_t right[ROWS][N][4];
    float power[OWN][ROWS], decay[OWN][2];
#pragma unroll
    for (int i = 0; i < ROWS * N; ++i) load_transposed(right[i / N][i % N], v_new_row + i / N * 16 * S::LD + i % N * 4);
#pragma unroll
    for (int m = 0; m < OWN; ++m) {
#pragma unroll
      for (int j = 0; j < ROWS; ++j) power[m][j] = small.k[(x.row * OWN + m) * ROWS + j].x * sh.v_new_power[j];
      decay[m][0] = small.decay[(x.row * OWN + m) * 16 + x.g], decay[m][1] = small.decay[(x.row * OWN + m) * 16 + x.g + 8];
    }
    if (ROOM) take_rows(Ring<S>::after(slot), chunk + 1);
    else copies_wait<2 * S::DEPTH - 1>();
#pragma unroll
    for (int m = 0; m < OWN; ++m) {
      if (!ROOM) {
        read_keys(slot, m);
        if (m + 1 == OWN) fetch_keys(slot, chunk + S::DEPTH);
      }
      float added[N][4] = {};
#pragma unroll
      for (int i = 0; i < ROWS * N; ++i)
        multiply_add(added[i % N], x.tiles[(ROOM ? m : 0) * ROWS + i / N], right[i / N][i % N], power[m][i / N], power[m][i / N]);
#pragma unroll
      for (int i = 0; i < 4 * N; ++i) x.kept[m][i / 4][i % 4] = fmaf(decay[m][i % 4 / 2], x.kept[m][i / 4][i % 4], added[i / 4][i % 4]);
      put_state(m);
    }
    if (!ROOM) take_rows(Ring<S>::after(slot), chunk + 1);
  }

  __device__ __forceinline__ void start() {
    x.ring.mine = &sh.ring[0][x.row * S::STATE_PIECES][x.lane];
    x.rows_from = &here.record->w[x.row * STEPS][0][x.lane], x.tiles_from = &here.record->k[x.row * OWN * ROWS][0][x.lane];
    x.more_from = reinterpret_cast<const uint4 *>(&here.record->u[x.row * (S::V / 8) + here.v0 / 8][x.lane]);
    load_state();
    wait_for_previous_kernel();
    if (here.chunks <= 0) return;
    for (int d = 0; d < S::DEPTH; ++d) fetch_rows(d, d), fetch_keys(d, d);
    take_rows(0, 0);
  }
};

}  // namespace kda
