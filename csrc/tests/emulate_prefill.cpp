// The float32 kernels on a CPU, as a library with the C ABI's argument struct: `kda_emulate_prefill_f32(args, order)`.
//
//     g++ -O2 -std=c++17 -shared -fPIC -DKDA_EMULATE -o libkdakit_emulated.so csrc/tests/emulate_prefill.cpp
#include <cstdarg>

#include "emulate.h"

#include "../prefill/intra.cuh"
#include "../prefill/params.cuh"
#include "../prefill/shared_memory.h"
#include "../prefill/state.cuh"

static char message[512] = "";

kda_status kda::fail(kda_status status, const char *format, ...) {
  va_list rest;
  va_start(rest, format);
  vsnprintf(message, sizeof message, format, rest);
  va_end(rest);
  return status;
}

using namespace kda;

template <int K, int C, int BV, int DEPTH>
static void run(const kda_prefill_args &args, const Plan &plan, const Params &params, int order) {
  using I = Intra<K, K, C>;
  using S = State<K, K, C, BV, DEPTH>;
  static_assert(sizeof(typename I::Shared) <= sizeof memory && sizeof(typename S::Shared) <= sizeof memory, "shared memory of sm_90");
  for (int64_t cell = 0; cell < plan.cells; ++cell)
    emulate::run_block(unsigned(cell), I::THREADS, order, [&] { intra_kernel<K, K, C>(params); });
  const int64_t blocks = args.sequences * args.value_heads * (K / BV);
  for (int64_t block = 0; block < blocks; ++block)
    emulate::run_block(unsigned(block), S::THREADS, order, [&] { state_kernel<K, K, C, BV, DEPTH>(params); });
}

extern "C" size_t kda_emulate_record_bytes(const kda_prefill_args *args) {
  Plan plan;
  plan.C = args->chunk_size;
  return record_bytes(*args, plan);
}

extern "C" const char *kda_emulate_message() { return message; }

// What a device that gives a block `limit` bytes of shared memory would be told.
extern "C" int kda_emulate_check_shared(int K, int C, int limit) {
  if (K == 64) return C == 32 ? check_shared<64, 32>(limit) : check_shared<64, 64>(limit);
  return C == 32 ? check_shared<128, 32>(limit) : check_shared<128, 64>(limit);
}

// `args` complete: strides, scale, chunk_size, sequences and a workspace large enough. Returns 0, or 1 for sizes without a kernel.
extern "C" int kda_emulate_prefill_f32(const kda_prefill_args *args, int wide, int order) {
  Plan plan;
  plan.C = args->chunk_size;
  plan_slots(*args, plan);
  const Params params = make_params(*args, plan);
#define KDA_CASE(K_, C_)                                                \
  if (args->key_dim == K_ && args->chunk_size == C_) {                  \
    if (wide) run<K_, C_, K_ / 4, 1>(*args, plan, params, order);       \
    else run<K_, C_, K_ / 8, K_ + C_ == 192 ? 1 : 2>(*args, plan, params, order); \
    return 0;                                                           \
  }
  KDA_CASE(64, 32)
  KDA_CASE(64, 64)
  KDA_CASE(128, 32)
  KDA_CASE(128, 64)
  return 1;
}
