// From the C ABI's arguments to the kernels' parameters: chunks, the workspace, pointers.
#pragma once

#include <cstddef>

#include "chunks.cuh"
#include "status.h"
#include "tiles.cuh"

namespace kda {

struct Plan {
  int64_t C, slots, cells;  // slots per row, cells = rows * slots
};

inline void plan_slots(const kda_prefill_args &args, Plan &plan) {
  plan.slots = args.cu_seqlens ? args.tokens / plan.C + args.sequences : (args.tokens + plan.C - 1) / plan.C;
  plan.cells = args.batch * args.value_heads * plan.slots;
}

// What the float32 kernels take; sizes have passed the C ABI's checks, so no product here leaves 64 bits.
inline kda_status make_plan(const kda_prefill_args &args, Plan &plan) {
  const int64_t K = args.key_dim, V = args.value_dim;
  if (!(K == V && (K == 64 || K == 128)))
    return fail(KDA_UNSUPPORTED, "float32 kernels exist for (K, V) = (64, 64) and (128, 128), got (%lld, %lld)", (long long)K,
                (long long)V);
  plan.C = args.chunk_size ? args.chunk_size : 64;
  if (plan.C != 32 && plan.C != 64)
    return fail(KDA_UNSUPPORTED, "float32 kernels exist for chunk_size 32 and 64, got %lld", (long long)plan.C);
  plan_slots(args, plan);
  const int64_t blocks = args.sequences * args.value_heads * (V / 8);
  if (plan.cells > INT32_MAX || blocks > INT32_MAX)
    return fail(KDA_UNSUPPORTED, "a launch takes 2^31 - 1 blocks, this call needs %lld",
                (long long)(plan.cells > blocks ? plan.cells : blocks));
  return KDA_OK;
}

// Bytes of a chunk's record.
inline size_t record_bytes(const kda_prefill_args &args, const Plan &plan) {
  if (args.key_dim == 64) return plan.C == 32 ? sizeof(Record<64, 64, 32>) : sizeof(Record<64, 64, 64>);
  return plan.C == 32 ? sizeof(Record<128, 128, 32>) : sizeof(Record<128, 128, 64>);
}

inline Params make_params(const kda_prefill_args &args, const Plan &plan) {
  Params params{};
  params.q = args.q, params.k = args.k, params.v = args.v, params.g = args.g, params.beta = args.beta, params.o = args.o;
  params.A_log = args.gate == KDA_GATE_LOG_DECAY ? nullptr : args.A_log;
  params.dt_bias = args.gate == KDA_GATE_LOG_DECAY ? nullptr : args.dt_bias;
  params.initial_state = args.initial_state, params.final_state = args.final_state;
  params.mid = {static_cast<float *>(args.w), static_cast<float *>(args.u), args.workspace};
  params.sequences = {args.cu_seqlens, args.sequences, args.tokens, args.cu_seqlens_64 != 0, plan.slots};
  params.rows = args.batch * args.value_heads, params.value_heads = args.value_heads, params.group = args.value_heads / args.heads;
  params.scale = args.scale, params.lower_bound = args.lower_bound;
  params.gate = args.gate, params.beta_kind = args.beta_kind, params.l2norm = args.l2norm, params.state_v_first = args.state_v_first;
  return params;
}

}  // namespace kda
