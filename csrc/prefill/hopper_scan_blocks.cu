// Stages state and output along blocks of 16 tokens (hopper_block_record.h), as hopper_scan.cu has them along chunks: with S the state
// before a block,
//
//   r = v - k_in S        o = q_decayed S + A_solved r        S <- Diag(decay) S + k_solved^T r
#include "hopper_scan_blocks.cuh"

namespace kda::hopper {

template <int GROUPS>
__global__ void __launch_bounds__(BlocksLayout<GROUPS>::threads, 1) scan_blocks_kernel(const __grid_constant__ HopperForward p) {
  using L = BlocksLayout<GROUPS>;
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
  __syncthreads();
  const Task task = task_of<128, GROUPS>(p, nullptr);
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (group == GROUPS) {
    if (GROUPS == 2) fewer_registers<40>();
    fetch_blocks<GROUPS>(p, task, smem, threadIdx.x - GROUPS * 128);
  } else {
    if (GROUPS == 2) more_registers<232>();
    walk_blocks<GROUPS>(p, task, shared, smem);
  }
}

#ifndef KDA_EMULATE
namespace {

template <int GROUPS>
cudaError_t launch(const HopperForward& p, cudaStream_t stream) {
  using L = BlocksLayout<GROUPS>;
  const auto kernel = scan_blocks_kernel<GROUPS>;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute early{};  // see hopper_scan.cu
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization, early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(p.N * p.HV * (2 / GROUPS))), config.blockDim = dim3(L::threads);
  config.dynamicSmemBytes = L::bytes, config.stream = stream, config.attrs = &early, config.numAttrs = GROUPS == 2 && p.T > 0 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace

cudaError_t launch_scan_blocks(const HopperForward& p, cudaStream_t stream) {
  bool many = false;
  const cudaError_t status = find_width(p, many);
  if (status != cudaSuccess) return status;
  return many ? launch<2>(p, stream) : launch<1>(p, stream);
}
#endif

}  // namespace kda::hopper
