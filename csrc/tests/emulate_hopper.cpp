// The bfloat16 prepare kernel on a CPU: `kda_emulate_prepare_bf16(args, order)` writes the records into args.workspace.
//
//     g++ -O2 -std=c++17 -shared -fPIC -DKDA_EMULATE -o libkdakit_hopper_emulated.so csrc/tests/emulate_hopper.cpp
#include "emulate_hopper.h"

#include "../include/kdakit.h"
#include "../prefill/hopper_arguments.h"
#include "../prefill/hopper_forgetting.cuh"
#include "../prefill/hopper_prepare.cu"

using namespace kda;
using namespace kda::hopper;

template <Gate GATE, bool BOUNDED>
static void run(const HopperForward &p, int64_t slots, int order) {
  gridDim = {unsigned(p.HV), unsigned(slots), 1};
  blockIdx.z = 0;
  for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
    for (unsigned head = 0; head < gridDim.x; ++head)
      emulate::run_block(head, kWarps * 32, order, [&] {
        if (p.gate_float32) p.l2norm ? prepare_kernel<GATE, BOUNDED, true, true>(p) : prepare_kernel<GATE, BOUNDED, true, false>(p);
        else p.l2norm ? prepare_kernel<GATE, BOUNDED, false, true>(p) : prepare_kernel<GATE, BOUNDED, false, false>(p);
      });
}

extern "C" size_t kda_emulate_record_bytes_bf16() { return kRecordBytes; }

// `args` complete: strides, scale, sequences and a workspace of a record per slot and value head.
extern "C" void kda_emulate_prepare_bf16(const kda_prefill_args *args, int order) {
  const HopperForward p = forward_of(*args);
  const int64_t slots = slots_of(*args);
  switch (p.gate) {
    case Gate::bounded: return run<Gate::bounded, true>(p, slots, order);
    case Gate::softplus: return run<Gate::softplus, false>(p, slots, order);
    case Gate::log_decay: return p.safe ? run<Gate::log_decay, true>(p, slots, order) : run<Gate::log_decay, false>(p, slots, order);
  }
}

// How many of the `chunks` chunks up to the record `last`, each `step` bytes after the one before, forget what was before them; 0: none do.
extern "C" int kda_emulate_deciding(const uint8_t *last, int64_t step, int chunks, int order) {
  int found[384];
  emulate::run_block(0, 384, order, [&] {
    const int few = deciding<256>(last, step, chunks, reinterpret_cast<float *>(memory));
    const int again = deciding<128>(last, step, chunks, reinterpret_cast<float *>(memory));
    found[threadIdx.x] = few == again ? few : -1;
  });
  for (int thread = 1; thread < 384; ++thread)
    if (found[thread] != found[0]) return -1;
  return found[0];
}
