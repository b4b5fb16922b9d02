// From the C ABI's arguments to the kernels' parameters: chunks, the workspace's parts, pointers.
#pragma once

#include <cstddef>

#include "chunks.cuh"

namespace kda {

struct Plan {
  int64_t C, slots, cells;  // slots per row, cells = rows * slots
};

inline void plan_slots(const kda_prefill_args &args, Plan &plan) {
  plan.slots = args.cu_seqlens ? args.tokens / plan.C + args.sequences : (args.tokens + plan.C - 1) / plan.C;
  plan.cells = args.batch * args.value_heads * plan.slots;
}

// Parts of the workspace, in floats; each starts at a multiple of 64.
struct Layout {
  size_t q_decayed, k_decayed, A_qk, decay, w, u, total;

  Layout(const kda_prefill_args &args, const Plan &plan) {
    size_t at = 0;
    auto take = [&](int64_t floats) {
      const size_t here = at;
      at += (size_t(plan.cells) * floats + 63) / 64 * 64;
      return here;
    };
    const int64_t C = plan.C, K = args.key_dim, V = args.value_dim;
    q_decayed = take(C * K), k_decayed = take(C * K), A_qk = take(C * C), decay = take(K);
    w = args.w ? 0 : take(C * K), u = args.u ? 0 : take(C * V);
    total = at;
  }
};

inline Params make_params(const kda_prefill_args &args, const Plan &plan) {
  const Layout at(args, plan);
  float *base = static_cast<float *>(args.workspace);
  Params params{};
  params.q = args.q, params.k = args.k, params.v = args.v, params.g = args.g, params.beta = args.beta, params.o = args.o;
  params.A_log = args.gate == KDA_GATE_LOG_DECAY ? nullptr : args.A_log;
  params.dt_bias = args.gate == KDA_GATE_LOG_DECAY ? nullptr : args.dt_bias;
  params.initial_state = args.initial_state, params.final_state = args.final_state;
  params.mid.w = args.w ? static_cast<float *>(args.w) : base + at.w;
  params.mid.u = args.u ? static_cast<float *>(args.u) : base + at.u;
  params.mid.q_decayed = base + at.q_decayed, params.mid.k_decayed = base + at.k_decayed;
  params.mid.A_qk = base + at.A_qk, params.mid.decay = base + at.decay;
  params.sequences = {args.cu_seqlens, args.sequences, args.tokens, args.cu_seqlens_64 != 0, plan.slots};
  params.value_heads = args.value_heads, params.group = args.value_heads / args.heads;
  params.scale = args.scale, params.lower_bound = args.lower_bound;
  params.gate = args.gate, params.beta_kind = args.beta_kind, params.l2norm = args.l2norm, params.state_v_first = args.state_v_first;
  return params;
}

}  // namespace kda
