// The serial pass over a sequence's chunks from its end. Per chunk, with dS' the gradient of the state after it:
//
//   y = A_solved^T d_o + k_solved dS'        d_v = beta y        dS = Diag(decay) dS' + q_decayed^T d_o - k_in^T d_v
//
// where A_solved = A_qk (I + A_kk)^-1 and k_solved = (I + A_kk)^-T k_decayed. Writes dS' of every chunk, d_v, and dS of the initial state.
// One block per sequence, value head and block of value channels: a warp group per 64 value channels holds dS^T [64, K] in float32
// accumulators, and every product has dS^T, d_o^T or y^T as its left factor, taken from registers. More warps fetch. k_solved in float16
// is multiplied with dS' in float16, each value channel divided by a power of two of its own. No atomics: equal calls give equal bits.
// From records whose A_solved and k_solved have been multiplied by beta comes d_v = A_solved^T d_o + k_solved dS' itself.
#include "hopper_reverse_walk.cuh"

namespace kda::hopper {

template <int HEAD, int GROUPS, int BLOCKS, From FROM>
__global__ void __launch_bounds__(BackLayout<HEAD, GROUPS, BLOCKS, FROM>::threads, BLOCKS)
    reverse_kernel(const __grid_constant__ HopperReverse p, const __grid_constant__ ReverseMatrices matrices) {
  using L = BackLayout<HEAD, GROUPS, BLOCKS, FROM>;
#ifdef KDA_EMULATE
  uint8_t* shared = memory;
#else
  extern __shared__ __align__(1024) uint8_t shared[];
#endif
  const uint32_t smem = shared_address(shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < L::stages; ++i)
      barrier_init(smem + L::barriers + i * 8, L::fetchers + 1), barrier_init(smem + L::barriers + (L::stages + i) * 8, GROUPS * 128);
    barriers_ready();
  }
  if (L::record) {
    for (int i = 0; i < L::stages; ++i) clear_squares<L::threads, true>(smem + i * L::stage, L::solved, threadIdx.x);
    fence_async();
  }
  __syncthreads();
  const BackTask task = back_task<HEAD, GROUPS>(p);
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (group == GROUPS) {
    if (GROUPS == 2) fewer_registers<40>();
    fetch_back<HEAD, GROUPS, BLOCKS, FROM>(p, matrices, task, smem, threadIdx.x - GROUPS * 128);
  } else {
    if (GROUPS == 2) more_registers<232>();
    walk_back<HEAD, GROUPS, BLOCKS, FROM>(p, matrices, task, shared, smem);
  }
}

#ifndef KDA_EMULATE
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function that describes a matrix, found at the first call, so that the library needs no driver to be loaded; or null.
Encode find_encode() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
  return status == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(found) : nullptr;
}

cudaError_t describe(Matrix& matrix, const void* data, int64_t rows, int columns, int piece_rows) {
  static const Encode encode = find_encode();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(columns) * 2};
  const cuuint32_t piece[2] = {64, static_cast<cuuint32_t>(piece_rows)}, steps[2] = {1, 1};
  const CUresult result = encode(&matrix, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), sizes, strides, piece, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <int HEAD, int GROUPS, int BLOCKS, From FROM>
cudaError_t launch(const HopperReverse& p, const ReverseMatrices& matrices, cudaStream_t stream) {
  using L = BackLayout<HEAD, GROUPS, BLOCKS, FROM>;
  const auto kernel = reverse_kernel<HEAD, GROUPS, BLOCKS, FROM>;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::bytes);
  if (status != cudaSuccess) return status;
  const auto blocks = static_cast<unsigned>(p.in.N * p.in.HV * (HEAD / (GROUPS * kBackSlice)));
  kernel<<<blocks, L::threads, L::bytes, stream>>>(p, matrices);
  return cudaGetLastError();
}
template <int HEAD, int GROUPS, int BLOCKS>
cudaError_t launch_from(const HopperReverse& p, const ReverseMatrices& matrices, cudaStream_t stream) {
  return p.half_solved ? launch<HEAD, GROUPS, BLOCKS, From::half_tiles>(p, matrices, stream)
                       : launch<HEAD, GROUPS, BLOCKS, From::tiles>(p, matrices, stream);
}

}  // namespace

cudaError_t launch_reverse(const HopperReverse& p, int64_t slots, cudaStream_t stream) {
  ReverseMatrices matrices{};
  const int64_t items = slots * p.in.HV;
  const int head = p.in.head;
  int device = 0, processors = 0;
  cudaError_t status = cudaGetDevice(&device);
  // In a thread's first call nothing has given it a context yet, which the driver's function wants.
  if (status == cudaSuccess) status = cudaSetDevice(device);
  if (status == cudaSuccess && !p.record) status = describe(matrices.tiles, p.tiles, items * 3 * kChunk, head, 3 * kChunk);
  if (status == cudaSuccess && !p.record) status = describe(matrices.solved, p.solved, items * kChunk, kChunk, kChunk);
  if (status == cudaSuccess) status = describe(matrices.d_states, p.d_states, items * head, head, 16);
  if (status == cudaSuccess && p.q_lost) status = describe(matrices.q_lost, p.q_lost, items * kChunk, head, kChunk);
  if (status == cudaSuccess && p.d_states_lost) status = describe(matrices.d_states_lost, p.d_states_lost, items * head, head, 16);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  if (head == 64) {
    // A block alone on a multiprocessor has chunks in flight for two; two take turns where there are more blocks than multiprocessors.
    // With q_lost there is no shared memory for two.
    if (p.q_lost) return launch<64, 1, 1, From::exact_tiles>(p, matrices, stream);
    const bool shared = p.in.N * p.in.HV > processors;
    return shared ? launch_from<64, 1, 2>(p, matrices, stream) : launch_from<64, 1, 1>(p, matrices, stream);
  }
  // A block per head moves fewer bytes; two per head fill the chip where there are few.
  const bool wide = p.channels ? p.channels == head : p.in.N * p.in.HV * 2 > processors;
  if (p.record && p.in.beta_kind == Beta::given)
    return wide ? launch<128, 2, 1, From::plain_record>(p, matrices, stream) : launch<128, 1, 1, From::plain_record>(p, matrices, stream);
  if (p.record) return wide ? launch<128, 2, 1, From::record>(p, matrices, stream) : launch<128, 1, 1, From::record>(p, matrices, stream);
  return wide ? launch_from<128, 2, 1>(p, matrices, stream) : launch_from<128, 1, 1>(p, matrices, stream);
}
#endif

}  // namespace kda::hopper
