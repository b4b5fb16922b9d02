// The bfloat16 kernel that makes a forward's tiles again, on a CPU: `kda_emulate_rebuild_bf16(args, order)`.
//
//     g++ -O2 -std=c++17 -shared -fPIC -DKDA_EMULATE -o libkdakit_rebuild_emulated.so csrc/tests/emulate_rebuild.cpp
#include "emulate_hopper.h"

#include "../backward/hopper_rebuild_arguments.h"
#include "../backward/hopper_rebuild.cu"

using namespace kda;
using namespace kda::hopper;

template <int HEAD, Gate GATE>
static void run(const HopperRebuild &p) {
  if (p.in.gate_float32) return p.lower_float32 ? rebuild_kernel<HEAD, GATE, true, true>(p) : rebuild_kernel<HEAD, GATE, true, false>(p);
  p.lower_float32 ? rebuild_kernel<HEAD, GATE, false, true>(p) : rebuild_kernel<HEAD, GATE, false, false>(p);
}

template <int HEAD>
static void run_all(const HopperRebuild &p, int64_t slots, int order) {
  gridDim = {unsigned(p.in.HV), unsigned(slots), 1};
  for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
    for (unsigned head = 0; head < gridDim.x; ++head)
      emulate::run_block(head, Warp<HEAD>::threads, order, [&] {
        switch (p.in.gate) {
          case Gate::bounded: return run<HEAD, Gate::bounded>(p);
          case Gate::softplus: return run<HEAD, Gate::softplus>(p);
          case Gate::log_decay: return run<HEAD, Gate::log_decay>(p);
        }
      });
}

// `args` complete, the forward's strides, scale and sequences too.
extern "C" void kda_emulate_rebuild_bf16(const kda_rebuild_args *args, int order) {
  const HopperRebuild p = rebuild_of(*args, *args->forward);
  p.in.head == 64 ? run_all<64>(p, slots_of(*args->forward), order) : run_all<128>(p, slots_of(*args->forward), order);
}
