// Backward of a chunk: every product over V, and through the chunk's decayed products to the gradients of q, k, g and beta. One block of
// sixteen warps per multiprocessor walks over chunks of all heads; what the next one's products need comes while this one's gradients are
// made. No atomics: the same call gives the same bits.
//
//   fetched: S, dS', d_o, d_v, r, lower      -> hopper_gradient_products.cuh: v_new, d_beta, pairs, gradients of q_decayed, k_in, k_decayed
//   q, k, g                                  -> hopper_gradient_pairs.cuh: decayed tiles; all pairs, from the farthest to a warp's own
//   d_q, d_k, d_g, shares of d_A_log ..      <- hopper_gradient_finish.cuh: norms, sums over later tokens, gates
#include "hopper_gradient_finish.cuh"

namespace kda::hopper {
namespace {

// The power of two above or at the largest of the warps' pairs, not so small that what the state gives would overflow when divided by it.
__device__ __forceinline__ float power_of_largest(const Seat& at) {
  float largest = 0x1p-60f;
#pragma unroll
  for (int i = 0; i < kGradientWarps; ++i) largest = fmaxf(largest, at.floats(kAtLargest)[i]);
  return __uint_as_float(__float_as_uint(fminf(largest, 0x1p120f)) & 0x7f800000u);
}

__device__ __forceinline__ float largest_of_warp(float x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

}  // namespace

template <Gate GATE, bool BOUNDED, bool G32>
__global__ void __launch_bounds__(kGradientThreads, 1) gradient_kernel(const __grid_constant__ HopperGradient p, int64_t items) {
#ifdef KDA_EMULATE
  uint8_t* bytes = memory;
#else
  extern __shared__ __align__(1024) uint8_t bytes[];
#endif
  Seat at = seat_of(bytes);
  Chunk c = chunk_from(p, blockIdx.x, items, gridDim.x, at);
  if (c.item < items) fetch_chunk(p, c, 0, at);
  for (int turn = 0; c.item < items; turn ^= 1) {
    copy_async_wait();
    store_chunk(c, turn, at);
    __syncthreads();
    at = seat_of(bytes);
    const float* factors = at.floats(kAtFactors + turn * 768);
    fetch_keys(p, c, at);
    make_v_new(p, c, factors, at);
    decay_products(p, c, at);
    __syncthreads();
    at = seat_of(bytes), c = load_chunk(turn, at);
    write_d_beta(p, c, factors, at);
    float pairs_q[2][4] = {}, pairs_k[2][4] = {};
    const float largest = largest_of_warp(make_pairs(p, pairs_q, pairs_k, at));
    if (at.lane == 0) at.floats(kAtLargest)[at.warp] = largest;
    Tokens x;
    load_gates<GATE, BOUNDED, G32>(p, c, x, at);
    store_sums(x, at);
    add_decay_products(at);
    __syncthreads();
    at = seat_of(bytes), c = load_chunk(turn, at);
    const float back = power_of_largest(at), unit = __frcp_rn(back);
    store_pairs(pairs_q, pairs_k, unit, at);
    Results d_q = {}, d_k = {}, d_c = {};
    state_products(p, d_q, d_k, d_c, unit, at);
    at = seat_of(bytes);
    refer<BOUNDED>(x, at);
    copy_async_wait();
    make_tiles(p, x, factors, at);
    __syncthreads();
    at = seat_of(bytes), c = load_chunk(turn, at);
    if (const Chunk next = chunk_from(p, c.item + gridDim.x, items, gridDim.x, at); next.item < items) fetch_chunk(p, next, turn ^ 1, at);
    at = seat_of(bytes);
    keep_state_part(d_c, at);
    row_pairs<BOUNDED>(d_q, d_k, at);
    column_pairs<BOUNDED>(d_c, at);
    __syncthreads();
    at = seat_of(bytes), c = load_chunk(turn, at);
    ByToken by_q, by_k, by_c;
    by_token(by_q, d_q, at), by_token(by_k, d_k, at), by_token(by_c, d_c, at);
    Keys keys;
    load_keys(p, c, keys, at);
    load_gates<GATE, BOUNDED, G32>(p, c, x, at);
    undo_decays(p, x, keys, factors, back, by_q, by_k, by_c, at);
    __syncthreads();
    at = seat_of(bytes), c = load_chunk(turn, at);
    write_gradients<GATE, BOUNDED, G32>(p, c, factors, back, by_q, by_k, by_c, at);
    if (p.A_shares || p.bias_shares) {
      __syncthreads();
      write_shares(p, c, at);
    }
    c = chunk_from(p, c.item + gridDim.x, items, gridDim.x, at);  // found once more, not kept in registers
  }
}

#ifndef KDA_EMULATE
namespace {

template <Gate GATE, bool BOUNDED, bool G32>
cudaError_t launch(const HopperGradient& p, int64_t items, cudaStream_t stream) {
  const auto kernel = gradient_kernel<GATE, BOUNDED, G32>;
  int device = 0, processors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (status == cudaSuccess) status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kGradientBytes);
  if (status != cudaSuccess) return status;
  kernel<<<static_cast<unsigned>(items < processors ? items : processors), kGradientThreads, kGradientBytes, stream>>>(p, items);
  return cudaGetLastError();
}
template <Gate GATE, bool BOUNDED>
cudaError_t with_dtype(const HopperGradient& p, int64_t items, cudaStream_t stream) {
  return p.in.gate_float32 ? launch<GATE, BOUNDED, true>(p, items, stream) : launch<GATE, BOUNDED, false>(p, items, stream);
}

}  // namespace

cudaError_t launch_gradient(const HopperGradient& p, int64_t slots, cudaStream_t stream) {
  const int64_t items = slots * p.in.HV;
  switch (p.in.gate) {
    case Gate::bounded: return with_dtype<Gate::bounded, true>(p, items, stream);
    case Gate::softplus: return with_dtype<Gate::softplus, false>(p, items, stream);
    case Gate::log_decay:
      return p.in.safe ? with_dtype<Gate::log_decay, true>(p, items, stream) : with_dtype<Gate::log_decay, false>(p, items, stream);
  }
  return cudaErrorInvalidValue;
}
#endif

}  // namespace kda::hopper
