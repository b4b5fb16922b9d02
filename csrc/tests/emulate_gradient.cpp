// The bfloat16 gradient kernel on a CPU: `kda_emulate_gradient_bf16(args, blocks, order)`.
//
//     g++ -O2 -std=c++17 -shared -fPIC -DKDA_EMULATE -o libkdakit_gradient_emulated.so csrc/tests/emulate_gradient.cpp
#include "emulate_hopper.h"

#include "../backward/hopper_gradient_arguments.h"
#include "../backward/hopper_gradient.cu"

using namespace kda;
using namespace kda::hopper;

template <Gate GATE, bool BOUNDED, int HEAD>
static void run(const Given<HEAD> &p, int64_t items, unsigned blocks, int order) {
  gridDim = {blocks, 1, 1};
  for (unsigned block = 0; block < blocks; ++block)
    emulate::run_block(block, Seat<HEAD>::kThreads, order, [&] {
      p.in.gate_float32 ? gradient_kernel<GATE, BOUNDED, true, HEAD>(p, items) : gradient_kernel<GATE, BOUNDED, false, HEAD>(p, items);
    });
}

template <int HEAD>
static void run_gate(const Given<HEAD> &p, int64_t items, unsigned blocks, int order) {
  switch (p.in.gate) {
    case Gate::bounded: return run<Gate::bounded, true, HEAD>(p, items, blocks, order);
    case Gate::softplus: return run<Gate::softplus, false, HEAD>(p, items, blocks, order);
    case Gate::log_decay:
      return p.in.safe ? run<Gate::log_decay, true, HEAD>(p, items, blocks, order)
                       : run<Gate::log_decay, false, HEAD>(p, items, blocks, order);
  }
}

// `args` complete, the forward's strides, scale and sequences too.
extern "C" void kda_emulate_gradient_bf16(const kda_gradient_args *args, int blocks, int order) {
  const HopperGradient64 p = gradient_of(*args, *args->forward);
  const int64_t items = slots_of(*args->forward) * p.in.HV;
  args->forward->key_dim == 64 ? run_gate<64>(p, items, blocks, order) : run_gate<128>(p, items, blocks, order);
}
