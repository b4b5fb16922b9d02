// Stages state and output: the serial pass over a sequence's chunks. Per chunk, with S the state before it:
//
//   r = v - k_in S        o = q_decayed S + A_solved r        S <- Diag(decay) S + k_solved^T r
//
// One block per sequence, value head and block of value channels: a warp group per 64 value channels holds S^T [64, K] in float32
// accumulators, and every product has S^T or r^T as its left factor, taken from registers. One more warp fetches records and values.
// Where a sequence is scanned in parts, a block of a later part first finds the state before it. Where the chunks before it forget all that
// was before them, the block begins with those chunks; where they do not, S <- M S + b over the parts between. Two parts have no M and b:
// where the first is not forgotten, its block goes on to the end.
#include "hopper_scan_walk.cuh"

namespace kda::hopper {
namespace {

template <int HEAD, int GROUPS, int BLOCKS, Keep KEEP>
__device__ __forceinline__ void scan_block(const HopperForward& p, const Kept& kept) {
  using L = Layout<HEAD, GROUPS, BLOCKS>;
  constexpr bool kByColumns = keeps_records(KEEP);
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
  for (int i = 0; i < L::stages; ++i) clear_squares<L::threads, kByColumns>(smem + i * L::stage, Record<HEAD>::a_solved, threadIdx.x);
  fence_async();
  __syncthreads();
  const Task task = task_of<HEAD, GROUPS>(p, reinterpret_cast<float*>(shared + L::scratch));
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (group == GROUPS) {
    if (GROUPS == 2) fewer_registers<40>();
    fetch<HEAD, GROUPS, BLOCKS, kByColumns, KEEP == Keep::plain_record>(p, kept.factors, task, smem, threadIdx.x - GROUPS * 128);
  } else {
    if (GROUPS == 2) more_registers<232>();
    walk<HEAD, GROUPS, BLOCKS, KEEP>(p, kept, task, shared, smem);
  }
}

}  // namespace

template <int HEAD, int GROUPS, int BLOCKS>
__global__ void __launch_bounds__(Layout<HEAD, GROUPS, BLOCKS>::threads, BLOCKS) scan_kernel(const __grid_constant__ HopperForward p) {
  scan_block<HEAD, GROUPS, BLOCKS, Keep::nothing>(p, Kept{});
}
template <int HEAD, int GROUPS, int BLOCKS>
__global__ void __launch_bounds__(Layout<HEAD, GROUPS, BLOCKS>::threads, BLOCKS)
    scan_kept_kernel(const __grid_constant__ HopperForward p, const __grid_constant__ Kept kept) {
  scan_block<HEAD, GROUPS, BLOCKS, Keep::checkpoints>(p, kept);
}
template <int GROUPS, Keep KEEP>
__global__ void __launch_bounds__(Layout<128, GROUPS, 1>::threads, 1)
    scan_record_kernel(const __grid_constant__ HopperForward p, const __grid_constant__ Kept kept) {
  scan_block<128, GROUPS, 1, KEEP>(p, kept);
}

#ifndef KDA_EMULATE
namespace {

template <int HEAD, int GROUPS, int BLOCKS, typename... Arguments>
cudaError_t launch(const HopperForward& p, void (*kernel)(Arguments...), cudaStream_t stream, const Arguments&... arguments) {
  using L = Layout<HEAD, GROUPS, BLOCKS>;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::bytes);
  if (status != cudaSuccess) return status;
  const auto blocks = static_cast<unsigned>(p.N * p.HV * (HEAD == 128 && GROUPS == 1 ? p.parts : 1) * (HEAD / (GROUPS * kSlice)));
  // Blocks may take their places while the last chunks are prepared; they wait before they read a record. Measured: it pays where there are
  // many heads of 128.
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization, early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks), config.blockDim = dim3(L::threads), config.dynamicSmemBytes = L::bytes;
  config.stream = stream, config.attrs = &early, config.numAttrs = GROUPS * BLOCKS == 2 && p.T > 0 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace

// Of 128 channels a block per head moves fewer bytes; two per head fill the chip where there are few. Of 64 a block alone on a
// multiprocessor has chunks in flight for two; two share one where there are more blocks than multiprocessors.
cudaError_t find_width(const HopperForward& p, bool& many) {
  int device = 0, processors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  many = p.parts == 1 && p.N * p.HV * (p.head == 64 ? 1 : 2) > processors;
  return status;
}

cudaError_t launch_scan(const HopperForward& p, cudaStream_t stream) {
  bool many = false;
  const cudaError_t status = find_width(p, many);
  if (status != cudaSuccess) return status;
  if (p.head == 64)
    return many ? launch<64, 1, 2>(p, scan_kernel<64, 1, 2>, stream, p) : launch<64, 1, 1>(p, scan_kernel<64, 1, 1>, stream, p);
  return many ? launch<128, 2, 1>(p, scan_kernel<128, 2, 1>, stream, p) : launch<128, 1, 1>(p, scan_kernel<128, 1, 1>, stream, p);
}

cudaError_t launch_scan_kept(const HopperForward& p, const Kept& kept, cudaStream_t stream) {
  bool many = false;
  const cudaError_t status = find_width(p, many);
  if (status != cudaSuccess) return status;
  if (p.head == 64)
    return many ? launch<64, 1, 2>(p, scan_kept_kernel<64, 1, 2>, stream, p, kept)
                : launch<64, 1, 1>(p, scan_kept_kernel<64, 1, 1>, stream, p, kept);
  return many ? launch<128, 2, 1>(p, scan_kept_kernel<128, 2, 1>, stream, p, kept)
              : launch<128, 1, 1>(p, scan_kept_kernel<128, 1, 1>, stream, p, kept);
}

cudaError_t launch_scan_record(const HopperForward& p, const Kept& kept, cudaStream_t stream) {
  bool many = false;
  const cudaError_t status = find_width(p, many);
  if (status != cudaSuccess) return status;
  if (p.beta_kind == Beta::given)
    return many ? launch<128, 2, 1>(p, scan_record_kernel<2, Keep::plain_record>, stream, p, kept)
                : launch<128, 1, 1>(p, scan_record_kernel<1, Keep::plain_record>, stream, p, kept);
  return many ? launch<128, 2, 1>(p, scan_record_kernel<2, Keep::record>, stream, p, kept)
              : launch<128, 1, 1>(p, scan_record_kernel<1, Keep::record>, stream, p, kept);
}
#endif

}  // namespace kda::hopper
