// What c_api.cu calls. Arguments have passed its checks: sizes are legal and fit, strides are filled in, scale and chunk_size are set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../include/kdakit.h"
#include "status.h"

namespace kda {

// Whether a call leaves something for a backward.
inline bool keeps(const kda_prefill_args &args) {
  return args.lower || args.solved || args.checkpoints || args.record || args.r || args.factors;
}

// float32: bytes of workspace; enqueue.
kda_status workspace_f32(const kda_prefill_args &args, size_t &bytes);
kda_status prefill_f32(const kda_prefill_args &args);

// Zeros as the outputs of tokens past the last packed sequence.
kda_status clear_padding(const kda_prefill_args &args, int element_bytes);

#ifdef KDAKIT_HOPPER
// bfloat16 on sm_90a, in hopper_*.cu; the builds define KDAKIT_HOPPER where such files are and sm_90a is among the architectures.
kda_status workspace_bf16(const kda_prefill_args &args, size_t &bytes);
kda_status prefill_bf16(const kda_prefill_args &args);
#endif

}  // namespace kda
