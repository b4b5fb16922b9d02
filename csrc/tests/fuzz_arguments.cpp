// Random sizes, strides, pointers and options at the C interface, on a CPU: what it accepts is what 128-bit arithmetic says fits.
//
//     g++ -std=c++17 -DKDA_EMULATE -fsanitize=undefined -fno-sanitize-recover -o fuzz csrc/tests/fuzz_arguments.cpp && ./fuzz 200000 1
#include <cstdlib>
#include <random>

#include "emulate.h"

#include "../c_api.cu"
#include "../prefill/params.cuh"

static int64_t accepted = 0;

static void require(bool ok, const char *what, const kda_prefill_args &args) {
  if (ok) return;
  fprintf(stderr, "%s: batch %lld tokens %lld heads %lld value_heads %lld dims %lld %lld chunk %lld sequences %lld packed %d\n",
          what, (long long)args.batch, (long long)args.tokens, (long long)args.heads, (long long)args.value_heads, (long long)args.key_dim,
          (long long)args.value_dim, (long long)args.chunk_size, (long long)args.sequences, args.cu_seqlens != nullptr);
  abort();
}

namespace kda {

using Wide = __int128;

kda_status clear_padding(const kda_prefill_args &, int) { return KDA_OK; }  // a kernel: nothing to launch here

kda_status workspace_f32(const kda_prefill_args &args, size_t &bytes) {
  Plan plan;
  KDA_TRY(make_plan(args, plan));
  const Wide T = args.tokens, N = args.sequences, C = plan.C;
  const Wide slots = args.cu_seqlens ? T / C + N : (T + C - 1) / C, cells = slots * args.batch * args.value_heads;
  require(plan.cells == cells && cells <= INT32_MAX, "cells wrapped", args);
  require(N * args.value_heads * (args.value_dim / 8) <= INT32_MAX, "blocks wrapped", args);
  bytes = size_t(plan.cells) * record_bytes(args, plan);
  require(Wide(bytes) == cells * Wide(record_bytes(args, plan)), "bytes wrapped", args);
  return KDA_OK;
}

// Where the kernels would run: every element that they would touch has an address.
kda_status prefill_f32(const kda_prefill_args &args) {
  const struct { const kda_tensor *x; int64_t heads, dim; } tensors[] = {
    {&args.q, args.heads, args.key_dim}, {&args.k, args.heads, args.key_dim}, {&args.v, args.value_heads, args.value_dim},
    {&args.g, args.value_heads, args.key_dim}, {&args.beta, args.value_heads, 1}, {&args.o, args.value_heads, args.value_dim}};
  if (args.batch > 0 && args.tokens > 0)
    for (const auto &t : tensors) {
      const Wide rows = Wide(args.batch - 1) * t.x->batch_stride + Wide(t.heads - 1) * t.x->head_stride;
      const Wide last = rows + Wide(args.tokens - 1) * t.x->token_stride + t.dim;
      require(last * 4 <= INT64_MAX, "an address wrapped", args);
      require(t.x->data != nullptr && reinterpret_cast<uintptr_t>(t.x->data) % 4 == 0, "a pointer is misaligned", args);
    }
  for (const void *x : {(const void *)args.initial_state, (const void *)args.final_state, (const void *)args.A_log,
                        (const void *)args.dt_bias})
    require(reinterpret_cast<uintptr_t>(x) % 4 == 0, "a pointer is misaligned", args);
  require(Wide(args.sequences) * args.value_heads * args.key_dim * args.value_dim * 4 <= INT64_MAX, "the states wrapped", args);
  ++accepted;
  return KDA_OK;
}

}  // namespace kda

static std::mt19937_64 engine;

static int64_t below(int64_t n) { return int64_t(engine() % uint64_t(n)); }

static int64_t size_from(std::initializer_list<int64_t> usual) {
  if (below(8)) return usual.begin()[below(int64_t(usual.size()))];
  const int64_t any = int64_t(1) << below(63);
  const int64_t odd[] = {any, any - 1, -any, any + 1, INT64_MAX, INT64_MIN, 0};
  return odd[below(7)];
}

static void *pointer() {
  const uintptr_t base = uintptr_t(1 + below(1 << 20)) << 12;
  return reinterpret_cast<void *>(below(12) ? base : below(2) ? base + uintptr_t(below(16)) : 0);
}

int main(int argc, char **argv) {
  const int64_t trials = argc > 1 ? atoll(argv[1]) : 100000;
  engine.seed(argc > 2 ? uint64_t(atoll(argv[2])) : 0);
  int64_t refused = 0;
  for (int64_t n = 0; n < trials; ++n) {
    kda_prefill_args args = KDA_PREFILL_ARGS_INIT;
    if (!below(50)) args.size = size_t(below(2 * int64_t(sizeof args)));
    args.batch = size_from({0, 1, 1, 2, 7}), args.tokens = size_from({0, 1, 100, 5000});
    args.heads = size_from({1, 2, 3}), args.value_heads = below(4) ? args.heads : size_from({2, 4, 6});
    args.key_dim = size_from({64, 128}), args.value_dim = below(8) ? args.key_dim : size_from({64, 128});
    args.chunk_size = below(10) ? 32 << below(2) : size_from({0, 16, 17});
    for (kda_tensor *x : {&args.q, &args.k, &args.v, &args.g, &args.beta, &args.o}) {
      x->data = pointer();
      if (!below(40)) x->dtype = int32_t(below(4)) - 1;
      if (below(8)) continue;
      x->batch_stride = size_from({0, 1, 64, 640000}), x->head_stride = size_from({0, 64, 6400});
      x->token_stride = size_from({64, 128, 256});
    }
    args.initial_state = static_cast<float *>(pointer()), args.final_state = static_cast<float *>(pointer());
    if (!below(8)) args.w = pointer(), args.u = pointer();
    args.gate = int32_t(below(3)), args.lower_bound = -float(below(7)), args.beta_kind = int32_t(below(3));
    args.safe_gate = int32_t(below(2));
    args.A_log = static_cast<float *>(pointer()), args.dt_bias = static_cast<float *>(pointer());
    if (!below(3)) args.cu_seqlens = pointer(), args.cu_seqlens_64 = int32_t(below(2)), args.sequences = size_from({1, 2, 9});
    size_t bytes = 0;
    const kda_status asked = kda_prefill_workspace_f32(&args, &bytes);
    args.workspace = below(20) ? reinterpret_cast<void *>(uintptr_t(1) << 30) : pointer();
    args.workspace_size = below(20) ? bytes : bytes / 2;
    const kda_status ran = kda_prefill_f32(&args);
    if (asked != KDA_OK && ran == KDA_OK) require(false, "runs what has no workspace", args);
    if (ran == KDA_OK) continue;
    ++refused;
    require(kda_last_error()[0] != 0, "refused without a word", args);
  }
  printf("accepted %lld, refused %lld\n", (long long)accepted, (long long)refused);
  return accepted > 0 && refused > 0 ? 0 : 1;
}
