// From the C ABI's arguments to the kernels' parameters: chunks, the workspace, pointers.
#pragma once

#include <cstddef>

#include "chunks.cuh"
#include "tiles.cuh"

namespace kda {

struct Plan {
  int64_t C, slots, cells;  // slots per row, cells = rows * slots
};

inline void plan_slots(const kda_prefill_args &args, Plan &plan) {
  plan.slots = args.cu_seqlens ? args.tokens / plan.C + args.sequences : (args.tokens + plan.C - 1) / plan.C;
  plan.cells = args.batch * args.value_heads * plan.slots;
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
