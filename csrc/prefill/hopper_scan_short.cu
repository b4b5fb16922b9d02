// Stages state and output along short chunks, 32 tokens each, as hopper_scan.cu has them along chunks of 64: with S the state before one,
//
//   r = v - k_in S        o = q_decayed S + A_solved r        S <- Diag(decay) S + k_solved^T r
#include "hopper_scan_short.cuh"

namespace kda::hopper {

template <int GROUPS>
__global__ void __launch_bounds__(ShortLayout<GROUPS>::threads, 1) scan_short_kernel(const __grid_constant__ HopperForward p) {
  using L = ShortLayout<GROUPS>;
  using R = ShortRecord;
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
  for (int i = threadIdx.x; i < L::stages * 2 * R::square / 16; i += L::threads) {  // square (1, 0) of A_solved^T
    const int which = i / (R::square / 16), unit = i % (R::square / 16);
    store_shared(smem + which / 2 * L::stage + which % 2 * R::stage_bytes + R::last_square + unit * 16, make_uint4(0, 0, 0, 0));
  }
  fence_async();
  __syncthreads();
  const Task task = task_of<128, GROUPS>(p, nullptr);
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (group == GROUPS) {
    if (GROUPS == 2) fewer_registers<40>();
    fetch_short<GROUPS>(p, task, smem, threadIdx.x - GROUPS * 128);
  } else {
    if (GROUPS == 2) more_registers<232>();
    walk_short<GROUPS>(p, task, shared, smem);
  }
}

#ifndef KDA_EMULATE
namespace {

template <int GROUPS>
cudaError_t launch(const HopperForward& p, cudaStream_t stream) {
  using L = ShortLayout<GROUPS>;
  const auto kernel = scan_short_kernel<GROUPS>;
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

cudaError_t launch_scan_short(const HopperForward& p, cudaStream_t stream) {
  bool many = false;
  const cudaError_t status = find_width(p, many);
  if (status != cudaSuccess) return status;
  return many ? launch<2>(p, stream) : launch<1>(p, stream);
}
#endif

}  // namespace kda::hopper
