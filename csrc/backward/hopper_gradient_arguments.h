// A call of the C ABI as the gradient kernel takes it.
#pragma once
#include "../prefill/hopper_arguments.h"
#include "hopper_gradient.h"

namespace kda::hopper {

// `forward`: args.forward with strides and defaults filled in.
inline HopperGradient64 gradient_of(const kda_gradient_args &args, const kda_prefill_args &forward) {
  HopperGradient64 p{};
  p.in = forward_of(forward);
  p.lower = args.lower, p.factors = args.factors, p.states = args.states, p.d_states = args.d_states;
  p.r = args.r, p.d_o = args.d_o, p.d_v = args.d_v, p.alone = args.alone, p.d_final = args.d_final;
  p.before_last = args.before_last, p.after_first = args.after_first;
  p.d_q = args.d_q, p.d_k = args.d_k, p.d_g = args.d_g, p.d_beta = args.d_beta;
  p.states_lost = args.states_lost, p.d_states_lost = args.d_states_lost;
  p.A_shares = args.A_shares, p.bias_shares = args.bias_shares;
  p.lower_float32 = args.lower_dtype == KDA_FLOAT32, p.wide = args.d_q_dtype == KDA_FLOAT32;
  p.group_bits = args.group == 8 ? 3 : args.group == 4 ? 2 : args.group == 2;
  return p;
}

}  // namespace kda::hopper
