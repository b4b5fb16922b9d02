// A call of the C ABI as the rebuild kernel takes it.
#pragma once
#include "../prefill/hopper_arguments.h"
#include "hopper_rebuild.h"

namespace kda::hopper {

// `forward`: args.forward with strides and defaults filled in.
inline HopperRebuild rebuild_of(const kda_rebuild_args &args, const kda_prefill_args &forward) {
  HopperRebuild p{};
  p.in = forward_of(forward);
  p.lower = args.lower, p.tiles = args.tiles, p.decay = args.decay, p.factors = args.factors, p.first = args.first, p.q_lost = args.q_lost;
  p.lower_float32 = args.lower_dtype == KDA_FLOAT32;
  p.group_bits = args.group == 8 ? 3 : args.group == 4 ? 2 : args.group == 2;
  return p;
}

}  // namespace kda::hopper
