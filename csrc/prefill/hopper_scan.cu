// Stages state and output: the serial pass over a sequence's chunks. Per chunk, with S the state before it:
//
//   r = v - k_in S        o = q_decayed S + A_solved r        S <- Diag(decay) S + k_solved^T r
//
// One block per sequence, value head and block of value channels: a warp group per 64 value channels holds S^T [64, 128] in float32
// accumulators, and every product has S^T or r^T as its left factor, taken from registers. One more warp fetches records and values.
// Where a sequence is scanned in parts, a block of a later part first finds the state before it: S <- M S + b over the parts between. Two
// parts need no such states: where the chunks before the second forget all that was before them, its block begins with those chunks; where
// they do not, the first part's block goes on to the end.
#include "hopper_scan_ahead.cuh"


namespace kda::hopper {
namespace {

// How a block walks: as first shown; with products ahead of outputs; the same, and the two blocks of a head fetch for each other.
enum class Walk : int { plain = 0, ahead = 1, paired = 2 };

template <int GROUPS, bool KEPT, Walk WALK>
__device__ __forceinline__ void scan_block(const HopperForward& p, const Kept& kept) {
  using L = Layout<GROUPS>;
  constexpr bool kPaired = WALK == Walk::paired;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = shared_address(shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < L::stages; ++i)  // a paired stage is handed back by the warps of both blocks
      barrier_init(smem + L::barriers + i * 8, L::fetchers + 1),
          barrier_init(smem + L::barriers + (L::stages + i) * 8, kPaired ? 2 * GROUPS * 4 : GROUPS * 128);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  for (int i = 0; i < L::stages; ++i) clear_squares<kThreads<GROUPS>>(smem + i * L::stage, threadIdx.x);
  fence_async();
  __syncthreads();
  if (GROUPS == 1) wait_for_previous_kernel();
  const Task task = task_of<GROUPS>(p, reinterpret_cast<float*>(shared + L::scratch));
  if (kPaired) cluster_meet();  // the other block's barriers are there
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (group == GROUPS) {
    if (GROUPS == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    fetch<GROUPS, kPaired>(p, task, smem, threadIdx.x - GROUPS * 128);
  } else {
    if (GROUPS == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    if constexpr (WALK == Walk::plain)
      scan<GROUPS, KEPT>(p, kept, task, shared, smem);
    else
      scan_ahead<GROUPS, KEPT, kPaired>(p, kept, task, shared, smem);
  }
  if (kPaired) cluster_meet();  // nothing of the other block comes here any more
}

}  // namespace

template <int GROUPS, Walk WALK>
__global__ void __launch_bounds__(kThreads<GROUPS>, 1) scan_kernel(const __grid_constant__ HopperForward p) {
  scan_block<GROUPS, false, WALK>(p, Kept{});
}
template <int GROUPS, Walk WALK>
__global__ void __launch_bounds__(kThreads<GROUPS>, 1) scan_kept_kernel(const __grid_constant__ HopperForward p,
                                                                        const __grid_constant__ Kept kept) {
  scan_block<GROUPS, true, WALK>(p, kept);
}

namespace {

template <int GROUPS, typename... Arguments>
cudaError_t launch(const HopperForward& p, bool paired, void (*kernel)(Arguments...), cudaStream_t stream, const Arguments&... arguments) {
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout<GROUPS>::bytes);
  if (status != cudaSuccess) return status;
  const auto blocks = static_cast<unsigned>(p.N * p.HV * (GROUPS == 1 ? p.parts : 1) * (kHead / (GROUPS * kSlice)));
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks), config.blockDim = dim3(kThreads<GROUPS>), config.dynamicSmemBytes = Layout<GROUPS>::bytes;
  config.stream = stream, config.attrs = attributes;
  // Blocks may take their places while the last chunks are prepared; they wait before they read a record. Measured: it pays for wide ones.
  if ((GROUPS == 2 || p.early) && p.T > 0) {
    cudaLaunchAttribute& early = attributes[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization, early.val.programmaticStreamSerializationAllowed = 1;
  }
  if (paired) {
    cudaLaunchAttribute& pairs = attributes[config.numAttrs++];
    pairs.id = cudaLaunchAttributeClusterDimension, pairs.val.clusterDim.x = 2, pairs.val.clusterDim.y = 1, pairs.val.clusterDim.z = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// A block per head moves fewer bytes; two per head fill the chip where there are few.
cudaError_t find_width(const HopperForward& p, bool& wide) {
  int device = 0, processors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  wide = p.parts == 1 && p.N * p.HV * 2 > processors;
  return status;
}

}  // namespace

cudaError_t launch_scan(const HopperForward& p, cudaStream_t stream) {
  bool wide = false;
  const cudaError_t status = find_width(p, wide);
  if (status != cudaSuccess) return status;
  switch (const auto walk = static_cast<Walk>(p.walk); walk) {
    case Walk::plain:
      return wide ? launch<2>(p, false, scan_kernel<2, Walk::plain>, stream, p)
                  : launch<1>(p, false, scan_kernel<1, Walk::plain>, stream, p);
    default:
      if (wide) return launch<2>(p, false, scan_kernel<2, Walk::ahead>, stream, p);
      return walk == Walk::ahead ? launch<1>(p, false, scan_kernel<1, Walk::ahead>, stream, p)
                                 : launch<1>(p, true, scan_kernel<1, Walk::paired>, stream, p);
  }
}

cudaError_t launch_scan_kept(const HopperForward& p, const Kept& kept, cudaStream_t stream) {
  bool wide = false;
  const cudaError_t status = find_width(p, wide);
  if (status != cudaSuccess) return status;
  switch (const auto walk = static_cast<Walk>(p.walk); walk) {
    case Walk::plain:
      return wide ? launch<2>(p, false, scan_kept_kernel<2, Walk::plain>, stream, p, kept)
                  : launch<1>(p, false, scan_kept_kernel<1, Walk::plain>, stream, p, kept);
    default:
      if (wide) return launch<2>(p, false, scan_kept_kernel<2, Walk::ahead>, stream, p, kept);
      return walk == Walk::ahead ? launch<1>(p, false, scan_kept_kernel<1, Walk::ahead>, stream, p, kept)
                                 : launch<1>(p, true, scan_kept_kernel<1, Walk::paired>, stream, p, kept);
  }
}

}  // namespace kda::hopper
