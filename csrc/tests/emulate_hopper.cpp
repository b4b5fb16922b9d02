// The bfloat16 prepare kernels on a CPU: `kda_emulate_prepare_bf16(args, order)` writes the records into args.workspace.
//
//     g++ -O2 -std=c++17 -shared -fPIC -DKDA_EMULATE -o libkdakit_hopper_emulated.so csrc/tests/emulate_hopper.cpp
#include "emulate_hopper.h"

#include "../include/kdakit.h"
#include "../prefill/hopper_arguments.h"
#include "../prefill/hopper_forgetting.cuh"
#include "../prefill/hopper_prepare.cu"
#include "../prefill/hopper_prepare_blocks.cu"
#include "../prefill/hopper_prepare_kept.cu"

using namespace kda;
using namespace kda::hopper;

template <typename Kernel>
static void run(const HopperForward &p, int64_t slots, int threads, int order, Kernel kernel, int blocks = 1) {
  gridDim = {unsigned(p.HV * blocks), unsigned(slots), 1};
  blockIdx.z = 0;
  for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
    for (unsigned x = 0; x < gridDim.x; ++x) emulate::run_block(x, threads, order, kernel);
}

extern "C" size_t kda_emulate_record_bytes_bf16(int64_t head) {
  return head == 64 ? Record<64>::record_bytes : Record<128>::record_bytes;
}

template <int HEAD>
static void prepare(const HopperForward &p, int64_t slots, int order) {
  of_form(p, [&](auto form) {
    using F = decltype(form);
    run(p, slots, Warp<HEAD>::threads, order, [&] { prepare_kernel<HEAD, F::gate, F::bounded, F::gate_float32, F::l2norm>(p); });
    return 0;
  });
}

static void prepare_record(const HopperForward &p, const Kept &kept, int64_t slots, int order) {
  of_records(p, [&](auto form, auto keep) {
    using F = decltype(form);
    const auto kernel = [&] { prepare_record_kernel<F::gate, F::bounded, F::gate_float32, F::l2norm, decltype(keep)::value>(p, kept); };
    run(p, slots, Warp<128>::threads, order, kernel);
    return 0;
  });
}

template <int HEAD>
static void prepare_kept(const HopperForward &p, const Kept &kept, int64_t slots, int order) {
  of_kept_form(p, [&](auto form) {
    using F = decltype(form);
    const auto kernel = [&] { prepare_kept_kernel<HEAD, F::gate, F::bounded, F::gate_float32, F::l2norm>(p, kept); };
    run(p, slots, Warp<HEAD>::threads, order, kernel);
    return 0;
  });
}

// `args` complete: strides, scale, sequences and a workspace of a record per slot and value head. Where it keeps something for a backward,
// `lower` and `solved` are written too, or `lower` and `factors`.
extern "C" void kda_emulate_prepare_bf16(const kda_prefill_args *args, int order) {
  const HopperForward p = forward_of(*args);
  const Kept kept = kept_of(*args);
  emulate::check_aligned(p.workspace, "a record", 128);
  if (kept.r) return prepare_record(p, kept, slots_of(*args), order);
  if (kept.lower)
    return p.head == 64 ? prepare_kept<64>(p, kept, slots_of(*args), order) : prepare_kept<128>(p, kept, slots_of(*args), order);
  p.head == 64 ? prepare<64>(p, slots_of(*args), order) : prepare<128>(p, slots_of(*args), order);
}

// The records of blocks, those of a chunk one after the other.
extern "C" void kda_emulate_prepare_blocks_bf16(const kda_prefill_args *args, int order) {
  const HopperForward p = forward_of(*args);
  emulate::check_aligned(p.workspace, "a record", 128);
  of_form(p, [&](auto form) {
    using F = decltype(form);
    const auto kernel = [&] { prepare_blocks_kernel<F::gate, F::bounded, F::gate_float32, F::l2norm>(p); };
    run(p, slots_of(*args), BlockPlaces::threads, order, kernel, 4);
    return 0;
  });
}
extern "C" size_t kda_emulate_block_record_bytes() { return BlockRecord::bytes; }

// The state S [keys, values] before the chunk of a slot into `checkpoints`, as the warps of the scan hold it.
template <int HEAD>
static void keep(const Kept &kept, int64_t slot, int64_t heads, int head, const float *S, int order) {
  emulate::run_block(0, 2 * HEAD, order, [&] {
    const int lane = threadIdx.x % 32, value = threadIdx.x / 32 * 16;
    float mine[HEAD / 2];
    uint32_t left[HEAD / 16][4];
    for (int i = 0; i < HEAD / 2; ++i)
      mine[i] = S[(8 * (i / 4) + 2 * (lane % 4) + i % 2) * HEAD + value + lane / 4 + 8 * (i / 2 % 2)];
    for (int i = 0; i < HEAD / 4; ++i) left[i / 4][i % 4] = kda::hopper::pack_bf16(mine[2 * i], mine[2 * i + 1]);
    if (kept.states_float32)
      keep_exact_state(kept, uint32_t(slot), heads, head, value, mine, lane);
    else
      keep_state(kept, uint32_t(slot), heads, head, value, left, lane);
  });
}
extern "C" void kda_emulate_keep_state(const kda_prefill_args *args, int64_t slot, int head, const float *S, int order) {
  const Kept kept = kept_of(*args);
  if (slot % kept.every) return;
  args->key_dim == 64 ? keep<64>(kept, slot, args->value_heads, head, S, order) : keep<128>(kept, slot, args->value_heads, head, S, order);
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
