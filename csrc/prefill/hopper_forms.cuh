// What the prepare kernels are compiled for, which of them a call takes, and how their grids lie over chunks.
#pragma once
#include "hopper.h"

namespace kda::hopper {

constexpr uint32_t kGridRows = 32768;  // slots along the grid's second axis

#ifndef KDA_EMULATE
// `blocks` thread blocks per slot and value head, one beside the other.
inline dim3 grid_of(const HopperForward& p, int64_t slots, int blocks = 1) {
  const auto rows = static_cast<unsigned>(slots);
  return dim3(static_cast<unsigned>(p.HV * blocks), rows < kGridRows ? rows : kGridRows, (rows + kGridRows - 1) / kGridRows);
}
#endif
// Last chunks first: the scan starts with the first ones, which are then still in the cache.
__device__ __forceinline__ uint32_t slot_of_block() {
  return (gridDim.z - 1 - blockIdx.z) * kGridRows + gridDim.y - 1 - blockIdx.y;
}

// What a kernel is compiled for.
template <Gate G, bool B, bool W, bool L>
struct Form {
  static constexpr Gate gate = G;
  static constexpr bool bounded = B, gate_float32 = W, l2norm = L;
};
// run(Form) of a call.
template <Gate GATE, bool BOUNDED, typename Run>
auto with_form(const HopperForward& p, Run run) {
  if (p.gate_float32) return p.l2norm ? run(Form<GATE, BOUNDED, true, true>{}) : run(Form<GATE, BOUNDED, true, false>{});
  return p.l2norm ? run(Form<GATE, BOUNDED, false, true>{}) : run(Form<GATE, BOUNDED, false, false>{});
}
template <typename Run>
auto of_form(const HopperForward& p, Run run) {
  if (p.gate == Gate::bounded) return with_form<Gate::bounded, true>(p, run);
  if (p.gate == Gate::softplus) return with_form<Gate::softplus, false>(p, run);
  return p.safe ? with_form<Gate::log_decay, true>(p, run) : with_form<Gate::log_decay, false>(p, run);
}

}  // namespace kda::hopper
