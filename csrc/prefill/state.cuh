// The recurrence over chunks, one block per (sequence, value head, BV value channels):
//
//     v_new = u - w S        o = q_decayed S + A_qk v_new        S <- Diag(decay) S + k_decayed^T v_new
//
// Half of the warps make v_new and keep the state in their registers (state_update.cuh). The other half form o beside them
// (state_output.cuh). S and v_new pass through shared memory as hi and lo (tiles.cuh), with a power of two per 16 rows.
//
// Every 16 bytes of a record have one lane that uses them. It copies them into a place of its own in a ring of DEPTH chunks, reads them
// into registers ahead of their use, and gives the place to a later chunk: no barriers but those for S and v_new.
#pragma once

#include "state_output.cuh"
#include "state_update.cuh"

namespace kda {

template <int K, int V, int C, int BV, int DEPTH>
__global__ __launch_bounds__(State<K, V, C, BV, DEPTH>::THREADS, 1) void state_kernel(const __grid_constant__ Params p) {
  using S = State<K, V, C, BV, DEPTH>;
  extern __shared__ __align__(16) unsigned char memory[];
  typename S::Shared &sh = *reinterpret_cast<typename S::Shared *>(memory);
  const Place<S> here(p);
  const bool updates = threadIdx.x < S::HALF;
  Lane<S> lane;
  lane.row = threadIdx.x / 32 % S::ROWS, lane.lane = threadIdx.x % 32, lane.g = lane.lane / 4, lane.t = lane.lane % 4;
  StateWarp<S> state{p, here, sh, lane};
  OutputWarp<S> output{p, here, sh, lane, nullptr};
  if (updates) state.start();
  else output.start();
  int slot = 0, small_slot = 0;
  for (int64_t chunk = 0; chunk < here.chunks; ++chunk) {
    const typename S::R::Small &small = sh.small[small_slot];
    __syncthreads();  // the state and this chunk's small parts are there
    if (updates) state.make_v_new(slot, chunk, small);
    else output.begin(slot, chunk, small);
    __syncthreads();  // v_new is there; the state may be overwritten
    if (updates) state.update_state(slot, chunk, small);
    else output.finish(slot, small_slot, chunk);
    slot = Ring<S>::after(slot), small_slot = small_slot_after<S>(small_slot);
  }
  if (updates) state.store_state();
}

}  // namespace kda
