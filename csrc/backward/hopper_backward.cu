// Host side of the bfloat16 backward over chunks: what it refuses, its launch.
#include "backward.h"
#include "hopper_gradient_arguments.h"

namespace kda {
namespace {

// Every tensor but those of q, k, g and beta, which the forward describes.
kda_status check_pointers(const kda_gradient_args &args, const kda_prefill_args &forward) {
  const struct {
    const char *name;
    const void *data;
    bool needed;
  } tensors[] = {
      {"lower", args.lower, true},   {"factors", args.factors, true},         {"states", args.states, true},
      {"d_states", args.d_states, true}, {"r", args.r, true},                 {"d_o", args.d_o, true},
      {"d_v", args.d_v, true},       {"alone", args.alone, false},            {"d_final", args.d_final, false},
      {"d_q", args.d_q, true},       {"d_k", args.d_k, true},                 {"d_g", args.d_g, true},
      {"d_beta", args.d_beta, true}, {"A_shares", args.A_shares, forward.A_log != nullptr && forward.gate != KDA_GATE_LOG_DECAY},
      {"bias_shares", args.bias_shares, forward.dt_bias != nullptr && forward.gate != KDA_GATE_LOG_DECAY},
  };
  for (const auto &x : tensors) {
    if (x.needed && x.data == nullptr) return fail(KDA_INVALID_ARGUMENT, "%s must not be NULL", x.name);
    if (reinterpret_cast<uintptr_t>(x.data) % 16) return fail(KDA_UNSUPPORTED, "%s must start at 16 bytes", x.name);
  }
  return KDA_OK;
}

kda_status check_rows(const char *name, const kda_tensor &x) {
  if (x.data == nullptr) return fail(KDA_INVALID_ARGUMENT, "forward->%s.data must not be NULL", name);
  if (reinterpret_cast<uintptr_t>(x.data) % 16 || x.batch_stride % 8 || x.token_stride % 8 || x.head_stride % 8)
    return fail(KDA_UNSUPPORTED, "forward->%s must start at 16 bytes and have strides that are multiples of 8 elements", name);
  return KDA_OK;
}

}  // namespace

kda_status gradient_bf16(const kda_gradient_args &args, const kda_prefill_args &forward) {
  if (forward.key_dim != 128 || forward.value_dim != 128)
    return fail(KDA_UNSUPPORTED, "the bfloat16 backward needs key_dim = value_dim = 128, got %lld and %lld", (long long)forward.key_dim,
                (long long)forward.value_dim);
  const int64_t slots = hopper::slots_of(forward);
  if (forward.tokens >= int64_t{1} << 30 || slots >= int64_t{1} << 31)
    return fail(KDA_UNSUPPORTED, "the bfloat16 backward takes fewer than 2^30 tokens and 2^31 chunks");
  if (args.lower_dtype != KDA_FLOAT16 && args.lower_dtype != KDA_FLOAT32)
    return fail(KDA_INVALID_ARGUMENT, "lower_dtype must be %d or %d, got %d", KDA_FLOAT16, KDA_FLOAT32, args.lower_dtype);
  if (args.d_q_dtype != KDA_BFLOAT16 && args.d_q_dtype != KDA_FLOAT32)
    return fail(KDA_INVALID_ARGUMENT, "d_q_dtype must be %d or %d, got %d", KDA_BFLOAT16, KDA_FLOAT32, args.d_q_dtype);
  if (args.group < 0 || args.group > 8 || (args.group & (args.group - 1)))
    return fail(KDA_INVALID_ARGUMENT, "group must be 0, 1, 2, 4 or 8, got %d", args.group);
  if (args.group > 1 && args.lower_dtype != KDA_FLOAT32)
    return fail(KDA_UNSUPPORTED, "group must be 0 or 1 where lower is float16, got %d", args.group);
  if (forward.batch * forward.tokens == 0) return KDA_OK;
  KDA_TRY(check_rows("q", forward.q));
  KDA_TRY(check_rows("k", forward.k));
  KDA_TRY(check_rows("g", forward.g));
  if (forward.beta.data == nullptr) return fail(KDA_INVALID_ARGUMENT, "forward->beta.data must not be NULL");
  if (reinterpret_cast<uintptr_t>(forward.dt_bias) % 16) return fail(KDA_UNSUPPORTED, "dt_bias must start at 16 bytes");
  KDA_TRY(check_pointers(args, forward));
  KDA_TRY(check_hopper());
  KDA_CUDA(hopper::launch_gradient(hopper::gradient_of(args, forward), slots, static_cast<cudaStream_t>(forward.stream)));
  return KDA_OK;
}

}  // namespace kda
