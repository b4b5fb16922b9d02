// A call of the C ABI as the reverse kernel takes it.
#pragma once
#include "../prefill/hopper_arguments.h"
#include "hopper_reverse.h"

namespace kda::hopper {

// `forward`: args.forward with strides and defaults filled in.
inline HopperReverse reverse_of(const kda_reverse_args &args, const kda_prefill_args &forward) {
  HopperReverse p{};
  p.in = forward_of(forward);
  p.tiles = args.tiles, p.solved = args.solved, p.decay = args.decay, p.factors = args.factors;
  p.d_o = args.d_o, p.d_final = args.d_final, p.d_states = args.d_states, p.d_v = args.d_v;
  p.alone = static_cast<uint16_t *>(args.alone), p.y_lost = static_cast<uint16_t *>(args.y_lost), p.d_initial = args.d_initial;
  p.after_first = args.after_first;
  p.half_solved = args.k_solved_dtype == KDA_FLOAT16;
  p.group_bits = args.group == 8 ? 3 : args.group == 4 ? 2 : args.group == 2;
  p.channels = args.channels, p.d_states_lost = args.d_states_lost, p.q_lost = args.q_lost;
  p.record = static_cast<const uint8_t *>(args.record);
  return p;
}

}  // namespace kda::hopper
