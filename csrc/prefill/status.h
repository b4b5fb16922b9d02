// Errors as return values: every CUDA call goes through KDA_CUDA, every refusal through fail().
#pragma once

#include "../include/kdakit.h"

namespace kda {

// Store a message for kda_last_error and return `status`. printf-style.
__attribute__((format(printf, 2, 3))) kda_status fail(kda_status status, const char *format, ...);

// Whether the current device runs the bfloat16 kernels.
kda_status check_hopper();

#define KDA_CUDA(call)                                                                                              \
  do {                                                                                                              \
    cudaError_t error_ = (call);                                                                                    \
    if (error_ != cudaSuccess) return kda::fail(KDA_CUDA_ERROR, "%s: %s", #call, cudaGetErrorString(error_));        \
  } while (0)

#define KDA_TRY(call)                            \
  do {                                           \
    kda_status status_ = (call);                 \
    if (status_ != KDA_OK) return status_;       \
  } while (0)

}  // namespace kda
