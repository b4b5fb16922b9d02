// Backward of a chunk: every product over V, and through the chunk's decayed products to the gradients of q, k, g and beta. One block of
// sixteen warps per multiprocessor, or two of eight for 64 channels, walks over chunks of all heads; what the next one's products need
// comes while this one's gradients are made. q, k and g of a lane's four tokens and four channels are read once and stay in registers; one
// warp finds the next chunk for all. Warp groups make pairs and products with states by wgmma, while gates and decayed tiles are made; what
// v_new needs is dealt to warps so that all schedulers have as many products. No atomics: the same call gives the same bits.
//
//   fetched: S, dS', d_o, d_v, r, lower      -> hopper_gradient_products.cuh: v_new, d_beta, pairs, gradients of q_decayed, k_in, k_decayed
//   q, k, g                                  -> hopper_gradient_pairs.cuh: decayed tiles; all pairs, from the farthest to a warp's own
//   d_q, d_k, d_g, shares of d_A_log ..      <- hopper_gradient_finish.cuh: norms, sums over later tokens, gates
#include "hopper_gradient_finish.cuh"

namespace kda::hopper {
namespace {

// The power of two above or at the largest of the warps' pairs, not so small that what the state gives would overflow when divided by it.
template <int HEAD>
__device__ __forceinline__ float power_of_largest(const Seat<HEAD>& at) {
  float largest = 0x1p-60f;
#pragma unroll
  for (int i = 0; i < at.kWarps; i += 4) {
    const float4 x = load_four(at.floats(at.kAtLargest) + i);
    largest = fmaxf(fmaxf(largest, fmaxf(x.x, x.y)), fmaxf(x.z, x.w));
  }
  return __uint_as_float(__float_as_uint(fminf(largest, 0x1p120f)) & 0x7f800000u);
}

__device__ __forceinline__ float largest_of_warp(float x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

}  // namespace

template <Gate GATE, bool BOUNDED, bool G32, int HEAD>
__global__ void __launch_bounds__(Seat<HEAD>::kThreads, Seat<HEAD>::kBlocksAtOnce)
    gradient_kernel(const __grid_constant__ Given<HEAD> p, int64_t items) {
#ifdef KDA_EMULATE
  uint8_t* bytes = memory;
#else
  extern __shared__ __align__(1024) uint8_t bytes[];
#endif
  Seat<HEAD> at = seat_of<HEAD>(bytes);
  if (at.warp == at.kScout) find_chunk(p, blockIdx.x, items, gridDim.x, 0, at);
  __syncthreads();
  if (chunk_at(0, at).item < items) fetch_states(p, 0, at), fetch_lower(p, 0, at);
  for (int turn = 0; chunk_at(turn, at).item < items; turn ^= 1) {
    copy_async_wait();
    fence_async();
    __syncthreads();
    at = seat_of<HEAD>(bytes);
    const float* factors = at.floats(at.kAtFactors + turn * 768);
    Raw<uint2> q, k;
    RawGates<G32> g;
    load_tokens(q, k, g, p, chunk_at(turn, at), at);
    if (at.warp == at.kScout) find_chunk(p, chunk_at(turn, at).item + gridDim.x, items, gridDim.x, turn ^ 1, at);
    make_v_new(p, chunk_at(turn, at), factors, dealt(at));
    decay_products(p, chunk_at(turn, at), at);
    fence_async();
    __syncthreads();
    Pairs<HEAD> pairs;
    pairs.begin(at);
    if (at.warp == at.kStrengths || at.warp == at.kStrengths + 1)
      write_d_beta(p, chunk_at(turn, at), factors, at.thread - at.kStrengths * 32, at);
    if (at.warp >= at.kDecays && (!Seat<HEAD>::kNarrow || at.warp < at.kDecays + at.kSlices))
      add_decay_products(at.thread - at.kDecays * 32, at);
    Tokens x;
    make_gates<GATE, BOUNDED, G32>(p, turn, g, x, at);
    const float largest = largest_of_warp(pairs.finish(p, at));
    if (at.lane == 0) at.floats(at.kAtLargest)[at.warp] = largest;
    __syncthreads();
    const float power = power_of_largest(at);
    if (at.thread == 0) *at.floats(at.kAtPower) = power;
    pairs.store(over_power(power), at);
    Results d_q, d_k, d_c;
    begin_state_products(d_q, d_k, d_c, 0, at);
    refer<BOUNDED>(x, at);
    make_tiles(p, x, q, k, factors, at);
    at = seat_of<HEAD>(bytes);
    q.forget(), k.forget();
    if (!G32) g.forget();
    finish_state_products(p, chunk_at(turn, at), d_q, d_k, d_c, over_power(power_of_largest(at)), at);
    __syncthreads();
    at = seat_of<HEAD>(bytes);
    if (chunk_at(turn ^ 1, at).item < items) fetch_states(p, turn ^ 1, at);
    keep_state_part(d_c, at);
    if (BOUNDED)
      block_row_pairs(d_q, d_k, at), block_column_pairs(d_c, at);
    else
      at = seat_of<HEAD>(bytes), row_pairs(d_q, d_k, at), column_pairs(d_c, at);
    __syncthreads();
    at = seat_of<HEAD>(bytes);
    ByToken by_q, by_k, by_c;
    by_token(by_q, d_q, at), by_token(by_k, d_k, at), by_token(by_c, d_c, at);
    q.forget(), k.forget();
    undo_decays(p, x, q, k, factors, over_power(*at.floats(at.kAtPower)), by_q, by_k, by_c, at);
    __syncthreads();
    at = seat_of<HEAD>(bytes);
    q.forget(), k.forget();
    if (chunk_at(turn ^ 1, at).item < items) fetch_lower(p, turn ^ 1, at);
    write_gradients<GATE, BOUNDED, G32>(p, turn, q, k, g, x.raised, factors, *at.floats(at.kAtPower), by_q, by_k, by_c, at);
    if (GATE != Gate::log_decay && (p.A_shares || p.bias_shares)) {
      __syncthreads();
      write_shares(p, chunk_at(turn, at), at);
    }
  }
}

#ifndef KDA_EMULATE
namespace {

template <Gate GATE, bool BOUNDED, bool G32, int HEAD>
cudaError_t launch(const Given<HEAD>& p, int64_t items, cudaStream_t stream) {
  using Of = Seat<HEAD>;
  const auto kernel = gradient_kernel<GATE, BOUNDED, G32, HEAD>;
  int device = 0, processors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (status == cudaSuccess) status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Of::kBytes);
  if (status != cudaSuccess) return status;
  const int64_t most = int64_t{processors} * Of::kBlocksAtOnce;
  kernel<<<static_cast<unsigned>(items < most ? items : most), Of::kThreads, Of::kBytes, stream>>>(p, items);
  return cudaGetLastError();
}
template <Gate GATE, bool BOUNDED, int HEAD>
cudaError_t with_dtype(const Given<HEAD>& p, int64_t items, cudaStream_t stream) {
  return p.in.gate_float32 ? launch<GATE, BOUNDED, true, HEAD>(p, items, stream) : launch<GATE, BOUNDED, false, HEAD>(p, items, stream);
}
template <int HEAD>
cudaError_t with_gate(const Given<HEAD>& p, int64_t slots, cudaStream_t stream) {
  const int64_t items = slots * p.in.HV;
  switch (p.in.gate) {
    case Gate::bounded: return with_dtype<Gate::bounded, true, HEAD>(p, items, stream);
    case Gate::softplus: return with_dtype<Gate::softplus, false, HEAD>(p, items, stream);
    case Gate::log_decay:
      return p.in.safe ? with_dtype<Gate::log_decay, true, HEAD>(p, items, stream)
                       : with_dtype<Gate::log_decay, false, HEAD>(p, items, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_gradient(const HopperGradient64& p, int head, int64_t slots, cudaStream_t stream) {
  return head == 64 ? with_gate<64>(p, slots, stream) : with_gate<128>(p, slots, stream);
}
#endif

}  // namespace kda::hopper
