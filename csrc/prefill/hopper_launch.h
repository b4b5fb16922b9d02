// A launch whose blocks may take their places while the kernel before it ends; they wait before they read what that one wrote.
#pragma once
#include <cuda_runtime.h>

#include "hopper.h"

namespace kda::hopper {

inline cudaError_t launch_early(void (*kernel)(HopperForward), unsigned blocks, int threads, int bytes, cudaStream_t stream, bool early,
                                const HopperForward& p) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization, attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks), config.blockDim = dim3(threads), config.dynamicSmemBytes = bytes;
  config.stream = stream, config.attrs = &attribute, config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace kda::hopper
