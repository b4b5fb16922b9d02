// What c_api.cu calls; `forward` is args.forward as its checks leave it.
#pragma once

#include "../include/kdakit.h"
#include "../prefill/status.h"

namespace kda {

#ifdef KDAKIT_HOPPER
kda_status gradient_bf16(const kda_gradient_args &args, const kda_prefill_args &forward);
kda_status rebuild_bf16(const kda_rebuild_args &args, const kda_prefill_args &forward);
kda_status reverse_bf16(const kda_reverse_args &args, const kda_prefill_args &forward);
#endif

}  // namespace kda
