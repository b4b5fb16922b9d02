// A call of the C ABI as the Hopper kernels take it.
#pragma once
#include "../include/kdakit.h"
#include "hopper.h"
#include "hopper_record.h"

namespace kda::hopper {

inline int64_t slots_of(const kda_prefill_args &args) {
  return args.cu_seqlens ? args.tokens / kChunk + args.sequences : args.batch * ((args.tokens + kChunk - 1) / kChunk);
}

inline TokenStrides strides_of(const kda_tensor &x) { return {x.batch_stride, x.token_stride, x.head_stride}; }

inline HopperForward forward_of(const kda_prefill_args &args) {
  HopperForward p{};
  p.q = args.q.data, p.k = args.k.data, p.v = args.v.data, p.g = args.g.data, p.beta = args.beta.data, p.o = args.o.data;
  p.A_log = args.A_log, p.dt_bias = args.dt_bias, p.cu_seqlens = args.cu_seqlens;
  p.initial_state = args.initial_state, p.final_state = args.final_state;
  p.workspace = args.record ? args.record : args.workspace;
  p.B = args.batch, p.T = args.tokens, p.N = args.sequences, p.H = args.heads, p.HV = args.value_heads;
  p.q_strides = strides_of(args.q), p.k_strides = strides_of(args.k), p.v_strides = strides_of(args.v);
  p.g_strides = strides_of(args.g), p.beta_strides = strides_of(args.beta), p.o_strides = strides_of(args.o);
  p.scale = args.scale, p.lower_bound = args.lower_bound, p.gate = static_cast<Gate>(args.gate);
  p.beta_kind = static_cast<Beta>(args.beta_kind), p.l2norm = args.l2norm, p.safe = args.safe_gate;
  p.state_v_first = args.state_v_first, p.gate_float32 = args.g.dtype == KDA_FLOAT32, p.beta_float32 = args.beta.dtype == KDA_FLOAT32;
  p.cu_int32 = !args.cu_seqlens_64, p.head = static_cast<int>(args.key_dim), p.parts = 1;
  return p;
}

// All zeros where nothing is kept.
inline Kept kept_of(const kda_prefill_args &args) {
  return {args.lower,
          static_cast<uint16_t *>(args.solved),
          args.checkpoints,
          args.lower_dtype == KDA_FLOAT32,
          args.group == 8 ? 3 : args.group == 4 ? 2 : args.group == 2,
          args.checkpoint,
          args.checkpoint_float32,
          args.r,
          args.factors};
}

}  // namespace kda::hopper
