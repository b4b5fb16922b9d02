// The warps of `state` that walk along the chunks, 16 tokens each: v_new = u - w S, then S <- Diag(decay) S + k_decayed^T v_new.
//
// A chunk is two phases with a barrier before each. Tiles are read from the ring in the phase before the one that needs them, after that
// phase's own loads and before its products: so nothing that matters waits behind them.
#pragma once

#include "place.cuh"

namespace kda {

template <typename S>
struct Walker {
  static constexpr int N = S::N, ROWS = S::ROWS, STEPS = S::STEPS, OWN = S::OWN, KEYS = 2 * STEPS, U = KEYS + 2 * OWN * ROWS;
  static constexpr bool ROOM = N <= 2;                    // in the registers: tiles are read a phase ahead
  static constexpr int GROUP = ROOM ? STEPS : 1;          // steps whose right factors are loaded at once
  using Small = typename S::R::Small;
  using Shared = typename S::Shared;

  const Params &p;
  const Place<S> &here;
  Shared &sh;
  const int row, lane, g, t;
  const Ring<S> ring;
  const uint4 *w_from, *k_from, *u_from;  // this lane's pieces of the first record
  TileA rows[STEPS], keys[ROOM ? OWN : 1][ROWS];
  float4 u[N];
  float state[OWN][N][4];

  __device__ __forceinline__ Walker(const Params &params, const Place<S> &place, Shared &shared)
      : p(params), here(place), sh(shared), row(threadIdx.x / 32 % ROWS), lane(threadIdx.x % 32), g(lane / 4), t(lane % 4),
        ring{&sh.ring[0][row * S::WALK][lane]} {
    w_from = &here.record->w[row * STEPS][0][lane], k_from = &here.record->k[row * OWN * ROWS][0][lane];
    u_from = reinterpret_cast<const uint4 *>(&here.record->u[row * (S::V / 8) + here.v0 / 8][lane]);
  }

  __device__ __forceinline__ void fetch_rows(int slot, int64_t chunk) const {  // w and u
    const int64_t at = here.piece_of(chunk);
    ring.template fetch<2 * STEPS>(slot, 0, w_from + at);
    ring.template fetch<N>(slot, U, u_from + at);
    copies_commit();
  }
  __device__ __forceinline__ void fetch_keys(int slot, int64_t chunk) const {
    ring.template fetch<2 * OWN * ROWS>(slot, KEYS, k_from + here.piece_of(chunk));
    copies_commit();
  }
  // One in two groups of copies is for rows, and DEPTH of both are on their way: all but the oldest may still be.
  __device__ __forceinline__ void read_rows(int slot) {
    copies_wait<2 * S::DEPTH - 1>();
#pragma unroll
    for (int j = 0; j < STEPS; ++j) rows[j] = ring.read_tile(slot, 2 * j);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const uint4 x = ring.read(slot, U + n);
      u[n] = make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w));
    }
  }
  __device__ __forceinline__ void read_keys(int slot, int m) {
#pragma unroll
    for (int j = 0; j < ROWS; ++j) keys[ROOM ? m : 0][j] = ring.read_tile(slot, KEYS + 2 * (m * ROWS + j));
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
    return here.state_at(p, (row * OWN + m) * 16 + g + e / 2 * 8, n * 8 + 2 * t + e % 2);
  }
  __device__ __forceinline__ void put_state(int m, int parity) const {
    const Split<N> split(state[m]);
    sh.state_rows(parity).put((row * OWN + m) * 16, split);
    if (lane == 0) sh.state_power[parity][row * OWN + m] = split.inverse;
  }
  __device__ __forceinline__ void load_state() {
#pragma unroll
    for (int m = 0; m < OWN; ++m) {
#pragma unroll
      for (int i = 0; i < 4 * N; ++i) state[m][i / 4][i % 4] = p.initial_state != nullptr ? p.initial_state[state_at(m, i / 4, i % 4)] : 0.f;
      put_state(m, 0);
    }
  }
  __device__ __forceinline__ void store_state() const {
    if (p.final_state == nullptr) return;
#pragma unroll
    for (int m = 0; m < OWN; ++m) {
#pragma unroll
      for (int i = 0; i < 4 * N; ++i) p.final_state[state_at(m, i / 4, i % 4)] = state[m][i / 4][i % 4];
    }
  }

  // v_new = u - w S; meanwhile this chunk's keys are read.
  __device__ __forceinline__ void make_v_new(int slot, int64_t chunk, const Small &small) {
    const int parity = int(chunk % 2);
    const uint32_t *state_row = sh.state_rows(parity).lane_in_order();
    float sum[N][4] = {};
#pragma unroll
    for (int first = 0; first < STEPS; first += GROUP) {
      uint32_t right[GROUP][N][4];
      float power[GROUP];
#pragma unroll
      for (int i = 0; i < GROUP * N; ++i) load_transposed(right[i / N][i % N], state_row + (first + i / N) * 16 * S::LD + i % N * 4);
#pragma unroll
      for (int j = 0; j < GROUP; ++j) power[j] = -small.w[row * STEPS + first + j].x * sh.state_power[parity][first + j];
      if (ROOM) take_keys(slot, chunk);
#pragma unroll
      for (int i = 0; i < GROUP * N; ++i) multiply_add(sum[i % N], rows[first + i / N], right[i / N][i % N], power[i / N], power[i / N]);
    }
#pragma unroll
    for (int n = 0; n < N; ++n) sum[n][0] += u[n].x, sum[n][1] += u[n].y, sum[n][2] += u[n].z, sum[n][3] += u[n].w;
    const Split<N> split(sum);
    sh.v_new_rows(parity).put(row * 16, split);
    if (lane == 0) sh.v_new_power[parity][row] = split.inverse;
  }

  // S <- Diag(decay) S + k_decayed^T v_new; meanwhile the next chunk's rows are read.
  __device__ __forceinline__ void update_state(int slot, int64_t chunk, const Small &small) {
    const int parity = int(chunk % 2);
    const uint32_t *v_new_row = sh.v_new_rows(parity).lane_of_tokens();
    uint32_t right[ROWS][N][4];
    float power[OWN][ROWS], decay[OWN][2];
#pragma unroll
    for (int i = 0; i < ROWS * N; ++i) load_transposed(right[i / N][i % N], v_new_row + i / N * 16 * S::LD + i % N * 4);
#pragma unroll
    for (int m = 0; m < OWN; ++m) {
#pragma unroll
      for (int j = 0; j < ROWS; ++j) power[m][j] = small.k[(row * OWN + m) * ROWS + j].x * sh.v_new_power[parity][j];
      decay[m][0] = small.decay[(row * OWN + m) * 16 + g], decay[m][1] = small.decay[(row * OWN + m) * 16 + g + 8];
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
        multiply_add(added[i % N], keys[ROOM ? m : 0][i / N], right[i / N][i % N], power[m][i / N], power[m][i / N]);
#pragma unroll
      for (int i = 0; i < 4 * N; ++i) state[m][i / 4][i % 4] = fmaf(decay[m][i % 4 / 2], state[m][i / 4][i % 4], added[i / 4][i % 4]);
      put_state(m, parity ^ 1);
    }
    if (!ROOM) take_rows(Ring<S>::after(slot), chunk + 1);
  }
};

template <typename S>
__device__ __forceinline__ void walk(const Params &p, const Place<S> &here, typename S::Shared &sh) {
  Walker<S> walker(p, here, sh);
  walker.load_state();
  wait_for_previous_kernel();
  if (here.chunks > 0) {
    for (int d = 0; d < S::DEPTH; ++d) walker.fetch_rows(d, d), walker.fetch_keys(d, d);
    walker.take_rows(0, 0);
    int slot = 0, small_slot = 0;
    for (int64_t chunk = 0; chunk < here.chunks; ++chunk) {
      sync_part<1, S::THREADS>();  // the state and this chunk's small parts are there
      walker.make_v_new(slot, chunk, sh.small[small_slot]);
      sync_part<2, S::HALF>();  // v_new is there
      walker.update_state(slot, chunk, sh.small[small_slot]);
      slot = Ring<S>::after(slot), small_slot = small_slot_after<S>(small_slot);
    }
    sync_part<1, S::THREADS>();  // the last v_new is there for those who tell
  }
  walker.store_state();
}

}  // namespace kda
